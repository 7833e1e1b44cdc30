"""Saves and restores the loop's own objects, such as an EMA of the weights or a counter: all of them or none."""

import copy
from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

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
                also[other].load_state_dict(before[other])
            raise SourceError(f"{name_of.format(name)} does not take its state back: {error}") from error


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
