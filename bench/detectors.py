"""How often Sealegs and the rules that ship today flag healthy steps, and what of injected trouble they find.

    python bench/detectors.py [FOLDER] [--seed 0] [--out docs/benchmarks/2026-11-15-detectors.md]

FOLDER holds healthy runs as CSV files: step, loss and, in at least one of them, grad_norm. Without it everything is
synthetic. Prints Markdown; ``--out`` writes it below the marker line of a file and leaves what stands above.
"""

import argparse
import csv
import math
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import bench.streams as streams
from bench.peers import RULES, Chance, Column, Flags, NotFinite, Rule, Scored
from bench.streams import Injection, Stream

from sealegs import judge
from sealegs.stats import streaming
from sealegs.vocabulary import Severity

GROWN = 1000
SETTLED = streaming.START + streaming.SETTLED
SKIP, ALARM = "**Sealegs, skip**", "**Sealegs, alarm**"
MARKER = "<!-- What follows is written by bench/detectors.py. -->"
Cells = dict[str, str]
"""What a table says of each contender, by its name."""


def say(words: str) -> None:
    """Progress."""
    print(f"{time.perf_counter() - BEGAN:6.0f} s  {words}", file=sys.stderr, flush=True)


BEGAN = time.perf_counter()


# ---- who is compared


class Contender(Protocol):
    """Anything that flags steps: one name and column of flags a decision."""

    def flags(self, run: Stream) -> dict[str, Flags]:
        """The steps of a run that are flagged."""

    def respond(self, base: Stream, place: int, event: Stream) -> dict[str, Flags]:
        """The flags of what follows on the first ``place`` steps of a healthy run."""


@dataclass(frozen=True)
class Peer:
    """A rule of ``peers``."""

    rule: Rule

    def flags(self, run: Stream) -> dict[str, Flags]:
        """Of a whole run."""
        return {self.rule.name: self.rule.flags(run.loss, run.grad_norm)}

    def respond(self, base: Stream, place: int, event: Stream) -> dict[str, Flags]:
        """Given no more of the run before than the rule remembers."""
        start = max(0, place - self.rule.memory) if self.rule.memory else 0
        norm = None
        if base.grad_norm is not None and event.grad_norm is not None:
            norm = np.concatenate([base.grad_norm[start:place], event.grad_norm])
        flags = self.rule.flags(np.concatenate([base.loss[start:place], event.loss]), norm)
        return {self.rule.name: flags[place - start :]}


Begin = Callable[[], Any]
Advance = Callable[[Any, dict[str, float]], tuple[Any, tuple[bool, ...]]]


@dataclass(frozen=True)
class Fold:
    """A fold over rows. Its states are values: a healthy run is folded once, and events go on from any step of it."""

    names: tuple[str, ...]
    begin: Begin
    advance: Advance
    states: dict[tuple[str, int], Any] = field(default_factory=dict)

    def flags(self, run: Stream) -> dict[str, Flags]:
        """Of a whole run."""
        return self._run(self.begin(), run, 0)

    def remember(self, base: Stream, places: Sequence[int]) -> None:
        """Keep the states before these steps."""
        state = self.begin()
        wanted = set(places)
        for step, row in enumerate(rows(base, 0)):
            if step in wanted:
                self.states[base.name, step] = state
            state, _ = self.advance(state, row)

    def respond(self, base: Stream, place: int, event: Stream) -> dict[str, Flags]:
        """From the state that was kept."""
        return self._run(self.states[base.name, place], event, place)

    def _run(self, state: Any, run: Stream, first: int) -> dict[str, Flags]:
        found = []
        for row in rows(run, first):
            state, flags = self.advance(state, row)
            found.append(flags)
        return {name: np.array([flags[i] for flags in found]) for i, name in enumerate(self.names)}


def rows(run: Stream, first: int) -> Iterable[dict[str, float]]:
    """A run as the fold takes it."""
    signals = {"loss": run.loss.tolist()} | ({} if run.grad_norm is None else {"grad_norm": run.grad_norm.tolist()})
    for i in range(len(run)):
        yield {"step": first + i} | {name: values[i] for name, values in signals.items()}


def sealegs_fold(by_detector: Counter[tuple[str, str]]) -> Fold:
    """The public path: ``judge.fold`` with ``judge.standard()``, counting what each detector asks for."""
    detectors = judge.standard()

    def advance(state: Any, row: dict[str, float]) -> tuple[Any, tuple[bool, ...]]:
        state, verdict = judge.fold(detectors, state, row)
        is_alarm = False
        for finding in verdict.findings:
            if finding.severity >= Severity.GATE and finding.spoils_update:
                by_detector[finding.detector, "skip"] += 1
            if finding.severity >= Severity.ALARM:
                by_detector[finding.detector, "alarm"] += 1
                is_alarm = True
        return state, (not verdict.go, is_alarm)

    return Fold((SKIP, ALARM), lambda: judge.begin(detectors), advance)


@dataclass(frozen=True, kw_only=True)
class Statistic(Rule):
    """The bare streaming statistic of both signals at p < 10^-threshold, from step 150 on: no young rules, no audit."""

    def flags(self, loss: Column, grad_norm: Column | None) -> Flags:
        """By ``scan``."""
        flags = np.zeros(len(loss), dtype=bool)
        for values in self.columns(loss, grad_norm):
            flags |= streaming.scan(np.log(values), limit=10**-self.threshold)[0] < 10**-self.threshold
        flags[:SETTLED] = False
        return flags

    def fold(self) -> Fold:
        """The same with look and learn, to go on from any step."""
        p = 10**-self.threshold

        def advance(state: dict[str, Any], row: dict[str, float]) -> tuple[dict[str, Any], tuple[bool, ...]]:
            after, flag = {}, False
            for signal in state:
                x = row.get(signal, math.nan)
                if not 0 < x < math.inf:
                    flag |= signal in row
                    after[signal] = state[signal]
                    continue
                condemned = streaming.look(state[signal], math.log(x)).p < p
                flag |= condemned and row["step"] >= SETTLED
                after[signal] = streaming.learn(state[signal], math.log(x), suspicious=condemned)
            return after, (flag,)

        return Fold((self.name,), lambda: {"loss": streaming.State(), "grad_norm": streaming.State()}, advance)


# ---- tables


def table(title: str, note: str, columns: Mapping[str, Cells]) -> str:
    """Contenders down, measures across, as Markdown."""
    names = list(dict.fromkeys(name for cells in columns.values() for name in cells))
    lines = [f"### {title}", "", note, "", "| | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    lines += [f"| {name} | " + " | ".join(cells.get(name, "") for cells in columns.values()) + " |" for name in names]
    return "\n".join(lines)


def poisson_interval(count: int) -> tuple[float, float]:
    """95 % interval of the mean of a count; the normal one where it is as good."""
    if count > 100:
        return count - 1.96 * math.sqrt(count), count + 1.96 * math.sqrt(count)

    def at_most(k: int, mean: float) -> float:
        return math.fsum(math.exp(i * math.log(mean) - mean - math.lgamma(i + 1)) for i in range(k + 1))

    def solve(k: int, wanted: float) -> float:
        low, high = 1e-9, 200.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if at_most(k, middle) > wanted else (low, middle)
        return low

    return (solve(count - 1, 0.975) if count else 0.0), solve(count, 0.025)


def per_100k(found: "Found") -> str:
    """``12.3 (8.1-18)``"""
    scale = 1e5 / found.steps
    low, high = (end * scale for end in poisson_interval(found.flags))
    return f"{short(found.flags * scale)} ({short(low)}-{short(high)})"


def short(x: float) -> str:
    """Two digits of what is small, none after the point of what is large."""
    return f"{x:.1f}" if x < 10 else f"{x:,.0f}"


# ---- false flags


def looked_at(rule: Rule | None, runs: Sequence[Stream]) -> list[Stream]:
    """The runs that have what a rule needs."""
    needs_norm = rule is not None and rule.signals == "grad_norm"
    return [run for run in runs if run.grad_norm is not None or not needs_norm]


@dataclass
class Found:
    """False flags of one contender."""

    flags: int = 0
    steps: int = 0
    where: set[int] = field(default_factory=set)
    """Their step numbers: runs that share their data share their hard batches."""


def false_flags(contenders: Sequence[Contender], runs: Sequence[Stream]) -> dict[str, Found]:
    """What each contender flags of healthy runs, if they have what it needs."""
    found: dict[str, Found] = {}
    for contender in contenders:
        own = looked_at(contender.rule if isinstance(contender, Peer) else None, runs)
        for run in own:
            for name, flags in contender.flags(run).items():
                entry = found.setdefault(name, Found())
                entry.flags += int(flags.sum())
                entry.steps += len(run)
                entry.where |= set(np.flatnonzero(flags).tolist())
    return found


def on_noise(contenders: Sequence[Contender], seed: int) -> dict[str, Cells]:
    """False flags on synthetic runs: loss alone, and Gaussian loss with a log-normal norm."""
    columns = {}
    for number, (noise, with_norm) in enumerate([*((noise, False) for noise in streams.NOISES), ("Gaussian", True)]):
        words = f"{noise}, and norm" if with_norm else noise
        say(f"false flags: {words}")
        random = np.random.default_rng([seed, number])
        runs = [
            streams.healthy(noise, trend, 10_000, random, with_norm=with_norm)
            for trend in streams.TRENDS
            for _ in range(3)
        ]
        columns[words] = {name: per_100k(found) for name, found in false_flags(contenders, runs).items()}
    return columns


def when_young(contenders: Sequence[Contender], real: Sequence[Stream], seed: int) -> dict[str, Cells]:
    """False flags in the first steps of runs."""
    random = np.random.default_rng([seed, 100])
    made = [
        streams.healthy(noise, "power law", 1000, random, with_norm=True) for noise in streams.NOISES for _ in range(10)
    ]
    columns = {}
    for kind, pool in (("real", real), ("synthetic", made)):
        for first in (150, 1000) if pool else ():
            words = f"{len(pool)} {kind}, first {first}"
            say(f"young runs: {words}")
            columns[words] = {
                name: f"{own.flags / own.steps * 5000:.2f} ({own.flags} in {own.steps:,}; {len(own.where)} numbers)"
                for name, own in false_flags(contenders, [run.part(0, first) for run in pool]).items()
            }
    return columns


# ---- injections

Measure = Callable[[Flags, Stream], float]
Form = Callable[[Sequence[float]], str]
Measures = Mapping[str, tuple[Measure, Form]]


def hit(flags: Flags, event: Stream) -> float:
    """Whether any step that something is wrong with is flagged."""
    return float(flags[list(event.bad)].any())


def in_time(flags: Flags, event: Stream) -> float:
    """Whether one before the peak is."""
    return float(flags[: event.peak].any())


def any_flag(flags: Flags, event: Stream) -> float:
    """Whether anything is flagged."""
    return float(flags.any())


def caught(flags: Flags, event: Stream) -> float:
    """The share of the bad steps that is flagged."""
    return float(flags[list(event.bad)].mean())


def at(flags: Flags, event: Stream, *, step: int) -> float:
    """Whether this step is flagged."""
    return float(flags[step])


def healthy_flagged(flags: Flags, event: Stream) -> float:
    """How many steps that nothing is wrong with are flagged."""
    return float(np.delete(flags, list(event.bad)).sum())


def accepted_after(flags: Flags, event: Stream) -> float:
    """Steps until 50 in a row are not flagged; infinite if that never comes."""
    flagged = np.flatnonzero(flags)
    starts, ends = np.append(0, flagged + 1), np.append(flagged, len(flags))
    calm = np.flatnonzero(ends - starts >= 50)
    return float(starts[calm[0]]) if len(calm) else math.inf


def share(values: Sequence[float]) -> str:
    """A mean of shares."""
    return f"{np.mean(values):.0%}"


def mean(values: Sequence[float]) -> str:
    """A mean of numbers."""
    return f"{np.mean(values):.1f}"


def until_accepted(values: Sequence[float]) -> str:
    """Steps until a new level is taken for healthy."""
    ended = [value for value in values if math.isfinite(value)]
    words = [f"{np.mean(ended):.0f}, at most {max(ended):.0f}"] if ended else []
    if len(ended) < len(values):
        words.append(f"never in {1 - len(ended) / len(values):.0%}")
    return "; ".join(words)


@dataclass(frozen=True)
class Ground:
    """A healthy run to inject into, and 150 places in its grown part that leave room behind."""

    base: Stream
    places: tuple[int, ...]

    def try_on(
        self,
        contenders: Sequence[Contender],
        injection: Injection,
        measures: Mapping[str, tuple[Measure, Form]],
        count: int,
    ) -> dict[str, Cells]:
        """Every measure of every contender over the first ``count`` places."""
        found: dict[str, dict[str, list[float]]] = {header: {} for header in measures}
        say(", ".join(measures))
        for place in self.places[:count]:
            event = injection(self.base, place)
            for contender in contenders:
                for name, flags in contender.respond(self.base, place, event).items():
                    for header, (measure, _) in measures.items():
                        found[header].setdefault(name, []).append(measure(flags, event))
        return {
            header: {name: measures[header][1](values) for name, values in found[header].items()} for header in found
        }


def ground(base: Stream, seed: int) -> Ground:
    """Where to inject."""
    random = np.random.default_rng([seed, 200])
    return Ground(base, tuple(random.integers(GROWN + 200, len(base) - 1600, 150).tolist()))


def sudden(contenders: Sequence[Contender], place: Ground) -> dict[str, Cells]:
    """What is found of sudden trouble."""
    columns = place.try_on(
        contenders,
        partial(streams.nothing, reach=100),
        {"control: 100 healthy steps, any flag": (any_flag, share)},
        150,
    )
    for name in streams.TRACES:
        measures = {f"{name}, before the peak": (in_time, share), f"{name}, at all": (hit, share)}
        columns |= place.try_on(contenders, partial(streams.trace, name=name), measures, 150)
    for name, injection in streams.SPIKES.items():
        columns |= place.try_on(contenders, injection, {name: (hit, share)}, 150)
    for name, injection in streams.SECOND.items():
        columns |= place.try_on(contenders, injection, {name: (partial(at, step=40), share)}, 40)
    return columns


def bursts(contenders: Sequence[Contender], place: Ground, names: Iterable[str]) -> dict[str, Cells]:
    """How much of a burst is flagged."""
    columns: dict[str, Cells] = {}
    for name in names:
        columns |= place.try_on(contenders, streams.BURSTS[name], {name: (caught, share)}, 40)
    return columns


def shifts(contenders: Sequence[Contender], place: Ground) -> dict[str, Cells]:
    """How long a lasting change is flagged."""
    measures = {"+40 % for good: accepted after": (accepted_after, until_accepted)}
    return place.try_on(contenders, streams.SHIFT, measures, 40)


def drifts(contenders: Sequence[Contender], place: Ground) -> dict[str, Cells]:
    """Whether a slow rise is noticed, against how often as many healthy steps are."""
    healthy, rising = "control: 1000 healthy steps, any flag", "+40 % in 1000 steps, any flag"
    columns = place.try_on(contenders, partial(streams.nothing, reach=1000), {healthy: (any_flag, share)}, 40)
    return columns | place.try_on(contenders, streams.DRIFT, {rising: (hit, share)}, 40)


def nans(contenders: Sequence[Contender], place: Ground) -> dict[str, Cells]:
    """What one NaN does to a rule."""
    measures: Measures = {
        "the NaN": (partial(at, step=0), share),
        "spike 20 later": (partial(at, step=20), share),
        "spike 500 later": (partial(at, step=500), share),
        "healthy steps flagged": (healthy_flagged, mean),
    }
    control = {"control: flagged with nothing injected": (healthy_flagged, mean)}
    columns = place.try_on(contenders, streams.NAN_THEN, measures, 40)
    return columns | place.try_on(contenders, partial(streams.nothing, reach=498), control, 40)


def worked_example(contenders: Sequence[Contender]) -> dict[str, Cells]:
    """The worked example over 40 seeds."""
    say("worked example")
    step = streams.WORKED_STEP
    first: Counter[str] = Counter()
    before: Counter[str] = Counter()
    control: Counter[str] = Counter()
    for seed in range(40):
        spiked, calm = streams.worked_example(seed), streams.worked_example(seed, spiked=False)
        for contender in contenders:
            for name, flags in contender.flags(spiked).items():
                first[name] += bool(flags[step])
                before[name] += int(flags[:step].sum())
            for name, flags in contender.flags(calm).items():
                control[name] += int(flags.sum())
    return {
        f"flagged at {step}": {name: f"{count} of 40" for name, count in first.items()},
        "steps before": {name: f"{count:,}" for name, count in before.items()},
        "control: without the spike": {name: f"{count:,}" for name, count in control.items()},
    }


# ---- at equal false-alarm rate


def at_rate(rule: Rule, runs: Sequence[Stream], rate: float) -> tuple[Rule | None, str]:
    """The rule at the smallest threshold that gives no more than ``rate`` false flags per 100k, and words for it."""
    if isinstance(rule, NotFinite):
        return None, "has none"
    if isinstance(rule, Chance):
        return replace(rule, threshold=rate / 1e5), ""
    own = looked_at(rule, runs)
    allowed = math.floor(rate * sum(map(len, own)) / 1e5)
    scores = np.concatenate([rule.scores(run.loss, run.grad_norm) for run in own]) if isinstance(rule, Scored) else None

    def count(threshold: float) -> int:
        if scores is not None:
            return int((scores > threshold).sum())
        changed = replace(rule, threshold=threshold)
        return sum(int(changed.flags(run.loss, run.grad_norm).sum()) for run in own)

    low, high = rule.bracket
    if count(high) > allowed:
        return None, f"cannot: {count(high)} flags at {high:g}"
    if count(low) <= allowed:
        return replace(rule, threshold=low), f"loosest: {low:g} ({count(low)} flags)"
    for _ in range(40 if scores is not None else 12):
        middle = (low + high) / 2
        low, high = (low, middle) if count(middle) <= allowed else (middle, high)
    return replace(rule, threshold=high), f"{high:.4g} ({count(high)} flags)"


def equal(rules: Sequence[Rule], runs: Sequence[Stream], place: Ground, rate: float) -> dict[str, Cells]:
    """Everybody at the same rate on the same healthy steps."""
    contenders: list[Contender] = []
    thresholds: Cells = {}
    for rule in rules:
        say(f"{rule.name} at {rate:g} per 100k")
        changed, thresholds[rule.name] = at_rate(rule, runs, rate)
        if isinstance(changed, Statistic):
            fold = changed.fold()
            fold.remember(place.base, place.places)
            contenders.append(fold)
        elif changed is not None:
            contenders.append(Peer(changed))
    here = false_flags(contenders, [place.base])
    columns = {
        "threshold": thresholds,
        "flags in the injected run": {name: str(own.flags) for name, own in here.items()},
    }
    columns |= sudden(contenders, place)
    return columns | bursts(contenders, place, ("30 steps to 9.0", "100 steps of +40 %")) | shifts(contenders, place)


STATISTIC = Statistic(name="**Sealegs, statistic**", threshold=4, bracket=(2.0, 12.0), signals="both")
SAME_BUT_FOR_THRESHOLD = {"llm.c z > 5 / 128", "metaseq 1.25", "SPOT 1e-5", "DSPOT 1e-5"}


# ---- the report


def read(folder: Path) -> list[Stream]:
    """Every CSV file with a loss column."""
    runs = []
    for path in sorted(folder.glob("*.csv")):
        with path.open() as file:
            lines = list(csv.DictReader(file))
        if lines and "loss" in lines[0]:
            columns = {key: np.array([float(line[key] or "nan") for line in lines]) for key in lines[0]}
            runs.append(Stream(name=path.stem, loss=columns["loss"], grad_norm=columns.get("grad_norm")))
    return runs


def by_detector(counted: Counter[tuple[str, str]], steps: int) -> dict[str, Cells]:
    """Findings on healthy steps, by the detector that made them."""
    names = list(dict.fromkeys([*(detector.name for detector in judge.standard()), *(name for name, _ in counted)]))
    columns = {kind: {name: str(counted[name, kind]) for name in names} for kind in ("skip", "alarm")}
    return columns | {"control: healthy steps looked at": dict.fromkeys(names, f"{steps:,}")}


def speed(run: Stream) -> str:
    """Values a second of the loop and steps a second of the fold."""
    began = time.perf_counter()
    streaming.scan(np.log(run.loss), limit=1e-4)
    scanned = time.perf_counter()
    sealegs_fold(Counter()).flags(run)
    folded = time.perf_counter()
    return (
        f"`streaming.scan`: {len(run) / (scanned - began):,.0f} values a second. `judge.fold` with `judge.standard()`: "
        f"{len(run) / (folded - scanned):,.0f} steps a second."
    )


def report(folder: Path | None, seed: int) -> Iterator[str]:
    """All of it, as Markdown, part by part."""
    real = read(folder) if folder else []
    random = np.random.default_rng([seed, 300])
    runs = real or [streams.healthy("t5", "power law", 20_000, random, with_norm=True) for _ in range(5)]
    base = max((run for run in runs if run.grad_norm is not None), key=len)
    steps, norms = sum(map(len, runs)), sum(run.grad_norm is not None for run in runs)
    kind = f"{len(runs)} {'public' if real else 'synthetic (t5 noise, power law)'} healthy runs"
    yield (
        f"{kind}, {steps / 1000:.0f}k steps, {norms} of them with gradient norm; seed {seed}. {processor()}, one core; "
        f"Python {platform.python_version()}, numpy {np.__version__}."
    )
    yield speed(base)

    counted: Counter[tuple[str, str]] = Counter()
    ours = sealegs_fold(counted)
    contenders: list[Contender] = [ours, *map(Peer, RULES)]
    say(f"false flags: {kind}")
    found = false_flags(contenders, runs)
    on_runs = {
        kind: {name: per_100k(own) for name, own in found.items()},
        "flags there, step numbers": {name: f"{own.flags:,}, {len(own.where):,}" for name, own in found.items()},
    }
    whose = by_detector(counted.copy(), steps)
    yield table("False flags per 100k healthy steps", FALSE_FLAGS, on_runs | on_noise(contenders, seed))
    yield table("Sealegs on the same runs, by detector", "Findings that asked for a skip or raised an alarm.", whose)
    yield table("Young runs: false flags per 5,000 steps", YOUNG, when_young(contenders, real, seed))
    place = ground(base, seed)
    say("states at every place")
    ours.remember(base, place.places)
    yield table("Sudden trouble", SUDDEN, sudden(contenders, place))
    lasting = bursts(contenders, place, streams.BURSTS) | shifts(contenders, place) | drifts(contenders, place)
    yield table("Bursts, shifts and drifts of the loss", LASTING, lasting)
    yield table("One NaN, then spikes", NANS, nans(contenders, place))
    yield table("The worked example: loss 2.31 to 5.84, norm 0.6 to 47.2", WORKED, worked_example(contenders))
    rules = [STATISTIC, *(rule for rule in RULES if rule.name not in SAME_BUT_FOR_THRESHOLD)]
    for rate in (10.0, 1.0):
        yield table(f"At {rate:g} false flags per 100k", EQUAL.format(steps=len(base)), equal(rules, runs, place, rate))
    yield f"{time.perf_counter() - BEGAN:.0f} s in all."


FALSE_FLAGS = """Every step counts, the first ones too; in brackets the 95 % Poisson interval. Noise: 30k steps on
a flat and 30k on a power-law loss, loss alone but for the last column. The last row is the control of every table: one
step in a hundred, by chance. Step numbers: how many different ones the flags fall on; runs of one data order share
their hard batches."""
YOUNG = """The first steps of healthy runs; numbers: different step numbers, as above. Sealegs must not skip more than
1 in 5,000. Synthetic: power law with norm, ten runs of each noise."""
SUDDEN = """Share of 150 places (40 for the second shocks) of the longest run that has both signals. The traces are the
published ones on the level of this run."""
LASTING = """At 40 places. Bursts: share of their steps that is flagged. Accepted: steps until 50 in a row are not
flagged, of 1500; 0 means that the shift was not seen. A drift is to be read against its control."""
NANS = """At 40 places: step 0 is NaN in both signals, steps 20 and 500 have loss x2 and norm x10; 498 healthy steps
between them. A rule that flags everything after a NaN finds every spike too: the fourth column tells."""
WORKED = """40 seeds of 500 steps. Steps before: flags on the 12,480 healthy steps before the spike. Control: flags on
the 20,000 steps of the same runs without it."""
EQUAL = """Each rule at the smallest threshold that gives no more than this rate on the healthy runs of the first
column above; rules of the norm alone have only the steps that have one. Threshold of the statistic: -log10 p; of SPOT
-log10 q. "cannot": no threshold is quiet enough. The rates are equal over all the runs, not in the one injected into:
the second column has the false flags of its {steps:,} healthy steps. The control flags by chance at this rate."""


def processor() -> str:
    """The name of the processor, where the system tells."""
    named = subprocess.run(["/usr/bin/env", "lscpu"], capture_output=True, text=True, check=False).stdout.splitlines()
    return next((line.split(":")[1].strip() for line in named if line.startswith("Model name")), platform.machine())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="the file that gets the report below its marker line")
    given = parser.parse_args()
    parts = []
    for part in report(given.folder, given.seed):
        print(part, end="\n\n", flush=True)
        parts.append(part)
    if given.out:
        above = given.out.read_text().split(MARKER)[0] if given.out.exists() else ""
        given.out.write_text(f"{above}{MARKER}\n\n" + "\n\n".join(parts) + "\n")
