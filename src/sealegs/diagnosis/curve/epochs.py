"""Explains parts of a loss curve by epochs: steps down where the data comes again, rises at the end of each pass."""

from collections.abc import Sequence

import numpy as np

from sealegs.diagnosis.curve.loss_curve import Indices, LossCurve, beside
from sealegs.diagnosis.curve.rises import QUIETEST, heights_of
from sealegs.diagnosis.curve.stretches import Stretch
from sealegs.record.run import Run

ROWS = 8
"""Rows on each side of a boundary that are compared."""
ENOUGH = 5.0
"""A step down must be this many times the usual change from eight rows to the next eight."""
SMALLEST = 0.1
"""A step down must also be at least this high: 10 %."""
FEWEST = 2
"""Boundaries that must show a step down: a single one may be anything."""
ARTEFACTS = 3
"""Fewest short rises that boundaries or evaluations can explain, if all of them are there."""
RARE = 0.1
"""Largest share of the rows that may be boundaries: if every row is one, none explains anything."""


def boundaries(run: Run, curve: LossCurve) -> Indices:
    """The first row of each epoch after the first."""
    epochs = beside(run, curve, "epoch")
    known = np.flatnonzero(np.isfinite(epochs))
    if len(known) < 2 * ROWS:
        return np.empty(0, np.int64)
    begins = np.flatnonzero(np.diff(np.floor(epochs[known] + 1e-9)) > 0) + 1
    return np.asarray(known[begins])


def epoch_steps(run: Run, curve: LossCurve) -> list[Stretch]:
    """Steps down at the boundaries of epochs, as one stretch from the first to the last: benign memorisation."""
    begins = np.searchsorted(curve.finite, boundaries(run, curve))
    if len(begins) < FEWEST or len(curve.finite) < 4 * ROWS:
        return []
    heights = heights_of(curve.losses[curve.finite])
    count = len(heights) // ROWS
    usual = float(np.median(np.abs(np.diff(np.median(heights[: count * ROWS].reshape(count, ROWS), axis=1)))))
    enough = max(SMALLEST, ENOUGH * max(usual, QUIETEST))
    begins = begins[(begins >= 2 * ROWS) & (begins + ROWS <= len(heights))]
    inside = [at for at in begins.tolist() if not np.any((begins > at - 2 * ROWS) & (begins < at))]
    falls = [at for at in inside if np.median(heights[at - ROWS : at]) - np.median(heights[at : at + ROWS]) > enough]
    if len(falls) < FEWEST or 2 * len(falls) < len(inside):
        return []
    return [Stretch(int(curve.finite[falls[0]]), int(curve.finite[falls[-1]]), "epoch_step")]


def is_at_boundaries(run: Run, curve: LossCurve, found: Sequence[Stretch]) -> bool:
    """Whether all of several short rises are at the end of an epoch, or beside an evaluation."""
    if len(found) < ARTEFACTS or any(one.last - one.first >= ROWS or one.kind != "spike" for one in found):
        return False
    evaluations = np.empty(0, np.int64)
    if "eval_loss" in run.signals:
        evaluations = np.searchsorted(curve.steps, run.written("eval_loss").steps) if not curve.resumes else evaluations
    for rows in (boundaries(run, curve), evaluations):
        is_rare = 0 < len(rows) <= RARE * len(curve.losses)
        if is_rare and all(np.any((rows >= one.first - 2) & (rows <= one.last + 2)) for one in found):
            return True
    return False
