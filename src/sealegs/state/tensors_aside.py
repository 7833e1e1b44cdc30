"""Values of state dicts in, JSON out, and back; large tensors are put aside under names, to be stored as tensors."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from sealegs.state.serialization import live, plain

_ASIDE = "#aside"
_COUNTS = "#counts"


def to_json(value: Any, name: str, tensors: dict[str, Tensor] | None = None) -> Any:
    """A value as JSON. Its tensors go to ``tensors`` by names that begin with ``name``; without it, as numbers.

    >>> to_json({"betas": (0.9, 0.95), "milestones": {30: 1}}, "settings")
    {'betas': {'#tuple': [0.9, 0.95]}, 'milestones': {'#mapping': [[30, 1]]}}
    """
    return plain(_put_aside(value, name, tensors), name)


def from_json(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value that became this JSON, with its tensors back in their places.

    >>> from_json({"betas": {"#tuple": [0.9, 0.95]}, "milestones": {"#mapping": [[30, 1]]}}, {})
    {'betas': (0.9, 0.95), 'milestones': {30: 1}}
    """
    return _put_back(live(value), tensors)


def _put_aside(value: Any, name: str, tensors: dict[str, Tensor] | None) -> Any:
    if isinstance(value, Tensor) and tensors is not None:
        tensors[name] = value
        return {_ASIDE: name}
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, Counter):  # a schedule's milestones, which no plain dict can stand in for
        return {_COUNTS: dict(value)}
    if isinstance(value, Mapping):
        return {key: _put_aside(item, f"{name}.{key}", tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_put_aside(item, f"{name}.{place}", tensors) for place, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    return value


def _put_back(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list | tuple):
        items = [_put_back(item, tensors) for item in value]
        return items if isinstance(value, list) else tuple(items)
    match value:
        case {"#aside": str(name)}:
            return tensors[name]
        case {"#counts": dict(counts)}:
            return Counter(counts)
        case dict():
            return {key: _put_back(item, tensors) for key, item in value.items()}
    return value
