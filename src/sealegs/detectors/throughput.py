"""Detects steps that take longer than before, for a while and not just once."""

from dataclasses import dataclass
from statistics import median_low as median
from typing import NamedTuple

from sealegs.detectors.spike import usable
from sealegs.errors import ConfigError
from sealegs.vocabulary import Finding, Row, Severity

WINDOW = 20
"""Steps whose median is judged: ten slow ones do not move it, so no evaluation or compilation does."""
HISTORY = 25
"""Windows whose median is the running speed: 500 steps. A slower speed that lasts is the running one after 260."""
FIRST_JUDGED = 5
"""Windows from which there is a running speed: 100 steps."""


class ThroughputState(NamedTuple):
    """The detector's state: the past of the pace."""

    recent: tuple[float, ...] = ()
    """Seconds of the last steps."""
    medians: tuple[float, ...] = ()
    """Medians of the last windows, which do not overlap."""
    filled: int = 0
    """Steps in the unfinished window."""
    is_told: bool = False
    """Whether a slow episode is going on and was reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """A loader that stalls, a link or a processor that throttles: the last 20 steps slower than the last 500."""

    share: float = 0.7
    """Share of the running speed below which a notice is given."""
    name: str = "throughput"

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ConfigError(f"Throughput.share={self.share}: a share of the running speed, between 0 and 1")

    def init(self) -> ThroughputState:
        """The state before the first step."""
        return ThroughputState()

    def look(self, state: ThroughputState, now: Row) -> Finding | None:
        """Judge the pace of the last steps, this one included; an episode is reported once."""
        seconds = pace_in(now)
        if seconds is None or state.is_told or not self._is_slow(state, seconds):
            return None
        pace, running = median((*state.recent, seconds)[-WINDOW:]), median(state.medians)
        return Finding(
            detector=self.name,
            step=int(now["step"]),
            severity=Severity.WATCH,
            signal="step_s",
            value=pace,
            limit=running / self.share,
            spoils_update=False,
            note=f"throughput at {running / pace:.0%} of its running level, in seconds a step",
        )

    def learn(self, state: ThroughputState, now: Row) -> ThroughputState:
        """Learn the step's duration."""
        seconds = pace_in(now)
        if seconds is None:
            return state
        recent = (*state.recent, seconds)[-WINDOW:]
        is_full = state.filled + 1 == WINDOW
        return ThroughputState(
            recent=recent,
            medians=(*state.medians, median(recent))[-HISTORY:] if is_full else state.medians,
            filled=0 if is_full else state.filled + 1,
            is_told=self._is_slow(state, seconds),
        )

    def _is_slow(self, state: ThroughputState, seconds: float) -> bool:
        if len(state.medians) < FIRST_JUDGED:
            return False
        # An episode ends halfway back, so that a pace right at the limit is not reported again and again.
        share = (1 + self.share) / 2 if state.is_told else self.share
        return median((*state.recent, seconds)[-WINDOW:]) > median(state.medians) / share


def pace_in(now: Row) -> float | None:
    """Seconds of a step; None while a checkpoint is being written, which slows the step.

    A thread that writes for more than ten steps would move the median of twenty at every checkpoint.
    """
    return None if now.get("saving") else usable(now, "step_s")
