"""The strikes of faults: what each did, and its progress."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor

from sealegs.errors import ConfigError
from sealegs.faults.contract import Fault
from sealegs.faults.live import (
    ActivationScale,
    Bf16Weights,
    BitFlip,
    ElementFault,
    Fp16Overflow,
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
from sealegs.faults.targets import damage, draw_element

BECAME = "{before:.4g} became {after:.4g}"
WORDS: dict[type[Fault], tuple[str, str]] = {
    GradientScale: ("gradient", "times {after:.4g}"),
    WeightScale: ("weight", "times {after:.4g}"),
    ActivationScale: ("output", "times {after:.4g}"),
    LrSpike: ("learning rate", BECAME),
    WarmupLost: ("learning rate", BECAME),
    MomentsReset: ("moments", f"norm {BECAME}"),
    FrozenMoment2: ("second moments", f"norm {BECAME}"),
    ScalerOff: ("gradient", "{before:g} bits became {after:g}"),
    Bf16Weights: ("weights", "{before:g} bits became {after:g}"),
    Fp16Overflow: ("output", f"largest {BECAME}"),
    RouterBias: ("logits", "{after:+g} for some experts"),
    StuckScale: ("scale", BECAME),
    MissingZeroGrad: ("gradient", "sum of {after:g} steps"),
    SkippedAllReduce: ("gradient", "mean of {before:g} ranks became that of {after:g}"),
}
"""What a fault strikes, and the words for its effect; ``BECAME`` for a single value."""
PLACES = {"moment1": "first moment", "moment2": "second moment", "activation": "output"}
T = TypeVar("T")
Clock: TypeAlias = Callable[[], int]
"""Gives the number of the present step."""


class Removable(Protocol):
    """A hook that can be taken off again."""

    def remove(self) -> None:
        """Take it off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """What a fault did at one step."""

    step: int
    fault: Fault
    tensor: str
    """Name of the parameter or module; ``*`` or ``blocks.0.*`` for several; empty if there is none."""
    element: tuple[int, ...] | None
    """Position in the tensor (for a sharded one: in this rank's shard); None if it is not a single element."""
    before: float
    """The element's value, the learning rate, the factor 1 of what is scaled, the norm of all moments, and so on: see
    ``WORDS``. For a placebo, ``after`` is the same."""
    after: float

    def __str__(self) -> str:
        """``step 120: nan-gradient@120 struck the gradient of embedding.weight[3, 17]: 0.0123 became nan``"""
        element = "" if self.element is None else list(self.element)
        tensor = f" of {self.tensor}{element}" if self.tensor else ""
        place, deed = words_of(self.fault)
        became = (
            "a placebo, nothing changed" if self.fault.is_placebo else deed.format(before=self.before, after=self.after)
        )
        return f"step {self.step}: {self.fault} struck the {place}{tensor}: {became}"


def words_of(fault: Fault) -> tuple[str, str]:
    """What a fault strikes, and the words for its effect."""
    if isinstance(fault, BitFlip):
        return PLACES.get(fault.in_, fault.in_), BECAME
    if isinstance(fault, WrongBetas):
        return "first beta" if fault.beta2 is None else "second beta", BECAME
    place, deed = WORDS.get(type(fault), ("gradient", BECAME))
    if isinstance(fault, MomentsReset) and fault.in_ != "both":
        place = f"{PLACES[fault.in_]}s"
    return place, deed


@dataclass(slots=True)
class FaultProgress:
    """The progress of a fault."""

    fault: LiveFault
    is_here: bool
    """Whether it strikes this rank."""
    report: Callable[[Strike], None]
    done: set[int] = field(default_factory=set)
    """Steps that are over for it."""
    under_way: int | None = None
    """The step at which it has struck and will again, in the next micro-batch or for the next optimizer."""
    struck: int = 0
    """Number of steps at which it struck."""
    is_over: bool = False
    """Whether it will never strike again, whatever its steps."""

    @property
    def is_pending(self) -> bool:
        """Whether it has not struck at each of its steps, or if there is no end to them, at none."""
        return not self.is_over and self.struck < (self.fault.total or 1)

    def is_due(self, step: int) -> bool:
        """Whether it strikes now. A step that comes again after a rollback is not struck again."""
        if self.under_way is not None and self.under_way != step:
            self.done.add(self.under_way)
            self.under_way = None
        return self.fault.is_at(step) and step not in self.done

    def begins(self, step: int) -> bool:
        """Whether this is its first strike at a step at which it strikes repeatedly; afterwards it is not."""
        is_new = self.under_way != step
        self.under_way = step
        return is_new

    def result(self, healthy: T, struck: T) -> T:
        """The result of a strike. A placebo does the same work, and gives the healthy value."""
        return healthy if self.fault.is_placebo else struck

    def note(
        self, tensor: str, step: int, *, element: tuple[int, ...] | None = None, before: float, after: float
    ) -> None:
        """Count a strike, and report it."""
        self.struck += 1
        after = self.result(before, after)
        self.report(Strike(step=step, fault=self.fault, tensor=tensor, element=element, before=before, after=after))

    @torch.no_grad()
    def strike_element(self, fault: ElementFault, name: str, tensor: Tensor, step: int) -> None:
        """Strike one element in place, once per step. An empty shard has none: the fault stays pending."""
        if isinstance(tensor, DTensor):
            tensor = tensor.to_local()
        values = tensor.values() if tensor.is_sparse else tensor
        if not values.numel():
            return
        element = draw_element(fault, step, values.shape)
        before, after = damage(fault, self.result(values[element].clone(), values[element]))
        if tensor.is_sparse:
            element = (*tensor.indices()[:, element[0]].tolist(), *element[1:])
        self.done.add(step)
        self.note(name, step, element=element, before=before, after=after)


def place(rank: int | None) -> tuple[int, int | None]:
    """This process's rank, and the number of ranks if it is known."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank() if rank is None else rank, distributed.get_world_size()
    return (0, 1) if rank is None else (rank, None)


def refuse_twice_or_nowhere(fault: Fault, others: Iterable[Fault], ranks: int | None) -> None:
    """Refuse a fault that is given twice, or for a rank that does not exist."""
    if fault in others:
        raise ConfigError(f"{fault}: is given twice; keep one, or give them different seeds")
    if fault.rank is not None and ranks is not None and fault.rank >= ranks:
        raise ConfigError(f"{fault}: rank={fault.rank}: this run has ranks 0 to {ranks - 1}; take one of them")
