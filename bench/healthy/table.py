"""Finished cells in, Markdown out: who is worse off under which keeper, what was skipped, and why.

A cell is one training with one seed under one keeper; ``bench/harm.py`` says what *worse* means.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from bench.detection.measures import poisson
from bench.healthy.keepers import GUARDS, OTHERS, OVERFLOW, PLAIN, VERDICTS

LEAST_SPREAD = 1e-3
"""Of the mean: seeds that agree to the last digit would make a catastrophe of one test example."""
ON_AVERAGE, ERRORS = 0.5, 2.0
"""Worse on average: by so many spreads, and by so many standard errors of the paired differences."""
ONE_SEED, BELOW_ALL = 3.0, 1.0
"""One seed is lost: so many spreads below the same seed unguarded, and so many below the worst unguarded one."""

STOPS = "Lightning 3x / 10"
"""Whose alarms are stops of the job."""
PEER_LEGEND = (
    "A cell: difference in spreads (**worse** in bold), and one step in how many is touched. OLMo-core and llm.c skip, "
    "ZClip scales down below the training's own clipping, Lightning would stop the job and want a restart: it only "
    "counts here, so its quality is that of the plain run."
)


@dataclass(frozen=True)
class Compared:
    """One training under one keeper, seed by seed, beside itself unguarded."""

    cells: Sequence[Mapping[str, Any]]
    plain: Sequence[Mapping[str, Any]]
    """Of the same seeds, in the same order."""

    @cached_property
    def lost(self) -> list[Mapping[str, Any]]:
        """Cells without a quality: halted, failed, or not a number."""
        return [cell for cell in self.cells if cell["quality"] is None]

    @cached_property
    def gains(self) -> list[float]:
        """By how much each seed is better than unguarded; negative is worse. Seeds without a quality are left out."""
        pairs = [(cell["quality"], plain["quality"]) for cell, plain in zip(self.cells, self.plain, strict=True)]
        sign = 1.0 if self.plain[0]["is_better_higher"] else -1.0
        return [sign * (ours - theirs) for ours, theirs in pairs if ours is not None and theirs is not None]

    @cached_property
    def spread(self) -> float:
        """Standard deviation of the unguarded seeds."""
        return max(deviation(qualities(self.plain)), LEAST_SPREAD * abs(mean(qualities(self.plain))), 1e-12)

    @property
    def gain(self) -> float:
        """The mean difference, in spreads."""
        return mean(self.gains) / self.spread

    @property
    def is_worse(self) -> bool:
        """As ``bench/harm.py`` says."""
        if self.lost:
            return True
        if not self.gains:
            return False
        error = deviation(self.gains) / math.sqrt(len(self.gains))
        on_average = mean(self.gains) < -max(ON_AVERAGE * self.spread, ERRORS * error)
        return on_average or any(map(self._is_lost, self.cells, self.plain))

    def _is_lost(self, cell: Mapping[str, Any], plain: Mapping[str, Any]) -> bool:
        sign = 1.0 if plain["is_better_higher"] else -1.0
        worst = min(sign * quality for quality in qualities(self.plain))
        here = sign * cell["quality"]
        is_below_itself = here < sign * plain["quality"] - ONE_SEED * self.spread
        return bool(is_below_itself and here < worst - BELOW_ALL * self.spread)

    @property
    def skips(self) -> Counter[str]:
        """Updates that were left out and would not have been, by reason."""
        return skips_of(self.cells)

    @property
    def steps(self) -> int:
        """Over all seeds."""
        return sum(cell["counts"]["steps"] for cell in self.cells)

    def summed(self, name: str) -> int:
        """A count over all seeds."""
        return sum(cell["counts"][name] for cell in self.cells)

    @property
    def same(self) -> int:
        """Seeds whose quality is that of the unguarded run to the last bit."""
        return self._pairs_that(lambda is_touched, is_same: is_same)

    @property
    def changed_untouched(self) -> int:
        """Seeds in which nothing was done, and whose quality is another all the same. Should be 0."""
        return self._pairs_that(lambda is_touched, is_same: not is_touched and not is_same)

    def _pairs_that(self, holds: Any) -> int:
        pairs = zip(self.cells, self.plain, strict=True)
        return sum(holds(is_touched(cell), cell["quality"] == plain["quality"]) for cell, plain in pairs)


def is_touched(cell: Mapping[str, Any]) -> bool:
    """Whether the keeper did anything to the training."""
    counts = cell["counts"]
    did = sum(counts[name] for name in ("clipped", "rollbacks", "other_interventions", "halts"))
    return bool(did or skips_of([cell]) or cell["error"])


def skips_of(cells: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """By reason, without what a loss scaler skips by itself."""
    skips: Counter[str] = sum((Counter(cell["counts"]["skips"]) for cell in cells), Counter())
    del skips[OVERFLOW]
    return skips


def compared(cells: Sequence[Mapping[str, Any]], training: str, keeper: str) -> Compared | None:
    """What there is of a training under a keeper and plainly; None where nothing is."""
    ours, plain = (
        {cell["seed"]: cell for cell in cells if cell["training"] == training and cell["keeper"] == name}
        for name in (keeper, PLAIN)
    )
    seeds = sorted(ours.keys() & plain.keys())
    if not seeds or not qualities(plain.values()):
        return None
    return Compared([ours[seed] for seed in seeds], [plain[seed] for seed in seeds])


def report(cells: Sequence[Mapping[str, Any]]) -> str:
    """All tables."""
    trainings = list(dict.fromkeys(cell["training"] for cell in cells))
    keepers = {cell["keeper"] for cell in cells}
    parts = [guard_table(cells, trainings, keeper) for keeper in GUARDS if keeper in keepers]
    others = [keeper for keeper in OTHERS if keeper in keepers]
    if others:
        parts.append(peer_table(cells, trainings, others))
    parts.append(totals([(name, of) for name in (*GUARDS, *OTHERS) if (of := all_of(cells, trainings, name))]))
    if not parts[:-1]:
        parts = [plain_table(cells, trainings)]
    failed = [cell for cell in cells if cell["error"]]
    told = [f"- {cell['training']}, seed {cell['seed']}, {cell['keeper']}: {last_line(cell)}" for cell in failed]
    return "\n\n".join([*parts, *(["Halted or failed:\n\n" + "\n".join(told)] if told else [])])


def all_of(cells: Sequence[Mapping[str, Any]], trainings: Sequence[str], keeper: str) -> list[Compared]:
    """Every training under a keeper."""
    return [found for name in trainings if (found := compared(cells, name, keeper))]


def guard_table(cells: Sequence[Mapping[str, Any]], trainings: Sequence[str], keeper: str) -> str:
    """A row a training."""
    head = (
        *("kind", "training", "seeds x steps", "metric", "plain", keeper, "difference in spreads", "worse"),
        *("skipped", "alarms", "rollbacks (other interventions)", "halts", "`check`", "same quality"),
    )
    lines = [f"## {keeper}\n", row(head), row(["---"] * len(head))]
    for of in all_of(cells, trainings, keeper):
        first = of.plain[0]
        alarms: Counter[str] = sum((Counter(cell["counts"]["alarms"]) for cell in of.cells), Counter())
        verdicts = Counter(cell["counts"]["verdict"] for cell in of.cells)
        values = (
            first["kind"],
            first["training"],
            f"{len(of.plain)} x {first['counts']['steps']}",
            f"{first['metric']} {'↑' if first['is_better_higher'] else '↓'}",
            quality(of.plain),
            quality(of.cells),
            f"{of.gain:+.2f}" if of.gains else "",
            "**worse**" if of.is_worse else "",
            often(sum(of.skips.values()), of.steps, of.skips),
            by_reason(alarms),
            interventions(of),
            of.summed("halts") or "",
            ", ".join(f"{name} {verdicts[name]}" for name in VERDICTS if verdicts[name]),
            f"{of.same} of {len(of.cells)}" + (f", **{of.changed_untouched} untouched**" * (of.changed_untouched > 0)),
        )
        lines.append(row(values))
    return "\n".join(lines)


def peer_table(cells: Sequence[Mapping[str, Any]], trainings: Sequence[str], keepers: Sequence[str]) -> str:
    """A row a training, a column a peer."""
    lines = [f"## peers\n\n{PEER_LEGEND}\n", row(["training", *keepers]), row(["---"] * (1 + len(keepers)))]
    for training in trainings:
        values = [training]
        for keeper in keepers:
            of = compared(cells, training, keeper)
            if of is None:
                values.append("")
                continue
            gain = f"{of.gain:+.2f}" if of.gains else "lost"
            values.append(f"{f'**{gain}**' if of.is_worse else gain}, {often(touches(of), of.steps) or 'never'}")
        lines.append(row(values))
    return "\n".join(lines)


def plain_table(cells: Sequence[Mapping[str, Any]], trainings: Sequence[str]) -> str:
    """Where nothing is compared: what the trainings come to by themselves."""
    lines = [row(["kind", "training", "steps", "metric", "plain", "seconds"]), row(["---"] * 6)]
    for training in trainings:
        own = [cell for cell in cells if cell["training"] == training]
        seconds = f"{mean([cell['seconds'] for cell in own]):.1f}"
        steps = own[0]["counts"]["steps"]
        lines.append(row([own[0]["kind"], training, steps, own[0]["metric"], quality(own), seconds]))
    return "\n".join(lines)


def totals(keepers: Sequence[tuple[str, Sequence[Compared]]]) -> str:
    """A row a keeper: over all trainings and seeds."""
    head = (
        *("keeper", "trainings", "worse", "steps", "touched", "per 10,000 steps (95 %)", "trainings touched"),
        *("rollbacks", "halts", "`check` says act", "warned at the end", "untouched, yet another quality"),
    )
    lines = ["## all together\n", row(head), row(["---"] * len(head))]
    for name, those in keepers:
        steps, count = sum(of.steps for of in those), sum(map(touches, those))
        low, high = (1e4 * end / steps for end in poisson(count))
        cells = [cell for of in those for cell in of.cells]
        acts = sum(cell["counts"]["verdict"] == "act" for cell in cells)
        values = (
            name,
            len(those),
            sum(of.is_worse for of in those),
            f"{steps:,}",
            often(count, steps) or "never",
            f"{1e4 * count / steps:.2f} ({low:.2f} to {high:.2f})",
            sum(touches(of) > 0 for of in those),
            sum(of.summed("rollbacks") for of in those),
            sum(of.summed("halts") for of in those),
            f"{acts} of {len(cells)}" if name in GUARDS else "",
            f"{sum(of.summed('warned') for of in those)} of {len(cells)}" if name in GUARDS else "",
            sum(of.changed_untouched for of in those),
        )
        lines.append(row(values))
    return "\n".join(lines)


def touches(of: Compared) -> int:
    """Steps that a keeper did something about: skipped, scaled down, or stopped at."""
    alarms = (each for cell in of.cells for each in cell["counts"]["alarms"].items())
    stops: int = sum(count for name, count in alarms if name == STOPS)
    return sum(of.skips.values()) + of.summed("clipped") + stops


def interventions(of: Compared) -> str:
    """``3 (1)``: rollbacks, and in brackets what a playbook did without going back; nothing for none."""
    rollbacks, others = of.summed("rollbacks"), of.summed("other_interventions")
    return f"{rollbacks} ({others})" if rollbacks or others else ""


def quality(cells: Iterable[Mapping[str, Any]]) -> str:
    """Mean and deviation over the seeds that have one."""
    own = list(cells)
    values = qualities(own)
    lost = len(own) - len(values)
    told = f"{mean(values):.4g} ± {deviation(values):.2g}" if values else ""
    return " ".join(filter(None, [told, f"({lost} lost)" * (lost > 0)]))


def qualities(cells: Iterable[Mapping[str, Any]]) -> list[float]:
    """Of the cells that have one."""
    return [cell["quality"] for cell in cells if cell["quality"] is not None]


def often(count: int, steps: int, reasons: Counter[str] | None = None) -> str:
    """``1 in 14 (spike/loss 71)``; nothing for never."""
    if not count:
        return ""
    return f"1 in {steps / count:.3g}" + (f" ({by_reason(reasons)})" if reasons else "")


def by_reason(reasons: Counter[str]) -> str:
    """The most frequent first."""
    return ", ".join(f"{name} {count}" for name, count in reasons.most_common())


def last_line(cell: Mapping[str, Any]) -> str:
    """Of an error."""
    return str(cell["error"]).strip().splitlines()[-1]


def mean(values: Sequence[float]) -> float:
    """NaN of nothing."""
    return statistics.fmean(values) if values else math.nan


def deviation(values: Sequence[float]) -> float:
    """Of the sample; 0 of a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def row(values: Iterable[Any]) -> str:
    """Of a Markdown table."""
    return "| " + " | ".join(map(str, values)) + " |"
