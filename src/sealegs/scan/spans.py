"""Finds spans of text that documents share, by winnowing: some of the hashes of all runs of words, chosen so that two
documents which have enough words on end in common have a chosen hash in common.

Of each window of ``_WINDOW`` runs on end the one with the least hash is chosen (Schleimer, Wilkerson and Aiken 2003).
So every span of more than ``LONGEST_MISSED`` words that two documents share is found, whatever is around it, for two
hashes in twenty words.
"""

import io
import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from sealegs.batching.stratified import Ints
from sealegs.errors import SealegsError, SourceError
from sealegs.scan.blocks import Ids, TextDocuments
from sealegs.scan.counts import Shared, document_key
from sealegs.scan.plan import READERS
from sealegs.scan.tasks import Stage, in_base
from sealegs.scan.words import keys, words
from sealegs.scan.work_folder import WorkFolder, ranges_of

Hashes = NDArray[np.uint64]

_RUN = 32
"""Words of a run: two to the fifth, because hashes of runs are joined from those of half their length."""
_WINDOW = 19
LONGEST_MISSED = _RUN + _WINDOW - 2
"""A shared span of more words than these is found: of 50 and more."""
_PRIME = np.uint64(0x9E3779B97F4A7C15)
_FOLDER = "spans"
_CHOSEN = np.dtype([("hash", "<u8"), ("key", "<i8"), ("of", "<u4")])
"""A chosen run: its hash, its document, and how many of that document are chosen."""


def chosen_runs(tokens: Hashes, firsts: Ints) -> tuple[Hashes, Ints]:
    """The chosen hashes of some documents, and the number of the document of each; ``firsts`` is where each begins.

    >>> tokens = np.arange(100, dtype=np.uint64)
    >>> one, of = chosen_runs(np.append(tokens, tokens[30:80]), np.array([0, 100]))
    >>> len(set(one[of == 0].tolist()) & set(one[of == 1].tolist())) > 0
    True
    """
    hashes = tokens * _PRIME
    length = 1
    while length < _RUN:  # of twice as many words: two halves, told apart by their order
        if len(hashes) <= length:
            return np.empty(0, np.uint64), np.empty(0, np.int64)
        mixed = hashes ^ (hashes >> np.uint64(29))
        hashes = mixed[:-length] * _PRIME + mixed[length:]
        hashes = (hashes ^ (hashes >> np.uint64(32))) * _PRIME
        length *= 2
    if len(hashes) < _WINDOW:
        return np.empty(0, np.uint64), np.empty(0, np.int64)
    least = sliding_window_view(hashes, _WINDOW).argmin(axis=1) + np.arange(len(hashes) - _WINDOW + 1)
    starts = np.arange(len(least))
    document = np.searchsorted(firsts, starts, side="right") - 1
    ends = np.append(firsts[1:], len(tokens))
    is_within = starts + LONGEST_MISSED + 1 <= ends[document]
    places, at = np.unique(least[is_within], return_index=True)
    return hashes[places], document[is_within][at]


def sharing(work: WorkFolder, tasks: int) -> Stage:
    """The stage in which tasks choose."""
    tasks = min(tasks, len(work.plan.bundles))
    return Stage(_FOLDER, (partial(_choose, place=work.store.place),), tasks)


def _choose(data: Any, rank: int, world: int, *, place: str) -> None:
    work = WorkFolder.opened(place)
    with in_base(work):
        for bundle in range(rank, len(work.plan.bundles), world):
            if not work.store.has(f"{_FOLDER}/{bundle:05d}.json"):
                _keep(work, bundle, np.concatenate([np.empty(0, _CHOSEN), *_of_bundle(work, bundle)]))


def _of_bundle(work: WorkFolder, bundle: int) -> Iterator[NDArray[Any]]:
    for part in work.plan.of_bundle(bundle):
        if part.trouble is not None:
            continue
        try:
            for block in READERS[part.format](part, work.plan.ways):
                if not isinstance(block, TextDocuments | Ids):
                    continue
                if isinstance(block, TextDocuments):
                    found = words(block.data, block.starts)
                    tokens, firsts = keys(block.data, found), found.firsts[:-1]
                else:
                    tokens, firsts = block.ids.astype(np.uint64) + np.uint64(1), block.starts
                hashes, document = chosen_runs(tokens, firsts)
                yield _table(hashes, document_key(part.number, block.numbers)[document])
        except (SealegsError, OSError):  # the counting has named it
            continue


def _table(hashes: Hashes, of: Ints) -> NDArray[Any]:
    """Each hash of a document once: a span may come twice in it."""
    order = np.lexsort((hashes, of))
    hashes, of = hashes[order], of[order]
    is_new = np.append(True, (of[1:] != of[:-1]) | (hashes[1:] != hashes[:-1]))[: len(of)]
    table = np.empty(int(is_new.sum()), _CHOSEN)
    table["hash"], table["key"] = hashes[is_new], of[is_new]
    _, place, times = np.unique(table["key"], return_inverse=True, return_counts=True)
    table["of"] = times[place]
    return table


def _keep(work: WorkFolder, bundle: int, table: NDArray[Any]) -> None:
    table = table[np.lexsort((table["key"], table["hash"]))]
    work.store.write(f"{_FOLDER}/{bundle:05d}.rows", table.tobytes())
    told = {"plan": work.plan.number, "ranges": ranges_of(table["hash"])}
    work.store.write(f"{_FOLDER}/{bundle:05d}.json", json.dumps(told).encode())


def shared(work: WorkFolder) -> Shared:
    """Of each document, how much of it an earlier one has; memory grows with the documents that share something."""
    bundles = range(len(work.plan.bundles))
    if missing := {f"{bundle:05d}.json" for bundle in bundles} - work.store.names(_FOLDER):
        place = work.store.address(_FOLDER)
        raise SourceError(f"{place}: {min(missing)} is gone; remove {work.store.address('tasks')}, and go on")
    ranges = [json.load(io.BytesIO(work.store.read(f"{_FOLDER}/{bundle:05d}.json")))["ranges"] for bundle in bundles]
    sums = np.empty(0, _SUM)
    for table in work.in_ranges(_FOLDER, "rows", _CHOSEN, ranges):
        sums = _added(np.concatenate([sums, _again(table)]))
    return Shared(sums["key"], sums["first"], sums["times"] / np.maximum(sums["of"], 1))


_SUM = np.dtype([("key", "<i8"), ("of", "<u4"), ("times", "<u4"), ("first", "<i8")])


def _again(table: NDArray[Any]) -> NDArray[Any]:
    """The runs of a table that an earlier document has."""
    table = table[np.lexsort((table["key"], table["hash"]))]
    begins = np.append(True, table["hash"][1:] != table["hash"][:-1])[: len(table)]
    first = table["key"][np.flatnonzero(begins)[np.cumsum(begins) - 1]] if len(table) else table["key"]
    again = ~begins & (table["key"] != first)
    found = np.zeros(int(again.sum()), _SUM)
    found["key"], found["of"], found["times"], found["first"] = table["key"][again], table["of"][again], 1, first[again]
    return found


def _added(sums: NDArray[Any]) -> NDArray[Any]:
    """One line for each document; the document that is named for it is the first in the corpus."""
    sums = sums[np.lexsort((sums["first"], sums["key"]))]
    begins = np.flatnonzero(np.append(True, sums["key"][1:] != sums["key"][:-1])[: len(sums)])
    found = sums[begins].copy()
    if len(begins):
        found["times"] = np.add.reduceat(sums["times"], begins)
    return found
