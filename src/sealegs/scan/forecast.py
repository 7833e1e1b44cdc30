"""Forecasts which batches of an order of rows hold many rare tokens."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sealegs.batching.stratified import Ints, RareRows, meetings_at

_PIECE = 1 << 22
"""Rows of an order that are read at a time."""
_CHANCE = 0.01
SHOWN = 10


@dataclass(frozen=True, slots=True)
class Crowd:
    """A batch with many rare tokens."""

    batch: int
    tokens: Ints
    """Each occurrence in it, those in the most rows first."""
    rows: Ints
    """The row of each occurrence."""
    met: int
    """Tokens that are in two or more rows."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """The forecast for an order of rows."""

    batches: int
    usual: float
    """Rare tokens per batch, on average."""
    crowded: int
    """Batches with more of them than chance gives any batch in 99 of 100 runs."""
    meeting: int
    worst: tuple[Crowd, ...]


def ahead(order: Ints | range, rare: RareRows, batch: int) -> Ahead:
    """The forecast for an order of the rows, ``batch`` to a batch; rows that are not in it are not read.

    Its memory is that of the rare tokens, whatever the number of rows, if ``order`` is a range or a mapped file. A
    number below 0 in it is no row.

    >>> rare = RareRows(8, np.array([0, 1]), np.array([7, 7]))
    >>> ahead(range(8), rare, batch=2).worst[0].batch
    0
    """
    batches = -(-len(order) // batch)
    places = _places(order, rare.rows)
    read = places >= 0
    rows, tokens, where = rare.rows[read], rare.tokens[read], places[read] // batch
    here, held = np.unique(where, return_counts=True)  # batches that have any
    usual = len(tokens) / max(batches, 1)
    limit = _limit(usual, batches)
    met = np.zeros(len(here), np.int64)
    np.add.at(met, np.searchsorted(here, meetings_at(places, rare, batch).batches), 1)
    crowded = np.flatnonzero((held >= limit) | (met > 0))
    worst = crowded[np.lexsort((here[crowded], -held[crowded], -met[crowded]))][:SHOWN]
    return Ahead(
        batches,
        usual,
        int(np.count_nonzero(held >= limit)),
        int(np.count_nonzero(met)),
        tuple(_crowd(int(here[b]), tokens[where == here[b]], rows[where == here[b]], int(met[b])) for b in worst),
    )


def _places(order: Ints | range, rows: Ints) -> Ints:
    """The place of each of some rows in an order, or -1."""
    if isinstance(order, range):
        assert order == range(len(order)), "rows as they lie"
        return np.where(rows < len(order), rows, -1)
    wanted, of = np.unique(rows, return_inverse=True)
    places = np.full(len(wanted), -1, np.int64)
    for first, piece in pieces(order) if len(wanted) else ():
        at = np.minimum(np.searchsorted(wanted, piece), len(wanted) - 1)
        found = np.flatnonzero(wanted[at] == piece)
        places[at[found]] = first + found
    return places[of]


def pieces(order: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
    """An order in pieces; of a mapped file, what has been read does not stay in memory."""
    is_file = isinstance(order, np.memmap) and order.ndim == 1 and _is_whole(order)
    for first in range(0, len(order), _PIECE):
        size = min(_PIECE, len(order) - first)
        if is_file and isinstance(order, np.memmap):
            start = order.offset + first * order.itemsize
            yield first, np.memmap(str(order.filename), order.dtype, "r", start, (size,))
        else:
            yield first, order[first : first + size]


def _is_whole(order: "np.memmap[Any, Any]") -> bool:
    """Whether it is all of its file from its offset on: a slice of a mapped file says the offset of the whole."""
    return order.offset + order.nbytes == Path(str(order.filename)).stat().st_size


def _crowd(batch: int, tokens: Ints, rows: Ints, met: int) -> Crowd:
    once = RareRows(0, rows, tokens).once().tokens
    in_rows = np.array([np.count_nonzero(once == token) for token in tokens])
    most_first = np.lexsort((rows, tokens, -in_rows))
    return Crowd(batch, tokens[most_first], rows[most_first], met)


def _limit(usual: float, batches: int) -> int:
    """The number that chance does not reach in any batch of a run, in 99 of 100 runs."""
    left, count = 1.0, 0
    while usual and left * batches >= _CHANCE:
        left -= math.exp(count * math.log(usual) - usual - math.lgamma(count + 1))  # Poisson
        count += 1
    return max(count, 2)
