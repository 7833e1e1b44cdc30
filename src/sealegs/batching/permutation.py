"""A permutation from a key, of any size and at any positions: the order of data as arithmetic, not as state."""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]


def shuffled(positions: Ints, size: int, key: int) -> Ints:
    """The permutation of ``range(size)`` that a key chooses, at some positions; its cost does not grow with the size.

    A Feistel network mixes the bits of a position: it is one-to-one by construction, whatever the mixing function. A
    result that is not below ``size`` goes through again; it must come out, since the cycle leads back to its start.

    >>> sorted(shuffled(np.arange(10), 10, key=7).tolist()) == list(range(10))
    True
    """
    half = np.uint64((max(size - 1, 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << int(half)) - 1)
    result = positions.astype(np.uint64)
    pending = np.ones(len(result), np.bool_)
    while pending.any():
        left, right = result[pending] >> half, result[pending] & mask
        for turn in range(4):
            left, right = right, left ^ (_mixed(right, key + turn) & mask)
        result[pending] = (left << half) | right
        pending = result >= np.uint64(size)
    return result.astype(np.int64)


def _mixed(values: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """The finaliser of splitmix64: every bit of the input moves every bit of the output."""
    x = values + np.uint64(key * 0x9E3779B97F4A7C15 % 2**64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
