"""Faults in the learning rates and betas of optimizers, for some updates."""

from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sealegs.errors import ConfigError
from sealegs.faults.contract import Fault
from sealegs.faults.live import LrSpike, WarmupLost, WrongBetas
from sealegs.faults.strikes import Clock, FaultProgress
from sealegs.faults.weight import untraced

RateFault: TypeAlias = LrSpike | WarmupLost | WrongBetas


class Borrowed:
    """Changes a value in each group of one optimizer while it updates. It updates once per step."""

    def __init__(
        self, course: FaultProgress, fault: RateFault, model: nn.Module, optimizer: Optimizer, clock: Clock
    ) -> None:
        self._course = course
        self._fault = fault
        self._key = key_of(fault)
        self._clock = clock
        self._updated = -1
        """The last step that the optimizer updated for."""
        self._changed_for = -1
        """The last step that the values were changed for."""
        self._kept: list[tuple[dict[str, Any] | Tensor, Any, Any]] = []
        """Where the values are, what they were, and what they are."""
        self._optimizer = optimizer
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_update),
            optimizer.register_step_post_hook(self._after_update),
        ]
        if not isinstance(fault, LrSpike) or fault.log == "shows":
            self._hooks.append(model.register_forward_pre_hook(untraced(self._before_forward), prepend=True))

    def remove(self) -> None:
        """Restore the optimizer, even during an update."""
        for hook in self._hooks:
            hook.remove()
        self._restore()

    def _before_forward(self, module: nn.Module, inputs: object) -> None:
        step = self._clock()
        if step != self._changed_for:
            self._restore()  # the step before may have had no update
        if not self._course.is_over and self._fault.is_at(step) and step > self._updated and not self._kept:
            self._change(step)

    def _before_update(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self._restore()  # an update may have failed half-way
        step, course = self._clock(), self._course
        # steps without an update are not seen here, so the same step again means that the clock went back, too
        if step <= self._updated and self._updated >= self._fault.step:
            course.is_over = True
        self._updated = step
        if course.is_over or not self._fault.is_at(step) or not (groups := self._groups()):
            return
        before = number(self._fault, groups[0])
        self._change(step)
        if course.begins(step):
            course.note("", step, before=before, after=number(self._fault, groups[0]))

    def _after_update(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self._restore()

    def _groups(self) -> list[dict[str, Any]]:
        return [group for group in self._optimizer.param_groups if self._key in group]

    @torch.no_grad()
    def _change(self, step: int) -> None:
        self._changed_for = step
        for group in self._groups():
            old, new = group[self._key], self._course.result(group[self._key], changed(self._fault, group))
            if not isinstance(old, Tensor):
                self._kept.append((group, old, new))
                group[self._key] = new
            elif not any(old is place for place, *_ in self._kept):  # groups may share one tensor
                before = old.clone()
                old.copy_(torch.as_tensor(new))  # in place: a captured graph reads it there
                self._kept.append((old, before, old.clone()))

    @torch.no_grad()
    def _restore(self) -> None:
        """Restore values that nobody else has changed since: a scheduler goes on without an update, too."""
        for place, old, new in self._kept:
            if isinstance(place, Tensor):
                if torch.equal(place, new):
                    place.copy_(old)
            elif place[self._key] == new:
                place[self._key] = old
        self._kept.clear()


def key_of(fault: RateFault) -> str:
    """The key of a parameter group that a fault changes."""
    return "betas" if isinstance(fault, WrongBetas) else "lr"


def changed(fault: RateFault, group: dict[str, Any]) -> Any:
    """The value that a fault gives a group."""
    if isinstance(fault, WrongBetas):
        beta1, beta2, *others = group["betas"]
        first, second = beta1 if fault.beta1 is None else fault.beta1, beta2 if fault.beta2 is None else fault.beta2
        return (first, second, *others)
    return group["initial_lr"] if isinstance(fault, WarmupLost) else group["lr"] * fault.factor


def number(fault: RateFault, group: dict[str, Any]) -> float:
    """The number of a group's value that a strike reports."""
    return float(group["betas"][fault.beta2 is not None] if isinstance(fault, WrongBetas) else group["lr"])


def refuse_without_values(fault: Fault, optimizers: Iterable[Optimizer]) -> None:
    """Refuse a fault if the value that it changes, or puts in place, is missing."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    if isinstance(fault, WrongBetas) and not any("betas" in group for group in groups):
        raise ConfigError(f"{fault}: no optimizer that was given has betas; give one that has, such as AdamW")
    if isinstance(fault, WarmupLost) and not all("initial_lr" in group for group in groups):
        raise ConfigError(
            f"{fault}: no scheduler has put initial_lr into the optimizer's groups, so that the peak is not known; "
            f"make it before inject, or use lr-spike:factor=10,log=shows@{fault.step}"
        )
