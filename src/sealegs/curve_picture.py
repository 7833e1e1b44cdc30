"""Signals over steps in, one SVG picture with bands and crosses out; and text of any origin in, HTML out.

It has no script, and ``escaped`` is the one place where text becomes HTML.
"""

import html
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sealegs.printable import visible

Floats = NDArray[np.float64]
WIDTH, LEFT, RIGHT, TOP, GAP = 860, 74, 12, 18, 34
MOST_BANDS = 100
EXTREME = 50.0
"""Multiple of the median from which on an axis is logarithmic."""
HUGE = 1e30


class Panel(NamedTuple):
    """A signal to draw."""

    title: str
    steps: NDArray[np.int64]
    values: Floats
    height: int
    """In pixels."""


class Band(NamedTuple):
    """A stretch of steps to mark, or one step."""

    title: str
    start: int
    end: int | None
    """None: to the end of the run."""


def picture(panels: Sequence[Panel], bands: Sequence[Band], span: tuple[int, int], label: str, style: str = "") -> str:
    """The panels one above the other, with the bands across each."""
    parts: list[str] = []
    y, (first, last) = TOP, span
    for panel in panels:
        parts += _bands(bands, first, last, y, panel.height)
        parts += _curve(panel.steps, panel.values, span, y, panel.height)
        parts.append(_text(LEFT, y - 5, panel.title))
        y += panel.height + GAP
    parts.append(_text(LEFT, y - GAP + 16, f"step {first:,}"))
    parts.append(_text(WIDTH - RIGHT, y - GAP + 16, f"step {last:,}", anchor="end"))
    styled = f' style="{escaped(style)}"' if style else ""
    head = f'<svg viewBox="0 0 {WIDTH} {y}" role="img" aria-label="{escaped(label)}"{styled}>'
    return "\n".join([head, *parts, "</svg>"])


def table(rows: Sequence[tuple[str, str]]) -> str:
    """Two columns: names, and what is said of them."""
    cells = (
        f"<tr><th style='text-align:left'>{escaped(name)}</th><td style='text-align:left'>{escaped(text)}</td></tr>"
        for name, text in rows
    )
    return "<table>" + "".join(cells) + "</table>"


def _bands(bands: Sequence[Band], first: int, last: int, y: int, height: int) -> list[str]:
    found = []
    for one in bands[:MOST_BANDS]:
        begin, end = _x(one.start, first, last), _x(last if one.end is None else max(one.end, one.start), first, last)
        found.append(
            f'<rect x="{begin:.1f}" y="{y}" width="{max(end - begin, 1.5):.1f}" height="{height}" fill="var(--mark)" '
            f'fill-opacity="0.16"><title>{escaped(one.title)}</title></rect>'
        )
    return found


def _curve(steps: NDArray[np.int64], values: Floats, span: tuple[int, int], y: int, height: int) -> list[str]:
    """A line that breaks where values are not finite, with a cross at the upper edge there."""
    is_sound = np.isfinite(values) & (np.abs(values) < HUGE)
    sound = values[is_sound]
    frame = (
        f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - RIGHT}" height="{height}" fill="none" stroke="var(--edge)"/>'
    )
    if not len(sound):
        return [frame, _text(LEFT + 8, y + 16, "no finite value")]
    is_log = bool((sound > 0).all() and sound.max() > EXTREME * np.median(sound))
    low, high = float(sound.min()), float(sound.max())
    bottom, top = (math.log10(low), math.log10(high)) if is_log else (low, high)
    room = (top - bottom) or 1.0
    parts = [frame]
    for points in _strokes(steps, np.where(is_sound, values, np.nan), span):
        heights = np.log10(points[1]) if is_log else points[1]
        xs = LEFT + points[0] * (WIDTH - LEFT - RIGHT)
        ys = y + 4 + (height - 8) * (1 - (heights - bottom) / room)
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(xs.tolist(), ys.tolist(), strict=True))
        parts.append(f'<polyline points="{path}" fill="none" stroke="var(--line)" stroke-width="1.2"/>')
    broken = steps[~is_sound]
    for step in broken[:: max(len(broken) // 60, 1)].tolist():
        parts.append(_text(_x(step, *span), y + 12, "\u00d7", anchor="middle", fill="var(--mark)"))
    parts.append(_text(LEFT - 6, y + 10, f"{high:.4g}", anchor="end"))
    parts.append(_text(LEFT - 6, y + height, f"{low:.4g}", anchor="end"))
    return [*parts, _text(WIDTH - RIGHT, y - 5, "logarithmic", anchor="end")] if is_log else parts


def _strokes(steps: NDArray[np.int64], values: Floats, span: tuple[int, int]) -> list[tuple[Floats, Floats]]:
    """The line in pieces between what is not finite: of each pixel's values the lowest and the highest stay."""
    places = (steps - span[0]) / (span[1] - span[0])
    pixels = (places * (WIDTH - LEFT - RIGHT)).astype(np.int64)
    kept = np.ones(len(steps), np.bool_)
    if len(steps) > 4 * WIDTH:
        kept[:] = False
        begins = np.flatnonzero(np.diff(pixels, prepend=-1))
        for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(steps)], strict=True):
            part = values[begin:end]
            if np.isnan(part).all():
                kept[begin] = True
            else:
                kept[[begin + int(np.nanargmin(part)), begin + int(np.nanargmax(part))]] = True
    places, values = places[kept], values[kept]
    cuts = np.flatnonzero(np.isnan(values))
    pieces = zip(np.split(places, cuts), np.split(values, cuts), strict=True)
    return [(at[sound], cells[sound]) for at, cells in pieces if (sound := ~np.isnan(cells)).any()]


def _x(step: float, first: int, last: int) -> float:
    return LEFT + (min(max(step, first), last) - first) / (last - first) * (WIDTH - LEFT - RIGHT)


def _text(x: float, y: float, text: str, *, anchor: str = "start", fill: str = "") -> str:
    style = f' style="fill:{fill}"' if fill else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{escaped(text)}</text>'


def escaped(text: str) -> str:
    """The one place where text becomes HTML."""
    return html.escape(visible(text))
