"""The textbook rules as detectors, to compare with and to teach.

They are known to be wrong in known ways: a rejected value enters the window that judges the next one, three sigma are
passed every few hundred healthy steps, and noise breaks a monotonic rise. ``tests/detectors`` says so with numbers.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from sealegs.detectors.contract import Detector
from sealegs.detectors.nonfinite import NonFinite
from sealegs.detectors.overflow import Overflow
from sealegs.detectors.proportion import Proportion
from sealegs.errors import ConfigError
from sealegs.vocabulary import Finding, Row, Severity

Window: TypeAlias = tuple[float, ...]
"""The last values, rejected or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreeSigma:
    """A value above the mean of the last 100 by more than three standard deviations."""

    signal: str = "loss"
    window: int = 100
    sigmas: float = 3.0

    def __post_init__(self) -> None:
        if self.window < 2 or not self.sigmas > 0:
            raise ConfigError(
                f"ThreeSigma(window={self.window}, sigmas={self.sigmas}): at least two values, and a factor above 0"
            )

    @property
    def name(self) -> str:
        """The detector's name, which includes its signal."""
        return f"three-sigma/{self.signal}"

    def init(self) -> Window:
        """The state before the first value."""
        return ()

    def look(self, state: Window, now: Row) -> Finding | None:
        """Judge the signal of this step; a value that is not finite is left to the non-finite detector."""
        value = finite(now, self.signal)
        if value is None or len(state) < self.window:
            return None
        with np.errstate(over="ignore", invalid="ignore"):  # huge values overflow: the limit is then infinite or NaN
            limit = float(np.mean(state) + self.sigmas * np.std(state))
        if value <= limit:
            return None
        return Finding(
            detector=self.name,
            step=int(now["step"]),
            severity=Severity.ALARM,
            signal=self.signal,
            value=value,
            limit=limit,
            note=f"{self.signal} above {self.sigmas:g} sigma of the last {self.window}",
        )

    def learn(self, state: Window, now: Row) -> Window:
        """Every finite value enters the window, outliers too: that is the rule."""
        value = finite(now, self.signal)
        return state if value is None else (*state, value)[-self.window :]


class Rise(NamedTuple):
    """A rise without a break."""

    last: float = 0.0
    points: int = 0
    """Values in it so far."""
    began: int = 0
    """Step of its first value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MonotonicRise:
    """Every logged value of the last 200 steps above the one before it."""

    signal: str = "loss"
    steps: int = 200

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"MonotonicRise.steps={self.steps}: a whole number from 1")

    @property
    def name(self) -> str:
        """The detector's name, which includes its signal."""
        return f"monotonic-rise/{self.signal}"

    def init(self) -> Rise:
        """The state before the first value."""
        return Rise()

    def look(self, state: Rise, now: Row) -> Finding | None:
        """Judge the rise that this step is part of, as long as it goes on."""
        rise = self.learn(state, now)
        length = int(now["step"]) - rise.began
        if rise.points <= state.points or rise.points < 2 or length < self.steps:
            return None
        return Finding(
            detector=self.name,
            step=int(now["step"]),
            severity=Severity.ALARM,
            signal=self.signal,
            value=rise.last,
            limit=state.last,
            spoils_update=False,
            lasts=self.steps,
            note=f"{self.signal} rising for {length} steps without a break",
        )

    def learn(self, state: Rise, now: Row) -> Rise:
        """Continue the rise, or start over."""
        value = finite(now, self.signal)
        if value is None:
            return state
        if state.points and value > state.last:
            return Rise(value, state.points + 1, state.began)
        return Rise(value, 1, int(now["step"]))


def textbook() -> tuple[Detector[Any], ...]:
    """The whole rule set of the decision tree: NaN, spike, mixed precision, silent divergence."""
    weight_norm_only = Proportion(update_factor=math.inf, grad_share=math.inf, attention_logit=math.inf)
    return (
        NonFinite(),
        ThreeSigma(signal="loss"),
        Overflow(),
        MonotonicRise(signal="loss"),
        weight_norm_only,
    )


def finite(now: Row, signal: str) -> float | None:
    """The signal's value, if it is a finite number."""
    value = float(now.get(signal, math.nan))
    return value if math.isfinite(value) else None
