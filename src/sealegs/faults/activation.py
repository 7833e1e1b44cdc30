"""Faults in the output of a module during the forward pass."""

from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sealegs.errors import ConfigError
from sealegs.faults.live import ActivationScale, BitFlip, Fp16Overflow
from sealegs.faults.strikes import Clock, FaultProgress
from sealegs.faults.targets import named_modules, near
from sealegs.faults.text import with_changes
from sealegs.faults.weight import untraced

OutputFault: TypeAlias = ActivationScale | BitFlip | Fp16Overflow


def strike_output(course: FaultProgress, fault: OutputFault, model: nn.Module, clock: Clock) -> RemovableHandle:
    """Strike the output of a module: an element once per step, everything else in every forward pass of it."""
    name = struck_module(fault, model)

    def strike(module: nn.Module, inputs: object, output: Any) -> Any:
        given = tensor_of(fault, name, output)  # refused at once, not only at its step
        step = clock()
        if not course.is_due(step) or not given.numel():
            return None
        if isinstance(fault, BitFlip):
            if not torch.is_grad_enabled():  # without effect in an evaluation
                return None
            struck = given.clone()
            course.strike_element(fault, name, struck, step)
        elif isinstance(fault, ActivationScale):
            struck = given * fault.factor
            if course.begins(step):
                course.note(name, step, before=1.0, after=fault.factor)
        else:
            struck = through_fp16(given, fault.factor)
            if course.begins(step):
                largest, became = (float(tensor.detach().abs().max()) for tensor in (given, struck))
                course.note(name, step, before=largest, after=became)
        struck = course.result(given, struck)
        return struck if isinstance(output, Tensor) else with_changes(output, {0: struck})

    return named_modules(model)[name].register_forward_hook(untraced(strike))


def through_fp16(given: Tensor, factor: float) -> Tensor:
    """A copy that was multiplied, rounded to fp16 and divided again; its gradient passes unchanged."""
    struck = given.clone()
    with torch.no_grad():
        struck.copy_((given * factor).half().to(given.dtype) / factor)
    return struck


def struck_module(fault: OutputFault, model: nn.Module) -> str:
    """The name of the module that a fault strikes: the one it names, or the last that has parameters."""
    known = named_modules(model)
    if fault.module is not None:
        if fault.module not in known:
            cure = near(fault.module, filter(None, known))
            raise ConfigError(f"{fault}: module={fault.module!r}: the model has no such module; {cure}")
        return fault.module
    with_parameters = [name for name, module in known.items() if any(True for _ in module.parameters(recurse=False))]
    if not with_parameters:
        raise ConfigError(f"{fault}: module=None: no module of the model has parameters; name one")
    return with_parameters[-1]


def tensor_of(fault: OutputFault, name: str, output: Any) -> Tensor:
    """The tensor to strike in a module's output: all of it, or the first of a tuple."""
    given = output[0] if isinstance(output, tuple) and output else output
    if not isinstance(given, Tensor) or not given.is_floating_point():
        kind = f"tuple of {type(given).__name__}" if given is not output else type(output).__name__
        raise ConfigError(
            f"{fault}: module={name!r}: gives a {kind}, neither a tensor of floats nor a tuple that begins with one; "
            "name a module inside of it"
        )
    return given
