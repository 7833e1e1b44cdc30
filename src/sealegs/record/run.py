"""A ``Run``: a run folder or columns from elsewhere, in plain numpy, without torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sealegs.errors import SourceError
from sealegs.record import manifest as manifests
from sealegs.record.columns import Column, Columns, Mask, read_columns
from sealegs.record.events import load_events
from sealegs.record.manifest import Manifest
from sealegs.record.reading import reading
from sealegs.record.schema import EVENTS, METRICS
from sealegs.vocabulary import Event, Number, Row


class WrittenRows(NamedTuple):
    """Every row that has a signal, in the order they were written, those that a resume superseded included."""

    steps: NDArray[np.int64]
    segments: NDArray[np.int64]
    values: Column


@dataclass(frozen=True)
class Run:
    """One run: its settings, what was measured at each step, and what happened.

    A resumed run repeats the steps after its checkpoint. ``steps`` and ``column`` give the newest row of each step:
    what the present weights went through. ``superseded_rows`` counts the others, and ``written`` gives all of them.
    Consecutive rows of a step that have no signal in common are one row.
    """

    folder: Path
    """The folder that it was read from, or the file of a foreign log."""
    manifest: Manifest
    steps: NDArray[np.int64]
    """The logged steps, strictly rising."""
    segments: NDArray[np.int64]
    """The stretch of the run in which each step was measured: 0, then one more each time the steps go back."""
    superseded_rows: int
    damaged_lines: int
    _columns: Columns
    _rows: NDArray[np.int64]
    _first_rows: NDArray[np.int64]
    _events: Path | None = None

    @cached_property
    def signals(self) -> tuple[str, ...]:
        """The signals that were logged at least once, without ``step``."""
        return tuple(key for key in self._columns.values if key != "step")

    def column(self, signal: str) -> Column:
        """One value per step: floats, NaN where it was not logged (see ``logged``), or strings for text signals."""
        return _as_text(self._find(signal, self._columns.values)[self._rows_of(signal)])

    def has_numbers(self, signal: str) -> bool:
        """Whether its values are numbers, and not text."""
        return bool(self._find(signal, self._columns.values).dtype.kind == "f")

    def logged(self, signal: str) -> Mask:
        """Where the signal was logged: a NaN there was measured, elsewhere the value is missing."""
        logged: Mask = self._find(signal, self._columns.logged)
        return logged[self._rows_of(signal)]

    def written(self, signal: str) -> WrittenRows:
        """Every logged value of a signal, superseded ones included: to compare both sides of a resume."""
        values: Column = self._find(signal, self._columns.values)
        steps = self._columns.values["step"].astype(np.int64)
        at = np.flatnonzero(self._columns.logged[signal])
        return WrittenRows(steps[at], _segments(steps)[at], _as_text(values[at]))

    def rows(self) -> Iterator[Row]:
        """The rows of ``steps`` one at a time, with only what was logged at each."""
        columns = {name: (self.column(name), self.logged(name)) for name in self.signals}
        for place, step in enumerate(self.steps.tolist()):
            row: dict[str, Number | str] = {"step": step}
            row.update((name, values[place].item()) for name, (values, logged) in columns.items() if logged[place])
            yield row

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """What happened, in the order it was written."""
        return load_events(self._events) if self._events else ()

    @property
    def has_events(self) -> bool:
        """Whether the log is of a kind that has events. If it is, no event means that nothing happened."""
        return self._events is not None

    def _rows_of(self, signal: str) -> NDArray[np.int64]:
        """For each step, the last of its rows that has the signal; the newest if none has."""
        if self._first_rows is self._rows:
            return self._rows
        last = _last_so_far(self._columns.logged[signal])[self._rows]
        return np.where(last < self._first_rows, self._rows, last)

    def _find(self, signal: str, among: Mapping[str, Any]) -> Any:
        try:
            return among[signal]
        except KeyError:
            has = ", ".join(self.signals) or "nothing"
            raise SourceError(f"{self.folder}: no signal {signal!r} was logged; it has {has}") from None


def open_run(folder: str | Path) -> Run:
    """Open the run in a folder, while it is being written or afterwards."""
    folder = Path(folder)
    manifest = manifests.load(folder)
    try:
        with reading(folder / METRICS):
            columns = read_columns(folder / METRICS)
    except FileNotFoundError:
        columns = Columns({}, {})  # killed before its first row
    return run_of(folder, manifest, columns, events=folder / EVENTS)


def run_of(folder: Path, manifest: Manifest, columns: Columns, *, events: Path | None = None) -> Run:
    """A run made of columns from anywhere. ``step`` must be among them if there are rows."""
    written = columns.values.get("step", np.empty(0)).astype(np.int64)
    rows = _newest_rows(written)
    first_rows = _first_rows(written, rows, columns.logged)
    return Run(
        folder=folder,
        manifest=manifest,
        steps=written[rows],
        segments=_segments(written)[rows],
        superseded_rows=len(written) - int(np.sum(rows - first_rows + 1)),
        damaged_lines=columns.damaged_lines,
        _columns=columns,
        _rows=rows,
        _first_rows=first_rows,
        _events=events,
    )


def _as_text(values: Column) -> Column:
    return np.char.decode(values, "utf-8", "replace") if values.dtype.kind == "S" else values


def _segments(steps: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each row, how often the steps have gone back before it."""
    return np.cumsum(np.diff(steps, prepend=steps[:1]) < 0, dtype=np.int64)


def _newest_rows(steps: NDArray[np.int64]) -> NDArray[np.int64]:
    """The rows that are final for their step: those that no later row goes back to or behind.

    >>> _newest_rows(np.array([0, 1, 2, 3, 2, 3, 4])).tolist()
    [0, 1, 4, 5, 6]
    """
    if not len(steps):
        return np.empty(0, np.int64)
    lowest_later = np.minimum.accumulate(steps[::-1])[::-1][1:]
    return np.flatnonzero(np.append(steps[:-1] < lowest_later, True))


def _first_rows(steps: NDArray[np.int64], newest: NDArray[np.int64], logged: Mapping[str, Mask]) -> NDArray[np.int64]:
    """The row with which each of the newest begins: back through the rows of its step, until a signal repeats.

    The signals of a step may come in several rows, but a signal that comes twice is a resume at the last written step.
    The same array comes back if no step has two rows in a row.

    >>> loss = np.array([True, True, False, True, True])
    >>> _first_rows(np.array([0, 1, 1, 2, 2]), np.array([0, 2, 4]), {"loss": loss, "eval_loss": ~loss}).tolist()
    [0, 1, 4]
    """
    goes_on = steps[1:] == steps[:-1]
    if not goes_on.any():
        return newest
    begins, ends = np.append(True, ~goes_on), np.append(~goes_on, True)
    several = np.flatnonzero(~(begins & ends))  # the others need no look at their signals
    first = _last_so_far(begins[several])
    for mask in (mask for signal, mask in logged.items() if signal not in ("step", "time")):
        last = _last_so_far(mask[several])
        before = np.append(-1, last)[np.maximum(last, 0)]  # the last but one
        first = np.maximum(first, before + 1)
    of_all = np.arange(len(steps))
    of_all[several] = several[first]
    return of_all[newest]


def _last_so_far(mask: Mask) -> NDArray[np.int64]:
    """For each position the last one up to it where the mask is set, or -1."""
    return np.maximum.accumulate(np.where(mask, np.arange(len(mask)), -1))
