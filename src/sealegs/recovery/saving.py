"""A run under way in, checkpoints of it out when they are due; and back, at a resume, from the newest one to trust."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sealegs.data.position import Batches
from sealegs.errors import SourceError
from sealegs.recovery.ledger import take_over_ledger
from sealegs.recovery.recovery import Recovery
from sealegs.state.checkpoints import Checkpoints, Damage
from sealegs.state.resume_audit import came_back
from sealegs.state.training_state import TrainingState
from sealegs.watch import Watch


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a resume has brought back."""

    checkpoint: int | None
    """None where the run was killed before its first one: it then begins anew."""
    passed_over: dict[str, str]
    """Newer checkpoints that are damaged or not to be trusted, and why."""
    remarks: list[str]
    """What is not as it was."""
    audit: dict[str, str] = field(default_factory=dict)
    """Part by part, whether what was saved is what is live now."""


class Saving:
    """Writes checkpoints of all that is being trained, every so many steps, and says what came of it."""

    def __init__(self, checkpoints: Checkpoints, training: TrainingState, watch: Watch, *, every: int) -> None:
        self.last: int | None = None
        """The step of the last one that was written, or is being written."""
        self.is_due = False
        self._checkpoints = checkpoints
        self._training = training
        self._watch = watch
        self._every = every

    def after_step(self, number: int, *, went_back: bool) -> None:
        """Step ``number`` comes next: is a checkpoint due before it? One that could not be written yet still is."""
        if self._every and number % self._every == 0:
            self.is_due = True
        if went_back:  # the state of this step is on disk, or was not worth it then
            self.is_due = False

    def save(self, number: int, of_guard: Callable[[], Mapping[str, Any]], *, wait: bool) -> bool:
        """Write what is needed to run step ``number``. False, where one from before is still being written."""
        began = time.perf_counter()
        self._watch.sync()
        state = self._training.capture()
        state = replace(state, plain={**state.plain, "guard": of_guard()}, step=number)
        if wait:
            self._checkpoints.save(number, state)
            self.tell(number)  # of those before it first
            self._note(number, time.perf_counter() - began)
        elif not self._checkpoints.save_soon(number, state):
            return False
        self.last = number
        return True

    def tell(self, number: int) -> None:
        """What has been written by now, and what could not be."""
        for step, seconds in self._checkpoints.written():
            self._note(step, seconds)
        if failure := self._checkpoints.failure():
            self._watch.note("checkpoint-failed", step=number, reason=failure)

    def finish(self, number: int) -> None:
        """Wait for the last one."""
        self._checkpoints.wait()
        self.tell(number)

    def resume(self, recovery: Recovery | None, batches: Batches) -> tuple[Resumed, Mapping[str, Any] | None]:
        """Bring back the newest checkpoint to trust: a healthy one, where the run knows of one.

        The books first: what was found to be bad still is. Gives the guard's own state, too, for it to load.
        """
        assert self._watch.folder is not None
        take_over_ledger(self._watch, batches, None if recovery is None else recovery.take_over)
        step, passed_over = self._newest(self._watch.folder, wants_healthy=recovery is not None)
        reasons = {str(damage.step): damage.reason for damage in passed_over}
        if step is None:
            return Resumed(None, reasons, []), None
        state = self._checkpoints.load(step, like=self._training.capture())
        remarks = self._training.restore(state)
        return Resumed(step, reasons, remarks, came_back(state, self._training.capture())), state.plain["guard"]

    def _newest(self, folder: Path, *, wants_healthy: bool) -> tuple[int | None, list[Damage]]:
        step, passed_over = self._checkpoints.newest_healthy() if wants_healthy else (None, [])
        if step is None:
            step, passed_over = self._checkpoints.newest_intact()
        if step is None and passed_over:
            reasons = "; ".join(f"{damage.step}: {damage.reason}" for damage in passed_over)
            raise SourceError(
                f"{folder}: no checkpoint is to be trusted ({reasons}); restore one from a copy, or start another run"
            )
        return step, passed_over

    def _note(self, step: int, seconds: float) -> None:
        self._watch.note("checkpoint", step=step, checkpoint=step, seconds=round(seconds, 3))
