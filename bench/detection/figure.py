"""Recalls in, figures out: what is found within 8 steps against false alarms, a line for each rule."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from bench.detection.contenders import ALARM, FLAG, TURNED
from bench.detection.tables import CONTROL, TURNABLE, Recalls, merged
from bench.detection.turned import SEALEGS

from bench import streams

mpl.use("svg")
from matplotlib import pyplot as plt
from matplotlib.lines import Line2D

WITHIN = 8
NONE = 0.4
"""Where no false alarm at all is drawn."""
OURS = "#c1121f"
# Okabe and Ito's, then the same dashed: told apart without red and green, and in print
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#56b4e9", "#cc79a7", "#000000")
DASHES = ("-", "--", ":")
Curve = Sequence[tuple[float, float]]


def curves(results: Mapping[str, Mapping[str, Any]], recalls: Recalls, faults: Sequence[str]) -> dict[str, Curve]:
    """False alarms per 100k and the mean share found of these faults, by rule, from strict to loose."""
    lines: dict[str, Curve] = {}
    for who, row in TURNABLE.items():
        healthy = results["healthy"][who]
        steps = next(iter((healthy["found"] or results["healthy"][SEALEGS]["found"]).values()))["steps"]
        points = [
            (one["flags"] / steps * 1e5, share(recalls, rate, row, faults))
            for rate, one in healthy["turned"].items()
            if one["threshold"] is not None
        ]
        if points:
            lines[row] = list(dict.fromkeys(points))
    return lines


def defaults(
    results: Mapping[str, Mapping[str, Any]], recalls: Recalls, faults: Sequence[str]
) -> dict[str, tuple[float, float]]:
    """The same at the defaults: a point for each."""
    found = merged(results, "healthy", "found")
    return {
        name: (own["flags"] / own["steps"] * 1e5, share(recalls, "defaults", name, faults))
        for name, own in found.items()
    }


def share(recalls: Recalls, setting: str, name: str, faults: Sequence[str]) -> float:
    """The mean over the faults, in per cent."""
    return sum(100 * recalls[setting][fault][name].share(WITHIN) for fault in faults) / len(faults)


def style(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """How each line looks."""
    others = [name for name in names if name not in (TURNED, CONTROL)]
    looks: dict[str, dict[str, Any]] = {
        name: {"color": COLOURS[i % len(COLOURS)], "ls": DASHES[i // len(COLOURS)], "lw": 1.3}
        for i, name in enumerate(others)
    }
    return looks | {
        TURNED: {"color": OURS, "ls": "-", "lw": 3.0, "zorder": 5},
        CONTROL: {"color": "#999999", "ls": "-.", "lw": 1.3},
    }


def plain(name: str) -> str:
    """Without Markdown."""
    return name.replace("*", "")


def draw_axes(axes: Any, lines: Mapping[str, Curve], points: Mapping[str, tuple[float, float]]) -> None:
    """Lines, the defaults as rings, and Sealegs as it is as stars."""
    looks = style(list(lines))
    for name, curve in lines.items():
        axes.plot([max(x, NONE) for x, _ in curve], [y for _, y in curve], **looks[name])
    for name, (x, y) in points.items():
        if name in (FLAG, ALARM):
            axes.plot(max(x, NONE), y, marker="*", ms=13, color=OURS, mec="white", zorder=6)
        elif name in looks:
            axes.plot(max(x, NONE), y, marker="o", ms=6, mfc="none", color=looks[name]["color"])
    axes.set(xscale="log", xlim=(NONE * 0.9, 1.2e5), ylim=(-3, 103))
    axes.set_xticks([NONE, 1, 10, 100, 1000, 10_000, 100_000], ["0", "1", "10", "100", "1k", "10k", "100k"])
    axes.minorticks_off()
    axes.grid(alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)


def write(results: Mapping[str, Mapping[str, Any]], recalls: Recalls, path: Path) -> None:
    """The mean of all faults with names at the lines, and beside it every fault for itself."""
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "sealegs", "font.size": 9})
    all_faults = list(streams.FAULTS)
    lines = curves(results, recalls, all_faults)
    points = defaults(results, recalls, all_faults)
    figure, axes = plt.subplots(figsize=(9, 7))
    draw_axes(axes, lines, points)
    label(axes, {name: curve[-1] for name, curve in lines.items()}, style(list(lines)))
    for name in (FLAG, ALARM):
        x, y = points[name]
        axes.annotate(plain(name), (max(x, NONE), y), (9, -4), textcoords="offset points", ha="left", color=OURS)
    axes.set_xlabel("false alarms per 100k healthy steps (rings: each rule at its default)")
    axes.set_ylabel(f"found within {WITHIN} steps of onset, mean of {len(all_faults)} faults, %")
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)

    figure, grid = plt.subplots(4, 4, figsize=(14, 12), sharex=True, sharey=True)
    for axes, fault in zip(grid.flat, all_faults, strict=False):
        own = {name: point for name, point in defaults(results, recalls, [fault]).items() if name in (FLAG, ALARM)}
        draw_axes(axes, curves(results, recalls, [fault]), own)
        axes.set_title(fault, fontsize=9)
    for axes in grid.flat[len(all_faults) :]:
        axes.axis("off")
    looks = style(list(lines))
    handles = [Line2D([], [], label=plain(name), **looks[name]) for name in lines]
    figure.supxlabel("false alarms per 100k healthy steps (stars: Sealegs as it is, alarm and flag)")
    figure.supylabel(f"found within {WITHIN} steps of onset, %")
    figure.tight_layout(rect=(0.02, 0.07, 1, 1))
    figure.legend(handles=handles, loc="lower center", ncols=7, frameon=False, fontsize=8, bbox_to_anchor=(0.5, 0.025))
    figure.savefig(path.with_name(f"{path.stem}-by-fault.svg"), bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


def label(axes: Any, ends: Mapping[str, tuple[float, float]], looks: Mapping[str, Mapping[str, Any]]) -> None:
    """Names beside the ends of their lines, moved apart where they would overlap."""
    last = -10.0
    for name, (x, y) in sorted(ends.items(), key=lambda item: item[1][1]):
        last = max(y, last + 3.2)
        weight = "bold" if name == TURNED else "normal"
        axes.annotate(
            plain(name),
            (max(x, NONE), y),
            (1.5e5, last),
            va="center",
            annotation_clip=False,
            color=looks[name]["color"],
            weight=weight,
            arrowprops={"arrowstyle": "-", "color": looks[name]["color"], "alpha": 0.4, "lw": 0.7},
        )
