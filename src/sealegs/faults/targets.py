"""A model and a Fault in, the parameters and the elements that it strikes out."""

import difflib
import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from sealegs.errors import ConfigError
from sealegs.faults.spec import BitFlip, ElementFault, GradientScale, InfGradient

WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}
"""What torch.compile and activation checkpointing put into the names of parameters."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A parameter, by its place: FSDP2 puts now the shard there, now the whole."""

    name: str
    """As in the bare model, without what wrappers add; of tied names the first."""
    owner: nn.Module
    attribute: str
    unit: nn.Module | None
    """The module that FSDP2 shards it with."""

    def parameter(self) -> nn.Parameter:
        """What is in its place now."""
        return self.owner.get_parameter(self.attribute)


def named_targets(model: nn.Module) -> dict[str, Target]:
    """Every parameter by every name it has: tied ones are one target with several names."""
    modules = dict(bare(model).named_modules(remove_duplicate=False))
    targets: dict[str, Target] = {}
    first: dict[nn.Parameter, Target] = {}
    for path, module in modules.items():
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = ".".join(part for part in (*path.split("."), attribute) if part and part not in WRAPPERS)
            target = Target(name=name, owner=module, attribute=attribute, unit=unit_of(path, modules))
            targets[name] = first.setdefault(parameter, target)
    return targets


def bare(model: nn.Module) -> nn.Module:
    """The model inside DDP and ``torch.compile``, in whatever order they were put around it."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif "_orig_mod" in dict(model.named_children()):
            model = model.get_submodule("_orig_mod")
        else:
            return model


def unit_of(path: str, modules: dict[str, nn.Module]) -> nn.Module | None:
    """The innermost module around a path that FSDP2 shards as one."""
    while True:
        if isinstance(modules[path], FSDPModule):
            return modules[path]
        if not path:
            return None
        path = path.rpartition(".")[0]


def select(model: nn.Module, fault: ElementFault | GradientScale) -> list[Target]:
    """The parameters that a fault strikes: one for an element, all that it names for a factor."""
    known = named_targets(model)
    named = [target for name, target in known.items() if is_within(name, fault.tensor)]
    if not named:
        raise ConfigError(f"{fault}: tensor={fault.tensor!r}: the model has no such parameter; {near(fault, known)}")
    targets = [target for target in unique(named) if is_open_to(fault, target.parameter())]
    if not targets:
        raise ConfigError(f"{fault}: tensor={fault.tensor!r}: frozen, or not of floats; name one that is trained")
    return targets if isinstance(fault, GradientScale) else [targets[draw(len(targets), fault.seed, "tensor")]]


def is_open_to(fault: ElementFault | GradientScale, parameter: nn.Parameter) -> bool:
    """Whether a fault can strike it: what is frozen has no gradient, but a bit may flip in it, if it is asked for."""
    if isinstance(fault, GradientScale):
        return parameter.requires_grad
    is_by_name = isinstance(fault, BitFlip) and fault.in_ == "weight" and fault.tensor is not None
    return parameter.is_floating_point() and (parameter.requires_grad or is_by_name)


def is_within(name: str, wanted: str | None) -> bool:
    """Whether a name is the one wanted, or begins with it: ``blocks.1`` is no beginning of ``blocks.10.weight``."""
    return wanted is None or f"{name}.".startswith(f"{wanted}.")


def unique(targets: Iterable[Target]) -> list[Target]:
    """Each target once, in the order of the model."""
    return list({target.name: target for target in targets}.values())


def near(fault: ElementFault | GradientScale, known: Iterable[str]) -> str:
    """Names that may have been meant, or else what names look like here."""
    names = list(known)
    close = difflib.get_close_matches(fault.tensor or "", names, n=3)
    return f"near it are {', '.join(close)}" if close else f"it has {', '.join(names[:8])}, ..."


def draw(count: int, *key: object) -> int:
    """A number below ``count`` that depends on the key alone, whatever the version of Python or torch."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    return int.from_bytes(digest, "big") % count


def draw_element(fault: ElementFault, step: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The element to strike at a step: another one at each, since the same bit flipped twice is no fault."""
    index = draw(math.prod(shape), fault.seed, "element", step)
    coordinates = []
    for size in reversed(shape):
        index, coordinate = divmod(index, size)
        coordinates.append(coordinate)
    return tuple(reversed(coordinates))


def damage(fault: ElementFault, element: Tensor) -> tuple[float, float]:
    """Strike one element in its place, and say what it was and is: this waits for the device."""
    before = float(element.item())
    if isinstance(fault, BitFlip):
        flip_top_exponent_bit(element)
    else:
        element.fill_(math.inf if isinstance(fault, InfGradient) else math.nan)
    return before, float(element.item())


def flip_top_exponent_bit(element: Tensor) -> None:
    """In every float format of IEEE's kind the exponent follows the sign, which is the first bit."""
    element.view(INTEGERS[element.itemsize]).bitwise_xor_(1 << (8 * element.itemsize - 2))
