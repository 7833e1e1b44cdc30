"""Optimizers and Faults in, moments and learning rates that have gone wrong out."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from sealegs.faults.spec import BitFlip, LrSpike, MomentsReset
from sealegs.faults.strikes import Course
from sealegs.faults.targets import Target, reshard
from sealegs.faults.weight import untraced
from sealegs.signals.weights import FIRST_MOMENTS, SECOND_MOMENTS

MomentPlan: TypeAlias = list[tuple[Course, BitFlip | MomentsReset, list[Target]]]
"""Faults of moments, how far they have come, and whose moment they strike: a reset strikes all."""


def strike_moments(
    model: nn.Module, plan: MomentPlan, optimizers: Sequence[Optimizer], clock: Callable[[], int]
) -> RemovableHandle:
    """Strike moments before the first forward pass of a step. Where there are none yet, the fault stays pending.

    The plan has what other ranks strike too, where that is sharded: to find a moment takes the shard of its parameter
    in its place, and to gather that again takes all ranks.
    """

    def strike(module: nn.Module, inputs: object) -> None:
        step = clock()
        for course, fault, targets in plan:
            if not course.is_due(step):
                continue
            course.done.add(step)
            if isinstance(fault, MomentsReset):
                reset(course, optimizers, step)
                continue
            [target] = targets
            reshard(target)
            moment = moment_of(target.parameter(), fault, optimizers)
            if course.is_here and moment is not None:
                course.strike_element(fault, target.name, moment, step)

    return model.register_forward_pre_hook(untraced(strike), prepend=True)


def moment_of(parameter: nn.Parameter, fault: BitFlip, optimizers: Sequence[Optimizer]) -> Tensor | None:
    """The moment that a fault strikes, where its optimizer has one by now."""
    names = FIRST_MOMENTS if fault.in_ == "moment1" else SECOND_MOMENTS
    kept = (optimizer.state.get(parameter, {}).get(name) for optimizer in optimizers for name in names)
    return next((moment for moment in kept if isinstance(moment, Tensor)), None)


@torch.no_grad()
def reset(course: Course, optimizers: Sequence[Optimizer], step: int) -> None:
    """Zero all moments of this rank."""
    gathered = [moment for optimizer in optimizers for moment in moments_in(optimizer)]
    if not gathered:
        return
    norm = math.sqrt(sum(float(moment.double().square().sum()) for moment in gathered))
    for moment in gathered:
        moment.zero_()
    course.note("*", step, element=None, before=norm, after=0.0)


def moments_in(optimizer: Optimizer) -> Iterator[Tensor]:
    """What an optimizer has gathered for each parameter, in its shape: this rank's part of it."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            is_moment = isinstance(value, Tensor) and value.is_floating_point() and value.shape == parameter.shape
            if is_moment and name != "step":
                yield value.to_local() if isinstance(value, DTensor) else value


class RateSpike:
    """The learning rates of one optimizer, times a factor while it updates. It updates once in a step."""

    def __init__(
        self, course: Course, fault: LrSpike, model: nn.Module, optimizer: Optimizer, clock: Callable[[], int]
    ) -> None:
        self._course = course
        self._fault = fault
        self._clock = clock
        self._updated = -1
        """The last step that the optimizer updated for."""
        self._kept: list[tuple[dict[str, Any] | Tensor, Any]] = []
        """Where the rates are, and what they were."""
        self._optimizer = optimizer
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_update),
            optimizer.register_step_post_hook(self._after_update),
        ]
        if fault.log == "shows":
            self._hooks.append(model.register_forward_pre_hook(untraced(self._before_forward), prepend=True))

    def remove(self) -> None:
        """Let the optimizer be as it was, in the midst of an update too."""
        for hook in self._hooks:
            hook.remove()
        self._restore()

    def _before_forward(self, module: nn.Module, inputs: object) -> None:
        step = self._clock()
        if not self._course.is_over and self._fault.is_at(step) and step > self._updated and not self._kept:
            self._raise(self._optimizer)

    def _before_update(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self._restore()  # where an update failed half-way
        step, course = self._clock(), self._course
        # steps that were not updated for are not seen here: the same step again is a way back too
        if step <= self._updated and self._updated >= self._fault.step:
            course.is_over = True
        self._updated = step
        if course.is_over or not self._fault.is_at(step):
            return
        before = float(optimizer.param_groups[0]["lr"])
        self._raise(optimizer)
        if course.under_way != step:
            course.under_way = step
            course.note("", step, element=None, before=before, after=float(optimizer.param_groups[0]["lr"]))

    def _after_update(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self._restore()

    @torch.no_grad()
    def _raise(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            rate = group["lr"]
            if not isinstance(rate, Tensor):
                self._kept.append((group, rate))
                group["lr"] = rate * self._fault.factor
            elif not any(rate is place for place, _ in self._kept):  # groups may share one tensor
                self._kept.append((rate, rate.clone()))
                rate.mul_(self._fault.factor)  # in its place: a captured graph reads it there

    @torch.no_grad()
    def _restore(self) -> None:
        for place, rate in self._kept:
            if isinstance(place, Tensor):
                place.copy_(rate)
            else:
                place["lr"] = rate
        self._kept.clear()
