"""Rows in, Findings out: sudden rises of one signal against its own recent past, and which of them spoil an update.

A surprise is found by the streaming statistic, and is news: an alarm, or evidence for recovery. It is no reason to
throw a batch away. A high loss says that there is something to learn, and a surprising gradient may be that of a rare
class, of another task, of parameters that have just thawed: what is rare is taught by just these updates. An update is
spoilt only by a gradient that is beyond anything the run has had, or one that explodes from step to step.
"""

import math
import sys
from dataclasses import dataclass, replace
from typing import NamedTuple

from sealegs.errors import ConfigError
from sealegs.stats import streaming
from sealegs.stats.calibration import CalibrationAudit
from sealegs.vocabulary import Finding, Row, Severity

FIRST_JUDGED = 8
"""Values before any is said to be beyond the others."""
YOUNG = streaming.START + streaming.SETTLED
"""Values from which the statistic judges: 150."""
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
"""Steps after an announced change in which the statistic learns, and does not judge."""
CLIPPED = 10.0
"""A gross value that is clipped to one that is not, or normalised, spoils the update from so many times the limit on.
The first of something new is 10 to 20 times the largest of late in 3 of 138 healthy trainings (bench/harm.py), faults
are thousands. At a hundred times the usual an Adam of beta2 0.999 divides by three times as much as before, and forgets
it; at thousands it would stand still."""
FADING = 0.5 ** (1 / 1000)
"""The largest value of late counts half as much after a thousand more: a run's first gradients are its largest."""


class SpikeState(NamedTuple):
    """What is remembered of a signal."""

    stream: streaming.StreamState = streaming.StreamState()
    audit: CalibrationAudit = CalibrationAudit()
    """Whether the statistic keeps its promise on this stream."""
    coarse_left: int = 0
    """Steps until the statistic judges again after an announced change."""
    high: int = 0
    """Of the last 16 values, which were high: a bit each."""
    quiet: int = 0
    """Values until it is said again that many are."""
    largest: float = 0.0
    """Of late; what was beyond the limit counts as the limit ..."""
    met: float = 0.0
    """... and does not fade: what has been skipped once is known, however rare it is."""
    is_signed: bool = False
    """Whether the signal has been negative: then it has no logarithm, and is not judged."""

    @property
    def seen(self) -> int:
        """Values learned so far."""
        return self.stream.age + len(self.stream.early)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spike:
    """A sudden rise of one positive signal, judged by the streaming statistic of its logarithm."""

    signal: str = "loss"
    gate: float = 1e-4
    """Chance of a false surprise on a healthy step."""
    alarm: float = 1e-5
    """Chance of a false alarm on a healthy step. Smaller alarms less and later."""
    smallest: float = 1.05
    """A rise by less than this factor is never a spike, however quiet the signal is otherwise."""
    must_fall: bool = True
    """Whether it does not stay up in health: then many high values of a few are an alarm, too."""
    gross: float = math.inf
    """So many times the largest value of late spoils the update; infinite for a signal that spoils none ..."""
    growth: float = math.inf
    """... and so does a surprise of so many times that, right after another surprise."""

    def __post_init__(self) -> None:
        if not 0 < self.alarm <= self.gate <= streaming.LEVELS[-1]:
            raise ConfigError(
                f"Spike(alarm={self.alarm}, gate={self.gate}): chances a step, "
                f"0 < alarm <= gate <= {streaming.LEVELS[-1]}"
            )
        if not (self.smallest >= 1 and self.gross > 1 and self.growth > 1):
            raise ConfigError(
                f"Spike(smallest={self.smallest}, gross={self.gross}, growth={self.growth}): from 1, and above 1"
            )

    @property
    def name(self) -> str:
        """The signal it watches is part of its name."""
        return f"spike/{self.signal}"

    def init(self) -> SpikeState:
        """Nothing yet."""
        return SpikeState()

    def look(self, state: SpikeState, now: Row) -> Finding | None:
        """Judge the signal of this step; a value that is not finite is the non-finite detector's."""
        if not state.is_signed and is_negative(now, self.signal):
            return self._cannot_judge(now)
        state = heeding(state, now)
        value = None if state.is_signed else usable(now, self.signal)
        if value is None:
            return None
        p = self.p(state, now, value)
        is_condemned = self._condemns(state, p)
        is_gross = not value <= self.gross_limit(state)
        spoils = self.spoils_update(state, value, p, clip=clip_of(now, self.signal))
        if not is_coarse(state) and self._are_many(state, p):
            return self._stays_high(state, now, value, spoils_update=spoils)
        if self._comes_again(state, p):
            limit = _exp(streaming.limit(state.stream, AGAIN / state.audit.correction))
            found = self._finding(now, Severity.ALARM, value, limit, None, f"{self.signal} spike, the second in a row")
            return replace(found, spoils_update=spoils, lasts=2)
        if not is_condemned and not is_gross:
            return None
        if not is_condemned:
            found = self._finding(now, Severity.GATE, value, self.gross_limit(state), None)
            return replace(found, spoils_update=spoils)
        stream, correction = state.stream, state.audit.correction
        limit = streaming.limit(stream, self.gate / correction)
        limit = _exp(max(limit, stream.level + stream.slope + math.log(self.smallest)))
        severity = Severity.ALARM if p < self.alarm / correction else Severity.GATE
        is_alone = state.seen < GROWN and stream.burst == 0 and p >= self.gate / correction / STRICTER
        if is_alone and not is_gross:
            severity = Severity.WATCH  # the judge knows whether it is alone
        is_last = streaming.is_accepted_next(stream)
        note = f"{self.signal} stays high: its new level after {streaming.PATIENCE} steps" if is_last else ""
        return replace(self._finding(now, severity, value, limit, p, note), spoils_update=spoils)

    def learn(self, state: SpikeState, now: Row) -> SpikeState:
        """Take the value in, with bounded influence."""
        state = heeding(state, now)
        judged_coarsely = is_coarse(state)
        state = state._replace(coarse_left=max(state.coarse_left - 1, 0)) if state.coarse_left else state
        if is_negative(now, self.signal):
            return state._replace(is_signed=True)
        value = None if state.is_signed else usable(now, self.signal)
        if value is None:
            return state
        p = self.p(state, now, value, coarse=judged_coarsely)
        limit = self.gross_limit(state)
        taken = min(value, limit)
        state = state._replace(
            largest=max(state.largest * FADING, taken),
            met=state.met if value <= limit else max(state.met, taken),
        )
        if judged_coarsely:
            return state._replace(stream=streaming.learn(state.stream, math.log(value)))
        suspicious = streaming.is_suspicious(state.stream, p, SUSPICIOUS / state.audit.correction)
        in_burst = suspicious and state.stream.burst > 0  # counts once
        return state._replace(
            high=_high_after(state, p),
            quiet=OF if self._are_many(state, p) else max(state.quiet - 1, 0),
            stream=streaming.learn(state.stream, math.log(value), suspicious=suspicious),
            audit=state.audit if in_burst else state.audit.after(p),
        )

    def p(self, state: SpikeState, now: Row, value: float, *, coarse: bool | None = None) -> float:
        """The chance of such a value; 1 for a rise too small to matter, and where nobody can say yet.

        The device has decided already where it has a gate: what it found is in the row, and is not judged again.
        """
        if (decided := now.get(f"{self.signal}_p")) is not None:
            return float(decided)
        if is_coarse(state) if coarse is None else coarse:
            return 1.0
        x, stream = math.log(value), state.stream
        if x - (stream.level + stream.slope) <= math.log(self.smallest):
            return 1.0
        return streaming.look(stream, x).p

    def spoils_update(self, state: SpikeState, value: float, p: float, *, clip: float = math.inf) -> bool:
        """Whether an update is beyond anything the run has had, or explodes: the one before was surprising, too.

        What is clipped to a norm that the run knows, or divided by its own size as Adam does it, can do no more than
        others did, and teaches what is new: a class, a count, a stage. Only what is beyond any of these, as a flipped
        bit is, is left out all the same.
        """
        # not against the one before: what it has come to of late, and was well, is no explosion
        is_exploding = state.stream.burst > 0 and self._condemns(state, p) and value >= self.growth * state.largest
        limit = self.gross_limit(state)
        return is_exploding or not value <= (limit * CLIPPED if clip <= limit else limit)

    def gross_limit(self, state: SpikeState) -> float:
        """What no value is to be beyond, whatever its chance."""
        if state.seen < FIRST_JUDGED or self.gross == math.inf:
            return math.inf
        return self.gross * max(state.largest, state.met)

    def _condemns(self, state: SpikeState, p: float) -> bool:
        return p < self.gate and p < self.gate / state.audit.correction  # which is 1 or more

    def _are_many(self, state: SpikeState, p: float) -> bool:
        high = _high_after(state, p)
        return self.must_fall and high & 1 == 1 and state.quiet == 0 and high.bit_count() >= MANY

    def _comes_again(self, state: SpikeState, p: float) -> bool:
        """Whether a value that is no alarm by itself is one because of the value before."""
        return (
            self.must_fall
            and state.stream.burst == 1
            and state.seen >= GROWN
            and not is_coarse(state)
            and self.alarm <= p * state.audit.correction < AGAIN
        )

    def _stays_high(self, state: SpikeState, now: Row, value: float, *, spoils_update: bool) -> Finding:
        """What they say together; of how many independent ones they consist, nobody knows."""
        high = _high_after(state, 0.0)
        limit = _exp(streaming.limit(state.stream, streaming.LEVELS[-1] / state.audit.correction))
        note = f"{self.signal} stays high, {high.bit_count()} times in {high.bit_length()} steps"
        found = self._finding(now, Severity.ALARM, value, limit, None, note)
        return replace(found, spoils_update=spoils_update, lasts=high.bit_length())

    def _cannot_judge(self, now: Row) -> Finding:
        note = f"{self.signal} takes both signs, so its spikes are not judged from here on; other signals are"
        return self._finding(now, Severity.WATCH, float(now[self.signal]), math.inf, None, note)

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
            spoils_update=False,
            note=note or f"{self.signal} spike",
        )


def _exp(logarithm: float) -> float:
    """What is beyond the largest float is infinite."""
    return math.exp(logarithm) if logarithm < LARGEST else math.inf


def _high_after(state: SpikeState, p: float) -> int:
    is_high = p < streaming.LEVELS[-1] / state.audit.correction
    return (state.high << 1 | is_high) & (1 << OF) - 1


def heeding(state: SpikeState, now: Row) -> SpikeState:
    """An announced change begins the statistic anew; how large gradients have been is remembered."""
    if "announced" not in now:
        return state
    return state._replace(stream=streaming.StreamState(), coarse_left=WIDENED_STEPS)


def is_coarse(state: SpikeState) -> bool:
    """Whether the statistic does not judge: too little is known, or a change was announced."""
    return state.seen < YOUNG or state.coarse_left > 0


def is_negative(now: Row, signal: str) -> bool:
    """Whether the signal is there, and is a number below zero."""
    return -math.inf < float(now.get(signal, math.nan)) < 0


def clip_of(now: Row, signal: str) -> float:
    """What the signal is clipped to before the update, where that is known; 0 where any size makes the same update."""
    if signal != "grad_norm":
        return math.inf
    if now.get("normalised") == 1:
        return 0.0
    norm = now.get("clip_norm")
    return norm if isinstance(norm, int | float) else math.inf  # in a stranger's log it may be a word


def usable(now: Row, signal: str) -> float | None:
    """The signal's value where it has a logarithm."""
    value = float(now.get(signal, math.nan))
    return value if 0 < value < math.inf else None
