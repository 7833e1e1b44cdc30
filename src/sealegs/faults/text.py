"""Reads tokens and labels out of a batch of any loop as numpy arrays, and puts others into a copy of it."""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sealegs.errors import ConfigError

Ints: TypeAlias = NDArray[Any]

TOKENS = ("input_ids", "tokens", "inputs", "ids", "x")
LABELS = ("labels", "targets", "label", "target", "y")
"""Names of the labels, in batches whose parts have names."""
SOURCES = ("sources", "source")
BARE = ""
"""The key of a batch that is nothing but tokens."""


@dataclass(frozen=True, slots=True)
class BatchText:
    """The tokens and labels of a batch."""

    tokens: Ints
    labels: Ints | None
    """The targets; None if the loop makes them from the tokens."""
    put: Callable[[Ints, Ints | None], Any]
    """Gives a copy of the batch with others in their place."""


def text_of(batch: Any) -> BatchText:
    """The text of a batch: an integer tensor or array, or a mapping, dataclass, tuple or list that has some.

    If the parts have names, they tell the tokens (``input_ids``, ``tokens``, ...) and the labels (``labels``,
    ``targets``, ...). In a tuple or list the first integer part has the tokens, and the last one the labels.
    """
    parts = parts_of(batch)
    ids = [key for key, part in parts.items() if is_ids(part)]
    if isinstance(batch, list | tuple) or BARE in ids:
        tokens, labels = next(iter(ids), None), ids[-1] if len(ids) > 1 else None
    else:
        tokens, labels = (next((name for name in names if name in ids), None) for names in (TOKENS, LABELS))
    if tokens is None:
        raise ConfigError(
            f"batch: {type(batch).__name__} of {', '.join(map(str, parts)) or 'unknown parts'} has no token ids that a "
            f"fault of the data could strike; name whole numbers one of {', '.join(TOKENS)}"
        )

    def put(new_tokens: Ints, new_labels: Ints | None) -> Any:
        changes = {tokens: as_before(parts[tokens], new_tokens)}
        if labels is not None and new_labels is not None:
            changes[labels] = as_before(parts[labels], new_labels)
        return with_changes(batch, changes)

    return BatchText(on_host(parts[tokens]), None if labels is None else on_host(parts[labels]), put)


def sources_of(batch: Any) -> Sequence[str] | None:
    """The source of each row, if the batch names it: under ``sources``, or in spans like the lab's."""
    if isinstance(batch, Mapping):
        return next((batch[name] for name in SOURCES if name in batch), None)
    spans: Iterable[Any] | None = getattr(batch, "spans", None)
    return None if spans is None else [span.source.name for span in spans]


def number_of(batch: Any) -> int | None:
    """The number that a batch carries; a tuple's ``index`` is a method, not a number."""
    index = getattr(batch, "index", None)
    return index if isinstance(index, int) else None


def parts_of(batch: Any) -> dict[Any, Any]:
    """The parts of a batch, by name or position."""
    if is_ids(batch):
        return {BARE: batch}
    if isinstance(batch, Mapping):
        return dict(batch)
    if isinstance(batch, list | tuple):
        return dict(enumerate(batch))
    if dataclasses.is_dataclass(batch):
        return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return {}


def with_changes(batch: Any, changes: dict[Any, Any]) -> Any:
    """A copy of a batch with some parts replaced."""
    if BARE in changes:
        return changes[BARE]
    if isinstance(batch, list | tuple):
        items = [changes.get(place, item) for place, item in enumerate(batch)]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    if isinstance(batch, Mapping):
        changed: Any = copy.copy(batch)
        for name, part in changes.items():
            changed[name] = part
        return changed
    return dataclasses.replace(batch, **changes)


def is_ids(part: object) -> bool:
    """Whether it is a tensor or array of integers."""
    if isinstance(part, Tensor):
        is_whole = not (part.is_floating_point() or part.is_complex() or part.dtype == torch.bool)
        return is_whole and part.ndim > 0
    return isinstance(part, np.ndarray) and part.dtype.kind in "iu" and part.ndim > 0


def on_host(part: Any) -> Ints:
    """The ids as a numpy array; waits for their device."""
    return part.cpu().numpy() if isinstance(part, Tensor) else np.asarray(part)


def as_before(part: Any, ids: Ints) -> Any:
    """A copy of ids, of the kind and on the device of the original."""
    if isinstance(part, Tensor):
        return torch.from_numpy(np.array(ids)).to(device=part.device, dtype=part.dtype)
    return np.array(ids, part.dtype)
