"""Applies the update of a step or skips it, and then leaves the weights exactly as they were.

There are three ways to skip. Decided on the device, fused optimizers get ``found_inf``, a tensor that their kernels
read: at 1 they leave weights, moments and step counters alone, and the host need not know. Others make their step, and
it is taken back on the device (``step/undo.py``). Decided on the host, ``optimizer.step()`` is not called at all, which
is exact for any optimizer. Whichever way, the schedule counts the attempt: a skip on the device cannot hold it back
without the host waiting for it.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import LBFGS, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop
from torch.optim.lr_scheduler import LRScheduler

from sealegs.errors import ConfigError
from sealegs.step.qk_clip import QkClip
from sealegs.step.undo import Undo

READ_FOUND_INF = frozenset({Adam, AdamW, SGD, Adagrad})
"""Optimizers whose fused kernels read ``found_inf``. Not their subclasses, which may do anything; not RMSprop, NAdam or
Muon, which ignore it silently."""

NORMALISING = (Adam, AdamW, NAdam, RAdam, Adamax, RMSprop, Adadelta)
"""Optimizers that divide gradients by a running size that fades; Adagrad's never fades, so one gross gradient would
slow it for good. By class and not by state: a rank may hold none, and all must decide alike."""

Call: TypeAlias = Callable[[Optimizer, Callable[[], None]], None]
"""A framework's call of an optimizer: it gets the optimizer and the function that updates the weights, to be called
once."""


class Update:
    """The end of a step: scaler, optimizers, schedulers, zeroed gradients. Several optimizers: all of them or none."""

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[LRScheduler] = (),
        scaler: GradScaler | None = None,
    ) -> None:
        if any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
            raise ConfigError(
                "optimizer=LBFGS: it evaluates the model several times a step, which nobody can judge first"
            )
        self.optimizers = tuple(optimizers)
        self.schedulers = tuple(schedulers)
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.factors: Mapping[str, float] = {}
        """Factor on each optimizer setting during an update, by name: ``lr``, ``weight_decay``."""
        self.call: Call | None = None
        """A framework's way to call an optimizer, with its hooks and its clipping; it zeroes the gradients itself."""
        self.qk_clip: QkClip | None = None
        """What follows the update of the step that comes, and of no other: heads whose logits are too large."""
        self._undo: dict[int, Undo] = {}
        """What takes back the steps of each optimizer that does not read ``found_inf``."""
        self._has_updated = False

    def unscale(self, optimizers: Iterable[Optimizer] | None = None) -> None:
        """Take the loss scale out of the gradients, unless the user has, so that their norms are true.

        ``optimizers`` names others that share the scaler.
        """
        if self.scaler is not None:
            for optimizer in self.optimizers if optimizers is None else optimizers:
                if not self._is_unscaled(optimizer):
                    self.scaler.unscale_(optimizer)

    def refuse_scaled(self) -> None:
        """Refuse clipped gradients that were not unscaled before: their norm is that of scaled ones."""
        if not all(map(self._is_unscaled, self.optimizers)):
            raise ConfigError("grad_norm= with a scaler: call scaler.unscale_(optimizer) before you clip")

    def _is_unscaled(self, optimizer: Optimizer) -> bool:
        if self.scaler is None:
            return True
        stage = self.scaler._per_optimizer_states[id(optimizer)]["stage"]
        return bool(getattr(stage, "name", "") == "UNSCALED")

    def reads_found_inf(self) -> bool:
        """Whether the kernels of every optimizer can skip the next step. Checked at every step: loading a checkpoint
        can turn ``fused`` off."""
        return all(map(reads_found_inf, self.optimizers))

    def is_taken_back(self) -> bool:
        """Whether a skip on the device takes back the step of one optimizer at least, and no first step of a fused one
        is in the way."""
        fused = [each for each in self.optimizers if is_fused(each)]
        return len(fused) < len(self.optimizers) and all(map(reads_found_inf, fused))

    def can_be_taken_back(self) -> bool:
        """Whether the device can take back the next step of every optimizer that is not fused."""
        return all(is_fused(each) or self._undo_of(each).is_possible() for each in self.optimizers)

    def why_not_taken_back(self) -> str:
        """Why it cannot, as far as it is known; empty where it can."""
        undos = ((each, self._undo_of(each)) for each in self.optimizers if not is_fused(each))
        return next((f"{type(each).__name__}: {undo.why_not}" for each, undo in undos if undo.why_not), "")

    def copied_bytes(self) -> int:
        """Memory that taking steps back takes."""
        return sum(undo.copied_bytes for undo in self._undo.values())

    def keep_no_copies(self) -> None:
        """Give back the memory that taking steps back takes: the host decides from here on."""
        self._undo.clear()

    def _undo_of(self, optimizer: Optimizer) -> Undo:
        return self._undo.setdefault(id(optimizer), Undo(optimizer))

    def apply(self, go: bool) -> None:
        """Apply the update, or not, as the host decided."""
        if go:
            for optimizer in self.optimizers:
                self._call(optimizer, optimizer.step)
            if self.qk_clip is not None:
                self.qk_clip.apply()
        self._finish(updated=go)

    def discard(self) -> None:
        """Leave weights, schedule and loss scale alone: the gradients were only looked at."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        if self.scaler is not None:  # otherwise the scaler takes the next unscale_ for a second one in the same step
            self.scaler._per_optimizer_states.clear()

    def normalises(self) -> bool:
        """Whether every optimizer normalises gradients, so that a large gradient makes no large update."""
        return all(isinstance(each, NORMALISING) or getattr(each, "normalises", False) for each in self.optimizers)

    def has_step_hooks(self) -> bool:
        """Whether hooks look at the gradients when an optimizer is called."""
        return self.call is not None or any(optimizer._optimizer_step_pre_hooks for optimizer in self.optimizers)

    def apply_unless(self, found_inf: Tensor, grad_scale: Tensor | None = None) -> None:
        """Apply the update unless the tensor is 1 when the device comes to it.

        Gradients are divided by ``grad_scale`` on the way, which needs each to be read once, by a fused kernel.
        """
        for optimizer in self.optimizers:
            if is_fused(optimizer):
                self._call(optimizer, partial(_step_unless, optimizer, found_inf, grad_scale))
            else:
                self._call(optimizer, partial(self._undo_of(optimizer).step, found_inf))
        if self.qk_clip is not None:
            self.qk_clip.apply(found_inf)
        self._finish(updated=True)

    def apply_as_ever(self) -> None:
        """Apply the update as without Sealegs: only the scaler skips, and only for itself."""
        for optimizer in self.optimizers:
            self._call(optimizer, optimizer.step if self.scaler is None else partial(self.scaler.step, optimizer))
        self._finish(updated=True)

    def _call(self, optimizer: Optimizer, step: Callable[[], Any]) -> None:
        factors = dict(self.factors)

        def update() -> None:
            with _factored(optimizer, factors):
                step()

        if self.call is None:
            update()
        else:
            self.call(optimizer, update)

    def _finish(self, *, updated: bool) -> None:
        self.qk_clip = None
        if self.scaler is not None:
            self.scaler.update()
        self._has_updated |= updated
        with nullcontext() if self._has_updated else warnings.catch_warnings():
            if not self._has_updated:  # torch warns of a schedule that begins before the optimizer
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            for scheduler in self.schedulers:
                scheduler.step()
        if self.call is None:
            for optimizer in self.optimizers:
                optimizer.zero_grad()


@contextmanager
def _factored(optimizer: Optimizer, factors: Mapping[str, float]) -> Iterator[None]:
    """Multiply an optimizer's settings by the factors for one update; afterwards they are the user's again."""
    kept: list[tuple[dict[str, Any], str, Any]] = []
    for name, factor in factors.items():
        for group in optimizer.param_groups:
            if name in group:
                kept.append((group, name, group[name]))
                group[name] = group[name] * factor
    try:
        yield
    finally:
        for group, name, value in kept:
            group[name] = value


def _step_unless(optimizer: Optimizer, found_inf: Tensor, grad_scale: Tensor | None) -> None:
    readable: Any = optimizer
    readable.found_inf, readable.grad_scale = found_inf, grad_scale
    try:
        optimizer.step()
    finally:
        del readable.found_inf, readable.grad_scale  # a step of the user's own must not read them


def is_fused(optimizer: Optimizer) -> bool:
    """Whether an optimizer's kernels read ``found_inf``."""
    return type(optimizer) in READ_FOUND_INF and all(group.get("fused") for group in optimizer.param_groups)


def reads_found_inf(optimizer: Optimizer) -> bool:
    """Whether the next step of an optimizer can be skipped by its own kernels."""
    return is_fused(optimizer) and not (isinstance(optimizer, SGD) and _begins_momentum(optimizer))


def fuse(optimizers: Iterable[Optimizer]) -> list[str]:
    """Turn ``fused`` on in torch's own optimizers that have it off and can. Gives their names."""
    return [type(each).__name__ for each in optimizers if _fuse(each)]


def _fuse(optimizer: Optimizer) -> bool:
    groups = optimizer.param_groups
    weights = [p for group in groups for p in group["params"]]
    is_plain = type(optimizer) in (Adam, AdamW, SGD) and not any(group.get("differentiable") for group in groups)
    if is_fused(optimizer) or not is_plain or not all(p.is_floating_point() for p in weights):
        return False
    for settings in (*groups, optimizer.defaults):
        settings["fused"], settings["foreach"] = True, False
    for p in weights:
        if "step" in (state := optimizer.state.get(p, {})):
            state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=p.device)
    told: Any = optimizer
    told._step_supports_amp_scaling = told._need_device_dtype_check_for_fused = True
    return True


def not_undone(model: nn.Module) -> list[str]:
    """What a forward pass changes besides gradients, and a skipped update does not undo."""
    norms = (module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase))
    kinds = {type(module).__name__ for module in norms if module.track_running_stats}
    return [f"running statistics of {kind}" for kind in sorted(kinds)]


def _begins_momentum(optimizer: SGD) -> bool:
    """Whether a first step with momentum is next. It allocates the buffers and, skipped on the device, leaves them
    uninitialised."""
    return any(
        group["momentum"] and optimizer.state[parameter].get("momentum_buffer") is None
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    )
