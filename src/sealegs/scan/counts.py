"""The counts of a scan: plain values that merge in any grouping, so that parts of a corpus can be scanned separately.

``merge(merge(a, b), c) == merge(a, merge(b, c))``: the reduce of a map and reduce, on any engine. Only 20 bytes per
document grow with the text, to find duplicates. All places of rare tokens are kept, which are at most nine per id, and
the first million findings.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce
from typing import Literal, TypeAlias
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from sealegs.batching.stratified import RARE_BELOW, Ints
from sealegs.report.commands.scan import Kind

Unit: TypeAlias = Literal["tokens", "characters"]
Action: TypeAlias = Literal["drop", "defer"]

LISTED = 1_000_000
"""The most findings that are kept; further ones are only counted."""
_LENGTHS = 48  # powers of two


@dataclass(frozen=True, slots=True)
class DocumentFinding:
    """A finding about a document."""

    part: int
    document: int
    """Its number in the part."""
    kind: Kind
    action: Action
    text: str
    """What was found, with its numbers."""
    excerpt: str
    """The text around the place."""


@dataclass(frozen=True, slots=True)
class UnreadablePart:
    """Something that could not be read, and was passed over."""

    part: int
    number: int
    """Number of the document or line in the part."""
    text: str


@dataclass(frozen=True, slots=True)
class SourceSizes:
    """Sizes of the documents of one source."""

    documents: int = 0
    bytes: int = 0
    tokens: int = 0
    longest: int = 0
    """Tokens of the longest document."""
    lengths: tuple[int, ...] = (0,) * _LENGTHS
    """Documents by the number of bits of their length: how many have 0 tokens, 1, 2 to 3, 4 to 7, ..."""

    @classmethod
    def of(cls, tokens: Ints, size: int) -> "SourceSizes":
        """Made from the number of tokens of each document, and the bytes of all."""
        bits = np.searchsorted(1 << np.arange(_LENGTHS - 1), tokens, side="right")
        lengths = tuple(np.bincount(bits, minlength=_LENGTHS).tolist())
        return cls(len(tokens), size, int(tokens.sum()), int(tokens.max(initial=0)), lengths)

    @property
    def median(self) -> int:
        """The median to within a factor of two: the middle between two powers of 2, within what sum and longest allow.

        >>> SourceSizes.of(np.array([60_000]), 0).median, SourceSizes.of(np.array([5, 700]), 0).median
        (60000, 6)
        """
        bits = int(np.searchsorted(np.cumsum(self.lengths), (self.documents + 1) // 2))
        middle = 0 if bits == 0 else 3 << (bits - 1) >> 1
        at_least = self.tokens - (self.documents - 1) * self.longest
        at_most = min(self.longest, self.tokens // (self.documents // 2 + 1))
        return min(max(middle, at_least), at_most)

    def __add__(self, other: "SourceSizes") -> "SourceSizes":
        return SourceSizes(
            self.documents + other.documents,
            self.bytes + other.bytes,
            self.tokens + other.tokens,
            max(self.longest, other.longest),
            tuple(a + b for a, b in zip(self.lengths, other.lengths, strict=True)),
        )


@dataclass(frozen=True, slots=True)
class Places:
    """The places of tokens that are rare in what was counted so far, one entry per occurrence."""

    tokens: Ints
    documents: Ints
    """The ``document_key`` of each."""
    offsets: Ints
    """Position in the part: tokens, or bytes of a text."""

    def where(self, wanted: NDArray[np.bool_]) -> "Places":
        """Some of the places."""
        return Places(self.tokens[wanted], self.documents[wanted], self.offsets[wanted])

    def __add__(self, other: "Places") -> "Places":
        pairs = ((self.tokens, other.tokens), (self.documents, other.documents), (self.offsets, other.offsets))
        return Places(*(np.concatenate(pair) for pair in pairs))


def _none() -> Ints:
    return np.empty(0, np.int64)


def _nowhere() -> Places:
    return Places(_none(), _none(), _none())


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The counts of some parts of a corpus."""

    tokens: Ints = field(default_factory=_none)
    """How often each id occurs; for text without a tokenizer, each character."""
    places: Places = field(default_factory=_nowhere)
    digests: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    """A digest of each document."""
    documents: Ints = field(default_factory=_none)
    """The ``document_key`` of each document."""
    origins: NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    """The ``source_key`` of each document's source."""
    sources: dict[str, SourceSizes] = field(default_factory=dict)
    parts: dict[int, int] = field(default_factory=dict)
    """The number of documents or lines in each part, to number those of the next."""
    found: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Findings by source and kind, including those that are not kept."""
    findings: tuple[DocumentFinding, ...] = ()
    problems: tuple[UnreadablePart, ...] = ()
    problem_count: int = 0
    units: frozenset[Unit] = frozenset()
    """What ``tokens`` counts: one unit per corpus."""


@dataclass(frozen=True, slots=True)
class Documents:
    """Some documents of a corpus, and all that are equal to one of them."""

    digests: NDArray[np.uint64]
    keys: Ints
    origins: NDArray[np.uint32]

    @classmethod
    def of(cls, counts: Counts) -> "Documents":
        """All documents of some counts."""
        return cls(counts.digests, counts.documents, counts.origins)


@dataclass(frozen=True, slots=True)
class Clusters:
    """Documents that are alike, by the number of their cluster."""

    keys: Ints
    numbers: Ints

    def twins(self, dropped: Ints) -> tuple[Ints, Ints, Ints]:
        """All but one of each cluster, the one that is kept, and how many are alike. Kept is the first in the corpus,
        if it can be one that is not dropped for something else.

        >>> one, kept, size = Clusters(np.array([9, 2, 5, 7, 3]), np.array([0, 0, 0, 1, 1])).twins(np.array([2]))
        >>> one.tolist(), kept.tolist(), size.tolist()
        ([9, 2, 7], [5, 5, 3], [3, 3, 2])
        """
        order = np.lexsort((self.keys, np.isin(self.keys, dropped), self.numbers))
        keys, numbers = self.keys[order], self.numbers[order]
        firsts = np.flatnonzero(np.append(True, numbers[1:] != numbers[:-1])[: len(keys)])
        cluster = np.cumsum(np.isin(np.arange(len(keys)), firsts)) - 1
        sizes = np.diff(firsts, append=len(keys))
        others = np.setdiff1d(np.arange(len(keys)), firsts)
        return keys[others], keys[firsts[cluster[others]]], sizes[cluster[others]]


@dataclass(frozen=True, slots=True)
class Shared:
    """Documents that share spans with earlier ones."""

    keys: Ints
    firsts: Ints
    """For each, the first document in the corpus that shares one with it."""
    shares: NDArray[np.float64]
    """The share of each that some earlier document has."""


def document_key(part: int, documents: Ints | int) -> Ints:
    """One number for a part and a document in it, in the order of the corpus."""
    return np.asarray(part * (1 << 32) + documents, np.int64)


def part_and_document(key: int) -> tuple[int, int]:
    """The inverse of ``document_key``."""
    return key >> 32, key & ((1 << 32) - 1)


def source_key(source: str) -> int:
    """One number for the name of a source."""
    return crc32(source.encode(errors="replace"))


def merge(one: Counts, two: Counts) -> Counts:
    """The counts of both."""
    shorter, longer = sorted((one.tokens, two.tokens), key=len)
    tokens = longer.copy()
    tokens[: len(shorter)] += shorter
    places = one.places + two.places
    return Counts(
        tokens=tokens,
        places=places.where(tokens[places.tokens] < RARE_BELOW),
        digests=np.concatenate([one.digests, two.digests]),
        documents=np.concatenate([one.documents, two.documents]),
        origins=np.concatenate([one.origins, two.origins]),
        sources=_added(one.sources, two.sources),
        parts=one.parts | {part: one.parts.get(part, 0) + numbers for part, numbers in two.parts.items()},
        found=one.found + two.found,
        findings=(one.findings + two.findings)[:LISTED],
        problems=(one.problems + two.problems)[:LISTED],
        problem_count=one.problem_count + two.problem_count,
        units=one.units | two.units,
    )


def merged(counts: Iterable[Counts]) -> Counts:
    """The counts of all, in their order; merged in pairs of equal size, so that none is copied often."""
    pending: list[tuple[int, Counts]] = []
    for each in counts:
        size = 1
        while pending and pending[-1][0] == size:
            each = merge(pending.pop()[1], each)
            size *= 2
        pending.append((size, each))
    return reduce(lambda later, earlier: merge(earlier, later), (each for _, each in reversed(pending)), Counts())


def _added(one: dict[str, SourceSizes], two: dict[str, SourceSizes]) -> dict[str, SourceSizes]:
    return one | {name: one.get(name, SourceSizes()) + tally for name, tally in two.items()}
