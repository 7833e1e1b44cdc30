"""Tells what a few rows of a loss show from what the same numbers in any order would show."""

import math

import numpy as np
from numpy.typing import NDArray

from sealegs.detectors.drift import chance_of_pairs

Floats = NDArray[np.float64]

CHANCE = 0.01
"""Largest chance with which the same numbers, in an order drawn by lot, show as much."""
SURE = 2.33
"""Standard deviations of a normal number beyond which that chance lies."""


def is_any_order(values: Floats) -> bool:
    """Whether neighbours differ about as much as any two of the values: then no level of theirs has changed.

    It is Bartels' rank test: squared differences of the ranks of neighbours, over the squared distances of ranks from
    their mean, are 2 on average for values in any order, and less where neighbours are alike.

    >>> is_any_order(np.array([2.0, 1.1, 2.8, 1.5, 3.1, 1.2, 2.2, 2.9, 1.0, 3.0]))
    True
    >>> is_any_order(np.array([2.0, 1.9, 1.8, 1.7, 1.6, 4.0, 4.2, 4.1, 4.3, 4.4]))
    False
    """
    count = len(values)
    if count < 3 or np.ptp(values) == 0:
        return True
    ranks = _ranks(values)
    ratio = float(np.square(np.diff(ranks)).sum() / np.square(ranks - ranks.mean()).sum())
    variance = 4 * (count - 2) * (5 * count**2 - 2 * count - 9) / (5 * count * (count + 1) * (count - 1) ** 2)
    return ratio > 2 - SURE * math.sqrt(variance)


def are_parted(before: Floats, after: Floats) -> bool:
    """Whether all of some values are above all before them, by more than either differ among themselves, or where
    hardly any other order would have parted them at any place.

    >>> are_parted(np.array([2.0, 1.9, 2.1]), np.array([4.0, 4.1]))
    True
    >>> are_parted(np.array([2.0, 1.1]), np.array([2.8, 2.3, 2.2, 3.3]))
    False
    """
    gap = float(after.min() - before.max())
    count = len(before) + len(after)
    is_rare = count < CHANCE * math.comb(count, len(after))
    return gap > max(float(np.ptp(before)), float(np.ptp(after))) or (gap > 0 and is_rare)


def falls(losses: Floats, fewest: int) -> bool:
    """Whether a few losses fall beyond doubt: all of the last third are below all of the first, and so many pairs fall
    as hardly any other order of them would have."""
    first, _, last = np.array_split(losses, 3)
    if len(losses) < fewest or not last.max() < first.min():
        return False
    falling = int(sum((losses[at] > losses[at + 1 :]).sum() for at in range(len(losses))))
    return chance_of_pairs(len(losses))[falling] < CHANCE


def _ranks(values: Floats) -> Floats:
    """The place of each value in their order; equal ones share the mean of theirs."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place].astype(np.float64)
