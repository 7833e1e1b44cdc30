"""A model in training and Faults in, Strikes out: gradients and weights go wrong where no loop can notice.

    with inject([parse("nan-gradient:rank=1@120")], model, clock=lambda: step) as injector:
        for step, batch in enumerate(batches): ...
    print(*injector.strikes, *injector.pending())

The model is not wrapped. A gradient is struck by a hook on its parameter, which runs in the backward pass before the
gradient is accumulated, and so before DDP's all-reduce or FSDP2's reduce-scatter mixes the ranks. FSDP2's parameters
are shards that no backward pass reaches: there the hook is put on the unsharded parameter, found in its place when
FSDP2's own pre-forward hook has put it there. A weight is struck by a pre-forward hook of the model; under FSDP2, in
the shard of each rank that is struck, from which all ranks gather it.

Attach after DDP and ``fully_shard``, which replaces the parameters, and before the first call of a compiled model: what
``torch.compile`` has traced never looks for new module hooks again (hooks on gradients it does not trace at all). Give
``inject`` the outermost module that the loop calls: a module hook inside of what is compiled breaks its graph in two.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, TypeAlias, cast

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from sealegs.errors import ConfigError
from sealegs.faults.spec import BitFlip, ElementFault, Fault, GradientScale
from sealegs.faults.targets import Target, damage, draw_element, select

GradientHook: TypeAlias = Callable[[Tensor], Tensor | None]
Plan: TypeAlias = list[tuple[ElementFault | GradientScale, list[Target]]]
"""Faults and what they strike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """What a fault did at one step."""

    step: int
    fault: Fault
    tensor: str
    """The parameter's name; where a factor took several, ``*`` or ``blocks.0.*``."""
    element: tuple[int, ...] | None
    """Where in the tensor (of a sharded weight: in this rank's shard); none where the whole gradient was scaled."""
    before: float
    """The element's value; of a scaled gradient the factor it had, 1."""
    after: float

    def __str__(self) -> str:
        """``step 120: nan-gradient@120 struck the gradient of embedding.weight[3, 17]: 0.0123 became nan``"""
        where = "weight" if is_in_weight(self.fault) else "gradient"
        what = f"step {self.step}: {self.fault} struck the {where} of {self.tensor}"
        if self.element is None:
            return f"{what}: times {self.after:.4g}"
        return f"{what}{list(self.element)}: {self.before:.4g} became {self.after:.4g}"


@dataclass(slots=True)
class Course:
    """How far a fault has come."""

    fault: Fault
    is_here: bool
    """Whether it strikes this rank."""
    done: set[int] = field(default_factory=set)
    """Steps that are over for it."""
    under_way: int | None = None
    """The step at which it has struck and will again, in the next micro-batch."""
    struck: int = 0
    """At how many steps it struck."""

    def is_due(self, step: int) -> bool:
        """Whether it strikes now. A step that comes again after a rollback is not struck again."""
        if self.under_way is not None and self.under_way != step:
            self.done.add(self.under_way)
            self.under_way = None
        return step in self.fault.when and step not in self.done


class Injector:
    """Faults attached to a model, until ``detach`` or the end of its ``with``. Made by ``inject``."""

    strikes: list[Strike]
    """What was done on this rank so far: one for each fault and step."""

    def __init__(
        self, plan: Plan, model: nn.Module, rank: int, clock: Callable[[], int], say: Callable[[str], None] | None
    ) -> None:
        self.strikes = []
        self._clock = clock
        self._say = say
        self._courses: list[Course] = []
        self._handles: list[RemovableHandle] = []
        self._attach(plan, model, rank)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.detach()

    def detach(self) -> None:
        """Take every hook off the model. ``strikes`` and ``pending`` can still be read."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def pending(self) -> tuple[Fault, ...]:
        """Faults of this rank that have not struck at each of their steps.

        The step never came, or the tensor had no gradient in it, or no forward pass reached the hook.
        """
        return tuple(course.fault for course in self._courses if course.struck < course.fault.steps)

    def _attach(self, plan: Plan, model: nn.Module, rank: int) -> None:
        """Put the hooks of each fault on its targets."""
        flips: list[tuple[Course, BitFlip, Target]] = []
        in_units: dict[nn.Module, list[tuple[Target, GradientHook]]] = {}
        for fault, targets in plan:
            course = Course(fault, is_here=fault.rank in (None, rank))
            if course.is_here:
                self._courses.append(course)
            if isinstance(fault, BitFlip) and is_in_weight(fault):
                flips += [(course, fault, target) for target in targets if course.is_here or target.unit is not None]
                continue
            if not course.is_here:
                continue
            for target in targets:
                if isinstance(fault, GradientScale):
                    hook = self._scaling(course, fault, label(fault, targets))
                else:
                    hook = self._striking(course, fault, target)
                if target.unit is None:
                    self._handles.append(target.parameter().register_hook(hook))
                else:
                    in_units.setdefault(target.unit, []).append((target, hook))
        for unit, hooks in in_units.items():
            self._hook_unsharded(unit, hooks)
        if flips:
            # before FSDP2's own hook gathers the shards
            self._handles.append(model.register_forward_pre_hook(untraced(self._flipping(flips)), prepend=True))

    def _hook_unsharded(self, unit: nn.Module, hooks: list[tuple[Target, GradientHook]]) -> None:
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

    def _scaling(self, course: Course, fault: GradientScale, tensors: str) -> GradientHook:
        def scale(gradient: Tensor) -> Tensor | None:
            step = self._clock()
            if not course.is_due(step):
                return None
            if course.under_way is None:
                course.under_way = step
                course.struck += 1
                self._report(
                    Strike(step=step, fault=fault, tensor=tensors, element=None, before=1.0, after=fault.factor)
                )
            return gradient * fault.factor

        return scale

    def _striking(self, course: Course, fault: ElementFault, target: Target) -> GradientHook:
        def strike(gradient: Tensor) -> Tensor | None:
            step = self._clock()
            if not course.is_due(step):
                return None
            # a copy, since autograd may hand the same memory to others; made with its graph, for a second derivative
            struck = gradient.coalesce().clone() if gradient.is_sparse else gradient.clone()
            self._strike(course, fault, target, struck, step)
            return struck

        return strike

    def _flipping(self, flips: list[tuple[Course, BitFlip, Target]]) -> Callable[[nn.Module, object], None]:
        def flip(module: nn.Module, inputs: object) -> None:
            step = self._clock()
            for course, fault, target in flips:
                if course.is_due(step):
                    course.done.add(step)
                    if target.unit is not None:
                        # gathered weights, left by an evaluation, would hide the flip; gathering again takes all ranks
                        cast(FSDPModule, target.unit).reshard()
                    if course.is_here:
                        self._strike(course, fault, target, target.parameter(), step)

        return flip

    @torch.no_grad()
    def _strike(self, course: Course, fault: ElementFault, target: Target, tensor: Tensor, step: int) -> None:
        """Strike one element in its place, once in a step. An empty shard has none: the fault stays pending."""
        if isinstance(tensor, DTensor):
            tensor = tensor.to_local()
        values = tensor.values() if tensor.is_sparse else tensor
        if not values.numel():
            return
        element = draw_element(fault, step, values.shape)
        before, after = damage(fault, values[element])
        if tensor.is_sparse:
            element = (*tensor.indices()[:, element[0]].tolist(), *element[1:])
        course.done.add(step)
        course.struck += 1
        self._report(Strike(step=step, fault=fault, tensor=target.name, element=element, before=before, after=after))

    def _report(self, strike: Strike) -> None:
        self.strikes.append(strike)
        if self._say is not None:
            self._say(str(strike))


def inject(
    faults: Iterable[Fault],
    model: nn.Module,
    *,
    clock: Callable[[], int],
    rank: int | None = None,
    say: Callable[[str], None] | None = None,
) -> Injector:
    """Attach faults to a model in training. Usable as ``with``, or until ``detach``.

    ``clock`` gives the number of the step under way, in all its micro-batches. ``rank`` is this process's; without it,
    ``torch.distributed`` is asked. Each strike is kept in ``strikes`` and said to ``say`` as a line.

    The steps of no fault cost a call of ``clock`` for each hook, and compute what they would have computed without.
    An element's strike waits for the device.
    """
    here, ranks = place(rank)
    plan: Plan = []
    for fault in faults:
        if not isinstance(fault, ElementFault | GradientScale):
            raise ConfigError(f"{fault}: strikes neither gradients nor weights; give it to the injector of its kind")
        if any(fault == other for other, _ in plan):
            raise ConfigError(f"{fault}: is given twice; keep one, or give them different seeds")
        if fault.rank is not None and ranks is not None and fault.rank >= ranks:
            raise ConfigError(f"{fault}: rank={fault.rank}: this run has ranks 0 to {ranks - 1}; take one of them")
        plan.append((fault, select(model, fault)))  # on every rank, so that all refuse or none
    return Injector(plan, model, here, clock, say)


def place(rank: int | None) -> tuple[int, int | None]:
    """This process's rank, and how many there are, where that is known."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank() if rank is None else rank, distributed.get_world_size()
    return (0, 1) if rank is None else (rank, None)


def is_in_weight(fault: Fault) -> bool:
    """Whether it strikes a weight rather than a gradient."""
    return isinstance(fault, BitFlip) and fault.in_ == "weight"


def label(fault: GradientScale, targets: list[Target]) -> str:
    """What a factor takes: a name, or the common beginning of several."""
    if len(targets) == 1:
        return targets[0].name
    return "*" if fault.tensor is None else f"{fault.tensor}.*"


def untraced(hook: Callable[[nn.Module, object], None]) -> Callable[[nn.Module, object], None]:
    """A module hook that ``torch.compile`` calls instead of tracing it: traced, it would know one step for ever."""
    disabled: Callable[[nn.Module, object], None] = torch.compiler.disable(hook)
    return disabled
