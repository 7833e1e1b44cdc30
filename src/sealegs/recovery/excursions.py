"""Values in, how far they rise and come back by themselves out: what a run has come out of alone is its nature.

The loss of a policy that learns goes up fourfold when it gets better; that of one positive in a thousand goes by when
the last one came. To go back because of such a rise would undo what was learned.
"""

import math
from statistics import median
from typing import NamedTuple

BLOCK = 8
"""Values whose median is looked at."""
HALF_LIFE = 1000
"""Steps after which a rise counts half."""
REACH = 2
"""Times the widest rise that was seen, as a logarithm, before it is another thing."""
BEYOND = 1e150
"""Beyond any value: states hold nothing that JSON cannot spell."""


class Excursions(NamedTuple):
    """A fold over the logarithms of a signal; plain values."""

    newest: tuple[float, ...] = ()
    """Of the block that is not full yet."""
    low: float = BEYOND
    """The lowest median, since the last rise that was come back from ..."""
    peak: float = -BEYOND
    """... and the highest since that."""
    widest: float = 0.0
    """The largest rise that was come back from: by half of it at least."""

    @property
    def reach(self) -> float:
        """How far it may rise next: nobody has seen its widest yet."""
        return REACH * self.widest

    def after(self, value: float) -> "Excursions":
        """With one more; one that is not finite says nothing.

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
        """What was under way has a cause that is known: it is not counted."""
        return Excursions(widest=self.widest)
