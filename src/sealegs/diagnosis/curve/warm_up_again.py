"""A learning rate in, the step at which its warm-up began once more in the middle of a run out."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sealegs.diagnosis.curve.loss_curve import Floats

FEWEST = 20
"""Rows with a rate."""
FALLEN, IN_FORCE = 0.3, 0.2
"""Share of the rate before to which it falls at once, and share of the largest until then that it has before: where a
decay has ended a new cycle begins, which is planned."""
CLIMBS, REGAINED, GROWN = 3, 0.5, 3.0
"""Rows for which it climbs from there, the share of the rate before that it regains, and the factor by which it grows
at the least."""
PLANNED = 3
"""Times from which on it is a plan."""


class WarmUpAgain(NamedTuple):
    """A warm-up in the middle of a run."""

    step: int
    last: int
    """The step at which the climb ends, or the last of the log."""
    before: float
    low: float
    high: float

    def __str__(self) -> str:
        """``the warm-up began again at step 900: LR from 0.0003 to 3e-06 at once, and up to 0.00028 by step 1000``"""
        climb = f"LR from {self.before:.3g} to {self.low:.3g} at once, and up to {self.high:.3g} by step {self.last}"
        return f"the warm-up began again at step {self.step}: {climb}"


def warm_up_again(steps: NDArray[np.int64], rates: Floats, *, asked_at: Iterable[int] = ()) -> WarmUpAgain | None:
    """The first of them; None where there is none, where they are many, or where it was ``asked_at`` that step."""
    if len(rates) < FEWEST:
        return None
    falls = 1 + np.flatnonzero((rates[1:] <= FALLEN * rates[:-1]) & (rates[:-1] > 0))
    asked = np.array(sorted(asked_at))
    found = []
    for row in falls.tolist():
        before, low = float(rates[row - 1]), float(rates[row])
        rising = np.diff(rates[row:]) > 0
        length = len(rising) if rising.all() else int(np.argmin(rising))
        high = float(rates[row + length])
        is_whole = high >= max(REGAINED * before, GROWN * low) or row + length == len(rates) - 1
        is_asked = bool(((asked >= steps[row - 1]) & (asked <= steps[row])).any())
        if length >= CLIMBS and is_whole and before >= IN_FORCE * rates[:row].max() and not is_asked:
            found.append(WarmUpAgain(int(steps[row]), int(steps[row + length]), before, low, high))
    return found[0] if 0 < len(found) < PLANNED else None
