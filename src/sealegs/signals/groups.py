"""Groups parameters by name, and sums values by group on the device."""

import re
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

_WRAPPERS = re.compile(r"^(module(\.|$))+|\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(\.|$)")


def plain_name(name: str) -> str:
    """The name without what DDP, torch.compile, FSDP and activation checkpointing put into it.

    >>> plain_name("module._orig_mod.blocks.0._checkpoint_wrapped_module.mlp.up.weight")
    'blocks.0.mlp.up.weight'
    """
    while (plain := _WRAPPERS.sub("", name)) != name:
        name = plain
    return name.removesuffix(".")


def group_of(parameter_name: str) -> str:
    """The name up to and including its first number; without a number, its first word.

    >>> group_of("transformer.h.11.mlp.c_fc.weight"), group_of("embedding.weight")
    ('transformer.h.11', 'embedding')
    """
    words = plain_name(parameter_name).split(".")
    numbers = (place for place, word in enumerate(words) if word.isdecimal())
    return ".".join(words[: next(numbers, 0) + 1])


class Sums:
    """Sums of chosen entries of a vector, the same bits every time.

    It gathers into a rectangle and sums. ``index_add_`` would add in the order in which CUDA's threads arrive, and a
    product with a matrix of zeros and ones would carry a NaN into every sum.
    """

    def __init__(self, members: Iterable[Sequence[int]]) -> None:
        self._members = tuple(members)
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __call__(self, values: Tensor) -> Tensor:
        """Sums over the last dimension: (..., entries) in, (..., sums) out. Sends its tables to a device once."""
        index, absent = self._tables.get(values.device) or self._send(values.device)
        return values[..., index].masked_fill(absent, 0.0).sum(-1)

    def _send(self, device: torch.device) -> tuple[Tensor, Tensor]:
        longest = max(map(len, self._members), default=0)
        rows = [[*places, *[-1] * (longest - len(places))] for places in self._members]
        index = torch.tensor(rows, dtype=torch.long).reshape(len(rows), longest)
        self._tables[device] = sent(index.clamp(min=0), device), sent(index < 0, device)
        return self._tables[device]


class Groups:
    """Which entry of a vector belongs to which group of parameters; groups are in the order of first appearance."""

    def __init__(self, parameter_names: Iterable[str]) -> None:
        members: dict[str, list[int]] = {}
        for place, name in enumerate(parameter_names):
            members.setdefault(group_of(name), []).append(place)
        self.names = tuple(members)
        self.members = tuple(members.values())
        self.sum_by_group = Sums(self.members)
        """(..., parameters) in, (..., groups) out."""


def sent(table: Tensor, device: torch.device) -> Tensor:
    """A copy on the device; on CUDA the host does not wait for it."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.to(device)
