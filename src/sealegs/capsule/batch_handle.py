"""A batch as it was handed out, and how it is written into a capsule."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Self

from torch import Tensor

from sealegs.state.serialization import plain

SCARCE = 4
"""A byte on a device counts as this many, since device memory is what runs are short of."""


@dataclass(frozen=True, slots=True)
class BatchHandle:
    """A batch as it was handed out: the very object, not a copy."""

    step: int
    index: int | None
    batch: Any
    size: int
    versions: tuple[int, ...]
    """torch's version counters of its tensors, which tell whether the loop has changed the batch in place."""

    @classmethod
    def of(cls, step: int, index: int | None, batch: Any) -> Self:
        """The handle of a batch that is about to be trained on."""
        return cls(step, index, batch, size_of(batch), versions_of(batch))

    def recorded(self) -> dict[str, Any]:
        """A line of ``batches-<rank>.jsonl``; the batch is null if the loop has changed it since."""
        recorded = self.batch.recorded() if hasattr(self.batch, "recorded") else _opened_up(self.batch)
        batch = plain(recorded, "a batch")
        is_same = versions_of(self.batch) == self.versions
        return {"step": self.step, "index": self.index, "batch": batch if is_same else None}


def size_of(batch: Any) -> int:
    """Bytes of the tensors and arrays in a batch, with device memory counted ``SCARCE`` times.

    >>> import torch
    >>> size_of({"ids": torch.zeros(2, 8, dtype=torch.long), "names": ["a", "b"]})
    128
    """
    return sum(part.nbytes * (SCARCE if getattr(part, "is_cuda", False) else 1) for part in _parts(batch))


def versions_of(batch: Any) -> tuple[int, ...]:
    """How often each tensor of a batch has been changed in place."""
    return tuple(part._version for part in _parts(batch) if isinstance(part, Tensor) and not part.is_inference())


def _opened_up(batch: Any) -> Any:
    """The batch with data classes as dicts of their fields."""
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
