"""Summarises the counts of a corpus: documents by name, duplicates, rare tokens, the list of documents to drop."""

import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sealegs.batching.stratified import Ints, rare_tokens
from sealegs.errors import SourceError
from sealegs.report.commands.scan import MEANING, Example, KindShown, Scanned, SourceShown, TokenShown
from sealegs.scan.blocks import Ids, Part, TextDocuments, Ways
from sealegs.scan.counts import (
    LISTED,
    Action,
    Clusters,
    Counts,
    DocumentFinding,
    Documents,
    Shared,
    Unit,
    document_key,
    part_and_document,
    source_key,
)
from sealegs.scan.encoder import tokenizer_of
from sealegs.scan.plan import READERS
from sealegs.scan.text import shown

CROWD = 5
"""Occurrences of a rare token in one document that make it crowded: most of the nine that it may have."""
SHARED_SOME, SHARED_MOST = 0.1, 0.5
"""Share of the runs of words of a document that earlier ones have, from which on it is named, and is dropped."""
_EXAMPLES = 5
_FREQUENT = 8
_PROBLEMS = 20
_ORDER = ("drop", "defer")


Tables: TypeAlias = Callable[[], Iterable[Documents]]
"""The documents of a corpus, a part of them at a time by the first bits of their digests, in the order of these."""


@dataclass(frozen=True, slots=True)
class Named:
    """A document by the name that a person knows."""

    file: str
    document: int


class CorpusSummary:
    """The counts of a corpus, and its parts, which give everything in the counts a name."""

    def __init__(
        self,
        counts: Counts,
        parts: Sequence[Part],
        ways: Ways,
        *,
        also: Sequence[DocumentFinding] = (),
        tables: Tables | None = None,
        near: Clusters | None = None,
        shared: Shared | None = None,
    ) -> None:
        """``also`` are findings that no count of a part shows by itself; ``tables`` has the documents if the counts
        have not; ``near`` has those that are alike, ``shared`` those that share spans."""
        self._parts = parts
        self._ways = ways
        self._before = _numbers_before(counts, parts)
        self.unit: Unit
        if len(counts.units) > 1:
            raise SourceError("the corpus has text and token ids: scan them apart, or give --tokenizer and --field")
        if not counts.units:
            raise SourceError(self._problem(counts.problems[0]) if counts.problems else "no document was found")
        (self.unit,) = counts.units
        more = [*(_crowded(self, counts) if self.unit == "tokens" else ()), *also]
        if near is not None:
            more += _near(self, counts, near)
        if shared is not None:
            more += _sharing(self, shared)
        again, more, found = _over_tables(self, counts, more, tables or (lambda: [Documents.of(counts)]))
        in_order = sorted((*counts.findings, *again, *more), key=lambda each: (each.part, each.document))
        self.counts = replace(counts, findings=tuple(in_order)[:LISTED], found=counts.found + found)

    def name(self, part: int, document: int) -> Named:
        """The name of a document by its number in a part."""
        here = self._parts[part]
        if here.files and not here.file:
            return Named(here.files[document], 0)
        return Named(here.file, self._before[part] + document)

    def names(self, keys: Ints) -> list[str]:
        """The names of documents by their keys, each once."""
        named = (self.name(*part_and_document(key)) for key in dict.fromkeys(keys.tolist()))
        return [f"{each.file}#{each.document}" for each in named]

    def sizes(self) -> dict[str, int]:
        """Documents per file."""
        found: dict[str, int] = defaultdict(int)
        for part in self._parts:
            if part.files and not part.file:
                found |= dict.fromkeys(part.files, 1)
            else:
                found[part.file] += self.counts.parts.get(part.number, 0)
        return dict(found)

    def listed(self) -> Iterator[dict[str, Any]]:
        """The documents to drop or to defer, each once, with all findings about it."""
        by_document: dict[tuple[int, int], list[DocumentFinding]] = defaultdict(list)
        for each in self.counts.findings:
            by_document[each.part, each.document].append(each)
        for (part, document), findings in by_document.items():
            named = self.name(part, document)
            yield {
                "file": named.file,
                "document": named.document,
                "action": min((each.action for each in findings), key=_ORDER.index),
                "why": [f"{each.kind}: {each.text}" for each in findings],
            }

    def scanned(self, corpus: Sequence[str]) -> Scanned:
        """The report without a forecast."""
        counts = self.counts
        actions = Counter(each["action"] for each in self.listed())
        rare = np.flatnonzero(rare_tokens(counts.tokens))
        often = np.argsort(-counts.tokens, kind="stable")[:_FREQUENT]
        return Scanned(
            corpus=list(corpus),
            unit=self.unit,
            length_unit="tokens" if self.unit == "tokens" else "words",
            documents=sum(each.documents for each in counts.sources.values()),
            bytes=sum(each.bytes for each in counts.sources.values()),
            counted=int(counts.tokens.sum()),
            distinct=int(np.count_nonzero(counts.tokens)),
            sources=[self._source(name) for name in sorted(counts.sources)],
            frequent=[self._token(token) for token in often.tolist() if counts.tokens[token]],
            rare=len(rare),
            rare_occurrences=int(counts.tokens[rare].sum()),
            rare_examples=[self._token(token, with_places=True) for token in self._rarest(rare)],
            findings=list(self._kinds()),
            to_drop=actions["drop"],
            to_defer=actions["defer"],
            problems=counts.problem_count,
            problem_examples=[self._problem(each) for each in counts.problems[:_PROBLEMS]],
            forecast=None,
            list=None,
        )

    def text_of_token(self, token: int) -> str:
        """A token as readable text."""
        if self.unit == "characters":
            character = chr(token)
            seen = repr(character) if character.isprintable() else ""
            return seen if token < 128 and seen else f"{seen} U+{token:04X} {unicodedata.name(character, '')}".strip()
        if self._ways.tokenizer is None:
            return f"#{token}"
        return f"#{token} {tokenizer_of(self._ways.tokenizer).decode([token], skip_special_tokens=False)!r}"

    def _rarest(self, rare: Ints) -> list[int]:
        """The rare tokens in the fewest documents: a batch most likely has several of these."""
        held = self.counts.places
        documents: dict[int, set[int]] = {token: set() for token in rare.tolist()}
        for token, document in zip(held.tokens.tolist(), held.documents.tolist(), strict=True):
            documents[token].add(document)
        return sorted(documents, key=lambda t: (len(documents[t]) - int(self.counts.tokens[t]), t))[:_EXAMPLES]

    def _token(self, token: int, *, with_places: bool = False) -> TokenShown:
        held = self.counts.places
        keys = np.sort(held.documents[held.tokens == token]) if with_places else np.empty(0, np.int64)
        return TokenShown(
            id=token,
            text=self.text_of_token(token),
            count=int(self.counts.tokens[token]),
            where=self.names(keys)[:_EXAMPLES],
        )

    def _source(self, name: str) -> SourceShown:
        tally = self.counts.sources[name]
        return SourceShown(
            name=name,
            documents=tally.documents,
            bytes=tally.bytes,
            tokens=tally.tokens,
            median=tally.median,
            longest=tally.longest,
            found={kind: count for (source, kind), count in sorted(self.counts.found.items()) if source == name},
        )

    def _kinds(self) -> Iterator[KindShown]:
        for kind, meaning in MEANING.items():
            documents = sum(count for (_, each), count in self.counts.found.items() if each == kind)
            if not documents:
                continue
            few = [each for each in self.counts.findings if each.kind == kind][:_EXAMPLES]
            yield KindShown(
                kind=kind, meaning=meaning, documents=documents, examples=[self._example(each) for each in few]
            )

    def _example(self, found: DocumentFinding) -> Example:
        named = self.name(found.part, found.document)
        about = found.excerpt
        if not about and found.kind in ("duplicate", "near-duplicate", "shared", "crowded", "incident", "alike"):
            about = self._beginning(found.part, found.document)
        elif self._parts[found.part].format == "ids" and self._ways.tokenizer is not None and about:
            about = shown(tokenizer_of(self._ways.tokenizer).decode([int(each) for each in about.split()]))
        return Example(file=named.file, document=named.document, what=found.text, excerpt=about)

    def _beginning(self, part: int, document: int) -> str:
        """The beginning of a document's text, read again."""
        for block in READERS[self._parts[part].format](self._parts[part], self._ways):
            if isinstance(block, TextDocuments | Ids) and document in block.numbers:
                here = int(np.flatnonzero(block.numbers == document)[0])
                start, end = np.append(block.starts, 1 << 62)[[here, here + 1]].tolist()
                if isinstance(block, TextDocuments):
                    return shown(block.data[start : min(end, start + 120)].decode(errors="replace"))
                ids = block.ids[start : min(end, start + 24)].tolist()
                known = self._ways.tokenizer is not None
                return shown(tokenizer_of(str(self._ways.tokenizer)).decode(ids)) if known else " ".join(map(str, ids))
        return ""

    def _problem(self, problem: Any) -> str:
        part = self._parts[problem.part]
        named = self.name(problem.part, problem.number)
        line = f" line {named.document + 1}:" if part.format == "lines" and part.trouble is None else ""
        return f"{named.file}:{line} {problem.text}"


def _numbers_before(counts: Counts, parts: Sequence[Part]) -> list[int]:
    """Documents of the same file before each part."""
    so_far: dict[str, int] = defaultdict(int)
    before = []
    for part in parts:
        before.append(so_far[part.file])
        so_far[part.file] += counts.parts.get(part.number, 0)
    return before


def _over_tables(
    settled: CorpusSummary, counts: Counts, findings: Sequence[DocumentFinding], tables: Tables
) -> tuple[list[DocumentFinding], list[DocumentFinding], Counter[tuple[str, str]]]:
    """The findings of duplicates, the first million; the others, less what these say; and how many of each source."""
    names = {source_key(name): name for name in counts.sources}
    wanted = np.array([int(document_key(each.part, each.document)) for each in findings], np.int64)
    by_key: dict[int, list[DocumentFinding]] = defaultdict(list)
    for each, key in zip(findings, wanted.tolist(), strict=True):
        by_key[key].append(each)
    again: list[DocumentFinding] = []
    found: Counter[tuple[str, str]] = Counter()
    for table in tables():
        later, first, origins = _duplicates(table)
        for key, times in zip(*(each.tolist() for each in np.unique(origins, return_counts=True)), strict=True):
            found[names[key], "duplicate"] += times
        for key, earlier in zip(later[: LISTED - len(again)].tolist(), first.tolist(), strict=False):
            (twin,) = settled.names(np.array([earlier]))
            again.append(DocumentFinding(*part_and_document(key), "duplicate", "drop", f"the same as {twin}", ""))
        for key in later[np.isin(later, wanted)].tolist():
            by_key[key] = [each for each in by_key[key] if each.kind not in ("near-duplicate", "shared")]
        here = np.flatnonzero(np.isin(table.keys, wanted))
        for key, origin in zip(table.keys[here].tolist(), table.origins[here].tolist(), strict=True):
            found.update((names[origin], each.kind) for each in by_key[key])
    return again, [each for of_document in by_key.values() for each in of_document], found


def _duplicates(table: Documents) -> tuple[Ints, Ints, NDArray[np.uint32]]:
    """All documents that came before: their keys, those of the first ones, and their origins."""
    by_digest = np.lexsort((table.keys, table.digests))
    digests = table.digests[by_digest]
    again = np.flatnonzero(digests[1:] == digests[:-1]) + 1
    begins = np.flatnonzero(np.append(True, digests[1:] != digests[:-1]))
    first = begins[np.searchsorted(begins, again, side="right") - 1]
    return table.keys[by_digest[again]], table.keys[by_digest[first]], table.origins[by_digest[again]]


def _near(settled: CorpusSummary, counts: Counts, near: Clusters) -> Iterator[DocumentFinding]:
    """Documents that are alike, but for the one that is kept."""
    dropped = [int(document_key(each.part, each.document)) for each in counts.findings if each.action == "drop"]
    twins, kept, sizes = near.twins(np.array(dropped, np.int64))
    for key, first, size in zip(twins[:LISTED].tolist(), kept.tolist(), sizes.tolist(), strict=False):
        (twin,) = settled.names(np.array([first]))
        text = f"as {twin}" + (f", one of {size:,}" if size > 2 else "")
        yield DocumentFinding(*part_and_document(key), "near-duplicate", "drop", text, "")


def _sharing(settled: CorpusSummary, shared: Shared) -> Iterator[DocumentFinding]:
    """Documents of which a good part is in earlier ones."""
    much = np.flatnonzero(shared.shares >= SHARED_SOME)[:LISTED]
    for key, first, share in zip(shared.keys[much].tolist(), shared.firsts[much], shared.shares[much], strict=True):
        (twin,) = settled.names(np.array([first]))
        text = f"about {share:.0%} of its runs of 32 words are in earlier documents, first in {twin}"
        action: Action = "drop" if share >= SHARED_MOST else "defer"
        yield DocumentFinding(*part_and_document(key), "shared", action, text, "")


def _crowded(settled: CorpusSummary, counts: Counts) -> Iterator[DocumentFinding]:
    """Documents that hold a rare token many times."""
    held = Counter(zip(counts.places.documents.tolist(), counts.places.tokens.tolist(), strict=True))
    for (key, token), times in held.items():
        if times >= CROWD:
            part, document = part_and_document(key)
            text = f"{settled.text_of_token(token)}, {times} of its {counts.tokens[token]} occurrences"
            yield DocumentFinding(part, document, "crowded", "defer", text, "")
