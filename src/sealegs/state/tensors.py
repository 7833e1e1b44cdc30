"""Takes a model and its optimizers apart into plain tensors by key and the rest, and puts them together again.

Keys are stable as long as nobody rebuilds the model: ``model/blocks.0.weight`` for parameters and buffers, ``optimizer
0/3/exp_avg`` for what the first optimizer holds for its fourth parameter, ``optimizer 0/group 1/lr``.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from numbers import Number
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sealegs.errors import ConfigError
from sealegs.state.extra_state import Stateful

Join: TypeAlias = Callable[[Iterator[Tensor]], Tensor]
"""Joins parts, in their order, into one tensor."""

ALSO = "also/"
"""Prefix of the keys of the loop's own tensors."""
_IMMUTABLE = (type(None), Number, str, bytes, Enum, torch.dtype, torch.device)


class Apart(NamedTuple):
    """A tensor, and the plain tensors that it consists of: itself, or this rank's part of a DTensor."""

    whole: Tensor
    parts: Mapping[str, Tensor]
    join: Join
    """Makes a tensor like it from parts like these."""


class TensorAt(NamedTuple):
    """Stands for a tensor of an optimizer."""

    key: str


class OptimizerLayout(NamedTuple):
    """What an optimizer holds, with a key in the place of each tensor."""

    sizes: list[int]
    """How many parameters each group has."""
    states: dict[str, Any]
    """State by owner; an owner without state is absent."""
    others: dict[str, Any]
    """Owners that are not parameters."""
    groups: list[dict[str, Any]]
    """Hyperparameters of each group."""

    def as_held(self, tensors: Mapping[str, Tensor]) -> tuple[list[dict[str, Any]], dict[int, Any]]:
        """Hyperparameters by group, and states by the place of their parameter, with these tensors filled in."""
        states = {int(label): _filled(state, tensors) for label, state in self.states.items() if label.isdecimal()}
        return [_filled(group, tensors) for group in self.groups], states

    def put_into(self, optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
        """Give the optimizer exactly this state, with these tensors filled in."""
        for label, owner in (_owners(optimizer) | self.others).items():
            now = optimizer.state.pop(owner, None)
            if label not in self.states:
                continue
            then = _filled(self.states[label], tensors)
            if isinstance(now, dict) and isinstance(then, dict):  # others may hold the very dict
                now.clear()
                now.update(then)
                then = now
            optimizer.state[owner] = then
        for group, hyperparameters in zip(optimizer.param_groups, self.groups, strict=True):
            group.update(_filled(hyperparameters, tensors))


@dataclass(slots=True)
class Live:
    """A model and its optimizers as they are now."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    """Parts of parameters and buffers, each piece of memory once."""
    buffers: set[str] = field(default_factory=set)
    """Keys of tensors that a forward pass or the loop may change before the next update."""
    moments: dict[str, Apart] = field(default_factory=dict)
    """Tensors in the states and among the hyperparameters of optimizers."""
    settings: list[OptimizerLayout] = field(default_factory=list)
    also: dict[str, Any] = field(default_factory=dict)
    """States of the loop's own objects, with a key in the place of each tensor."""
    of_also: dict[str, Apart] = field(default_factory=dict)
    """The tensors of ``also``, by those keys."""
    _seen: set[object] = field(default_factory=set)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All parts of all tensors."""
        aparts = (*self.moments.values(), *self.of_also.values())
        return self.weights | {key: part for apart in aparts for key, part in apart.parts.items()}

    def add_weights(self, named: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Add the tensors that are not there yet under another name or as another object. Gives their keys."""
        added = []
        for name, tensor in named:
            if id(tensor) in self._seen:
                continue
            self._seen.add(id(tensor))
            for key, part in _taken_apart(name, tensor).parts.items():
                if _where(part) not in self._seen or not part.numel():
                    self._seen.add(_where(part))
                    self.weights[key] = part
                    added.append(key)
        return added

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Let these be passed over when weights are added."""
        self._seen.update(map(id, tensors))

    def as_held(self, tensors: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The model's tensors by their keys, made from a copy of all weights; other objects for the same memory work
        too."""
        keys = {_where(part): key for key, part in self.weights.items()}
        aparts = {f"model/{name}": _taken_apart(f"model/{name}", tensor) for name, tensor in tensors.items()}
        return {
            name: apart.join(held[keys.get(_where(part), key)] for key, part in apart.parts.items())
            for name, apart in aparts.items()
        }


def walk(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    also: Mapping[str, Stateful] = MappingProxyType({}),
    left_out: Iterable[Tensor] = (),
) -> Live:
    """Collect everything that updates depend on, and the loop's own objects, but for weights that are left out. What
    cannot be copied and restored is refused."""
    live = Live()
    live.leave_out(left_out)
    live.add_weights((f"model/{name}", parameter) for name, parameter in model.named_parameters())
    live.buffers.update(live.add_weights((f"model/{name}", buffer) for name, buffer in model.named_buffers()))
    held: dict[str, Tensor] = {}
    for place, optimizer in enumerate(optimizers):
        prefix = f"optimizer {place}"
        owners = _owners(optimizer)
        # the model's own are there already; an optimizer may have others: master copies, weights of a loss
        live.add_weights((f"{prefix}/{label}", owner) for label, owner in owners.items() if isinstance(owner, Tensor))
        states = {label: optimizer.state[owner] for label, owner in owners.items() if owner in optimizer.state}
        groups = [{name: group[name] for name in group if name != "params"} for group in optimizer.param_groups]
        live.settings.append(
            OptimizerLayout(
                [len(group["params"]) for group in optimizer.param_groups],
                _emptied(prefix, states, held),
                {label: owner for label, owner in owners.items() if not isinstance(owner, Tensor)},
                [_emptied(f"{prefix}/group {number}", group, held) for number, group in enumerate(groups)],
            )
        )
    live.moments.update((key, _taken_apart(key, tensor)) for key, tensor in held.items())
    others: dict[str, Tensor] = {}
    for name, thing in also.items():
        live.also[name] = _emptied(f"{ALSO}{name}", _plain_dicts(thing.state_dict()), others)
    live.of_also.update((key, _taken_apart(key, tensor.detach())) for key, tensor in others.items())
    live.buffers.update(
        key for apart in live.of_also.values() for key in apart.parts
    )  # the loop may change it at any time
    return live


def filled(state: Any, tensors: Mapping[str, Tensor]) -> Any:
    """A state of ``Live.also`` with its tensors filled in."""
    return _filled(state, tensors)


def _plain_dicts(value: Any) -> Any:
    """The state with plain dicts in place of the modules' own kind."""
    if isinstance(value, Mapping):
        return {key: _plain_dicts(item) for key, item in value.items()}
    return value


def _where(part: Tensor) -> tuple[object, ...]:
    """Identifies a piece of memory, whatever its name and object."""
    return part.data_ptr(), part.shape, part.stride(), part.dtype, part.device


def _owners(optimizer: Optimizer) -> dict[str, Any]:
    """Everything that may have a state: parameters by their place in all groups, others by their own name."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    others = {f"state {owner}": owner for owner in optimizer.state if not isinstance(owner, Tensor)}
    return {str(place): parameter for place, parameter in enumerate(parameters)} | others


def _emptied(key: str, value: Any, tensors: dict[str, Tensor]) -> Any:
    """A value with a key in the place of each tensor; the tensors go into the dict."""
    if isinstance(value, Tensor):
        tensors[key] = value
        return TensorAt(key)
    if type(value) is dict:
        return {name: _emptied(f"{key}/{name}", item, tensors) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_emptied(f"{key}/{place}", item, tensors) for place, item in enumerate(value))
    if not isinstance(value, _IMMUTABLE) and not callable(value):
        raise ConfigError(
            f"{key} is a {type(value).__name__}: a snapshot holds tensors, numbers and text, in dicts, lists and "
            "tuples; memory=0 does without snapshots"
        )
    return value


def _filled(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of ``_emptied``: a new value every time, but for its tensors."""
    if isinstance(value, TensorAt):
        return tensors[value.key]
    if type(value) is dict:
        return {name: _filled(item, tensors) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_filled(item, tensors) for item in value)
    return value


def _taken_apart(key: str, tensor: Tensor) -> Apart:
    if not hasattr(tensor, "__tensor_flatten__"):
        return Apart(tensor, {key: _distinct(key, tensor)}, next)
    wrapper: Any = tensor
    names, context = wrapper.__tensor_flatten__()
    attributes = {name: getattr(wrapper, name) for name in names}
    inner = {name: _taken_apart(f"{key}/{name}", item) for name, item in attributes.items() if isinstance(item, Tensor)}
    others = {name: item for name, item in attributes.items() if name not in inner}  # a DTensor has its mesh there
    joins = {name: apart.join for name, apart in inner.items()}
    kind, size, stride = type(wrapper), wrapper.shape, wrapper.stride()

    def join(parts: Iterator[Tensor]) -> Tensor:
        joined = others | {name: join_one(parts) for name, join_one in joins.items()}
        whole: Tensor = kind.__tensor_unflatten__(joined, context, size, stride)
        return whole

    return Apart(tensor, {name: part for apart in inner.values() for name, part in apart.parts.items()}, join)


def _distinct(key: str, tensor: Tensor) -> Tensor:
    """The elements that lie apart in memory: all, except for an expanded tensor, which repeats some."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "on the meta device" if tensor.is_meta else f"a tensor of {tensor.layout}, {tensor.dtype}"
        raise ConfigError(f"{key} is {kind}: a snapshot holds dense tensors; memory=0 does without snapshots")
    if 0 not in tensor.stride():
        return tensor
    shape = [min(size, 1) if not stride else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(shape, tensor.stride())
