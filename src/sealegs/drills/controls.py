"""Harmless changes to the lab's batches, which a guard must let pass."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from sealegs.faults.batches import Spoiler, Spoilt
from sealegs.lab.data import Batch, Stream

PAUSE = 2.0
"""Seconds: as long as a hundred steps of the lab's smallest model."""
FAR = 10**6
"""Batches ahead, where no drill comes."""
Altered = Callable[[Batch], Batch]


class Altering(Spoiler):
    """Changes batches from a number on."""

    def __init__(self, alter: Altered, at: int = 0, batches: float = math.inf) -> None:
        super().__init__([])
        self._alter, self._at, self._end = alter, at, at + batches

    def apply(self, batch: Any, number: int) -> Any:
        """The batch, or another one."""
        return self._alter(batch) if self._at <= number < self._end else batch


def altered(control: str, at: int, other: Stream) -> Callable[..., Any]:
    """The disturbance of a lab run from a step on, by name of the control; ``other`` has another kind of text."""

    @contextmanager
    def disturb(_: object, __: object, stream: Stream, *___: object) -> Iterator[Any]:
        alter, batches = {
            "hard-batch": (lambda batch: _numbered(other, batch, batch.index), 1),
            "domain-switch": (lambda batch: _half(batch, _numbered(other, batch, batch.index)), math.inf),
            "other-domain": (lambda batch: _numbered(other, batch, batch.index), math.inf),
            "batch-size-ramp": (lambda batch: _joined(batch, _numbered(stream, batch, batch.index + FAR)), math.inf),
            "checkpoint-pause": (_late, 1),
            "clean-resume": (lambda batch: batch, 1),
        }[control]
        yield Spoilt(stream, Altering(alter, at, batches))

    return disturb


def _numbered(stream: Stream, batch: Batch, number: int) -> Batch:
    """A batch of a stream under the number of another."""
    return replace(stream.batch(number), index=batch.index)


def _joined(first: Batch, second: Batch) -> Batch:
    """Two batches as one."""
    return replace(
        first,
        tokens=np.concatenate([first.tokens, second.tokens]),
        targets=np.concatenate([first.targets, second.targets]),
        spans=first.spans + second.spans,
    )


def _half(first: Batch, second: Batch) -> Batch:
    """Every other row of the first batch and of the second."""
    odd = np.arange(len(first.tokens)) % 2 == 1
    return replace(
        first,
        tokens=np.where(odd[:, None], second.tokens, first.tokens),
        targets=np.where(odd[:, None], second.targets, first.targets),
        spans=tuple(span for pair in zip(first.spans[::2], second.spans[1::2], strict=True) for span in pair),
    )


def _late(batch: Batch) -> Batch:
    time.sleep(PAUSE)
    return batch
