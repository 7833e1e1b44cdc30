"""The shell around the user's loop: takes a loss that was backpropagated, decides, updates or skips, writes it down."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from sealegs.detectors.spike import WIDENED_STEPS, Spike
from sealegs.errors import ConfigError, RunHalted
from sealegs.record.writer import RunWriter
from sealegs.recovery.update import Update
from sealegs.signals.activations import ActivationSampler
from sealegs.signals.agree import MERGED, Ranks
from sealegs.signals.collect import Signal
from sealegs.signals.digest import digest_of
from sealegs.signals.gate import ROW, Gate
from sealegs.signals.measure import HISTOGRAM_STEPS, Meter, Seen
from sealegs.vocabulary import Row, Verdict
from sealegs.watch import Watch

LAG = 2
"""Steps after which several ranks look at what their devices decided."""
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
        resume: bool = False,
        activations: ActivationSampler | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """``run`` is the folder to record into; a ``Watch`` where its options are wanted; None to record nothing.

        Several optimizers are updated together or not at all. ``clip`` is the largest global gradient norm; leave it
        out to clip yourself, and hand the norm to ``step``. ``act=False`` is shadow mode: everything is decided and
        written down, nothing is skipped or halted. Every ``sample_every`` steps weights, moments, updates and
        activations are measured too; 0 never does; ``activations`` is a sampler with other options. In a process group
        make a guard on every rank; ``ranks`` has the timeout for those that do not come.
        """
        if clip is not None and not clip > 0:
            raise ConfigError(f"clip={clip}: the largest gradient norm, above 0; leave it out to clip nothing")
        if sample_every < 0:
            raise ConfigError(f"sample_every={sample_every}: a number of steps, or 0 for never")
        if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
            raise ConfigError("model: FullyShardedDataParallel hides its shards; use FSDP2, torch's fully_shard")
        self.watch = run if isinstance(run, Watch) else Watch(run, resume=resume)
        self.watch.acts = act
        self.number = 0
        """The number of the step that comes next."""
        self._model = model
        self._update = Update(_several(optimizer), _several(scheduler), scaler)
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
        self._gate: Gate | None = None
        self._saved_gate: Any = None
        self._are_rules_known = [spike.signal for spike, _ in self.watch.states_of(Spike)] == ["loss", "grad_norm"]
        self._coarse_left = 0
        self._knows_its_step = not resume
        self._batch: dict[str, Signal] = {}
        self._next_batch = 0
        self._last_step_at: float | None = None
        self._tokens, self._tokens_since = 0, time.perf_counter()
        self._say_what_is_guarded()

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """The batches of a loader; the record then says which of them a step saw."""
        for batch in loader:
            self._batch = {"batch_index": self._next_batch}
            if digest := digest_of(batch):
                self._batch["batch_hash"] = digest
            self._next_batch += 1
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
        with torch.no_grad():
            if grad_norm is None:
                self._update.unscale()
            else:
                self._update.refuse_scaled()
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
            if self._can_be_decided_on_device(seen):
                self._decide_on_device(seen, known)
            else:
                self._decide_on_host(seen, known)
            self._meter.updated(self.number)
        self._batch = {}
        self.number += 1
        if self._act and (halted := self.watch.halted):
            raise RunHalted(f"the run is halted: {halted}", halted, self.watch.incident)
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
            "next_batch": self._next_batch,
            "gate": gate,
            "coarse_left": self._coarse_left,
            "meter": self._meter.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state, bit for bit."""
        self.watch.load_state_dict(state["watch"])
        self.number, self._next_batch = state["number"], state["next_batch"]
        self._coarse_left = state["coarse_left"]
        self._gate, self._saved_gate = None, state["gate"]
        self._meter.load_state_dict(state["meter"])
        self._meter.get_ready(self.number)
        self._knows_its_step = True

    def go_on(self, number: int, state: Mapping[str, Any] | None = None) -> None:
        """Go on at a step, with the state of a guard that was there, or without one."""
        if state is not None:
            self.load_state_dict(state)
        self.number = number
        self._knows_its_step = True

    def close(self) -> None:
        """Wait for the last verdicts, write them, let go of the folder and of the model."""
        self._meter.close()
        self.watch.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _can_be_decided_on_device(self, seen: Seen) -> bool:
        """The gate knows the calibrated rules; in shadow mode nothing has to read its answer."""
        is_readable = not self._act or self._update.can_be_decided_on_the_device()
        return seen.loss.is_cuda and self._are_rules_known and is_readable

    def _decide_on_device(self, seen: Seen, known: dict[str, Any]) -> None:
        gate = self._gate or self._make_gate(seen.loss.device)
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
        if self._clip is not None and seen.gradients is not None:
            seen.gradients.clip(self._clip, grad_norm)

    def _can_be_clipped_on_the_way(self, seen: Seen) -> bool:
        """Fused optimizers can divide gradients as they read them, which saves a pass over all of them.

        They write back what they divided: not where a gradient is read twice, or a hook looks at it before.
        """
        if self._clip is None or seen.gradients is None:
            return False
        return seen.gradients.are_used_once and not self._update.has_step_hooks()

    def _make_gate(self, device: torch.device) -> Gate:
        spikes = self.watch.states_of(Spike)
        self._gate = Gate(device, [detector for detector, _ in spikes], self._clip)
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
        known: dict[str, Any] = {"lr": self._update.optimizers[0].param_groups[0]["lr"]}
        if self._update.scaler is not None:
            known["loss_scale"] = self._update.scaler.scale(torch.ones((), device=self._meter.device))
        if tokens is not None:
            self._tokens += tokens
            if self._meter.is_sampled(self.number):
                now = time.perf_counter()
                known["tokens_per_s"] = self._tokens / (now - self._tokens_since)
                self._tokens, self._tokens_since = 0, now
        return known

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
            ranks=self._meter.ranks.world,
            norms_of_each_rank=before.attached_to if (before := self._meter.norms_before) else None,
        )


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
