"""Detects sudden rises of one signal against its own recent past, and tells which of them spoil an update.

The streaming statistic finds a surprise. A surprise is an alarm, or evidence for recovery; it is no reason to throw a
batch away. A high loss says that there is something to learn, and a surprising gradient may be that of a rare class, of
another task, of parameters that have just been unfrozen: such updates teach what is rare. Only two gradients spoil an
update: one beyond anything the run has had, and one that explodes from step to step.

This is the statistic of ``stats/streaming.py`` on the host. ``diagnosis/curve/live_statistic.py`` computes it over
whole curves, ``step/gate.py`` in torch, and ``step/gate_triton.py`` in a Triton kernel. These tests hold them equal:
``tests/stats/test_streaming.py``, ``tests/step/test_gate.py`` and ``tests/gpu/test_gate_on_cuda.py``.
"""

import math
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

from sealegs.errors import ConfigError
from sealegs.stats import streaming
from sealegs.stats.calibration import CalibrationAudit
from sealegs.vocabulary import Finding, Row, Severity

FIRST_JUDGED = 8
"""Values before any can be gross."""
YOUNG = streaming.START + streaming.SETTLED
"""Values from which the statistic judges: 150."""
GROWN = 1000
"""Values from which the statistic is calibrated; until then it knows its tail only roughly, and ``STRICTER``
applies."""
SUSPICIOUS = 1e-3
"""Values in a row with a p below this are one event, surprising or not: they teach tail and scale once, and count once
in the audit. Otherwise the beginning of a rise teaches an uncalibrated statistic that such things happen."""
MANY, OF = 8, 16
"""Eight high values of sixteen, each among the highest 2 % and their median above what was usual before, are an alarm,
even if none is one alone."""
HIGH = math.log(MANY / OF / streaming.LEVELS[-1])
LOW = math.log((1 - MANY / OF) / (1 - streaming.LEVELS[-1]))
"""How much likelier a high value, and one that is not, is in such a stretch than by chance, as logarithms."""
STRICTER = 10.0
"""An uncalibrated statistic needs a p this many times smaller for one signal alone, or two surprises in a row; so does
an alarm of a signal of both signs, whose tails are heavier: 2.5 values of t3 noise in 100k are then one, not 6.5."""
AGAIN = 3e-4
"""A p below this right after a suspicious value is an alarm, too, once calibrated. Where neighbours are independent
that comes once in three million steps; where they correlate by a half, less than once in 100k (0.65, of 768k steps of
AR(0.5) noise of 4 %)."""
WIDENED_STEPS = 500
"""Steps after an announced change in which the statistic learns and does not judge."""
CLIPPED = 10.0
"""A gross value that is clipped to a known size, or normalised, spoils the update only from this many times the limit
on. In 3 of 138 healthy trainings the first of something new is 10 to 20 times the recent largest (bench/harm.py);
faults are thousands. At a hundred times the usual, an Adam of beta2 0.999 divides by three times as much as before, and
forgets it; at thousands it would stand still."""
FADING = 0.5 ** (1 / 1000)
"""Decay of the recent largest value, a half per thousand values: a run's first gradients are its largest."""


class SpikeState(NamedTuple):
    """The detector's state: the past of one signal."""

    stream: streaming.StreamState = streaming.StreamState()
    audit: CalibrationAudit = CalibrationAudit()
    """Whether small p come as often as they should on this stream."""
    coarse_left: int = 0
    """Steps until the statistic judges again after an announced change."""
    high: int = 0
    """Which of the last 16 values were high, a bit each."""
    quiet: int = 0
    """Values until "stays high" may be reported again."""
    largest: float = 0.0
    """Largest recent value, fading; a value beyond the limit counts as the limit."""
    met: float = 0.0
    """Largest gross value, as ``largest`` counts it, without fading: after one skip its size is known, however rare it
    is."""
    is_signed: bool = False
    """Whether the signal has been negative: then it is judged on a scale of both signs, and need not fall."""
    calm: tuple[float, ...] = ()
    """Logarithms of the last values that were not high, of a signal that must fall. A level that has followed a steep
    fall overshoots: values that are as they were before are then above it, and no rise."""
    recent: tuple[float, ...] = ()
    """Logarithms of the last 16 values, high or not."""

    @property
    def seen(self) -> int:
        """Values learned so far."""
        return self.stream.age + len(self.stream.early)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spike:
    """Detects a sudden rise of one signal, by the streaming statistic of its logarithm; from its first negative value
    on, of a scale for both signs.

    What the statistic does depends on the values that it has seen since the start or the last announced change:

        learning ---150 values---> uncalibrated ---1000 values---> calibrated
            |                         ^    |                           |
            |           500 steps and |    | announced                 |
            |              150 values |    v                           |
            +-------announced-----> widened <--------announced---------+

        learning, widened   learns and judges nothing
        uncalibrated        judges; one signal alone needs a p ten times smaller, or two surprises in a row
        calibrated          judges; right after a suspicious value, p < 3e-4 is an alarm too

    A judged value with p < 1e-3 is suspicious and begins a burst. The burst ends at the first p from 0.02 on, or with
    its 100th value, which is taken as the new level. A gross limit, where a signal has one, holds in every state from
    the ninth value on.

    The first negative value begins the statistic anew, once and for good, on a scale that takes both signs. Such a
    signal need not stay down to be healthy, and has no size that others could be measured by: of what is said above
    about p < 3e-4 and gross values nothing holds, and an alarm needs a p ten times smaller. A value of exactly 0 is
    left out, as ever: it is that of a step without anything to learn from.
    """

    signal: str = "loss"
    gate: float = 1e-4
    """Chance of a false surprise on a healthy step."""
    alarm: float = 1e-5
    """Chance of a false alarm on a healthy step. Smaller alarms less and later."""
    smallest: float = 1.05
    """A rise by less than this factor is never a spike, however quiet the signal is otherwise."""
    must_fall: bool = True
    """Whether a healthy signal does not stay up: then many high values among a few are an alarm, too."""
    gross: float = math.inf
    """A value this many times the recent largest spoils the update; infinite for a signal that spoils none."""
    growth: float = math.inf
    """A second surprise in a row spoils the update from this many times the recent largest on."""

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
        """The detector's name, which includes its signal."""
        return f"spike/{self.signal}"

    def init(self) -> SpikeState:
        """The state before the first value."""
        return SpikeState()

    def look(self, state: SpikeState, now: Row) -> Finding | None:
        """Judge the signal of this step; a value that is not finite is left to the non-finite detector."""
        if not state.is_signed and is_negative(now, self.signal):
            return self._changes_scale(now)
        state = heeding(state, now)
        value = usable(now, self.signal, is_signed=state.is_signed)
        if value is None:
            return None
        p = self.p(state, now, value)
        is_gross = not value <= self.gross_limit(state)
        if p >= streaming.LEVELS[-1] and not is_gross:  # most steps by far
            return None
        is_surprising = self._rejects(state, p)
        spoils = self.spoils_update(state, value, p, clip=clip_of(now, self.signal))
        after = self._with(state, p, streaming.height(state.stream, value))
        if self._is_high(state, p) and not is_coarse(state) and self._are_many(after):
            return replace(self._stays_high(after, now, value), spoils_update=spoils)
        if self._comes_again(state, p):
            limit = streaming.value_at(state.stream, streaming.limit(state.stream, AGAIN / state.audit.correction))
            found = self._finding(now, Severity.ALARM, value, limit, None, f"{self.signal} spike, the second in a row")
            return replace(found, spoils_update=spoils, lasts=2)
        if not is_surprising and not is_gross:
            return None
        if not is_surprising:
            found = self._finding(now, Severity.GATE, value, self.gross_limit(state), None)
            return replace(found, spoils_update=spoils)
        stream, correction = state.stream, state.audit.correction
        limit = streaming.limit(stream, self.gate / correction)
        limit = streaming.value_at(stream, max(limit, stream.level + stream.slope + math.log(self.smallest)))
        alarm = self.alarm / (STRICTER if state.is_signed else 1.0)
        severity = Severity.ALARM if p < alarm / correction else Severity.GATE
        is_alone = state.seen < GROWN and stream.burst == 0 and p >= self.gate / correction / STRICTER
        if is_alone and not is_gross:
            severity = Severity.WATCH  # the judge knows whether it is alone
        is_last = streaming.is_accepted_next(stream)
        note = f"{self.signal} stays high: its new level after {streaming.PATIENCE} steps" if is_last else ""
        return replace(self._finding(now, severity, value, limit, p, note), spoils_update=spoils)

    def learn(self, state: SpikeState, now: Row) -> SpikeState:
        """Learn from the value, with bounded influence."""
        state = heeding(state, now)
        if not state.is_signed and is_negative(now, self.signal):
            state = SpikeState(streaming.SIGNED, coarse_left=state.coarse_left, is_signed=True)
        judged_coarsely = is_coarse(state)
        state = state._replace(coarse_left=max(state.coarse_left - 1, 0)) if state.coarse_left else state
        value = usable(now, self.signal, is_signed=state.is_signed)
        if value is None:
            return state
        p = self.p(state, now, value, coarse=judged_coarsely)
        x, limit = streaming.height(state.stream, value), self.gross_limit(state)
        stream, audit, coarse_left, high, quiet, largest, met, is_signed, calm, recent = state
        largest = max(largest * FADING, min(value, limit))
        if not value <= limit:
            met = max(met, limit)
        if judged_coarsely:
            stream, calm = streaming.learn(stream, x), self._calm_with(calm, x) if self._must_fall(state) else ()
            return SpikeState(stream, audit, coarse_left, high, quiet, largest, met, is_signed, calm, recent)
        after = self._with(state, p, x)
        suspicious = p < streaming.LEVELS[-1] and streaming.is_suspicious(stream, p, SUSPICIOUS / audit.correction)
        in_burst = suspicious and stream.burst > 0  # counts once
        return SpikeState(
            streaming.learn(stream, x, suspicious=suspicious),
            audit if in_burst else audit.after(p),
            coarse_left,
            after.high,
            OF if self._are_many(after) else max(quiet - 1, 0),
            largest,
            met,
            is_signed,
            after.calm,
            after.recent,
        )

    def p(self, state: SpikeState, now: Row, value: float, *, coarse: bool | None = None) -> float:
        """The chance of such a value; 1 for a rise too small to matter, and while the statistic does not judge.

        Where the device has a gate, the row holds its p, which is not computed again.
        """
        if (decided := now.get(f"{self.signal}_p")) is not None:
            return float(decided)
        if is_coarse(state) if coarse is None else coarse:
            return 1.0
        x, stream = streaming.height(state.stream, value), state.stream
        if x - (stream.level + stream.slope) <= math.log(self.smallest):
            return 1.0
        return streaming.look(stream, x).p

    def spoils_update(self, state: SpikeState, value: float, p: float, *, clip: float = math.inf) -> bool:
        """Whether a value is beyond anything the run has had, or explodes: the one before was surprising, too.

        A gradient that is clipped to a known norm, or divided by its own size as Adam does, can do no more than others
        did, and teaches what is new: a class, a count, a stage. Only one beyond any of these, as from a flipped bit, is
        rejected all the same.
        """
        if state.is_signed:
            return False
        # compared with the recent largest, not the value before: a size that was well before is no explosion
        is_exploding = state.stream.burst > 0 and self._rejects(state, p) and value >= self.growth * state.largest
        limit = self.gross_limit(state)
        return is_exploding or not value <= (limit * CLIPPED if clip <= limit else limit)

    def gross_limit(self, state: SpikeState) -> float:
        """The limit beyond which a value is gross, whatever its p."""
        if state.seen < FIRST_JUDGED or self.gross == math.inf or state.is_signed:
            return math.inf
        return self.gross * max(state.largest, state.met)

    def _rejects(self, state: SpikeState, p: float) -> bool:
        return p < self.gate and p < self.gate / state.audit.correction  # which is 1 or more

    def _are_many(self, state: SpikeState) -> bool:
        """Whether many of the last values are high, the newest of them too, and above what was usual before."""
        if not self._must_fall(state) or state.quiet or not state.high & 1 or state.high.bit_count() < MANY:
            return False
        highs = [x for back, x in enumerate(reversed(state.recent)) if state.high >> back & 1]
        return not (state.calm and highs) or median(highs) > median(state.calm) + math.log(self.smallest)

    def _is_high(self, state: SpikeState, p: float) -> bool:
        return p < streaming.LEVELS[-1] and p < streaming.LEVELS[-1] / state.audit.correction  # which is 1 or more

    def _with(self, state: SpikeState, p: float, x: float) -> SpikeState:
        """The state that knows whether the value at height ``x`` is high."""
        stream, audit, coarse_left, high, quiet, largest, met, is_signed, calm, recent = state
        is_high = self._is_high(state, p)
        high = (high << 1 | is_high) & (1 << OF) - 1
        if self._must_fall(state):
            calm = calm if is_high else self._calm_with(calm, x)
            recent = (*recent, x)[-OF:]
        return SpikeState(stream, audit, coarse_left, high, quiet, largest, met, is_signed, calm, recent)

    def _calm_with(self, calm: tuple[float, ...], x: float) -> tuple[float, ...]:
        return (*calm, x)[-streaming.START :]

    def _must_fall(self, state: SpikeState) -> bool:
        """Whether the signal does not stay up in health. One of both signs may: a policy changes, a critic is fooled
        less and less."""
        return self.must_fall and not state.is_signed

    def _comes_again(self, state: SpikeState, p: float) -> bool:
        """Whether a value that is no alarm alone is one because the value before was suspicious."""
        return (
            self._must_fall(state)
            and state.stream.burst == 1
            and state.seen >= GROWN
            and not is_coarse(state)
            and self.alarm <= p * state.audit.correction < AGAIN
        )

    def _stays_high(self, state: SpikeState, now: Row, value: float) -> Finding:
        """The finding that many values are high; it has no p, since nobody knows how many of them are independent."""
        stream = state.stream
        limit = streaming.value_at(stream, streaming.limit(stream, streaming.LEVELS[-1] / state.audit.correction))
        count, steps = state.high.bit_count(), state.high.bit_length()
        found = self._finding(
            now, Severity.ALARM, value, limit, None, f"{self.signal} stays high, {count} times in {steps} steps"
        )
        return replace(found, lasts=begun(state.high))

    def _changes_scale(self, now: Row) -> Finding:
        note = f"{self.signal} takes both signs: it is judged on a scale for both, after {YOUNG} steps to learn"
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


def begun(high: int) -> int:
    """How many of the last values belong to a stretch of high ones, by likelihood: a high value some way before it is
    one of those that come by chance.

    >>> begun(0b1111_1111), begun(0b10_0000_0111_1111), begun(0b1101_1011_0111)
    (8, 7, 12)
    """
    rows, best, likely = 0, 0.0, 0.0
    for back in range(high.bit_length()):
        likely += HIGH if high >> back & 1 else LOW
        if likely > best:
            rows, best = back + 1, likely
    return rows


def heeding(state: SpikeState, now: Row) -> SpikeState:
    """Start the statistic over at an announced change; how large gradients have been is remembered."""
    if state.is_signed and state.stream.unit == streaming.POSITIVE:  # saved when a negative value ended all judging
        state = SpikeState(streaming.SIGNED, coarse_left=state.coarse_left, is_signed=True)
    if "announced" not in now:
        return state
    stream = streaming.SIGNED if state.is_signed else streaming.StreamState()
    return state._replace(stream=stream, calm=(), recent=(), coarse_left=WIDENED_STEPS)


def is_coarse(state: SpikeState) -> bool:
    """Whether the statistic does not judge: it has seen too little, or a change was announced."""
    return state.seen < YOUNG or state.coarse_left > 0


def is_negative(now: Row, signal: str) -> bool:
    """Whether the signal is a number below zero."""
    return -math.inf < float(now.get(signal, math.nan)) < 0


def clip_of(now: Row, signal: str) -> float:
    """What the signal is clipped to before the update, where it is known; 0 where any size makes the same update."""
    if signal != "grad_norm":
        return math.inf
    if now.get("normalised") == 1:
        return 0.0
    norm = now.get("clip_norm")
    return norm if isinstance(norm, int | float) else math.inf  # in a stranger's log it may be a word


def usable(now: Row, signal: str, *, is_signed: bool = False) -> float | None:
    """The signal's value, if it has a logarithm; of one of both signs, if it is finite and not exactly 0."""
    value = float(now.get(signal, math.nan))
    return value if 0 < value < math.inf or (is_signed and -math.inf < value < 0) else None
