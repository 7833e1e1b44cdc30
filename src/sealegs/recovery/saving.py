"""Writes checkpoints of a run when they are due, and resumes a run from the newest trustworthy one."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from sealegs.data.position import Batches
from sealegs.errors import SealegsError, SourceError, StorageError
from sealegs.record.doubt import Doubts
from sealegs.recovery.ledger import take_over_ledger
from sealegs.recovery.recovery import Recovery
from sealegs.state.checkpoints import Checkpoints, Damage, StoredState
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
    because: str = ""
    """Why it is this checkpoint, where it is not the newest one that is proven healthy."""


class RestoredState(NamedTuple):
    """A state in memory that the run has gone back to, and that is still to be written."""

    step: int
    capture: Callable[[], StoredState]
    of_guard: Mapping[str, Any]


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
        self._restored: RestoredState | None = None

    def after_step(self, number: int, *, went_back: bool) -> None:
        """Decide whether a checkpoint is due before step ``number``; one that could not be written stays due."""
        if self._every and number % self._every == 0:
            self.is_due = True
        if went_back:  # this step's state is on disk already, is about to be, or was not worth it before
            self.is_due = False

    def save(self, number: int, of_guard: Callable[[], Mapping[str, Any]], *, wait: bool) -> bool:
        """Write a checkpoint of the state before step ``number``. False where an earlier one is still being written."""
        began = time.perf_counter()
        self._watch.sync()
        state = self._training.capture()
        state = replace(state, plain={**state.plain, "guard": of_guard()}, step=number)
        if wait:
            try:
                is_written = self._checkpoints.save(number, state)
            except StorageError:
                self._failed.append(number)
                raise
            self.tell(number)  # events of earlier checkpoints come first
            if is_written:
                self._note(number, time.perf_counter() - began)
            else:
                self._note_kept(number)
        elif not self._checkpoints.save_soon(number, state):
            return False
        self.last, self.is_due = number, False
        return True

    def keep_restored(self, step: int, capture: Callable[[], StoredState], of_guard: Mapping[str, Any]) -> None:
        """Have a state in memory written that the run has gone back to, by ``write_restored``.

        The process may be killed before the next checkpoint, and nothing else has that state.
        """
        is_asked_for = self._every or self.last  # that of step 0 is written for the playbook
        self._restored = RestoredState(step, capture, of_guard) if is_asked_for else None

    @property
    def keeps_restored(self) -> bool:
        """Whether there is such a state still to be written."""
        return self._restored is not None

    def wait_for_room(self) -> None:
        """Wait until such a state can be written, if there is one."""
        if self.keeps_restored:
            self._checkpoints.wait()

    def write_restored(self, number: int) -> int | None:
        """Begin to write such a state, unless another one is still being written; gives its step where it is begun.

        It is that of an earlier moment: a later step does not change it, so that the loop need not wait.
        """
        if self._restored is None:
            return None
        step, capture, of_guard = self._restored
        try:
            state = capture()
        except SealegsError as error:  # newer snapshots have taken its place
            self._watch.note("checkpoint-failed", step=number, reason=f"checkpoint {step}: {error}")
            self._restored = None
            return None
        state = replace(state, plain={**state.plain, "guard": of_guard}, step=step)
        if not self._checkpoints.save_soon(step, state):
            return None
        self._restored = None
        return step

    def tell(self, number: int) -> None:
        """Write an event for each checkpoint that has been written, has failed or was not needed since."""
        for step, seconds in self._checkpoints.written():
            self._note(step, seconds)
        for step in self._checkpoints.kept():
            self._note_kept(step)
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
        except SourceError as error:
            return (str(error),) if self._failed else ()
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
        step, passed_over, because = self._newest(self._watch.folder, wants_healthy=recovery is not None)
        reasons = {str(damage.step): damage.reason for damage in passed_over}
        if step is None:
            return Resumed(None, reasons, [], because=because), None
        state = self._checkpoints.load(step, like=self._training.capture(with_frozen=True))
        remarks = self._training.restore(state)
        self.last = step
        audit = came_back(state, self._training.capture())
        return Resumed(step, reasons, remarks, audit, because), state.plain["guard"]

    def _newest(self, folder: Path, *, wants_healthy: bool) -> tuple[int | None, list[Damage], str]:
        """The checkpoint to go on from, why newer ones were passed over, and why it is none that is proven.

        That of step 0 proves nothing: a run that has come farther does not begin anew while another one is intact.
        """
        step, passed_over = self._checkpoints.newest_healthy() if wants_healthy else (None, [])
        if step:
            return step, passed_over, ""
        because = ""
        step, passed_over = self._checkpoints.newest_intact(Doubts(folder).about)
        if wants_healthy:
            because = "no checkpoint is proven yet: this is the newest that is intact and from before any incident"
        if step == 0:
            because = "no checkpoint after step 0 is to be trusted: the run begins anew"
        if step is None:
            step, passed_over = self._checkpoints.newest_intact()
            because = because and "no checkpoint is proven yet, and all are from within an incident: this is the newest"
        if step is None and passed_over:
            reasons = "; ".join(f"{damage.step}: {damage.reason}" for damage in passed_over)
            raise SourceError(
                f"{folder}: no checkpoint is to be trusted ({reasons}); restore one from a copy, or start another run"
            )
        return step, passed_over, "" if step is None else because

    def _note(self, step: int, seconds: float) -> None:
        self._failed.clear()
        self._watch.note("checkpoint", step=step, checkpoint=step, seconds=round(seconds, 3))

    def _note_kept(self, step: int) -> None:
        text = f"the checkpoint of step {step} is proven healthy and intact: it stays, and no other takes its place"
        self._watch.note("checkpoint-kept", step=step, checkpoint=step, text=text)
