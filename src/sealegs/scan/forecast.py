"""Forecasts which batches of an order of rows hold many rare tokens."""

import math
from dataclasses import dataclass

import numpy as np

from sealegs.batching.stratified import Ints, RareRows, meetings

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


def ahead(order: Ints, rare: RareRows, batch: int) -> Ahead:
    """The forecast for an order of the rows, ``batch`` to a batch; rows that are not in it are not read.

    >>> rare = RareRows(8, np.array([0, 1]), np.array([7, 7]))
    >>> ahead(np.arange(8), rare, batch=2).worst[0].batch
    0
    """
    batches = -(-len(order) // batch)
    place = np.full(rare.count, -1, np.int64)
    place[order] = np.arange(len(order))
    read = place[rare.rows] >= 0
    rows, tokens = rare.rows[read], rare.tokens[read]
    where = place[rows] // batch
    held = np.bincount(where, minlength=batches)
    usual = len(tokens) / max(batches, 1)
    limit = _limit(usual, batches)
    met = np.bincount(meetings(order, rare, batch).batches, minlength=batches)
    crowded = np.flatnonzero((held >= limit) | (met > 0))
    worst = crowded[np.lexsort((crowded, -held[crowded], -met[crowded]))][:SHOWN]
    return Ahead(
        batches,
        usual,
        int(np.count_nonzero(held >= limit)),
        int(np.count_nonzero(met)),
        tuple(_crowd(int(b), tokens[where == b], rows[where == b], int(met[b])) for b in worst),
    )


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
