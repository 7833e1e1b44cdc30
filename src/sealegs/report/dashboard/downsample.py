"""Reduces a series of any length to few points, and keeps extremes, gaps and values that are not finite.

The rows are cut into stretches of equal length. The lowest and the highest value of each stretch stay, at their own
steps. A line breaks where a row is not finite, where rows are missing, and where steps go back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Steps: TypeAlias = NDArray[np.int64]
Mask: TypeAlias = NDArray[np.bool_]

GAP = 3
"""Rows are missing between two rows that are further apart than this many of the intervals around them."""
MOST_BROKEN = 400
"""The most marks for values that are not finite: more of them could not be told apart."""
MEANS = 200
"""Points of a smoothed line."""
FEWEST_AVERAGED = 5
"""Fewest rows that a smoothed point averages. A line of less than four such points stays as it is."""


class Broken(NamedTuple):
    """A stretch with rows that are not finite."""

    first: int
    last: int
    rows: int
    what: str
    """``NaN``, ``Infinity``, ``-Infinity``, or several of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """A line as it is drawn. It breaks at a NaN among the values; values that are not finite are in ``broken``."""

    steps: Steps
    values: Floats
    broken: tuple[Broken, ...]
    mean_steps: Steps
    mean_values: Floats
    rows: int
    """Rows of the series."""
    averaged: int
    """Rows that a point of the smoothed line stands for."""

    @property
    def lone(self) -> Mask:
        """Points with a break on both sides, which a line does not show."""
        is_break = np.concatenate([[True], np.isnan(self.values), [True]])
        alone: Mask = ~is_break[1:-1] & is_break[:-2] & is_break[2:]
        return alone


def reduced(steps: Steps, values: Floats, points: int, whole: Sequence[tuple[int, int]] = ()) -> Reduced:
    """At most about ``points`` points of a series, and every row of the step ranges in ``whole``; its smoothed line has
    no more than that.

    >>> line = reduced(np.arange(6), np.array([3.0, 2.0, np.nan, 9.0, 1.0, 2.0]), points=2)
    >>> line.steps.tolist(), line.values.tolist(), line.broken
    ([0, 3, 3, 4, 5], [3.0, nan, 9.0, 1.0, 2.0], (Broken(first=2, last=2, rows=1, what='NaN'),))
    """
    finite = np.isfinite(values)
    breaks = np.flatnonzero(_gaps(steps) | _after(~finite))
    rows = np.flatnonzero(finite)
    width = -(-2 * len(rows) // max(points, 2))
    has_all = len(rows) == len(values)  # then nothing needs to be copied
    sound_steps, sound_values = (steps, values) if has_all else (steps[rows], values[rows])
    kept = rows if len(rows) <= points else rows[_extremes(sound_values, width, sound_steps, whole)]
    means, averaged = _means(values, finite, min(MEANS, max(points, 2)))
    return Reduced(
        **_line("", steps, values, kept, breaks),
        **_line("mean_", steps, means, np.arange(averaged // 2, len(values), averaged), breaks),
        broken=tuple(_broken(steps, values, finite)),
        rows=len(values),
        averaged=averaged,
    )


def _gaps(steps: Steps) -> Mask:
    """The rows before which the line breaks because rows are missing, or because the steps go back.

    >>> np.flatnonzero(_gaps(np.array([0, 1, 2, 3, 40, 41, 42, 52, 62, 72, 5, 6]))).tolist()
    [4, 10]
    """
    gaps = np.zeros(len(steps), np.bool_)
    if len(steps) < 2:
        return gaps
    apart = np.diff(steps)
    if apart.max() <= GAP * apart.min():
        return gaps
    around = np.pad(apart, 2, mode="edge")
    near = around[:-4], around[1:-3], around[3:-1], around[4:]
    gaps[1:] = apart < 0
    if len(apart) > 2:
        least = np.minimum(np.minimum(*near[:2]), np.minimum(*near[2:]))
        wide = np.flatnonzero(apart > GAP * least)  # nearly none of a million rows: a median is expensive
        gaps[1 + wide] |= apart[wide] > GAP * np.median([each[wide] for each in near], axis=0)
    return gaps


def _after(mask: Mask) -> Mask:
    return np.concatenate([[False], mask[:-1]]) if len(mask) else mask


def _extremes(values: Floats, width: int, steps: Steps, whole: Sequence[tuple[int, int]]) -> Steps:
    """The rows that stay: the lowest and highest of every ``width`` rows, both ends, and those of the whole ranges."""
    padded = np.pad(values, (0, -len(values) % width), mode="edge").reshape(-1, width)
    begins = np.arange(len(padded)) * width
    stays = np.zeros(len(values), np.bool_)
    for best in (padded.argmin(axis=1), padded.argmax(axis=1)):
        stays[np.minimum(begins + best, len(values) - 1)] = True
    stays[[0, -1]] = True
    rising = [0, *(np.flatnonzero(np.diff(steps) < 0) + 1).tolist(), len(steps)] if whole else []
    for begin, end in pairwise(rising):
        for first, last in whole:
            left, right = np.searchsorted(steps[begin:end], [first, last + 1])
            stays[begin + left : begin + right] = True
    return np.flatnonzero(stays)


def _line(name: str, steps: Steps, values: Floats, rows: Steps, breaks: Steps) -> dict[str, Any]:
    """The points of these rows, with a NaN between two if the line breaks between them."""
    before = np.flatnonzero(np.diff(np.searchsorted(breaks, rows, side="right"))) + 1
    return {
        f"{name}steps": np.insert(steps[rows], before, steps[rows][before]),
        f"{name}values": np.insert(values[rows], before, np.nan),
    }


def _broken(steps: Steps, values: Floats, finite: Mask) -> list[Broken]:
    """The stretches that are not finite. Stretches that begin close together are merged, so that there are few."""
    rows = np.flatnonzero(~finite)
    if not len(rows):
        return []
    close = -(-len(values) // MOST_BROKEN)
    begins = np.append(True, (np.diff(rows) > 1) | (np.diff(steps[rows]) < 0))
    first_of_each = rows[begins]
    goes_back = np.diff(np.cumsum(np.append(0, np.diff(steps) < 0))[first_of_each]) != 0
    is_new = np.append(True, (np.diff(first_of_each // close) > 0) | goes_back)
    groups = np.split(rows, np.flatnonzero(begins)[is_new][1:])
    return [Broken(int(steps[rows].min()), int(steps[rows].max()), len(rows), _words(values[rows])) for rows in groups]


def _words(values: Floats) -> str:
    kinds = {"NaN": np.isnan(values), "Infinity": values == np.inf, "-Infinity": values == -np.inf}
    return " and ".join(name for name, mask in kinds.items() if mask.any())


def _means(values: Floats, finite: Mask, points: int) -> tuple[Floats, int]:
    """For each row the mean of the finite values around it, constant over ``averaged`` rows; and that number."""
    if len(values) < 4 * FEWEST_AVERAGED:
        return np.where(finite, values, np.nan), 1
    averaged = max(FEWEST_AVERAGED, -(-len(values) // points))
    begins = np.arange(0, len(values), averaged)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        sums = np.add.reduceat(values if finite.all() else np.where(finite, values, 0.0), begins)
        means = sums / np.add.reduceat(finite, begins, dtype=np.int64)
    means = np.where(np.isfinite(means), means, np.nan)
    return np.repeat(means, averaged)[: len(values)], averaged
