"""Finds the documents that rows of tokens come from, by runs of eight tokens that both have.

A run is known by a hash of 64 bits, so that a corpus is searched at the speed of numpy. Ten thousand runs are mistaken
for others once in some 10^15 tokens.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sealegs.batching.stratified import Ints

RUN = 8
"""Tokens."""
MOST_DOCUMENTS = 64
"""Documents that are kept for a run: what more of them have, every document of its kind has."""
LEAST_RUNS = 4
"""Runs of a row that only this document explains, if it is to be named: eleven tokens on end."""
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
Hashes = NDArray[np.uint64]


def runs(ids: NDArray[Any]) -> Hashes:
    """The hash of the run at each place but the last seven; of each row, where there are rows."""
    wide = ids.astype(np.uint64) + np.uint64(1)
    count = wide.shape[-1] - RUN + 1
    found = np.zeros((*wide.shape[:-1], max(count, 0)), np.uint64)
    for place in range(RUN if count > 0 else 0):
        found *= _FACTOR
        found += wide[..., place : place + count]
    mixed: Hashes = found ^ (found >> np.uint64(29))
    return mixed


def within_documents(starts: Ints, count: int) -> NDArray[np.bool_]:
    """Of the runs of some documents end to end, those that lie in one. ``count`` is the number of tokens."""
    document = np.searchsorted(starts, np.arange(count), side="right")
    is_one: NDArray[np.bool_] = document[: count - RUN + 1] == document[RUN - 1 :]
    return is_one


def holders(wanted: Hashes, ids: NDArray[Any], starts: Ints, keys: Ints) -> NDArray[np.int64]:
    """Which documents of a block have which of the wanted runs, which rise: pairs of a run's place there and a key."""
    if len(ids) < RUN or not len(wanted):
        return np.empty((0, 2), np.int64)
    found = runs(ids)
    place = np.minimum(np.searchsorted(wanted, found), len(wanted) - 1)
    at = np.flatnonzero((wanted[place] == found) & within_documents(starts, len(ids)))
    documents = keys[np.searchsorted(starts, at, side="right") - 1]
    return few(np.stack([place[at], documents], axis=1))


def few(pairs: NDArray[np.int64]) -> NDArray[np.int64]:
    """The pairs in order, each once, and no more documents of a run than are kept."""
    pairs = np.unique(pairs, axis=0)
    first = np.searchsorted(pairs[:, 0], pairs[:, 0])
    return pairs[np.arange(len(pairs)) - first < MOST_DOCUMENTS]


def documents_of(row: Sequence[int], pairs: NDArray[np.int64]) -> list[int]:
    """The documents that a row comes from, the longest part first; ``row`` has the places of its runs.

    A document is named for what no document before it explains: what many have in common is put down to one.
    """
    here = pairs[np.isin(pairs[:, 0], row)]
    times = np.bincount(row, minlength=int(here[:, 0].max(initial=0)) + 1)
    found: list[int] = []
    while len(here):
        keys, of = np.unique(here[:, 1], return_inverse=True)
        explained = np.bincount(of, times[here[:, 0]])
        best = int(explained.argmax())
        if explained[best] < LEAST_RUNS:
            break
        found.append(int(keys[best]))
        here = here[~np.isin(here[:, 0], here[of == best, 0])]
    return found
