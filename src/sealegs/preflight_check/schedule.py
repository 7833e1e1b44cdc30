"""Simulates a schedule: the learning rate of every step of a run, before it begins."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

NOMINAL_STEPS = 10_000
"""Steps to simulate if the length of the run is not known."""
MOST_POINTS = 20_000
"""The most steps that are simulated; longer runs are sampled, but every step around a corner is included."""


@dataclass(frozen=True)
class RateCurve:
    """The learning rate over a run. Between two points that are not neighbours it is smooth."""

    steps: list[int]
    rates: list[float]

    @cached_property
    def peak(self) -> float:
        """The largest rate."""
        return max(self.rates)

    @cached_property
    def top(self) -> int:
        """Where the peak is first reached, as an index into the lists."""
        return next(place for place, rate in enumerate(self.rates) if rate >= 0.99 * self.peak)


def curve_of(known: Mapping[str, Any]) -> RateCurve | None:
    """The curve of a plan, from its known fields."""
    if rates := known.get("rates"):
        return RateCurve(list(range(len(rates))), list(rates)) if max(rates) > 0 else None
    kind, lr, warmup = known.get("schedule"), known.get("lr"), known.get("warmup_steps")
    if kind is None or warmup is None or not lr or lr <= 0:
        return None
    total = known.get("steps") or max(NOMINAL_STEPS, 10 * warmup)
    end = known.get("decay_steps") or total
    floor = known.get("final_lr_share", 1.0 if kind == "constant" else 0.0)
    cycles = known.get("cycles", 1.0)
    stable = known.get("stable_share", 0.8)
    points = _points(total, [0, warmup, end, total, *_restarts(warmup, end, cycles), int(stable * end)])

    def rate(step: int) -> float:
        if step < warmup:
            return float(lr * (step + 1) / warmup)
        done = min(1.0, (step - warmup) / max(1, end - 1 - warmup))
        return float(lr * (floor + (1 - floor) * _shape(kind, done, step, warmup, cycles, stable)))

    return RateCurve(points, [rate(step) for step in points])


def _shape(kind: str, done: float, step: int, warmup: int, cycles: float, stable: float) -> float:
    """The remaining share of the way down to the floor, from 1 to 0."""
    if kind == "cosine":
        return (1 + math.cos(math.pi * done)) / 2
    if kind == "linear":
        return 1 - done
    if kind == "cosine-restarts":
        return 0.0 if done >= 1 and cycles % 1 == 0 else (1 + math.cos(math.pi * (done * cycles % 1))) / 2
    if kind == "inverse-sqrt":
        return math.sqrt(max(warmup, 1) / max(step, warmup, 1))
    if kind == "stable-decay":
        return 1.0 if done < stable else (1 - done) / max(1 - stable, 1e-9)
    return 1.0


def _restarts(warmup: int, end: int, cycles: float) -> list[int]:
    return [warmup + int((end - warmup) * number / cycles) for number in range(1, math.ceil(cycles))]


def _points(total: int, corners: list[int]) -> list[int]:
    if total <= MOST_POINTS:
        return list(range(total))
    near = {corner + away for corner in corners for away in range(-2, 3)}
    return sorted({step for step in near if 0 <= step < total} | set(range(0, total, total // MOST_POINTS)))
