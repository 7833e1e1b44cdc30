"""Searches a corpus for the rows of some batches: which documents they come from, and what else is as unusual.

``search_part`` is the map and ``merged`` the reduce, as for the scan itself, whose counts it needs.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sealegs.batching.stratified import Ints
from sealegs.report.commands.incident_data import Measure
from sealegs.scan.blocks import Ids, Part, TextDocuments, Ways
from sealegs.scan.counts import LISTED, document_key
from sealegs.scan.encoder import encoder
from sealegs.scan.origin import Hashes, few, holders
from sealegs.scan.plan import READERS
from sealegs.scan.text import texts
from sealegs.scan.unusual import Frequencies, added, histogram, is_beyond


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is searched for."""

    runs: Hashes
    """Of the rows, each once, rising."""
    length: int
    """Tokens of a row."""
    frequencies: Frequencies
    limits: Mapping[Measure, float]
    """By measure, from where on a window is as unusual as the rows."""


def _no_pairs() -> NDArray[np.int64]:
    return np.empty((0, 2), np.int64)


@dataclass(frozen=True, slots=True)
class Seen:
    """What some parts of a corpus have of it."""

    windows: Mapping[Measure, Ints] = field(default_factory=dict)
    """Histograms."""
    holders: NDArray[np.int64] = field(default_factory=_no_pairs)
    """Which run is in which document."""
    alike: Mapping[Measure, Ints] = field(default_factory=dict)
    """Documents in the middle of windows that are as unusual as the rows, once for each window."""

    def __add__(self, other: "Seen") -> "Seen":
        alike = {
            measure: np.concatenate([each.alike[measure] for each in (self, other) if measure in each.alike])[:LISTED]
            for measure in {**self.alike, **other.alike}
        }
        return Seen(added(self.windows, other.windows), few(np.concatenate([self.holders, other.holders])), alike)


def merged(seen: Iterable[Seen]) -> Seen:
    """What all have, in their order."""
    return reduce(lambda one, two: one + two, seen, Seen())


def search_part(part: Part, ways: Ways, wanted: Wanted) -> Seen:
    """What one part has: a pure function of the files."""
    return merged(_searched(part, ways, wanted))


def _searched(part: Part, ways: Ways, wanted: Wanted) -> Iterator[Seen]:
    rest_ids, rest_keys = np.empty(0, np.int64), np.empty(0, np.int64)
    for ids, starts, keys in _documents(part, ways):
        here = np.repeat(keys, np.diff(starts, append=len(ids)))
        stream, of = np.concatenate([rest_ids, ids]), np.concatenate([rest_keys, here])
        whole = len(stream) // wanted.length * wanted.length
        rest_ids, rest_keys = stream[whole:], of[whole:]
        windows, alike = _measured(stream[:whole], of[:whole], wanted)
        yield Seen(windows, holders(wanted.runs, ids, starts, keys), alike)


def _measured(stream: Ints, of: Ints, wanted: Wanted) -> tuple[dict[Measure, Ints], dict[Measure, Ints]]:
    """The histograms of whole windows, and the documents in the middle of those that are beyond a limit."""
    measured = wanted.frequencies.measured(stream.reshape(-1, wanted.length))
    middle = of.reshape(-1, wanted.length)[:, wanted.length // 2]
    windows = {measure: histogram(measure, values) for measure, values in measured.items()}
    alike = {measure: middle[is_beyond(measure, measured[measure], limit)] for measure, limit in wanted.limits.items()}
    return windows, alike


def _documents(part: Part, ways: Ways) -> Iterator[tuple[NDArray[Any], Ints, Ints]]:
    """Token ids end to end, where each document starts, and its key; what cannot be read the scan has named."""
    if part.trouble is not None:
        return
    encode = encoder(ways.tokenizer) if ways.tokenizer else None
    for block in READERS[part.format](part, ways):
        match block:
            case Ids():
                yield np.asarray(block.ids), block.starts, document_key(part.number, block.numbers)
            case TextDocuments() if encode is not None:
                yield *encode(texts(block)), document_key(part.number, block.numbers)
