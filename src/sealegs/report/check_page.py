"""Writes a diagnosis as one self-contained HTML file: the page of ``sealegs check`` with the curve and its marks.

It opens no file and asks for none: the curve is an inline SVG, there is no script, and the page's own policy forbids
both. Text is text: ``_escaped`` is the one place where it becomes HTML.
"""

import html
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sealegs.diagnosis.contract import Diagnosis
from sealegs.incidents import Incident
from sealegs.printable import printable, visible
from sealegs.report.commands.check import VERDICTS, headline, page, whole, why
from sealegs.report.commands.explain import explained
from sealegs.report.panel_names import TITLES, with_panel_names

Floats = NDArray[np.float64]
DRAWN = (("loss", 1, 260), ("grad_norm", 3, 130), ("lr", 2, 90))
"""Signals that are drawn, their panels, and the height of each in pixels."""
WIDTH, LEFT, RIGHT, TOP, GAP = 860, 74, 12, 18, 34
MOST_BANDS = 100
EXTREME = 50.0
"""Multiple of the median from which on an axis is logarithmic."""
HUGE = 1e30
PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --ink: #1f2328; --faint: #57606a; --edge: #d0d7de; --paper: #fff; --line: #0060a8;
  --mark: #b00020 }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #e6edf3; --faint: #9aa4af; --edge: #3d444d; --paper: #0d1117;
  --line: #6cb6ff; --mark: #ff8f8f }} }}
body {{ margin: 0 auto; padding: 8px 20px 64px; max-width: 900px; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere }}
h1 {{ font-size: 20px; line-height: 1.3 }} p {{ margin: 8px 0 }}
pre {{ font: 13px/1.45 ui-monospace, monospace; white-space: pre-wrap }}
svg {{ width: 100%; height: auto; display: block }} svg text {{ font: 11px system-ui, sans-serif; fill: var(--faint) }}
summary {{ cursor: pointer; margin: 12px 0 }}
</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def html_page(diagnosis: Diagnosis) -> str:
    """The page of a diagnosis."""
    shown: Diagnosis = printable(diagnosis)
    found = shown.findings
    verdict = f"{VERDICTS[found.verdict]}: {with_panel_names(found.because)}"
    text = page(shown).split("\n")[len(headline(shown)) : -2]  # the last line names a flag of the command
    everything = [*whole(shown).split("\n"), *explained(shown).split("\n")]
    parts = [
        f"<h1>{_escaped(verdict)}</h1>",
        f"<p><strong>First action:</strong> {_escaped(shown.first_action)}</p>",
        f"<p>{_escaped(why(shown))}</p>",
        _curves(diagnosis),
        f"<pre>{_escaped_lines(text)}</pre>",
        "<details><summary>All of it, in plain words</summary>",
        f"<pre>{_escaped_lines(everything)}</pre></details>",
    ]
    return PAGE.format(title=_escaped(f"{VERDICTS[found.verdict]}: {shown.source}"), body="\n".join(parts))


def _curves(diagnosis: Diagnosis) -> str:
    """The signals over the steps, one above the other, with the incidents as bands."""
    run = diagnosis.findings.run
    drawn = [each for each in DRAWN if each[0] in run.signals and run.has_numbers(each[0]) and len(run.steps)]
    if not drawn:
        return ""
    parts: list[str] = []
    y = TOP
    first, last = int(run.steps[0]), max(int(run.steps[-1]), int(run.steps[0]) + 1)
    for name, number, height in drawn:
        steps, values = run.series(name)
        parts += _bands(diagnosis.findings.incidents, first, last, y, height)
        parts += _curve(steps, values, (first, last), y, height)
        parts.append(_text(LEFT, y - 5, f"{TITLES[number]} (panel {number})"))
        y += height + GAP
    parts.append(_text(LEFT, y - GAP + 16, f"step {first:,}"))
    parts.append(_text(WIDTH - RIGHT, y - GAP + 16, f"step {last:,}", anchor="end"))
    label = _escaped(f"Curves of {diagnosis.source}; incidents are red bands, values that are not finite crosses.")
    return f'<svg viewBox="0 0 {WIDTH} {y}" role="img" aria-label="{label}">\n' + "\n".join(parts) + "\n</svg>"


def _bands(incidents: Sequence[Incident], first: int, last: int, y: int, height: int) -> list[str]:
    found = []
    for one in incidents[:MOST_BANDS]:
        begin, end = _x(one.start, first, last), _x(last if one.end is None else max(one.end, one.start), first, last)
        title = _escaped(f"{one.kind.replace('_', ' ')} at step {one.start}")
        found.append(
            f'<rect x="{begin:.1f}" y="{y}" width="{max(end - begin, 1.5):.1f}" height="{height}" fill="var(--mark)" '
            f'fill-opacity="0.16"><title>{title}</title></rect>'
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
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{_escaped(text)}</text>'


def _escaped_lines(lines: Sequence[str]) -> str:
    return "\n".join(map(_escaped, lines))


def _escaped(text: str) -> str:
    """The one place where text becomes HTML."""
    return html.escape(visible(text))
