"""Writes checkpoints of a run when they are due, and resumes a run from the newest trustworthy one."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sealegs.data.position import Batches
from sealegs.errors import SourceError, StorageError
from sealegs.recovery.ledger import take_over_ledger
from sealegs.recovery.recovery import Recovery
from sealegs.state.checkpoints import Checkpoints, Damage
from sealegs.state.resume_audit import came_back
from sealegs.state.training_state import TrainingState
from sealegs.watch import Watch


@dataclass(frozen=True, slots=True)
class Resumed:
    """The outcome of a resume."""

    checkpoint: int | None
    """The step of the checkpoint; None where the run was killed before its first one and starts over."""
    passed_over: dict[str, str]
    """Newer checkpoints that are damaged or not trustworthy, and why."""
    remarks: list[str]
    """Differences from the state that was saved."""
    audit: dict[str, str] = field(default_factory=dict)
    """Per part of the state: whether the saved and the live one agree."""


class Saving:
    """Writes a checkpoint of the training state every so many steps, and an event for each."""

    def __init__(self, checkpoints: Checkpoints, training: TrainingState, watch: Watch, *, every: int) -> None:
        self.last: int | None = None
        """The step of the newest checkpoint, which may still be being written."""
        self.is_due = False
        self._failed: list[int] = []
        """Steps whose checkpoints could not be written, since the last one that could."""
        self._checkpoints = checkpoints
        self._training = training
        self._watch = watch
        self._every = every

    def after_step(self, number: int, *, went_back: bool) -> None:
        """Decide whether a checkpoint is due before step ``number``; one that could not be written stays due."""
        if self._every and number % self._every == 0:
            self.is_due = True
        if went_back:  # this step's state is on disk already, or was not worth it before
            self.is_due = False

    def save(self, number: int, of_guard: Callable[[], Mapping[str, Any]], *, wait: bool) -> bool:
        """Write a checkpoint of the state before step ``number``. False where an earlier one is still being written."""
        began = time.perf_counter()
        self._watch.sync()
        state = self._training.capture()
        state = replace(state, plain={**state.plain, "guard": of_guard()}, step=number)
        if wait:
            try:
                self._checkpoints.save(number, state)
            except StorageError:
                self._failed.append(number)
                raise
            self.tell(number)  # events of earlier checkpoints come first
            self._note(number, time.perf_counter() - began)
        elif not self._checkpoints.save_soon(number, state):
            return False
        self.last = number
        return True

    def tell(self, number: int) -> None:
        """Write an event for each checkpoint that has been written or has failed since."""
        for step, seconds in self._checkpoints.written():
            self._note(step, seconds)
        failed = self._checkpoints.failed_steps()
        self._failed += failed
        if self.last in failed:
            self.last = None
        if failure := self._checkpoints.failure():
            self._watch.note("checkpoint-failed", step=number, reason=failure)

    @property
    def missing(self) -> tuple[str, ...]:
        """What became of checkpoints that should be on disk and are not, as a sentence."""
        try:
            on_disk = self._checkpoints.steps()
        except OSError as error:
            return (f"the checkpoints cannot be listed ({error.strerror})",) if self._failed else ()
        failed = sorted({*self._failed}.difference(on_disk))
        newest = f"the newest on disk is of step {on_disk[-1]}" if on_disk else "there is none on disk"
        if failed:
            count = "a checkpoint" if len(failed) == 1 else f"{len(failed)} checkpoints"
            return (f"{count} could not be written, the last of step {failed[-1]}; {newest}",)
        is_gone = self.last is not None and not on_disk and not self._checkpoints.is_writing
        return (f"the checkpoint of step {self.last} was written and is gone; {newest}",) if is_gone else ()

    def finish(self, number: int) -> None:
        """Wait for the last checkpoint."""
        self._checkpoints.wait()
        self.tell(number)

    def resume(self, recovery: Recovery | None, batches: Batches) -> tuple[Resumed, Mapping[str, Any] | None]:
        """Restore the newest trustworthy checkpoint: a healthy one, where the run has one.

        The ledger comes first, since what was found to be bad still is. Also gives the guard's own state, for it to
        load.
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
        self._failed.clear()
        self._watch.note("checkpoint", step=step, checkpoint=step, seconds=round(seconds, 3))
