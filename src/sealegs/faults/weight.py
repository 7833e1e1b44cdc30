"""A model in training and Faults in, weights that have gone wrong out: struck before a forward pass."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.hooks import RemovableHandle

from sealegs.errors import ConfigError
from sealegs.faults.spec import BitFlip, WeightScale
from sealegs.faults.strikes import Course
from sealegs.faults.targets import Target, label, reshard

WeightPlan: TypeAlias = list[tuple[Course, BitFlip | WeightScale, list[Target]]]
"""Faults of weights, how far they have come, and what they strike."""


def strike_weights(model: nn.Module, plan: WeightPlan, clock: Callable[[], int]) -> RemovableHandle:
    """Strike weights before the first forward pass of a step; under FSDP2, in the shards, which all ranks gather.

    The plan has what other ranks strike too, where that is sharded: weights that an evaluation left gathered would
    hide it, and to gather them again takes all ranks.
    """

    def strike(module: nn.Module, inputs: object) -> None:
        step = clock()
        for course, fault, targets in plan:
            if not course.is_due(step):
                continue
            course.done.add(step)
            for target in targets:
                reshard(target)
            if not course.is_here:
                continue
            if isinstance(fault, WeightScale):
                for target in targets:
                    scale(fault, target.parameter())
                course.note(label(fault, targets), step, element=None, before=1.0, after=fault.factor)
            else:
                course.strike_element(fault, targets[0].name, targets[0].parameter(), step)

    # before FSDP2's own hook gathers the shards
    return model.register_forward_pre_hook(untraced(strike), prepend=True)


@torch.no_grad()
def scale(fault: WeightScale, weight: Tensor) -> None:
    """Multiply a weight, or its first rows, in its place."""
    if fault.rows is None:
        weight.mul_(fault.factor)
        return
    factors = torch.ones(len(weight), *(1 for _ in weight.shape[1:]), dtype=weight.dtype, device=weight.device)
    factors[: int(fault.rows * len(weight))] = fault.factor
    if isinstance(weight, DTensor):  # rows are counted over all shards
        everywhere = [Replicate() for _ in range(weight.device_mesh.ndim)]
        factors = DTensor.from_local(factors, weight.device_mesh, everywhere, run_check=False)
    weight.mul_(factors)


def refuse_broken_rows(fault: WeightScale, targets: Sequence[Target]) -> None:
    """A share of the rows must be some whole rows, in each tensor."""
    if fault.rows is None:
        return
    for target in targets:
        shape = tuple(target.parameter().shape)
        if not shape or shape[0] % fault.rows.denominator:
            raise ConfigError(
                f"{fault}: rows={fault.rows}: {target.name} is {shape}, and that share of it no whole rows; "
                "give another share, or name other tensors"
            )


def untraced(hook: Callable[[nn.Module, object], None]) -> Callable[[nn.Module, object], None]:
    """A module hook that ``torch.compile`` calls instead of tracing it: traced, it would know one step for ever."""
    disabled: Callable[[nn.Module, object], None] = torch.compiler.disable(hook)
    return disabled
