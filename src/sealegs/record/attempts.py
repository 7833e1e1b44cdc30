"""Which rows of a record stand, and which the run went back over: the one place that decides it.

A resume or a rollback goes back to an earlier step and writes its rows anew. The rows before that are an attempt, the
rows after it the next one. A launch that goes on without going back begins an attempt, too, where the log tells of it.
A row stands if no later row goes back to its step or behind it. So attempts are a tree: each goes on from a step of an
earlier one, or begins anew.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
    """For each row, how often the run had gone back, or had been launched anew, before it."""
    standing: Indices
    """The rows that stand, one for each step: the last of its rows."""
    begins: Indices
    """The first row of each of these steps, because the signals of a step may come in several rows."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Where a log tells that the run was launched anew, or went back to a checkpoint."""

    row: int
    """The number of rows before it."""
    told_by: str
    """The line that tells of it, or a sentence."""
    settings: Mapping[str, Any] | None = None
    """The settings that were printed there; None if none were."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A stretch of a run from a launch or a step back to the next."""

    number: int
    """0 for the first attempt, then one more each."""
    first: int
    last: int
    """The steps of its first and its last row."""
    parent: int | None = None
    """The number of the attempt that it goes on from; None if it begins anew."""
    begun_from: int | None = None
    """The last step of that attempt which it builds on."""
    told_by: str = ""
    """What tells that it begins: a line of the log, or a sentence about the steps."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The settings in force, by dotted names, as far as the log has them."""
    changed: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """Settings that differ from those of the attempt before: the value there, and the value here. None is unset."""
    given_up_from: int | None = None
    """The first of its steps that the run went back over; None if all of it stands."""

    @property
    def was_given_up(self) -> bool:
        """Whether the run went back over steps of it: these did not end well, or were lost."""
        return self.given_up_from is not None


def attempts_of(steps: Indices, logged: Mapping[str, Mask], launches: Iterable[int] = ()) -> Attempts:
    """Tell the rows apart by their steps, by the signals that each row has, and by the rows before which a log tells
    of a launch.

    Consecutive rows of a step that have no signal in common are one row. A signal that comes twice is a resume at the
    last written step.

    >>> loss = np.array([True, True, False, True, True])
    >>> found = attempts_of(np.array([0, 1, 1, 2, 2]), {"loss": loss, "eval_loss": ~loss})
    >>> found.of_rows.tolist(), found.standing.tolist(), found.begins.tolist()
    ([0, 0, 0, 0, 1], [0, 2, 4], [0, 1, 4])
    """
    standing = standing_rows(steps)
    begins_anew = np.diff(steps, prepend=steps[:1]) < 0
    begins_anew[[row for row in launches if 0 < row < len(steps)]] = True
    if not (steps[1:] == steps[:-1]).any():
        return Attempts(np.cumsum(begins_anew, dtype=np.int64), standing, standing)
    repeated = _repeated(steps, logged)
    if len(repeated) < max(FEWEST_OF_HABIT, HABIT * len(steps)):
        begins_anew[repeated] = True
    begins = np.append(True, steps[1:] != steps[:-1])
    begins[repeated] = True
    return Attempts(np.cumsum(begins_anew, dtype=np.int64), standing, last_so_far(begins)[standing])


def tree_of(steps: Indices, of_rows: Indices, launches: Sequence[Launch] = ()) -> tuple[Attempt, ...]:
    """The attempts of a record, and what each goes on from.

    >>> tree = tree_of(np.array([0, 1, 2, 3, 2, 3, 4, 0, 1]), np.array([0, 0, 0, 0, 1, 1, 1, 2, 2]))
    >>> [(one.first, one.last, one.parent, one.begun_from, one.given_up_from) for one in tree]
    [(0, 3, None, None, 0), (2, 4, 0, 1, 2), (0, 1, None, None, None)]
    """
    if not len(steps):
        return ()
    begins = np.append(0, np.flatnonzero(np.diff(of_rows)) + 1)
    ends = np.append(begins[1:], len(steps))
    told = {launch.row: launch for launch in launches}
    found: list[dict[str, Any]] = []
    standing: list[int] = []  # the attempts of which a step stands, the oldest first
    settings: Mapping[str, Any] = told[0].settings or {} if 0 in told else {}
    for number, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
        first, last = int(steps[begin]), int(steps[end - 1])  # within an attempt steps do not go back
        launch = told.get(begin)
        one: dict[str, Any] = {"number": number, "first": first, "last": last, "settings": settings}
        if number:
            before = found[-1]
            one["told_by"] = launch.told_by if launch else f"steps go back from {before['last']} to {first}"
            if launch is not None and launch.settings is not None:
                one["settings"] = settings = launch.settings
                one["changed"] = changed_settings(before["settings"], settings)
        while standing and found[standing[-1]]["first"] >= first:
            over = found[standing.pop()]
            over["given_up_from"] = over["first"]
        if standing:
            parent = found[standing[-1]]
            if parent["last"] >= first:  # the attempts before it keep what they gave up first
                parent["given_up_from"] = min(first, parent.get("given_up_from", first))
            one |= {
                "parent": parent["number"],
                "begun_from": _last_before(steps, begins, ends, parent["number"], first),
            }
        standing.append(number)
        found.append(one)
    return tuple(Attempt(**one) for one in found)


def _last_before(steps: Indices, begins: Indices, ends: Indices, attempt: int, step: int) -> int:
    """The last step of an attempt that is before a step."""
    own = steps[begins[attempt] : ends[attempt]]
    return int(own[np.searchsorted(own, step) - 1])


def changed_settings(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings that differ; a setting that only one of both prints is no change.

    >>> changed_settings({"lr": 0.1, "seed": 1, "host": "a"}, {"lr": 0.05, "seed": 1, "port": 2})
    {'lr': (0.1, 0.05)}
    """
    return {name: (before[name], value) for name, value in after.items() if name in before and before[name] != value}


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
