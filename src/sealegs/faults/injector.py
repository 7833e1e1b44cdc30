"""Attaches faults to a model in training, so that something goes wrong in it that no loop can notice.

    with inject([parse("nan-gradient:rank=1@120")], model, clock=lambda: step) as injector:
        for step, batch in enumerate(batches): ...
    print(*injector.strikes, *injector.pending())

Neither model nor optimizer is wrapped. A hook on a parameter strikes its gradient. It runs in the backward pass before
the gradient is accumulated, and so before DDP's all-reduce or FSDP2's reduce-scatter mixes the ranks. FSDP2's
parameters are shards that no backward pass reaches: there the hook is put on the unsharded parameter, once FSDP2's own
pre-forward hook has put that in place. A pre-forward hook of the model strikes weights (``weight.py``) and moments
(``optimizer.py``), under FSDP2 in the shards. Hooks around the update strike learning rates and betas (``rates.py``).
The forward hook of a module strikes its output (``activation.py``). Mistakes of a loop are in ``code.py``. A placebo
does all the work of its fault, and leaves everything as it was.

Attach after DDP and ``fully_shard``, which replaces the parameters, and before the first call of a compiled model:
``torch.compile`` never looks for new module hooks in what it has traced (it does not trace hooks on gradients at all).
Give ``inject`` the outermost module that the loop calls: a module hook inside a compiled model breaks its graph in two.
Faults of the data are in ``batches.py``.
"""

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self, TypeAlias

from torch import Tensor, nn
from torch.optim import Optimizer

from sealegs.errors import ConfigError
from sealegs.faults.activation import strike_output, struck_module
from sealegs.faults.code import OwnGradients, UnclearedGradients, refuse_unless_reduced
from sealegs.faults.contract import Fault
from sealegs.faults.layers import quantisers, routers, strike_quantisers, strike_routers
from sealegs.faults.live import (
    Bf16Weights,
    ElementFault,
    FrozenMoment2,
    GradientScale,
    LiveFault,
    LrSpike,
    MissingZeroGrad,
    MomentsReset,
    RouterBias,
    ScalerOff,
    SkippedAllReduce,
    StuckScale,
    WarmupLost,
    WeightScale,
    WrongBetas,
)
from sealegs.faults.optimizer import FrozenMoments, MomentPlan, strike_moments
from sealegs.faults.rates import Borrowed, refuse_without_values
from sealegs.faults.spec import parse
from sealegs.faults.strikes import Clock, FaultProgress, Removable, Strike, place, refuse_twice_or_nowhere
from sealegs.faults.targets import FaultTarget, TensorFault, is_in_moment, is_in_output, is_in_weight, label, select
from sealegs.faults.weight import WeightPlan, refuse_broken_rows, round_weights, strike_weights, untraced

GradientHook: TypeAlias = Callable[[Tensor], Tensor | None]
Plan: TypeAlias = list[tuple[LiveFault, list[FaultTarget]]]
"""Faults and the parameters that they strike; none where they strike a whole optimizer, or a module."""

AROUND_UPDATES: dict[type[LiveFault], Callable[[FaultProgress, Any, nn.Module, Optimizer, Clock], Removable]] = {
    LrSpike: Borrowed,
    WarmupLost: Borrowed,
    WrongBetas: Borrowed,
    FrozenMoment2: FrozenMoments,
    Bf16Weights: round_weights,
    MissingZeroGrad: UnclearedGradients,
    SkippedAllReduce: OwnGradients,
}
"""Faults with hooks of their own on each optimizer, or on its parameters."""


class Injector:
    """Faults attached to a model in training, until ``detach`` or the end of its ``with``. Made by ``inject``."""

    strikes: list[Strike]
    """The strikes on this rank so far: one for each fault and step."""

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        rank: int,
        clock: Callable[[], int],
        say: Callable[[str], None] | None,
    ) -> None:
        self.strikes = []
        self._clock = clock
        self._say = say
        self._courses: list[FaultProgress] = []
        self._handles: list[Removable] = []
        self._attach(plan, model, optimizers, rank)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.detach()

    def detach(self) -> None:
        """Take every hook off model and optimizers. ``strikes`` and ``pending`` can still be read."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def pending(self) -> tuple[Fault, ...]:
        """Faults of this rank that have not struck at each of their steps.

        The step never came, the tensor had no gradient in it, there was no moment yet, or no forward pass reached the
        hook. A fault that recurs for ever is not pending once it has struck.
        """
        return tuple(course.fault for course in self._courses if course.is_pending)

    def _attach(self, plan: Plan, model: nn.Module, optimizers: Sequence[Optimizer], rank: int) -> None:
        """Put the hooks of each fault on its targets."""
        weights: WeightPlan = []
        moments: MomentPlan = []
        in_units: dict[nn.Module, list[tuple[FaultTarget, GradientHook]]] = {}
        for fault, targets in plan:
            course = FaultProgress(fault, is_here=fault.rank in (None, rank), report=self._report)
            if course.is_here:
                self._courses.append(course)
            elif not any(target.unit is not None for target in targets):
                continue
            if attach := AROUND_UPDATES.get(type(fault)):
                self._handles += [attach(course, fault, model, optimizer, self._clock) for optimizer in optimizers]
            elif is_in_output(fault):
                self._handles.append(strike_output(course, fault, model, self._clock))
            elif isinstance(fault, RouterBias):
                self._handles += strike_routers(course, fault, model, self._clock)
            elif isinstance(fault, StuckScale):
                self._handles += strike_quantisers(course, fault, model, self._clock)
            elif isinstance(fault, MomentsReset) or is_in_moment(fault):
                moments.append((course, fault, targets))
            elif is_in_weight(fault):
                weights.append((course, fault, targets))
            elif course.is_here:
                self._hook_gradients(course, fault, targets, in_units)
        for unit, hooks in in_units.items():
            self._hook_unsharded(unit, hooks)
        if weights:
            self._handles.append(strike_weights(model, weights, self._clock))
        if moments:
            self._handles.append(strike_moments(model, moments, optimizers, self._clock))

    def _hook_gradients(
        self,
        course: FaultProgress,
        fault: LiveFault,
        targets: list[FaultTarget],
        in_units: dict[nn.Module, list[tuple[FaultTarget, GradientHook]]],
    ) -> None:
        """Put a hook on each parameter; hooks for FSDP2's units are kept until the unsharded parameter exists."""
        for target in targets:
            if isinstance(fault, GradientScale | ScalerOff):
                hook = self._changing(course, fault, label(fault, targets))
            else:
                assert isinstance(fault, ElementFault)
                hook = self._striking(course, fault, target)
            if target.unit is None:
                self._handles.append(target.parameter().register_hook(hook))
            else:
                in_units.setdefault(target.unit, []).append((target, hook))

    def _hook_unsharded(self, unit: nn.Module, hooks: list[tuple[FaultTarget, GradientHook]]) -> None:
        """Put hooks on the parameters that FSDP2 computes with. It keeps them from pass to pass, but need not."""
        hooked: list[tuple[nn.Parameter, GradientHook]] = []

        def after_unshard(module: nn.Module, inputs: object) -> None:
            for target, hook in hooks:
                parameter = target.parameter()
                if parameter.requires_grad and not any(parameter is p and hook is h for p, h in hooked):
                    hooked.append((parameter, hook))
                    self._handles.append(parameter.register_hook(hook))

        # not prepended: FSDP2 prepends its own, which therefore runs first
        self._handles.append(unit.register_forward_pre_hook(untraced(after_unshard)))

    def _changing(self, course: FaultProgress, fault: GradientScale | ScalerOff, tensors: str) -> GradientHook:
        def change(gradient: Tensor) -> Tensor | None:
            step = self._clock()
            if not course.is_due(step):
                return None
            if isinstance(fault, GradientScale):
                changed, before, after = gradient * fault.factor, 1.0, fault.factor
            else:
                changed, before, after = gradient.half().to(gradient.dtype), 8.0 * gradient.itemsize, 16.0
            if course.begins(step):
                course.note(tensors, step, before=before, after=after)
            return course.result(gradient, changed)

        return change

    def _striking(self, course: FaultProgress, fault: ElementFault, target: FaultTarget) -> GradientHook:
        def strike(gradient: Tensor) -> Tensor | None:
            step = self._clock()
            if not course.is_due(step):
                return None
            # a copy, since autograd may share the memory with others; with its graph, for a second derivative
            struck = gradient.coalesce().clone() if gradient.is_sparse else gradient.clone()
            course.strike_element(fault, target.name, struck, step)
            return struck

        return strike

    def _report(self, strike: Strike) -> None:
        self.strikes.append(strike)
        if self._say is not None:
            self._say(str(strike))


def inject(
    faults: Iterable[Fault | str],
    model: nn.Module,
    *,
    clock: Callable[[], int],
    optimizers: Optimizer | Iterable[Optimizer] = (),
    rank: int | None = None,
    say: Callable[[str], None] | None = None,
) -> Injector:
    """Attach faults to a model in training, and to its optimizers. Usable as ``with``, or until ``detach``.

    ``faults`` may be written as on the command line, ``nan-gradient@120``. ``clock`` gives the number of the present
    step, the same in all its micro-batches. ``optimizers`` are needed for faults of moments and learning rates, and for
    all others that last from update to update. ``rank`` is this process's; without it, ``torch.distributed`` gives it.
    Each strike is kept in ``strikes`` and passed to ``say`` as a line.

    Steps without a fault cost a call of ``clock`` for each hook, and compute what they would have computed without.
    A strike on an element waits for the device.
    """
    here, ranks = place(rank)
    several = (optimizers,) if isinstance(optimizers, Optimizer) else tuple(optimizers)
    plan: Plan = []
    for fault in (parse(each) if isinstance(each, str) else each for each in faults):
        if not isinstance(fault, LiveFault):
            raise ConfigError(
                f"{fault}: strikes neither model nor optimizer; give faults of the data to batches.Spoiler, those of a "
                "policy-gradient loop to policy.PolicyFaults (examples/grpo_toy.py)"
            )
        # on every rank, so that all refuse or none
        refuse_unless_reduced(fault, model, ranks)
        refuse_twice_or_nowhere(fault, [other for other, _ in plan], ranks)
        if not several and (type(fault) in AROUND_UPDATES or isinstance(fault, MomentsReset) or is_in_moment(fault)):
            raise ConfigError(f"{fault}: strikes what an optimizer has; give inject the optimizers too")
        refuse_without_values(fault, several)
        targets: list[FaultTarget] = []
        if is_in_output(fault):
            struck_module(fault, model)
        elif isinstance(fault, RouterBias):
            routers(fault, model)
        elif isinstance(fault, StuckScale):
            quantisers(fault, model)
        elif isinstance(fault, TensorFault):
            targets = select(model, fault, several)
        if isinstance(fault, WeightScale):
            refuse_broken_rows(fault, targets)
        plan.append((fault, targets))
    return Injector(plan, model, several, here, clock, say)
