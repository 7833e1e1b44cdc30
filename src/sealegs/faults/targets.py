"""Finds the parameters and elements that a fault strikes in a model."""

import difflib
import hashlib
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from sealegs.errors import ConfigError
from sealegs.faults.contract import Fault
from sealegs.faults.live import (
    ActivationScale,
    BitFlip,
    ElementFault,
    Fp16Overflow,
    GradientScale,
    InfGradient,
    ScalerOff,
    WeightScale,
)

TensorFault: TypeAlias = ElementFault | GradientScale | ScalerOff | WeightScale
"""Faults that strike parameters by name."""

WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}
"""Parts that torch.compile and activation checkpointing add to the names of parameters."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by their size in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultTarget:
    """A parameter, by its place in the model: FSDP2 puts the shard there at one time, the whole at another."""

    name: str
    """The name in the bare model, without what wrappers add; of tied names the first."""
    owner: nn.Module
    attribute: str
    unit: nn.Module | None
    """The module that FSDP2 shards it with."""

    def parameter(self) -> nn.Parameter:
        """The parameter that is in its place now."""
        return self.owner.get_parameter(self.attribute)


def named_targets(model: nn.Module) -> dict[str, FaultTarget]:
    """Every parameter by each of its names: tied ones are one target with several names."""
    modules = dict(bare(model).named_modules(remove_duplicate=False))
    targets: dict[str, FaultTarget] = {}
    first: dict[nn.Parameter, FaultTarget] = {}
    for path, module in modules.items():
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = bare_name(f"{path}.{attribute}")
            target = FaultTarget(name=name, owner=module, attribute=attribute, unit=unit_of(path, modules))
            targets[name] = first.setdefault(parameter, target)
    return targets


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Every module by its name in the bare model. A module and its wrapper share a name: that gives the wrapper."""
    modules: dict[str, nn.Module] = {}
    for path, module in bare(model).named_modules(remove_duplicate=False):
        modules.setdefault(bare_name(path), module)
    return modules


def bare_name(path: str) -> str:
    """A name without what wrappers add.

    >>> bare_name("blocks.0._orig_mod.mlp")
    'blocks.0.mlp'
    """
    return ".".join(part for part in path.split(".") if part and part not in WRAPPERS)


def bare(model: nn.Module) -> nn.Module:
    """The model inside DDP and ``torch.compile``, in whatever order they wrap it."""
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


def select(model: nn.Module, fault: TensorFault, optimizers: Iterable[Optimizer] = ()) -> list[FaultTarget]:
    """The parameters that a fault strikes: one for an element, all that it names for a factor."""
    known = named_targets(model)
    named: list[FaultTarget] = []
    for wanted in [fault.tensor] if fault.tensor is None or fault.tensor in known else fault.tensor.split("+"):
        found = [target for name, target in known.items() if is_within(name, wanted)]
        if not found:
            raise ConfigError(f"{fault}: tensor={wanted!r}: the model has no such parameter; {near(wanted, known)}")
        named += found
    targets = [target for target in unique(named) if is_open_to(fault, target.parameter())]
    if not targets:
        raise ConfigError(f"{fault}: tensor={fault.tensor!r}: frozen, or not of floats; name one that is trained")
    if is_in_moment(fault):
        targets = [target for target in targets if is_updated(target, optimizers)]
        if not targets:
            raise ConfigError(f"{fault}: tensor={fault.tensor!r}: of no optimizer that was given; give its optimizer")
    return [targets[draw(len(targets), fault.seed, "tensor")]] if isinstance(fault, ElementFault) else targets


def is_open_to(fault: TensorFault, parameter: nn.Parameter) -> bool:
    """Whether a fault can strike it. A frozen parameter has no gradient, but its values may go wrong if it is named."""
    if isinstance(fault, GradientScale):
        return parameter.requires_grad
    is_by_name = is_in_weight(fault) and fault.tensor is not None
    return parameter.is_floating_point() and (parameter.requires_grad or is_by_name)


def is_in_output(fault: Fault) -> TypeGuard[ActivationScale | BitFlip | Fp16Overflow]:
    """Whether it strikes the output of a module."""
    return isinstance(fault, ActivationScale | Fp16Overflow) or (
        isinstance(fault, BitFlip) and fault.in_ == "activation"
    )


def is_in_weight(fault: Fault) -> TypeGuard[BitFlip | WeightScale]:
    """Whether it strikes weights."""
    return isinstance(fault, WeightScale) or (isinstance(fault, BitFlip) and fault.in_ == "weight")


def is_in_moment(fault: Fault) -> TypeGuard[BitFlip]:
    """Whether it strikes an element of an optimizer's moment."""
    return isinstance(fault, BitFlip) and fault.in_ in ("moment1", "moment2")


def is_updated(target: FaultTarget, optimizers: Iterable[Optimizer]) -> bool:
    """Whether one of the optimizers has it among its parameters; an optimizer knows the shard, not the whole."""
    reshard(target)
    parameter = target.parameter()
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return any(parameter is updated for group in groups for updated in group["params"])


def reshard(target: FaultTarget) -> None:
    """Put FSDP2's shard in a parameter's place, if a forward pass has left the whole there.

    All ranks must do it, because all take part in gathering it again.
    """
    if target.unit is not None:
        cast(FSDPModule, target.unit).reshard()


def is_within(name: str, wanted: str | None) -> bool:
    """Whether a name is ``wanted`` or begins with it: ``blocks.1`` is no prefix of ``blocks.10.weight``.

    >>> is_within("blocks.10.mlp.up.weight", "blocks.*.mlp")
    True
    """
    if wanted is None or name == wanted:
        return True
    pattern = ".*".join(map(re.escape, f"{wanted}.".split("*")))
    return re.match(pattern, f"{name}.", re.DOTALL) is not None


def unique(targets: Iterable[FaultTarget]) -> list[FaultTarget]:
    """Each target once, in the order of the model."""
    return list({target.name: target for target in targets}.values())


def near(wanted: str | None, known: Iterable[str]) -> str:
    """Names that may have been meant, or otherwise examples of names."""
    names = list(known)
    close = difflib.get_close_matches(wanted or "", names, n=3)
    return f"near it are {', '.join(close)}" if close else f"it has {', '.join(names[:8])}, ..."


def label(fault: GradientScale | ScalerOff | WeightScale, targets: Sequence[FaultTarget]) -> str:
    """The name for what a factor scales: a name, or the common prefixes of several."""
    if len(targets) == 1:
        return targets[0].name
    return "*" if fault.tensor is None else "+".join(f"{wanted}.*" for wanted in fault.tensor.split("+"))


def draw(count: int, *key: object) -> int:
    """A number below ``count`` that depends on the key alone, in any version of Python or torch."""
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
    """Strike one element in place, and give its old and new value; waits for the device."""
    before = float(element.item())
    if isinstance(fault, BitFlip):
        flip_top_exponent_bit(element)
    else:
        element.fill_(math.inf if isinstance(fault, InfGradient) else math.nan)
    return before, float(element.item())


def flip_top_exponent_bit(element: Tensor) -> None:
    """Flip the top bit of the exponent, which in every IEEE-like format follows the sign bit."""
    element.view(INTEGERS[element.itemsize]).bitwise_xor_(1 << (8 * element.itemsize - 2))
