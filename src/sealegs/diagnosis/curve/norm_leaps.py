"""Finds where gradient norms leap, or have risen for good: told beside the verdict, which the loss decides.

A norm that leaps for a few steps and leaves the loss alone damages nothing that the log shows, but it is what comes
before a spike. A single high norm is no leap: heavy-tailed norms have them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sealegs.diagnosis.curve.loss_curve import Floats, LossCurve, beside
from sealegs.diagnosis.curve.rises import stretches
from sealegs.diagnosis.curve.stretches import SCALER_SEARCH, has_scaler
from sealegs.diagnosis.settings import known_of
from sealegs.record.run import Run

FOLD = 5.0
"""Times the median before that a norm must reach."""
BEYOND_LARGEST = 2.0
"""Times the largest before that it must reach, too: where norms vary that much, it is usual."""
BEFORE, FEWEST = 100, 50
"""Rows before that count, and the fewest of them."""
IN_A_ROW = 2
"""Rows in a row that are a leap."""
LONGEST = 100
"""Rows beyond which it is no leap but a new level, which the signs of a slow change are about."""

JUDGED_LIVE = ("skip", "alarm", "halt")
"""Kinds of events of a step that was judged while the run went on."""
RISEN = 2.0
"""Times the lowest level since the beginning to which a norm must have risen to be told."""
PARTS = 10
"""Parts of a log, whose medians are levels; the first is where norms of a young run are still high or low."""


class NormLeap(NamedTuple):
    """A stretch in which the gradient norm was far above what was usual."""

    first: int
    last: int
    highest: float
    usual: float

    def __str__(self) -> str:
        """``gradient norm up to 12.1 at steps 700 to 702, 24 times the usual 0.5``"""
        fold = self.highest / self.usual
        return (
            f"gradient norm up to {self.highest:.4g} at steps {self.first} to {self.last}, {fold:.3g} times the usual "
            f"{self.usual:.4g}"
        )


def norm_leaps(run: Run, curve: LossCurve) -> tuple[NormLeap, ...]:
    """The leaps of the gradient norm in the rows that stand; those that are not finite are incidents of their own."""
    rows = np.flatnonzero(curve.stands)
    norms, steps = beside(run, curve, "grad_norm")[rows], curve.steps[rows]
    known = np.isfinite(norms)
    norms, steps = norms[known], steps[known]
    if len(norms) <= FEWEST or not (norms > 0).any():
        return ()
    found = []
    for first, last in stretches(_is_high(norms)):
        if IN_A_ROW <= last - first + 1 <= LONGEST and last + 1 < len(norms):
            usual = float(np.median(norms[max(first - BEFORE, 0) : first]))
            found.append(NormLeap(int(steps[first]), int(steps[last]), float(norms[first : last + 1].max()), usual))
    return tuple(found)


def norm_rise(run: Run, curve: LossCurve) -> str | None:
    """A sentence if the gradient norm has risen for good, step by step and to a multiple."""
    rows = np.flatnonzero(curve.stands)
    norms, steps = beside(run, curve, "grad_norm")[rows], curve.steps[rows]
    known = np.isfinite(norms)
    norms, steps = norms[known], steps[known]
    if len(norms) < PARTS * FEWEST:
        return None
    levels = np.array([np.median(part) for part in np.array_split(norms, PARTS)])[1:]
    lowest = int(np.argmin(levels))
    if levels[lowest] <= 0 or levels[-1] < RISEN * levels[lowest] or (np.diff(levels[lowest:]) < 0).any():
        return None
    begin = int(steps[(lowest + 1) * len(steps) // PARTS])
    return f"gradient norm rising since about step {begin}, from {levels[lowest]:.3g} to {levels[-1]:.3g}"


def norm_breaks(run: Run, curve: LossCurve, spans: Sequence[tuple[float, float]]) -> str | None:
    """A sentence if gradient norms are infinite outside these spans of steps, and no scaler looks for its scale."""
    if known_of(run.manifest).dtype == "fp16" or has_scaler(run, curve):
        return None
    rows = np.flatnonzero(curve.stands)
    is_broken = np.isinf(beside(run, curve, "grad_norm")[rows])
    is_broken[:SCALER_SEARCH] = False
    told = {event.step for event in run.events if event.kind in JUDGED_LIVE}  # a guard has skipped those
    steps = [
        step
        for step in curve.steps[rows][is_broken].tolist()
        if step not in told and not any(a <= step <= b for a, b in spans)
    ]
    if not steps:
        return None
    return f"gradient norm infinite in {len(steps)} of {len(rows)} rows, the first at step {steps[0]}"


def _is_high(norms: Floats) -> NDArray[np.bool_]:
    """Norms far above those before; while one is, the level before the first is kept."""
    is_high = np.zeros(len(norms), np.bool_)
    above = np.append(False, norms[1:] > BEYOND_LARGEST * norms[:-1])
    at = FEWEST
    for start in np.flatnonzero(above).tolist():
        if start < at:
            continue
        before = norms[max(start - BEFORE, 0) : start]
        limit = max(FOLD * float(np.median(before)), BEYOND_LARGEST * float(before.max()))
        if norms[start] > limit:
            at = _end(norms, start, limit)
            is_high[start:at] = True
    return is_high


def _end(norms: Floats, start: int, limit: float) -> int:
    """The first place from ``start`` on that is not above the limit; it is near, mostly."""
    width = LONGEST
    while start + width < len(norms) and (norms[start : start + width] > limit).all():
        width *= 8
    low = np.flatnonzero(~(norms[start : start + width] > limit))
    return start + int(low[0]) if len(low) else len(norms)
