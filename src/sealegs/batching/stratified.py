"""Orders rows so that no batch has a rare token twice, as far as that is possible.

A token that the model has hardly seen has a second moment near zero, so its update is as large as Adam's can be.
Several of them in one batch add up; spread over batches they do not.

Any order of the rows is accepted and repaired: a row that shares a rare token with another row of its batch swaps with
a row drawn from all. In a shuffled order few rows do, so the repair costs as much as sorting the rare tokens, and the
other rows stay where the shuffle has put them.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]

RARE_BELOW = 10
"""A token is rare if it occurs less often than this in all of the training data."""

_TRIES = 100  # positions to try for a row: with 9 of 10 batches taken, the free one is missed once in 40,000
_SWEEPS = 30  # a row without a place gets another chance when the others have moved


def rare_tokens(counts: NDArray[Any]) -> NDArray[np.bool_]:
    """Which ids are rare, by how often each occurs.

    >>> rare_tokens(np.array([500, 0, 9, 10])).tolist()
    [False, False, True, False]
    """
    return (counts > 0) & (counts < RARE_BELOW)


@dataclass(frozen=True, slots=True)
class RareRows:
    """The rows that hold rare tokens: a pair of row and token for each occurrence, in any order."""

    count: int
    """Number of rows, most of them without rare tokens."""
    rows: Ints
    tokens: Ints

    @classmethod
    def of(cls, tokens: Sequence[Ints]) -> "RareRows":
        """Made from the rare tokens of each row."""
        lengths = [len(each) for each in tokens]
        return cls(len(tokens), np.repeat(np.arange(len(tokens)), lengths), np.concatenate(tokens).astype(np.int64))

    def once(self) -> "RareRows":
        """The same with each pair once: no order can separate a token that one row has twice."""
        rows, tokens, _ = _distinct(self.rows, self.tokens)
        return RareRows(self.count, rows, tokens)


@dataclass(frozen=True, slots=True)
class Meetings:
    """The batches of an order that have a rare token in more than one row: ``batches[i]`` has ``tokens[i]`` in
    ``rows[i]`` rows."""

    batches: Ints
    tokens: Ints
    rows: Ints

    @property
    def too_many(self) -> int:
        """Rows that repeat a rare token of their batch."""
        return int((self.rows - 1).sum())


def meetings(order: Ints, rare: RareRows, batch: int) -> Meetings:
    """The rare tokens that meet in each batch.

    >>> pairs = RareRows(4, np.array([0, 1, 3]), np.array([7, 7, 7]))
    >>> meetings(np.arange(4), pairs, batch=2)
    Meetings(batches=array([0]), tokens=array([7]), rows=array([2]))
    """
    place = np.full(rare.count, -1, np.int64)  # a row may be missing in the order
    place[order] = np.arange(len(order))
    return meetings_at(place[rare.rows], rare, batch)


def meetings_at(places: Ints, rare: RareRows, batch: int) -> Meetings:
    """The same by the place of each row of ``rare`` in the order; one below 0 has none."""
    is_there = places >= 0
    rows, tokens, _ = _distinct(places[is_there], rare.tokens[is_there])
    batches, tokens, times = _distinct(rows // batch, tokens)
    several = times > 1
    return Meetings(batches[several], tokens[several], times[several])


def spread(order: Ints, rare: RareRows, batch: int, *, seed: int = 0, first: int = 0) -> Ints:
    """An order of the same rows, ``batch`` to a batch, in which each batch has each rare token in at most one row.

    Rows move only for rows that meet; if those fit nowhere, as few meet as the search finds. ``seed`` chooses the
    places. The first row is number ``first`` in its batch.

    >>> pairs = RareRows(4, np.array([0, 1]), np.array([7, 7]))
    >>> meetings(spread(np.arange(4), pairs, batch=2), pairs, batch=2).rows
    array([], dtype=int64)
    """
    if not len(rare.rows):
        return order.copy()
    crowd = _Crowd(order, rare.once(), batch, first, random.Random(seed))  # noqa: S311 - places, not secrets
    for _ in range(_SWEEPS):
        pending = crowd.who_meet()
        if not sum(crowd.moved(row) for row in pending):
            break
    return crowd.order


class _Crowd:
    """The rows with rare tokens, numbered among themselves, with their batches and their tokens."""

    def __init__(self, order: Ints, rare: RareRows, batch: int, first: int, draw: random.Random) -> None:
        self.order = order.copy()
        self._batch = batch
        self._first = first
        self._batches = -(-(len(order) + first) // batch)
        self._draw = draw.random
        ids, pair_row = np.unique(rare.rows, return_inverse=True)
        _, pair_token = np.unique(rare.tokens, return_inverse=True)
        self._number = np.full(len(order), -1, np.int32)  # by row; most have none
        self._number[ids] = np.arange(len(ids))
        places = np.flatnonzero(self._number[order] >= 0)
        self._place = np.empty(len(ids), np.int64)
        self._place[self._number[order[places]]] = places
        self._tokens, self._token_starts = _grouped(pair_row, pair_token, len(ids))
        self._rows, self._row_starts = _grouped(pair_token, pair_row, int(pair_token.max()) + 1)
        self._rows_of_each = np.diff(self._row_starts)
        self._pair_token = pair_token
        self._pair_row = pair_row

    def who_meet(self) -> list[int]:
        """The rows that share a batch and a token with another, those with the most tokens first."""
        where = self._pair_token * self._batches + (self._place[self._pair_row] + self._first) // self._batch
        by_place = np.argsort(where, kind="stable")
        same = np.diff(where[by_place]) == 0
        meet = np.zeros(len(where), np.bool_)
        meet[by_place[1:][same]] = meet[by_place[:-1][same]] = True
        rows = np.unique(self._pair_row[meet])
        hard_first = np.argsort(-np.diff(self._token_starts)[rows], kind="stable")
        found: list[int] = rows[hard_first].tolist()
        return found

    def moved(self, row: int) -> bool:
        """Swap a row with another if no more rows meet then."""
        home = int(self._place[row] + self._first) // self._batch
        mates = self._mates(row)
        there = Counter(mates)
        if not there[home] or self._is_hopeless(row, there, home):
            return False
        best, chosen = -1, -1  # a swap that changes nothing counts, too: it makes way for others
        for _ in range(_TRIES):
            place = int(self._draw() * len(self.order))
            here = (place + self._first) // self._batch
            gain = there[home] - there[here]
            if gain <= best:
                continue
            other = int(self._number[self.order[place]])
            gain += self._gain(other, here, home, row) if other >= 0 else 0
            if gain > best:
                best, chosen = gain, place
            if best >= there[home]:
                break
        if chosen >= 0:
            self._swap(int(self._place[row]), chosen)
        return chosen >= 0

    def _is_hopeless(self, row: int, there: Counter[int], home: int) -> bool:
        """Whether there are more rows of each of its tokens than batches, and it is where the fewest are."""
        is_least = len(there) == self._batches and there[home] == min(there.values())
        return is_least and bool((self._rows_of_each[self._tokens_of(row)] > self._batches).all())

    def _gain(self, other: int, here: int, home: int, row: int) -> int:
        """How many fewer rows meet if ``other`` goes ``home`` and ``row`` leaves that for ``here``."""
        its = Counter(self._mates(other))
        shared = len(np.intersect1d(self._tokens_of(other), self._tokens_of(row), assume_unique=True))
        return its[here] - its[home] + 2 * shared  # the two rows pass each other

    def _mates(self, row: int) -> list[int]:
        """The batch of each other row with one of its tokens, once per token."""
        rows = [self._rows[self._row_starts[t] : self._row_starts[t + 1]] for t in self._tokens_of(row)]
        others = np.concatenate(rows)
        found: list[int] = ((self._place[others[others != row]] + self._first) // self._batch).tolist()
        return found

    def _tokens_of(self, row: int) -> Ints:
        return self._tokens[self._token_starts[row] : self._token_starts[row + 1]]

    def _swap(self, one: int, two: int) -> None:
        self.order[[one, two]] = self.order[[two, one]]
        for place in (one, two):
            if (number := self._number[self.order[place]]) >= 0:
                self._place[number] = place


def _distinct(first: Ints, second: Ints) -> tuple[Ints, Ints, Ints]:
    """Sorted pairs of numbers, each once, and how often each came."""
    by_pair = np.lexsort((second, first))
    first, second = first[by_pair], second[by_pair]
    is_new = np.ones(len(first), np.bool_)
    is_new[1:] = (np.diff(first) != 0) | (np.diff(second) != 0)
    at = np.flatnonzero(is_new)
    return first[at], second[at], np.diff(at, append=len(first))


def _grouped(groups: Ints, values: Ints, count: int) -> tuple[Ints, Ints]:
    """Values by group, end to end, and where each group starts."""
    by_group = np.argsort(groups, kind="stable")
    return values[by_group], np.searchsorted(groups[by_group], np.arange(count + 1))
