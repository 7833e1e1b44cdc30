"""Rows in, Findings out: one signal at a new level, or rising slowly, against noise that hides it from step to step.

The slow channel. Winsorised values are averaged in blocks of 16, so that no single batch counts for much, and each
block is asked two questions: is it above the blocks before it (the streaming statistic of what it is above them), and
have the last 200 values been rising (the rank test of Mann and Kendall: whatever the noise is, it has no order)?
Between blocks, what values are above the expected is summed up (Page's test): a rise within a few dozen is found before
two blocks are full. In the first thousand values, in which none of that can be answered, a coarse rule stands for all:
a run that is well above what it had come down to does not learn.
"""

import math
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import median
from typing import NamedTuple

from sealegs.detectors.spike import WIDENED_STEPS, usable
from sealegs.errors import ConfigError
from sealegs.stats import streaming
from sealegs.vocabulary import Finding, Row, Severity

BLOCK = 16
"""Values to a block."""
BEFORE = 8
"""Blocks whose median a block is compared with. The comparison, not the level, is what the statistic sees: a level that
follows with 1/32 a block stays so far behind a falling loss that the lag drowns the noise."""
TREND = 13
"""Blocks in which a trend is looked for: 208 values."""
FIRST_JUDGED = 64
"""Blocks before anything is judged: 1024 values. The scale of the first 32 comparisons is a guess: p < 1e-4 came 29
times as often as it should in the eight after them, and not once in the eight after 16 more (300 runs, t5 noise)."""
YOUNG_BLOCKS = 4
"""Blocks before the coarse rule judges, which does until the statistic can. A block must be above the lowest ..."""
YOUNG_LEAPS = 8
"""... by so many times what two blocks that follow each other differ by, too."""
ALLOWED = 1.0
"""Scales that a value may be above the expected; what it is above that is summed up, until nothing is left."""
CORRELATED = 3.0
"""By chance a sum of healthy values gets beyond h with exp(-2 ALLOWED h / noise), where noise is by how much sums vary
more than if their values knew nothing of each other. It is measured by the blocks, and never taken for less than this,
which neighbours have that correlate by a half: real losses do not, but their values are not normal either."""
QUIET = TREND
"""Blocks without a surprise after which an episode is over: until then it is not reported again."""
# The mean of sixteen winsorised values is nearly normal, so the slow channel begins with the quantiles and the tail of
# the normal distribution, not with those of single values. On 16 healthy loss curves p < 0.01 then came 1.2 times as
# often as it should, with the others 0.1 times.
NORMAL_QUANTILES = (0.84, 1.28, 2.05)
NORMAL_EXCESS = (0.37, 2 * 0.37**2)


class DriftState(NamedTuple):
    """What is remembered of a signal."""

    fast: streaming.StreamState = streaming.StreamState()
    """Of single values: what they are winsorised by."""
    slow: streaming.StreamState = streaming.StreamState()
    """Of blocks: how far each was above those before it."""
    making: tuple[float, ...] = ()
    """The block in the making ..."""
    total: float = 0.0
    """... and its sum, winsorised."""
    blocks: tuple[float, ...] = ()
    """Means of the last blocks."""
    streak: int = 0
    """Blocks in a row, up to the last, that were surprising."""
    silence: int = 0
    """Blocks for which nothing more is reported unless they surprise."""
    above: float = 0.0
    """Sum of what values were above the expected, and above what is allowed, in scales ..."""
    above_for: int = 0
    """... and of how many values."""


class DriftChance(NamedTuple):
    """The answer to a question, in logarithms."""

    p: float
    value: float
    limit: float
    note: str
    lasts: int
    """Rows that it is about: what is reported is the second block at a new level, or the end of a rise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """A lasting rise of one positive signal: a surprising block is watched, a second in a row is an alarm, once, and so
    is a surprising sum."""

    signal: str = "loss"
    chance: float = 1e-4
    """Chance of a false watch on a healthy block, both questions together, and of a false alarm each time that a sum
    begins."""
    gravest: Severity = Severity.ALARM
    """What a second block or a sum is: ``Severity.WATCH`` for a signal that may rise in health."""
    young_factor: float = 1.15
    """While the statistic has too little to go by: so many times its lowest block is a surprise. Of 16 healthy curves
    none was more than 1.034 times above it for two blocks."""

    def __post_init__(self) -> None:
        if not 0 < self.chance <= streaming.LEVELS[-1]:
            raise ConfigError(f"Drift.chance={self.chance}: a chance a block, above 0 and up to {streaming.LEVELS[-1]}")
        if not self.young_factor > 1:
            raise ConfigError(f"Drift.young_factor={self.young_factor}: above 1, or math.inf for no such rule")
        if self.gravest not in (Severity.WATCH, Severity.ALARM):
            raise ConfigError(f"Drift.gravest={self.gravest!r}: Severity.WATCH or Severity.ALARM")

    @property
    def name(self) -> str:
        """The signal it watches is part of its name."""
        return f"drift/{self.signal}"

    def init(self) -> DriftState:
        """Nothing yet."""
        return DriftState()

    def look(self, state: DriftState, now: Row) -> Finding | None:
        """Judge the sum that this value is added to, and the block that it completes, if it completes one."""
        state = heeding(state, now)
        value = usable(now, self.signal)
        if value is None or state.silence:
            return None
        x = math.log(value)
        found, severity = self._rise(state, *summed(state, x)), self.gravest
        if found is None and len(state.making) + 1 == BLOCK:
            found = self._surprise(_with(state, x))
            severity = self.gravest if state.streak else Severity.WATCH
        if found is None or not found.p < self.chance:
            return None
        return Finding(
            detector=self.name,
            step=int(now["step"]),
            severity=severity,
            signal=self.signal,
            value=math.exp(found.value),
            limit=math.exp(found.limit),
            p=found.p or None,
            spoils_update=False,
            lasts=found.lasts,
            note=f"{self.signal} {found.note}",
        )

    def learn(self, state: DriftState, now: Row) -> DriftState:
        """Take the value in, and the block that it completes."""
        state = heeding(state, now)
        value = usable(now, self.signal)
        if value is None:
            return state
        x = math.log(value)
        above, above_for = summed(state, x)
        is_told = self._rise(state, above, above_for) is not None
        state = _with(state, x)
        if len(state.making) == BLOCK:
            state = self._learn_block(state)._replace(making=(), total=0.0)
        if is_told:
            above, above_for, state = 0.0, 0, state._replace(silence=QUIET)
        # Nothing is condemned here: a fast level that holds still in a burst would take the blocks longer to a new one.
        return state._replace(fast=streaming.learn(state.fast, x), above=above, above_for=above_for)

    def _learn_block(self, state: DriftState) -> DriftState:
        block, surprised = state.total / BLOCK, self._surprise(state).p < self.chance
        reported = surprised and (state.streak or state.silence)
        slow = state.slow
        if len(state.blocks) >= BEFORE:
            rise = block - median(state.blocks[-BEFORE:])
            slow = streaming.learn(slow, rise, suspicious=streaming.look(slow, rise).p < self.chance / 2)
            if slow.has_started and slow.age == 0:
                slow = as_normal(slow)
        return state._replace(
            slow=slow,
            blocks=(*state.blocks, block)[-2 * TREND :],
            streak=state.streak + 1 if surprised else 0,
            silence=max(state.silence - 1, QUIET if reported else 0),
        )

    def _rise(self, state: DriftState, above: float, count: int) -> DriftChance | None:
        """Of a sum that is surprising: value and limit are those of its mean."""
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
        """Two questions are asked, so the smaller p of the two counts double."""
        if not is_judged(state):
            limit, middle = self._young_limit(state.blocks), median(state.making)
            return DriftChance(float(middle <= limit), middle, limit, "up from its lowest", 2 * BLOCK)
        block = state.total / BLOCK
        before = median(state.blocks[-BEFORE:])
        shift = streaming.look(state.slow, block - before).p
        trend, risen, was = rising((*state.blocks, block))
        if trend < shift:
            return DriftChance(min(2 * trend, 1.0), risen, was, "drifting up", (TREND + 1) * BLOCK)
        limit = before + streaming.limit(state.slow, self.chance / 2)
        return DriftChance(min(2 * shift, 1.0), block, limit, "level shift", 2 * BLOCK)

    def _young_limit(self, blocks: tuple[float, ...]) -> float:
        """For the middle of a block, not its winsorised mean: a scale that grows with a divergence cuts that off."""
        if len(blocks) < YOUNG_BLOCKS:
            return math.inf
        leaps = median(abs(after - before) for before, after in pairwise(blocks))
        return min(blocks) + max(math.log(self.young_factor), YOUNG_LEAPS * leaps)


def heeding(state: DriftState, now: Row) -> DriftState:
    """After an announced change a new level is no news, for as many steps as the spike detector takes it easy."""
    return state._replace(silence=WIDENED_STEPS // BLOCK) if "announced" in now else state


def _with(state: DriftState, x: float) -> DriftState:
    """With one more value in the block in the making."""
    return state._replace(making=(*state.making, x), total=state.total + winsorised(state.fast, x))


def is_judged(state: DriftState) -> bool:
    """Whether there is enough to compare with."""
    return state.slow.age >= FIRST_JUDGED - BEFORE - streaming.START


def summed(state: DriftState, x: float) -> tuple[float, int]:
    """The sum after a value, and of how many it is: none if nothing is left of it, or nothing would be reported."""
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


def as_normal(slow: streaming.StreamState) -> streaming.StreamState:
    """A statistic that has just begun, with a normal tail."""
    (q80, q90, q98), (excess, squared) = NORMAL_QUANTILES, NORMAL_EXCESS
    return slow._replace(q80=q80, q90=q90, q98=q98, excess=excess, excess_squared=squared)


def winsorised(fast: streaming.StreamState, x: float) -> float:
    """The value, no further from what was expected than three scales."""
    if not fast.has_started:
        return x
    expected, reach = fast.level + fast.slope, streaming.WINSOR * fast.scale
    return min(max(x, expected - reach), expected + reach)


def rising(blocks: tuple[float, ...]) -> tuple[float, float, float]:
    """p of so many rising pairs among the last blocks, where the level is now, and where it was before them.

    Coming back from a dip is no rise: p is 1 unless the level is above the one before the window.
    """
    window, earlier = blocks[-TREND:], blocks[-2 * TREND : -TREND]
    risen, was = median(window[-4:]), median(earlier)
    if not risen > was:
        return 1.0, risen, was
    return CHANCE_OF_PAIRS[sum(after > before for before, after in combinations(window, 2))], risen, was


def chance_of_pairs(count: int) -> tuple[float, ...]:
    """P(at least k rising pairs) of that many values in random order, for every k.

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
