"""Rescales the queries and keys of heads whose attention logits have grown beyond a limit, right after an update.

A head whose largest logit is ``limit / share`` gets its weights and biases of queries and keys times the root of
``share`` each, so that its largest logit is the limit; where heads share keys, the queries alone, times all of it. Any
other head is multiplied by exactly 1, which changes no bit. It is done on the device: the host waits for nothing.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from sealegs.signals.attention import AttentionHeads, HeadLogits
from sealegs.state.memory import local


class QkClip:
    """What is to be done about the heads of one step."""

    def __init__(self, limit: float, seen: HeadLogits, largest: Tensor) -> None:
        """``largest`` is the largest logit of each head in the forward pass of the step, the same on all ranks."""
        self._limit = limit
        self._attentions = seen.attentions
        self._largest = largest

    @torch.no_grad()
    def apply(self, closed: Tensor | None = None) -> None:
        """Rescale, unless ``closed`` is 1 when the device comes to it: then the update was not made either."""
        shares = shares_of(self._largest, self._limit)
        if closed is not None:
            shares = torch.where(closed > 0, torch.ones_like(shares), shares)
        of_modules = shares.split([each.heads for each in self._attentions])
        for each, of_heads in zip(self._attentions, of_modules, strict=True):
            if each.layout is not None:
                rescale(each, of_heads)


def shares_of(largest: Tensor, limit: float) -> Tensor:
    """What is left of each head's logits. A logit that is not finite is not the weights' size, and no reason."""
    is_over = (largest > limit) & largest.isfinite()
    return torch.where(is_over, limit / largest, torch.ones_like(largest)).float()


def rescale(each: AttentionHeads, shares: Tensor) -> None:
    """Rescale the queries and keys of a module, by what is to be left of each head's logits."""
    roots = shares if each.is_grouped else shares.sqrt()
    of_keys = shares.new_ones(each.key_heads) if each.is_grouped else roots
    for weight, rows, dim in each.scaled(roots, of_keys):
        part, mine = local(weight), _rows_here(weight, rows, dim).to(weight.device)
        if part.numel():
            factors = mine.view([-1 if place == dim else 1 for place in range(part.ndim)])
            part.copy_(part * factors)  # in fp32, and rounded once


class Over(NamedTuple):
    """What one module of attention was found to be beyond the limit."""

    module: str
    heads: list[int]
    logit: float
    """The largest."""


def over_limit(seen: HeadLogits, numbers: Sequence[float], limit: float) -> list[Over]:
    """The heads whose logits are beyond the limit, module by module."""
    found = []
    for each, of_heads in seen.by_module(numbers):
        heads = [head for head, logit in enumerate(of_heads) if limit < logit < math.inf]
        if heads and each.layout is not None:
            found.append(Over(each.name, heads, max(of_heads[head] for head in heads)))
    return found


def told_of(over: Sequence[Over], limit: float) -> dict[str, Any]:
    """The particulars of an event."""
    worst = max(over, key=lambda each: each.logit)
    count = sum(len(each.heads) for each in over)
    where = f"{worst.module}" + (f" and {len(over) - 1} more" if len(over) > 1 else "")
    heads = f"queries and keys of {count} {'head' if count == 1 else 'heads'}"
    text = f"{heads} rescaled in {where}: the largest logit was {worst.logit:.4g}, and {limit:g} is the limit"
    return {"limit": limit, "modules": [each._asdict() for each in over], "text": text}


def _rows_here(weight: Tensor, rows: Tensor, dim: int) -> Tensor:
    """Those of the rows that this rank holds."""
    if not isinstance(weight, DTensor):
        return rows
    shape, first = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    return rows[first[dim] : first[dim] + shape[dim]]
