"""The inside of a guard, as a loop drives it: a step is decided, updated or skipped, and acted upon.

``Guard`` is the shell of a loop that is the user's own. The loops of frameworks call the halves of a step themselves:

    decide(loss)      measure, judge; nothing has changed yet
    update()          the weights change, unless it was decided that they do not
    finish_step()     recovery, checkpoints, a halt; the weights and the place in the data may go back
"""

import math
import socket
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sealegs.data.position import Batches
from sealegs.data.recut import recut_text
from sealegs.data.shares import rows_of_all, shared_order
from sealegs.detectors.collapse import JUDGED
from sealegs.errors import (
    ConfigError,
    FolderIncomplete,
    RankMissing,
    RanksChanged,
    RunEndedBadly,
    RunHalted,
    SourceError,
    StorageError,
)
from sealegs.guard_options import GuardOptions, refuse_strangers, several
from sealegs.record.writer import INCOMPLETE
from sealegs.recovery.global_batch import GlobalBatch
from sealegs.recovery.ledger import take_over_ledger
from sealegs.recovery.probe_isolation import ProbeIsolation
from sealegs.recovery.recomputation import EVERY, Recomputation, refusal
from sealegs.recovery.recovery import Recovery
from sealegs.recovery.replicas import copy_majority
from sealegs.recovery.restore_points import is_finite, not_finite
from sealegs.recovery.run_end import RunEnd
from sealegs.recovery.saving import Resumed, Saving
from sealegs.signals.attention import HeadLogits, attentions_of
from sealegs.signals.batch_hash import digest_of
from sealegs.signals.batch_tokens import BatchTokens
from sealegs.signals.collect import Signal, named_now
from sealegs.signals.collective import Collective
from sealegs.signals.groups import find_embeddings
from sealegs.signals.layout import Divided
from sealegs.signals.meter import HISTOGRAM_STEPS, Meter
from sealegs.signals.norms import Gradients
from sealegs.signals.ranks import MERGED, Ranks, without_exchange
from sealegs.signals.time_spent import Part
from sealegs.state.extra_state import not_held
from sealegs.state.frozen import size_of
from sealegs.state.live_settings import autocast_settings, batch_settings, precision_settings
from sealegs.state.resume_audit import AS_SAVED, ResumeChanges
from sealegs.state.snapshots import Snapshots
from sealegs.state.training_state import TrainingState
from sealegs.step.decision import UpdateDecision
from sealegs.step.gate import ROW
from sealegs.step.qk_clip import QkClip, over_limit, told_of
from sealegs.step.skip_way import SkipWay
from sealegs.step.step_inputs import StepInputs
from sealegs.step.timm_scheduler import TimmScheduler, counting
from sealegs.step.update import Call, Update, fuse, not_undone, reads_found_inf
from sealegs.vocabulary import Number, Row, Verdict
from sealegs.watch import Observer, Watch, level_of_the_loop, opened_on_all

RESERVED = frozenset(
    ("step", "qk_clip", "worst_tensor", "announced", "damaged_since", "culprit", "saving", *ROW, *MERGED)
)
"""Names in a row that are the guard's own."""

MISPLACED = "the loader was brought to a place, and says that it is at another one"

TURNS = 8
"""Steps that a guard must have made right after those of another one for both to be parts of one training."""

SHOWN_WITHIN = 32
"""Steps within which a forward pass is seen, if it can be."""

T = TypeVar("T")


class _UpdatedStep(NamedTuple):
    """What is still to be known of a step after its update."""

    tokens: int = 0
    loop_clips: bool = False
    is_recomputed: bool = False
    """Whether its batches were only computed for comparison."""
    probe: tuple[float, float | None, list[float]] | None = None
    """Loss and gradient norm of a batch that was only tried again, and the norm of each gradient."""


class _PendingUpdate(NamedTuple):
    """A step that is decided, and whose weights have not changed yet."""

    apply_or_skip: Callable[[], None]
    norms: Tensor | None
    """Of each gradient, or one number, that of all; None of a batch that was only tried again."""
    updated: _UpdatedStep


class LoopPort(Observer):
    """What stands between a training loop and everything that judges, records and recovers."""

    _newest: ClassVar["weakref.ref[LoopPort] | None"] = None
    """The one that decided a step last, of all in this process."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        options: GuardOptions,
        open_watch: Callable[..., Watch],
        *,
        has_folder: bool,
        callbacks: Sequence[object] = (),
        divided: Divided | None = None,
    ) -> None:
        """``open_watch(observer=self)`` may make the run's folder: it is called when what can be refused has been.

        ``callbacks`` are what a framework calls at each step; ``divided`` is what an engine says that divides the
        training among ranks by itself.
        """
        optimizers = several(optimizer)
        self._divided = divided
        if divided is None:
            refuse_strangers(model, optimizers)
        if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
            raise ConfigError("model: FullyShardedDataParallel hides its shards; use FSDP2, torch's fully_shard")
        if options.largest_logit is not None:
            if not options.telemetry.sample_every:
                raise ConfigError(
                    f"attention_logit={options.largest_logit:g}: only sampled steps look at logits, and there are none"
                )
            attentions_of(model)
        checkpointing = options.checkpointing
        if checkpointing.every and not has_folder:
            raise ConfigError(f"checkpoint_every={checkpointing.every}: there is no run folder to write to; give run=")
        self._fused = fuse(optimizers) if options.skipping.fuse else []
        steps_scheduler = not options.loop_steps_scheduler
        schedulers = tuple(counting(each, is_stepped=steps_scheduler) for each in options.schedulers)
        self._timm_schedulers = [each for each in schedulers if isinstance(each, TimmScheduler)]
        self._update = Update(optimizers, schedulers if steps_scheduler else (), options.scaler)
        self._callbacks = callbacks
        self._batches = options.batches()
        self._batches.on_misplaced = lambda how: self.watch.note("data-misplaced", text=f"{MISPLACED}: {how}")
        self._batches.on_recut = self._note_recut
        self._batches.on_share = self._note_share
        self._global_batch = GlobalBatch(options.elastic.learning_rate)
        self._training = training = TrainingState(
            model=model if divided is None else divided.held,
            optimizers=self._update.optimizers,
            schedulers=schedulers,
            scaler=self._update.scaler,
            data=self._batches,
            also=dict(checkpointing.also),
            frozen=options.frozen(model, self._update.optimizers) if divided is None else None,
        )
        if options.stores and divided is None:
            training.capture(with_frozen=True)  # what cannot be stored is refused now, before there is a folder
        snapshots = options.snapshots(training)
        self.number = 0
        """The number of the step that comes next."""
        self._model = model
        self._clip = options.clip_norm
        self._qk_clip = options.largest_logit
        self._rescaled = 0
        """Steps after which queries and keys were rescaled."""
        self._act = options.acts
        self._run_end = RunEnd()
        self.recovery: Recovery | None = None
        """What goes by the playbook, where there is one."""
        self._saving: Saving | None = None
        self._heads: HeadLogits | None = None
        """What looks at the logits of attention, where they are limited or may come to be."""
        self._is_refusal_told = False
        self._ranks = options.telemetry.ranks or Ranks()
        self.watch = opened_on_all(partial(open_watch, observer=self), self._ranks.timeout_s)
        self._spent = self.watch.spent
        try:
            self._assemble(options, snapshots, schedulers)
        except BaseException:
            with suppress(Exception):  # the error itself says more
                self._let_go()
            self.watch.close()
            raise

    def _assemble(self, options: GuardOptions, snapshots: Snapshots, schedulers: Sequence[Any]) -> None:
        """What needs the run's folder, and what a resume brings back."""
        training = self._training
        self._meter = Meter(
            self._model,
            self._update.optimizers,
            sample_every=options.telemetry.sample_every,
            ranks=self._ranks,
            activations=options.telemetry.activations,
            routers=options.telemetry.routers,
            spent=self._spent,
            divided=self._divided,
        )
        self._spent.follow(self._meter.device)
        self._tokens = BatchTokens(is_late=self._meter.device.type != "cpu") if find_embeddings(self._model) else None
        """The ids that steps have read, of a model that reads ids."""
        self.checkpoints = options.checkpoints(self.watch) if self._divided is None else None  # its engine writes them
        if self.checkpoints is not None:
            self.checkpoints.holders = lambda tensors: self._meter.layout.holders_of(tensors)
            self.checkpoints.take_over()
            if options.checkpointing.every:
                self.checkpoints.refuse_unshared()
        self.recovery = options.recovery(training, self.watch, self._batches, snapshots, self.checkpoints)
        if self.recovery is not None:
            self.recovery.can_watch_heads(self._cannot_watch_heads)
            if self._ranks.world > 1 and self._divided is None:
                self.recovery.can_copy_majority(self._copy_majority)
            if self._divided is not None:
                self.recovery.recorder.leave_out_states()
        self._is_layout_told = False
        self._look_at_layout()
        if options.watches_heads:
            self._cannot_watch_heads()
        if self.checkpoints is not None:
            self._saving = Saving(self.checkpoints, training, self.watch, every=options.checkpointing.every)
        self._update_decision = UpdateDecision(
            self._update,
            self.watch,
            act=self._act,
            world=self._meter.ranks.world,
            skip_way=SkipWay(options.skipping.way, agree=self._agreed),
        )
        self._inputs = StepInputs(self._meter, self._update, self._spent)
        self._recomputation = self._recomputes(options)
        self._told_share: dict[str, Any] = {}
        self._batch: dict[str, Signal] = {}
        """What is known of the batch that the step trains on."""
        self._logged: dict[str, Number] = {}
        """What a framework has logged since the last step."""
        self._gradients: Gradients | None = None
        """As they were before the loop clipped them."""
        self._loop_clips_at: float | None = None
        """The norm that it clips all of them to, where it said so."""
        self._pending: _PendingUpdate | None = None
        """A step that ``update`` is to end."""
        self._updated: _UpdatedStep | None = None
        """A step that was updated, and about which nothing has been done yet."""
        self._micro_batches = 0
        """Of the step under way, that were accumulated: all but the last."""
        self._untouched: ProbeIsolation | None = None
        """What batches that are tried again must leave as it was."""
        self._is_tried = False
        """Whether one of them has been, and what it changed is still to be put back."""
        self._unrecorded = 0
        """Steps in which something may still be seen that the manifest says."""
        self._first_batch: tuple[Any] | None = None
        self._turns = 0
        """Steps right after those of another guard."""
        self._has_policy = False
        """Whether a policy is trained for reward: then its loss is no measure of the weights."""
        self._is_paused = False
        self._was_saving = False
        """Whether a checkpoint has been written beside the loop since the last step was decided."""
        self._is_finished = False
        self._has_failed = False
        self._knows_its_step = not options.resume
        self.ended_badly = ""
        """Once it is over: why the run did not end well, in a sentence."""
        self.resumed: Resumed | None = None
        """What a resume has brought back."""
        self._changes: ResumeChanges | None = None
        """Of a resume that no step has followed yet: what the loop puts over what came back."""
        if options.resume and self._saving is not None:
            try:
                self.resumed, state = self._saving.resume(self.recovery, self._batches)
            except RanksChanged as error:
                self._refuse_ranks(error)
                raise
            self._knows_its_step = True
            if state is not None:
                self._go_on_with(state)
                self._changes = ResumeChanges(self._model, self._update.optimizers, schedulers)
        self._record_settings(options, schedulers)
        self._say_what_is_guarded()

    def _recomputes(self, options: GuardOptions) -> Recomputation | None:
        """What has batches computed again on another rank, where that is asked for and possible."""
        if not (asked := options.telemetry.recompute):
            return None
        if reason := refusal(self._model, self._meter):
            if self._ranks.world > 1:
                raise ConfigError(f"Telemetry.recompute: {reason}; leave it out")
            self.watch.note("no-recompute", step=self.number, reason=reason)
            return None
        return Recomputation(
            EVERY if asked is True else asked,
            self._training,
            self._meter,
            self._batches,
            note=self.watch.note,
            say=self.watch.say,
            spent=self._spent,
            timeout_s=self._ranks.timeout_s,
        )

    def _look_at_layout(self) -> None:
        """Where ranks hold different tensors, say what that means, once: no process alone can run an incident again."""
        reason = self._meter.layout.why_not_one
        if not reason or self._is_layout_told or self._divided is not None:
            return
        self._is_layout_told = True
        self.watch.note("parts-of-ranks", step=self.number, reason=reason)
        if self.recovery is not None:
            self.recovery.recorder.leave_out_states()

    def _copy_majority(self, ranks: Collective) -> str:
        """Make replicas equal again."""
        return copy_majority(self._meter.layout, self._update.optimizers, ranks)

    def _agreed(self, mine: bool) -> bool:
        """Whether it is so on every rank."""
        return all(Collective(self._ranks.timeout_s).gather(mine)) if self._meter.ranks.world > 1 else mine

    def _record_settings(self, options: GuardOptions, schedulers: Sequence[Any]) -> None:
        """Write down what the live objects show; what only a step shows follows."""
        if self.watch.record is None:
            return
        recorded = self.watch.recorded
        recorded.add_objects(self._model, self._update.optimizers, schedulers, options.scaler, options.clip_norm)
        if options.scaler is None:  # the guard would refuse gradients that somebody else has scaled
            recorded.add("precision", lambda: {"scaler": False})
        recorded.add("data", lambda: {"ranks": self._ranks.world})
        if options.checkpointing.every:
            recorded.add("operations", lambda: {"checkpoint_steps": options.checkpointing.every})
        recorded.write()
        self._unrecorded = SHOWN_WITHIN

    def _record_what_steps_show(self, tokens: int, batches: int) -> None:
        """Batch, accumulation and autocast, once they were seen."""
        self._unrecorded -= 1
        recorded, world = self.watch.recorded, self._ranks.world
        if self._first_batch is not None:
            (batch,), self._first_batch = self._first_batch, None
            recorded.add("data", lambda: batch_settings(batch))
            recorded.add("data", lambda: {"accumulation": batches})
            recorded.add("precision", lambda: {"addends": batches * world})
            recorded.add("data", lambda: {"batch_tokens": tokens} if tokens and world == 1 else {})
            recorded.write()
        if (seen := self._meter.autocast) is not None:
            self._unrecorded = 0
            weights = precision_settings(self._model).get("weights_dtype")
            recorded.add("precision", lambda: autocast_settings(seen[0], weights))
            recorded.write()

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """The batches of a loader; the record then says which of them a step saw, and recovery can pass some over."""
        if self._changes is not None:
            self._changes.look_at_random()
        try:
            batches = self._batches.over(loader)
        except RanksChanged as error:
            self._refuse_ranks(error)
            raise
        if self.goes_back and self._saving is not None and self._saving.last is None and self.number == 0:
            self.checkpoint()  # so that it can go back to the beginning
        if self._recomputation is not None:
            batches = self._recomputation.over(batches, lambda: self.number)
        self._between_steps()
        for batch in batches:
            number = self._batches.number
            is_redone = self._recomputation is not None and self._recomputation.is_redone
            self._batch = {} if number is None else {"batch_index": number}
            with self._spent.of("signals"):
                if digest := digest_of(batch):
                    self._batch["batch_hash"] = digest
                if self._unrecorded == SHOWN_WITHIN and self._first_batch is None:
                    self._first_batch = (batch,)
                if self._tokens is not None and not self._batches.is_probe and not is_redone:
                    self._tokens.handed_out(batch)
                if self.recovery is not None and not self._batches.is_probe and not is_redone:
                    self.recovery.handed_out(self.number, batch)
            is_of_another = self._recomputation is not None and self._recomputation.is_of_another
            part: Part = "recomputed" if is_of_another else "probes"
            with self._spent.of(part) if self._batches.is_probe else nullcontext():
                yield batch
            self._between_steps()

    def _note_share(self, told: dict[str, Any]) -> None:
        """Write down how ranks share the samples of an epoch; once, for a loop that makes a loader for each epoch."""
        if told != self._told_share:
            self._told_share = told
            text = "{ranks} ranks share {samples} samples, {rows} a batch; at the end of each epoch {used_twice} "
            text += "are used twice, and {left_out} are left out"
            self.watch.note("data-share", step=self.number, text=text.format(**told), **told)

    def _note_recut(self, told: Mapping[str, Any]) -> None:
        text = recut_text(told)
        self.watch.note("data-recut", step=self.number, text=text, **told)
        self.watch.say(text)

    def _refuse_ranks(self, error: RanksChanged) -> None:
        """Write down why these ranks cannot go on. A rank that left earlier might have the launcher end rank 0."""
        self._has_failed = True
        self.watch.note("ranks-refused", step=self.number, ranks=error.ranks, text=str(error))
        self._agreed(True)

    def accumulation(self, loader: Iterable[Any], planned: int) -> int:
        """How many batches of a loader keep the global batch of the process before."""
        shared = shared_order(loader)
        rows = rows_of_all(loader) if shared is None else shared.share.rows_of_all
        return planned if rows is None else self._global_batch.accumulation(rows, planned)

    def _note_global_batch(self) -> None:
        """Announce that a step has another number of samples than before a resume, in the step that is."""
        if (rows := self._batches.rows_of_all) is None or self._batches.is_probe:
            return
        if change := self._global_batch.look(rows, self._micro_batches + 1):
            self.watch.announce(change)

    @property
    def data(self) -> Batches:
        """Where the run is in its data: for those who carry a loop of somebody else's."""
        return self._batches

    @property
    def acts(self) -> bool:
        """Whether updates are left out, or only said to be bad."""
        return self._act

    @property
    def is_finished(self) -> bool:
        """Whether no step comes any more."""
        return self._is_finished

    @property
    def goes_back(self) -> bool:
        """Whether the playbook may bring the run back to an earlier state, and an earlier batch."""
        return self.recovery is not None and bool(self.recovery.playbook.rungs)

    def expect_logs(self) -> None:
        """The framework logs signals of its own, on every rank: ``take_logged`` will bring them. Before the first
        step."""
        self._meter.exchange(JUDGED)

    def take_logged(self, signals: Mapping[str, Number]) -> None:
        """What the framework has logged of the steps up to now: it stands in the row of the next step, as what an
        evaluation finds does, or after the last step in a row of its own.

        Of what is judged, several ranks take the mean over those that have it.
        """
        self._logged |= signals

    def trains_policy(self, why: str) -> None:
        """A policy is trained for reward, as ``why`` says. Its loss is about zero or of any sign, and may rise while
        the policy improves: no batch is tried again and nothing is taken back because of it. What is not finite is
        dealt with as ever."""
        if self._has_policy:
            return
        self._has_policy = True
        self.watch.note("loss-is-no-measure", step=self.number, reason=why)
        if self.recovery is not None:
            self.recovery.leave_the_loss()

    def measure_before_exchange(self, parameters: Iterable[Tensor], exchanged_by: str) -> None:
        """Measure this rank's own gradients as backward makes them, so that a rank at fault is named: for an engine
        that exchanges them by itself."""
        if self._meter.norms_before is not None:
            self._meter.norms_before.attach_to(parameters, exchanged_by)

    def unscale(self, optimizers: Iterable[Optimizer] | None = None) -> None:
        """Take the loss scale out of the gradients, if there is one and it is still in them.

        Those of the guard's optimizers, or of other ``optimizers`` that the same scaler is for.
        """
        self._update.unscale(optimizers)

    def before_clipping(self, norm: float | None = None) -> None:
        """The loop is about to clip by itself, to ``norm``: measure the gradients while they are whole.

        The next ``step`` or ``decide`` goes by that, names the tensor at fault, and clips nothing. A loop that clips in
        several calls may tell before each: they are whole before the first.
        """
        self._loop_clips_at = norm
        if self._gradients is not None and self._meter.holds(self._gradients):
            return
        with torch.no_grad(), self._spent.of("own"):  # whoever clips needs the norm
            self._update.unscale()
            self._note_global_batch()
            self._tighten()
            self._gradients = self._meter.read()
        if self._meter.ranks.world == 1:  # several judge what they have to, not what happens to be there
            with self._spent.of("verdicts"):
                self.watch.judge_arrived()

    def decide(
        self,
        loss: Tensor | None,
        *,
        grad_norm: Tensor | float | None = None,
        tokens: int | None = None,
        token_losses: Tensor | None = None,
        **signals: Signal,
    ) -> None:
        """The first half of ``step``; ``update`` is the second. For a loop that waits for its device between them: as
        long as that is busy, the host has time. The loop may clip between them, after ``before_clipping``.

        A learning rate or an announcement that comes between them is the next step's. A step that is never updated,
        because of an exception, is decided anew when it comes again.
        """
        self._spent.begin_step()
        with self._spent.of("signals"):
            self._decide(loss, grad_norm, tokens, token_losses, signals)

    def _decide(
        self,
        loss: Tensor | None,
        grad_norm: Tensor | float | None,
        tokens: int | None,
        token_losses: Tensor | None,
        signals: Mapping[str, Signal],
    ) -> None:
        self._take_turns()
        if self._pending is not None:
            self._take_back_decision()
            self._pending = None
        if not self._knows_its_step:
            raise ConfigError(
                "resume: there is no checkpoint of the guard's own (checkpoint_every=); restore it with "
                "load_state_dict, or say its step with guard.loop.resume_at"
            )
        if self._changes is not None:
            self._tell_what_came_back(self._changes)
        if reserved := RESERVED.intersection(signals):
            raise ConfigError(f"signals {sorted(reserved)}: the guard measures these itself; give others")
        before, self._gradients = self._gradients, None
        bound, self._loop_clips_at = self._loop_clips_at, None
        if self._recomputation is not None:
            if self._batches.number is None:
                raise ConfigError("Telemetry.recompute: it hands batches to other ranks; use guard.batches(loader)")
            if self._recomputation.after_pass(loss, self.number):
                self._pending = _PendingUpdate(self._update.discard, None, _UpdatedStep(is_recomputed=True))
                return
            if paused_s := self._recomputation.take_pause_s():
                self._inputs.pace.paused(paused_s)
                self._meter.forget_own_time()
        if self._batches.is_probe:
            self._pending = _PendingUpdate(self._update.discard, None, self._probed(loss, grad_norm, before))
            return
        if self.recovery is not None and self.recovery.playbook.rungs and self._batches.number is None:
            raise ConfigError(
                f"playbook={self.recovery.playbook.name}: it goes back in the data too; use guard.batches(loader)"
            )
        with torch.no_grad():
            if grad_norm is None:
                self._update.unscale()
            else:
                self._update.refuse_scaled()
            if before is None:
                self._note_global_batch()
                self._tighten()
            loop_clips = grad_norm is not None or before is not None
            clip = None if loop_clips else self._clip_now
            known = {**self._inputs.known_to_host(self.number, tokens), **self._batch, **self._beside(), **signals}
            logged, self._logged = self._logged, {}
            is_rewarded = "reward" in known or ("reward" in logged and self._ranks.world == 1)  # else ranks may differ
            if is_rewarded and not self._has_policy:
                self.trains_policy("a reward is logged")
            known |= {name: value for name, value in self._meter.alone(logged).items() if name not in known}
            if (norm := bound if loop_clips else clip) is not None:
                known["clip_norm"] = norm
            if self._update.normalises():
                known["normalised"] = 1.0
            if self._tokens is not None:
                self._tokens.begin_step(self.number, self._micro_batches + 1)
            try:
                seen = self._inputs.measured(self.number, loss, grad_norm, token_losses, known, before, logged)
            except RankMissing:
                self._has_failed = True  # at its end the run must not wait for that rank again
                raise
            self._look_at_layout()
            if seen.logits is not None and self._qk_clip_now is not None and self._act:
                assert self._heads is not None
                known["qk_clip"] = self._qk_clip_now
                self._update.qk_clip = QkClip(self._qk_clip_now, self._heads, seen.logits)
            elif self._heads is not None and self._heads.refused:
                self._refuse_heads(self._heads)
            with self._spent.of("verdicts"):
                apply_or_skip = self._update_decision.prepare_update(self.number, seen, known, clip)
        self._batch = {}
        self._pending = _PendingUpdate(apply_or_skip, seen.norms, _UpdatedStep(tokens or 0, loop_clips))

    def update(self) -> Verdict:
        """The second half of ``step``: the weights change, unless it was decided that they do not."""
        if self._pending is None:
            raise ConfigError("update: no step is decided; call decide(loss) before it, or step(loss) for both")
        (apply_or_skip, norms, updated), self._pending = self._pending, None
        with torch.no_grad():
            if norms is None:
                apply_or_skip()
                self._meter.get_ready(self.number)
            else:
                with self._spent.of("snapshots"):
                    if self._training.frozen is not None:
                        self._training.frozen.before_update()
                    if self.recovery is not None:
                        self.recovery.before_update(norms)
                    elif self.checkpoints is not None:
                        self.checkpoints.before_update()
                with self._spent.of("own"):
                    apply_or_skip()
                self.number += 1
        self._updated = updated
        return self.finish_step() if self._update.call is None else self.watch.verdict

    def finish_step(self) -> Verdict:
        """Act on what was found: recovery, checkpoints, a halt. Called by ``update``, or later by a framework.

        Nothing of a step may still be under way: weights, schedules and the place in the data may go back.
        """
        with self._spent.of("verdicts"):
            return self._finish_step()

    def _finish_step(self) -> Verdict:
        updated, self._updated = self._updated, None
        if updated is None:
            return self.watch.verdict
        batches, self._micro_batches = self._micro_batches + 1, 0
        if updated.is_recomputed:
            return Verdict(step=self.number)
        if self._recomputation is not None and updated.probe is None:
            self._recomputation.after_step(self.number, batches)
        if updated.probe is not None:
            assert self.recovery is not None
            self._is_tried = True
            self._go_on_at(self.recovery.probed(*updated.probe, self.number))
            return Verdict(step=self.number)  # a loop that prints what is skipped has printed it
        with torch.no_grad(), self._spent.of("signals"):
            self._meter.updated(self.number - 1)
            if why := self._meter.unseen_routers:
                self.watch.note("routers-unseen", step=self.number, reason=why)
            if self._unrecorded:
                self._record_what_steps_show(updated.tokens, batches)
        went_back = False
        if self.recovery is not None:
            step = self.recovery.after_step(
                self.number,
                tokens=updated.tokens,
                clip=self._clip_now,
                loop_clips=updated.loop_clips,
                batches=batches,
            )
            went_back = self._go_on_at(step)
        if self._saving is not None:
            self._saving.tell(self.number)
        for text in () if self._training.frozen is None else self._training.frozen.news():
            self.watch.note("thawed", step=self.number, text=text)
        if self._act and (halted := self.watch.halted):
            halted = replace(halted, instead="")
            is_in_weights = any(finding.signal == "params_finite" for finding in halted.findings)
            weights = not_finite(self._training.model, self.watch) if is_in_weights else ""
            text = f"the run is halted: {halted}{weights and f'; not finite: {weights}'}"
            raise RunHalted(text, halted, self.watch.incident)
        if self._saving is not None:
            self._write_restored()
            self._saving.after_step(self.number, went_back=went_back)
            if not self._training.also or self._batches.number is None:  # else when the loop asks for its next batch
                self._save_if_due()
        return self.watch.verdict

    def set_optimizer_call(self, call: Call) -> None:
        """For a framework that calls the optimizers in its own way: ``call`` gets an optimizer and what updates it.

        It is called where there is an update, and zeroes no gradients: that is the framework's, too. ``step`` then ends
        with the update, and ``finish_step`` is to be called when the framework's own step is over.
        """
        self._update.call = call

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around what is no training, an evaluation or a checkpoint: its time does not count as the step's."""
        if self._is_paused:  # by somebody around it, who counts this too
            yield
            return
        began = time.perf_counter()
        self._is_paused = True
        self.watch.rest()
        try:
            with self._spent.of("paused"):
                yield
        finally:
            self._is_paused = False
            self._inputs.pace.paused(time.perf_counter() - began)
            self._meter.forget_own_time()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Around each micro-batch but the last: gradients add up, and ranks do not exchange them.

        It also says how many batches a step takes, so that those of one can be tried again together.
        """
        self._micro_batches += 1
        with without_exchange(self._model):
            yield

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next verdicts depend on, as JSON values: to be saved in the user's checkpoints."""
        return self.state_later()()

    def state_later(self) -> Callable[[], dict[str, Any]]:
        """What gives the state of now, whenever it is called, on any thread: for those who seldom need it."""
        if self._pending is not None:  # whoever goes on from here has that step before it
            self._take_back_decision()
        watch, own = self.watch.state_later(), self._own_state()
        return lambda: {"watch": watch(), **own}

    def _own_state(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "next_batch": 0 if self._batches.number is None else self._batches.number + 1,
            **self._update_decision.state_dict(),
            "meter": self._meter.state_dict(),
            "ending": self._run_end.state_dict(),
            "recovery": None if self.recovery is None else self.recovery.state_dict(),
            "spent": self._spent.state_dict(),
            **({"global_batch": state} if (state := self._global_batch.state_dict()) else {}),
            **({"logged": self._logged} if self._logged else {}),
            **({} if self._recomputation is None else {"recomputation": self._recomputation.state_dict()}),
            **({"rescaled": self._rescaled} if self._rescaled else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state, bit for bit."""
        self._go_on_with(state)

    def resume_at(self, number: int, state: Mapping[str, Any] | None = None) -> None:
        """Go on at a step, with the state of a guard that was there, or without one."""
        if state is not None:
            self._go_on_with(state, number)
        else:
            self.number = number
            self._goes_on_from_here()

    def _go_on_with(self, state: Mapping[str, Any], number: int | None = None) -> None:
        """Go on from a saved state, at its own step or at that which somebody else counts."""
        if missing := sorted({"watch", "number", "next_batch", "meter"} - state.keys()):
            raise SourceError(f"the guard's state: there is no {missing[0]!r} in it; give what state_dict() gave")
        self.watch.load_state_dict(state["watch"])
        self._rescaled = state.get("rescaled", 0)
        self._watch_heads_if_limited()
        self.number = state["number"] if number is None else number
        self._goes_on_from_here()
        if self._batches.number is None:
            self._batches.count_from(state["next_batch"])
        self._global_batch.load_state_dict(state.get("global_batch", {}))
        self._update_decision.load_state_dict(state)
        self._meter.load_state_dict(state["meter"])
        self._meter.get_ready(self.number)
        self._logged = dict(state.get("logged", {}))
        if self._recomputation is not None:
            self._recomputation.load_state_dict(state.get("recomputation", {}), self.number)
        if state.get("ending") is not None:  # older states have none
            self._run_end.load_state_dict(state["ending"])
        record = self.watch.record
        left_off_at, had_finished = (None, False) if record is None else (record.left_off_at, record.had_finished)
        self._spent.load_state_dict(state.get("spent", {}), left_off_at, was_down=not had_finished)
        if self.recovery is not None:
            self.recovery.load_state_dict(state.get("recovery"), self.number)

    def give_up_step(self) -> None:
        """The step under way is not decided: its gradients are dropped, its batches are passed over, no weight changes.

        For a loop whose engine finds only after the backward pass that a step does not count.
        """
        self._gradients = self._loop_clips_at = None
        self._batch = {}
        self._micro_batches = 0
        self._update.discard()
        if self.recovery is not None:
            self.recovery.recorder.forget_from(self.number)  # its number comes again, with other batches

    def heal_from(self, state: Mapping[str, Any], ledger: Mapping[str, Any] | None) -> None:
        """Go on as another replica does that went on without this one: with its memory and its ledger. The weights are
        the other's already."""
        self._go_on_with(state)
        if self.recovery is not None and ledger is not None:
            step = int(min(self.number, self.recovery.adopt(ledger)))
            if self.checkpoints is not None:
                self.checkpoints.discard_after(step, f"other replicas went on from step {step}")

    def take_over_ledger(self) -> None:
        """What was done to the run before, where its folder tells: no rung of the playbook twice."""
        take_over_ledger(self.watch, self._batches, None if self.recovery is None else self.recovery.take_over)
        self._watch_heads_if_limited()

    def _goes_on_from_here(self) -> None:
        """Whatever was kept of later steps, or had to be done about them, belongs to another line."""
        self._knows_its_step = True
        self._pending = None
        self.watch.halted = None
        for each in self._timm_schedulers:
            each.begin_at(self.number)
        if self.checkpoints is not None:
            self.checkpoints.discard_after(self.number, f"the run went on from step {self.number}")
        if self.recovery is not None:
            self.recovery.forget_after(self.number)

    def ask(self, *words: str, by: str = "code") -> None:
        """What ``sealegs do`` asks for, from code: ``guard.ask("rollback", "100")``. Needs a playbook, be it observe.

        On several ranks call it on all of them, at the same step.
        """
        if self._pending is not None:
            raise ConfigError(f"ask {' '.join(words)}: a step is decided and not updated yet; ask between two steps")
        if self.recovery is None:
            raise ConfigError(f"ask {' '.join(words)}: there is no playbook; give one, be it Playbook.observe()")
        self._go_on_at(self.recovery.ask(self.number, words, by=by), is_asked=True)

    def checkpoint(self, *, wait: bool = False) -> bool:
        """Write what is needed to run the next step to the run folder; beside the training, unless it is to wait.

        False, where one that was begun before is still being written.
        """
        if self._saving is None:
            raise ConfigError("checkpoint: the guard writes none; give it checkpoint_every= and a run folder")
        with self.paused(), self._spent.of("checkpoints"):
            is_begun = self._saving.save(self.number, self.state_dict, wait=wait)
        self._was_saving |= is_begun and not wait
        if is_begun and self.recovery is not None:
            self.recovery.saved(self.number, was_waited_for=wait)
        return is_begun

    def note_resume(self, **details: Any) -> None:
        """Record what a resume has brought back, with ``details`` of what is new in this process."""
        assert self.resumed is not None
        told = asdict(self.resumed)
        del told["audit"]  # which follows at the first step
        self.watch.note("resume", step=self.number, **told, **details)

    def save_last(self) -> None:
        """Leave a checkpoint to go on from with the next step, unless there is one: at the end of a loop."""
        if self._saving is not None:
            self._saving.finish(self.number)
        if self._saving is None or self._saving.last != self.number:
            self.checkpoint(wait=True)
        elif self.recovery is not None:  # it was begun beside the loop, and no step will come of it either
            self.recovery.saved(self.number, was_waited_for=True)

    def close(self) -> None:
        """Finish, and let go of the folder and of the model. ``Guard.close`` says what is warned of."""
        try:
            self.finish()
            if (self.ended_badly or self.watch.missing) and not self.watch.has_ended:
                self.end()
            self._say_what_it_cost()
        finally:
            self.watch.close()

    def _say_what_it_cost(self) -> None:
        """Record the stability tax, unless an event about the end has, and print it."""
        tax = self.watch.tax
        if tax.steps and not self.watch.has_ended:
            self.watch.note("stability-tax", step=self.number, tax=tax.to_plain(), text=str(tax))
        if tax.steps:
            self.watch.say(str(tax))
        if self._rescaled:
            self.watch.say(f"queries and keys of attention were rescaled after {self._rescaled} steps")

    def end(self, **told: Any) -> None:
        """The loop has come to its end: finish, and say in the record how; loudly where the run is not well."""
        self.finish()
        reason = {"reason": "ended-badly", "why": self.ended_badly} if self.ended_badly else {"reason": "finished"}
        missing = self.watch.missing
        with suppress(StorageError) if missing else nullcontext():  # the disk may be why
            self.watch.note("end", step=self.number, **reason, **told)
        if missing:
            warnings.warn(f"{INCOMPLETE}: {missing}", FolderIncomplete, stacklevel=level_of_the_loop())
        if self.ended_badly:
            warnings.warn(f"the run ended badly: {self.ended_badly}", RunEndedBadly, stacklevel=level_of_the_loop())

    def fail(self, error: BaseException) -> None:
        """The loop has ended with an error: finish, and say so in the record."""
        self._has_failed = True
        with suppress(Exception):  # a disk or a device may be what failed; the error itself says more
            self.finish()
        self.watch.fail(error)

    def finish(self) -> None:
        """Wait for the last verdicts, checkpoints and capsules, and write them: no step comes after it."""
        if self._is_finished:
            return
        self._is_finished = True
        try:
            if not self._has_failed:  # else the last step may have been left in the middle
                self._between_steps()
                self._save_what_was_put_off()
                self._logged |= self._ranks_at_the_end()
                if self._logged:
                    self.watch.submit(self.number, dict(self._logged))
                    self._logged = {}
            is_one_left = self._meter.ranks.world == 1  # ranks that have failed cannot be asked
            if self._saving is not None and (is_one_left or not (self._has_failed or sys.exception())):
                self._saving.wait_for_room()
                self._write_restored()
        except BaseException as error:
            if not self._has_failed:
                self.fail(error)
            raise
        finally:
            self._let_go()
        if self._saving is not None:
            self._saving.finish(self.number)
        self.watch.catch_up()
        self.watch.lost_folder()
        if not self._has_failed:
            self.ended_badly = self._what_is_not_well()

    def _ranks_at_the_end(self) -> dict[str, float]:
        """Whether the ranks have parted since they were compared last; nothing where they have not, or do not come."""
        if sys.exception():
            return {}
        try:
            return self._meter.ranks_apart(self.number)
        except RankMissing:
            self._has_failed = True  # nothing else may wait for that rank
            return {}

    def _let_go(self) -> None:
        """Of the model, which has hooks in some cases, and of what recovery has open."""
        self._meter.close()
        if self.recovery is not None:
            self.recovery.close()

    # What the watch calls: a row on its way to the record.

    def complete(self, row: Row) -> Row:
        """Its numbers have arrived: tensors get their names."""
        return self._meter.named(row)

    def rest_of(self, row: Row, verdict: Verdict) -> Row:
        """Something is wrong at its step: the next ones are sampled. So is this one, where the host has decided before
        the update; where the device has, weights and gradients are those of a later step by now."""
        is_search_for_scale = verdict.word == "SKIP" and not verdict.skips_in_a_row  # which is as it should be
        if is_search_for_scale:
            return {}
        step = int(row["step"])
        self._meter.incident_at(step)
        if "gate_closed" in row:
            return {}
        with torch.no_grad(), self._spent.of("signals"):
            return named_now(self._meter.rest_of(step))

    def trim(self, row: Row, verdict: Verdict) -> Row:
        """It is judged. Every step has a largest gradient, a histogram, an embedding's output and tokens; they are news
        when something is wrong."""
        if "loss" not in row:
            return row
        if "culprit" in row:  # the norm is ours, and not finite only where a gradient is not
            row = {**row, "grads_finite": float(math.isfinite(float(row["grad_norm"])))}
        step = int(row["step"])
        is_wrong = verdict.word != "GO"
        is_detailed = is_wrong or "param_norm" in row or self._meter.is_near_incident(step)
        if self._tokens is not None:
            tokens = self._tokens.take(step, wanted=is_detailed)
            row = {**row, **{name: value for name, value in tokens.items() if name not in row}}
        if is_wrong:
            return row
        dropped = {"culprit"} if step % HISTOGRAM_STEPS == 0 else {"culprit", "token_loss_histogram"}
        if not is_detailed:
            dropped |= {name for name in row if name.startswith("activation_norm/")}
        return {name: value for name, value in row.items() if name not in dropped}

    def recorded(self, row: Row, verdict: Verdict) -> None:
        """It is written: incidents are followed, and recovery takes it as evidence."""
        self._run_end.add_row(row, verdict)
        self._spent.saw(row, is_skipped=self._act and not verdict.go)
        self._note_rescaled(row, verdict)
        if self.recovery is not None:
            self.recovery.queue_row(row, verdict)

    @property
    def missing(self) -> tuple[str, ...]:
        """Checkpoints and capsules that could not be written."""
        checkpoints = () if self._saving is None else self._saving.missing
        return (*checkpoints, *(() if self.recovery is None else self.recovery.recorder.missing))

    # Between steps.

    def _take_turns(self) -> None:
        """Guards whose steps take turns train models that depend on each other, as the two of a GAN do: what one loses
        the other wins, so a loss that rises is no damage, and one that goes back alone parts from the other."""
        other, LoopPort._newest = LoopPort._newest and LoopPort._newest(), weakref.ref(self)
        if other is None or other is self or self._turns > TURNS:
            return
        self._turns += 1
        if self._turns > TURNS:
            self.watch.note("one-of-several", step=self.number, reason="its steps and another guard's take turns")
            if self.recovery is not None:
                self.recovery.stand_back()

    @property
    def _is_halted(self) -> bool:
        is_over = self.watch.halted is not None or (self.recovery is not None and self.recovery.is_over)
        return is_over and self._act

    def _what_is_not_well(self) -> str:
        if self._is_halted:
            return ""  # which was raised
        if self.number and not is_finite(self._training.model):
            return "a weight is not finite"
        is_of_the_data = self.recovery is not None and self.recovery.found_sound
        is_no_measure = self._has_policy or self._turns > TURNS
        return "" if is_of_the_data or is_no_measure else self._run_end.what_is_wrong(self.number)

    def _between_steps(self) -> None:
        """The loop has done all that it does in a step, and asks for a batch: what it keeps of its own is at rest."""
        self._gradients = self._loop_clips_at = None  # of a batch that was given up after it was looked at
        if self._is_tried and self._untouched is not None:
            self._untouched.put_back(self._training)
        self._is_tried = False
        if not self._batches.will_repeat:
            self._untouched = None
        elif self._untouched is None:
            self._untouched = ProbeIsolation.of(self._training)
        if self.recovery is not None:
            self.recovery.between_steps()
        if self._training.also:
            self._save_if_due()

    def _save_if_due(self) -> None:
        # later, where one is still being written; several ranks must ask each other, which `checkpoint` does
        if self._recomputation is not None and self._recomputation.is_under_way:
            return  # batches were read that are not trained on yet
        is_busy = self._is_saving and self._meter.ranks.world == 1
        if self._saving is not None and self._saving.is_due and not is_busy:
            self.checkpoint()

    def _save_what_was_put_off(self) -> None:
        """A checkpoint that was due while another was being written, at the end of a run. Not while an error ends it:
        its step may have been left in the middle, and ranks that have failed cannot be asked."""
        if self.checkpoints is not None and not self._is_halted and sys.exception() is None:
            self.checkpoints.wait()
            self._save_if_due()

    @property
    def _is_saving(self) -> bool:
        return self.checkpoints is not None and self.checkpoints.is_writing

    def _beside(self) -> dict[str, Signal]:
        """Whether a checkpoint was being written since the last step: the thread takes time from the loop.

        Each rank says so of itself, rank 0 in the record: they write at about the same time, and it decides nothing.
        """
        is_saving = self._is_saving
        was_saving, self._was_saving = self._was_saving, is_saving
        if is_saving or was_saving:  # the thread takes time from this rank
            self._meter.forget_own_time()
        return {"saving": 1.0} if is_saving or was_saving else {}

    def _take_back_decision(self) -> None:
        """A step was decided and has not been updated: nothing was skipped, and it may come again."""
        self.watch.forget_skip()
        self._update_decision.forget()

    def _probed(self, loss: Tensor | None, grad_norm: Tensor | float | None, before: Gradients | None) -> _UpdatedStep:
        """What a batch that was healthy before shows now: it is looked at, and nothing is learned."""
        with torch.no_grad():
            if before is None and self._update.scaler is None:
                self._tighten()  # as in a step: its norms are what these are compared with
            return _UpdatedStep(probe=self._inputs.probed(loss, grad_norm, before))

    def _go_on_at(self, step: int | None, *, is_asked: bool = False) -> bool:
        """The run went back to a step, if it did: what is measured and decided between steps begins anew there.

        Who has asked for it may end the run there.
        """
        if step is None:
            return False
        self._untouched = None  # all of it is that of the step now
        self._logged = {}  # of steps that the run has given up
        self._spent.went_back(self.number - step)
        self._run_end.went_back(0 if is_asked else self.number)
        self.number = step
        if self.recovery is not None:
            self.recovery.went_to(step)
        self._update_decision.forget()
        if self._recomputation is not None:
            self._recomputation.went_to(step)
        self._meter.load_state_dict({"last_change": None})
        self._meter.get_ready(step)
        self._inputs.pace.forget_step()
        self._meter.forget_own_time()
        self._keep_restored()
        return True

    def _keep_restored(self) -> None:
        """Have the snapshot written that the run has just gone back to, where it writes checkpoints: a run that is
        killed now loses its memory."""
        capture = None if self.recovery is None else self.recovery.restored_snapshot()
        if self._saving is not None and capture is not None:
            self._saving.keep_restored(self.number, capture, self.state_dict())
            self._write_restored()

    def _write_restored(self) -> None:
        """Write such a snapshot; later, where a checkpoint is still being written."""
        assert self._saving is not None
        if not self._saving.keeps_restored:  # nearly always, and a pause would put the watchdog to sleep at every step
            return
        with self.paused(), self._spent.of("checkpoints"):
            step = self._saving.write_restored(self.number)
        if step is not None and self.recovery is not None:
            self._was_saving = True
            self.recovery.saved(step, is_proven=True)

    def _cannot_watch_heads(self) -> str:
        """Begin to look at the logits of attention, if nobody has yet; why that cannot be, or nothing."""
        try:
            self._heads = self._meter.watch_heads()
        except ConfigError as error:
            return str(error)
        return self._heads.refused

    def _watch_heads_if_limited(self) -> None:
        """What the process before has limited stays so."""
        if self._heads is None and self._qk_clip_now is not None:
            self._cannot_watch_heads()

    def _refuse_heads(self, heads: HeadLogits) -> None:
        """A forward pass has shown that the model's attention is not understood."""
        if self._qk_clip is not None:
            raise ConfigError(f"attention_logit={self._qk_clip:g}: {heads.refused}")
        if not self._is_refusal_told:
            self._is_refusal_told = True
            self.watch.note("qk-clip-refused", step=self.number, reason=heads.refused)

    def _note_rescaled(self, row: Row, verdict: Verdict) -> None:
        """Write down which heads were rescaled after a step, or would have been in shadow mode."""
        numbers = None if self._heads is None else self._heads.arrived.pop(int(row["step"]), None)
        limit = row.get("qk_clip", self._qk_clip if not self._act else None)
        if numbers is None or limit is None or not verdict.go:
            return
        assert self._heads is not None
        if over := over_limit(self._heads, numbers, float(limit)):
            self._rescaled += self._act
            told = told_of(over, float(limit))
            self.watch.note("qk-clip", step=int(row["step"]), number=self._rescaled, **told, acted=self._act)

    @property
    def _qk_clip_now(self) -> float | None:
        lowered = self.recovery.adjustments.qk_clip if self.recovery is not None else None
        return min((limit for limit in (self._qk_clip, lowered) if limit is not None), default=None)

    @property
    def _clip_now(self) -> float | None:
        tightened = self.recovery.adjustments.clip if self.recovery is not None else None
        return min((limit for limit in (self._clip, tightened) if limit is not None), default=None)

    def _tighten(self) -> None:
        """The margins that recovery has taken back, in this step, and the learning rate that goes with its samples."""
        factors = {} if self.recovery is None else self.recovery.adjustments.factors_at(self.number)
        if (factor := self._global_batch.factor) != 1.0:
            factors["lr"] = factors.get("lr", 1.0) * factor
        self._update.factors = factors
        if self.recovery is None:
            return
        if (limit := self.recovery.adjustments.clip_value) is not None:
            torch.nn.utils.clip_grad_value_(self._model.parameters(), limit)

    def _tell_what_came_back(self, changes: ResumeChanges) -> None:
        """At the first step after a resume: what was restored, and what the loop has changed since."""
        assert self.resumed is not None
        self._changes = None
        parts = dict(self.resumed.audit)
        if parts.get("data position") == AS_SAVED:  # which says where it was sent: the loader has gone there since
            parts["data position"] = self._batches.misplaced or AS_SAVED
        self.watch.note(
            "resume-audit",
            step=self.number,
            checkpoint=self.resumed.checkpoint,
            as_saved=[name for name, told in parts.items() if told == AS_SAVED],
            not_as_saved={name: told for name, told in parts.items() if told != AS_SAVED},
            changed=changes.since(),
        )

    @property
    def instead_of_halt(self) -> str:
        """What becomes of a run whose verdict is HALT, if it is not ended by that."""
        if not self._act:
            return "it would be halted: shadow mode, nothing is done"
        if self.recovery is not None and self.recovery.playbook.rungs:
            return f"playbook {self.recovery.playbook.name} decides"
        return ""

    def _left_out(self) -> dict[str, int] | None:
        """How much of the model is frozen, and in no snapshot or checkpoint."""
        if self._training.frozen is None or not (frozen := self._training.frozen.candidates()):
            return None
        return {"frozen_tensors": len(frozen), "bytes": size_of(frozen.values())}

    def _hosts(self) -> list[dict[str, str]]:
        """Where each rank runs, so that the one at fault can be told to a launcher."""
        mine = {"host": socket.gethostname(), "device": str(self._meter.device)}
        return Collective(self._ranks.timeout_s).gather(mine) if self._meter.ranks.world > 1 else [mine]

    def _say_what_is_guarded(self) -> None:
        """What a skip can do here, and what it cannot: said once, before it matters."""
        self.watch.note(
            "guard",
            step=self.number,
            act=self._act,
            clip=self._clip,
            **({} if self._qk_clip is None else {"qk_clip": self._qk_clip}),
            optimizers=[type(optimizer).__name__ for optimizer in self._update.optimizers],
            skips_on_the_device=all(map(reads_found_inf, self._update.optimizers)),
            fused_by_the_guard=self._fused,
            not_undone_by_a_skip=not_undone(self._model),
            not_restored=[]
            if self._divided is not None  # the hooks are its engine's
            else not_held(self._model, self._update.optimizers, self._training.also, self._callbacks),
            left_out_of_states=self._left_out(),
            playbook=self.recovery.playbook.name if self.recovery is not None else None,
            ranks=self._meter.ranks.world,
            hosts=self._hosts(),
            norms_of_each_rank=before.attached_to if (before := self._meter.norms_before) else None,
        )
