"""Healthy runs in, thresholds out: at which each rule has as many false flags as another."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from bench.detection.contenders import ALONE, Surprise
from bench.detection.data import Data
from bench.peers import Chance, NotFinite, Rule, Scored
from bench.streams import Stream
from numpy.typing import NDArray

SEALEGS = "Sealegs"
RATES = (1.0, 10.0, 100.0, 1000.0)
"""False flags per 100k steps that every rule is turned to: a line of the figure ..."""
COMPARED = (10.0, 1.0)
"""... and those that have tables."""
HIGHEST = 40
"""Scores that are kept of one run: more false flags in it than that are not asked for."""


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


# ---- Sealegs


def ours_turned(data: Data, scores: Sequence[Surprise]) -> dict[str, Any]:
    """Thresholds of Sealegs for every rate, of both signals and of each alone, and the healthy steps that set them.

    ``here`` are the highest scores of each signal alone in the run that faults are put into: the thresholds for so many
    flags there.
    """
    where = [(run, step) for run in data.healthy for step in range(len(run))]
    inside = np.array([run is data.base for run, _ in where])
    has_norm = np.array([run.grad_norm is not None for run, _ in where])
    turned: dict[str, dict[str, dict[str, Any]]] = {}
    here: dict[str, list[float]] = {}
    for given in ("both", *ALONE):
        own = np.array([score[given] for score in scores])
        steps = int(has_norm.sum()) if given == "grad_norm" else len(own)
        turned[given] = turned_to(own, (2.0, 12.0), steps)
        for one in turned[given].values():
            if one["threshold"] is not None:
                one["flags_here"] = int((own[inside] > one["threshold"]).sum())
        here[given] = np.sort(own[inside])[::-1][:HIGHEST].tolist()
    limit = turned["both"][f"@{COMPARED[0]:g}"]["threshold"] or math.inf
    flagged = [
        flag_of(run, step, score) for (run, step), score in zip(where, scores, strict=True) if score["both"] > limit
    ]
    alone = {signal: turned[signal] for signal in ALONE}
    return {"turned": turned["both"], "alone": alone, "here": here, "flagged": flagged}


def flag_of(run: Stream, step: int, score: Surprise) -> dict[str, Any]:
    """A healthy step that is flagged: by what, and how many times the usual it is."""
    signal = max(ALONE, key=score.__getitem__)
    values = run.loss if signal == "loss" else run.grad_norm
    assert values is not None
    times = float(values[step] / np.median(values[max(step - 32, 0) : step]))
    return {"run": run.name, "step": step, "by": signal, "times": times, "score": min(score["both"], 99.0)}


def asked_of(healthy: Mapping[str, Any], who: str) -> dict[str, float]:
    """The thresholds that faults are looked for with, by name.

    Those of the rates; of Sealegs also of each signal alone, and, as ``loss#3``, those with so many false flags in the
    run that faults are put into as a peer has there.
    """
    asked = thresholds(healthy[who]["turned"])
    if who == SEALEGS:
        for signal, turned in healthy[who]["alone"].items():
            asked |= {f"{signal}{rate}": limit for rate, limit in thresholds(turned).items()}
            asked |= {
                f"{signal}#{count}": healthy[who]["here"][signal][count]
                for count in sorted(counts_here(healthy) & set(range(HIGHEST)))
            }
    return asked


def counts_here(healthy: Mapping[str, Any]) -> set[int]:
    """How many false flags anybody has in the run that faults are put into, at the rates that are compared."""
    turned = (own["turned"].get(f"@{rate:g}", {}) for own in healthy.values() for rate in COMPARED)
    return {one["flags_here"] for one in turned if "flags_here" in one}


def thresholds(turned: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Those that were found."""
    return {rate: one["threshold"] for rate, one in turned.items() if one["threshold"] is not None}
