"""Finds a loss that goes up and down with the order of the data, in a period that repeats."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sealegs.diagnosis.curve.epochs import boundaries
from sealegs.diagnosis.curve.loss_curve import Floats, Indices, LossCurve, beside
from sealegs.diagnosis.curve.periodic import period_of
from sealegs.diagnosis.curve.rises import heights_of
from sealegs.diagnosis.curve.stretches import Stretch
from sealegs.record.manifest import dotted
from sealegs.record.run import Run

SHORTEST = 8
"""Rows of the shortest period. In fewer there is no order to be seen."""
STEEP = 0.1
"""Share of the rows at the beginning that are left out: there the loss falls too steeply for anything else."""
ALIKE = 0.7
"""Correlation of the changes from row to row with those of an epoch before. 46 of 48 public fine-tunes have 0.34 at
most, as data is shuffled anew; the two that read it in the same order have 0.96 and more."""
RARE = (0.05, 0.95)
"""Quantiles of the changes beyond which one counts no more: a spike where each epoch ends is no order of the data."""
MEGABATCH = 50
"""Steps of a period of Hugging Face's ``group_by_length``: it sorts the samples of so many batches by length."""
CYCLES, FORETOLD = 4, 0.2
"""Fewest periods of sorted batches, and the share of the rows' variance that the mean of the others must foretell."""
SLACK = 1.1
"""Times the usual range of a period, in the logarithm, that a rise may have and be one of them."""
OF_THE_RATE = "so does the learning rate"
SAME = 0.05
"""Share by which two periods may differ and be the same."""
TYPICAL = (0.1, 0.9)
"""Quantiles between which the height of a rise is measured where only the curve says that it repeats itself."""
OF_SHIFTS = ("spike", "level_shift")
"""Kinds of incidents that a saw-tooth can look like."""


@dataclass(frozen=True, slots=True)
class SawTooth:
    """A loss that repeats itself."""

    period: int
    """In steps."""
    amplitude: float
    """From the lowest to the highest of a period, in the logarithm of the loss."""
    why: str
    height: float | None = None
    """The amplitude without the noise, of a period that was found in the curve alone: it is not known what repeats."""

    @property
    def is_explained(self) -> bool:
        """Whether it is known what repeats."""
        return self.height is None

    def __str__(self) -> str:
        """``the loss goes up and down by 40% in each 50 steps: group_by_length sorts batches by length``"""
        height = self.amplitude if self.height is None else self.height
        return f"the loss goes up and down by {math.expm1(height):.0%} in each {self.period} steps: {self.why}"


def saw_tooth(run: Run, curve: LossCurve) -> SawTooth | None:
    """The period with which the losses repeat: that of an epoch read in the same order, or of sorted batches."""
    if not len(curve.finite):
        return None
    rows = curve.parts[-1]
    rows = rows[int(STEEP * len(rows)) :]
    if len(rows) < 2 * SHORTEST or (curve.losses[rows] <= 0).any():
        return None
    heights = heights_of(curve.losses[rows])
    if (period := _epoch(boundaries(run, curve))) and _returns(heights, period):
        why = "each epoch has the same batches in the same order"
        return SawTooth(period * curve.interval, _amplitude(heights, period), why)
    period = round(MEGABATCH / curve.interval)
    if _groups_by_length(run) and _is_foretold(heights, period):
        why = "group_by_length sorts batches by length"
        return SawTooth(period * curve.interval, _amplitude(heights, period), why)
    if (found := period_of(heights)) is not None:
        rows_of = round(found.rows)
        why = _of_what(run, curve, rows, found.rows)
        return SawTooth(rows_of * curve.interval, _amplitude(heights, rows_of), why, found.height)
    return None


def _of_what(run: Run, curve: LossCurve, rows: Indices, period: float) -> str:
    """What has the same period, as far as the log tells."""
    rates = beside(run, curve, "lr")[rows]
    of_rate = period_of(np.log(rates)) if np.isfinite(rates).all() and (rates > 0).all() else None
    if of_rate is not None and abs(of_rate.rows / period - 1) < SAME:
        return OF_THE_RATE
    return "something comes in turns, such as data that is not shuffled, sources or a curriculum"


def is_of_the_tooth(curve: LossCurve, tooth: SawTooth, found: Sequence[Stretch]) -> bool:
    """Whether all of several rises are no higher than those of every period."""
    for one in found:
        kinds = OF_SHIFTS if tooth.is_explained else (*OF_SHIFTS, "drift")
        if one.kind not in kinds:
            return False
        inside = curve.losses[one.first : one.last + 1]
        before = curve.finite_before(one.first, tooth.period // curve.interval)
        lowest, highest = (0.0, 1.0) if tooth.is_explained else TYPICAL
        low = np.nanquantile(before, lowest) if len(before) else math.nan
        high = np.nanquantile(inside, highest)
        if not 0 < high <= low * math.exp(SLACK * tooth.amplitude):
            return False
    return True


def _epoch(begins: Indices) -> int:
    """The rows of an epoch, where all have as many; else 0. Of the first one the log may lack some."""
    lengths = np.diff(begins)
    return int(lengths[0]) if len(lengths) and len(set(lengths.tolist())) == 1 and lengths[0] >= SHORTEST else 0


def _returns(heights: Floats, period: int) -> bool:
    """Whether the changes from row to row are those of a period before."""
    changes = np.diff(heights)
    changes = np.clip(changes, *np.quantile(changes, RARE)) if len(changes) else changes
    before, after = changes[:-period], changes[period:]
    if len(after) < SHORTEST or not (before.std() > 0 and after.std() > 0):
        return False
    return bool(np.corrcoef(before, after)[0, 1] >= ALIKE)


def _is_foretold(heights: Floats, period: int) -> bool:
    """Whether each period, without the trend, is foretold by the mean of the others."""
    if period < SHORTEST or len(heights) < (CYCLES + 1) * period:
        return False
    summed = np.cumsum(np.insert(heights, 0, 0.0))
    trend = (summed[period:] - summed[:-period]) / period  # over one period: what repeats is not in it
    apart = heights[period // 2 :][: len(trend)] - trend
    cycles = apart[: len(apart) // period * period].reshape(-1, period)
    others = (cycles.sum(axis=0) - cycles) / (len(cycles) - 1)
    left, whole = float(np.sum((cycles - others) ** 2)), float(np.sum(cycles**2))
    return whole > 0 and 1 - left / whole >= FORETOLD


def _amplitude(heights: Floats, period: int) -> float:
    """The middle of the periods' ranges."""
    cycles = heights[len(heights) % period :].reshape(-1, period)
    return float(np.median(cycles.max(axis=1) - cycles.min(axis=1)))


def _groups_by_length(run: Run) -> bool:
    settings = {name.rpartition(".")[2].lower(): value for name, value in dotted(run.manifest.settings)}
    return str(settings.get("group_by_length")).lower() == "true" or "group_by_length" in settings.values()
