"""Runs recorded steps again as they were, from a state, as far as there are batches."""

from typing import Any

from sealegs.capsule.read import Capsule
from sealegs.replay.subject import ReplayLoop, StepOutcome, Subject
from sealegs.state.checkpoints import StoredState


class Rerun:
    """The steps of a capsule, run from the same state as often as needed."""

    def __init__(self, capsule: Capsule, subject: Subject, state: StoredState, steps: range) -> None:
        """``state`` is that of the first of the ``steps``."""
        self.capsule = capsule
        self.loop = ReplayLoop(subject, capsule.description.clip)
        self.steps = steps
        self.rows = {int(row["step"]): row for row in capsule.rows}
        self.steps_run = 0
        self.seen: dict[int, StepOutcome] = {}
        """What the steps showed when they were run unchanged."""
        self._states = {steps.start: state}
        self._batches: dict[int, tuple[Any, ...]] = {}
        for each in capsule.batches:
            self._batches[each.step] = (*self._batches.get(each.step, ()), each.batch)

    def batches_of(self, step: int) -> tuple[Any, ...]:
        """The batches that a step trained on."""
        return self._batches[step]

    def qk_clip_at(self, step: int) -> float | None:
        """The limit that attention logits had at a step at which the run looked at them."""
        limit = self.rows[step].get("qk_clip")
        return None if limit is None else float(limit)

    def hold(self, step: int) -> None:
        """Go to the state before a step, and keep it for the next time."""
        self.go_to(step)
        if step not in self._states:
            self._states[step] = self.loop.capture()

    def go_to(self, step: int) -> None:
        """Go to the state before a step: restore the nearest known state, and run the steps in between unchanged."""
        nearest = max(known for known in self._states if known <= step)
        self.loop.restore(self._states[nearest])
        for past in range(nearest, step):
            self.run_unchanged(past)

    def run_unchanged(self, step: int) -> None:
        """Run a step; an update that the run left out is left out again."""
        row = self.rows[step]
        self.seen[step] = self.loop.step(
            self.batches_of(step), lr=float(row["lr"]), applied=bool(row["applied"]), qk_clip=self.qk_clip_at(step)
        )
        self.steps_run += 1
