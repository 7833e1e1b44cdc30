"""Chances in, a correction out: whether p comes out small as often as it says.

A statistic that claims one value in a hundred under p = 0.01 can be held to it while it runs. Where small p come more
often than they should, on the evidence of a Poisson bound, thresholds are divided by how much more often: the stream
has tails that the statistic does not know.
"""

import math
from typing import NamedTuple

CHECKED = (0.01, 0.001)
"""Probabilities whose frequency is counted."""
MEMORY = 1 - 1 / 20_000
"""Counts fade over about so many values: a run changes."""
TOLERANCE = 2.0
"""Times the nominal frequency that are taken as they are."""
LARGEST_CORRECTION = 100.0


class CalibrationAudit(NamedTuple):
    """How often p was small, among how many; all fading."""

    values: float = 0.0
    hundredths: float = 0.0
    thousandths: float = 0.0

    def after(self, p: float) -> "CalibrationAudit":
        """After one more value that was judged."""
        low, lower = CHECKED
        return CalibrationAudit(
            self.values * MEMORY + 1.0,
            self.hundredths * MEMORY + (p < low),
            self.thousandths * MEMORY + (p < lower),
        )

    @property
    def correction(self) -> float:
        """What thresholds are to be divided by: 1 where p is honest.

        >>> CalibrationAudit(1000.0, 12.0, 2.0).correction
        1.0
        >>> round(CalibrationAudit(1000.0, 60.0, 2.0).correction, 2)
        4.55
        """
        low, lower = CHECKED
        largest = max(
            _excess(self.hundredths, low * self.values),
            _excess(self.thousandths, lower * self.values),
        )
        return min(largest, LARGEST_CORRECTION)


def _excess(seen: float, expected: float) -> float:
    """How many times too many, where that is beyond doubt: by the lower Poisson bound."""
    certain = max(math.sqrt(seen) - 1.0, 0.0) ** 2  # two standard deviations: that of sqrt(n) is a half
    return certain / expected if certain > TOLERANCE * expected else 1.0
