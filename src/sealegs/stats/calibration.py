"""Checks whether a statistic's p is small as often as it claims, and gives a correction where it is not.

A statistic that claims p < 0.01 for one value in a hundred can be checked while it runs. Where small p come more often
than they should, by a Poisson bound, thresholds are divided by the excess: the stream has tails that the statistic does
not know.
"""

import math
from typing import NamedTuple

CHECKED = (0.01, 0.001)
"""Probabilities whose frequency is counted."""
MEMORY = 1 - 1 / 20_000
"""Counts fade over about 20,000 values, since a run changes."""
TOLERANCE = 2.0
"""Up to this many times the nominal frequency nothing is corrected."""
LARGEST_CORRECTION = 100.0


class CalibrationAudit(NamedTuple):
    """How often p was small, among how many values; all counts fade."""

    values: float = 0.0
    hundredths: float = 0.0
    thousandths: float = 0.0

    def after(self, p: float) -> "CalibrationAudit":
        """The counts after one more judged value."""
        low, lower = CHECKED
        return CalibrationAudit(
            self.values * MEMORY + 1.0,
            self.hundredths * MEMORY + (p < low),
            self.thousandths * MEMORY + (p < lower),
        )

    @property
    def correction(self) -> float:
        """What thresholds are divided by: 1 where p is honest.

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
    """How many times too often, by the lower Poisson bound; 1 where that is not beyond doubt."""
    certain = max(math.sqrt(seen) - 1.0, 0.0) ** 2  # two standard deviations: that of sqrt(n) is a half
    return certain / expected if certain > TOLERANCE * expected else 1.0
