"""Turns states into JSON values and back.

``plain`` and ``live`` convert the state of a loader, a sampler or a generator. Such states also hold tensors, arrays,
bytes and tuples; each becomes an object with one key that begins with ``#``.

``to_json`` and ``from_json`` convert the state of an optimizer or a schedule, and can store its tensors beside the
JSON.
"""

import base64
import zlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sealegs.errors import ConfigError
from sealegs.record.reading import most_bytes, shown, too_large

_SCALARS = frozenset({type(None), bool, int, float, str})


def plain(value: Any, whose: str) -> Any:
    """A state as JSON values. Any other type is refused, under the name of its owner.

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


class Room:
    """How many bytes are left for what is unpacked: a small text can stand for a large array."""

    def __init__(self, size: int) -> None:
        self._left = size

    def take(self, text: Any) -> bytes:
        """Unpack one text."""
        if not isinstance(text, str):
            raise ValueError("an array in it is no text")  # noqa: TRY004 - of a file: every fault of it is one
        unpacker = zlib.decompressobj()
        try:
            content = unpacker.decompress(base64.b64decode(text), self._left + 1)
        except zlib.error as error:
            raise ValueError(f"an array in it is damaged ({error})") from None
        self._left -= len(content)
        if self._left < 0:
            raise too_large("its arrays")
        if not unpacker.eof:
            raise ValueError("an array in it is torn")
        return content


def live(value: Any, room: Room | None = None) -> Any:
    """The state that JSON values stand for: the inverse of ``plain``. What stands for nothing is a ``ValueError``.

    >>> live({"next": 3, "key": {"#tuple": ["seed", 1.5]}})
    {'next': 3, 'key': ('seed', 1.5)}
    """
    return _live(value, room or Room(most_bytes()))


def _live(value: Any, room: Room) -> Any:
    if isinstance(value, list):
        return [_live(item, room) for item in value]
    if not isinstance(value, dict):
        return value
    try:
        match value:
            case {"#mapping": list(pairs)}:
                return {_live(key, room): _live(item, room) for key, item in pairs}
            case {"#tuple": list(items)}:
                return tuple(_live(item, room) for item in items)
            case {"#bytes": text}:
                return room.take(text)
            case {"#array": [str(name), list(shape), text]}:
                return _array(np.dtype(name), room.take(text)).reshape(shape).copy()
            case {"#tensor": [str(name), list(shape), text]}:
                return _tensor(getattr(torch, name, None), room.take(text)).reshape(shape)
    except (TypeError, RuntimeError, AttributeError, SyntaxError, OverflowError) as error:  # numpy's types are Python
        raise ValueError(f"a value in it stands for nothing ({error})") from None
    if not _MARKS.isdisjoint(value):
        raise ValueError(f"a value in it stands for nothing ({shown(value)})")
    return {key: _live(item, room) for key, item in value.items()}


_MARKS = frozenset(("#mapping", "#tuple", "#bytes", "#array", "#tensor"))


def _array(dtype: np.dtype[Any], content: bytes) -> NDArray[Any]:
    if dtype.hasobject or not dtype.itemsize:
        raise ValueError(f"an array of {dtype} cannot be kept")
    return np.frombuffer(content, dtype)


def _tensor(dtype: Any, content: bytes) -> Tensor:
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{dtype!a:.40} is no type of a tensor")  # noqa: TRY004 - of a file, as above
    return torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype)


def _packed(content: bytes) -> str:
    """Compressed text; a generator's state, half of it zeros, gets shorter than it was."""
    return base64.b64encode(zlib.compress(content, level=1)).decode()


_ASIDE = "#aside"
_COUNTS = "#counts"


def to_json(value: Any, name: str, tensors: dict[str, Tensor] | None = None) -> Any:
    """A value as JSON. With ``tensors``, its tensors go there, under names that begin with ``name``; without, they
    become numbers.

    >>> to_json({"betas": (0.9, 0.95), "milestones": {30: 1}}, "settings")
    {'betas': {'#tuple': [0.9, 0.95]}, 'milestones': {'#mapping': [[30, 1]]}}
    """
    return plain(_put_aside(value, name, tensors), name)


def from_json(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of ``to_json``, with the tensors back in their places.

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
    if isinstance(value, Counter):  # a schedule's milestones; a plain dict would not do
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
            if name not in tensors:
                raise ValueError(f"there is no tensor {name!a:.80} in it")
            return tensors[name]
        case {"#counts": dict(counts)}:
            return Counter(counts)
        case dict():
            return {key: _put_back(item, tensors) for key, item in value.items()}
    return value
