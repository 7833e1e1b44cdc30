"""Faults in what certain layers give: the logits of routers, the scales of quantisers."""

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sealegs.errors import ConfigError
from sealegs.faults.live import RouterBias, StuckScale
from sealegs.faults.strikes import Clock, FaultProgress
from sealegs.faults.targets import is_within, named_modules, near
from sealegs.faults.weight import untraced

ROUTERS = ("router", "gate")
"""How the names of routers end, in the models that are known."""


@runtime_checkable
class ScaledRounding(Protocol):
    """A module that rounds tensors to few bits, with a scale for each."""

    def scale_of(self, x: Tensor) -> Tensor:
        """The factor that a tensor is scaled by."""

    def rounded(self, x: Tensor, scale: Tensor) -> Any:
        """What the module gives for a tensor and a scale."""


def routers(fault: RouterBias, model: nn.Module) -> dict[str, nn.Module]:
    """The routers that a fault strikes, by name."""
    known = named_modules(model)
    if fault.module is None:
        found = {name: module for name, module in known.items() if name.rpartition(".")[2] in ROUTERS}
        cure = f"no module is called {' or '.join(ROUTERS)}; name it"
    else:
        found = {name: module for name, module in known.items() if name and _is_called(name, fault.module)}
        cure = f"the model has no such module; {near(fault.module, filter(None, known))}"
    if not found:
        raise ConfigError(f"{fault}: module={fault.module!r}: {cure}")
    return found


def quantisers(fault: StuckScale, model: nn.Module) -> dict[str, nn.Module]:
    """The quantisers that a fault strikes, by name."""
    modules = named_modules(model)
    known: dict[str, nn.Module] = {name: each for name, each in modules.items() if isinstance(each, ScaledRounding)}
    found = {name: module for name, module in known.items() if is_within(name, fault.module)}
    if not found:
        cure = near(fault.module, known) if known else "it has none; in the lab, --model.float8 brings them"
        raise ConfigError(f"{fault}: module={fault.module!r}: the model has no such quantiser; {cure}")
    return found


def strike_routers(course: FaultProgress, fault: RouterBias, model: nn.Module, clock: Clock) -> list[RemovableHandle]:
    """Add the amount to some columns of each router's logits."""
    struck_experts = slice(fault.expert, fault.expert + fault.experts)

    def strike(module: nn.Module, inputs: object, logits: Any) -> Any:
        if not isinstance(logits, Tensor) or not logits.is_floating_point():
            raise ConfigError(f"{fault}: the router gives {type(logits).__name__}, no logits; name another module")
        if logits.shape[-1] < struck_experts.stop:
            raise ConfigError(f"{fault}: there are {logits.shape[-1]} experts; take some of them")
        step = clock()
        if not course.is_due(step):
            return None
        amounts = torch.zeros_like(logits)
        amounts[..., struck_experts] = fault.amount
        if course.begins(step):
            course.note("+".join(found), step, before=0.0, after=fault.amount)
        return course.result(logits, logits + amounts)

    found = routers(fault, model)
    return [module.register_forward_hook(untraced(strike)) for module in found.values()]


def strike_quantisers(
    course: FaultProgress, fault: StuckScale, model: nn.Module, clock: Clock
) -> list[RemovableHandle]:
    """Round with the scale that each tensor had at the first step of the fault, times its factor."""
    stuck: dict[nn.Module, Tensor] = {}

    def strike(module: nn.Module, inputs: tuple[Tensor], output: Any) -> Any:
        step = clock()
        if not course.is_due(step):
            return None
        assert isinstance(module, ScaledRounding)
        [x] = inputs
        if module not in stuck:
            stuck[module] = module.scale_of(x) * fault.factor
        if course.begins(step):
            before, after = (float(scale) for scale in (module.scale_of(x), stuck[module]))
            course.note("+".join(found), step, before=before, after=after)
        return course.result(output, module.rounded(x, stuck[module]))

    found = quantisers(fault, model)
    return [module.register_forward_hook(untraced(strike)) for module in found.values()]


def _is_called(name: str, wanted: str) -> bool:
    """Whether a name is the pattern, ``*`` standing for anything; not what is inside of such a module."""
    return is_within(name, wanted) and not is_within(name.rpartition(".")[0], wanted)
