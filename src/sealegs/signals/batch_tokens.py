"""Keeps the token ids of the batches that a step reads, until it is known whether something was wrong there."""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sealegs.signals.batch_hash import digest_of
from sealegs.stats.token_frequencies import token_statistics
from sealegs.vocabulary import Number

MOST_MICRO_BATCHES = 64
"""Batches of one step that are looked at, the last ones."""
NAME = "input_ids"
"""What most loaders call the ids in a batch that has names."""


class BatchTokens:
    """The ids of the steps under way: references, not copies. They are counted only where a row asks for it."""

    def __init__(self, *, is_late: bool) -> None:
        """``is_late`` where rows come after the loop may have used the batch's memory again: those are passed over."""
        self._is_late = is_late
        self._handed: deque[Callable[[], Any] | tuple[Tensor, str]] = deque(maxlen=MOST_MICRO_BATCHES)
        self._of_step: dict[int, list[Callable[[], Any] | tuple[Tensor, str]]] = {}

    def handed_out(self, batch: Any) -> None:
        """A batch is about to be trained on. One that has ``token_statistics`` is asked for them itself."""
        own = getattr(batch, "token_statistics", None)
        if callable(own):
            self._handed.append(own)
        elif (ids := token_ids(batch)) is not None:
            self._handed.append((ids, digest_of(ids) if self._is_late else ""))

    def begin_step(self, number: int, batches: int) -> None:
        """A step that has read the last so many ``batches`` is decided."""
        self._of_step[number] = list(self._handed)[-batches:]
        self._handed.clear()

    def take(self, number: int, *, wanted: bool) -> Mapping[str, Number | str]:
        """The signals of a step, if they are wanted; they are not kept any longer."""
        kept = self._of_step.pop(number, [])
        if not wanted or not kept:
            return {}
        ids = []
        for each in kept:
            if not isinstance(each, tuple):
                told: Mapping[str, Number | str] = each()
                return told if len(kept) == 1 else {}
            if self._is_late and digest_of(each[0]) != each[1]:
                return {}
            ids.append(each[0].reshape(-1).to(torch.int64).numpy())
        return token_statistics(np.concatenate(ids))


def token_ids(batch: Any) -> Tensor | None:
    """The first rows of whole numbers in a batch, in the host's memory: reading a device would mean waiting."""
    if isinstance(batch, Mapping):
        return token_ids(batch[NAME]) if NAME in batch else _first(batch.values())
    if isinstance(batch, list | tuple):
        return _first(batch)
    is_ids = isinstance(batch, Tensor) and batch.ndim == 2 and batch.dtype in _WHOLE and batch.device.type == "cpu"
    return batch.detach() if is_ids and batch.layout == torch.strided and not batch.is_nested else None


def _first(values: Any) -> Tensor | None:
    return next((ids for value in values if (ids := token_ids(value)) is not None), None)


_WHOLE = frozenset({torch.int16, torch.int32, torch.int64})
