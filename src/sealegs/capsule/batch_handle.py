"""A batch as it was handed out in, a line of a capsule out: unless the loop has changed it since."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Self

from torch import Tensor

from sealegs.state.serialization import plain

SCARCE = 4
"""A byte on a device counts as so many: memory there is what runs are short of."""


@dataclass(frozen=True, slots=True)
class Handed:
    """A batch as it was handed out: the very object, which is not copied while nothing is wrong."""

    step: int
    index: int | None
    batch: Any
    size: int
    versions: tuple[int, ...]
    """Torch counts what is done to a tensor in its place: a batch that the loop has changed is not the one it got."""

    @classmethod
    def of(cls, step: int, index: int | None, batch: Any) -> Self:
        """A batch that is about to be trained on."""
        return cls(step, index, batch, size_of(batch), versions_of(batch))

    def recorded(self) -> dict[str, Any]:
        """A line of ``batches-<rank>.jsonl``; null for a batch that the loop has changed since it got it."""
        recorded = self.batch.recorded() if hasattr(self.batch, "recorded") else _opened_up(self.batch)
        batch = plain(recorded, "a batch")
        is_same = versions_of(self.batch) == self.versions
        return {"step": self.step, "index": self.index, "batch": batch if is_same else None}


def size_of(batch: Any) -> int:
    """Bytes of the tensors and arrays in a batch, as they count.

    >>> import torch
    >>> size_of({"ids": torch.zeros(2, 8, dtype=torch.long), "names": ["a", "b"]})
    128
    """
    return sum(part.nbytes * (SCARCE if getattr(part, "is_cuda", False) else 1) for part in _parts(batch))


def versions_of(batch: Any) -> tuple[int, ...]:
    """How often each tensor of a batch has been changed in its place."""
    return tuple(part._version for part in _parts(batch) if isinstance(part, Tensor) and not part.is_inference())


def _opened_up(batch: Any) -> Any:
    """Data classes as the dicts of their fields."""
    if is_dataclass(batch) and not isinstance(batch, type):
        return {field.name: _opened_up(getattr(batch, field.name)) for field in fields(batch)}
    if isinstance(batch, Mapping):
        return {key: _opened_up(item) for key, item in batch.items()}
    if isinstance(batch, list | tuple):
        return [_opened_up(item) for item in batch]
    return batch


def _parts(batch: Any) -> Iterator[Any]:
    if hasattr(batch, "nbytes"):
        yield batch
    elif isinstance(batch, Mapping):
        for item in batch.values():
            yield from _parts(item)
    elif isinstance(batch, list | tuple):
        for item in batch:
            yield from _parts(item)
    elif is_dataclass(batch):
        for field in fields(batch):
            yield from _parts(getattr(batch, field.name))
