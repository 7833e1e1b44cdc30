"""Faults in the moments of optimizers: before a forward pass, or around an update."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from sealegs.faults.live import BitFlip, FrozenMoment2, MomentsReset
from sealegs.faults.strikes import Clock, FaultProgress
from sealegs.faults.targets import FaultTarget, reshard
from sealegs.faults.weight import untraced
from sealegs.signals.weights import FIRST_MOMENTS, SECOND_MOMENTS

MomentPlan: TypeAlias = list[tuple[FaultProgress, BitFlip | MomentsReset, list[FaultTarget]]]
"""Faults of moments, their progress, and the parameters whose moments they strike; a reset strikes all."""
NAMES = {"moment1": FIRST_MOMENTS, "moment2": SECOND_MOMENTS}


def strike_moments(
    model: nn.Module, plan: MomentPlan, optimizers: Sequence[Optimizer], clock: Clock
) -> RemovableHandle:
    """Strike moments before the first forward pass of a step. While there are none, the fault stays pending.

    If parameters are sharded, the plan includes what other ranks strike: finding a moment needs the shard in the
    parameter's place, and gathering that again takes all ranks.
    """

    def strike(module: nn.Module, inputs: object) -> None:
        step = clock()
        for course, fault, targets in plan:
            if not course.is_due(step):
                continue
            course.done.add(step)
            if isinstance(fault, MomentsReset):
                reset(course, fault, optimizers, step)
                continue
            [target] = targets
            reshard(target)
            moment = moment_of(target.parameter(), fault, optimizers)
            if course.is_here and moment is not None:
                course.strike_element(fault, target.name, moment, step)

    return model.register_forward_pre_hook(untraced(strike), prepend=True)


def moment_of(parameter: nn.Parameter, fault: BitFlip, optimizers: Sequence[Optimizer]) -> Tensor | None:
    """The moment that a fault strikes, if its optimizer has one by now."""
    kept = (optimizer.state.get(parameter, {}).get(name) for optimizer in optimizers for name in NAMES[fault.in_])
    return next((moment for moment in kept if isinstance(moment, Tensor)), None)


@torch.no_grad()
def reset(course: FaultProgress, fault: MomentsReset, optimizers: Sequence[Optimizer], step: int) -> None:
    """Zero the moments of this rank: all, or those of one kind."""
    gathered = [moment for optimizer in optimizers for moment in moments_in(optimizer, fault.in_)]
    if not gathered:
        return
    norm = norm_of(gathered)
    for moment in gathered:
        course.result(moment.clone(), moment).zero_()
    course.note("*", step, before=norm, after=0.0)


def moments_in(optimizer: Optimizer, kind: Literal["both", "moment1", "moment2"] = "both") -> Iterator[Tensor]:
    """Optimizer state in the shape of its parameter: this rank's part of it."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            is_moment = isinstance(value, Tensor) and value.is_floating_point() and value.shape == parameter.shape
            if is_moment and name != "step" and (kind == "both" or name in NAMES[kind]):
                yield value.to_local() if isinstance(value, DTensor) else value


def norm_of(moments: Iterable[Tensor]) -> float:
    """The norm of all of them together; waits for the device."""
    return math.sqrt(sum(float(moment.double().square().sum()) for moment in moments))


class FrozenMoments:
    """Restores the second moments of one optimizer after each of its updates. It updates once per step."""

    def __init__(
        self, course: FaultProgress, fault: FrozenMoment2, model: nn.Module, optimizer: Optimizer, clock: Clock
    ) -> None:
        self._course = course
        self._clock = clock
        self._kept: list[tuple[Tensor, Tensor]] = []
        """The moments, and their former values."""
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_update),
            optimizer.register_step_post_hook(self._after_update),
        ]

    def remove(self) -> None:
        """Let the optimizer be."""
        for hook in self._hooks:
            hook.remove()
        self._kept.clear()

    def _before_update(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self._kept.clear()  # an update may have failed half-way
        if self._course.is_due(self._clock()):
            self._kept += [(moment, moment.clone()) for moment in moments_in(optimizer, "moment2")]

    @torch.no_grad()
    def _after_update(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if not self._kept:
            return
        step, learned = self._clock(), norm_of(moment for moment, _ in self._kept)
        for moment, old in self._kept:
            moment.copy_(self._course.result(moment, old))
        if self._course.begins(step):
            self._course.note("*", step, before=learned, after=norm_of(old for _, old in self._kept))
        self._kept.clear()
