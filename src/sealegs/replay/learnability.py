"""Tells hard batches from wrong ones: right batches teach a model others of their kind."""

from dataclasses import dataclass
from itertools import cycle, islice

from sealegs.replay.experiment import Experiment

LESSONS = 24
"""Updates on the other batches."""
RIGHT, WRONG = 0.6, 0.7
"""The share of a batch's loss that is left at most if the other batches are right, and at least if they are wrong.

Noise leaves three quarters or more. Wrong but consistent labels teach something too, and lie in between."""


@dataclass(frozen=True, slots=True)
class Taught:
    """The loss of the highest-loss batch before and after training on the others."""

    others: int
    """Batches that the model was trained on."""
    before: float
    """The loss of the highest-loss batch before; it was not trained on."""
    after: float
    """Its loss after the updates."""

    @property
    def left(self) -> float:
        """The share of the loss that is left."""
        return self.after / self.before

    def __str__(self) -> str:
        return f"{self.left:.0%} of the loss of the dearest is left after {LESSONS} lessons with {self.others} others"


def taught(experiment: Experiment, *, dear: float) -> Taught | None:
    """Train on the high-loss batches except the highest; None where no other is above ``dear`` standard deviations."""
    rows, peak = experiment.rows, experiment.peak
    steps = [step for step in experiment.window if step >= experiment.onset and step != peak]
    others = [step for step in steps if experiment.usual.above(float(rows[step]["loss"])) > dear]
    if not others:
        return None
    experiment.hold(experiment.onset)
    before = experiment.look(peak)
    for step in islice(cycle(others), LESSONS):
        experiment.loop.step(experiment.batches_of(step), lr=float(rows[experiment.onset]["lr"]))
        experiment.steps_run += 1
    return Taught(len(others), before, experiment.look(peak))
