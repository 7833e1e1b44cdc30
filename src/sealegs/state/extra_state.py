"""Saves and restores the loop's own objects, such as an EMA of the weights or a counter: all of them or none."""

import copy
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from sealegs.errors import ConfigError, SourceError


class Stateful(Protocol):
    """An object with a state that can be saved and loaded."""

    def state_dict(self) -> Mapping[str, Any]:
        """Its state: tensors, numbers and text, in dicts and lists."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Take over a state."""


def refuse_stateless(also: Any) -> None:
    """Refuse objects without a state, before there is a run folder; the error names the key and what is missing."""
    if not isinstance(also, Mapping):
        raise ConfigError(f'also={type(also).__name__}: give a dict of names and objects, also={{"ema": ema}}')
    for name, thing in also.items():
        if not isinstance(name, str) or not name or "/" in name:
            raise ConfigError(f"also has the key {name!r}: give each a name, without a slash")
        if lacking := [need for need in ("state_dict", "load_state_dict") if not callable(getattr(thing, need, None))]:
            missing = " and no ".join(lacking)
            raise ConfigError(
                f"also[{name!r}]: a {type(thing).__name__} has no {missing}; give something that has both"
            )


def states_of(also: Mapping[str, Stateful]) -> dict[str, Any]:
    """Copies of all states, by name."""
    return {name: copied(thing.state_dict()) for name, thing in also.items()}


def load_states(also: Mapping[str, Stateful], states: Mapping[str, Any], name_of: str = "also[{!r}]") -> None:
    """Load all states. Where one object refuses, all get their former state back and the error says why."""
    if not states:
        return
    before = states_of(also)
    for name in (name for name in also if name in states):
        try:
            also[name].load_state_dict(copied(states[name]))
        except Exception as error:
            for other in before:
                with suppress(SourceError):  # of a frozen one that has changed, which the error may be about
                    also[other].load_state_dict(before[other])
            raise SourceError(f"{name_of.format(name)} does not take its state back: {error}") from error


def not_held(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    also: Mapping[str, Stateful],
    callbacks: Sequence[object] = (),
) -> list[str]:
    """What a training calls on the way, that keeps tensors and is in no state: an EMA on a hook of the optimizer.

    Of a framework's callbacks, which keep scores and counters as well, those that keep tensors as large as a trained
    weight. Objects that nothing calls, and functions without an object, are not seen.
    """
    held = {id(each) for each in (*model.modules(), *optimizers, *also.values())}
    hooks = [
        (f"{type(optimizer).__name__} at each step", hook)
        for optimizer in optimizers
        for kind in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
        for hook in getattr(optimizer, kind, {}).values()
    ]
    for name, module in model.named_modules():
        where = f"the forward pass of {name or type(model).__name__}"
        hooks += [(where, hook) for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())]
    for name, parameter in model.named_parameters():
        hooks += [(f"the gradient of {name}", hook) for hook in (parameter._post_accumulate_grad_hooks or {}).values()]
    found = {
        id(owner): f"{type(owner).__name__}, which is called by {where}"
        for where, hook in hooks
        for owner in _behind(hook)
        if id(owner) not in held and not type(owner).__module__.startswith(_NOBODYS) and _keeps_tensors(owner)
    }
    weights = {id(each) for each in model.parameters()}
    shapes = {each.shape for each in model.parameters() if each.requires_grad and each.numel() > 1}
    for callback in callbacks:
        is_known = id(callback) in held or type(callback).__module__.startswith("sealegs.")
        inside = iter(()) if is_known else _tensors_in(callback, held)
        if any(each.shape in shapes and id(each) not in weights for each in inside):
            found[id(callback)] = f"{type(callback).__name__}, which is called by the trainer at each step"
    return list(found.values())


_NOBODYS = ("sealegs.", "torch.distributed.", "torch.nn.", "torch._dynamo.", "torch.optim.lr_scheduler")
"""Modules whose objects keep nothing that a step depends on, or are in states by another way."""


def _behind(hook: Any) -> list[Any]:
    """The objects that a hook belongs to, or has taken along."""
    if isinstance(hook, partial):
        return [*_behind(hook.func), *hook.args, *hook.keywords.values()]
    cells = getattr(hook, "__closure__", None) or ()
    inside = [cell.cell_contents for cell in cells]
    return [owner for owner in (getattr(hook, "__self__", None), hook, *inside) if not isinstance(owner, _WORDS)]


_WORDS = (type(None), bool, int, float, str, Tensor, FunctionType, MethodType)


def _keeps_tensors(owner: Any) -> bool:
    """Whether an object has tensors of its own, or a state that can be saved."""
    if callable(getattr(owner, "state_dict", None)):
        return True
    kept = list(getattr(owner, "__dict__", {}).values())
    inside = [each for value in kept for each in (value.values() if isinstance(value, dict) else [value])]
    return any(isinstance(each, Tensor) for each in inside)


_DEEPEST = 4
"""Objects within a callback's objects that are looked into: its average, the average's list of tensors."""
_FRAMEWORKS = ("transformers.", "accelerate.", "lightning.", "pytorch_lightning.", "datasets.", "torch.utils.")
"""Modules whose objects a callback knows and does not own: its trainer, the data."""


def _tensors_in(owner: object, held: Set[int], depth: int = 0) -> Iterator[Tensor]:
    """The tensors that a callback keeps, apart from those of what is held already."""
    if isinstance(owner, Tensor):
        yield owner
    elif isinstance(owner, nn.Module):
        if id(owner) not in held:
            yield from owner.parameters()
            yield from owner.buffers()
    elif depth < _DEEPEST and id(owner) not in held and not isinstance(owner, _WORDS):
        if isinstance(owner, Mapping):
            inside = list(owner.values())
        elif isinstance(owner, list | tuple):
            inside = list(owner)
        elif depth and any(each.__module__.startswith(_FRAMEWORKS) for each in type(owner).__mro__):
            inside = []
        else:
            inside = list(getattr(owner, "__dict__", {}).values())
        for each in inside:
            yield from _tensors_in(each, held, depth + 1)


def copied(value: Any) -> Any:
    """A copy of a state that nobody else changes. Tensors may be part of an autograd graph, which ``deepcopy``
    refuses."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        same = copy.copy(value)  # a Counter stays one
        for key, item in value.items():
            same[key] = copied(item)
        return same
    if isinstance(value, Mapping):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(copied, value)) if type(value) in (list, tuple) else value
    return value
