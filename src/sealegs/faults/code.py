"""Faults that mistakes in a loop's code cause in the gradients."""

from functools import partial

from torch import Tensor, distributed, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from sealegs.errors import ConfigError
from sealegs.faults.contract import Fault
from sealegs.faults.live import MissingZeroGrad, SkippedAllReduce
from sealegs.faults.strikes import Clock, FaultProgress
from sealegs.faults.weight import trained_by


class UnclearedGradients:
    """Adds the gradients that an update left to those of the next step, before DDP reduces them.

    FSDP2 calls the same hooks after it has reduced gradients into shards, which is where they would have been left.
    """

    def __init__(
        self, course: FaultProgress, fault: MissingZeroGrad, model: nn.Module, optimizer: Optimizer, clock: Clock
    ) -> None:
        self._course = course
        self._fault = fault
        self._clock = clock
        self._left: dict[nn.Parameter, Tensor] = {}
        self._left_by = -1
        """The step whose update left them."""
        self._summed = 1
        """The number of steps that they are the sum of."""
        self._hooks = [
            optimizer.register_step_post_hook(self._after_update),
            *(weight.register_post_accumulate_grad_hook(self._add) for weight in trained_by(optimizer)),
        ]

    def remove(self) -> None:
        """Let gradients be cleared."""
        for hook in self._hooks:
            hook.remove()
        self._left.clear()

    def _add(self, weight: nn.Parameter) -> None:
        step, course = self._clock(), self._course
        if not course.is_due(step) or self._left_by != step - 1:
            return
        left = self._left.pop(weight, None)  # once per step
        if left is None or weight.grad is None:
            return
        # a new tensor, since autograd may share the memory with others
        weight.grad = course.result(weight.grad, weight.grad + left)
        if course.begins(step):
            course.note("*", step, before=1.0, after=self._summed + 1.0)

    def _after_update(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        step = self._clock()
        self._left.clear()
        if not self._fault.is_at(step + 1) or step + 1 in self._course.done:
            return
        self._summed = self._summed + 1 if self._course.under_way == step else 1
        self._left_by = step
        self._left = {w: w.grad.detach().clone() for w in trained_by(optimizer) if w.grad is not None}


class OwnGradients:
    """Replaces the mean that DDP has made by a rank's own gradients, from the end of the backward pass on."""

    def __init__(
        self, course: FaultProgress, fault: SkippedAllReduce, model: nn.Module, optimizer: Optimizer, clock: Clock
    ) -> None:
        self._course = course
        self._clock = clock
        self._step = -1
        self._own: dict[nn.Parameter, Tensor] = {}
        """The sum over this step's backward passes."""
        self._means: dict[nn.Parameter, Tensor] = {}
        """DDP's means of them."""
        self._hooks = [weight.register_hook(partial(self._gather, weight)) for weight in trained_by(optimizer)]

    def remove(self) -> None:
        """Let DDP's means be used."""
        for hook in self._hooks:
            hook.remove()
        self._own.clear()
        self._means.clear()

    def _gather(self, weight: nn.Parameter, gradient: Tensor) -> None:
        """Called before a gradient is accumulated, and so before it is reduced."""
        step, course = self._clock(), self._course
        if not course.is_due(step):
            return
        if step != self._step:
            self._step = step
            self._own.clear()
            self._means.clear()
        mean = self._means.pop(weight, None)
        if mean is not None and weight.grad is not None:
            weight.grad.copy_(mean)  # the other ranks must get what they would have got
        gradient = gradient.detach()
        self._own[weight] = self._own[weight] + gradient if weight in self._own else gradient.clone()
        # DDP's own callback waits for the reduction. It is queued by now or later, but before callbacks run, so that a
        # callback queued by another one comes after it.
        queue = Variable._execution_engine.queue_callback
        queue(lambda: queue(partial(self._put, weight)))
        if course.begins(step):
            course.note("*", step, before=float(distributed.get_world_size()), after=1.0)

    def _put(self, weight: nn.Parameter) -> None:
        if weight.grad is None or weight not in self._own:
            return
        self._means[weight] = weight.grad.detach().clone()
        weight.grad.copy_(self._course.result(self._means[weight], self._own[weight]))


def refuse_unless_reduced(fault: Fault, model: nn.Module, ranks: int | None) -> None:
    """Refuse to skip an all-reduce where there is none."""
    if not isinstance(fault, SkippedAllReduce):
        return
    if ranks == 1:
        raise ConfigError(f"{fault}: this run has one rank, and reduces nothing; start it with two or more")
    if not any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ConfigError(f"{fault}: no DistributedDataParallel reduces the gradients; give inject a model inside one")
