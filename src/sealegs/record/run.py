"""A ``Run``: a run folder or columns from elsewhere, in plain numpy, without torch."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sealegs.curve_picture import Band, Panel, picture, table
from sealegs.errors import SourceError
from sealegs.record import manifest as manifests
from sealegs.record.attempts import Attempt, Launch, attempts_of, last_so_far, tree_of
from sealegs.record.columns import Column, Columns, Mask, read_columns
from sealegs.record.events import load_events
from sealegs.record.log_lines import LogLine
from sealegs.record.manifest import Manifest
from sealegs.record.reading import reading
from sealegs.record.schema import EVENTS, METRICS
from sealegs.vocabulary import Event, Number, Row

_DRAWN = (("loss", 200), ("grad_norm", 100), ("lr", 70))
"""Signals that a notebook shows, and the height of each in pixels."""
_MARKED = frozenset({"skip", "alarm", "halt", "intervention", "fault", "resume"})
_COLOURS = "max-width:860px;--edge:#8886;--line:#1f77b4;--mark:#d62728;font:11px system-ui,sans-serif;fill:currentColor"


class WrittenRows(NamedTuple):
    """Every row that has a signal, in the order they were written, those that a resume superseded included."""

    steps: NDArray[np.int64]
    segments: NDArray[np.int64]
    values: Column


@dataclass(frozen=True)
class Run:
    """One run: its settings, what was measured at each step, and what happened.

    A resumed run repeats the steps after its checkpoint. ``steps`` and ``column`` give the rows that stand: what the
    present weights went through. ``superseded_rows`` counts the others, ``written`` gives all of them, ``seen_from`` an
    attempt that the run went back over. Which row is which, ``record/attempts.py`` decides.
    """

    folder: Path
    """The folder that it was read from, or the file of a foreign log."""
    manifest: Manifest
    steps: NDArray[np.int64]
    """The logged steps, strictly rising."""
    segments: NDArray[np.int64]
    """The attempt in which each step was measured: 0, then one more each time the run goes back or is launched anew."""
    superseded_rows: int
    damaged_lines: int
    _columns: Columns
    _attempts: NDArray[np.int64]
    _rows: NDArray[np.int64]
    _first_rows: NDArray[np.int64]
    _events: Path | None = None
    launches: tuple[Launch, ...] = ()
    """Where the log tells of a launch, by rows of its columns; those that only the steps tell of are not here."""
    lines: tuple[LogLine, ...] = ()
    """A bounded choice of the lines of a text log that are no rows, in their order: warnings, errors, the like."""

    def _repr_html_(self) -> str:
        """What a notebook shows: what the run is, and its curves with what happened marked."""
        return curves_of(self) + table(
            [
                ("run", self.manifest.run_id),
                (
                    "steps",
                    f"{self.steps[0]:,} to {self.steps[-1]:,}, {len(self.steps):,} rows"
                    if len(self.steps)
                    else "none yet",
                ),
                ("signals", ", ".join(self.signals)),
                ("events", ", ".join(f"{kind} {count:,}" for kind, count in self._event_counts().items())),
                ("folder", str(self.folder)),
            ]
        )

    def _event_counts(self) -> dict[str, int]:
        return dict(Counter(event.kind for event in self.events).most_common())

    @cached_property
    def attempts(self) -> tuple[Attempt, ...]:
        """The attempts of the run in the order they were made; one, unless it went back or was launched anew."""
        return tree_of(self._steps, self._attempts, self.launches)

    @cached_property
    def signals(self) -> tuple[str, ...]:
        """The signals that were logged at least once, without ``step``."""
        return tuple(key for key in self._columns.values if key != "step")

    def column(self, signal: str, *, copy: bool = True) -> Column:
        """One value per step: floats, NaN where it was not logged (see ``logged``), or strings for text signals.

        Without a copy it may be the run's own, which is read-only: to look through millions of rows.
        """
        return _as_text(self._standing(signal, self._columns.values, copy=copy))

    def undecoded(self, signal: str) -> Column:
        """The texts of a signal as bytes, one per step: to compare millions of them."""
        values = self._standing(signal, self._columns.values, copy=True)
        return values if values.dtype.kind == "S" else np.char.encode(values.astype(np.str_), "utf-8", "replace")

    def texts(self, signal: str, first: float, last: float) -> dict[int, str]:
        """The texts of a signal by step, from one step to another: only these are decoded."""
        begin, end = np.searchsorted(self.steps, first), np.searchsorted(self.steps, last, side="right")
        rows = self._rows_of(signal)[begin:end]
        is_there = self._columns.logged[signal][rows]
        values = _as_text(self._find(signal, self._columns.values)[rows[is_there]])
        return dict(zip(self.steps[begin:end][is_there].tolist(), map(str, values.tolist()), strict=True))

    def has_numbers(self, signal: str) -> bool:
        """Whether its values are numbers, and not text."""
        return bool(self._find(signal, self._columns.values).dtype.kind == "f")

    def logged(self, signal: str, *, copy: bool = True) -> Mask:
        """Where the signal was logged: a NaN there was measured, elsewhere the value is missing."""
        logged: Mask = self._standing(signal, self._columns.logged, copy=copy)
        return logged

    def series(self, signal: str) -> tuple[NDArray[np.int64], Column]:
        """The steps at which a signal was logged, and its values there; read-only, since they may be the run's own."""
        logged, values = self.logged(signal, copy=False), self.column(signal, copy=False)
        if logged.all():
            return _read_only(self.steps), values
        at = np.flatnonzero(logged)
        return self.steps[at], values[at]

    def written(self, signal: str, *, copy: bool = True) -> WrittenRows:
        """Every logged value of a signal, superseded ones included: to compare both sides of a resume."""
        values: Column = self._find(signal, self._columns.values)
        logged = self._columns.logged[signal]
        if not copy and logged.all():
            return WrittenRows(_read_only(self._steps), _read_only(self._attempts), _as_text(_read_only(values)))
        at = np.flatnonzero(logged)
        return WrittenRows(self._steps[at], self._attempts[at], _as_text(values[at]))

    def seen_from(self, attempt: int) -> "Run":
        """The run with the rows of that attempt as they stood at its end, and beyond them those that stand now."""
        if not len(self._attempts) or attempt >= int(self._attempts[-1]):
            return self
        count = int(np.searchsorted(self._attempts, attempt, side="right"))
        then = attempts_of(self._steps[:count], {name: mask[:count] for name, mask in self._columns.logged.items()})
        beyond = self.steps > self._steps[count - 1]
        rows, first = np.append(then.standing, self._rows[beyond]), np.append(then.begins, self._first_rows[beyond])
        return replace(self, **_counted(self._steps, self._attempts, rows, first))

    def cut(self, attempt: int, first: float, last: float, without: Collection[int] = ()) -> "Run":
        """The rows up to the end of an attempt, from one step to another of that attempt, and the events until then;
        without those of some steps."""
        is_ours = (self._attempts < attempt) | ((self._attempts == attempt) & (self._steps <= last))
        is_ours &= (self._steps >= first) & ~np.isin(self._steps, list(without))
        row = np.append(0, np.cumsum(is_ours))
        launches = tuple(replace(one, row=int(row[one.row])) for one in self.launches if one.row <= len(is_ours))
        part = run_of(self.folder, self.manifest, _chosen(self._columns, is_ours), launches=launches)
        vars(part)["events"] = self._events_until(part)  # a cached property: setting it avoids reading the file
        return part

    def written_rows(self, first: float, last: float) -> Iterator[dict[str, Any]]:
        """The rows from one step to another in the order written, those of every attempt."""
        columns = _chosen(self._columns, (self._steps >= first) & (self._steps <= last))
        cells = {
            name: (_as_text(values).tolist(), columns.logged[name].tolist()) for name, values in columns.values.items()
        }
        for place in range(columns.rows):
            row = {name: values[place] for name, (values, logged) in cells.items() if logged[place]}
            yield {**row, "step": int(row["step"])}

    def attempt_at(self, time: float) -> int:
        """The attempt that was under way at a time; the last one where rows have no time."""
        if not len(self._attempts) or "time" not in self.signals:
            return int(self._attempts[-1]) if len(self._attempts) else 0
        times, logged = self._columns.values["time"], self._columns.logged["time"]
        before = np.flatnonzero(logged & (times <= time))
        return int(self._attempts[before[-1]]) if len(before) else 0

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

    def _events_until(self, part: "Run") -> tuple[Event, ...]:
        """The events up to the last row of a part; by step where rows have no time."""
        if not len(part.steps):
            return ()
        if "time" in part.signals and part.logged("time")[-1]:
            last = float(part.column("time")[-1])
            return tuple(event for event in self.events if event.time <= last)
        return tuple(event for event in self.events if event.step <= part.steps[-1])

    @property
    def has_events(self) -> bool:
        """Whether the log is of a kind that has events. If it is, no event means that nothing happened."""
        return self._events is not None

    @cached_property
    def _steps(self) -> NDArray[np.int64]:
        """The step of every row."""
        return _steps_of(self._columns)

    def _rows_of(self, signal: str) -> NDArray[np.int64]:
        """For each step, the last of its rows that has the signal; the newest if none has."""
        if self._first_rows is self._rows:
            return self._rows
        last = last_so_far(self._columns.logged[signal])[self._rows]
        return np.where(last < self._first_rows, self._rows, last)

    def _standing(self, signal: str, among: Mapping[str, Any], *, copy: bool) -> Any:
        """A column at the rows that stand."""
        values = self._find(signal, among)
        if len(self._rows) < len(values):
            return values[self._rows_of(signal)]
        return values.copy() if copy else _read_only(values)

    def _find(self, signal: str, among: Mapping[str, Any]) -> Any:
        try:
            return among[signal]
        except KeyError:
            has = ", ".join(self.signals) or "nothing"
            raise SourceError(f"{self.folder}: no signal {signal!r} was logged; it has {has}") from None


def curves_of(run: Run, bands: Sequence[Band] | None = None) -> str:
    """Loss, gradient norm and learning rate for a notebook, with bands; else with the events that changed the run.

    The colours are plain ones, which can be read on a light page and on a dark one.
    """
    drawn = [(name, height) for name, height in _DRAWN if name in run.signals and run.has_numbers(name)]
    if not drawn or not len(run.steps):
        return ""
    panels = [Panel(name, *run.series(name), height) for name, height in drawn]
    if bands is None:
        bands = [
            Band(f"{each.kind} at step {each.step}", each.step, each.step)
            for each in run.events
            if each.kind in _MARKED
        ]
    span = (int(run.steps[0]), max(int(run.steps[-1]), int(run.steps[0]) + 1))
    return picture(panels, bands, span, f"Curves of {run.manifest.run_id}, with what happened marked", _COLOURS)


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


def run_of(
    folder: Path,
    manifest: Manifest,
    columns: Columns,
    *,
    events: Path | None = None,
    launches: tuple[Launch, ...] = (),
    lines: tuple[LogLine, ...] = (),
) -> Run:
    """A run made of columns from anywhere. ``step`` must be among them if there are rows."""
    written = _steps_of(columns)
    found = attempts_of(written, columns.logged, (launch.row for launch in launches))
    return Run(
        folder=folder,
        manifest=manifest,
        damaged_lines=columns.damaged_lines,
        _columns=columns,
        _attempts=found.of_rows,
        _events=events,
        launches=launches,
        lines=lines,
        **_counted(written, found.of_rows, found.standing, found.begins),
    )


def _counted(
    steps: NDArray[np.int64], attempts: NDArray[np.int64], rows: NDArray[np.int64], first: NDArray[np.int64]
) -> dict[str, Any]:
    """The fields of a run that follow from which of its rows count."""
    has_all = len(rows) == len(steps)
    return {
        "steps": steps if has_all else steps[rows],
        "segments": attempts if has_all else attempts[rows],
        "superseded_rows": len(steps) - int(np.sum(rows - first + 1)),
        "_rows": rows,
        "_first_rows": first,
    }


def _chosen(columns: Columns, mask: Mask) -> Columns:
    """Some of the rows; a signal that none of them has is left out."""
    names = [name for name, logged in columns.logged.items() if logged[mask].any()]
    return Columns(
        {name: columns.values[name][mask] for name in names},
        {name: columns.logged[name][mask] for name in names},
        rows=int(mask.sum()),
    )


def _steps_of(columns: Columns) -> NDArray[np.int64]:
    return columns.values.get("step", np.empty(0)).astype(np.int64)


def _read_only(values: NDArray[Any]) -> NDArray[Any]:
    view = values.view()
    view.flags.writeable = False
    return view


def _as_text(values: Column) -> Column:
    return np.char.decode(values, "utf-8", "replace") if values.dtype.kind == "S" else values
