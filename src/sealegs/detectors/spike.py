"""Rows in, Findings out: sudden rises of one signal against its own recent past."""

import math
import sys
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import median
from typing import NamedTuple

from sealegs.errors import ConfigError
from sealegs.stats import streaming
from sealegs.stats.audit import Audit
from sealegs.vocabulary import Finding, Row, Severity

FIRST_JUDGED = 8
"""Values before even the coarse rule of the young phase judges."""
YOUNG = streaming.START + streaming.SETTLED
"""Values from which the statistic judges: 150."""
RECENT = 32
GROWN = 1000
"""Values up to which the statistic knows its tail only roughly: until then one signal alone ..."""
SUSPICIOUS = 1e-3
"""Values of so small a p that follow each other are one event, condemned or not: they teach tail and scale once, and
count once in the audit. Else the beginning of a rise teaches a young run that such things happen."""
MANY, OF = 8, 16
"""So many high values, each among the highest 2 %, of so many are an alarm, though none of them be one."""
STRICTER = 10.0
"""... must be so many times more surprising than the gate asks for, or surprise twice in a row."""
AGAIN = 3e-4
"""So small a p right after a suspicious one is an alarm, too, in a run that is grown. Where neighbours know nothing of
each other that comes once in three million steps; where they correlate by a half, less than once in 100k (0.65, of 768k
steps of AR(0.5) noise of 4 %)."""
LARGEST = math.log(sys.float_info.max)
WIDENED_STEPS = 500
"""Steps after an announced change in which only the coarse rule of the young phase judges."""


class State(NamedTuple):
    """What is remembered of a signal."""

    stream: streaming.State = streaming.State()
    recent: tuple[float, ...] = ()
    """The last values; condemned ones cut to the coarse limit while that judges, and left out after, and before that
    where a signal that must fall stays up: else the limit follows it within 14 values."""
    audit: Audit = Audit()
    """Whether the statistic keeps its promise on this stream."""
    coarse_left: int = 0
    """Steps until the statistic judges again after an announced change."""
    high: int = 0
    """Of the last 16 values, which were high: a bit each."""
    quiet: int = 0
    """Values until it is said again that many are."""
    is_told: bool = False
    """Whether it was said that the signal is not positive."""

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
    smallest: float = 1.05
    """A rise by less than this factor is never a spike, however quiet the signal is otherwise."""
    must_fall: bool = True
    """Whether it does not stay up in health: then many high values of a few are an alarm, too."""
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
        if not (self.smallest >= 1 and self.young_factor > 1 and self.young_deviations >= 0):
            raise ConfigError(
                f"Spike(smallest={self.smallest}, young_factor={self.young_factor}, "
                f"young_deviations={self.young_deviations}): from 1, above 1, and not negative"
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
            return None if state.is_told or not has_no_logarithm(now, self.signal) else self._cannot_judge(now)
        state = heeding(state, now)
        p = self.p(state, now, value)
        is_condemned = self._condemns(state, p)
        if not is_coarse(state) and self._are_many(state, p):
            return self._stays_high(state, now, value, spoils_update=is_condemned)
        if self._comes_again(state, p):
            limit = _exp(streaming.limit(state.stream, AGAIN / state.audit.correction))
            found = self._finding(now, Severity.ALARM, value, limit, None, f"{self.signal} spike, the second in a row")
            return replace(found, spoils_update=is_condemned)
        if not is_condemned:
            return None
        if is_coarse(state):
            return self._finding(now, Severity.GATE, value, self._coarse_limit(state), None)
        stream = state.stream
        is_gross = self._is_grossly_high(state, value)
        if is_gross:
            p = streaming.look(stream, math.log(value)).p
        correction = state.audit.correction
        limit = streaming.limit(stream, self.gate / correction)
        limit = _exp(max(limit, stream.level + stream.slope + math.log(self.smallest)))
        limit = min(limit, self._coarse_limit(state)) if is_gross else limit
        severity = Severity.ALARM if p < self.alarm / correction else Severity.GATE
        if state.seen < GROWN and not is_gross and stream.burst == 0 and p >= self.gate / correction / STRICTER:
            severity = Severity.WATCH  # the judge knows whether it is alone
        is_last = streaming.is_accepted_next(stream)
        note = f"{self.signal} stays high: its new level after {streaming.PATIENCE} steps" if is_last else ""
        return self._finding(now, severity, value, limit, p, note)

    def learn(self, state: State, now: Row) -> State:
        """Take the value in, with bounded influence."""
        state = heeding(state, now)
        judged_coarsely = is_coarse(state)
        state = state._replace(coarse_left=max(state.coarse_left - 1, 0)) if state.coarse_left else state
        value = usable(now, self.signal)
        if value is None:
            return state._replace(is_told=True) if has_no_logarithm(now, self.signal) else state
        p = self.p(state, now, value, coarse=judged_coarsely)
        condemned = self._condemns(state, p)
        cut = min(value, self._coarse_limit(state)) if judged_coarsely or state.seen < GROWN else value
        recent = (*state.recent, cut)[-RECENT:]
        if judged_coarsely:
            return state._replace(stream=streaming.learn(state.stream, math.log(cut)), recent=recent)
        suspicious = streaming.is_suspicious(state.stream, p, SUSPICIOUS / state.audit.correction)
        in_burst = suspicious and state.stream.burst > 0  # counts once
        if suspicious and streaming.is_accepted_next(state.stream):
            recent = ()  # they were those of another level
        elif condemned and (state.seen >= GROWN or (in_burst and self.must_fall)):
            recent = state.recent
        quiet = OF if self._are_many(state, p) else max(state.quiet - 1, 0)
        return state._replace(
            high=_high_after(state, p),
            quiet=quiet,
            stream=streaming.learn(state.stream, math.log(value), suspicious=suspicious),
            recent=recent,
            audit=state.audit if in_burst else state.audit.after(p),
        )

    def _condemns(self, state: State, p: float) -> bool:
        return p < self.gate and p < self.gate / state.audit.correction  # which is 1 or more

    def p(self, state: State, now: Row, value: float, *, coarse: bool | None = None) -> float:
        """The chance of such a value; 1 for a rise too small to matter; 0 or 1 where the coarse rule judges.

        The device has decided already where it has a gate: what it found is in the row, and is not judged again.
        """
        if (decided := now.get(f"{self.signal}_p")) is not None:
            return float(decided)
        if is_coarse(state) if coarse is None else coarse:
            return 1.0 if value <= self._coarse_limit(state) else 0.0
        if self._is_grossly_high(state, value):
            return 0.0
        x, stream = math.log(value), state.stream
        if x - (stream.level + stream.slope) <= math.log(self.smallest):
            return 1.0
        return streaming.look(stream, x).p

    def _are_many(self, state: State, p: float) -> bool:
        high = _high_after(state, p)
        return self.must_fall and high & 1 == 1 and state.quiet == 0 and high.bit_count() >= MANY

    def _comes_again(self, state: State, p: float) -> bool:
        """Whether a value that is no alarm by itself is one because of the value before."""
        return (
            self.must_fall
            and state.stream.burst == 1
            and state.seen >= GROWN
            and not is_coarse(state)
            and self.alarm <= p * state.audit.correction < AGAIN
        )

    def _stays_high(self, state: State, now: Row, value: float, *, spoils_update: bool) -> Finding:
        """What they say together; of how many independent ones they consist, nobody knows."""
        high = _high_after(state, 0.0)
        limit = _exp(streaming.limit(state.stream, streaming.LEVELS[-1] / state.audit.correction))
        note = f"{self.signal} stays high, {high.bit_count()} times in {high.bit_length()} steps"
        found = self._finding(now, Severity.ALARM, value, limit, None, note)
        return replace(found, spoils_update=spoils_update, lasts=high.bit_length())

    def _cannot_judge(self, now: Row) -> Finding:
        note = f"{self.signal} is not positive, so its spikes are not judged; shift it, or give another signal"
        return self._finding(now, Severity.WATCH, float(now[self.signal]), math.inf, None, note)

    def _is_grossly_high(self, state: State, value: float) -> bool:
        """Until it is grown, what the coarse rule condemns is condemned whatever the statistic thinks."""
        return state.seen < GROWN and not value <= self._coarse_limit(state)

    def _coarse_limit(self, state: State) -> float:
        if len(state.recent) < FIRST_JUDGED:
            return math.inf
        middle, deviation = _middle(state.recent)
        return max(self.young_factor * middle, middle + self.young_deviations * deviation)

    def _finding(
        self, now: Row, severity: Severity, value: float, limit: float, p: float | None, note: str = ""
    ) -> Finding:
        return Finding(
            detector=self.name,
            step=int(now["step"]),
            severity=severity,
            signal=self.signal,
            value=value,
            limit=limit,
            p=p,
            spoils_update=severity > Severity.WATCH,
            note=note or f"{self.signal} spike",
        )


@lru_cache(maxsize=8)  # asked three times a step by each of the signals
def _middle(values: tuple[float, ...]) -> tuple[float, float]:
    """Their median, and the median of their deviations from it."""
    middle = median(values)
    return middle, median(abs(value - middle) for value in values)


def _exp(logarithm: float) -> float:
    """What is beyond the largest float is infinite."""
    return math.exp(logarithm) if logarithm < LARGEST else math.inf


def _high_after(state: State, p: float) -> int:
    is_high = p < streaming.LEVELS[-1] / state.audit.correction
    return (state.high << 1 | is_high) & (1 << OF) - 1


def heeding(state: State, now: Row) -> State:
    """An announced change begins the statistic anew; what the coarse rule goes by stays."""
    if "announced" not in now:
        return state
    return state._replace(stream=streaming.State(), coarse_left=WIDENED_STEPS)


def is_coarse(state: State) -> bool:
    """Whether the coarse rule judges: too little is known, or a change was announced."""
    return state.seen < YOUNG or state.coarse_left > 0


def has_no_logarithm(now: Row, signal: str) -> bool:
    """Whether the signal is there and finite, but not positive."""
    return signal in now and -math.inf < float(now[signal]) <= 0


def usable(now: Row, signal: str) -> float | None:
    """The signal's value where it has a logarithm."""
    value = float(now.get(signal, math.nan))
    return value if 0 < value < math.inf else None
