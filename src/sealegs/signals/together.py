"""Makes one number of those that ranks have sent, where some may have sent none."""

import math
from functools import partial

import torch
from torch import Tensor

from sealegs.signals.collect import Block

ABSENT = -1.0
"""What a rank sends for a missing value: no norm, count or time is negative."""


def block(names: tuple[str, ...], numbers: Tensor) -> Block:
    """Signals that some rank has seen."""
    return partial(present, names), numbers


def present(names: tuple[str, ...], numbers: list[float]) -> dict[str, float]:
    """Signals that some rank has seen; NaN counts as seen."""
    return {name: number for name, number in zip(names, numbers, strict=True) if number != ABSENT}


def block_of_means(names: tuple[str, ...], numbers: Tensor) -> Block:
    """Means of sums and counts."""
    return partial(means, names), numbers


def block_if_any(names: tuple[str, ...], numbers: Tensor) -> Block:
    """Signals that there are at some steps alone, and where they were seen: else they are not finite."""
    return partial(_finite, names), numbers


def _finite(names: tuple[str, ...], numbers: list[float]) -> dict[str, float]:
    """All of them, or none."""
    return dict(zip(names, numbers, strict=True)) if numbers and all(map(math.isfinite, numbers)) else {}


def means(names: tuple[str, ...], numbers: list[float]) -> dict[str, float]:
    """The means of what at least one rank has logged."""
    sums, counts = numbers[: len(names)], numbers[len(names) :]
    return {name: total / count for name, total, count in zip(names, sums, counts, strict=True) if count > 0}


def summed(rows: Tensor) -> Tensor:
    """The sum over ranks."""
    return rows.sum(0)


def sum_of_sent(rows: Tensor) -> Tensor:
    """The sum over ranks, of those that have sent anything."""
    return torch.where(rows != ABSENT, rows, 0.0).sum(0)


def mean_of_sent(rows: Tensor) -> Tensor:
    """The mean over ranks that have a value."""
    is_there = rows != ABSENT
    count = is_there.sum(0)
    return torch.where(count > 0, torch.where(is_there, rows, 0.0).sum(0) / count, ABSENT)


def largest(rows: Tensor) -> Tensor:
    """The largest of all ranks."""
    return rows.amax(0)
