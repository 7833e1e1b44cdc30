"""Digests of a rank's own gradients, before the reduction mixes them with others': two computations of one micro-batch
are compared by them.

A digest has, for each tensor, a checksum of all bits, the norm, and sums of parts. Equal checksums are equal bits;
where kernels add in any order, sums of parts say how far apart two computations are.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sealegs.signals.collect import waited_for
from sealegs.signals.groups import plain_name
from sealegs.signals.ranks import checksum_of

PARTS = 4
"""Parts of a gradient whose sums are compared."""
_WIDTH = 3 + PARTS
"""Numbers of a tensor: two of the checksum, the norm, the sums."""


@dataclass(frozen=True, slots=True)
class Digest:
    """What a rank has computed of a micro-batch."""

    loss: float
    tensors: Mapping[str, tuple[float, ...]]
    """By name: two numbers of the checksum, the norm, the sums of parts."""


class Difference(NamedTuple):
    """How two computations of one micro-batch differ."""

    is_exact: bool
    """Whether no bit differs."""
    distance: float
    """Between the gradients, as a share of their norm; infinite where only one of them is finite."""
    tensors: int
    """How many differ in any bit."""
    of: int
    worst: str
    """The tensor that differs most."""
    is_in_loss: bool
    """Whether the loss differs, too: then the forward pass was another."""


class GradientDigests:
    """Takes the digests of one backward pass, while it is armed."""

    def __init__(self, model: nn.Module) -> None:
        self._names: dict[Tensor, str] = {parameter: plain_name(name) for name, parameter in model.named_parameters()}
        self._taken: dict[str, Tensor] = {}
        self._is_armed = False

    @property
    def is_armed(self) -> bool:
        """Whether the next backward pass is looked at."""
        return self._is_armed

    def arm(self) -> None:
        """Look at the next backward pass."""
        self._taken.clear()
        self._is_armed = True

    @torch.no_grad()
    def see(self, whose: Tensor | str, gradient: Tensor) -> None:
        """Take the digest of a gradient that is about to be reduced."""
        name = whose if isinstance(whose, str) else self._names.get(whose, "a parameter that is not the model's")
        self._taken[name] = _digest(gradient)

    def collect(self, loss: Tensor | None) -> Digest:
        """What the pass has computed; waits for the device."""
        self._is_armed = False
        names, rows = [*self._taken], [*self._taken.values()]
        self._taken = {}
        device = rows[0].device if rows else torch.device("cpu")
        value = torch.full((), math.nan) if loss is None else loss.detach()
        first = value.reshape(1).to(device, torch.float64)
        numbers = waited_for(torch.cat([first, *rows]))
        starts = range(1, len(numbers), _WIDTH)
        tensors = {name: tuple(numbers[at : at + _WIDTH]) for name, at in zip(names, starts, strict=True)}
        return Digest(numbers[0], tensors)


def _digest(gradient: Tensor) -> Tensor:
    held = gradient.coalesce().values() if gradient.is_sparse else gradient
    numbers = (torch.view_as_real(held) if held.is_complex() else held).reshape(-1)
    whole = len(numbers) - len(numbers) % PARTS
    sums = numbers[:whole].view(-1, PARTS).sum(0, dtype=torch.float64)
    sums[0] += numbers[whole:].sum(dtype=torch.float64)
    norm = torch.linalg.vector_norm(numbers, dtype=torch.float64)
    return torch.cat((checksum_of([numbers], numbers.device), norm[None], sums))


def difference(one: Digest, other: Digest) -> Difference:
    """How two digests of the same tensors differ."""
    names = sorted({*one.tensors, *other.tensors})
    apart = {name: _apart(one.tensors.get(name), other.tensors.get(name)) for name in names}
    differ = [name for name in names if not _same(one.tensors.get(name), other.tensors.get(name))]
    is_in_loss = not _is_equal(one.loss, other.loss)
    size = math.sqrt(math.fsum(_norm(digest) ** 2 for digest in one.tensors.values()))
    distance = math.sqrt(math.fsum(each**2 for each in apart.values()))
    if distance and math.isfinite(distance):
        distance = distance / size if 0 < size < math.inf else math.inf
    return Difference(
        is_exact=not differ and not is_in_loss,
        distance=distance,
        tensors=len(differ),
        of=len(names),
        worst=max(differ, key=apart.__getitem__, default=""),
        is_in_loss=is_in_loss,
    )


def _same(one: tuple[float, ...] | None, other: tuple[float, ...] | None) -> bool:
    return one is not None and other is not None and one[:2] == other[:2]


def _norm(digest: Iterable[float]) -> float:
    return [*digest][2]


def _apart(one: tuple[float, ...] | None, other: tuple[float, ...] | None) -> float:
    """How far the sums of two gradients are apart, in the size of these; in the same units as norms."""
    if one is None or other is None:
        return math.inf
    if one[:2] == other[:2]:
        return 0.0
    pairs = [(a, b) for a, b in zip(one[2:], other[2:], strict=True) if not _is_equal(a, b)]
    if not all(math.isfinite(a) and math.isfinite(b) for a, b in pairs):
        return math.inf
    return max((abs(a - b) for a, b in pairs), default=0.0)


def _is_equal(one: float, other: float) -> bool:
    """NaN is what a computation may give on both."""
    return one == other or (math.isnan(one) and math.isnan(other))
