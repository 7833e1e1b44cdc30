"""The values of one column in, its course out: medians of stretches, how much they usually change, and by which chance
a change comes from that.

A change is measured in what the same column has done over as many rows before, so that trends, wandering and noise are
no news. The chance is that of a t distribution of six degrees, whose tails are heavy.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from sealegs.diagnosis.curve.loss_curve import Floats, Indices
from sealegs.record.run import Run

FEWEST = 36
"""Values from which a column has a course."""
MOST = 100
"""Stretches that a column is read in."""
SIZE = 3
"""The fewest values of a stretch: the median of three leaves single leaps out."""
QUIETEST = 0.005
"""Noise below which a column is not taken to be, on a logarithmic scale or as a share of its size."""


@dataclass(frozen=True)
class Change:
    """A change of level that lasts to the end."""

    row: int
    """The stretch in which it begins."""
    before: float
    after: float
    """Levels on the column's own scale."""
    chance: float
    """How likely the column's own ways bring about such a change somewhere in the log."""

    @property
    def factor(self) -> float:
        """The level after it as a multiple of the one before."""
        return self.after / self.before if self.before else math.inf


@dataclass(frozen=True)
class Course:
    """A column over the whole log, in stretches of as many values each."""

    signal: str
    steps: Indices
    """The first step of each stretch."""
    medians: Floats
    is_positive: bool
    """Whether all values are above zero: then it is judged on a logarithmic scale."""
    size: int
    """Values in a stretch."""

    @cached_property
    def heights(self) -> Floats:
        """The medians on the scale on which they are judged."""
        if self.is_positive:
            return np.asarray(np.log(np.maximum(self.medians, 1e-300)))
        unit = float(np.median(np.abs(self.medians))) or float(np.abs(self.medians).max()) or 1.0
        return np.asarray(self.medians / unit)

    @property
    def count(self) -> int:
        """How many stretches there are."""
        return len(self.medians)

    @property
    def young(self) -> int:
        """Stretches at the beginning that are no past: a warm-up."""
        return max(self.count // 10, 1)

    @property
    def lasting(self) -> int:
        """Stretches to the end in which something must have stayed."""
        return max(self.count // 10, 3)

    @property
    def gap(self) -> int:
        """Stretches within which a change is a leap."""
        return max(self.count // 20, 1)

    def end(self) -> float:
        """The level in the end."""
        return float(np.median(self.medians[-self.lasting :]))

    def leap(self, *, up: bool, least: float) -> Change | None:
        """The change by which everything after it is beyond everything before it, by so much at the least."""
        heights = self.heights if up else -self.heights
        count, gap = self.count, self.gap
        first, last = self.young + max(count // 10, 3), count - self.lasting - gap
        at = np.arange(first, last + 1)
        if not len(at):
            return None
        highest = np.maximum.accumulate(heights[self.young :])[at - self.young - 1]
        lowest = np.minimum.accumulate(heights[::-1])[::-1][at + gap]
        best = int(np.argmax(lowest - highest))
        if not lowest[best] - highest[best] >= least:
            return None
        row = int(at[best])
        before = heights[max(row - max(count // 5, 5), self.young) : row]
        shift = float(np.median(heights[row + gap :]) - np.median(before))
        chance = self._chance(heights, row, shift, gap) * len(at) / (gap + 1)
        began = row + int(np.argmax(heights[row : row + gap + 1] > highest[best]))
        return Change(began, self._level(before, up=up), self._level(heights[row + gap :], up=up), min(chance, 1.0))

    def early_fall(self, *, least: float) -> Change | None:
        """A lasting fall with too little before it to know the column's own ways: they are those after it. It is a leap
        where the column is read backwards; for positive ones."""
        backwards = replace(self, steps=self.steps[::-1], medians=self.medians[::-1])
        found = backwards.leap(up=True, least=least)
        if found is None:
            return None
        row = self.count - found.row
        is_early = row < self.young + max(self.count // 10, 3) + self.gap
        if not is_early or math.log(self.end() / found.before) > least / 2:  # the last rows are no past of its
            return None
        return Change(max(row - self.gap, 0), found.after, found.before, found.chance)

    def rise(self, *, up: bool, least: float) -> Change | None:
        """The change from the lowest level after the warm-up to that of the end, slow or not."""
        heights = self.heights if up else -self.heights
        width = self.lasting
        if self.count < self.young + 3 * width:
            return None
        levels = np.median(np.lib.stride_tricks.sliding_window_view(heights, width), axis=1)
        lowest = self.young + int(np.argmin(levels[self.young : -2 * width]))
        end = float(levels[-1])
        rise = end - float(levels[lowest])
        stays = float(heights[-width:].min()) - float(levels[lowest]) >= rise / 2
        if rise < least or not stays:
            return None
        chance = two_sided(rise / _unsteady(levels[self.young :], width)) * self.count / width
        half = float(levels[lowest]) + rise / 2
        row = lowest + int(np.argmax(levels[lowest:] >= half))
        began = max(int(np.flatnonzero(levels[: row + 1] <= float(levels[lowest]) + rise / 10)[-1]), 0)
        low, high = self._level(heights[lowest : lowest + width], up=up), self._level(heights[-width:], up=up)
        return Change(began + width // 2, low, high, min(chance, 1.0))

    def decline(self, *, least: float) -> Change | None:
        """The deepest fall after the warm-up, where it took more than a quarter of the log and came bit by bit; it may
        have come back."""
        heights = self.heights[self.young :]
        falls = np.maximum.accumulate(heights) - heights
        low = int(np.argmax(falls))
        high = int(np.argmax(heights[: low + 1]))
        if not falls[low] >= least or low - high <= self.count / 4:
            return None
        if -np.diff(heights[high : low + 1]).min() > falls[low] / 2:  # at once, and early
            return None
        width = self.lasting
        levels = np.median(np.lib.stride_tricks.sliding_window_view(heights, width), axis=1)
        if not (np.maximum.accumulate(levels) - levels).max() >= least:  # of the highest and the lowest of noise
            return None
        chance = two_sided(float(falls[low]) / _unsteady(levels, width)) * self.count / width
        row = self.young + high
        return Change(row, float(self.medians[row]), float(self.medians[self.young + low]), min(chance, 1.0))

    def vanishes(self, *, times: float) -> Change | None:
        """A fall to next to nothing of what there was in the first third, for more than half of the log."""
        third = self.medians[: max(self.count // 3, 3)]
        high = float(np.maximum.accumulate(third)[-1])
        low = np.flatnonzero(self.medians > high / times)
        first = int(low[-1]) + 1 if len(low) else 0
        if high <= 0 or not 0 < first < self.count // 2:
            return None
        return Change(first, high, self.end(), 0.0)

    def _chance(self, heights: Floats, row: int, shift: float, gap: int) -> float:
        """The chance of a change by what changes over as many stretches were before it."""
        past = heights[self.young : row]
        lag = gap + 1
        own = past[lag:] - past[:-lag] if len(past) > lag + 3 else np.diff(past)
        usual = float(np.median(own))
        spread = max(1.4826 * float(np.median(np.abs(own - usual))), QUIETEST)
        largest = float(np.abs(own - usual).max(initial=0.0)) / 3  # a past of few leaps is not quiet
        return two_sided((shift - usual) / max(spread, largest))

    def _level(self, heights: Floats, *, up: bool) -> float:
        at = float(np.median(heights if up else -heights))
        if self.is_positive:
            return math.exp(at)
        unit = float(np.median(np.abs(self.medians))) or float(np.abs(self.medians).max()) or 1.0
        return at * unit


def _unsteady(levels: Floats, width: int) -> float:
    """How much the change over some stretches usually differs from the change over as many before: of a steady course
    nothing, of one that wanders as much as it goes."""
    bends = levels[2 * width :] - 2 * levels[width:-width] + levels[: -2 * width]
    return max(1.4826 * float(np.median(np.abs(bends))), QUIETEST) if len(bends) else math.inf


def two_sided(t: float) -> float:
    """The chance of a deviation of so many spreads or more, by a t distribution of six degrees.

    >>> round(two_sided(2.447), 3), two_sided(50) < 1e-7
    (0.05, True)
    """
    if t <= 0:
        return 1.0
    if t > 30:
        return 68 / t**6  # of the formula below, rounding is all that is left
    share = t / math.sqrt(6 + t * t)
    return 1 - share * (15 - 10 * share**2 + 3 * share**4) / 8


def values_of(run: Run, signal: str) -> tuple[Indices, Floats]:
    """The steps and finite values of a column; empty if it is none of numbers."""
    if not run.has_numbers(signal):
        return np.empty(0, np.int64), np.empty(0)
    steps, values = run.series(signal)
    is_finite = np.isfinite(values)
    return (steps, values) if is_finite.all() else (steps[is_finite], values[is_finite])


def course_of(signal: str, steps: Indices, values: Floats) -> Course | None:
    """The course of a column; None if it has too few values, or too many are the same nothing."""
    if len(values) < FEWEST:
        return None
    size = max(SIZE, -(-len(values) // MOST))
    whole = len(values) // size * size  # rows that fill no stretch are the first: the end tells more
    medians = np.median(values[len(values) - whole :].reshape(-1, size), axis=1)
    is_positive = bool(values.min() > 0) or (values.min() >= 0 and bool(medians.min() > 0))
    return Course(signal, steps[len(steps) - whole :: size], medians, is_positive, size)
