"""What is measured, in cells that two processes work off and that are kept: one for each measure and contender."""

import json
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from bench.detection import measures
from bench.detection.contenders import BARE, STATISTIC, Contender, contenders, families, looked_at, sealegs
from bench.detection.data import GROWN, Data, fingerprint
from bench.peers import Chance, Flags, NotFinite, Rule, Scored
from bench.streams import Injection, Stream
from numpy.typing import NDArray

from bench import streams

SEALEGS = "Sealegs"
RATES = (1.0, 10.0, 100.0, 1000.0)
"""False flags per 100k steps that every rule is turned to: a line of the figure ..."""
COMPARED = (10.0, 1.0)
"""... and those that have tables."""
FEW = 40
Job = tuple[Callable[..., Any], str]
Counts = dict[str, dict[str, int]]
"""Flags, steps looked at and different step numbers, by row."""


# ---- the cells: what one contender makes of one kind of data


def at_defaults(who: str) -> list[Contender]:
    """A contender by its name."""
    return [sealegs()] if who == SEALEGS else contenders(*families()[who])


def rule_of(who: str) -> Rule | None:
    """The rule behind a name, if it is not Sealegs."""
    return None if who == SEALEGS else BARE if who == STATISTIC else families()[who][0]


def count(those: Sequence[Contender], runs: Sequence[Stream]) -> Counts:
    """What is flagged of these runs."""
    flags: Counter[str] = Counter()
    numbers: dict[str, set[int]] = {}
    for contender in those:
        for run in runs:
            for name, found in contender.flags(run).items():
                flags[name] += int(found.sum())
                numbers.setdefault(name, set()).update(np.flatnonzero(found).tolist())
    steps = sum(map(len, runs))
    return {name: {"flags": flags[name], "steps": steps, "numbers": len(own)} for name, own in numbers.items()}


def healthy(data: Data, who: str) -> dict[str, Any]:
    """False flags at the defaults, by detector if it is Sealegs, and the thresholds for every rate."""
    rule = rule_of(who)
    runs = looked_at(rule, data.healthy)
    counted: Counter[str] = Counter()
    scores: list[float] = []
    those = [] if rule is BARE else at_defaults(who) if rule else [sealegs(counted=counted, scores=scores)]
    found = count(those, runs)
    turned = calibrate(rule, runs) if rule else turned_to(np.array(scores), (2.0, 12.0), len(scores))
    for name, one in turned.items():
        if one["threshold"] is not None:
            here = contenders(rule, {name: one["threshold"]}) if rule else [sealegs({name: one["threshold"]})]
            turned[name] = one | {"flags_here": count(here, [data.base])[name]["flags"]}
    return {"found": found, "by_detector": counted, "turned": turned}


def noise(data: Data, who: str) -> dict[str, Counts]:
    """False flags on synthetic runs."""
    return {words: count(at_defaults(who), looked_at(rule_of(who), runs)) for words, runs in data.noise.items()}


def young(data: Data, who: str) -> dict[str, Counts]:
    """False flags in the first steps of runs."""
    return {
        f"{len(runs)} {kind}, first {first}": count(
            at_defaults(who), looked_at(rule_of(who), [run.part(0, first) for run in runs])
        )
        for kind, runs in data.young.items()
        for first in (150, GROWN)
        if runs
    }


def labs(data: Data, who: str) -> dict[str, dict[str, Any]]:
    """By source: first flags of the recorded runs by fault, and flags on those that are healthy."""
    answers: dict[str, dict[str, Any]] = {}
    for source in dict.fromkeys(lab.source for lab in data.labs):
        own = [lab for lab in data.labs if lab.source == source]
        first: dict[str, dict[str, list[int]]] = {}
        for contender in at_defaults(who):
            for lab in own:
                for name, flags in ({} if lab.healthy else contender.flags(lab.run)).items():
                    first.setdefault(lab.fault, {}).setdefault(name, []).append(measures.first_flag(flags, lab.run))
        answers[source] = {"first": first, "clean": count(at_defaults(who), [lab.run for lab in own if lab.healthy])}
    return answers


def found(data: Data, who: str, turned: Mapping[str, float]) -> dict[str, dict[str, list[int]]]:
    """First flags of every fault at every place: at the defaults, and at other thresholds by name."""
    rule = rule_of(who)
    rows = dict(turned) if rule is None or rule is BARE else families()[who][1] | dict(turned)
    first: dict[str, dict[str, list[int]]] = {fault: {} for fault in streams.EVENTS}
    for contender in contenders(rule, rows) if rule else [sealegs(rows)]:
        for place, respond in contender.at(data.base, data.places, once=True):
            for fault, injection in streams.EVENTS.items():
                event = injection(data.base, place)
                for name, flags in respond(event).items():
                    first[fault].setdefault(name, []).append(measures.first_flag(flags, event))
    return first


Measure = Callable[[Flags, Stream], float]
LASTING: dict[str, tuple[Injection, Measure]] = {
    **{name: (injection, measures.caught) for name, injection in streams.BURSTS.items()},
    "+40 % for good: accepted after": (streams.SHIFT, measures.accepted_after),
    "control: 1000 healthy steps, any flag": (partial(streams.nothing, reach=1000), measures.any_flag),
    "+40 % in 1000 steps, any flag": (streams.DRIFT, measures.any_flag),
}
AFTER_NAN: dict[str, tuple[Injection, Measure]] = {
    "the NaN": (streams.NAN_THEN, partial(measures.at_step, step=0)),
    "spike 20 later": (streams.NAN_THEN, partial(measures.at_step, step=20)),
    "spike 500 later": (streams.NAN_THEN, partial(measures.at_step, step=500)),
    "healthy steps flagged": (streams.NAN_THEN, measures.healthy_flagged),
    "control: flagged with nothing injected": (partial(streams.nothing, reach=498), measures.healthy_flagged),
}


def lasting(data: Data, who: str) -> dict[str, dict[str, list[float]]]:
    """What is made of events that last, and of what comes after a NaN, at the first forty places."""
    values: dict[str, dict[str, list[float]]] = {header: {} for header in LASTING | AFTER_NAN}
    for contender in at_defaults(who):
        for place, respond in contender.at(data.base, data.places[:FEW], once=False):
            seen: dict[int, tuple[Stream, Mapping[str, Flags]]] = {}
            for header, (injection, measure) in (LASTING | AFTER_NAN).items():
                if id(injection) not in seen:
                    event = injection(data.base, place)
                    seen[id(injection)] = event, respond(event)
                event, answer = seen[id(injection)]
                for name, flags in answer.items():
                    values[header].setdefault(name, []).append(measure(flags, event))
    return values


def calibrate(rule: Rule, runs: Sequence[Stream]) -> dict[str, dict[str, Any]]:
    """For every rate the smallest threshold that gives no more false flags per 100k, and words for it."""
    if isinstance(rule, NotFinite):
        return {f"@{rate:g}": {"threshold": None, "words": "has none"} for rate in RATES}
    steps = sum(map(len, runs))
    if isinstance(rule, Chance):
        return {f"@{rate:g}": {"threshold": rate / 1e5, "flags": rate * steps / 1e5, "words": ""} for rate in RATES}
    if isinstance(rule, Scored):
        scores = np.concatenate([rule.scores(run.loss, run.grad_norm) for run in runs])
        return turned_to(scores, rule.bracket, steps)

    @cache
    def flags_at(threshold: float) -> int:
        changed = replace(rule, threshold=threshold)
        return sum(int(changed.flags(run.loss, run.grad_norm).sum()) for run in runs)

    return turned_to(flags_at, rule.bracket, steps)


def turned_to(
    scores: NDArray[np.float64] | Callable[[float], int], bracket: tuple[float, float], steps: int
) -> dict[str, dict[str, Any]]:
    """The thresholds by halving: of scores, or of a rule that has to be run for each."""
    flags_at = scores if callable(scores) else lambda threshold: int((scores > threshold).sum())
    turned: dict[str, dict[str, Any]] = {}
    loosest, strictest = bracket
    for rate in RATES:
        allowed = math.floor(rate * steps / 1e5)
        low, high = loosest, strictest
        if flags_at(high) > allowed:
            turned[f"@{rate:g}"] = {"threshold": None, "words": f"cannot: {flags_at(high)} flags at {high:g}"}
            continue
        is_loosest = flags_at(low) <= allowed
        parts = 1e12 if not callable(scores) else 4000 if rate in COMPARED else 200
        while not is_loosest and high - low > (bracket[1] - bracket[0]) / parts:
            middle = (low + high) / 2
            low, high = (low, middle) if flags_at(middle) <= allowed else (middle, high)
        strictest = loosest if is_loosest else high  # of the next rate, which allows for more
        words = f"{'loosest: ' if is_loosest else ''}{strictest:.4g} ({flags_at(strictest)} flags)"
        turned[f"@{rate:g}"] = {"threshold": strictest, "flags": flags_at(strictest), "words": words}
    return turned


# ---- working them off


def run(data: Data, keep: Path | None, workers: int) -> dict[str, dict[str, Any]]:
    """Every cell: measure, then contender. What is kept is not measured again."""
    everyone = [SEALEGS, *families()]
    # the longest first; thresholds have to be known before anything is found with them
    first: list[Job] = [
        (healthy, STATISTIC),
        *((cell, who) for cell in (healthy, noise, lasting, labs, young) for who in everyone),
    ]
    second: list[Job] = [(found, who) for who in (SEALEGS, STATISTIC, *families())]
    told = Progress(len(first) + len(second))
    stamp = fingerprint(data)
    results: dict[str, dict[str, Any]] = {cell.__name__: {} for cell, _ in (*first, *second)}
    if keep:
        keep.mkdir(parents=True, exist_ok=True)
    pool = ProcessPoolExecutor(workers)
    try:
        for jobs in (first, second):
            waiting: dict[Future[Any], tuple[str, str, Path | None]] = {}
            for cell, who in jobs:
                path = keep and keep / f"{stamp}-{cell.__name__}-{re.sub('[^a-zA-Z0-9]+', '-', who)}.json"
                if path and path.exists():
                    results[cell.__name__][who] = json.loads(path.read_text())
                    told(f"{cell.__name__}, {who}: kept")
                    continue
                extra = (thresholds(results["healthy"][who]["turned"]),) if cell is found else ()
                waiting[pool.submit(cell, data, who, *extra)] = cell.__name__, who, path
            for future in as_completed(waiting):
                name, who, path = waiting[future]
                results[name][who] = json.loads(whole := json.dumps(future.result()))  # the same, kept or not
                if path:
                    path.with_suffix(".part").write_text(whole)
                    path.with_suffix(".part").replace(path)
                told(f"{name}, {who}")
    finally:
        pool.shutdown(cancel_futures=True)  # an interrupted run does not work off what is left
    return results


def thresholds(turned: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Those that were found."""
    return {rate: one["threshold"] for rate, one in turned.items() if one["threshold"] is not None}


class Progress:
    """A line on standard error for every cell that is done."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0
        self.began = time.perf_counter()

    def __call__(self, words: str) -> None:
        """One more."""
        self.done += 1
        bar = "#" * (20 * self.done // self.total)
        print(
            f"[{bar:20}] {self.done:3}/{self.total} {time.perf_counter() - self.began:4.0f} s  {words}",
            file=sys.stderr,
            flush=True,
        )
