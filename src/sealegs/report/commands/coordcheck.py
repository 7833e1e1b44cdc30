"""The report of ``sealegs coordcheck``: activation sizes at several widths, as text, JSON or a picture."""

import math
import textwrap
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from sealegs.record.files import whole_file, writing
from sealegs.report.postmortem.plots import BESIDE, FAINT, STYLE, label_of

WIDTH = 100
FLAT = 0.1
"""Largest slope of log size against log width that counts as flat."""
OUTPUT = "output"
START = -0.6
"""Smallest slope of the output: under muP a random start shrinks as 1 / sqrt(width)."""
Word: TypeAlias = Literal["flat", "growing", "shrinking", "unclear", "not finite", "zero"]
COLOURS = ("#0060a8", "#c04a00", "#5b2a86", "#00695c", "#b00020", "#7a5c00")


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """One layer at every width."""

    name: str
    sizes: list[float | str]
    """Root mean square of an entry of its output after the last step, the geometric mean over seeds."""
    slope: float | None
    """Slope of log size against log width; null where a size is zero or not finite."""
    within: float | None
    """Half of the slope's 95 % interval, from the spread of the seeds."""
    word: Word
    """Growing or shrinking if the slope's whole interval is beyond the limit, unclear if only the slope is."""


class Coordinated(msgspec.Struct, frozen=True, kw_only=True):
    """A coordinate check: ``sealegs coordcheck --json``."""

    source: str
    widths: list[int]
    steps: int
    seeds: int
    layers: list[Layer]
    flat: bool
    """Whether no layer grows or shrinks; the output may, as its random start does under muP."""
    because: str


def page(found: Coordinated) -> str:
    """One row per layer, and the verdict."""
    head = (
        f"{found.source}: size of activations after {found.steps} steps, {found.seeds} "
        f"seed{'' if found.seeds == 1 else 's'}"
    )
    named = max(len(layer.name) for layer in found.layers)
    lines = [head, "", f"{'width':<{named}}" + "".join(f"{width:>10}" for width in found.widths) + "          slope"]
    for layer in found.layers:
        sizes = "".join(f"{size if isinstance(size, str) else f'{size:.3g}':>10}" for size in layer.sizes)
        lines.append(f"{layer.name:<{named}}{sizes}{told_slope(layer):>15}  {layer.word}")
    verdict = textwrap.wrap(f"{'FLAT' if found.flat else 'NOT FLAT'}: {found.because}", WIDTH)
    return "\n".join([*lines, "", *verdict])


def told_slope(layer: Layer) -> str:
    """The slope with its interval; empty if there is none."""
    return "" if layer.slope is None else f"{layer.slope:+.2f} +- {layer.within:.2f}"


def draw(found: Coordinated, path: Path) -> None:
    """Draw size against width as SVG, one line per layer, both axes logarithmic."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    with mpl.rc_context({**STYLE, "svg.hashsalt": "sealegs", "svg.fonttype": "none"}), writing(path):
        figure = Figure(figsize=(7, 3.4), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots()
        for place, layer in enumerate(found.layers):
            sizes = [math.nan if isinstance(size, str) or size <= 0 else size for size in layer.sizes]
            label = f"{label_of(layer.name)}  {f'{told_slope(layer)} {layer.word}'.lstrip()}"
            style = ":" if layer.name == OUTPUT else "-"
            colour = COLOURS[place % len(COLOURS)]
            axes.plot(found.widths, sizes, style, marker="o", ms=4, color=colour, label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(found.widths, [str(width) for width in found.widths])
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.set_xlabel("width", color=FAINT)
        axes.set_title(f"size of activations after {found.steps} steps: {'flat' if found.flat else 'not flat'}")
        axes.legend(**BESIDE)
        with whole_file(path, durable=False) as file:
            figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
