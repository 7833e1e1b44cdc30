"""Finds short leaps above the trend of a curve, judged with what follows each at hand.

A curve that falls is not noisy because of that: the noise is what is left about the trend, which medians of a few rows
on both sides give. Neither is one that leaps often: how high a curve may go by chance is told from the bulk of its
points, since an exponential tail goes on as it begins.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

BLOCK = 8
"""Points whose median is a point of the trend; of three neighbouring ones the middle one counts."""
SHORTEST = 6 * BLOCK
"""Points from which a curve has a trend."""
MOST = 100_000
"""Points from which on it would take a second for a million, and so rare a leap is noise."""
LONGEST = 2 * BLOCK
"""Points that a leap lasts at most: a longer one moves the trend."""
AROUND = 64
"""Points that give the usual deviation, with as many on both sides."""
BULK, UPPER = 0.7, 0.9
"""Shares of the points between which the tail begins."""
TAIL, FEWEST_IN_TAIL = 0.01, 5
"""Share of the points, and the fewest, that are its end where high points come alone."""
CLUSTERED, FEWEST_PAIRS = 3.0, 3
"""Times as many high neighbours as chance gives, and how many, from which on high points last."""
ONE_IN = 20.0
"""Curves of which one has a leap by chance, if tails are exponential."""
FEWEST = 7.5
"""The least deviations of a leap."""
BESIDE = 4
"""Points on each side that a leap must stand out from: the foot of a cliff does not."""
BACK = 3.0
"""Deviations above the trend down to which its neighbours belong to it."""


class Leap(NamedTuple):
    """Points that are far above the trend."""

    first: int
    last: int
    deviations: float
    height: float
    level: float
    """The trend where it begins."""


def leaps_of(heights: Floats, *, smallest: float, quietest: float) -> Iterator[Leap]:
    """Leaps of at least ``smallest``, where deviations are never below ``quietest``."""
    if not SHORTEST <= len(heights) <= MOST:
        return
    trend = _trend(heights)
    above = heights - trend
    usual = _usual(above, quietest)
    deviations = above / usual
    is_high = (deviations > max(FEWEST, _by_chance(deviations[BLOCK:]))) & (above > smallest)
    is_high[:BLOCK] = False  # a trend of the first points is not known
    is_beside = (deviations > BACK) & (above > smallest / 2)
    for first, last in _runs(is_beside | is_high):
        part = above[first : last + 1]
        top = first + int(np.argmax(part))
        sides = heights[max(first - BESIDE, 0) : first], heights[last + 1 : last + 1 + BESIDE]
        stands_out = all(heights[top] - np.median(side) > part.max() / 2 for side in sides if len(side))
        if is_high[first : last + 1].any() and last - first < LONGEST and stands_out:
            yield Leap(first, last, float(deviations[top]), float(above[top]), float(trend[top]))


def _by_chance(deviations: Floats) -> float:
    """How far one point goes by chance, if the tail of all goes on as it begins.

    Hard batches come alone, trouble lasts: where high points have no high neighbours, more often than by chance, they
    all belong to the tail; otherwise only the bulk shows it.
    """
    count = len(deviations)
    is_beside = deviations > BACK
    share = float(is_beside.mean())
    pairs = int(np.sum(is_beside[1:] & is_beside[:-1]))
    lasts = pairs >= FEWEST_PAIRS and pairs > CLUSTERED * share * is_beside.sum()
    begin, end = (1 - BULK, 1 - UPPER) if lasts else (1 - UPPER, max(TAIL, FEWEST_IN_TAIL / count))
    if end >= begin:
        begin, end = 1 - BULK, 1 - UPPER
    low, high = np.quantile(deviations, [1 - begin, 1 - end])
    return float(high + (high - low) / np.log(begin / end) * np.log(max(ONE_IN * count * end, 1.0)))


def _trend(heights: Floats) -> Floats:
    """Medians of blocks, smoothed by a median of three, with straight lines between their middles."""
    count = len(heights) // BLOCK
    medians = np.median(heights[: count * BLOCK].reshape(count, BLOCK), axis=1)
    smooth = medians.copy()
    smooth[1:-1] = np.median(np.lib.stride_tricks.sliding_window_view(medians, 3), axis=1)
    smooth[-1] = np.median(
        [medians[-1], smooth[-2], 2 * smooth[-2] - smooth[-3]]
    )  # else a leap at the end is the trend
    return np.interp(np.arange(len(heights)), np.arange(count) * BLOCK + (BLOCK - 1) / 2, smooth)


def _usual(above: Floats, quietest: float) -> Floats:
    """The usual deviation at each point, by the points around it."""
    count = max(len(above) // AROUND, 1)
    parts = np.abs(above[: count * AROUND]).reshape(count, -1) if len(above) >= AROUND else np.abs(above)[None]
    spread = 1.4826 * np.median(parts, axis=1)
    padded = np.pad(spread, 1, mode="edge")
    around = np.median(np.lib.stride_tricks.sliding_window_view(padded, 3), axis=1)
    middles = np.arange(count) * AROUND + (AROUND - 1) / 2
    return np.maximum(np.interp(np.arange(len(above)), middles, around), quietest)


def _runs(mask: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    return zip(edges[::2].tolist(), (edges[1::2] - 1).tolist(), strict=True)
