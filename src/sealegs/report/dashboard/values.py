"""Makes a Page of runs: the content of each panel, as plain values."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from sealegs.diagnosis.contract import Diagnosis, Findings
from sealegs.diagnosis.curve.live_statistic import MOST_FOLDED
from sealegs.diagnosis.findings import look
from sealegs.diagnosis.rank import diagnose
from sealegs.errors import SourceError
from sealegs.readers.read import read
from sealegs.record.run import Run, open_run
from sealegs.record.schema import MANIFEST
from sealegs.report.dashboard.batches import Cells, cells_of, quantiles_of, shares_of
from sealegs.report.dashboard.downsample import Reduced, Steps, reduced
from sealegs.report.dashboard.marks import PanelMark, marks_of, repeated, thinned, windows
from sealegs.report.dashboard.subjects import BESIDE, LABELS, OF_A_KIND, SUBJECTS, PanelSubject

POINTS = 1500
"""Points of a line: two for each dot across a panel."""
POINTS_OF_A_LAYER = 500
"""Points of a line among many."""
ALL_POINTS = 80_000
"""Points of all lines of a page together, so that each of many lines has fewer; and as many again around incidents."""
MOST_LINES = 1000
"""Lines of a page at most, as far as lines of layers and groups make them: of many runs, some layers of each."""
MOST_SOURCES = 12
"""Sources of data that are drawn of all runs together, and at least two of each: those with most of the data."""
MOST_JUDGED = 6
"""Runs of a page at most that are judged by all that judged them live; those of more by their loss, as other logs."""
MOST_IN_FULL = 24
"""Runs that a page shows in full. Of more it has the verdicts and no causes, and neither smoothed lines nor what was
left behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosedRun:
    """A run, read and diagnosed."""

    name: str
    source: str
    run: Run
    findings: Findings | None = None
    """None while there is no row yet."""
    diagnosis: Diagnosis | None = None
    """The causes as well; None of a run among many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelLine:
    """A line of a panel."""

    run: int
    signal: str
    label: str
    line: Reduced
    left_behind: Reduced | None = None
    """Values from attempts that a rollback or a resume left behind."""
    depth: float | None = None
    """Position of a layer or group among the others, 0 to 1."""
    is_share: bool = False
    """Whether the line belongs to the right axis, which goes from 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """The content of one panel."""

    subject: PanelSubject
    unit: str
    series: tuple[PanelLine, ...] = ()
    cells: Cells | None = None
    repeats: tuple[tuple[int, PanelMark], ...] = ()
    """Repeated batches, with the number of the run."""
    missing: tuple[str, ...] = ()
    """Signals that would fill the panel and were not logged."""
    not_drawn: int = 0
    """Lines of layers, groups and sources for which the page has no room."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not (self.series or self.cells is not None or self.repeats)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Everything that a dashboard shows."""

    seen: tuple[DiagnosedRun, ...]
    panels: tuple[Panel, ...]
    marks: tuple[tuple[PanelMark, ...], ...]
    """One tuple per run, thinned to marks that can be told apart."""
    all_marks: tuple[tuple[PanelMark, ...], ...] = field(repr=False)
    first: int
    last: int


def see(source: str, name: str, runs: int = 1) -> DiagnosedRun:
    """Read and diagnose one of so many runs. A run folder may still be empty, or have no loss."""
    try:
        log = read(source)
    except SourceError:
        if not (Path(source) / MANIFEST).is_file():
            raise
        return DiagnosedRun(name=name, source=source, run=open_run(source))
    findings = look(log.run, most_folded=MOST_FOLDED if runs <= MOST_JUDGED else 0)
    if runs > MOST_IN_FULL:
        return DiagnosedRun(name=name, source=source, run=log.run, findings=findings)
    diagnosis = diagnose(
        findings,
        source=source,
        format=log.format,
        rules="calibrated",
        mapping=log.mapping,
        remarks=log.remarks,
    )
    return DiagnosedRun(name=name, source=source, run=log.run, findings=findings, diagnosis=diagnosis)


def page_of(seen: Sequence[DiagnosedRun]) -> Page:
    """The page of some runs."""
    marks = [marks_of(each.run, each.findings) for each in seen]
    steps = [int(step) for each in seen if len(each.run.steps) for step in each.run.steps[[0, -1]]]
    happened = [step for each in marks for mark in each for step in (mark.first, mark.last)]
    first, last = (min(steps + happened), max(steps + happened)) if steps + happened else (0, 1)
    subjects = (*SUBJECTS, *(subject for subject in OF_A_KIND if any(_has_any(each.run, subject) for each in seen)))
    signals = {subject.number: [list(_signals(each.run, subject)) for each in seen] for subject in subjects}
    share = _share_of_layers(signals)
    drawn = {number: [_some_layers(of_run, share) for of_run in of_all] for number, of_all in signals.items()}
    depths = [depth for of_all in drawn.values() for of_run in of_all for _, _, depth in of_run]
    room = min(1.0, ALL_POINTS / max(sum(map(_points, depths)), 1))
    whole = [windows(each, ALL_POINTS // max(len(depths), 1)) for each in marks]
    return Page(
        seen=tuple(seen),
        panels=tuple(_panel(subject, seen, signals, drawn, room, whole) for subject in subjects),
        marks=tuple(thinned(each, last - first + 1, len(seen)) for each in marks),
        all_marks=tuple(marks),
        first=first,
        last=max(last, first + 1),
    )


_Signals: TypeAlias = list[tuple[str, str, float | None]]
"""Name, label and depth in the model of the signals that a run has for a panel."""


def _share_of_layers(signals: Mapping[int, Sequence[_Signals]]) -> float:
    """The share of the lines of layers and groups that the page has room for."""
    depths = [depth for of_all in signals.values() for of_run in of_all for _, _, depth in of_run]
    others = depths.count(None)
    return min(1.0, max(MOST_LINES - others, 0) / max(len(depths) - others, 1))


def _some_layers(of_run: _Signals, share: float) -> _Signals:
    """The signals of a run with a share of its layers, evenly spread."""
    layers = [each for each in of_run if each[2] is not None]
    spread = np.linspace(0, len(layers) - 1, int(share * len(layers))).round().astype(int).tolist()
    return [each for each in of_run if each[2] is None] + [layers[place] for place in spread]


def _panel(
    subject: PanelSubject,
    seen: Sequence[DiagnosedRun],
    signals: Mapping[int, Sequence[_Signals]],
    drawn: Mapping[int, Sequence[_Signals]],
    room: float,
    whole: Sequence[Sequence[tuple[int, int]]],
) -> Panel:
    unit = subject.unit
    logged = {name for each in seen for name in each.run.signals}
    if subject.otherwise and not logged & set(subject.signals) and subject.otherwise[0] in logged:
        unit = subject.otherwise[1]
    series: list[PanelLine] = []
    for number, each in enumerate(seen):
        for signal, label, depth in drawn[subject.number][number]:
            steps, values = each.run.series(signal)
            points = int(room * _points(depth))
            line = reduced(steps, values, points, whole[number])
            left = _left_behind(each.run, signal, points) if len(seen) <= MOST_IN_FULL else None
            series.append(
                PanelLine(
                    run=number,
                    signal=signal,
                    label=label,
                    line=line,
                    left_behind=left,
                    depth=depth,
                    is_share=signal in BESIDE,
                )
            )
    missing = tuple(name for name in subject.wanted if not any(_is_of(other, name) for other in logged))
    missing = () if unit != subject.unit or subject in OF_A_KIND else missing
    not_drawn = sum(map(len, signals[subject.number])) - len(series)
    panel = Panel(subject=subject, unit=unit, series=tuple(series), missing=missing, not_drawn=not_drawn)
    fill = {7: _with_tokens, 10: _with_batches}.get(subject.number)
    return fill(panel, seen, int(room * POINTS)) if fill else panel


def _points(depth: float | None) -> int:
    return POINTS if depth is None else POINTS_OF_A_LAYER


def _with_tokens(panel: Panel, seen: Sequence[DiagnosedRun], points: int) -> Panel:
    """Add token losses: the histograms of one run as cells, those of several as two quantiles each."""
    has = [(number, each.run) for number, each in enumerate(seen) if "token_loss_histogram" in each.run.signals]
    if len(seen) == 1:
        cells = [cells_of(*_texts(run, "token_loss_histogram")) for _, run in has]
        return Panel(subject=panel.subject, unit=panel.unit, cells=cells[0] if cells else None, missing=panel.missing)
    series = [
        PanelLine(run=number, signal=panel.subject.signals[0], label=label, line=reduced(steps, values, points))
        for number, run in has
        for label, steps, values in quantiles_of(*_texts(run, "token_loss_histogram"))
    ]
    return Panel(subject=panel.subject, unit=panel.unit, series=tuple(series), missing=panel.missing)


def _with_batches(panel: Panel, seen: Sequence[DiagnosedRun], points: int) -> Panel:
    """Add the shares of the sources, and repeated batches."""
    series, repeats, not_drawn = list(panel.series), [], 0
    for number, each in enumerate(seen):
        if "sources" in each.run.signals:
            steps, texts = _texts(each.run, "sources")
            shares, others = shares_of(texts, max(MOST_SOURCES // len(seen), 2))
            not_drawn += others
            for name, values in shares.items():
                line = reduced(steps, values, points)
                series.append(PanelLine(run=number, signal="sources", label=f"source {name}", line=line, is_share=True))
        if "batch_hash" in each.run.signals:
            logged = each.run.logged("batch_hash")
            hashes = each.run.undecoded("batch_hash")[logged]
            repeats += [(number, mark) for mark in repeated(each.run.steps[logged], hashes)]
    return replace(panel, series=tuple(series), repeats=tuple(repeats), not_drawn=panel.not_drawn + not_drawn)


def _signals(run: Run, subject: PanelSubject) -> Iterator[tuple[str, str, float | None]]:
    """The signals of a panel that a run has: name, label, and depth in the model."""
    has = run.signals
    wanted = subject.signals
    if subject.otherwise and not set(wanted) & set(has):
        wanted = subject.otherwise[:1]
    for name in wanted:
        if name in has and run.has_numbers(name):
            yield name, LABELS.get(name, name.replace("_", " ")), None
    for group in subject.groups:
        members = [name for name in has if name.startswith(f"{group}/") and run.has_numbers(name)]
        members.sort(key=_by_number)
        for place, name in enumerate(members):
            label = name.partition("/")[2]
            label = f"{LABELS[group]}, {label}" if group in LABELS and len(subject.groups) > 1 else label
            yield name, label, place / max(len(members) - 1, 1)


def _has_any(run: Run, subject: PanelSubject) -> bool:
    return next(_signals(run, subject), None) is not None


def _by_number(name: str) -> list[tuple[str, int]]:
    """Sort key that puts blocks.10 after blocks.9.

    >>> sorted(["blocks.10", "blocks.9", "embedding"], key=_by_number)
    ['blocks.9', 'blocks.10', 'embedding']
    """
    return [(word, int(digits or 0)) for word, digits in re.findall(r"(\D*)(\d*)", name)]


def _is_of(signal: str, wanted: str) -> bool:
    return signal == wanted or (wanted.endswith("/<...>") and signal.startswith(wanted.removesuffix("<...>")))


def _texts(run: Run, signal: str) -> tuple[Steps, list[str]]:
    logged = run.logged(signal)
    return run.steps[logged], [str(text) for text in run.column(signal)[logged].tolist()]


def _left_behind(run: Run, signal: str, points: int) -> Reduced | None:
    """Rows of steps that the run repeated later."""
    if not run.superseded_rows:
        return None
    written = run.written(signal)
    place = np.searchsorted(run.steps, written.steps)
    inside = np.minimum(place, len(run.steps) - 1)
    counts = (run.steps[inside] == written.steps) & (run.segments[inside] == written.segments)
    if counts.all():
        return None
    return reduced(written.steps[~counts], written.values[~counts].astype(np.float64), points)
