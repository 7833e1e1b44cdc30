"""Which rows of a record stand, and which the run went back over: the one place that decides it.

A resume or a rollback goes back to an earlier step and writes its rows anew. The rows before that are an attempt, the
rows after it the next one. A row stands if no later row goes back to its step or behind it.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Indices: TypeAlias = NDArray[np.int64]
Mask: TypeAlias = NDArray[np.bool_]

HABIT, FEWEST_OF_HABIT = 0.05, 4
"""Share of the rows, and their number, from which on steps that come twice in a row are the logger's habit: several
processes that write into one file repeat every step, a resume at the last written step repeats one."""


class Attempts(NamedTuple):
    """The rows of a record, told apart."""

    of_rows: Indices
    """For each row, how often the run had gone back before it."""
    standing: Indices
    """The rows that stand, one for each step: the last of its rows."""
    begins: Indices
    """The first row of each of these steps, because the signals of a step may come in several rows."""


def attempts_of(steps: Indices, logged: Mapping[str, Mask]) -> Attempts:
    """Tell the rows apart by their steps, and by the signals that each row has.

    Consecutive rows of a step that have no signal in common are one row. A signal that comes twice is a resume at the
    last written step.

    >>> loss = np.array([True, True, False, True, True])
    >>> found = attempts_of(np.array([0, 1, 1, 2, 2]), {"loss": loss, "eval_loss": ~loss})
    >>> found.of_rows.tolist(), found.standing.tolist(), found.begins.tolist()
    ([0, 0, 0, 0, 1], [0, 2, 4], [0, 1, 4])
    """
    standing = standing_rows(steps)
    begins_anew = np.diff(steps, prepend=steps[:1]) < 0
    if not (steps[1:] == steps[:-1]).any():
        return Attempts(np.cumsum(begins_anew, dtype=np.int64), standing, standing)
    repeated = _repeated(steps, logged)
    if len(repeated) < max(FEWEST_OF_HABIT, HABIT * len(steps)):
        begins_anew[repeated] = True
    begins = np.append(True, steps[1:] != steps[:-1])
    begins[repeated] = True
    return Attempts(np.cumsum(begins_anew, dtype=np.int64), standing, last_so_far(begins)[standing])


def attempts_of_rows(rows: Iterable[Mapping[str, Any]]) -> Attempts:
    """The same for rows as mappings, in the order written."""
    rows = list(rows)
    names = {name for row in rows for name in row}
    logged = {name: np.array([name in row for row in rows], np.bool_) for name in names}
    return attempts_of(np.array([int(row["step"]) for row in rows], np.int64), logged)


def standing_rows(steps: Indices) -> Indices:
    """The rows that are final for their step: those that no later row goes back to or behind.

    >>> standing_rows(np.array([0, 1, 2, 3, 2, 3, 4])).tolist()
    [0, 1, 4, 5, 6]
    """
    if not len(steps):
        return np.empty(0, np.int64)
    if (steps[:-1] < steps[1:]).all():  # as in most runs
        return np.arange(len(steps))
    lowest_later = np.minimum.accumulate(steps[::-1])[::-1][1:]
    return np.flatnonzero(np.append(steps[:-1] < lowest_later, True))


def _repeated(steps: Indices, logged: Mapping[str, Mask]) -> Indices:
    """The rows that bring a signal again that an earlier row of the same step brought."""
    goes_on = steps[1:] == steps[:-1]
    begins, ends = np.append(True, ~goes_on), np.append(~goes_on, True)
    several = np.flatnonzero(~(begins & ends))  # the others need no look at their signals
    first = last_so_far(begins[several])
    before = np.full(len(several), -1)
    for mask in (mask[several] for signal, mask in logged.items() if signal not in ("step", "time")):
        before = np.maximum(before, np.where(mask, np.append(-1, last_so_far(mask)[:-1]), -1))
    found, since = [], -1
    for place in np.flatnonzero(before >= first).tolist():
        if before[place] >= since:
            found.append(place)
            since = place
    return several[found]


def last_so_far(mask: Mask) -> Indices:
    """For each position the last one up to it where the mask is set, or -1."""
    return np.maximum.accumulate(np.where(mask, np.arange(len(mask)), -1))
