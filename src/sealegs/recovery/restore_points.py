"""Restore points: the healthy snapshots and checkpoints of a run, and the way back to one.

Checkpoint health says which checkpoints are healthy. A rollback restores all ranks or none.
"""

import copy
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from sealegs.data.position import Batches
from sealegs.errors import RunHalted, SealegsError
from sealegs.record.checkpoint_tags import HEALTHY_AFTER
from sealegs.recovery.actions import Impossible
from sealegs.recovery.adjustments import RecentSchedules
from sealegs.recovery.incident_tracker import CostSoFar
from sealegs.signals.collective import Collective
from sealegs.state.checkpoints import Checkpoints
from sealegs.state.extra_state import load_states, states_of
from sealegs.state.rng import restore_rng, rng_now
from sealegs.state.snapshots import Snapshot, Snapshots
from sealegs.state.training_state import TrainingState, restore_scale, scale_of
from sealegs.watch import Watch


class CheckpointHealth:
    """Counts the healthy steps that have come of each checkpoint, until it is proven healthy."""

    def __init__(self, checkpoints: Checkpoints | None, model: nn.Module, ranks: Collective) -> None:
        self._checkpoints = checkpoints
        self._model = model
        self._ranks = ranks
        self._steps: dict[int, int] = {}

    def saved(self, step: int, *, led_by: int = 0, is_proven: bool = False) -> None:
        """Note that a checkpoint is being written; it is healthy once healthy steps have come of it.

        That of step 0 is healthy at once, as is one that ``is_proven`` already. So is one with finite weights that
        ``led_by`` healthy steps, if they are enough, have led to: the last checkpoint of a run has no steps after it.
        """
        is_led = led_by >= HEALTHY_AFTER
        is_proven |= step == 0 or (is_led and all(self._ranks.gather(is_finite(self._model))))
        self._steps[step] = HEALTHY_AFTER if is_proven else 0
        self._prove(step, 0)

    def state_dict(self) -> dict[str, int]:
        """How many healthy steps have come of each checkpoint that is not proven yet."""
        return {str(step): count for step, count in self._steps.items()}

    def load_state_dict(self, state: Mapping[str, int], step: int) -> None:
        """Go on counting for the checkpoints that the process before has left: those up to ``step``, which the run
        goes on from, lie on its way."""
        tags = {} if self._checkpoints is None else self._checkpoints.tags()
        unproven = [saved for saved, tag in tags.items() if tag == "candidate" and saved <= step]
        self._steps = {saved: state.get(str(saved), 0) for saved in unproven}

    def healthy(self, step: int) -> None:
        """Count a healthy step for every checkpoint up to it."""
        self._prove(step, 1)

    def doubtful(self) -> None:
        """Start counting over: a step was not healthy, or an incident is open."""
        self._steps = dict.fromkeys(self._steps, 0)

    def forget_after(self, step: int) -> None:
        """Forget later checkpoints: the run went back to this step."""
        self._steps = {saved: count for saved, count in self._steps.items() if saved <= step}

    def _prove(self, step: int, healthy: int) -> None:
        for saved in [saved for saved in self._steps if saved <= step]:
            self._steps[saved] += healthy
            if self._steps[saved] >= HEALTHY_AFTER:
                assert self._checkpoints is not None
                self._checkpoints.tag(saved, "healthy")
                del self._steps[saved]


def is_finite(model: nn.Module) -> bool:
    """Whether this rank's part of the weights is finite."""
    own = (getattr(parameter, "to_local", lambda p=parameter: p)() for parameter in model.parameters())
    return all(bool(torch.isfinite(weights).all()) for weights in own)


NAMED = 3
"""Parameters that are named at most."""


def not_finite(model: nn.Module, watch: Watch) -> str:
    """Which of this rank's weights are not finite, in words and as an event; empty where all are."""
    broken = []
    for name, parameter in model.named_parameters():
        own = getattr(parameter, "to_local", lambda p=parameter: p)()
        if count := own.numel() - int(torch.isfinite(own).sum()):
            broken.append(f"{name} ({count} of {own.numel()} values{'' if parameter.requires_grad else ', frozen'})")
    more = len(broken) - NAMED
    text = ", ".join(broken[:NAMED]) + (f" and {more} more" if more > 0 else "")
    if text:
        watch.note("weights-not-finite", text=text)
    return text


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """A healthy state to go back to: a snapshot in memory or a checkpoint on disk."""

    step: int
    snapshot: Snapshot | None

    def __str__(self) -> str:
        return f"the {'checkpoint' if self.snapshot is None else 'snapshot'} of step {self.step}"


FARTHEST = 2
"""How many times as far back as a rung asks step 0 may lie. Who asks for 100 steps in a run of 50,000 does not want to
start over."""


class RestorePoints:
    """The snapshots and checkpoints of a run, which of them are healthy, and how to go back to one."""

    def __init__(
        self,
        *,
        training: TrainingState,
        watch: Watch,
        batches: Batches,
        snapshots: Snapshots,
        checkpoints: Checkpoints | None,
        ranks: Collective,
    ) -> None:
        self.tokens = 0
        """Tokens that have led to the state of the run: what a rollback gave up does not count any more."""
        self._began = time.monotonic()
        """When the run would have begun, without what rollbacks gave up and the time it was down."""
        self.snapshots = snapshots
        self.health = CheckpointHealth(checkpoints, training.model, ranks)
        self.schedules = RecentSchedules(training.optimizers, training.schedulers)
        self._training = training
        self._watch = watch
        self._batches = batches
        self._checkpoints = checkpoints
        if checkpoints is not None:
            checkpoints.oldest_in_memory = lambda: min(snapshots.steps, default=None)
        self._ranks = ranks
        self._is_described = False
        self._has_snapshots = True
        self._awaited: int | None = None
        """The step before which a snapshot is due, once the loop asks for its next batch."""
        self._brought_back: Mapping[str, Any] = {}
        """Restored states of the loop's own objects, which the loop may still change in the step that went back."""
        self.gone_back_to: Snapshot | None = None
        """The snapshot that the run went back to last; None after a move to another state."""
        self._counted_back_from = 0
        """The step up to which steps have been counted back. None is counted back twice, so that it comes to an end."""

    @property
    def spent(self) -> dict[str, float]:
        """The tokens and seconds that have led to the state of the run, as JSON values."""
        return {"tokens": self.tokens, "seconds": time.monotonic() - self._began}

    def went_on_from(self, spent: Mapping[str, float]) -> CostSoFar:
        """Count on from a state that so much had led to; gives what is given up. Older checkpoints do not say it, and
        what this process has spent is all that is known."""
        before = self.spent
        self.tokens = int(spent.get("tokens", 0))
        self._began = time.monotonic() - float(spent.get("seconds", 0.0))
        return CostSoFar(
            0, max(int(before["tokens"]) - self.tokens, 0), max(before["seconds"] - self.spent["seconds"], 0.0)
        )

    def not_finite(self) -> str:
        """Which of this rank's weights are not finite, in words."""
        return not_finite(self._training.model, self._watch)

    def before_update(self) -> None:
        """Finish pending copies before the weights change. The host does not wait."""
        self.snapshots.before_update()
        if self._checkpoints is not None:
            self._checkpoints.before_update()

    def add_judging(self, step: int) -> None:
        """Add what the detectors have learned of a step to the snapshot that was taken after it."""
        candidate = self.snapshots.candidate
        if candidate is not None and step == candidate.step - 1:
            candidate.plain["judging"] = self._watch.judging

    def observe_step(self, step: int, *, is_calm: bool, is_doubtful: bool) -> None:
        """Count a step as healthy or doubtful for the states before it."""
        if is_calm:
            self.snapshots.healthy(step)
            self.health.healthy(step)
        elif is_doubtful:
            self.snapshots.doubtful()
            self.health.doubtful()

    def after_step(self, number: int) -> None:
        """Take a snapshot, if one is due before step ``number``. If the loop has state of its own, which it may change
        after the step, the snapshot waits until the loop asks for its next batch."""
        if self._training.also and self._batches.number is not None:
            self._awaited = number
        else:
            self.take_snapshot(number)

    def between_steps(self) -> None:
        """Finish what waits for the end of the loop's step."""
        number, self._awaited = self._awaited, None
        also, self._brought_back = self._brought_back, {}
        load_states(self._training.also, also)
        if number is not None:
            self.take_snapshot(number)

    def take_snapshot(self, number: int) -> None:
        """Take a snapshot, if one is due before step ``number``."""
        if not self._has_snapshots or not self.snapshots.due(number):
            return
        with self._watch.spent.of("copies"):  # rare and large: always timed
            is_judged = self._watch.verdict.step == number - 1
            self.snapshots.take(
                number,
                {
                    "schedulers": [copy.deepcopy(scheduler.state_dict()) for scheduler in self._training.schedulers],
                    "scaler": scale_of(self._training.scaler),
                    "rng": rng_now(),
                    "data": self._batches.position(),
                    "judging": self._watch.judging if is_judged else None,  # on a device the row is not there yet
                    "spent": self.spent,
                },
            )
            if not self._is_described:
                self._is_described = True
                self._describe(number)

    def _describe(self, number: int) -> None:
        text = self.snapshots.description
        if not all(self._ranks.gather(self.snapshots.held_bytes > 0)):  # all ranks go back, or none
            self.snapshots.drop()
            self._has_snapshots = False
            text = f"no snapshots: {text}" if self._ranks.world == 1 else f"no snapshots: not on every rank ({text})"
        self._watch.note("snapshots", step=number, text=text)

    def forget_after(self, step: int) -> None:
        """Forget what was kept of later steps: somebody else has brought the run to this step."""
        self.snapshots.forget_after(step)
        self.health.forget_after(step)
        self.schedules.forget_from(step)

    def count_back(self, number: int, count: int) -> bool:
        """After a row of skips, set the schedules back to where the row began, since the weights did not change either.

        Otherwise the run would have fewer updates in the end, and reach a lower learning rate sooner.
        """
        before = number - count
        if before < self._counted_back_from or not self.schedules.go_to(before):
            return False
        self._counted_back_from = number
        self._watch.catch_up()
        self._give_up_after(before)
        text = f"{count} steps in a row were skipped, which left the weights as they were: they are counted back"
        self._watch.note("counted-back", step=number, to_step=before, steps=count, text=text)
        return True

    def targets(self, onset: int, back: int) -> Iterator[RestorePoint]:
        """Healthy states at least ``back`` steps older than the onset, newest first. Step 0 comes last, where it is not
        much older than that.

        A state's step is at least one before the onset's, since the step before may have done the damage. Nearer states
        are never given, even if there is no other: the rung asks for ``back`` steps because nearer ones have not
        helped.
        """
        before = min(onset - 1, onset - back)
        in_memory = self.snapshots.newest(before)
        if in_memory is not None and not self._is_newer_on_disk(in_memory.step, before):
            yield RestorePoint(in_memory.step, in_memory)
        on_disk = self._checkpoints.newest_healthy(before)[0] if self._checkpoints is not None else None
        if on_disk:
            yield RestorePoint(on_disk, None)
        if in_memory is not None:  # the newer checkpoint is damaged
            yield RestorePoint(in_memory.step, in_memory)
        if on_disk == 0 and (not back or onset <= FARTHEST * back):
            yield RestorePoint(0, None)

    def unavailable_because(self, onset: int, back: int) -> str:
        """Why there is no state to go back to, in a sentence."""
        tags = self._checkpoints.tags() if self._checkpoints is not None else {}
        on_disk = {step for step, tag in tags.items() if tag == "healthy"}
        steps = sorted(step for step in on_disk | {*self.snapshots.steps} if step < onset)
        if not back or not steps:
            return f"there is no healthy state from before step {onset}"
        which = "none but the very beginning is" if steps[0] == 0 and onset >= back else "none is"
        return (
            f"of the healthy states, those of steps {', '.join(map(str, steps[-4:]))}, {which} at least {back} steps "
            f"before step {onset}; Checkpointing(keep=) keeps more of them"
        )

    def go_back(
        self, target: RestorePoint, others: Iterator[RestorePoint], number: int
    ) -> tuple[RestorePoint, CostSoFar]:
        """Restore the first state that every rank can restore. Gives that state and what has to be done again."""
        self._watch.catch_up()
        reasons = []
        for state in chain((target,), others):
            try:
                spent = self._ranks.agree(partial(self._restore, state))
            except SealegsError as error:
                reasons.append(f"{state}: {error}")
                continue
            self._awaited = None
            self.schedules.forget_from(state.step)
            self._give_up_after(state.step)
            self.gone_back_to = state.snapshot
            return state, CostSoFar(number - state.step) + self.went_on_from(spent)
        if self._ranks.world > 1:  # some ranks may have gone back, so that they differ now
            text = f"the ranks cannot go back together: {'; '.join(reasons)}"
            raise RunHalted(text, self._watch.verdict, self._watch.incident)
        raise Impossible("; ".join(reasons))

    def doubt_after(self, step: int) -> None:
        """Go back to no state that is later: not all ranks have held what they should since."""
        self._awaited = None
        self._give_up_after(step)

    def _give_up_after(self, step: int) -> None:
        self.snapshots.forget_after(step)
        self.health.forget_after(step)
        if self._checkpoints is not None:
            self._checkpoints.discard_after(step)

    def _is_newer_on_disk(self, step: int, before: int) -> bool:
        """Whether a newer healthy checkpoint is on disk, by its tag: a check would have to read all of it."""
        tags = self._checkpoints.tags() if self._checkpoints is not None else {}
        newest = max((saved for saved, tag in tags.items() if tag == "healthy" and saved <= before), default=-1)
        return self._ranks.gather(newest > step)[0]

    def _restore(self, target: RestorePoint) -> Mapping[str, float]:
        """Restore a state, or raise an error and change nothing. Gives what had led to it."""
        spent: Mapping[str, float]
        if target.snapshot is not None:
            self._restore_snapshot(target.snapshot)
            spent = target.snapshot.plain["spent"]
            return spent
        assert self._checkpoints is not None
        state = self._checkpoints.load(target.step, like=self._training.capture(with_frozen=True))
        self._training.restore(state)
        self._brought_back = self._training.also_in(state)
        self._watch.go_back(self._watch.judge_state_from(state.plain["guard"]["watch"]))
        spent = (state.plain["guard"].get("recovery") or {}).get("spent", {})  # older ones have none
        return spent

    def _restore_snapshot(self, snapshot: Snapshot) -> None:
        plain, training = snapshot.plain, self._training
        before = [copy.deepcopy(scheduler.state_dict()) for scheduler in training.schedulers], self._batches.position()
        also, also_before = self.snapshots.also_at(snapshot), states_of(training.also)
        try:
            self._batches.go_to(plain["data"])
            load_states(training.also, also)
            for scheduler, state in zip(training.schedulers, plain["schedulers"], strict=True):
                scheduler.load_state_dict(copy.deepcopy(state))
            self.snapshots.restore_tensors(snapshot)  # the last that can refuse
        except BaseException:
            for scheduler, state in zip(training.schedulers, before[0], strict=True):
                scheduler.load_state_dict(state)
            self._batches.go_to(before[1])
            load_states(training.also, also_before)
            raise
        self._brought_back = also
        restore_scale(training.scaler, plain["scaler"])
        restore_rng(plain["rng"])
        self._watch.go_back(plain["judging"])
