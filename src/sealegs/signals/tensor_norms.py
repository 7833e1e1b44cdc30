"""Computes the L2 norm of each of many tensors in one pass, on their device, exactly enough to compare.

It uses float64, in which no finite float32 has an infinite norm. On a CPU that is three times the work of float32, so
there float32 is used for tensors that it adds well enough.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from sealegs.signals.collect import waited_for

MOST_ADDED = 2**18
"""The most numbers that a CPU adds in float32. torch's norm is then within 2.5e-5 if they are random, and within 4.3e-4
if they are equal, and so rounded alike; the error grows with their number, to 3 % of a hundred million."""
LEAST_NORM = 1e-15
"""Below this norm float32 does not hold the squares."""
MOST_NORM = 1e19
"""Above this norm float32 does not hold the squares."""


def lengths(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The norm of each as one float64 vector on a device; not finite only where the tensor is not."""
    exact = exact_dtype(device)
    kinds = alike(tensors)
    if not kinds:
        return torch.zeros(0, dtype=exact, device=device)
    norms: dict[int, Tensor] = {}
    for places in kinds:
        some = [tensors[place] for place in places]
        found = (_rough_norms(some) if _is_rough(some[0]) else _norms(some, exact)).to(device)
        if len(kinds) == 1:
            return found
        norms.update(zip(places, found.unbind(), strict=True))
    return torch.stack([norms[place] for place in range(len(tensors))])


def total_of_torch(tensors: Sequence[Tensor], norms: Tensor) -> Tensor:
    """The total norm that ``clip_grad_norm_`` finds, to the last bit; ``norms`` are the tensors' lengths.

    On a CPU most of these are torch's own, so only those from float64 are computed again.
    """
    if not all(map(_is_rough, tensors)):
        return nn.utils.get_total_norm(tensors)
    found = norms.float()
    again = [
        place
        for place, (tensor, norm) in enumerate(zip(tensors, waited_for(norms), strict=True))
        # by a margin: what float32 finds to be below may be above in float64
        if tensor.numel() > MOST_ADDED or not 2 * LEAST_NORM < norm < MOST_NORM
    ]
    if again:
        found[again] = _norms([tensors[place] for place in again], torch.float32)
    return torch.linalg.vector_norm(found)  # type: ignore[no-any-return]


def exact_dtype(device: torch.device) -> torch.dtype:
    """The type for sums that must not overflow."""
    return torch.float32 if device.type == "mps" else torch.float64  # Apple's GPUs have no float64


def alike(tensors: Iterable[Tensor]) -> list[list[int]]:
    """Places of the tensors of each device and dtype: foreach operations are quick only on tensors that are alike."""
    places: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault((tensor.device, tensor.dtype), []).append(place)
    return list(places.values())


def _is_rough(tensor: Tensor) -> bool:
    return tensor.is_cpu and tensor.dtype is torch.float32


def _norms(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=dtype))


def _rough_norms(tensors: list[Tensor]) -> Tensor:
    """Norms in float32, a third of the work on a CPU; in float64 where that overflows, underflows or adds too many."""
    added = [tensor if tensor.numel() <= MOST_ADDED else tensor[:0] for tensor in tensors]
    norms = _norms(added, torch.float32).double()
    unsure = [place for place, norm in enumerate(waited_for(norms)) if not LEAST_NORM < norm < math.inf]
    if unsure:
        norms[unsure] = _norms([tensors[place] for place in unsure], torch.float64)
    return norms
