"""The data of every Bokeh source of a Page, by name: columns of numbers, labels, colours and links."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
from bokeh.palettes import Plasma256

from sealegs.printable import printable
from sealegs.report.dashboard.downsample import Floats
from sealegs.report.dashboard.marks import KINDS, PanelMark
from sealegs.report.dashboard.subjects import DASHED, OF_A_KIND
from sealegs.report.dashboard.values import MOST_IN_FULL, Page, Panel, PanelLine

RUN_COLOURS = ("#0060a8", "#c04a00", "#447c61", "#b50fff", "#0a022f", "#05455d")
"""One colour per run; in a page of one run, one per signal. On white each has a contrast of at least 4.5, and people
who do not tell red from green can tell all of them apart."""
RUN_DASHES: tuple[list[int], ...] = ([], [6, 3], [2, 2])
"""Dashes that tell apart the runs beyond the sixth, and the signals of one run among several."""
FOURTH_DASH = [9, 3, 2, 3]
"""Dashes of the fourth signal of a panel, where runs have no dashes of their own."""
FEW_POINTS = 60
"""A line of at most this many points also shows each point as a dot."""
MOST_DOTS = 5000
"""The most such dots on a page; where there would be more, only those that no line shows."""
EXTREME = 1e4
"""Multiple of the median from which on a value is extreme."""

Columns: TypeAlias = dict[str, Any]


def span_of(page: Page) -> tuple[float, float]:
    """The steps that are shown, with a small margin on both sides."""
    room = max((page.last - page.first) * 0.01, 0.5)
    return page.first - room, page.last + room


def log_span(panel: Panel) -> tuple[float, float]:
    """The range of the values above zero, with a small margin."""
    values = _above_zero(panel)
    return (float(values.min()) / 1.2, float(values.max()) * 1.2) if len(values) else (0.1, 10.0)


def is_extreme(panel: Panel) -> bool:
    """Whether a few values are so high that a linear scale would hide all others."""
    values = _above_zero(panel)
    return len(values) > 0 and bool(values.max() > EXTREME * np.median(values))


def _above_zero(panel: Panel) -> Floats:
    lines = [line for each in panel.series for line in (each.line, each.left_behind) if line and not each.is_share]
    return np.concatenate([line.values[line.values > 0] for line in lines] or [np.empty(0)])


def columns_of(page: Page, links: Sequence[dict[int, str]]) -> dict[str, Columns]:
    """The data of every source that has any, by name."""
    columns = {f"marks/{kind}": _mark_columns(page, links, kind) for kind in KINDS}
    points = [len(each.line.steps) for panel in page.panels for each in panel.series]
    has_dots = sum(count for count in points if count <= FEW_POINTS) <= MOST_DOTS
    for panel in page.panels:
        name = f"panel-{panel.subject.number}"
        places = _places(panel)
        for axis, series in by_axis(panel).items():
            styles = [_style(each, places[id(each)], len(page.seen)) for each in series]
            columns[f"{name}/{axis}/lines"] = _lines(series, styles, page)
            smoothed = series if len(page.seen) <= MOST_IN_FULL else []
            columns[f"{name}/{axis}/means"] = _lines(smoothed, styles, page, mean=True)
            columns[f"{name}/{axis}/left"] = _lines(series, styles, page, left=True)
            columns[f"{name}/{axis}/lone"] = _lone(series, styles, page, FEW_POINTS if has_dots else 0)
        columns[f"{name}/broken"] = _broken(panel, page)
        if panel.cells is not None:
            cells = {key: column.astype(np.float32) for key, column in panel.cells._asdict().items()}
            columns[f"{name}/cells"] = cells | {"depth": _depth(cells["share"])}
        if panel.subject.number == 10:
            columns[f"{name}/repeats"] = {
                "x0": [mark.first for _, mark in panel.repeats],
                "text": [_of(page, run) + mark.text for run, mark in panel.repeats],
            }
    return printable({name: data for name, data in columns.items() if len(next(iter(data.values())))})


def by_axis(panel: Panel) -> dict[str, list[PanelLine]]:
    """The lines of a panel by axis, for the axes that have any."""
    axes = {"left-axis": [each for each in panel.series if not each.is_share]}
    axes |= {"right-axis": [each for each in panel.series if each.is_share]}
    return {axis: series for axis, series in axes.items() if series}


def _places(panel: Panel) -> dict[int, int]:
    """The place of each line, by its identity, among those of its run that are layers as well, or are none; in the
    panels of a kind of run that of its signal."""
    alike = Counter[tuple[int, bool]]()
    places = {}
    signals = panel.subject.signals if panel.subject in OF_A_KIND else ()
    for each in panel.series:
        if each.signal in signals:  # runs that log some of them have the same dashes for the same signal
            places[id(each)] = signals.index(each.signal)
            continue
        places[id(each)] = alike[each.run, each.depth is None]
        alike[each.run, each.depth is None] += 1
    return places


def _style(series: PanelLine, place: int, runs: int) -> tuple[str, list[int], float]:
    """Colour, dashes and width of a line. A run has a colour, or in a page of one run a signal; depth gives shades."""
    width = 1.2 if series.depth is None else 1.0
    is_second = series.signal.partition("/")[0] in DASHED
    if runs > 1:
        dash = series.run // len(RUN_COLOURS) + (place if series.depth is None else int(is_second))
        if dash == len(RUN_DASHES) and runs <= len(RUN_COLOURS):
            return RUN_COLOURS[series.run], FOURTH_DASH, width
        return RUN_COLOURS[series.run % len(RUN_COLOURS)], RUN_DASHES[dash % len(RUN_DASHES)], width
    if series.depth is not None:  # only the darker part: the rest has too little contrast on white
        return Plasma256[int(series.depth * 150)], RUN_DASHES[int(is_second)], width
    return RUN_COLOURS[place % len(RUN_COLOURS)], RUN_DASHES[1 if series.is_share else 0], width


def _lines(
    series: Iterable[PanelLine],
    styles: Iterable[tuple[str, list[int], float]],
    page: Page,
    *,
    mean: bool = False,
    left: bool = False,
) -> Columns:
    columns: Columns = {name: [] for name in ("xs", "ys", "label", "colour", "dash", "width")}
    for each, (colour, dash, width) in zip(series, styles, strict=False):
        line = each.left_behind if left else each.line
        if line is None:
            continue
        steps, values = (line.mean_steps, line.mean_values) if mean else (line.steps, line.values)
        note = " (left behind)" if left else f" (mean of {line.averaged} rows)" if mean and line.averaged > 1 else ""
        row = (_packed(steps), _packed(values), label(each, page) + note, colour, dash, width + 0.8 * mean)
        for name, cell in zip(columns, row, strict=True):
            columns[name].append(cell)
    return columns


def _lone(series: Iterable[PanelLine], styles: Iterable[tuple[str, list[int], float]], page: Page, few: int) -> Columns:
    """Points that no line shows, and every point of a line that has ``few``."""
    columns: Columns = {name: [] for name in ("x", "y", "label", "colour")}
    for each, (colour, _, _) in zip(series, styles, strict=True):
        shown = each.line.lone if len(each.line.steps) > few else ~np.isnan(each.line.values)
        for line, alone, note in ((each.line, shown, ""), (each.left_behind, None, " (left behind)")):
            if line is not None:
                alone = line.lone if alone is None else alone
                columns["x"] += line.steps[alone].tolist()
                columns["y"] += line.values[alone].tolist()
                columns["label"] += [label(each, page) + note] * int(alone.sum())
                columns["colour"] += [colour] * int(alone.sum())
    return columns


def _broken(panel: Panel, page: Page) -> Columns:
    """The places on the axis of values that are not finite."""
    rows = [
        (each, broken)
        for each in panel.series
        for line in (each.line, each.left_behind)
        if line is not None
        for broken in line.broken
    ]
    texts = []
    for each, broken in rows:
        where = f"step {broken.first}" if broken.first == broken.last else f"steps {broken.first} to {broken.last}"
        texts.append(f"{label(each, page)} is {broken.what} at {where} ({broken.rows} rows)")
    return {"x0": [it.first for _, it in rows], "x1": [it.last for _, it in rows], "text": texts}


def _mark_columns(page: Page, links: Sequence[dict[int, str]], kind: str) -> Columns:
    marks = [(run, mark) for run, of_run in enumerate(page.marks) for mark in of_run if mark.kind == kind]
    return {
        "x0": [mark.first for _, mark in marks],
        "x1": [mark.last for _, mark in marks],
        "row": [kind] * len(marks),
        "text": [_of(page, run) + mark.text for run, mark in marks],
        "url": [_address(run, mark, links) for run, mark in marks],
    }


def _address(run: int, mark: PanelMark, links: Sequence[dict[int, str]]) -> str:
    """The address of an incident's post-mortem if there is one, otherwise of its entry on the page."""
    page = links[run].get(mark.number) if mark.kind == "incident" else None
    return page or anchor(run, mark)


def anchor(run: int, mark: PanelMark) -> str:
    """The anchor of the entry for a mark in the page's summary: incidents and interventions have one each."""
    return f"#run-{run + 1}-{mark.kind}" + (f"-{mark.number}" if mark.number else "")


def _of(page: Page, run: int) -> str:
    return f"{page.seen[run].name}: " if len(page.seen) > 1 else ""


def label(series: PanelLine, page: Page) -> str:
    """The label of a line; with its run where there are several."""
    return _of(page, series.run) + series.label


def _packed(values: Any) -> Any:
    """The numbers in four bytes each, where that loses nothing visible."""
    if values.dtype.kind == "i":
        return values.astype(np.int32) if len(values) and abs(values).max() < 2**31 else values.astype(np.float64)
    with np.errstate(over="ignore"):
        small = values.astype(np.float32)
    return values if np.isinf(small).any() or ((small == 0) & (values != 0)).any() else small


def _depth(shares: Any) -> Any:
    """The darkness of a box: by the logarithm, so that a thousandth of the tokens is visible."""
    return np.clip(1 + np.log10(shares) / 3.5, 0.12, 1.0).astype(np.float32)
