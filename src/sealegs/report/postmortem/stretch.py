"""Cuts the stretch around one incident out of a run, so that a diagnosis is about this incident alone.

The run is cut where it went back because of the incident: the attempt in which the incident was worst counts, not the
one that went well. The part before shows what was usual, and starts after the previous incident.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sealegs.diagnosis.curve.loss_curve import LossCurve, curve_of
from sealegs.incidents import Incident
from sealegs.record.columns import Column, Columns, Mask
from sealegs.record.run import Run, WrittenRows, run_of
from sealegs.vocabulary import Event

BEFORE, AFTER = 2000, 600
"""The most rows before and after the onset that a diagnosis sees."""
LEAST_BEFORE = 100
"""The fewest rows before the onset, even if they reach into another incident."""
SHOWN_BEFORE, SHOWN_AFTER = 150, 600
"""Rows before and after the onset that are counted and drawn."""


def stretch(run: Run, incident: Incident, others: Sequence[Incident] = ()) -> Run:
    """The part of a run that explains an incident."""
    curve = curve_of(run)
    segment, stride = _attempt(curve, incident), curve.interval
    first = incident.start - BEFORE * stride
    for other in others:
        end = -math.inf if other.end is None else other.end
        if first <= end < incident.start - LEAST_BEFORE * stride:
            first = int(end) + 1
    last = incident.start + AFTER * stride

    def chosen(written: WrittenRows) -> Mask:
        is_ours = (written.segments < segment) | ((written.segments == segment) & (written.steps <= last))
        mask: Mask = is_ours & (written.steps >= first)
        return mask

    part = run_of(run.folder, run.manifest, _columns(run, chosen))
    vars(part)["events"] = _events_until(run, part)  # a cached property: setting it avoids reading the file
    return part


def went_back(run: Run, incident: Incident) -> bool:
    """Whether a rollback or a resume ended the attempt, so that its further course is unknown."""
    curve = curve_of(run)
    return bool(len(curve.segments)) and _attempt(curve, incident) < int(curve.segments[-1])


def rows_about(run: Run, incident: Incident) -> list[dict[str, Any]]:
    """The rows around an incident in the order written, from every attempt, as the lines of the file."""
    stride = curve_of(run).interval
    first = incident.start - SHOWN_BEFORE * stride
    last = max(incident.start + SHOWN_AFTER * stride, incident.peak + SHOWN_AFTER * stride, incident.end or 0)
    columns = _columns(run, lambda written: (written.steps >= first) & (written.steps <= last))
    return list(_rows(columns))


def _attempt(curve: LossCurve, incident: Incident) -> int:
    """How often the run had gone back when the incident was worst."""
    if not (curve.steps == incident.peak).any():
        return int(curve.segments[-1]) if len(curve.segments) else 0
    return int(curve.segments[curve.row_of(incident.peak, incident.peak_loss)])


def _columns(run: Run, chosen: Callable[[WrittenRows], Mask]) -> Columns:
    """The chosen rows. Steps rise within a segment, so segment and step give the order in which rows were written."""
    parts: dict[str, tuple[NDArray[np.int64], NDArray[np.int64], Column]] = {}
    for name in run.signals:
        written = run.written(name)
        if (mask := chosen(written)).any():
            parts[name] = written.segments[mask], written.steps[mask], written.values[mask]
    if not parts:
        return Columns({}, {})
    lowest = min(int(steps.min()) for _, steps, _ in parts.values())
    span = max(int(steps.max()) for _, steps, _ in parts.values()) - lowest + 1
    keys = {name: segments * span + steps - lowest for name, (segments, steps, _) in parts.items()}
    rows = np.unique(np.concatenate(list(keys.values())))
    values: dict[str, Column] = {"step": (rows % span + lowest).astype(np.float64)}
    logged: dict[str, Mask] = {"step": np.ones(len(rows), dtype=bool)}
    for name, (_, _, found) in parts.items():
        at = np.searchsorted(rows, keys[name])
        logged[name] = np.zeros(len(rows), dtype=bool)
        logged[name][at] = True
        values[name] = np.full(len(rows), np.nan if found.dtype.kind in "fiub" else "", dtype=_roomy(found))
        values[name][at] = found
    return Columns(values, logged, rows=len(rows))


def _roomy(found: Column) -> Any:
    """A type that can also hold missing values."""
    return np.float64 if found.dtype.kind in "iub" else found.dtype


def _rows(columns: Columns) -> Iterator[dict[str, Any]]:
    cells = {name: (values.tolist(), columns.logged[name].tolist()) for name, values in columns.values.items()}
    for place in range(columns.rows):
        row = {name: values[place] for name, (values, logged) in cells.items() if logged[place]}
        yield {**row, "step": int(row["step"])}


def _events_until(run: Run, part: Run) -> tuple[Event, ...]:
    """The events up to the last row of the part; by step where rows have no time."""
    if not len(part.steps):
        return ()
    if "time" in part.signals and part.logged("time")[-1]:
        last = float(part.column("time")[-1])
        return tuple(event for event in run.events if event.time <= last)
    return tuple(event for event in run.events if event.step <= part.steps[-1])
