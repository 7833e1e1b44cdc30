"""Draws a Page as Bokeh figures. Their data is in their sources, so that a live page renews only these."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from bokeh.models import (
    AllLabels,
    Axis,
    BasicTicker,
    BasicTickFormatter,
    BoxZoomTool,
    ColumnDataSource,
    CrosshairTool,
    CustomJS,
    DataRange1d,
    FactorRange,
    Glyph,
    GlyphRenderer,
    Grid,
    GridPlot,
    HoverTool,
    Legend,
    LegendItem,
    LinearAxis,
    LogAxis,
    LogScale,
    LogTicker,
    LogTickFormatter,
    MultiLine,
    OpenURL,
    PanTool,
    Quad,
    Range,
    Range1d,
    ResetTool,
    Scatter,
    Segment,
    Span,
    TapTool,
    Toggle,
    Toolbar,
    ToolProxy,
    VSpan,
    VStrip,
    WheelZoomTool,
)
from bokeh.plotting import figure

from sealegs.printable import visible
from sealegs.report.dashboard.columns import RUN_COLOURS, by_axis, columns_of, is_extreme, log_span, span_of
from sealegs.report.dashboard.marks import KINDS
from sealegs.report.dashboard.subjects import OF_A_KIND
from sealegs.report.dashboard.values import Page, Panel, PanelLine

MARK_COLOURS = {
    "incident": "#b00020",
    "intervention": "#5b2a86",
    "skip": "#8a4b00",
    "checkpoint": "#1b6e3c",
    "other": "#404040",
}
MARKERS = {"incident": "diamond", "intervention": "square", "skip": "triangle", "checkpoint": "circle", "other": "dash"}
TEXT, FAINT, GRID = "#1f2328", "#57606a", "#e4e7eb"
HEIGHT = 250
FLOOR = 0.03
"""Height of the marks above the axis, as a share of the panel's height."""
MOST_IN_LEGEND = 7
MOST_RUNS_IN_LEGEND = 24
"""Of more runs none is in a legend: it would be longer than the panel is high. The name is at the cursor."""
ROOM = 540
"""Pixels for the names in a row of a legend: a panel is seldom narrower."""
LONGEST = 20
"""The most letters of a name in a legend."""
FEW = 4
"""The most lines that each have a tooltip. With more lines, only the one under the cursor has one."""

Sources: TypeAlias = dict[str, ColumnDataSource]


@dataclass(frozen=True, slots=True)
class Drawing:
    """The parts of the page."""

    figures: dict[str, figure]
    """``strip`` with everything that happened, and ``panel-1`` and so on."""
    strip: GridPlot
    """The first figure, with the tools of all."""
    sources: Sources
    x_range: Range1d
    log_ranges: dict[str, Range1d]
    switches: tuple[Toggle, ...]


def draw(page: Page, links: Sequence[dict[int, str]]) -> Drawing:
    """Draw every panel. ``links`` has for each run the addresses of its post-mortems, by number of the incident."""
    sources = {name: ColumnDataSource(data) for name, data in columns_of(page, links).items()}
    x_range = Range1d(*span_of(page))
    logs = {f"panel-{panel.subject.number}": Range1d(*log_span(panel)) for panel in page.panels if _has_log(panel)}
    cursor = CrosshairTool(dimensions="height", overlay=Span(dimension="height", line_color=FAINT, line_dash="dotted"))
    figures = {"strip": _strip(sources, x_range)}
    for panel in (panel for panel in page.panels if not panel.is_empty):
        name = f"panel-{panel.subject.number}"
        figures[name] = _drawn(panel, page, sources, x_range, logs.get(name))
    _share(figures.values())
    common = [PanTool(dimensions="width"), WheelZoomTool(dimensions="width"), ResetTool()]
    zooms = []
    for each in figures.values():
        zooms.append(BoxZoomTool(dimensions="width"))  # each figure draws its own box under the mouse
        each.add_tools(cursor, zooms[-1], *common)
        each.toolbar.active_drag = zooms[-1]
    zoom = ToolProxy(tools=zooms, active=True)
    bar = Toolbar(tools=[zoom, *(ToolProxy(tools=[tool]) for tool in common)], active_drag=zoom, logo=None)
    strip = GridPlot(children=[(figures["strip"], 0, 0)], toolbar=bar, toolbar_location="above")
    strip.sizing_mode = "stretch_width"
    return Drawing(figures, strip, sources, x_range, logs, _switches(figures, logs))


def _share(figures: Iterable[figure]) -> None:
    """Share equal objects between all figures: the fewer there are, the sooner the page opens."""
    policy, tap = AllLabels(), OpenURL(url="@url", same_tab=True)
    ticker, steps = BasicTicker(), BasicTickFormatter(use_scientific=False)
    numbers, log_ticker, powers = (
        BasicTickFormatter(power_limit_low=-7, power_limit_high=7),
        LogTicker(),
        LogTickFormatter(),
    )
    log_ticker.desired_num_ticks = 5
    for each in figures:
        for tool in each.select(TapTool):
            tool.callback = tap
        for axis in each.select(Axis):
            axis.major_label_policy = policy
            if isinstance(axis, LogAxis):
                axis.ticker, axis.formatter = log_ticker, powers
            elif isinstance(axis, LinearAxis):
                axis.ticker, axis.formatter = ticker, steps if axis in each.below else numbers


def _figure(name: str, unit: str, x_range: Range1d, y_range: Range, height: int = HEIGHT) -> figure:
    drawn = figure(
        name=name,
        x_range=x_range,
        y_range=y_range,
        y_axis_label=unit,
        title=None,
        height=height,
        sizing_mode="stretch_width",
        tools="",
        toolbar_location=None,
        window_axis="x",
        min_border_left=70,
        outline_line_color=FAINT,
    )
    drawn.grid.grid_line_color = GRID
    for axis in (*drawn.xaxis, *drawn.yaxis):
        _dress(axis)
    return drawn


def _dress(axis: Axis) -> None:
    axis.major_label_text_color = axis.axis_label_text_color = TEXT
    axis.major_label_text_font_size = axis.axis_label_text_font_size = "12px"
    axis.axis_label_text_font_style = "normal"


def _put(drawn: figure, source: ColumnDataSource, glyph: Glyph, name: str, **other: Any) -> GlyphRenderer:
    """Add a glyph without the three more that ``figure`` adds for selected, muted and hovered ones."""
    return drawn.add_glyph(
        source, glyph, name=name, selection_glyph=None, nonselection_glyph=None, muted_glyph=None, **other
    )


def _strip(sources: Sources, x_range: Range1d) -> figure:
    """The strip of events, with one row per kind."""
    drawn = _figure("events", "", x_range, FactorRange(*reversed(KINDS)), height=150)
    marks = []
    for kind in (kind for kind in KINDS if f"marks/{kind}" in sources):
        source, colour = sources[f"marks/{kind}"], MARK_COLOURS[kind]
        bar = Segment(x0="x0", y0="row", x1="x1", y1="row", line_color=colour, line_width=8, line_alpha=0.5)
        dot = Scatter(x="x0", y="row", marker=MARKERS[kind], size=11, fill_color=colour, line_color=colour)
        marks.append(_put(drawn, source, bar, kind))
        _put(drawn, source, dot, f"{kind} sign")
    _explain(drawn, marks)
    drawn.xaxis.axis_label = "step"
    return drawn


def _explain(drawn: figure, marks: list[GlyphRenderer]) -> None:
    """Show events as hover text; a click leads to the details."""
    if marks:
        drawn.add_tools(
            HoverTool(renderers=marks, tooltips=[("", "@text")], point_policy="follow_mouse"),
            TapTool(renderers=marks),
        )


def _drawn(panel: Panel, page: Page, sources: Sources, x_range: Range1d, log: Range1d | None) -> figure:
    name = f"panel-{panel.subject.number}"
    axes = by_axis(panel)
    own = DataRange1d() if "left-axis" in axes or panel.cells is not None else Range1d(0, 1)
    drawn = _figure(name, panel.unit, x_range, own)
    drawn.extra_y_ranges = {"floor": Range1d(0, 1), "share": Range1d(-0.03, 1.03)} | ({"log": log} if log else {})
    red, violet = MARK_COLOURS["incident"], MARK_COLOURS["intervention"]
    band = VStrip(x0="x0", x1="x1", fill_color=red, fill_alpha=0.1, line_color=red, line_alpha=0.5)
    line = VSpan(x="x0", line_color=violet, line_dash="dashed", line_width=1.5)
    happened = {"marks/incident": band, "marks/intervention": line}
    marks = [_put(drawn, sources[key], glyph, key) for key, glyph in happened.items() if key in sources]
    fitted = [_cells(drawn, sources[f"{name}/cells"])] if panel.cells is not None else []
    for axis, series in axes.items():
        curves = _curves(drawn, sources, f"{name}/{axis}", len(series))
        fitted += curves if axis == "left-axis" else []
    if isinstance(own, DataRange1d):
        own.renderers = fitted
    else:
        drawn.yaxis.visible = False
    if "right-axis" in axes:
        shares = LinearAxis(y_range_name="share", axis_label=f"share of {panel.subject.of_what}")
        _dress(shares)
        drawn.add_layout(shares, "right")
    _on_the_floor(drawn, sources, name)
    if log:
        _log_axis(drawn, panel.unit, fitted, is_first=is_extreme(panel))
    _explain(drawn, marks)
    _legend(drawn, axes, page, names_one=panel.subject in OF_A_KIND)
    return drawn


def _cells(drawn: figure, source: ColumnDataSource) -> GlyphRenderer:
    """Draw histograms as columns of boxes: the darker, the more tokens."""
    box = Quad(left="left", right="right", bottom="bottom", top="top", fill_color=RUN_COLOURS[0], line_color=None)
    box.fill_alpha = "depth"
    boxes = _put(drawn, source, box, "cells")
    tooltips = [("from step", "@left{0}"), ("nats", "@bottom{0.0} to @top{0.0}"), ("of the tokens", "@share{0.00%}")]
    drawn.add_tools(HoverTool(renderers=[boxes], tooltips=tooltips, point_policy="follow_mouse"))
    return boxes


def _curves(drawn: figure, sources: Sources, name: str, number: int) -> list[GlyphRenderer]:
    on = "share" if name.endswith("right-axis") else "default"

    def curve(what: str, *, visible: bool = True, **style: Any) -> GlyphRenderer:
        line = MultiLine(
            xs="xs", ys="ys", line_color="colour", **({"line_dash": "dash", "line_width": "width"} | style)
        )
        return _put(drawn, sources[f"{name}/{what}"], line, what, y_range_name=on, visible=visible)

    lines = curve("lines")
    means = [curve("means", visible=False)] if f"{name}/means" in sources else []
    others = [curve("left", line_dash=[2, 3], line_width=1.8)] if f"{name}/left" in sources else []
    drawn.add_tools(
        HoverTool(
            renderers=[lines, *others],
            tooltips=[("", "@label"), ("step", "$snap_x{0}"), ("value", "$snap_y{%.6g}")],
            formatters={"$snap_y": "printf"},
            mode="vline" if number <= FEW else "mouse",
            line_policy="nearest",
        )
    )
    if f"{name}/lone" in sources:
        dot = Scatter(x="x", y="y", size=4, fill_color="colour", line_color="colour")
        others.append(_put(drawn, sources[f"{name}/lone"], dot, "lone", y_range_name=on))
    return [lines, *means, *others]


def _on_the_floor(drawn: figure, sources: Sources, name: str) -> None:
    """Draw values that are not finite, and repeated batches, on the axis, wherever it is."""
    red, grey = MARK_COLOURS["incident"], MARK_COLOURS["other"]
    bar = Segment(x0="x0", y0=FLOOR, x1="x1", y1=FLOOR, line_color=red, line_width=6)
    cross = Scatter(x="x0", y=FLOOR, marker="x", size=10, line_color=red, line_width=2)
    twice = Scatter(x="x0", y=FLOOR, marker="inverted_triangle", size=9, fill_color=grey, line_color=grey)
    told = []
    if f"{name}/broken" in sources:
        told.append(_put(drawn, sources[f"{name}/broken"], bar, "broken", y_range_name="floor"))
        _put(drawn, sources[f"{name}/broken"], cross, "broken sign", y_range_name="floor")
    if f"{name}/repeats" in sources:
        told.append(_put(drawn, sources[f"{name}/repeats"], twice, "repeats", y_range_name="floor"))
    if told:
        drawn.add_tools(HoverTool(renderers=told, tooltips=[("", "@text")], point_policy="follow_mouse"))


def _log_axis(drawn: figure, unit: str, curves: list[GlyphRenderer], *, is_first: bool) -> None:
    """Add a second axis that the switch shows in place of the first, or the other way round."""
    linear = [drawn.left[0], drawn.ygrid[0]]
    drawn.extra_y_scales = {"log": LogScale()}
    axis = LogAxis(y_range_name="log", visible=is_first, axis_label=unit, name="log")
    _dress(axis)
    drawn.add_layout(axis, "left")
    drawn.add_layout(
        Grid(dimension=1, axis=axis, y_range_name="log", visible=is_first, grid_line_color=GRID, name="log")
    )
    if is_first:
        for part in linear:
            part.visible = False
        for curve in curves:
            curve.y_range_name = "log"


def _legend(drawn: figure, axes: Mapping[str, Sequence[PanelLine]], page: Page, *, names_one: bool) -> None:
    """One entry per signal, and one per run of several; of many layers the first, the last and some between.

    A line alone has none where the title of the panel says which it is.
    """
    renderers = [each for each in drawn.renderers if each.name == "lines"]
    several = len(page.seen) > 1
    runs: dict[str, tuple[GlyphRenderer, int]] = {}
    signals: dict[str, tuple[GlyphRenderer, int]] = {}
    for lines, series in zip(renderers, axes.values(), strict=True):
        for place in range(len(series)) if several else _spread(len(series), MOST_IN_LEGEND):
            each = series[place]
            if several:
                runs.setdefault(page.seen[each.run].name, (lines, place))
            if not several or each.depth is None:  # with several runs the colour shows the run, the dashes the signal
                signals.setdefault(each.label, (lines, place))
    runs = runs if len(runs) <= MOST_RUNS_IN_LEGEND else {}
    fewest = 1 if names_one else 2
    signals = _samples(drawn, signals) if several and len(signals) >= fewest else signals
    shown = [*runs.items(), *(signals.items() if len(signals) >= fewest else ())]
    items = [LegendItem(label=_short(name), renderers=[lines], index=place) for name, (lines, place) in shown]
    if len(items) >= fewest:
        legend = Legend(items=items, orientation="horizontal", location="left", spacing=12)
        widths = [40 + 6 * len(_short(name)) for name, _ in shown]
        legend.ncols = len(items) if sum(widths) <= ROOM else max(1, ROOM // max(widths))
        legend.padding, legend.margin = 2, 0
        legend.label_text_font_size, legend.label_text_color = "12px", TEXT
        legend.label_height = legend.glyph_height = 14
        legend.border_line_color = None
        drawn.add_layout(legend, "above")


def _samples(drawn: figure, signals: Mapping[str, tuple[GlyphRenderer, int]]) -> dict[str, tuple[GlyphRenderer, int]]:
    """For the legend alone: a line with the dashes of each signal, in the colour of no run."""
    dashes = [lines.data_source.data["dash"][place] for lines, place in signals.values()]
    nothing: list[list[float]] = [[] for _ in dashes]
    source = ColumnDataSource({"xs": nothing, "ys": nothing, "dash": dashes})
    line = MultiLine(xs="xs", ys="ys", line_color=FAINT, line_dash="dash", line_width=1.2)
    sample = _put(drawn, source, line, "sample")
    return {name: (sample, place) for place, name in enumerate(signals)}


def _short(name: str) -> str:
    name = visible(name)
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"


def _spread(number: int, most: int) -> list[int]:
    """At most ``most`` positions among ``number``, the first and the last included.

    >>> _spread(3, 7), _spread(100, 4)
    ([0, 1, 2], [0, 33, 66, 99])
    """
    return sorted({round(place) for place in np.linspace(0, number - 1, min(number, most)).tolist()})


def _has_log(panel: Panel) -> bool:
    return panel.subject.has_log_scale and bool(panel.series)


def _switches(figures: Mapping[str, figure], logs: Mapping[str, Range1d]) -> tuple[Toggle, ...]:
    of_curves = ("lines", "left", "means", "lone")
    curves = [each for name in logs for each in figures[name].renderers if each.name in of_curves]
    log = [part for name in logs for part in (*figures[name].left, *figures[name].center) if part.name == "log"]
    linear = [part for name in logs for part in (figures[name].left[0], figures[name].ygrid[0])]
    by_log = Toggle(label="Log scale", name="log-scale")
    by_log.js_on_change(
        "active",
        CustomJS(
            args={"curves": curves, "log": log, "linear": linear},
            code="""
            for (const curve of curves) curve.y_range_name = this.active ? "log" : "default"
            for (const part of log) part.visible = this.active
            for (const part of linear) part.visible = !this.active
            """,
        ),
    )
    renderers = [part for each in figures.values() for part in each.renderers]
    means = [part for part in renderers if part.name == "means"]
    lines = [part.glyph for part in renderers if part.name == "lines"]
    smoothed = Toggle(label="Smoothed", name="smoothed", disabled=not means)
    smoothed.js_on_change(
        "active",
        CustomJS(
            args={"means": means, "lines": lines},
            code="""
            for (const mean of means) mean.visible = this.active
            for (const line of lines) line.line_alpha = {value: this.active ? 0.25 : 1.0}
            """,
        ),
    )
    return by_log, smoothed
