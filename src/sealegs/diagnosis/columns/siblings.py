"""Columns of the same name but for a number in, the ones that part from the others out.

The siblings are layers, ranks, experts, groups. Each is compared with the median of all of them in the same row, so
that what all do is no news.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sealegs.diagnosis.columns.levels import FEWEST, Change, course_of
from sealegs.diagnosis.curve.loss_curve import Indices
from sealegs.record.run import Run
from sealegs.record.schema import SIGNALS

LEAST = 3
"""The fewest siblings, so that two say which is the third."""
MOST_CELLS = 3_000_000
"""Values of a family that are looked at: of a longer log every second, third, ... row."""
_NUMBER = re.compile(r"\d+")


PARTED = 2.0
"""Times as high or low, against the others, that a sibling must have become."""
BEYOND = 3.0
"""Times as far as the others go from each other."""
ALONE = 5.0
"""Times the others that a single value must be to leap alone."""
ODD = 15.0
"""The same in deviations of the siblings from each other."""
SAME = 1e-6
"""Share by which copies may differ: they are logged with so many digits."""


class Parting(NamedTuple):
    """A sibling that is not as the others any more."""

    signal: str
    row: int
    change: Change


class Leaps(NamedTuple):
    """Rows in which one sibling alone was far above the others."""

    signal: str
    rows: Indices
    highest: float
    """Times the others, at the highest."""


@dataclass(frozen=True)
class Family:
    """Siblings, and their values in the rows that have all of them."""

    names: tuple[str, ...]
    steps: Indices
    values: NDArray[np.float64]
    """A row for each of the steps, a column for each sibling."""
    is_numbered: bool
    """Whether they differ by a number alone: layers, ranks, experts. Groups by name differ in what they are."""

    @cached_property
    def apart(self) -> NDArray[np.float64] | None:
        """The logarithm of each over the median of all in its row; None if some are not above zero."""
        if not (self.values > 0).all():
            return None
        heights = np.log(self.values)
        return np.asarray(heights - np.median(heights, axis=1, keepdims=True))


def families(run: Run, names: Sequence[str]) -> Iterator[Family]:
    """The families among some columns: the same name but for the last number in it, or parts of one of our signals."""
    numbered: Mapping[str, list[str]] = defaultdict(list)
    named: Mapping[str, list[str]] = defaultdict(list)
    for name in names:
        numbers = list(_NUMBER.finditer(name))
        first, _, rest = name.partition("/")
        if numbers:
            at = numbers[-1]
            numbered[f"{name[: at.start()]}#{name[at.end() :]}"].append(name)
        if rest and first in SIGNALS:
            named[first].append(name)
    large = [set(of) for of in numbered.values() if len(of) >= LEAST]
    groups = [(of, True) for of in numbered.values()]
    groups += [(of, False) for of in named.values() if set(of) not in large]
    for of, is_numbered in groups:
        if len(of) < LEAST:
            continue
        logged = np.logical_and.reduce([run.logged(name, copy=False) for name in of])
        rows = np.flatnonzero(logged)
        rows = rows[:: -(-len(rows) * len(of) // MOST_CELLS) or 1]
        if len(rows) < FEWEST:
            continue
        values = np.stack([run.column(name, copy=False)[rows] for name in of], axis=1)
        sound = np.isfinite(values).all(axis=1)
        if sound.sum() >= FEWEST:
            yield Family(tuple(of), run.steps[rows][sound], values[sound], is_numbered)


def copies_part(family: Family) -> Parting | None:
    """The copy that differs most, and since when any does, after all were the same to the last digit logged.

    What was never the same, and what stands still, cannot part.
    """
    middle = np.median(family.values, axis=1)
    off = np.abs(family.values - middle[:, None])
    size = np.maximum(np.abs(middle), 1e-300)
    wrong = np.flatnonzero(off.max(axis=1) > SAME * size)
    if not len(wrong) or wrong[0] < FEWEST or not (middle != 0).any():
        return None
    first, lasting = int(wrong[0]), max(len(middle) // 10, 8)
    if len(np.unique(middle[:first])) < 5 or len(wrong) < 0.9 * (len(middle) - first) or len(middle) - first < lasting:
        return None
    share = np.median(off[-lasting:] / size[-lasting:, None], axis=0)
    place = int(np.argmax(share))
    return Parting(family.names[place], first, Change(first, 0.0, float(share[place]), 0.0))


def part(family: Family) -> Iterator[Parting]:
    """Siblings that leave the others for good, by their own past and by how far the others are from each other."""
    apart = family.apart
    if apart is None:
        return
    end, begin = max(len(apart) // 10, 8), max(len(apart) // 3, 8)
    moved = np.abs(np.median(apart[-end:], axis=0) - np.median(apart[:begin], axis=0))
    least = math.log(PARTED)
    for place in np.flatnonzero(moved >= least).tolist():
        others = np.delete(moved, place)
        if moved[place] < BEYOND * max(float(np.median(others)), 1e-9) or (others > moved[place] / 2).sum() > 1:
            continue
        course = course_of(family.names[place], family.steps, np.exp(apart[:, place]))
        if course is None:
            continue
        found = (course.leap(up=up, least=least) or course.rise(up=up, least=least) for up in (True, False))
        change = next((one for one in found if one is not None), None)
        if change is not None:
            row = int(np.searchsorted(family.steps, course.steps[change.row]))
            yield Parting(family.names[place], row, change)


def leaps_alone(family: Family) -> Leaps | None:
    """One of the siblings that is far above the others in some rows, and hardly any other ever is."""
    if not family.is_numbered or family.apart is None:
        return None
    apart = family.apart - np.median(family.apart, axis=0)
    usual = 1.4826 * np.maximum(np.median(np.abs(apart), axis=0), float(np.median(np.abs(apart))))
    far = apart > np.maximum(math.log(ALONE), ODD * usual)
    count = far.sum(axis=0)
    place = int(np.argmax(count))
    if count[place] < 2 or count[place] < 0.8 * count.sum() or count[place] > len(far) // 4:
        return None
    return Leaps(family.names[place], np.flatnonzero(far[:, place]), float(np.exp(apart[:, place].max())))
