"""Gives the rows of a log integer steps: finds the column that counts them, or counts rows where there is none."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sealegs.readers import names
from sealegs.record.columns import Column, Columns, Mask

LARGEST = 2.0**53
_ENOUGH = 0.5
"""Share of the rows with a loss that must have a step for a column to count steps."""
_CHANGES = dict(zip(names.CARRIED, (0.1, 0.5), strict=True))
"""Share of the steps that must change from row to row, for steps carried from another row."""

FEWEST_FALLS, _FALLS, _BEGINNING = 8, 0.25, 0.05
"""Falls, and their share of all changes, from which on a column may be no counter; and the part of its range that
counts as its beginning."""
_REPEATED = 0.25
"""Share of the rows that may say an epoch again where epochs count the rows."""
_EACH = 0.5
"""Share of the epochs at which steps go back that begin anew with each of them."""
_STARTED_AGAIN = 0.1
"""Share of the steps back at which the epoch may not be a later one: the run was started again there."""

FEWEST_BARS, _FULL = 3, 0.9
"""Bars that were full before another began, and the share of their length from which on they are."""

Steps = NDArray[np.int64]


class NumberedRows(NamedTuple):
    """Columns with integer steps and one row per step."""

    columns: Columns
    used: str | None
    """The column that the steps are from."""
    remarks: list[str]
    steps: Steps
    """The step of each of the rows as they were before those of one step were merged."""


def number_rows(columns: Columns, loss: str, said: str | None) -> NumberedRows:
    """Find the column that counts steps, or count rows where there is none."""
    measured = columns.logged[loss]
    counted, used, remarks = _counted(columns, measured, said)
    steps, more = _in_epochs(columns, counted, used)
    if not more and used is not None and used.startswith(names.CARRIED[0]):
        steps, more = _in_bars(counted, used, columns.values[loss])
    steps = _beside_the_loss(steps, measured)
    merged, repeated = _merged(columns, steps, measured)
    for name in [name for name in merged.values if name == used or name.startswith(names.CARRIED)]:
        del merged.values[name], merged.logged[name]
    if names.STEP in merged.values:  # another column of that name
        merged.values["step (column)"] = merged.values.pop(names.STEP)
        merged.logged["step (column)"] = merged.logged.pop(names.STEP)
    values = {names.STEP: _at_ends(steps).astype(np.float64), **merged.values}
    logged = {names.STEP: np.ones(merged.rows, np.bool_), **merged.logged}
    again = [f"{repeated} rows repeat a step: the last of each is taken"] if repeated else []
    return NumberedRows(replace(merged, values=values, logged=logged), used, [*remarks, *more, *again], steps)


def _counted(columns: Columns, measured: Mask, said: str | None) -> tuple[Column, str | None, list[str]]:
    """A float step for each row, NaN where it has none; the column it is from; and a notice."""
    for name in [said] if said else names.candidates(columns, names.STEP):
        column = columns.values[name]
        if not _counts(name, column[measured]) or (_goes_anywhere(column[measured]) and not _by_epoch(columns, column)):
            continue
        steps = column.copy()
        for other in names.candidates(columns, names.STEP):  # nanoGPT counts `iter`, but `step` where it evaluates
            if not other.startswith(names.CARRIED) and _counts_alike(column, columns.values[other]):
                steps = np.where(np.isfinite(steps), steps, columns.values[other])
        if (steps[np.isfinite(steps)] % 1).any():
            return _ranks(steps), name, [f"{name} has fractions: steps are its values in order"]
        return steps, name, []
    for name in names.candidates(columns, names.EPOCH):
        epochs = columns.values[name]
        here = epochs[measured]
        again = _REPEATED * len(here)  # a best epoch is printed again where it is saved
        is_each = len(here) > 1 and np.isfinite(here).all() and np.count_nonzero(np.diff(here) == 0) <= again
        if is_each and (abs(here) < LARGEST).all():
            if (epochs[np.isfinite(epochs)] % 1).any():
                return _ranks(epochs), None, [f"no step column: steps are the values of {name} in order"]
            return epochs, None, [f"no step column: steps are those of {name}"]
    numbers = np.cumsum(measured) - 1.0
    why = (
        f"{said or 'its step column'} does not count"
        if said or names.candidates(columns, names.STEP)
        else "no step column"
    )
    return np.maximum(numbers, 0.0), None, [f"steps are row numbers: {why}"]


def _counts(name: str, steps: Column) -> bool:
    """Whether numbers tell rows apart: there for most of them, and different often enough."""
    known = steps[np.isfinite(steps) & (abs(steps) < LARGEST)]
    if len(known) < _ENOUGH * len(steps) or not len(known):
        return False
    changes = next((share for start, share in _CHANGES.items() if name.startswith(start)), 0.02)
    return len(known) == 1 or bool(np.count_nonzero(np.diff(known)) >= max(1, changes * (len(known) - 1)))


def _counts_alike(steps: Column, other: Column) -> bool:
    """Whether two columns say the same where both are there: iterations are no updates, of which each has several."""
    both = np.isfinite(steps) & np.isfinite(other)
    return not both.any() or bool(np.median(np.abs(steps[both] - other[both])) <= 1)


def _goes_anywhere(steps: Column) -> bool:
    """Whether values often fall, and not to where they began: lengths of episodes are called steps, too."""
    steps = steps[np.isfinite(steps)]
    fallen = np.flatnonzero(np.diff(steps) < 0) + 1
    if len(fallen) < FEWEST_FALLS or len(fallen) < _FALLS * (len(steps) - 1):
        return False
    least, most = float(steps.min()), float(steps.max())
    begun_again = steps[fallen] <= least + _BEGINNING * (most - least)
    return bool(np.mean(begun_again) < _ENOUGH)


def _by_epoch(columns: Columns, steps: Column) -> bool:
    """Whether a column falls where an epoch begins: it counts batches, not all of which are logged."""
    for name in names.candidates(columns, names.EPOCH)[:1]:
        known = np.isfinite(steps) & np.isfinite(columns.values[name])
        begun = np.diff(columns.values[name][known])[np.diff(steps[known]) < 0]
        return bool(len(begun)) and bool(np.mean(begun <= 0) <= _STARTED_AGAIN)
    return False


def _ranks(steps: Column) -> Column:
    known = np.isfinite(steps)
    ranks = np.full(len(steps), np.nan)
    ranks[known] = np.unique(steps[known], return_inverse=True)[1]
    return ranks


def _in_epochs(columns: Columns, steps: Column, used: str | None) -> tuple[Column, list[str]]:
    """Steps that start again with each epoch, made continuous. Other steps that go back are a resume, and stay."""
    found = names.candidates(columns, names.EPOCH)
    if used is None or not found:
        return steps, []
    known = np.flatnonzero(np.isfinite(steps) & np.isfinite(columns.values[found[0]]))
    epochs, here = columns.values[found[0]][known], steps[known]
    back = np.diff(here) < 0
    begun = np.diff(epochs)[back]
    if not back.any() or np.mean(begun <= 0) > _STARTED_AGAIN:
        return steps, []
    later = np.diff(epochs) > 0
    if np.count_nonzero(back & later) < _EACH * np.count_nonzero(later):  # they run on, and were started again
        return steps, []
    length = here.max() + (here.min() == 0)
    offset = np.zeros(len(here))
    offset[1:][back] = length
    moved = steps.copy()
    if (begun <= 0).any():  # started again in between
        moved[known] = here + (np.floor(epochs) - np.floor(epochs[0])) * length
    else:
        moved[known] = here + np.cumsum(offset)
    return moved, [f"{used} begins anew with each {found[0]}: made to run on"]


def _in_bars(steps: Column, used: str, losses: Column) -> tuple[Column, list[str]]:
    """Steps of a progress bar that is full before it begins anew, made continuous where the loss goes on.

    Such a bar is of one pass over the data. Where the loss begins anew with it, each bar is a training of its own.
    """
    length = float(used.rpartition(" ")[2])
    known = np.flatnonzero(np.isfinite(steps) & np.isfinite(losses))
    here, heights = steps[known], losses[known]
    ends = np.flatnonzero(np.diff(here) < 0)
    if len(ends) < FEWEST_BARS or np.mean(here[ends] < _FULL * length) > _STARTED_AGAIN:
        return steps, []
    goes_on = np.abs(heights[ends + 1] - heights[ends]) < np.abs(heights[ends + 1] - heights[0]) / 2
    if np.mean(goes_on[1:]) < _ENOUGH:  # after the first pass it may not be far from where it began
        return steps, []
    offset = np.zeros(len(here))
    offset[ends + 1] = length
    moved = steps.copy()
    moved[known] = here + np.cumsum(offset)
    return moved, ["the bar begins anew with each pass over the data: made to run on"]


def _beside_the_loss(steps: Column, measured: Mask) -> Steps:
    """Integer steps for all rows. Only losses that go back are a resume: other rows stay between their neighbours."""
    usable = np.isfinite(steps) & (abs(steps) < LARGEST)
    at = np.flatnonzero(measured & usable)
    if len(at) == len(steps):
        return steps.astype(np.int64)
    if not len(at):
        return np.arange(len(steps))
    place = np.searchsorted(at, np.arange(len(steps)), side="right") - 1
    before = np.where(
        place < 0, np.min(steps[: at[0] + 1], where=usable[: at[0] + 1], initial=LARGEST), steps[at[place]]
    )
    after = np.where(place + 1 < len(at), steps[at[np.minimum(place + 1, len(at) - 1)]], LARGEST)
    own = np.where(usable, steps, before)
    ahead = 1 + np.flatnonzero(
        measured[:-2] & (measured & ~usable)[1:-1] & (usable & ~measured)[2:]
    )  # it has a loss, as the row before it, and the row after it has none: they are of one step
    own[ahead] = steps[ahead + 1]
    segment = np.append(0, np.cumsum(np.diff(steps[at]) < 0))[np.maximum(place, 0)]
    is_next = (after < before) & (own <= after)  # a row after the resume, but before its first loss
    segment = segment + is_next
    own = np.where(after < before, own, np.clip(own, np.minimum(before, after), after))
    for stretch in np.split(own, np.flatnonzero(np.diff(segment)) + 1):
        np.maximum.accumulate(stretch, out=stretch)
    whole: Steps = own.astype(np.int64)
    return whole


def _at_ends(steps: Steps) -> Steps:
    ends: Steps = steps[np.append(np.diff(steps) != 0, True)]
    return ends


def _merged(columns: Columns, steps: Steps, measured: Mask) -> tuple[Columns, int]:
    """Consecutive rows of one step merged, the last value of each signal kept; and how many losses that dropped."""
    same = np.diff(steps) == 0
    if not same.any():
        return replace(columns, values=dict(columns.values), logged=dict(columns.logged)), 0
    ends = np.flatnonzero(np.append(~same, True))
    begins = np.append(0, ends[:-1] + 1)
    values, logged = {}, {}
    for name, mask in columns.logged.items():
        last = np.maximum.accumulate(np.where(mask, np.arange(len(mask)), -1))[ends]
        logged[name] = last >= begins
        none = b"" if columns.values[name].dtype.kind == "S" else np.nan
        values[name] = np.where(logged[name], columns.values[name][np.maximum(last, 0)], none)
    repeated = int(np.sum(measured)) - int(np.sum(np.add.reduceat(measured.astype(np.int64), begins) > 0))
    return replace(columns, values=values, logged=logged, rows=len(ends)), repeated
