"""Reads text files into blocks of documents: divided by blank lines, one per file, or one JSON object per line."""

import gzip
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Annotated, Any, BinaryIO, TypeAlias

import msgspec
import numpy as np

from sealegs.errors import SourceError
from sealegs.scan.blocks import (
    BLOCK_BYTES,
    LARGEST_DOCUMENT,
    PART_BYTES,
    End,
    Ids,
    Part,
    Read,
    Unreadable,
    Ways,
    joined,
)
from sealegs.scan.files import opened, size_of

_BLANK = re.compile(rb"\n(?:[ \t\r\f\v]*\n)+")
_LINE = re.compile(rb"\n")
_GLANCE = 1 << 13
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def ranges(name: str, format: str) -> list[tuple[int, int]]:  # noqa: A002 - it is one
    """Pieces of a file that begin and end with a document."""
    size = size_of(name)
    if name.endswith(".gz"):
        return [(0, size)]  # can only be read from its beginning
    pattern = _LINE if format == "lines" else _BLANK
    cuts = [0]
    if size <= PART_BYTES:
        return [(0, size)]
    with opened(name) as file:
        while size - cuts[-1] > PART_BYTES:
            cuts.append(_next_cut(file, cuts[-1] + PART_BYTES, pattern, size))
    return [(a, b) for a, b in zip(cuts, [*cuts[1:], size], strict=True) if a < b or size == 0]


def _next_cut(file: BinaryIO, place: int, pattern: re.Pattern[bytes], size: int) -> int:
    window = b""
    while place < size:
        file.seek(place)
        window = file.read(1 << 16)
        if match := pattern.search(window):
            return place + match.end()
        place += max(len(window) - 256, 1)  # a blank line may be cut in two
    return size


def is_text(name: str) -> str | None:
    """Why a file is not readable text, judged by its beginning; None if it is."""
    with opened(name) as file:
        glance = file.read(_GLANCE)
    if glance.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "UTF-16; save it as UTF-8"
    return "a binary file" if b"\0" in glance else None


def read_paragraphs(part: Part, ways: Ways) -> Read:
    """Read documents that blank lines divide, as ``sealegs train`` reads a .txt file."""
    number = 0
    with _opened(part) as file:
        for data in _pieces(file, part, _BLANK):
            if number == 0 and part.start == 0:
                data = data.removeprefix(_BYTE_ORDER_MARK)
            edges = [0, *(match.end() for match in _BLANK.finditer(data)), len(data)]
            documents = [data[a:b] for a, b in pairwise(edges) if not data[a:b].isspace() and a < b]
            if documents:
                yield joined(documents, range(number, number + len(documents)), part.source)
            number += len(documents)
    if not number:
        yield Unreadable(0, "has no text in it")
    yield End(number)


def read_whole(part: Part, ways: Ways) -> Read:
    """Read files that are a document each."""
    documents: list[bytes] = []
    numbers: list[int] = []
    for number, name in enumerate(part.files):
        try:
            reason = is_text(name)
            with opened(name) as file:
                data = file.read(LARGEST_DOCUMENT)
        except OSError as error:
            reason = f"cannot be read ({error.strerror or error})"
        if reason:
            yield Unreadable(number, reason)
            continue
        documents.append(data.removeprefix(_BYTE_ORDER_MARK))
        numbers.append(number)
        if sum(map(len, documents)) > BLOCK_BYTES:
            yield joined(documents, numbers, part.source)
            documents, numbers = [], []
    if documents:
        yield joined(documents, numbers, part.source)
    yield End(len(part.files))


def read_lines(part: Part, ways: Ways) -> Read:
    """Read one JSON object per line, of which one field is the document."""
    decode = _decoder(ways)
    number = 0
    with _opened(part) as file:
        for data in _pieces(file, part, _LINE):
            texts: dict[str, tuple[list[bytes], list[int]]] = defaultdict(lambda: ([], []))
            rows: dict[str, tuple[list[Any], list[int]]] = defaultdict(lambda: ([], []))
            for line in data.removesuffix(b"\n").split(b"\n"):
                number += 1
                if not line.strip():
                    continue
                try:
                    value, source = decode(line)
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, SourceError) as error:
                    yield Unreadable(number - 1, _reason(error, line))
                    continue
                kind = texts if isinstance(value, str) else rows
                values, numbers = kind[source or part.source]
                values.append(value.encode() if isinstance(value, str) else value)  # type: ignore[arg-type]
                numbers.append(number - 1)
            yield from (joined(values, numbers, source) for source, (values, numbers) in texts.items())
            for source, (lists, numbers) in rows.items():
                lengths = np.array([len(each) for each in lists], np.int64)
                ids = np.array([token for each in lists for token in each], np.int64)
                yield Ids(ids, np.cumsum(lengths) - lengths, np.array(numbers, np.int64), source, 0)
    yield End(number)


_Token: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


def _decoder(ways: Ways) -> Callable[[bytes], tuple[str | list[int], str | None]]:
    fields: list[Any] = [("value", str | list[_Token] | None, None)]
    names = {"value": ways.field}
    if ways.source is not None:
        fields.append(("source", str | None, None))
        names["source"] = ways.source
    decode = msgspec.json.Decoder(msgspec.defstruct("Line", fields, rename=names)).decode

    def decoded(line: bytes) -> tuple[str | list[int], str | None]:
        found: Any = decode(line)
        if found.value is None:
            raise SourceError(f"no field {ways.field!r}; give --field")
        return found.value, getattr(found, "source", None)

    return decoded


def _reason(error: Exception, line: bytes) -> str:
    if isinstance(error, SourceError):
        return str(error)
    start = line[:40].decode(errors="replace")
    return f"not a JSON object with text ({error}): {start!r}"


@contextmanager
def _opened(part: Part) -> Iterator[BinaryIO]:
    with opened(part.file) as file:
        if part.file.endswith(".gz"):
            with gzip.open(file, "rb") as unpacked:
                yield unpacked  # type: ignore[misc]
            return
        file.seek(part.start)
        yield file


def _pieces(file: BinaryIO, part: Part, pattern: re.Pattern[bytes]) -> Iterator[bytes]:
    """A range of a file in pieces that end with a document; a document that is too large is cut."""
    left = part.end - part.start if not part.file.endswith(".gz") else 1 << 62
    kept = b""
    while left > 0:
        try:
            read = file.read(min(BLOCK_BYTES, left))
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise SourceError(f"damaged ({error}); make it anew") from error
        if not read:
            break
        left -= len(read)
        kept += read
        cut = 0
        for match in pattern.finditer(kept, max(0, len(kept) - len(read) - 256)):
            cut = match.end()
        if cut:
            yield kept[:cut]
            kept = kept[cut:]
        elif len(kept) > LARGEST_DOCUMENT:
            kept = kept[:LARGEST_DOCUMENT]
    if kept:
        yield kept
