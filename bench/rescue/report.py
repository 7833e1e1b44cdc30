"""Finished cells of bench/survival.py in, Markdown and a figure out."""

import math
import statistics
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from bench.rescue.cases import CLEAN, CONTROLS, FAULTS, MOVED, PLACEBOS
from bench.rescue.rules import PLAIN, RULES, SEALEGS

Done: TypeAlias = dict[str, Any]
LIMIT = 2.0
"""Within so many units of the clean twin, a run has ended as if nothing had been."""


class Results:
    """Cells by what they are asked for."""

    def __init__(self, cells: Sequence[Done], after: int) -> None:
        self.cells = {(done["case"], done["rule"], done["seed"]): done for done in cells}
        self.after = after
        self.seeds = sorted({done["seed"] for done in cells})
        self.rules = [rule for rule in (*RULES, SEALEGS) if any(done["rule"] == rule for done in cells)]

    def gap(self, case: str, rule: str, seed: int, after: int, twin: str = CLEAN.name) -> float | None:
        """Evaluation loss so many steps after the fault, less the twin's; NaN for a run that is lost; None if unknown.

        A run that ends high but finite is lost, and its gap is a number all the same.
        """
        done, clean = self.cells.get((case, rule, seed)), self.cells.get((twin, PLAIN, seed))
        if done is None or clean is None:
            return None
        return float(done["losses"].get(str(after), math.nan)) - float(clean["losses"][str(after)])

    def gaps(self, cases: Sequence[str], rule: str, after: int) -> list[float]:
        """Those that are known."""
        known = (self.gap(case, rule, seed, after) for case in cases for seed in self.seeds)
        return [gap for gap in known if gap is not None]

    def units(self, after: int) -> dict[str, float]:
        """What healthy runs differ by: the root mean square of their gaps; of seeds, the standard deviation."""
        one = self.gaps([case.name for case in PLACEBOS], PLAIN, after)
        moved = self.gaps([case.name for case in MOVED], PLAIN, after)
        twins = [self.cells.get((CLEAN.name, PLAIN, seed)) for seed in self.seeds]
        losses = [twin["losses"][str(after)] for twin in twins if twin is not None]
        return {
            "one batch left out": root_mean_square(one),
            "placebos: one batch left out, or data moved on": root_mean_square(one + moved),
            "data moved on by 10 to 200 batches": root_mean_square(moved),
            "seeds": statistics.stdev(losses) if len(losses) > 1 else math.nan,
        }

    def unit(self, after: int) -> float:
        """The one that gaps are counted in."""
        return self.units(after)["placebos: one batch left out, or data moved on"]

    def is_within(self, case: str, rule: str, seed: int, unit: float) -> bool:
        """Whether a run ended as if nothing had been."""
        gap = self.gap(case, rule, seed, self.after)
        assert gap is not None
        return not self.cells[case, rule, seed]["lost"] and gap <= LIMIT * unit

    def within(self, rule: str, unit: float) -> tuple[int, int]:
        """How many faulty runs did, of how many."""
        faults = [(case.name, seed) for case in FAULTS for seed in self.seeds if (case.name, rule, seed) in self.cells]
        return sum(self.is_within(case, rule, seed, unit) for case, seed in faults), len(faults)


def root_mean_square(gaps: Sequence[float]) -> float:
    """Zero would be no difference."""
    return math.sqrt(statistics.fmean(gap * gap for gap in gaps)) if gaps else math.nan


def report(cells: Sequence[Done], after: int) -> str:
    """Everything."""
    results = Results(cells, after)
    if not any(case == CLEAN.name for case, _, _ in results.cells):
        return "no clean twin is done yet"
    marks = [mark for mark in (100, 1000, after) if mark < after or mark == after]
    parts = ["### Faulty runs that end within twice of what healthy runs differ by\n", *spreads(results)]
    for mark in dict.fromkeys(marks):
        when = "at the end, " if mark == after else ""
        unit = results.unit(mark)
        parts.append(f"\n### Gaps {when}{mark} steps after the fault, in units of {unit:.4f}\n")
        parts += gap_table(results, mark)
    parts.append("\n### What it cost: steps wasted in a run (median), skips and rollbacks (all seeds)\n")
    parts += cost_table(results)
    parts.append("\n### Healthy changes: skips / rollbacks (all seeds)\n")
    parts += control_table(results)
    parts += ["\n### What Sealegs did\n", *deeds(results)]
    return "\n".join(parts)


def spreads(results: Results) -> Iterator[str]:
    """The units, and how many faulty runs end within two of each."""
    units = results.units(results.after)
    yield from header([f"{name}: {unit:.4f}" for name, unit in units.items()])
    for rule in results.rules:
        yield f"| {rule} | {' | '.join('{} of {}'.format(*results.within(rule, unit)) for unit in units.values())} |"


def header(columns: Sequence[str]) -> list[str]:
    """Of a Markdown table."""
    return [f"| rule | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]


def gap_table(results: Results, mark: int) -> Iterator[str]:
    """Median over seeds; how many runs were lost."""
    unit = results.unit(mark)
    yield from header([*(case.name for case in FAULTS), "within twice", "lost"])
    for rule in results.rules:
        row = []
        lost = within = count = 0
        for case in FAULTS:
            known = [seed for seed in results.seeds if (case.name, rule, seed) in results.cells]
            ends = [gap for seed in known if (gap := results.gap(case.name, rule, seed, mark)) is not None]
            gone = sum(results.cells[case.name, rule, seed]["lost"] for seed in known)
            finite = [gap / unit for gap in ends if math.isfinite(gap)]
            middle = f"{statistics.median(finite):+.1f}" if finite else ""
            row.append(f"{middle}{f' ({gone} of {len(known)} lost)' if gone else ''}".strip() or "-")
            lost, count = lost + gone, count + len(known)
            within += sum(gap <= LIMIT * unit for gap in ends)
        if mark == results.after:
            within, _ = results.within(rule, unit)
        yield f"| {rule} | {' | '.join(row)} | {within} of {count} | {lost} |"


def cost_table(results: Results) -> Iterator[str]:
    """Steps computed that are not in the weights at the end."""
    yield from header([case.name for case in FAULTS])
    for rule in results.rules:
        row = []
        for case in FAULTS:
            known = [done for (name, by, _), done in results.cells.items() if (name, by) == (case.name, rule)]
            ended = [done["wasted"] for done in known if not done["ended_early"]]
            middle = f"{statistics.median(ended):.0f}" if ended else "all"
            skips, back = (sum(done[name] for done in known) for name in ("skips", "rollbacks"))
            row.append(f"{middle} ({skips}, {back})" if known else "-")
        yield f"| {rule} | {' | '.join(row)} |"


def control_table(results: Results) -> Iterator[str]:
    """What was done to runs in which nothing is wrong; and what that did to them."""
    yield from header([case.name for case in CONTROLS])
    mark = min(results.after, 200)
    for rule in results.rules:
        row = []
        for case in CONTROLS:
            known = [done for (name, by, _), done in results.cells.items() if (name, by) == (case.name, rule)]
            twin = case.name.partition(", announced")[0]
            gaps = [
                gap for seed in results.seeds if (gap := results.gap(case.name, rule, seed, mark, twin)) is not None
            ]
            skips, back, soft = (sum(done[name] for done in known) for name in ("skips", "rollbacks", "softened"))
            ended = sum(done["ended_early"] for done in known)
            finite = [gap for gap in gaps if math.isfinite(gap)]
            words = [f"{skips} / {back}", *[f"{soft} softened"] * bool(soft), *[f"{ended} halted"] * bool(ended)]
            if finite and rule != PLAIN:
                words.append(f"gap {max(finite, key=abs):+.4f}")
            row.append(", ".join(words) if known else "-")
        if any(cell != "-" for cell in row):
            yield f"| {rule} | {' | '.join(row)} |"


def deeds(results: Results) -> Iterator[str]:
    """In the guard's own words, for each run that was disturbed."""
    unit = results.unit(results.after)
    told: dict[str, list[str]] = defaultdict(list)
    for case in (*FAULTS, *CONTROLS):
        mark = min(results.after, 200) if case.is_benign else results.after
        twin = case.name.partition(", announced")[0] if case.is_benign else CLEAN.name
        for seed in results.seeds:
            done = results.cells.get((case.name, SEALEGS, seed))
            if done is None:
                continue
            gap = results.gap(case.name, SEALEGS, seed, mark, twin)
            if gap is None or not math.isfinite(gap):
                end = "ended early"
            elif mark == results.after:
                end = f"{gap:+.4f} ({gap / unit:+.1f})"
            else:
                end = f"{gap:+.4f}"  # the unit is of another time
            words = "; ".join([f"{done['skips']} skipped", *done["events"]])
            told[case.name].append(f"seed {seed}: {end}; {words}")
    for name, lines in told.items():
        yield f"- {name}"
        yield from (f"  - {line}" for line in lines)


def figure(cells: Sequence[Done], after: int, file: Path) -> None:
    """Every faulty run as a dot: its gap at the end."""
    import matplotlib as mpl
    from matplotlib import pyplot

    mpl.rcParams["svg.hashsalt"] = "survival"  # the same file from the same numbers
    results = Results(cells, after)
    unit = results.unit(after)
    axes: Any
    drawing, axes = pyplot.subplots(figsize=(11, 5), layout="constrained")
    gone = 3000.0
    for number, rule in enumerate(results.rules):
        points = []
        for place, case in enumerate(FAULTS):
            for turn, seed in enumerate(results.seeds):
                gap = results.gap(case.name, rule, seed, after)
                if gap is not None:
                    x = place + (number - len(results.rules) / 2) * 0.085 + turn * 0.02
                    points.append((x, min(gap / unit, gone) if math.isfinite(gap) else gone))
        is_ours = rule == SEALEGS
        look = {"marker": "D" if is_ours else "o", "color": "black" if is_ours else f"C{number}"}
        if points:
            axes.scatter(*zip(*points, strict=True), s=26 if is_ours else 18, label=rule, **look)
    axes.axhspan(-LIMIT, LIMIT, color="0.9", zorder=0)
    axes.set_yscale("symlog", linthresh=LIMIT)
    axes.set_xticks(range(len(FAULTS)), [textwrap.fill(case.name, 16) for case in FAULTS])
    axes.set_yticks(
        [-100, -10, -2, 0, 2, 10, 100, 1000, gone], ["-100", "-10", "-2", "0", "2", "10", "100", "1000", "not finite"]
    )
    axes.set_ylabel(f"gap to the clean twin after {after} steps,\nin units of {unit:.4f} (grey: within two)")
    axes.legend(ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.13), frameon=False)
    drawing.savefig(file, metadata={"Date": None})
    pyplot.close(drawing)
