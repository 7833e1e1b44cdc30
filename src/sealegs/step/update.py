"""Gradients and a decision in, new weights out, or exactly the old ones.

A step is skipped in one of two ways. Decided on the device, fused optimizers are called with ``found_inf``, a tensor
that their kernels read: at 1 they leave weights, moments and step counters as they are, and the host never knew.
Decided on the host, ``optimizer.step()`` is not called at all, which is exact for any optimizer. Either way the
schedule counts the attempt: a skip on the device cannot hold it back without the host waiting for it.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import LBFGS, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop
from torch.optim.lr_scheduler import LRScheduler

from sealegs.errors import ConfigError

READ_FOUND_INF = frozenset({Adam, AdamW, SGD, Adagrad})
"""Whose fused kernels read ``found_inf``. Not their subclasses, which may do anything; not RMSprop, NAdam or Muon,
which ignore it silently."""

NORMALISING = (Adam, AdamW, NAdam, RAdam, Adamax, RMSprop, Adadelta)
"""Who divides gradients by their running size, and forgets it; Adagrad never forgets, and is held up for good. By class
and not by state: a rank may hold none, and all must decide alike."""

Call: TypeAlias = Callable[[Optimizer, Callable[[], None]], None]
"""An optimizer, and what updates its weights: to be called once, with whatever is to come before it."""


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
        """By name, what a setting of the optimizers is multiplied with during an update: ``lr``, ``weight_decay``."""
        self.call: Call | None = None
        """A framework's way to call an optimizer, with its hooks and its clipping; it zeroes the gradients itself."""
        self._has_updated = False

    def unscale(self, optimizers: Iterable[Optimizer] | None = None) -> None:
        """Take the loss scale out of the gradients, so that their norms are their own, where the user has not.

        The scaler may be that of others, too: ``optimizers``, if not these.
        """
        if self.scaler is not None:
            for optimizer in self.optimizers if optimizers is None else optimizers:
                if not self._is_unscaled(optimizer):
                    self.scaler.unscale_(optimizer)

    def refuse_scaled(self) -> None:
        """Gradients that the user has clipped must have been unscaled before: their norm is no norm else."""
        if not all(map(self._is_unscaled, self.optimizers)):
            raise ConfigError("grad_norm= with a scaler: call scaler.unscale_(optimizer) before you clip")

    def _is_unscaled(self, optimizer: Optimizer) -> bool:
        if self.scaler is None:
            return True
        stage = self.scaler._per_optimizer_states[id(optimizer)]["stage"]
        return bool(getattr(stage, "name", "") == "UNSCALED")

    def can_be_decided_on_the_device(self) -> bool:
        """Asked at every step: loading a checkpoint can turn ``fused`` off, as can the user."""
        return all(reads_found_inf(optimizer) for optimizer in self.optimizers)

    def apply(self, go: bool) -> None:
        """Update the weights, or not, as the host decided."""
        if go:
            for optimizer in self.optimizers:
                self._call(optimizer, optimizer.step)
        self._finish(updated=go)

    def discard(self) -> None:
        """Leave the weights, the schedule and the loss scale alone; the gradients were only looked at."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        if self.scaler is not None:  # which would take the next unscaling for the second of one step, of anybody's
            self.scaler._per_optimizer_states.clear()

    def normalises(self) -> bool:
        """Whether every optimizer makes no large update of a large gradient."""
        return all(isinstance(optimizer, NORMALISING) for optimizer in self.optimizers)

    def has_step_hooks(self) -> bool:
        """Whether someone looks at the gradients when an optimizer is called."""
        return self.call is not None or any(optimizer._optimizer_step_pre_hooks for optimizer in self.optimizers)

    def apply_unless(self, found_inf: Tensor, grad_scale: Tensor | None = None) -> None:
        """Update the weights unless the tensor says 1 when the device comes to it.

        ``grad_scale`` is what gradients are divided by on the way, each once: where none belongs to two parameters.
        """
        for optimizer in self.optimizers:
            self._call(optimizer, partial(_step_unless, optimizer, found_inf, grad_scale))
        self._finish(updated=True)

    def apply_as_ever(self) -> None:
        """Update the weights as they would be without Sealegs: only the scaler skips, and only for itself."""
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
        if self.scaler is not None:
            self.scaler.update()
        self._has_updated |= updated
        with nullcontext() if self._has_updated else warnings.catch_warnings():
            if not self._has_updated:  # torch takes it for a mistake that the schedule begins before the optimizer
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            for scheduler in self.schedulers:
                scheduler.step()
        if self.call is None:
            for optimizer in self.optimizers:
                optimizer.zero_grad()


@contextmanager
def _factored(optimizer: Optimizer, factors: Mapping[str, float]) -> Iterator[None]:
    """An optimizer with the factors; afterwards its settings are the user's again, and so is the schedule."""
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


def reads_found_inf(optimizer: Optimizer) -> bool:
    """Whether the next step of an optimizer can be skipped on the device."""
    if type(optimizer) not in READ_FOUND_INF or not all(group.get("fused") for group in optimizer.param_groups):
        return False
    return not (isinstance(optimizer, SGD) and _begins_momentum(optimizer))


def not_undone(model: nn.Module) -> list[str]:
    """What a forward pass changes besides gradients, which no skip of an update takes back."""
    norms = (module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase))
    kinds = {type(module).__name__ for module in norms if module.track_running_stats}
    return [f"running statistics of {kind}" for kind in sorted(kinds)]


def _begins_momentum(optimizer: SGD) -> bool:
    """A first step with momentum allocates the buffers and, skipped on the device, leaves in them what memory held."""
    return any(
        group["momentum"] and optimizer.state[parameter].get("momentum_buffer") is None
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    )
