"""Detects a learning rate far above any that the run has used, before the update that it scales."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from sealegs.errors import ConfigError
from sealegs.vocabulary import Finding, Row, Severity

NAME = "rate/lr"
FIRST_JUDGED = 5
"""Rates above 0 that must have been seen: a warm-up doubles at its second step, or begins with one tiny value."""
TINY = 1e-6
"""A run with one constant rate, no larger than this, has not begun: warm-ups that go by epochs start so."""


class RateState(NamedTuple):
    """The detector's state: the past of the rate. Only finite rates enter it."""

    seen: int = 0
    """Rates above 0 so far, counted up to ``FIRST_JUDGED``."""
    last: float = 0.0
    largest: float = 0.0
    is_constant: bool = True
    """Whether all rates above 0 were the same."""
    before: float = 0.0
    """The rate before the newest leap."""
    after: float = 0.0
    """The rate after the newest leap; 0 where there was none."""
    above: float = 0.0
    """The largest rate before that leap."""
    at: int = 0
    """The step of that leap."""
    rows: int = 0
    """Rows since that leap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A learning rate that leaps. It may be on purpose, so no batch is thrown away for it.

    For a while after it, the judge names it beside every graver finding. A fall, and a return to a rate that was used
    before, are no news.
    """

    factor: float = 5.0
    """A rate this many times the largest before it, within one step, is a leap."""
    remembered: int = 300
    """Rows for which a leap is named beside other findings."""
    name: str = NAME

    def __post_init__(self) -> None:
        if not (self.factor > 1 and self.remembered >= 0):
            raise ConfigError(
                f"Rate(factor={self.factor}, remembered={self.remembered}): a factor above 1, and rows from 0"
            )

    def init(self) -> RateState:
        """The state before the first row."""
        return RateState()

    def look(self, state: RateState, now: Row) -> Finding | None:
        """A leap at this step; else a recent one, with ``lasts`` above 1; or a rate that is no valid number."""
        rate = rate_in(now)
        if rate is not None and not 0 <= rate < math.inf:  # NaN too
            note = "the learning rate is negative" if rate < 0 else "the learning rate is not finite"
            return self._finding(now, rate, math.inf, note)
        after = self.learn(state, now)
        if not after.after:
            return None
        step = int(now["step"])
        note = f"the learning rate leapt from {spelt(after.before)} to {spelt(after.after)}"
        if after.rows:
            steps = step - after.at
            note += f" at step {after.at}, {steps} step{'s' * (steps != 1)} before"
        return self._finding(now, after.after, self.factor * after.above, note, lasts=after.rows + 1)

    def learn(self, state: RateState, now: Row) -> RateState:
        """Keep the largest rate. A leap happens once: from then on its rate is known."""
        step, rate = int(now["step"]), rate_in(now)
        if state.after and (step <= state.at or state.rows >= self.remembered):  # the run went back, or it is long ago
            state = state._replace(before=0.0, after=0.0, above=0.0, at=0, rows=0)
        if rate is None or not 0 <= rate < math.inf:
            return state._replace(rows=state.rows + 1) if state.after else state
        if self._is_leap(state, rate):
            return RateState(state.seen, rate, rate, False, state.last, rate, state.largest, step)
        seen, _, largest, is_constant, before, after, above, at, rows = state
        return RateState(
            min(seen + (rate > 0), FIRST_JUDGED),
            rate,
            max(largest, rate),
            is_constant and rate in (0.0, largest or rate),
            before,
            after,
            above,
            at,
            rows + 1 if after else 0,
        )

    def _is_leap(self, state: RateState, rate: float) -> bool:
        is_begun = state.seen >= FIRST_JUDGED and not (state.is_constant and state.largest <= TINY)
        # the division, for the product may be infinite
        return is_begun and rate > state.largest and rate / self.factor >= state.largest

    def _finding(self, now: Row, value: float, limit: float, note: str, *, lasts: int = 1) -> Finding:
        return Finding(
            detector=self.name,
            step=int(now["step"]),
            severity=Severity.WATCH,
            signal="lr",
            value=value,
            limit=limit,
            spoils_update=False,
            lasts=lasts,
            note=note,
        )


def rate_in(now: Row) -> float | None:
    """The learning rate of a row, if it has one; optimizers that choose it themselves have none."""
    rate = now.get("lr")
    return float(rate) if isinstance(rate, int | float) else None


def spelt(rate: float) -> str:
    """A learning rate as people write it.

    >>> spelt(3e-4), spelt(0.015), spelt(0.5), spelt(0.0)
    ('3e-4', '1.5e-2', '0.5', '0')
    """
    if rate == 0 or rate >= 0.1:
        return f"{rate:.4g}"
    mantissa, _, exponent = f"{rate:.2e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}"
