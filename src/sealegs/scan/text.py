"""Counts a block of text documents, and finds everything that text shows without a model."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sealegs.batching.stratified import RARE_BELOW, Ints
from sealegs.batching.tokens import token_counts
from sealegs.report.commands.scan import Kind
from sealegs.scan.blocks import TextDocuments
from sealegs.scan.counts import Action, Counts, DocumentFinding, Places, SourceSizes, document_key, source_key
from sealegs.scan.encoding import REPLACEMENT, controls, mojibake, not_utf8, suspects
from sealegs.scan.repeats import Repeat, repeats
from sealegs.scan.words import Words, keys, words

LONGEST_WORD = 1000
"""ASCII characters without a space: a longer run is a table, a key or a picture, not text."""
ONE_CHARACTER = 256
"""One letter or digit so often on end, shorter than that: 32 tokens or so, where a tokenizer joins eight."""
LEAST_LETTERS = 0.25
"""Smallest share of letters and digits among the characters that are not spaces: with fewer it is a drawing."""
LEAST_MARKS = 200
"""Fewest characters of a document to which that share applies."""
SPOILT = 0.001
"""Share of wrong characters from which on a document is dropped, not only deferred."""
DEGENERATE = 0.1
"""The same for the share that is repeated, or runs without a space."""
_SHOWN = 60


Encode: TypeAlias = Callable[[list[str]], tuple[NDArray[Any], Ints]]
"""Encodes documents: their token ids end to end, and where each document starts."""


def look_at_text(text: TextDocuments, part: int, *, longest: int, encode: Encode | None = None) -> Counts:
    """Count a block, and find what is wrong with its documents.

    ``longest`` is in tokens of ``encode``, or in words without it.
    """
    found = words(text.data, text.starts)
    unit = "word" if encode is None else "token"
    if encode is None:
        tokens, firsts = keys(text.data, found), found.firsts[:-1]
        counted, places = _characters(text, part)
        again = [each for each in repeats(tokens, firsts) if _is_so(text.data, found, each)]
        of_one = list(_one_character(text, found))
    else:
        tokens, firsts = encode(texts(text))
        counted, places = count_ids(tokens, firsts, document_key(part, text.numbers))
        again, of_one = list(repeats(tokens, firsts)), []
    lengths = np.diff(firsts, append=len(tokens))
    is_empty = np.diff(found.firsts) == 0
    findings = [
        *(repeated(each, _place_of(each, text, found, encode), unit, int(lengths[each.document])) for each in again),
        *((int(n), "empty", "drop", "no text", "") for n in np.flatnonzero(is_empty)),
        *(
            (int(n), "over-long", "defer", f"{lengths[n]:,} {unit}s", excerpt(_document(text, n)))
            for n in np.flatnonzero(lengths > longest)
        ),
        *of_one,
        *_unbroken(text, found),
        *_symbols(text, found),
        *_misread(text, found),
    ]
    with_text = np.flatnonzero(~is_empty)
    return Counts(
        tokens=counted,
        places=places,
        digests=np.array([digest(_document(text, number).strip()) for number in with_text], np.uint64),
        documents=document_key(part, text.numbers[with_text]),
        origins=np.full(len(with_text), source_key(text.source), np.uint32),
        sources={text.source: SourceSizes.of(lengths, len(text.data))},
        found=Counter((text.source, kind) for _, kind, *_ in findings),
        findings=numbered(findings, part, text.numbers),
        units=frozenset(["characters" if encode is None else "tokens"]),
    )


Found: TypeAlias = tuple[int, Kind, Action, str, str]
"""Number of the document in the block, kind, action, text, excerpt."""


def numbered(findings: list[Found], part: int, numbers: Ints) -> tuple[DocumentFinding, ...]:
    """Findings about the documents of a block."""
    return tuple(
        DocumentFinding(part, int(numbers[document]), kind, action, what, about)
        for document, kind, action, what, about in sorted(findings)
    )


def digest(document: bytes | memoryview) -> int:
    """A digest of a document: two of a hundred million collide once in four thousand corpora."""
    return int.from_bytes(hashlib.blake2b(document, digest_size=8).digest(), "little")


def count_ids(ids: NDArray[Any], starts: Ints, documents: Ints, offset: int = 0) -> tuple[Ints, Places]:
    """How often each id occurs in a block, and the places of ids that are rare in it; ``documents`` are keys."""
    counted = token_counts(ids)
    at = np.flatnonzero((counted < RARE_BELOW)[ids])
    return counted, Places(ids[at].astype(np.int64), documents[_holding(starts, at)], offset + at)


def _holding(starts: Ints, places: Ints) -> Ints:
    """The document that each place is in."""
    return np.searchsorted(starts, places, side="right") - 1


def _characters(text: TextDocuments, part: int) -> tuple[Ints, Places]:
    """The same for the characters of a text: ASCII as bytes, others decoded."""
    raw = np.frombuffer(text.data, np.uint8)
    counted = np.bincount(raw, minlength=128)[:128]
    rare = np.flatnonzero((counted > 0) & (counted < RARE_BELOW)).tolist()
    at = np.array([place for byte in rare for place in _places_of(byte, text.data)], np.int64)
    points = raw[at].astype(np.int64)
    if not text.data.isascii():
        beyond = np.frombuffer(text.data.decode(errors="replace").encode("utf-32-le"), np.uint32)
        beyond = beyond[beyond >= 128]
        counted = np.append(counted, np.bincount(beyond, minlength=128)[128:])
        rarely = np.flatnonzero((counted < RARE_BELOW)[beyond])
        leads = np.flatnonzero(raw >= 0xC0)  # where each of them begins, if all are valid
        leads = leads if len(leads) else np.flatnonzero(raw >= 0x80)
        at = np.append(at, leads[np.minimum(rarely, len(leads) - 1)])
        points = np.append(points, beyond[rarely])
    return counted, Places(points, document_key(part, text.numbers)[_holding(text.starts, at)], at)


def _places_of(byte: int, data: bytes) -> Iterator[int]:
    place = data.find(byte)
    while place >= 0:
        yield place
        place = data.find(byte, place + 1)


def texts(block: TextDocuments) -> list[str]:
    """The documents of a block as they are encoded."""
    return [_document(block, number).decode(errors="replace") for number in range(len(block.starts))]


def _document(text: TextDocuments, number: Any) -> bytes:
    end = int(text.starts[number + 1]) if number + 1 < len(text.starts) else len(text.data)
    return text.data[int(text.starts[number]) : end]


def excerpt(document: bytes, place: int = 0) -> str:
    """The text around a place in a document, on one line."""
    start, stop = _whole(document, max(0, place - _SHOWN // 3)), _whole(document, place + _SHOWN)
    return shown(document[start:stop].decode(errors="replace"))


def _whole(document: bytes, place: int) -> int:
    """Where the next character begins."""
    sound = (at for at in range(place, place + 4) if at >= len(document) or document[at] & 0xC0 != 0x80)
    return next(sound, place)


def _about(text: TextDocuments, place: int) -> str:
    number = int(_holding(text.starts, np.array(place)))
    return excerpt(_document(text, number), place - int(text.starts[number]))


def shown(text: str) -> str:
    """Text on one line, with escapes for what cannot be printed."""
    flat = text.strip()[: 2 * _SHOWN]
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in flat)


# Degenerate text


def _is_so(data: bytes, found: Words, each: Repeat) -> bool:
    """Whether the words are equal, and not only their numbers."""
    span = [
        data[found.starts[word] : found.ends[word]] for word in range(each.start, each.start + each.span * each.times)
    ]
    return span == span[: each.span] * each.times


def _place_of(each: Repeat, text: TextDocuments, found: Words, encode: Encode | None) -> str:
    """The text around it; for tokens only the document is known."""
    return _about(text, int(found.starts[each.start] if encode is None else text.starts[each.document]))


def repeated(each: Repeat, about: str, unit: str, length: int) -> Found:
    """The finding about a repeated span in a document of ``length`` tokens."""
    what = f"{each.span} {unit}{'s' * (each.span > 1)}, {each.times:,} times on end"
    return each.document, "repeats", _action(each.span * each.times, length, DEGENERATE), what, about


def _action(bad: int, of: int, limit: float) -> Action:
    """The action: defer if the rest of a document is worth reading, otherwise drop."""
    return "drop" if bad >= limit * of else "defer"


def _one_character(text: TextDocuments, found: Words) -> Iterator[Found]:
    """Findings of words that are one letter or digit again and again, the longest of each document: to who compares
    words it is one word. A row of marks is a ruler."""
    sizes = found.ends - found.starts
    longest: dict[int, tuple[int, int]] = {}
    for place in np.flatnonzero((sizes >= ONE_CHARACTER) & (sizes < LONGEST_WORD)):
        start, size = int(found.starts[place]), int(sizes[place])
        characters = set(text.data[start : start + size])
        if len(characters) == 1 and bytes(characters).isalnum():
            document = int(_holding(text.starts, np.array(start)))
            longest[document] = max(longest.get(document, (0, 0)), (size, start))
    for document, (size, start) in longest.items():
        action = _action(size, len(_document(text, document)), DEGENERATE)
        yield document, "repeats", action, f"1 character, {size:,} times on end", _about(text, start)


def _unbroken(text: TextDocuments, found: Words) -> Iterator[Found]:
    """Findings of runs without a space."""
    if not len(found.starts):
        return
    begins = np.append(True, found.ends[:-1] != found.starts[1:])
    begins[found.firsts[:-1][found.firsts[:-1] < len(begins)]] = True  # a new document is a break, too
    chains = np.flatnonzero(begins)
    last = np.append(chains[1:] - 1, len(found.ends) - 1)
    sizes = found.ends[last] - found.starts[chains]
    longest: dict[int, tuple[int, int]] = {}
    for chain in np.flatnonzero(sizes >= LONGEST_WORD):
        start, size = int(found.starts[chains[chain]]), int(sizes[chain])
        run = np.frombuffer(text.data[start : start + size], np.uint8)
        if np.count_nonzero(run < 0x80) >= LONGEST_WORD:  # not for scripts without spaces
            document = int(_holding(text.starts, np.array(start)))
            longest[document] = max(longest.get(document, (0, 0)), (size, start))
    for document, (size, start) in longest.items():
        action = _action(size, len(_document(text, document)), DEGENERATE)
        yield document, "unbroken", action, f"{size:,} characters without a space", _about(text, start)


def _symbols(text: TextDocuments, found: Words) -> Iterator[Found]:
    """Findings of documents made of marks."""
    sizes = found.summed(found.lengths)
    letters = found.summed(np.where(found.is_letters, found.lengths, 0))
    for number in np.flatnonzero((sizes >= LEAST_MARKS) & (letters < LEAST_LETTERS * sizes)):
        share = letters[number] / sizes[number]
        yield int(number), "symbols", "drop", f"{share:.0%} letters and digits", excerpt(_document(text, number))


# Misread text


def _misread(text: TextDocuments, found: Words) -> Iterator[Found]:
    places = [found.controls]
    if not text.data.isascii():
        places += [suspects(text.data), _wrong_bytes(text)]
    documents = np.unique(_holding(text.starts, np.concatenate(places)))
    for number in documents.tolist():
        document = _document(text, number)
        bad = not_utf8(document)
        if bad is not None:
            line = document[:bad].count(b"\n") + 1
            what = f"byte {document[bad]:#04x} in its line {line}"
            yield number, "not utf-8", "drop", what, excerpt(document, bad)
        read_as_latin = mojibake(document)
        if read_as_latin:
            yield _spoilt(number, "mojibake", "UTF-8 read as Latin-1", read_as_latin, document)
        replaced = document.count(REPLACEMENT)
        if replaced:
            at = (replaced, document.find(REPLACEMENT))
            yield _spoilt(number, "replaced", "replacement character", at, document)
        wrong = controls(document)
        if wrong and not read_as_latin and bad is None:
            yield _spoilt(number, "control", "control character", wrong, document)


def _spoilt(number: int, kind: Kind, what: str, found: tuple[int, int], document: bytes) -> Found:
    count, place = found
    told = f"{what}: {count:,} in {len(document):,} bytes"
    return number, kind, _action(count, len(document), SPOILT), told, excerpt(document, place)


def _wrong_bytes(text: TextDocuments) -> Ints:
    """A place in each document that is not UTF-8."""
    try:
        text.data.decode()
    except UnicodeDecodeError:
        bad = [n for n in range(len(text.starts)) if not_utf8(_document(text, n)) is not None]
        return text.starts[bad]
    return np.empty(0, np.int64)
