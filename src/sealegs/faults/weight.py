"""Faults in the weights: before a forward pass, or after an update."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from sealegs.errors import ConfigError
from sealegs.faults.live import Bf16Weights, BitFlip, WeightScale
from sealegs.faults.strikes import Clock, FaultProgress
from sealegs.faults.targets import FaultTarget, label, reshard

WeightPlan: TypeAlias = list[tuple[FaultProgress, BitFlip | WeightScale, list[FaultTarget]]]
"""Faults of weights, their progress, and the parameters that they strike."""
Hook = TypeVar("Hook", bound=Callable[..., Any])


def strike_weights(model: nn.Module, plan: WeightPlan, clock: Clock) -> RemovableHandle:
    """Strike weights before the first forward pass of a step; under FSDP2 in the shards, which all ranks gather.

    If parameters are sharded, the plan includes what other ranks strike: weights that an evaluation left gathered would
    hide the strike, and gathering them again takes all ranks.
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
                    weight = target.parameter().data  # unknown to autograd: failing memory does not announce itself
                    scale(fault, course.result(weight.clone(), weight))
                course.note(label(fault, targets), step, before=1.0, after=fault.factor)
            else:
                course.strike_element(fault, targets[0].name, targets[0].parameter().data, step)

    # before FSDP2's own hook gathers the shards
    return model.register_forward_pre_hook(untraced(strike), prepend=True)


@torch.no_grad()
def scale(fault: WeightScale, weight: Tensor) -> None:
    """Multiply a weight, or its first rows, in place."""
    if fault.rows is None:
        weight.mul_(fault.factor)
        return
    factors = torch.ones(len(weight), *(1 for _ in weight.shape[1:]), dtype=weight.dtype, device=weight.device)
    factors[: int(fault.rows * len(weight))] = fault.factor
    if isinstance(weight, DTensor):  # rows are counted over all shards
        everywhere = [Replicate() for _ in range(weight.device_mesh.ndim)]
        factors = DTensor.from_local(factors, weight.device_mesh, everywhere, run_check=False)
    weight.mul_(factors)


def refuse_broken_rows(fault: WeightScale, targets: Sequence[FaultTarget]) -> None:
    """Refuse a share that is not a whole number of rows in each tensor."""
    if fault.rows is None:
        return
    for target in targets:
        shape = tuple(target.parameter().shape)
        if not shape or shape[0] % fault.rows.denominator:
            raise ConfigError(
                f"{fault}: rows={fault.rows}: {target.name} is {shape}, and that share of it no whole rows; "
                "give another share, or name other tensors"
            )


def round_weights(
    course: FaultProgress, fault: Bf16Weights, model: nn.Module, optimizer: Optimizer, clock: Clock
) -> RemovableHandle:
    """Round the weights that an optimizer trains to bf16, after its update."""

    @torch.no_grad()
    def round_all(optimizer: Optimizer, args: object, kwargs: object) -> None:
        step = clock()
        if not course.is_due(step):
            return
        weights = [weight for weight in trained_by(optimizer) if weight.is_floating_point()]
        for weight in weights:
            weight.copy_(course.result(weight, weight.bfloat16()))
        if weights and course.begins(step):
            course.note("*", step, before=8.0 * weights[0].itemsize, after=16.0)

    return optimizer.register_step_post_hook(round_all)


def trained_by(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters that an optimizer trains; under FSDP2 the shards, whatever stands in their place in the model."""
    return [weight for group in optimizer.param_groups for weight in group["params"] if weight.requires_grad]


def untraced(hook: Hook) -> Hook:
    """A module hook that ``torch.compile`` calls instead of tracing: traced, it would see one step for ever."""
    disabled: Hook = torch.compiler.disable(hook)
    return disabled
