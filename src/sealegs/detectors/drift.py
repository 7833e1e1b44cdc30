"""Detects one signal at a new level, or rising slowly, under noise that hides it from step to step.

This is the slow channel. Winsorised values are averaged in blocks of 16, so that no single batch counts for much. Each
block answers two questions. Is it above the blocks before it, by the streaming statistic of the difference? Have the
last 200 values been rising, by the rank test of Mann and Kendall, which holds for any noise without order?

Between blocks, the excess of values over the expected is summed up (Page's test): a rise within a few dozen values is
found before two blocks are full. In the first thousand values none of that can be answered. There a coarse rule stands
for all: a run that is well above its lowest does not learn.

From its first negative value on a signal is followed anew, on a scale of both signs (``stats/streaming.py``). Such a
signal may rise in health, so that there are notices of it and no alarms, and the coarse rule says nothing.
"""

import math
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import median
from typing import NamedTuple

from sealegs.detectors.spike import WIDENED_STEPS, is_negative, usable
from sealegs.errors import ConfigError
from sealegs.stats import streaming
from sealegs.vocabulary import Finding, Row, Severity

BLOCK = 16
"""Values per block."""
BEFORE = 8
"""Blocks whose median a block is compared with. The statistic sees the comparison, not the level: a level that follows
with 1/32 per block stays so far behind a falling loss that the lag drowns the noise."""
TREND = 13
"""Blocks in which a trend is looked for: 208 values."""
FIRST_JUDGED = 64
"""Blocks before anything is judged: 1024 values. The scale of the first 32 comparisons is a guess: p < 1e-4 came 29
times as often as it should in the eight after them, and not once in the eight after 16 more (300 runs, t5 noise)."""
YOUNG_BLOCKS = 4
"""Blocks from which the coarse rule judges, until the statistic can."""
YOUNG_LEAPS = 8
"""For the coarse rule, a block must also be above the lowest by this many times the usual difference of two
neighbours."""
ALLOWED = 1.0
"""Scales that a value may be above the expected; only the excess is summed up, until nothing is left of it."""
CORRELATED = 3.0
"""By chance a sum of healthy values gets beyond h with exp(-2 ALLOWED h / noise). Noise is how much more sums vary than
if their values were independent. It is measured by the blocks, and never below this, the value for neighbours that
correlate by a half: real losses do not, but they are not normal either."""
QUIET = TREND
"""Blocks without a surprise after which an episode is over: until then it is not reported again."""
# The mean of sixteen winsorised values is nearly normal, so the slow channel begins with the quantiles and the tail of
# the normal distribution, not with those of single values. On 16 healthy loss curves p < 0.01 then came 1.2 times as
# often as it should, with the others 0.1 times.
NORMAL_QUANTILES = (0.84, 1.28, 2.05)
NORMAL_EXCESS = (0.37, 2 * 0.37**2)


class DriftState(NamedTuple):
    """The detector's state: the past of one signal."""

    fast: streaming.StreamState = streaming.StreamState()
    """Statistic of single values, which winsorises them."""
    slow: streaming.StreamState = streaming.StreamState()
    """Statistic of blocks: how far each was above those before it."""
    making: tuple[float, ...] = ()
    """Values of the block that is not full yet."""
    total: float = 0.0
    """Their sum, winsorised."""
    blocks: tuple[float, ...] = ()
    """Means of the last blocks."""
    streak: int = 0
    """Surprising blocks in a row, up to the last."""
    silence: int = 0
    """Blocks for which nothing more is reported, unless they surprise."""
    above: float = 0.0
    """Sum of the excess of values over the expected and the allowed, in scales."""
    above_for: int = 0
    """Number of values in that sum."""

    @property
    def is_signed(self) -> bool:
        """Whether the signal has been negative."""
        return self.fast.unit != streaming.POSITIVE


class DriftChance(NamedTuple):
    """The answer to one question; value and limit are heights, logarithms for a positive signal."""

    p: float
    value: float
    limit: float
    note: str
    lasts: int
    """Rows that it covers: the second block at a new level, or the end of a rise, is reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Detects a lasting rise of one signal. A surprising block gives a notice; a second in a row is an alarm, once, and
    so is a surprising sum."""

    signal: str = "loss"
    chance: float = 1e-4
    """Chance of a false notice on a healthy block, both questions together, and of a false alarm each time that a sum
    begins."""
    gravest: Severity = Severity.ALARM
    """Severity of a second block or a sum: ``Severity.WATCH`` for a signal that may rise in health. One of both signs
    may, whatever is said here."""
    young_factor: float = 1.15
    """Until the statistic can judge, a block this many times the lowest one is a surprise. Of 16 healthy curves none
    was more than 1.034 times above it for two blocks."""

    def __post_init__(self) -> None:
        if not 0 < self.chance <= streaming.LEVELS[-1]:
            raise ConfigError(f"Drift.chance={self.chance}: a chance a block, above 0 and up to {streaming.LEVELS[-1]}")
        if not self.young_factor > 1:
            raise ConfigError(f"Drift.young_factor={self.young_factor}: above 1, or math.inf for no such rule")
        if self.gravest not in (Severity.WATCH, Severity.ALARM):
            raise ConfigError(f"Drift.gravest={self.gravest!r}: Severity.WATCH or Severity.ALARM")

    @property
    def name(self) -> str:
        """The detector's name, which includes its signal."""
        return f"drift/{self.signal}"

    def init(self) -> DriftState:
        """The state before the first value."""
        return DriftState()

    def look(self, state: DriftState, now: Row) -> Finding | None:
        """Judge the sum with this value, and the block if this value completes one."""
        state = heeding(state, now)
        value = usable(now, self.signal, is_signed=state.is_signed)
        if value is None or state.silence:
            return None
        x, gravest = streaming.height(state.fast, value), Severity.WATCH if state.is_signed else self.gravest
        found, severity = self._rise(state, *summed(state, x)), gravest
        if found is None and len(state.making) + 1 == BLOCK:
            found = self._surprise(_with(state, x))
            severity = gravest if state.streak else Severity.WATCH
        if found is None or not found.p < self.chance:
            return None
        return Finding(
            detector=self.name,
            step=int(now["step"]),
            severity=severity,
            signal=self.signal,
            value=streaming.value_at(state.fast, found.value),
            limit=streaming.value_at(state.fast, found.limit),
            p=found.p or None,
            spoils_update=False,
            lasts=found.lasts,
            note=f"{self.signal} {found.note}",
        )

    def learn(self, state: DriftState, now: Row) -> DriftState:
        """Learn the value, and the block if this value completes one."""
        state = heeding(state, now)
        if not state.is_signed and is_negative(now, self.signal):
            state = DriftState(fast=streaming.SIGNED, silence=state.silence)
        value = usable(now, self.signal, is_signed=state.is_signed)
        if value is None:
            return state
        x = streaming.height(state.fast, value)
        if state.is_signed and not state.fast.has_started:  # values without a unit make no block
            return state._replace(fast=streaming.learn(state.fast, x))
        above, above_for = summed(state, x)
        is_told = self._rise(state, above, above_for) is not None
        if not is_told and len(state.making) + 1 < BLOCK:  # most steps by far
            fast, slow, making, total, blocks, streak, silence, _, _ = state
            making, total = (*making, x), total + winsorised(fast, x)
            fast = streaming.learn(fast, x)
            return DriftState(fast, slow, making, total, blocks, streak, silence, above, above_for)
        state = _with(state, x)
        if len(state.making) == BLOCK:
            state = self._learn_block(state)._replace(making=(), total=0.0)
        if is_told:
            above, above_for, state = 0.0, 0, state._replace(silence=QUIET)
        # No value is suspicious here: a fast level that holds still in a burst would take the blocks longer to a new
        # one.
        return state._replace(fast=streaming.learn(state.fast, x), above=above, above_for=above_for)

    def _learn_block(self, state: DriftState) -> DriftState:
        block, surprised = state.total / BLOCK, self._surprise(state).p < self.chance
        reported = surprised and (state.streak or state.silence)
        slow = state.slow
        if len(state.blocks) >= BEFORE:
            rise = block - median(state.blocks[-BEFORE:])
            slow = streaming.learn(slow, rise, suspicious=streaming.look(at_rest(slow), rise).p < self.chance / 2)
            if slow.has_started and slow.age == 0:
                slow = as_normal(slow)
        return state._replace(
            slow=slow,
            blocks=(*state.blocks, block)[-2 * TREND :],
            streak=state.streak + 1 if surprised else 0,
            silence=max(state.silence - 1, QUIET if reported else 0),
        )

    def _rise(self, state: DriftState, above: float, count: int) -> DriftChance | None:
        """The answer for a surprising sum; value and limit are those of its mean."""
        if not count:  # most steps by far
            return None
        fast, slow = state.fast, state.slow
        noise = max(CORRELATED, BLOCK * (slow.scale / fast.scale) ** 2)
        p = math.exp(-2 * ALLOWED * above / noise)
        if not p < self.chance:
            return None
        enough = -math.log(self.chance) * noise / (2 * ALLOWED)
        expected = max(fast.level + fast.slope, median(state.blocks[-BEFORE:]))
        mean, limit = (expected + fast.scale * (ALLOWED + total / count) for total in (above, enough))
        note = "level shift" if count <= BLOCK else "drifting up"
        # it may have been rising for a while before it was above what is allowed
        return DriftChance(p, mean, limit, note, count + BLOCK)

    def _surprise(self, state: DriftState) -> DriftChance:
        """The answer for a full block. Two questions are asked, so the smaller p of the two counts double."""
        if not is_judged(state):
            limit = math.inf if state.is_signed else self._young_limit(state.blocks)
            middle = median(state.making)
            return DriftChance(float(middle <= limit), middle, limit, "up from its lowest", 2 * BLOCK)
        block = state.total / BLOCK
        before = median(state.blocks[-BEFORE:])
        at_most = at_rest(state.slow)
        shift = streaming.look(at_most, block - before).p
        trend, risen, was = rising((*state.blocks, block))
        if trend < shift:
            return DriftChance(min(2 * trend, 1.0), risen, was, "drifting up", (TREND + 1) * BLOCK)
        limit = before + streaming.limit(at_most, self.chance / 2)
        return DriftChance(min(2 * shift, 1.0), block, limit, "level shift", 2 * BLOCK)

    def _young_limit(self, blocks: tuple[float, ...]) -> float:
        """The coarse rule's limit. It is for the median of a block: a scale that grows with a divergence cuts off the
        winsorised mean."""
        if len(blocks) < YOUNG_BLOCKS:
            return math.inf
        leaps = median(abs(after - before) for before, after in pairwise(blocks))
        return min(blocks) + max(math.log(self.young_factor), YOUNG_LEAPS * leaps)


def heeding(state: DriftState, now: Row) -> DriftState:
    """After an announced change nothing is reported for as many steps as the spike detector does not judge."""
    return state._replace(silence=WIDENED_STEPS // BLOCK) if "announced" in now else state


def _with(state: DriftState, x: float) -> DriftState:
    """The state with one more value in the unfinished block."""
    return state._replace(making=(*state.making, x), total=state.total + winsorised(state.fast, x))


def is_judged(state: DriftState) -> bool:
    """Whether there is enough to compare with."""
    return state.slow.age >= FIRST_JUDGED - BEFORE - streaming.START


def summed(state: DriftState, x: float) -> tuple[float, int]:
    """The sum after a value, and its number of values: zero if nothing is left of it, or nothing would be reported."""
    if state.silence or not is_judged(state):
        return 0.0, 0
    fast = state.fast
    expected = fast.level + fast.slope
    if not state.above and x - expected <= ALLOWED * fast.scale:
        return 0.0, 0
    # A level that has followed a steep fall overshoots: coming back from there is no rise.
    rise = winsorised(fast, x) - max(expected, median(state.blocks[-BEFORE:]))
    above = state.above + rise / fast.scale - ALLOWED
    return (above, state.above_for + 1) if above > 0 else (0.0, 0)


def at_rest(slow: streaming.StreamState) -> streaming.StreamState:
    """The statistic of blocks, without the fall that it expects of a falling signal.

    A fall that slows brings each block nearer to those before it than the last one was. That is no new level: a block
    has to be above them by more than noise.
    """
    return slow._replace(level=max(slow.level + slow.slope, 0.0), slope=0.0)


def as_normal(slow: streaming.StreamState) -> streaming.StreamState:
    """A statistic that has just started, with a normal tail."""
    (q80, q90, q98), (excess, squared) = NORMAL_QUANTILES, NORMAL_EXCESS
    return slow._replace(q80=q80, q90=q90, q98=q98, excess=excess, excess_squared=squared)


def winsorised(fast: streaming.StreamState, x: float) -> float:
    """The value, bounded to three scales from what was expected."""
    if not fast.has_started:
        return x
    expected, reach = fast.level + fast.slope, streaming.WINSOR * fast.scale
    return min(max(x, expected - reach), expected + reach)


def rising(blocks: tuple[float, ...]) -> tuple[float, float, float]:
    """p of so many rising pairs among the last blocks, the level now, and the level before them.

    Coming back from a dip is no rise: p is 1 unless the level is above the one before the window.
    """
    window, earlier = blocks[-TREND:], blocks[-2 * TREND : -TREND]
    risen, was = median(window[-4:]), median(earlier)
    if not risen > was:
        return 1.0, risen, was
    return CHANCE_OF_PAIRS[sum(after > before for before, after in combinations(window, 2))], risen, was


def chance_of_pairs(count: int) -> tuple[float, ...]:
    """P(at least k rising pairs) among ``count`` values in random order, for every k.

    >>> [round(6 * p) for p in chance_of_pairs(3)]
    [6, 5, 3, 1]
    """
    shares = [1.0]
    for size in range(
        2, count + 1
    ):  # the newest of ``size`` values is above 0 .. size - 1 of the others, equally often
        shares = [sum(shares[max(0, k - size + 1) : k + 1]) / size for k in range(len(shares) + size - 1)]
    return tuple(sum(shares[k:]) for k in range(len(shares)))


CHANCE_OF_PAIRS = chance_of_pairs(TREND)
