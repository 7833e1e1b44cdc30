"""Faults that strike in, Strikes out: what each did, and how far it has come."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor

from sealegs.errors import ConfigError
from sealegs.faults.spec import (
    BitFlip,
    ElementFault,
    Fault,
    GradientScale,
    LiveFault,
    LrSpike,
    MomentsReset,
    WeightScale,
)
from sealegs.faults.targets import damage, draw_element

PLACES = {"moment1": "first moment", "moment2": "second moment"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """What a fault did at one step."""

    step: int
    fault: Fault
    tensor: str
    """The parameter's name; where a factor took several, ``*`` or ``blocks.0.*``; empty where it is none's."""
    element: tuple[int, ...] | None
    """Where in the tensor (of a sharded one: in this rank's shard); none where it is no single element."""
    before: float
    """The element's value, or the learning rate; of what was scaled the factor it had, 1; the norm of all moments."""
    after: float

    def __str__(self) -> str:
        """``step 120: nan-gradient@120 struck the gradient of embedding.weight[3, 17]: 0.0123 became nan``"""
        element = "" if self.element is None else list(self.element)
        tensor = f" of {self.tensor}{element}" if self.tensor else ""
        what = f"step {self.step}: {self.fault} struck the {place_of(self.fault)}{tensor}"
        if isinstance(self.fault, GradientScale | WeightScale):
            return f"{what}: times {self.after:.4g}"
        norm = "norm " if isinstance(self.fault, MomentsReset) else ""
        return f"{what}: {norm}{self.before:.4g} became {self.after:.4g}"


def place_of(fault: Fault) -> str:
    """What a fault strikes, in words."""
    if isinstance(fault, LrSpike):
        return "learning rate"
    if isinstance(fault, MomentsReset):
        return "moments"
    if isinstance(fault, WeightScale):
        return "weight"
    return PLACES.get(fault.in_, fault.in_) if isinstance(fault, BitFlip) else "gradient"


@dataclass(slots=True)
class Course:
    """How far a fault has come."""

    fault: LiveFault
    is_here: bool
    """Whether it strikes this rank."""
    report: Callable[[Strike], None]
    done: set[int] = field(default_factory=set)
    """Steps that are over for it."""
    under_way: int | None = None
    """The step at which it has struck and will again, in the next micro-batch or for the next optimizer."""
    struck: int = 0
    """At how many steps it struck."""
    is_over: bool = False
    """Whether it will never strike again, whatever its steps."""

    @property
    def is_pending(self) -> bool:
        """Whether it has not struck at each of its steps; where there is no end to them, at none."""
        return not self.is_over and self.struck < (self.fault.total or 1)

    def is_due(self, step: int) -> bool:
        """Whether it strikes now. A step that comes again after a rollback is not struck again."""
        if self.under_way is not None and self.under_way != step:
            self.done.add(self.under_way)
            self.under_way = None
        return self.fault.is_at(step) and step not in self.done

    def note(self, tensor: str, step: int, *, element: tuple[int, ...] | None, before: float, after: float) -> None:
        """Count a strike, and say it."""
        self.struck += 1
        self.report(Strike(step=step, fault=self.fault, tensor=tensor, element=element, before=before, after=after))

    @torch.no_grad()
    def strike_element(self, fault: ElementFault, name: str, tensor: Tensor, step: int) -> None:
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
        self.done.add(step)
        self.note(name, step, element=element, before=before, after=after)


def place(rank: int | None) -> tuple[int, int | None]:
    """This process's rank, and how many there are, where that is known."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank() if rank is None else rank, distributed.get_world_size()
    return (0, 1) if rank is None else (rank, None)


def refuse_twice_or_nowhere(fault: Fault, others: Iterable[Fault], ranks: int | None) -> None:
    """A fault strikes once, and on a rank that there is."""
    if fault in others:
        raise ConfigError(f"{fault}: is given twice; keep one, or give them different seeds")
    if fault.rank is not None and ranks is not None and fault.rank >= ranks:
        raise ConfigError(f"{fault}: rank={fault.rank}: this run has ranks 0 to {ranks - 1}; take one of them")
