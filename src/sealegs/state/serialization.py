"""The state of a loader, a sampler or a generator in, JSON values out, and back.

Such states hold tensors, arrays, bytes and tuples besides what JSON has; each of those becomes an object with one key
that begins with ``#``.
"""

import base64
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sealegs.errors import ConfigError

_SCALARS = frozenset({type(None), bool, int, float, str})


def plain(value: Any, whose: str) -> Any:
    """A state as JSON values. Anything else than a state is made of is refused under the name of its owner.

    >>> plain({"next": 3, "key": ("seed", 1.5)}, "sampler")
    {'next': 3, 'key': {'#tuple': ['seed', 1.5]}}
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return plain(value.item(), whose)
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("#") for key in value):
            return {key: plain(item, whose) for key, item in value.items()}
        return {"#mapping": [[plain(key, whose), plain(item, whose)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        is_plain = _SCALARS.issuperset(map(type, value))  # a generator's hundreds of numbers
        items = list(value) if is_plain else [plain(item, whose) for item in value]
        return items if isinstance(value, list) else {"#tuple": items}
    if isinstance(value, bytes):
        return {"#bytes": _packed(value)}
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return {"#array": [value.dtype.str, list(value.shape), _packed(value.tobytes())]}
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        name = str(value.dtype).removeprefix("torch.")
        return {"#tensor": [name, list(value.shape), _packed(flat.view(torch.uint8).numpy().tobytes())]}
    raise ConfigError(
        f"{whose}: its state has a {type(value).__name__}, which cannot be kept in a checkpoint; "
        "let it have numbers, text, lists, dicts, arrays and tensors"
    )


def live(value: Any) -> Any:
    """The state that JSON values stand for.

    >>> live({"next": 3, "key": {"#tuple": ["seed", 1.5]}})
    {'next': 3, 'key': ('seed', 1.5)}
    """
    if isinstance(value, list):
        return [live(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"#mapping": pairs}:
            return {live(key): live(item) for key, item in pairs}
        case {"#tuple": items}:
            return tuple(live(item) for item in items)
        case {"#bytes": text}:
            return _unpacked(text)
        case {"#array": [dtype, shape, text]}:
            return np.frombuffer(_unpacked(text), np.dtype(dtype)).reshape(shape).copy()
        case {"#tensor": [name, shape, text]}:
            packed = bytearray(_unpacked(text))
            dtype = getattr(torch, name)
            return (torch.frombuffer(packed, dtype=dtype) if packed else torch.empty(0, dtype=dtype)).reshape(shape)
    return {key: live(item) for key, item in value.items()}


def _packed(content: bytes) -> str:
    """As text; a generator's state, half of it zeros, gets shorter than it was."""
    return base64.b64encode(zlib.compress(content, level=1)).decode()


def _unpacked(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))
