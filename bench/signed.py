"""How often losses of both signs are called a surprise in health, and what of injected trouble is found, as Markdown.

    python bench/signed.py [--runs 10] [--steps 20000] [--places 40]

The losses are made, since no public log of one has a hundred thousand steps: noise about zero of several kinds, with a
spread that stays or changes slowly, and losses that move: a log-density that falls through zero, a critic's that rises
for good. Each is judged by the two detectors of the loss that a guard has, as it comes. Rates are per 100,000 judged
steps, with the upper bound of the 95 % interval of a Poisson count.
"""

import argparse
import math
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from sealegs.detectors.drift import Drift
from sealegs.detectors.spike import YOUNG, Spike
from sealegs.judge import standard
from sealegs.vocabulary import Finding, Severity

Values = NDArray[np.float64]
Noise = Callable[[np.random.Generator, int], Values]


def autoregressive(random: np.random.Generator, steps: int) -> Values:
    """Neighbours correlate by a half."""
    kept, values = 0.0, np.empty(steps)
    for at, shock in enumerate(random.standard_normal(steps)):
        kept = values[at] = 0.5 * kept + shock
    return values * math.sqrt(0.75)


def wandering(random: np.random.Generator, steps: int) -> Values:
    """A spread that wanders over a factor of a hundred, by a quarter every 200 steps."""
    walk = np.cumsum(0.25 * random.standard_normal(steps // 200 + 2))
    return np.exp(2.3 * np.tanh(np.interp(np.arange(steps), 200 * np.arange(len(walk)), walk) / 2.3))


def grown(random: np.random.Generator, steps: int, factor: float) -> Values:
    """A spread that becomes so many times as large."""
    return random.standard_t(5, steps) * factor ** np.linspace(0, 1, steps)


def density(random: np.random.Generator, steps: int) -> Values:
    """Falls from 20 through zero, to about -15."""
    return 50 * (1 + np.arange(steps) / 50) ** -0.25 - 26 + 0.3 * random.standard_t(5, steps)


def critic(random: np.random.Generator, steps: int) -> Values:
    """Begins at zero, falls to -5, and rises for the rest of the run."""
    at = np.arange(steps)
    return -5 * (1 - np.exp(-at / 200)) * np.exp(-at / 8000) + 0.1 * random.standard_t(5, steps)


NOISES: dict[str, Noise] = {
    "normal": lambda random, steps: random.standard_normal(steps),
    "t5": lambda random, steps: random.standard_t(5, steps),
    "t3": lambda random, steps: random.standard_t(3, steps),
    "skewed (gamma 4)": lambda random, steps: random.gamma(4.0, 0.5, steps) - 2.0,
    "AR(0.5)": autoregressive,
    "normal, wandering spread": lambda random, steps: random.standard_normal(steps) * wandering(random, steps),
    "t5, wandering spread": lambda random, steps: random.standard_t(5, steps) * wandering(random, steps),
    "t5, spread x100": lambda random, steps: grown(random, steps, 100.0),
    "t5, spread /100": lambda random, steps: grown(random, steps, 0.01),
    "normal x ratio (log-normal, 0.5)": lambda random, steps: (
        random.standard_normal(steps) * np.exp(0.5 * random.standard_normal(steps))
    ),
    "density through zero": density,
    "critic that rises": critic,
}
TROUBLE = {"leap of 10 spreads": 10.0, "leap of 20 spreads": 20.0, "leap of 50 spreads": 50.0}
SHIFT = 5.0
"""Spreads by which the level shifts for good."""


def judged(values: Values, detectors: tuple[Spike | Drift, ...]) -> list[tuple[int, Finding]]:
    """The findings of each step."""
    states = [detector.init() for detector in detectors]
    found = []
    for step, value in enumerate(values.tolist()):
        row = {"step": step, "loss": value}
        found += [(step, one) for d, s in zip(detectors, states, strict=True) if (one := d.look(s, row))]  # type: ignore[arg-type]
        states = [d.learn(s, row) for d, s in zip(detectors, states, strict=True)]  # type: ignore[arg-type]
    return found


def upper(count: int) -> float:
    """The upper end of the 95 % interval of a Poisson count: of 0 it is 3.7."""
    low, high = float(count), 10.0 + 3 * count
    for _ in range(60):
        middle = (low + high) / 2
        chance = sum(math.exp(k * math.log(middle) - middle - math.lgamma(k + 1)) for k in range(count + 1))
        low, high = (middle, high) if chance > 0.025 else (low, middle)
    return high


def main() -> None:
    """Measure and print."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--runs", type=int, default=10)
    words.add_argument("--steps", type=int, default=20_000)
    words.add_argument("--places", type=int, default=40)
    given = words.parse_args()
    detectors = tuple(one for one in standard() if isinstance(one, Spike | Drift) and one.signal == "loss")
    total, steps_of_all = Counter[str](), 0
    print("| noise | judged steps | surprises per 100k | alarms per 100k | drift notices per 100k |")
    print("| --- | --- | --- | --- | --- |")
    for name, noise in NOISES.items():
        count, steps = Counter[str](), 0
        for seed in range(given.runs):
            values = 1e-3 * noise(np.random.default_rng(seed), given.steps)
            first = int(np.argmax(values < 0))
            found = judged(values, detectors)
            steps += len(values) - first - YOUNG
            for at, one in found:
                kind = "drift" if one.detector.startswith("drift") else "surprise"
                count[kind] += at > first and (kind == "drift" or one.severity >= Severity.GATE)
                count["alarm"] += one.severity == Severity.ALARM
        per = 1e5 / steps
        told = (f"{count[key] * per:.2f} (to {upper(count[key]) * per:.2f})" for key in ("surprise", "alarm", "drift"))
        print(f"| {name} | {steps:,} | {' | '.join(told)} |", flush=True)
        total, steps_of_all = total + count, steps_of_all + steps
    per = 1e5 / steps_of_all
    told = (f"{total[key] * per:.2f} (to {upper(total[key]) * per:.2f})" for key in ("surprise", "alarm", "drift"))
    print(f"| **all** | {steps_of_all:,} | {' | '.join(told)} |\n")

    print(f"| noise | {' | '.join(TROUBLE)} | after a NaN, 20 spreads | shift of {SHIFT:g} spreads, noticed in 48 |")
    print(f"| --- |{' --- |' * (len(TROUBLE) + 2)}")
    for name in ("normal", "t5", "skewed (gamma 4)", "AR(0.5)", "t5, wandering spread"):
        hits = Counter[str]()
        for seed in range(given.places):
            values = 1e-3 * NOISES[name](np.random.default_rng(1000 + seed), 3000)
            spread = float(np.median(np.abs(values[-200:])) / 0.6745)
            spike, drift = detectors
            state = spike.init()
            for step, value in enumerate(values.tolist()):
                state = spike.learn(state, {"step": step, "loss": value})  # type: ignore[arg-type]
            for trouble, leap in TROUBLE.items():
                leapt = spike.look(state, {"step": 3000, "loss": leap * spread})  # type: ignore[arg-type]
                hits[trouble] += leapt is not None
                hits[f"{trouble} alarm"] += leapt is not None and leapt.severity == Severity.ALARM
            broken = spike.learn(state, {"step": 3000, "loss": math.nan})  # type: ignore[arg-type]
            hits["NaN"] += spike.look(broken, {"step": 3001, "loss": 20 * spread}) is not None  # type: ignore[arg-type]
            more = 1e-3 * NOISES[name](np.random.default_rng(5000 + seed), 48)
            shifted = np.concatenate((values, more * spread / np.median(np.abs(more)) * 0.6745 + SHIFT * spread))
            hits["shift"] += any(at >= 3000 for at, _ in judged(shifted, (drift,)))
        share = {key: f"{100 * hit / given.places:.0f} %" for key, hit in hits.items()}
        leaps = " | ".join(f"{share.get(one, '0 %')} ({share.get(f'{one} alarm', '0 %')})" for one in TROUBLE)
        print(f"| {name} | {leaps} | {share.get('NaN', '0 %')} | {share.get('shift', '0 %')} |", flush=True)


if __name__ == "__main__":
    main()
