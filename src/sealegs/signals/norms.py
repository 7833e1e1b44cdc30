"""Reads the gradients of a step and their norms, before anything clips or reduces them: one pass, on the device."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sealegs.signals.cuda_graphs import GraphCapturer, GraphedFunction, addresses
from sealegs.signals.groups import plain_name
from sealegs.signals.layout import STRANGER, local
from sealegs.signals.tensor_norms import alike, lengths, total_of_torch


@dataclass(frozen=True, slots=True)
class Gradients:
    """The gradients of one step, in place, and their L2 norms.

    A finite gradient of 1e25 has a finite norm, so a norm that is not finite means a gradient that is not. To
    ``argmax`` NaN is the largest of all, then infinity: the worst is the culprit.
    """

    names: tuple[str, ...]
    owners: list[Tensor]
    """The parameters that have them."""
    tensors: list[Tensor]
    """This rank's part of them; ``clip`` changes them in place."""
    norms: Tensor
    """Norm of each tensor in float64; of this rank's shard where it is sharded."""
    are_used_once: bool
    """Whether no gradient belongs to two parameters, or to one parameter in two optimizers."""

    def total(self) -> Tensor:
        """The norm of all gradients."""
        total: Tensor = torch.linalg.vector_norm(self.norms)
        return total

    def worst(self) -> Tensor:
        """Index of the tensor with the largest norm."""
        return self.norms.argmax() if len(self.names) else torch.zeros((), dtype=torch.long, device=self.norms.device)

    def clip(self, largest: float, total: Tensor, are_replicated: Tensor | None = None) -> None:
        """Scale them so that their norm is at most ``largest``, as ``clip_grad_norm_`` does, to the last bit.

        Where that is not possible, ``total`` counts as their norm: for sparse gradients, for shards, and on several
        ranks unless ``are_replicated``, since each would scale by a norm of its own.
        """
        gradients = [owner.grad for owner in self.owners if owner.grad is not None]
        if _are_plain(gradients):
            own = total_of_torch(gradients, self.norms)
            norm = own if are_replicated is None else torch.where(are_replicated, own, total.to(own))
            nn.utils.clip_grads_with_norm_(self.owners, largest, norm)
            return
        factor = torch.clamp(largest / (total + 1e-6), max=1.0)
        for places in alike(self.tensors):
            tensors = [self.tensors[place] for place in places]
            torch._foreach_mul_(tensors, factor.to(tensors[0].device, tensors[0].dtype))


class GradientReader:
    """Finds the gradients of a model's parameters: those that the optimizers will use."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = tuple(optimizers)
        self.by_name = {plain_name(name): parameter for name, parameter in model.named_parameters()}
        self._names = {id(parameter): name for name, parameter in self.by_name.items()}
        self._places = {owner: place for place, owner in enumerate(self._names)}
        self._owners: list[int] = []
        """Identities of the parameters whose gradients were read last."""
        self._names_of_owners: tuple[str, ...] = ()
        self._order: list[int] = []
        """Their places in the order of the model, in which loops clip: sums depend on it."""
        self._norms = GraphedFunction[Tensor](GraphCapturer())

    @torch.no_grad()
    def read(self) -> Gradients:
        """The gradients as they are now. It runs at every step, so it does no more than it must."""
        owners: dict[int, Tensor] = {}
        met = 0
        for parameter in self.parameters():
            if (gradient := parameter.grad) is not None:
                met += 1
                owners.setdefault(id(gradient), parameter)  # two may share one, and two optimizers a parameter
        ids = list(map(id, owners.values()))
        if ids != self._owners:
            self._order = sorted(range(len(ids)), key=lambda place: self._places.get(ids[place], len(self._places)))
            names = (self._names.get(ids[place], STRANGER) for place in self._order)
            self._owners, self._names_of_owners = ids, tuple(names)
        found = list(owners.values())
        ordered = [found[place] for place in self._order]
        tensors = [parameter.grad for parameter in ordered if parameter.grad is not None]
        if not _are_plain(tensors) or any(dtype.is_complex for dtype in {tensor.dtype for tensor in tensors}):
            tensors = list(map(_elements, ordered))
        return Gradients(self._names_of_owners, ordered, tensors, self._norms_of(tensors), met == len(ids))

    def holds(self, gradients: Gradients) -> bool:
        """Whether the parameters still have these gradients, and no others."""
        held = {id(parameter.grad) for parameter in self.parameters() if parameter.grad is not None}
        return bool(held) and held == set(map(id, gradients.tensors))

    def _norms_of(self, tensors: list[Tensor]) -> Tensor:
        """The norms; on CUDA in one launch, as long as gradients stay in place. Their sizes are those of their
        owners."""
        device = self.device
        measure = partial(lengths, tensors, device)
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return measure()
        return self._norms(measure, (addresses(tensors), self._owners), device)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        first = next(iter(self.parameters()), None)
        return first.device if first is not None else torch.device("cpu")

    def parameters(self) -> Iterable[Tensor]:
        """All parameters that the optimizers hold."""
        return (p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"])


def _elements(parameter: Tensor) -> Tensor:
    """The elements of a gradient that this rank holds; of a sparse one, those that are present."""
    gradient = parameter.grad
    assert gradient is not None
    if any(placement.is_partial() for placement in getattr(gradient, "placements", ())):
        # sums that are still to be added up over ranks, as of the norms under sequence parallel: they have no norm yet
        whole: Any = gradient
        parameter.grad = gradient = whole.redistribute(placements=getattr(parameter, "placements", None))
    if gradient.is_sparse:
        parameter.grad = gradient.coalesce()  # parts of one element must be added up before it has a norm
        return parameter.grad.values()
    held = local(gradient)
    return torch.view_as_real(held) if held.is_complex() else held


def _are_plain(gradients: list[Tensor]) -> bool:
    """Whether none is sharded or sparse, as in nearly all loops; it is asked at every step."""
    return set(map(type, gradients)) <= {Tensor} and {gradient.layout for gradient in gradients} <= {torch.strided}
