"""Draws the rows around an incident as PNG through matplotlib, in the dashboard's colours."""

import io
import math
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sealegs.errors import StorageError
from sealegs.printable import visible
from sealegs.record.files import whole_file, writing
from sealegs.report.commands.replay import Replayed, TokenShown
from sealegs.report.postmortem.numbers import Met, Plain
from sealegs.report.postmortem.values import Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FOLDER = "evidence"
LINE, OTHER, INCIDENT, INTERVENTION = "#0060a8", "#c04a00", "#b00020", "#5b2a86"
TEXT, FAINT, GRID = "#1f2328", "#57606a", "#e4e7eb"
"""As in the dashboard (dashboard/columns.py and dashboard/figures.py), whose modules need Bokeh."""
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.edgecolor": FAINT,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRID,
    "axes.axisbelow": True,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "legend.frameon": False,
}
BEFORE, AFTER = 100, 60
"""Steps before and after an incident that are drawn."""
BIN = 0.5
"""Nats per bin of a histogram of token losses."""
HUGE = 1e30
"""Values from here on are drawn as not finite: they would hide all others."""
ABOVE: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1, 0.98), "ncols": 4, "borderaxespad": 0}
"""The place of a legend with few, short names."""
BESIDE: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.01, 1), "borderaxespad": 0}
"""The place of a legend with any names."""
LONGEST_LABEL = 40
MOST_BATCHES = 10
"""Batches before the onset whose tokens are averaged."""
EXTREME = 50.0
"""Multiple of the median from which on an axis is logarithmic."""


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw(
    met: Met, interventions: Sequence[int], replayed: Replayed | None, folder: Path, into: str = FOLDER
) -> tuple[Picture, ...]:
    """Draw what there are numbers for, beside a document in ``folder``; gives the pictures as it links them."""
    wanted: list[tuple[str, str, Callable[[], Figure | None]]] = [
        (
            "course.png",
            f"Panels 1, 3 and 2: loss, gradient norm before clipping and learning rate around step {met.start}",
            lambda: _course(met, interventions),
        ),
        (
            "token-losses.png",
            "Panel 7: losses of single tokens at the incident against before",
            lambda: _token_losses(met, replayed),
        ),
        (
            "tokens.png",
            "Panel 10: the tokens that carry the loss of the batch at the onset, and how often they were there before",
            lambda: _tokens(replayed.tokens) if replayed is not None and replayed.tokens else None,
        ),
        (
            "token-frequencies.png",
            "Panel 10: how often the most frequent tokens of a batch in the incident occur, and before",
            lambda: _frequencies(met) if replayed is None or not replayed.tokens else None,
        ),
        ("activations.png", "Panel 4: activations per layer around the incident", lambda: _activations(met)),
    ]
    import matplotlib as mpl

    drawn = []
    with mpl.rc_context(STYLE):
        for name, caption, make in wanted:
            if (figure := make()) is not None:
                content = _png(figure)
                _save(content, folder / into / name)
                drawn.append(Picture(file=f"{into}/{name}", caption=caption, content=content))
    return tuple(drawn)


def _png(figure: "Figure") -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=130, metadata={"Software": None})
    return file.getvalue()


def label_of(name: str) -> str:
    """A name as matplotlib draws it: fonts lack most of Unicode, dollars would be formulas, and a long one would leave
    no room for the lines. A label that begins with an underscore would not be shown at all."""
    text = visible(name).encode("ascii", "backslashreplace").decode()
    text = text if len(text) <= LONGEST_LABEL else f"{text[: LONGEST_LABEL - 3]}..."
    return f"{' ' if text.startswith('_') else ''}{text}".replace("$", r"\$")


def _save(content: bytes, path: Path) -> None:
    if path.parent.is_symlink():
        raise StorageError(f"{path.parent}: a link, which may lead anywhere; put a folder in its place")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path, durable=False) as file:
            file.write(content)


def _figure(width: float, height: float, rows: int = 1) -> "tuple[Figure, Any]":
    """A figure without pyplot: no window, no global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]


def _course(met: Met, interventions: Sequence[int]) -> "Figure":
    panels = (
        ("loss", "1  loss, nats a token"),
        ("grad_norm", "3  gradient norm before clipping"),
        ("lr", "2  learning rate"),
    )
    attempt = _within(met, (*met.before, *met.course))
    line = _within(met, met.line)
    known = [(name, title) for name, title in panels if any(name in row for row in attempt)]
    figure, axes = _figure(8, 0.7 + 1.7 * max(len(known), 1), max(len(known), 1))
    has_other = any(row not in attempt for row in line)
    for place, (name, title) in enumerate(known):
        one = axes[place]
        one.set_title(title)
        if has_other:
            _plot(one, line, name, color=OTHER, label="after going back", linestyle=(0, (2, 1.5)))
        _plot(one, attempt, name, color=LINE, label="as it happened")
        _mark(one, met, interventions)
        if has_other and place == 0:
            one.legend(**ABOVE)
    axes[-1].set_xlabel("step")
    return figure


def _plot(axes: "Axes", rows: Sequence[Plain], name: str, **style: Any) -> None:
    """Draw a line that breaks where a value is not finite, with a cross on the upper edge there."""
    steps = [int(row["step"]) for row in rows if name in row]
    values = [float(row[name]) for row in rows if name in row]
    finite = [value if math.isfinite(value) and abs(value) < HUGE else math.nan for value in values]
    axes.plot(steps, finite, linewidth=1.2, marker="." if len(steps) < 40 else None, markersize=4, **style)
    bad = [step for step, value in zip(steps, finite, strict=True) if math.isnan(value)]
    if bad:
        word = "not finite" if not any(HUGE <= abs(value) < math.inf for value in values) else "beyond 1e30, not finite"
        axes.plot(bad, [0.96] * len(bad), "x", color=INCIDENT, transform=axes.get_xaxis_transform(), clip_on=False)
        axes.annotate(
            word, (bad[-1], 0.96), (6, -3), xycoords=axes.get_xaxis_transform(), textcoords="offset points",
            color=INCIDENT,
        )  # fmt: skip
    sound = sorted(value for value in finite if value > 0)
    if sound and len(sound) == len(finite) - len(bad) and sound[-1] > EXTREME * sound[len(sound) // 2]:
        axes.set_yscale("log")


def _mark(axes: "Axes", met: Met, interventions: Sequence[int]) -> None:
    low, high = axes.get_xlim()
    end = high if met.end is None else max(met.end, met.course[-1]["step"] if met.is_left_behind else 0)
    axes.axvspan(met.start, max(min(end, high), met.start + 0.5), color=INCIDENT, alpha=0.08, linewidth=0)
    axes.axvline(met.start, color=INCIDENT, linewidth=0.8)
    for step in interventions:
        if low <= step <= high:
            axes.axvline(step, color=INTERVENTION, linewidth=1, linestyle="--")
    axes.set_xlim(low, high)


def _within(met: Met, rows: Sequence[Plain]) -> list[Plain]:
    last = (met.peak if met.end is None else met.end) + AFTER
    stride = max(int(rows[1]["step"]) - int(rows[0]["step"]), 1) if len(rows) > 1 else 1
    return [row for row in rows if met.start - BEFORE * stride <= row["step"] <= max(last, met.start + AFTER * stride)]


def _token_losses(met: Met, replayed: Replayed | None) -> "Figure | None":
    """From the reruns, which have both histograms with the same weights; otherwise from the record."""
    if replayed is not None and any(replayed.histogram) and any(replayed.histogram_before):
        here, before = [float(n) for n in replayed.histogram], [float(n) for n in replayed.histogram_before]
        names = f"step {replayed.onset}", "batches before, same weights"
    else:
        told = [(row["step"], _counts(row["token_loss_histogram"])) for row in _logged(met.course)]
        earlier = [counts for row in _logged(met.before) if (counts := _counts(row["token_loss_histogram"]))]
        told = [(step, counts) for step, counts in told if counts]
        if not told or not earlier:
            return None
        step, here = told[0]
        before = [math.fsum(column) for column in zip(*earlier, strict=True)]
        names = f"step {step}", f"{len(earlier)} batches before"
    figure, (axes,) = _figure(8, 2.8)
    for counts, name, colour in ((before, names[1], LINE), (here, names[0], INCIDENT)):
        shares = [100 * count / max(math.fsum(counts), 1) for count in counts]
        edges = [BIN * place for place in range(len(shares) + 1)]
        axes.stairs(shares, edges, color=colour, fill=True, alpha=0.25)
        axes.stairs(shares, edges, color=colour, linewidth=1.2, label=name)
    used = max(place for place, pair in enumerate(zip(here, before, strict=False)) if any(pair)) + 2
    axes.set_xlim(0, BIN * min(used, max(len(here), len(before))))
    axes.set_title("7  losses of single tokens")
    axes.set_xlabel("loss of a token, nats (the last bins: all above, and what is not finite)")
    axes.set_ylabel("% of the tokens")
    axes.legend()
    return figure


def _logged(rows: Sequence[Plain]) -> list[Plain]:
    return [row for row in rows if "token_loss_histogram" in row]


def _counts(text: Any) -> list[float]:
    try:
        return [float(word) for word in str(text).split()]
    except ValueError:  # written by another program
        return []


def _tokens(tokens: Sequence[TokenShown]) -> "Figure":
    shown = tokens[:8]
    return _compared(
        [repr(token.text) for token in shown],
        [
            ("in the batch at the onset", [float(token.times) for token in shown]),
            ("before", [float(token.before) for token in shown]),
        ],
        "10  the highest-loss tokens of the onset",
    )


def _frequencies(met: Met) -> "Figure | None":
    """From the record, which has the 16 most frequent tokens of some batches."""
    told = [(int(row["step"]), found) for row in met.course if (found := _token_counts(row))]
    earlier = [found for row in met.before if (found := _token_counts(row))][-MOST_BATCHES:]
    if not told or not earlier:
        return None
    step, here = told[0]
    shown = list(here)[:8]
    mean = [math.fsum(found.get(token, 0) for found in earlier) / len(earlier) for token in shown]
    return _compared(
        [f"#{token}" for token in shown],
        [
            (f"at step {step}", [here[token] for token in shown]),
            (f"mean of {len(earlier)} batches before", [round(value, 1) for value in mean]),
        ],
        "10  the most frequent tokens",
        "occurrences (0: not among the 16 most frequent)",
    )


def _token_counts(row: Plain) -> dict[str, float]:
    """The counts of ``token_frequencies``, the most frequent first; empty where another program wrote it."""
    found: dict[str, float] = {}
    for word in str(row.get("token_frequencies", "")).split():
        token, _, count = word.partition("=")
        if not token.isdecimal() or not count.isdecimal():
            return {}
        found[token] = float(count)
    return found


def _compared(
    labels: Sequence[str],
    series: Sequence[tuple[str, Sequence[float]]],
    title: str,
    counted: str = "occurrences",
) -> "Figure":
    """Bars of two counts for each label."""
    figure, (axes,) = _figure(8, 1.1 + 0.32 * len(labels))
    places = [float(place) for place in range(len(labels))]
    for shift, colour, (name, counts) in zip((-0.2, 0.2), (INCIDENT, LINE), series, strict=True):
        bars = axes.barh([place + shift for place in places], counts, 0.36, color=colour, label=name)
        axes.bar_label(bars, padding=2, color=FAINT, fontsize=8)
    axes.set_yticks(places, [label_of(label) for label in labels])
    axes.tick_params(axis="y", labelcolor=TEXT)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_title(title)
    axes.set_xlabel(counted)
    axes.margins(x=0.08)
    axes.legend(**ABOVE)
    return figure


def _activations(met: Met) -> "Figure | None":
    rows = _within(met, (*met.before, *met.course))
    names = list(dict.fromkeys(name for row in rows for name in row if name.startswith("activation_norm/")))
    if not names:
        return None
    import matplotlib as mpl

    figure, (axes,) = _figure(8, 2.8)
    colours = mpl.colormaps["plasma"]
    for place, name in enumerate(names):
        depth = 0.85 * place / max(len(names) - 1, 1)
        is_named = len(names) <= 8 or place in (0, len(names) - 1)
        label = label_of(name.partition("/")[2]) if is_named else None
        _plot(axes, rows, name, color=colours(depth), label=label)
    _mark(axes, met, ())
    axes.set_title("4  activations per layer: L2 norm of a token's vector")
    axes.set_xlabel("step")
    axes.legend(**BESIDE, reverse=True)  # deeper layers are mostly the higher lines
    return figure
