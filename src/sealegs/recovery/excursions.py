"""How far a signal rises and comes back by itself: a rise of that size is no reason for a rollback.

The loss of a reinforcement-learning policy may go up fourfold while the policy gets better. With one positive in a
thousand, the loss depends on when the last positive came. A rollback on such a rise would undo what was learned.
"""

import math
from statistics import median
from typing import NamedTuple

BLOCK = 8
"""Values per block; each block counts by its median."""
HALF_LIFE = 1000
"""Steps after which a rise counts half."""
REACH = 2
"""A rise within this many times the widest one so far, as a logarithm, is the signal's own."""
BEYOND = 1e150
"""Stands for infinity: states hold nothing that JSON cannot spell."""


class Excursions(NamedTuple):
    """The rises of one signal: a fold over its logarithms, in plain values."""

    newest: tuple[float, ...] = ()
    """Values of the block that is not full yet."""
    low: float = BEYOND
    """Lowest median since the last rise that came back."""
    peak: float = -BEYOND
    """Highest median since ``low``."""
    widest: float = 0.0
    """Largest rise that came back by at least half."""

    @property
    def reach(self) -> float:
        """How far the signal may rise next; its widest rise may be yet to come."""
        return REACH * self.widest

    def after(self, value: float) -> "Excursions":
        """The state after one more value; a value that is not finite is ignored.

        >>> wander = Excursions()
        >>> for value in [1.0] * 16 + [1.8] * 16 + [1.1] * 8:
        ...     wander = wander.after(value)
        >>> 0.79 < wander.widest <= 0.8
        True
        """
        if not math.isfinite(value):
            return self
        if len(self.newest) + 1 < BLOCK:
            return self._replace(newest=(*self.newest, value))
        middle, widest = median((*self.newest, value)), self.widest * 0.5 ** (BLOCK / HALF_LIFE)
        if middle < self.low:
            return Excursions((), middle, middle, widest)
        peak = max(middle, self.peak)
        if peak - middle < (peak - self.low) / 2 or peak == self.low:
            return Excursions((), self.low, peak, widest)
        return Excursions((), middle, middle, max(widest, peak - self.low))

    def anew(self) -> "Excursions":
        """Drop the rise under way, since its cause is known."""
        return Excursions(widest=self.widest)
