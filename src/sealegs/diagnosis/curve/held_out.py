"""Tells a held-out loss that rises while the training loss falls: the model learns its data by heart.

That is no damage of the run, whose earlier checkpoint is the better one: here it is told. Whether it is to be watched
say the columns (``diagnosis/columns``) and the causes.
"""

import numpy as np

from sealegs.diagnosis.curve.loss_curve import LossCurve, numbers
from sealegs.record.run import Run

FEWEST = 8
"""Evaluations from which one turn can be told."""
WIDTH = 3
"""Evaluations whose median is a level."""
SMALLEST = 0.03
"""Smallest rise above the lowest, as a share of what was gained, or of the lowest if that is more."""
SURE = 4.0
"""Usual deviations that it must reach, too."""
STAYED = 0.2
"""Share of the evaluations that come after the lowest, at the least."""


def goes_on_falling(run: Run, first: int) -> bool:
    """Whether the held-out loss has been lower since a step than it ever was before: no damage was done there.

    Medians of three are compared, so that no single evaluation decides.
    """
    if "eval_loss" not in run.signals or not run.has_numbers("eval_loss"):
        return False
    steps, values = run.series("eval_loss")
    before, since = values[steps < first], values[steps >= first]
    if len(before) < FEWEST or len(since) < WIDTH or not np.isfinite(values).all():
        return False
    lowest = np.median(np.lib.stride_tricks.sliding_window_view(before, WIDTH), axis=1).min()
    return bool(np.median(since[-WIDTH:]) < lowest)


def learns_by_heart(run: Run, curve: LossCurve) -> str:
    """The sentence about it; empty where nothing of it is to be seen."""
    if "eval_loss" not in run.signals:
        return ""
    steps, values = run.series("eval_loss")
    values = numbers(values)
    steps, values = steps[np.isfinite(values)], values[np.isfinite(values)]
    count = len(values)
    if count < FEWEST:
        return ""
    at = int(np.argmin(values))
    lowest, after = float(values[at]), values[at + 1 :]
    end = float(np.median(values[-max(count // 10, 3) :]))
    noise = 1.4826 / np.sqrt(2) * float(np.median(np.abs(np.diff(values))))
    enough = max(SMALLEST * max(abs(lowest), float(values[0]) - lowest), SURE * noise)
    has_stayed = len(after) >= STAYED * count and float(np.median(after[len(after) // 2 :])) - lowest > enough
    if not has_stayed or end - lowest <= enough or not _falls_on(curve, int(steps[at])):
        return ""
    return (
        f"held-out loss {lowest:.4g} at step {steps[at]}, its lowest, and {values[-1]:.4g} in the end, while the "
        f"training loss fell on: it learns its data by heart, and the checkpoint of step {steps[at]} is the better one"
    )


def _falls_on(curve: LossCurve, step: int) -> bool:
    """Whether the training loss is lower in the end than about a step."""
    rows = curve.standing[np.isfinite(curve.losses[curve.standing])]
    width = max(len(rows) // 20, 3)
    at = int(np.searchsorted(curve.steps[rows], step))
    about, last = rows[max(at - width, 0) : at + width], rows[-width:]
    return len(about) > 0 and float(np.median(curve.losses[last])) < float(np.median(curve.losses[about]))
