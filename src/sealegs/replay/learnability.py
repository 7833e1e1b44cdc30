"""Batches that a model finds dear in, what it can learn from them out: right ones teach it others of their kind."""

from dataclasses import dataclass
from itertools import cycle, islice

from sealegs.replay.experiment import Experiment

LESSONS = 24
"""Updates that it is taught with."""
RIGHT, WRONG = 0.6, 0.7
"""Of the loss of a batch, what is left at most where the others are right, and at least where they are not. Of noise
three quarters are, or more; labels that are wrong and consistent teach something too, and lie in between."""


@dataclass(frozen=True, slots=True)
class Taught:
    """What came of it."""

    others: int
    """Batches that it was taught with."""
    before: float
    """The loss of the dearest batch, which was not among them ..."""
    after: float
    """... and after the lessons."""

    @property
    def left(self) -> float:
        """As a share."""
        return self.after / self.before

    def __str__(self) -> str:
        return f"{self.left:.0%} of the loss of the dearest is left after {LESSONS} lessons with {self.others} others"


def taught(experiment: Experiment, *, dear: float) -> Taught | None:
    """Teach it all batches that stand out but the dearest; none where no other stands out by so many deviations."""
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
