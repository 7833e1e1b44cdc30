"""Rows of tokens in, an order of them out: no batch has a rare token twice, where that can be.

A token that the model has hardly seen has a second moment that is near zero, so its update is as large as Adam's can
be; several of them in one batch add up. Spread over batches they do not.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]

RARE_BELOW = 10
"""A token is rare that occurs less often in all of the training data."""


def rare_tokens(counts: NDArray[Any]) -> NDArray[np.bool_]:
    """Which ids are rare, by how often each occurs.

    >>> rare_tokens(np.array([500, 0, 9, 10])).tolist()
    [False, False, True, False]
    """
    return (counts > 0) & (counts < RARE_BELOW)


def spread(rare: Sequence[Ints], batch: int) -> Ints:
    """An order of rows, ``batch`` to a batch, in which each batch has each rare token in one row at most.

    ``rare`` are the rare tokens of each row. Rows without any stay where they are, as far as there is room; a row that
    fits nowhere goes where there is room, and two of its kind then meet.

    >>> spread([np.array([7]), np.array([7]), np.array([]), np.array([])], batch=2).tolist()
    [0, 3, 1, 2]
    """
    batches = -(-len(rare) // batch)
    room = np.full(batches, batch)
    room[-1] -= batches * batch - len(rare)
    holds: list[set[int]] = [set() for _ in range(batches)]
    placed: list[list[int]] = [[] for _ in range(batches)]
    hard_first = sorted((row for row in range(len(rare)) if len(rare[row])), key=lambda row: -len(rare[row]))
    for row in hard_first:
        tokens = set(rare[row].tolist())
        near = ((row // batch + away) % batches for away in range(batches))
        free = [place for place in near if room[place]]
        place = next((place for place in free if not tokens & holds[place]), free[0])
        placed[place].append(row)
        holds[place] |= tokens
        room[place] -= 1
    others = [row for row in range(len(rare)) if not len(rare[row])]
    moved = []
    for row in others:
        if room[row // batch]:
            placed[row // batch].append(row)
            room[row // batch] -= 1
        else:
            moved.append(row)
    for place in range(batches):
        placed[place] += [moved.pop(0) for _ in range(room[place])]
    return np.array([row for rows in placed for row in sorted(rows)], np.int64)
