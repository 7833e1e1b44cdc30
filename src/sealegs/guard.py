"""The shell around the user's loop: takes a loss that was backpropagated, decides, updates or skips, writes it down."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from sealegs.detectors.spike import WIDENED_STEPS, Spike
from sealegs.errors import ConfigError, RunHalted, SourceError
from sealegs.record.schema import CHECKPOINTS, MANIFEST
from sealegs.record.writer import RunWriter
from sealegs.recovery.checkpoints import Checkpoints, Damage
from sealegs.recovery.data import Batches
from sealegs.recovery.playbook import Playbook
from sealegs.recovery.recorder import BUDGET
from sealegs.recovery.snapshots import Snapshots
from sealegs.recovery.state import Trainee
from sealegs.recovery.together import Together
from sealegs.recovery.treatment import Recovery, read_books
from sealegs.recovery.update import Update
from sealegs.signals.activations import ActivationSampler
from sealegs.signals.agree import MERGED, Ranks
from sealegs.signals.collect import Signal, waited_for
from sealegs.signals.digest import digest_of
from sealegs.signals.gate import ROW, Gate
from sealegs.signals.measure import HISTOGRAM_STEPS, Meter, Seen
from sealegs.vocabulary import Row, Verdict
from sealegs.watch import Watch

LAG = 2
"""Steps after which several ranks look at what their devices decided."""
NO_STEP = -1
"""The number of what is measured between two steps."""
RESERVED = frozenset(("step", "worst_tensor", "announced", "culprit", *ROW, *MERGED))
"""Names in a row that are the guard's own."""

T = TypeVar("T")


class Guard:
    """Keeps a training loop from applying updates that would damage it. Wraps neither model nor optimizer.

    >>> import sealegs, tempfile, torch
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with sealegs.Guard(model, optimizer, run=f"{folder}/a1", clip=1.0) as guard:
    ...         for batch in guard.batches(torch.randn(10, 8, 4)):
    ...             loss = model(batch).square().mean() + (float("nan") if guard.number == 6 else 0.0)
    ...             loss.backward()
    ...             verdict = guard.step(loss)
    ...             if not verdict.go:
    ...                 print(verdict)
    step 6  SKIP  loss is not finite: nan  in weight  skipped 1 of 10
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        run: str | Path | RunWriter | Watch | None,
        scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
        clip: float | None = None,
        scaler: GradScaler | None = None,
        act: bool = True,
        sample_every: int = 10,
        resume: bool | Literal["auto"] = False,
        activations: ActivationSampler | None = None,
        ranks: Ranks | None = None,
        playbook: Playbook | None = None,
        checkpoint_every: int = 0,
        keep_checkpoints: int = 3,
        snapshot_every: int = 50,
        snapshot_memory: float | None = None,
        capsule_bytes: float = BUDGET,
        skip: Sequence[tuple[int, int]] = (),
    ) -> None:
        """``run`` is the folder to record into; a ``Watch`` where its options are wanted; None to record nothing.

        Several optimizers are updated together or not at all. ``clip`` is the largest global gradient norm; leave it
        out to clip yourself, and hand the norm to ``step``. ``act=False`` is shadow mode: everything is decided and
        written down, nothing is skipped or halted. Every ``sample_every`` steps weights, moments, updates and
        activations are measured too; 0 never does; ``activations`` is a sampler with other options. In a process group
        make a guard on every rank; ``ranks`` has the timeout for those that do not come.

        ``playbook`` says what is done about trouble that skipping does not cure; it needs ``batches``. Every
        ``checkpoint_every`` steps a checkpoint is written to the run folder, beside the training (0: none), and every
        ``snapshot_every`` steps one is kept in memory, two in all, in ``snapshot_memory`` bytes at most. ``resume``
        then brings everything back that the newest checkpoint to trust has; ``"auto"`` resumes a run that is there and
        begins one that is not, as a job needs that is started again by itself. ``skip`` are ranges of batches never to
        train on.

        With a playbook, ``Playbook.observe()`` for one that does nothing, an incident leaves a capsule in the folder,
        from which ``sealegs replay`` runs it again: the last batches, and a state from before it, a snapshot if there
        are any (``snapshot_memory`` turns them on where the playbook does not), else a checkpoint. ``capsule_bytes``
        are the most that all of them may take on disk; 0 writes none.
        """
        _refuse(
            ("clip", clip, clip is None or clip > 0, "the largest gradient norm, above 0; leave it out to clip none"),
            ("sample_every", sample_every, sample_every >= 0, "a number of steps, or 0 for never"),
            ("checkpoint_every", checkpoint_every, checkpoint_every >= 0, "a number of steps, or 0 for never"),
            ("keep_checkpoints", keep_checkpoints, keep_checkpoints >= 1, "how many of the newest, at least 1"),
            ("snapshot_every", snapshot_every, snapshot_every >= 1, "a number of steps, at least 1"),
            ("snapshot_memory", snapshot_memory, (snapshot_memory or 0) >= 0, "bytes for both snapshots together"),
            ("capsule_bytes", capsule_bytes, capsule_bytes >= 0, "bytes on disk for all incidents, or 0 for none"),
            ("skip", skip, all(map(_is_range, skip)), "pairs of batch numbers, the first and one after the last"),
            ("playbook", playbook, playbook is None or isinstance(playbook, Playbook), "Playbook.standard(), or None"),
        )
        if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
            raise ConfigError("model: FullyShardedDataParallel hides its shards; use FSDP2, torch's fully_shard")
        if checkpoint_every and (run is None or (isinstance(run, Watch) and run.folder is None)):
            raise ConfigError(f"checkpoint_every={checkpoint_every}: there is no run folder to write to; give run=")
        if resume == "auto":
            resume = _has_begun(run)
        has_rungs = playbook is not None and bool(playbook.rungs)
        self._update = Update(_several(optimizer), _several(scheduler), scaler)
        requeues = playbook is not None and playbook.requeues
        self._batches = Batches(skipped=skip, must_reposition=has_rungs, deferred=requeues)
        self._trainee = Trainee(
            model=model,
            optimizers=self._update.optimizers,
            schedulers=self._update.schedulers,
            scaler=self._update.scaler,
            data=self._batches,
        )
        if checkpoint_every or playbook is not None:
            self._trainee.capture()  # what cannot be stored is refused now, before there is a folder
        snapshots = Snapshots(
            model,
            self._update.optimizers,
            every=snapshot_every,
            memory=snapshot_memory if has_rungs and act else snapshot_memory or 0,
        )
        self.watch = run if isinstance(run, Watch) else Watch(run, resume=resume)
        self.watch.acts = act
        self.number = 0
        """The number of the step that comes next."""
        self._model = model
        self._clip = clip
        self._act = act
        self._meter = Meter(
            model,
            self._update.optimizers,
            sample_every=sample_every,
            ranks=ranks or Ranks(),
            activations=activations,
        )
        self.watch.complete, self.watch.trim = self._meter.named, self._trimmed
        folder = self.watch.folder
        self._checkpoint_every = checkpoint_every
        self._is_checkpoint_due = False
        self._is_finished = False
        self.last_checkpoint: int | None = None
        """The step of the last one that was written, or is being written."""
        self.checkpoints: Checkpoints | None = None
        if folder is not None and (checkpoint_every or playbook is not None):
            self.checkpoints = Checkpoints(folder / CHECKPOINTS, keep=keep_checkpoints, keep_first=has_rungs)
        self.recovery: Recovery | None = None
        if playbook is not None:
            if has_rungs and not self.watch.states_of(Spike):
                raise ConfigError(f"playbook={playbook.name}: it goes by the calibrated rules; leave rules= out")
            self.recovery = Recovery(
                playbook=playbook,
                trainee=self._trainee,
                watch=self.watch,
                batches=self._batches,
                snapshots=snapshots,
                checkpoints=self.checkpoints,
                folder=folder if self.watch.record is not None else None,
                act=act,
                capsule_bytes=capsule_bytes,
            )
        self._gate: Gate | None = None
        self._saved_gate: Any = None
        self._are_rules_known = [spike.signal for spike, _ in self.watch.states_of(Spike)] == ["loss", "grad_norm"]
        self._coarse_left = 0
        self._knows_its_step = not resume
        self._batch: dict[str, Signal] = {}
        self._last_step_at: float | None = None
        self._tokens, self._tokens_since = 0, time.perf_counter()
        self.resumed: Resumed | None = self._resume() if resume and self.checkpoints is not None else None
        """What a resume has brought back."""
        self._say_what_is_guarded()

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """The batches of a loader; the record then says which of them a step saw, and recovery can pass some over."""
        batches = self._batches.over(loader)
        if self.number == 0 and self.last_checkpoint is None and self._begins_with_a_checkpoint:
            self.checkpoint()
        for batch in batches:
            number = self._batches.number
            self._batch = {} if number is None else {"batch_index": number}
            if digest := digest_of(batch):
                self._batch["batch_hash"] = digest
            if self.recovery is not None and not self._batches.is_probe:
                self.recovery.handed_out(self.number, batch)
            yield batch

    def step(
        self,
        loss: Tensor,
        *,
        grad_norm: Tensor | float | None = None,
        tokens: int | None = None,
        token_losses: Tensor | None = None,
        **signals: Signal,
    ) -> Verdict:
        """End a step: norms, verdict, clipping, optimizer, scheduler, zeroed gradients.

        ``loss`` is that of the whole step, already backpropagated; with accumulation, the sum of what was
        backpropagated. ``grad_norm`` is for those who clip themselves: the norm *before* clipping. ``tokens`` were
        trained on in this step; ``token_losses`` are theirs, for a histogram. Further ``signals`` go into the record.

        Gives the newest verdict that is known: of this step on the CPU, of one or two steps before on a GPU, where
        this step's has been decided on the device (``verdict.step`` says which). Raises ``RunHalted`` when the budget
        of skips is spent or the weights are not finite.
        """
        if not self._knows_its_step:
            raise ConfigError("resume=True: restore the guard with load_state_dict, or say its step with go_on")
        if reserved := RESERVED.intersection(signals):
            raise ConfigError(f"signals {sorted(reserved)}: the guard measures these itself; give others")
        if self._batches.is_probe:
            return self._probe(loss, grad_norm)
        if self.recovery is not None and self.recovery.playbook.rungs and self._batches.number is None:
            raise ConfigError(
                f"playbook={self.recovery.playbook.name}: it goes back in the data too; use guard.batches(loader)"
            )
        with torch.no_grad():
            if grad_norm is None:
                self._update.unscale()
            else:
                self._update.refuse_scaled()
            self._tighten()
            known = self._known(tokens) | self._batch | signals
            step_s = self._since_last_step()
            if step_s is not None and self._meter.ranks.world == 1:  # else the slowest rank's
                known["step_s"] = step_s
            seen = self._meter.see(
                self.number,
                _number(loss, "loss", self._meter.device),
                None if grad_norm is None else _number(grad_norm, "grad_norm", self._meter.device).double(),
                step_s=step_s,
                token_losses=token_losses,
                loss_scale=known.get("loss_scale"),
            )
            if seen.gradients is not None and not seen.gradients.names:
                raise ConfigError("no parameter has a gradient: call loss.backward() before guard.step(loss)")
            if self.recovery is not None:
                self.recovery.before_update()
            elif self.checkpoints is not None:
                self.checkpoints.before_update()
            if self._can_be_decided_on_device(seen):
                self._decide_on_device(seen, known)
            else:
                self._decide_on_host(seen, known)
            self._meter.updated(self.number)
        self._batch = {}
        self.number += 1
        went_back = False
        if self.recovery is not None:
            self.recovery.tokens += tokens or 0
            self.recovery.loop_clips = grad_norm is not None
            self.recovery.recorder.clip = self._clip_now
            self.recovery.recorder.loop_clips = self.recovery.loop_clips
            went_back = self._go_on_at(self.recovery.after_step(self.number))
        if self.checkpoints is not None:
            self._say_what_was_saved()
        if self._act and (halted := self.watch.halted):
            raise RunHalted(f"the run is halted: {halted}", halted, self.watch.incident)
        if self._checkpoint_every and self.number % self._checkpoint_every == 0:
            self._is_checkpoint_due = True
        if went_back:  # the state of this step is on disk, or was not worth it then
            self._is_checkpoint_due = False
        if self._is_checkpoint_due:  # at the next step, where one is still being written
            self._is_checkpoint_due = not self.checkpoint()
        return self.watch.verdict

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around what is no training, an evaluation or a checkpoint: its time does not count as the step's."""
        began = time.perf_counter()
        self.watch.rest()
        try:
            yield
        finally:
            pause = time.perf_counter() - began
            self._tokens_since += pause
            if self._last_step_at is not None:
                self._last_step_at += pause

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Around each micro-batch but the last: gradients add up, and ranks do not exchange them."""
        with _without_exchange(self._model):
            yield

    def announce(self, change: str) -> None:
        """Say that the run is about to change by intention; see ``Watch.announce``."""
        self.watch.announce(change)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next verdicts depend on, as JSON values: to be saved in the user's checkpoints."""
        watch = self.watch.state_dict()
        gate = (self._gate.state.tolist(), self._gate.row.tolist()) if self._gate else self._saved_gate
        return {
            "watch": watch,
            "number": self.number,
            "next_batch": 0 if self._batches.number is None else self._batches.number + 1,
            "gate": gate,
            "coarse_left": self._coarse_left,
            "meter": self._meter.state_dict(),
            "recovery": None if self.recovery is None else self.recovery.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state, bit for bit."""
        self.watch.load_state_dict(state["watch"])
        self.number = state["number"]
        if self._batches.number is None:
            self._batches.count_from(state["next_batch"])
        self._coarse_left = state["coarse_left"]
        self._gate, self._saved_gate = None, state["gate"]
        self._meter.load_state_dict(state["meter"])
        self._meter.get_ready(self.number)
        if self.recovery is not None and state.get("recovery") is not None:
            self.recovery.load_state_dict(state["recovery"])
        self._goes_on_from_here()

    def go_on(self, number: int, state: Mapping[str, Any] | None = None) -> None:
        """Go on at a step, with the state of a guard that was there, or without one."""
        if state is not None:
            self.load_state_dict(state)
        self.number = number
        self._goes_on_from_here()

    def _goes_on_from_here(self) -> None:
        """Whatever was kept of later steps, or had to be done about them, belongs to another line."""
        self._knows_its_step = True
        self.watch.halted = None
        if self.recovery is not None:
            self.recovery.forget_after(self.number)

    def ask(self, *words: str, by: str = "code") -> None:
        """What ``sealegs do`` asks for, from code: ``guard.ask("rollback", "100")``. Needs a playbook, be it observe.

        On several ranks call it on all of them, at the same step.
        """
        if self.recovery is None:
            raise ConfigError(f"ask {' '.join(words)}: there is no playbook; give one, be it Playbook.observe()")
        self._go_on_at(self.recovery.ask(self.number, words, by=by))

    def checkpoint(self, *, wait: bool = False) -> bool:
        """Write what is needed to run the next step to the run folder; beside the training, unless it is to wait.

        False, where one that was begun before is still being written.
        """
        if self.checkpoints is None:
            raise ConfigError("checkpoint: the guard writes none; give it checkpoint_every= and a run folder")
        began = time.perf_counter()
        with self.paused():
            self.watch.sync()
            state = self._trainee.capture()
            state = replace(state, plain={**state.plain, "guard": self.state_dict()}, step=self.number)
            if wait:
                self.checkpoints.save(self.number, state)
                seconds = round(time.perf_counter() - began, 3)
                self.watch.note("checkpoint", step=self.number, checkpoint=self.number, seconds=seconds)
            elif not self.checkpoints.save_soon(self.number, state):
                return False
        self.last_checkpoint = self.number
        if self.recovery is not None:
            self.recovery.saved(self.number, was_waited_for=wait)
        return True

    def close(self) -> None:
        """Finish, and let go of the folder and of the model."""
        self.finish()
        self.watch.close()

    def finish(self) -> None:
        """Wait for the last verdicts, checkpoints and capsules, and write them: no step comes after it."""
        if self._is_finished:
            return
        self._is_finished = True
        self._meter.close()
        if self.recovery is not None:
            self.recovery.close()
        if self.checkpoints is not None:
            self.checkpoints.wait()
            self._say_what_was_saved()
        self.watch.catch_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _begins_with_a_checkpoint(self) -> bool:
        """Where the playbook goes back, it can go back to the beginning."""
        return self.checkpoints is not None and self.recovery is not None and bool(self.recovery.playbook.rungs)

    def _probe(self, loss: Tensor, grad_norm: Tensor | float | None) -> Verdict:
        """A step on a batch that was healthy before: it is looked at, and nothing is learned or updated."""
        assert self.recovery is not None
        # to unscale is to count as a step for the scaler; gradients that are scaled have no norm to compare
        is_scaled = grad_norm is None and self._update.scaler is not None
        with torch.no_grad():
            number = _number(loss, "loss", self._meter.device)
            given = 0.0 if is_scaled else grad_norm
            norm = None if given is None else _number(given, "grad_norm", self._meter.device).double()
            seen = self._meter.see(NO_STEP, number, norm, token_losses=None, loss_scale=None)
            found = waited_for(torch.stack((seen.loss.double(), seen.grad_norm().double())))
        self._update.discard()
        self._meter.get_ready(self.number)
        self._go_on_at(self.recovery.probed(found[0], None if is_scaled else found[1], self.number))
        return self.watch.verdict

    def _go_on_at(self, step: int | None) -> bool:
        """The run went back to a step, if it did: what is measured and decided between steps begins anew there."""
        if step is None:
            return False
        self.number = step
        if self.recovery is not None:
            self.recovery.recorder.forget_from(step)
        self._gate = self._saved_gate = None  # made anew from what the host knows
        self._meter.load_state_dict({"last_change": None})
        self._meter.get_ready(step)
        self._last_step_at = None
        return True

    def _resume(self) -> "Resumed":
        """Bring back the newest checkpoint to trust: a healthy one, where the run knows of one."""
        assert self.checkpoints is not None
        assert self.watch.folder is not None
        step: int | None = None
        passed_over: list[Damage] = []
        books = read_books(self.watch.folder)
        if books is not None and self.recovery is None:
            self._batches.take_over(books["data"])  # what was found to be bad still is
            self.watch.note("margins-dropped", margins=books["margins"], reason="there is no playbook any more")
        if self.recovery is not None:
            if books is not None:
                self.recovery.take_over(books)
            step, passed_over = self.checkpoints.newest_healthy()
        if step is None:
            step, passed_over = self.checkpoints.newest_intact()
        if step is None and passed_over:
            reasons = "; ".join(f"{damage.step}: {damage.reason}" for damage in passed_over)
            raise SourceError(
                f"{self.watch.folder}: no checkpoint is to be trusted ({reasons}); restore one from a copy, "
                "or start another run"
            )
        remarks: list[str] = []
        if step is not None:
            state = self.checkpoints.load(step, like=self._trainee.capture())
            remarks = self._trainee.restore(state)
            self.load_state_dict(state.plain["guard"])
        self._knows_its_step = True
        return Resumed(step, {str(damage.step): damage.reason for damage in passed_over}, remarks)

    def _say_what_was_saved(self) -> None:
        assert self.checkpoints is not None
        for step, seconds in self.checkpoints.written():
            self.watch.note("checkpoint", step=step, checkpoint=step, seconds=round(seconds, 3))
        if trouble := self.checkpoints.trouble():
            self.watch.note("checkpoint-failed", step=self.number, reason=trouble)

    @property
    def _clip_now(self) -> float | None:
        tightened = self.recovery.margins.clip if self.recovery is not None else None
        return min((limit for limit in (self._clip, tightened) if limit is not None), default=None)

    def _can_be_decided_on_device(self, seen: Seen) -> bool:
        """The gate knows the calibrated rules; in shadow mode nothing has to read its answer."""
        is_readable = not self._act or self._update.can_be_decided_on_the_device()
        return seen.loss.is_cuda and self._are_rules_known and is_readable

    def _decide_on_device(self, seen: Seen, known: dict[str, Any]) -> None:
        gate = self._gate or self._make_gate(seen.loss.device)
        gate.clip_at(self._clip_now)
        announced = self.watch.announced is not None
        if announced:
            self._coarse_left = WIDENED_STEPS
        row = gate.decide(seen.loss, seen.norms, seen.worst, announced=announced, coarse=self._coarse_left > 0)
        self._coarse_left = max(self._coarse_left - 1, 0)
        lag = LAG if self._meter.ranks.world > 1 else None  # all ranks must come to know a halt at the same step
        names = seen.gradients.names if seen.gradients is not None else ()
        self.watch.take(self.number, known, ((partial(_gate_row, names), row), *seen.blocks), lag)
        if self._act and self._can_be_clipped_on_the_way(seen):
            self._update.apply_unless(gate.found_inf, gate.grad_scale)
            return
        self._clip_all(seen, gate.grad_norm)
        if self._act:
            self._update.apply_unless(gate.found_inf)
        else:
            self._update.apply_as_ever()

    def _decide_on_host(self, seen: Seen, known: dict[str, Any]) -> None:
        """The host judges before the update: at once on the CPU, waiting for the device elsewhere."""
        self._gate = self._saved_gate = None  # made anew from what the host knows, if the device is ever to decide
        grad_norm = seen.grad_norm()
        known = {"loss": seen.loss, "grad_norm": grad_norm} | known
        blocks = seen.blocks
        if seen.gradients is not None:
            worst = seen.gradients.worst() if seen.worst is None else seen.worst
            blocks = ((partial(_worst_tensor, seen.gradients.names), worst), *blocks)
        late = self.watch.take(self.number, known, blocks)
        if not self._act:
            self._clip_all(seen, grad_norm)
            self._update.apply_as_ever()
            return
        if go := late.go:
            self._clip_all(seen, grad_norm)
        self._update.apply(go)

    def _clip_all(self, seen: Seen, grad_norm: Tensor) -> None:
        if (clip := self._clip_now) is not None and seen.gradients is not None:
            seen.gradients.clip(clip, grad_norm)

    def _can_be_clipped_on_the_way(self, seen: Seen) -> bool:
        """Fused optimizers can divide gradients as they read them, which saves a pass over all of them.

        They write back what they divided: not where a gradient is read twice, or a hook looks at it before.
        """
        if self._clip_now is None or seen.gradients is None:
            return False
        return seen.gradients.are_used_once and not self._update.has_step_hooks()

    def _make_gate(self, device: torch.device) -> Gate:
        spikes = self.watch.states_of(Spike)
        self._gate = Gate(device, [detector for detector, _ in spikes], self._clip_now)
        if self._gate.without_kernel:
            self.watch.note("gate-without-kernel", reason=self._gate.without_kernel)
        if self._saved_gate is not None:
            self._gate.load(*self._saved_gate)
            self._saved_gate = None
        else:
            self._gate.begin_from([state for _, state in spikes], self.watch.skipped_before)
            self._coarse_left = spikes[0][1].coarse_left
        return self._gate

    def _known(self, tokens: int | None) -> dict[str, Any]:
        """What the host knows of a step without asking anyone."""
        lr = self._update.optimizers[0].param_groups[0]["lr"]
        known: dict[str, Any] = {"lr": lr * self._update.factors["lr"] if "lr" in self._update.factors else lr}
        if self._update.scaler is not None:
            known["loss_scale"] = self._update.scaler.scale(torch.ones((), device=self._meter.device))
        if tokens is not None:
            self._tokens += tokens
            if self._meter.is_sampled(self.number):
                now = time.perf_counter()
                known["tokens_per_s"] = self._tokens / (now - self._tokens_since)
                self._tokens, self._tokens_since = 0, now
        return known

    def _tighten(self) -> None:
        """The margins that recovery has taken back, in this step."""
        if self.recovery is None:
            return
        self._update.factors = self.recovery.margins.factors_at(self.number)
        if (limit := self.recovery.margins.clip_value) is not None:
            torch.nn.utils.clip_grad_value_(self._model.parameters(), limit)

    def _since_last_step(self) -> float | None:
        before, self._last_step_at = self._last_step_at, time.perf_counter()
        return None if before is None else self._last_step_at - before

    def _trimmed(self, row: Row, verdict: Verdict) -> Row:
        """Every step has a largest gradient and a histogram; they are news when something is wrong."""
        if verdict.word != "GO":
            return row
        dropped = {"culprit"} if int(row["step"]) % HISTOGRAM_STEPS == 0 else {"culprit", "token_loss_histogram"}
        return {name: value for name, value in row.items() if name not in dropped}

    def _say_what_is_guarded(self) -> None:
        """What a skip can do here, and what it cannot: said once, before it matters."""
        self.watch.note(
            "guard",
            step=self.number,
            act=self._act,
            clip=self._clip,
            optimizers=[type(optimizer).__name__ for optimizer in self._update.optimizers],
            skips_on_the_device=self._update.can_be_decided_on_the_device(),
            not_undone_by_a_skip=not_undone(self._model),
            playbook=self.recovery.playbook.name if self.recovery is not None else None,
            ranks=self._meter.ranks.world,
            norms_of_each_rank=before.attached_to if (before := self._meter.norms_before) else None,
        )


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a resume has brought back."""

    checkpoint: int | None
    """None where the run was killed before its first one: it then begins anew."""
    passed_over: dict[str, str]
    """Newer checkpoints that are damaged or not to be trusted, and why."""
    remarks: list[str]
    """What is not as it was."""


def _gate_row(names: tuple[str, ...], numbers: list[float]) -> dict[str, Any]:
    """What the gate found, with the name that a tensor had in that step."""
    return dict(zip(ROW, numbers, strict=True)) | _worst_tensor(names, numbers[-1:])


def _worst_tensor(names: tuple[str, ...], place: list[float]) -> dict[str, Any]:
    return {"worst_tensor": names[int(place[0])] if 0 <= place[0] < len(names) else ""}


def not_undone(model: nn.Module) -> list[str]:
    """What a forward pass changes besides gradients, which no skip of an update takes back."""
    norms = (module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase))
    kinds = {type(module).__name__ for module in norms if module.track_running_stats}
    return [f"running statistics of {kind}" for kind in sorted(kinds)]


def _number(value: Tensor | float, name: str, device: torch.device) -> Tensor:
    """A loss or norm as a tensor of one number."""
    if not isinstance(value, Tensor):
        return torch.full((), float(value), dtype=torch.float64, device=device)
    if value.numel() != 1:
        raise ConfigError(f"{name} of shape {tuple(value.shape)}: give one number, that of the whole step")
    whole = value.full_tensor() if hasattr(value, "full_tensor") else value  # clip_grad_norm_ gives a DTensor
    return whole.detach().reshape(())


def _several(one_or_more: Any) -> tuple[Any, ...]:
    if one_or_more is None:
        return ()
    return tuple(one_or_more) if isinstance(one_or_more, Sequence) else (one_or_more,)


@contextmanager
def _fsdp_without_exchange(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def _without_exchange(model: nn.Module) -> AbstractContextManager[None]:
    model = getattr(model, "_orig_mod", model)  # compiled
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return model.no_sync()
    if hasattr(model, "set_requires_gradient_sync"):
        return _fsdp_without_exchange(model)
    return nullcontext()


def _refuse(*arguments: tuple[str, Any, bool, str]) -> None:
    for name, value, is_sound, cure in arguments:
        if not is_sound:
            raise ConfigError(f"{name}={value!r}: {cure}")


def _has_begun(run: Any) -> bool:
    """Whether there is a run to go on with, as rank 0 sees it: which may be making one when another rank looks."""
    if not isinstance(run, str | Path):
        raise ConfigError(f"resume='auto' with run={run!r}: give the folder, which is looked at")
    return Together().first(lambda: (Path(run) / MANIFEST).exists())


def _is_range(given: Any) -> bool:
    is_pair = isinstance(given, Sequence) and len(given) == 2 and all(isinstance(number, int) for number in given)
    return is_pair and 0 <= given[0] < given[1]
