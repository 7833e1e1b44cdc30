"""What is measured, in cells that two processes work off and that are kept: one for each measure and contender."""

import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from bench.detection import measures
from bench.detection.contenders import BARE, STATISTIC, Contender, Surprise, contenders, families, looked_at, sealegs
from bench.detection.data import GROWN, Data, fingerprint
from bench.detection.turned import SEALEGS, asked_of, calibrate, ours_turned
from bench.peers import Flags, Rule
from bench.streams import Injection, Stream

from bench import streams

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
    """False flags at the defaults, and the thresholds for every rate; more if it is Sealegs."""
    rule = rule_of(who)
    runs = looked_at(rule, data.healthy)
    counted: Counter[str] = Counter()
    scores: list[Surprise] = []
    those = [] if rule is BARE else at_defaults(who) if rule else [sealegs(counted=counted, scores=scores)]
    found = count(those, runs)
    if rule is None:
        return {"found": found, "by_detector": counted, **ours_turned(data, scores)}
    turned = calibrate(rule, runs)
    for name, one in turned.items():
        if one["threshold"] is not None:
            here = count(contenders(rule, {name: one["threshold"]}), [data.base])
            turned[name] = one | {"flags_here": here[name]["flags"]}
    return {"found": found, "turned": turned}


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
                extra = (asked_of(results["healthy"], who),) if cell is found else ()
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
