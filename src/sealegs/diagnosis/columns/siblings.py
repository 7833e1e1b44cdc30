"""Columns of the same name but for a number in, the ones that part from the others out.

The siblings are layers, ranks, experts, groups. Each is compared with the median of all of them in the same row, so that
what all do is no news.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sealegs.diagnosis.columns.levels import FEWEST
from sealegs.diagnosis.curve.loss_curve import Floats, Indices
from sealegs.record.run import Run

LEAST = 3
"""The fewest siblings, so that two say which is the third."""
MOST_CELLS = 20_000_000
"""Values of a family that are looked at."""
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Family:
    """Siblings, and their values in the rows that have all of them."""

    names: tuple[str, ...]
    steps: Indices
    values: NDArray[np.float64]
    """A row for each of the steps, a column for each sibling."""

    def others(self, place: int) -> Floats:
        """The median of the other siblings in each row."""
        return np.asarray(np.median(np.delete(self.values, place, axis=1), axis=1))


def families(run: Run, names: Sequence[str]) -> Iterator[Family]:
    """The families among some columns: the same name but for the last number in it."""
    by_name: Mapping[str, list[str]] = defaultdict(list)
    for name in names:
        numbers = list(_NUMBER.finditer(name))
        if numbers:
            at = numbers[-1]
            by_name[f"{name[: at.start()]}#{name[at.end() :]}"].append(name)
    for of in by_name.values():
        if len(of) < LEAST or len(of) * len(run.steps) > MOST_CELLS:
            continue
        logged = np.logical_and.reduce([run.logged(name, copy=False) for name in of])
        rows = np.flatnonzero(logged)
        if len(rows) < FEWEST:
            continue
        values = np.stack([run.column(name, copy=False)[rows] for name in of], axis=1)
        sound = np.isfinite(values).all(axis=1)
        if sound.sum() >= FEWEST:
            yield Family(tuple(of), run.steps[rows][sound], values[sound])


def part(family: Family, *, least_rows: int = FEWEST) -> tuple[str, int, float] | None:
    """The sibling that first parts from the others after all were the same, the row, and by how much in the end.

    Copies of one thing are the same to the last digit that is logged. What was never the same cannot part.
    """
    middle = np.median(family.values, axis=1)
    apart = np.abs(family.values - middle[:, None]).max(axis=1)
    size = np.maximum(np.abs(middle), 1e-300)
    same = apart <= 1e-6 * size
    if not (middle != 0).any() or len(np.unique(middle[: least_rows * 4])) < 5:
        return None
    wrong = np.flatnonzero(~same)
    if not len(wrong) or wrong[0] < least_rows:
        return None
    first = int(wrong[0])
    lasting = max(len(middle) // 10, 8)
    rest = same[first:]
    if rest.mean() > 0.1 or same[-lasting:].any():
        return None
    place = int(np.argmax(np.abs(np.median(family.values[-lasting:] - middle[-lasting:, None], axis=0))))
    off = float(np.median(np.abs(family.values[-lasting:, place] - middle[-lasting:]) / size[-lasting:]))
    return family.names[place], first, off
