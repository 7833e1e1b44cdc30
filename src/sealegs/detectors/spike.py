"""Rows in, Findings out: sudden rises of one signal against its own recent past."""

import math
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from sealegs.errors import ConfigError
from sealegs.stats import streaming
from sealegs.vocabulary import Finding, Row, Severity

FIRST_JUDGED = 8
"""Values before even the coarse rule of the young phase judges."""
YOUNG = streaming.START + streaming.SETTLED
"""Values from which the statistic judges: 150."""
RECENT = 32


class State(NamedTuple):
    """What is remembered of a signal."""

    stream: streaming.State = streaming.State()
    recent: tuple[float, ...] = ()
    """The last values of the young phase, none of them above the limit that it was judged by."""

    @property
    def seen(self) -> int:
        """Values learned so far."""
        return self.stream.age + len(self.stream.early)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spike:
    """A sudden rise of one positive signal, judged by the streaming statistic of its logarithm."""

    signal: str = "loss"
    gate: float = 1e-4
    """Chance of a false skip on a healthy step."""
    alarm: float = 1e-5
    """Chance of a false alarm on a healthy step. Smaller alarms less and later."""
    young_factor: float = 2.0
    """While the statistic has too little to go by: so many times the recent median is a gate ..."""
    young_deviations: float = 8.0
    """... if it is also so many median absolute deviations above it."""

    def __post_init__(self) -> None:
        if not 0 < self.alarm <= self.gate <= streaming.LEVELS[-1]:
            raise ConfigError(
                f"Spike(alarm={self.alarm}, gate={self.gate}): chances a step, "
                f"0 < alarm <= gate <= {streaming.LEVELS[-1]}"
            )
        if not (self.young_factor > 1 and self.young_deviations >= 0):
            raise ConfigError(
                f"Spike(young_factor={self.young_factor}, young_deviations={self.young_deviations}): "
                "above 1, and not negative"
            )

    @property
    def name(self) -> str:
        """The signal it watches is part of its name."""
        return f"spike/{self.signal}"

    def init(self) -> State:
        """Nothing yet."""
        return State()

    def look(self, state: State, now: Row) -> Finding | None:
        """Judge the signal of this step; a value that is not finite is the non-finite detector's."""
        value = usable(now, self.signal)
        if value is None:
            return None
        if state.seen < YOUNG:
            limit = self._young_limit(state)
            return None if value <= limit else self._finding(now, Severity.GATE, value, limit, None)
        p = streaming.look(state.stream, math.log(value)).p
        if p >= self.gate:
            return None
        limit = math.exp(streaming.limit(state.stream, self.gate))
        return self._finding(now, Severity.ALARM if p < self.alarm else Severity.GATE, value, limit, p)

    def learn(self, state: State, now: Row) -> State:
        """Take the value in, with bounded influence."""
        value = usable(now, self.signal)
        if value is None:
            return state
        if state.seen < YOUNG:
            limit = self._young_limit(state)
            bounded = min(value, limit)
            return State(streaming.learn(state.stream, math.log(bounded)), (*state.recent, bounded)[-RECENT:])
        x = math.log(value)
        condemned = streaming.look(state.stream, x).p < self.gate
        return State(streaming.learn(state.stream, x, condemned=condemned))

    def _young_limit(self, state: State) -> float:
        if len(state.recent) < FIRST_JUDGED:
            return math.inf
        middle = median(state.recent)
        deviation = median(abs(value - middle) for value in state.recent)
        return max(self.young_factor * middle, middle + self.young_deviations * deviation)

    def _finding(self, now: Row, severity: Severity, value: float, limit: float, p: float | None) -> Finding:
        return Finding(
            detector=self.name,
            step=int(now["step"]),
            severity=severity,
            signal=self.signal,
            value=value,
            limit=limit,
            p=p,
            note=f"{self.signal} spike",
        )


def usable(now: Row, signal: str) -> float | None:
    """The signal's value where it has a logarithm."""
    value = float(now.get(signal, math.nan))
    return value if 0 < value < math.inf else None
