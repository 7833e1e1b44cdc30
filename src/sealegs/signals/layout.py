"""Which ranks hold copies of which tensor of a model: what sums, comparisons and names of several ranks go by.

The mesh of a DTensor says it, and the process group of DDP. Of any other tensor its content does: the same name, shape
and bits on two ranks are taken for copies, until the gradients of the first step say that they are not, as of the
stages of a pipeline that were made from one seed.
"""

import hashlib
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sealegs.signals.collect import waited_for
from sealegs.signals.groups import Groups, merged_groups, plain_name
from sealegs.signals.ranks import checksum_of

T = TypeVar("T")
Gather = Callable[[T], list[T]]
"""Gives the values of all ranks, by rank."""

STRANGER = "a parameter that is not the model's"
PARTS = 4
"""Parts of a gradient whose sums are compared, besides its norm."""
NEAR = 0.05
"""How far they may be apart, in norms: kernels whose order of additions is not fixed differ by far less, the gradients
of other batches by far more."""


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """What the ranks hold of a model, the same on all of them but for ``copies`` and ``compared``."""

    world: int = 1
    names: tuple[str, ...] = ()
    """The parameters of all ranks, each name once."""
    groups: tuple[str, ...] = ()
    """The groups of these, as they are measured, where ranks have different ones."""
    are_alike: bool = True
    """Whether all ranks have parameters of the same names and shapes."""
    own: frozenset[str] = frozenset()
    """Names under which ranks hold different tensors, or only some ranks hold one."""
    copies: Mapping[Tensor, int] = field(default_factory=dict)
    """On how many ranks the elements lie that this rank holds of a parameter."""
    compared: tuple[Tensor, ...] = ()
    """The parameters that are to be the same, to the last bit, on all ranks with this one's number in ``twins``."""
    twins: tuple[int, ...] = (0,)
    """By rank, the first rank that holds the same copies."""
    peers: tuple[int, ...] = (0,)
    """By rank, the first rank of those whose gradients are parts of the same mean: their norms can be compared."""
    places: tuple[str, ...] = ("",)
    """By rank, its coordinate in the mesh, in words; empty where there is none."""
    elements: float | None = None
    """Elements of the trained parameters on all ranks together, where one rank's shapes do not tell."""
    is_guessed: bool = False
    """Whether tensors were taken for copies by their content."""
    rank: int = 0
    mine: frozenset[str] = frozenset()
    """The names of this rank's parameters, where ranks hold different tensors."""
    holders: Mapping[str, int] = field(default_factory=dict)
    """Of these names the ones that do not stand for one tensor of all ranks: the first rank that holds this rank's."""

    @property
    def is_one(self) -> bool:
        """Whether a name stands for one tensor, of which every rank holds a part or a copy."""
        return self.are_alike and not self.own

    def copies_of(self, parameter: Tensor) -> int:
        """On how many ranks the elements lie that this one holds."""
        found = self.copies.get(parameter)
        return replicas(parameter, self.world) if found is None else found

    def on_rank(self, rank: int) -> str:
        """The rank, with its coordinate."""
        place = self.places[rank] if rank < len(self.places) else ""
        return f"rank {rank} ({place})" if place else f"rank {rank}"

    def holders_of(self, stored: Mapping[str, Tensor]) -> Mapping[str, int] | None:
        """The first rank that holds each tensor of a state, ``optimizer/0/blocks.1.weight.exp_avg``, but of those
        that all ranks have a part or a copy of. None where that is so of all."""
        if self.is_one:
            return None
        found = {name: self._holder_of(name, tensor) for name, tensor in stored.items()}
        return {name: holder for name, holder in found.items() if holder is not None}

    def _holder_of(self, stored: str, tensor: Tensor) -> int | None:
        kind, _, rest = stored.partition("/")
        if kind == "rng":  # whose names have the rank
            return None
        path = rest.partition("/")[2] if kind == "optimizer" else rest
        while path and kind in ("model", "optimizer"):
            if path in self.mine:
                return self.holders.get(path)
            path = path.rpartition(".")[0]
        mesh: Any = getattr(tensor, "device_mesh", None)  # of a buffer, or of what the loop keeps
        return self.rank if mesh is None else int(mesh.mesh.min())

    @property
    def why_not_one(self) -> str:
        """Why the names do not say which tensor is meant, in a sentence; empty where they do."""
        if self.is_one:
            return ""
        some = ", ".join(sorted(self.own)[:3])
        return (
            f"ranks hold different tensors, of the same name or of other names ({some}{', ...' * (len(self.own) > 3)})"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Divided:
    """What an engine says that divides a training among ranks by itself: its tensors do not tell."""

    held: nn.Module
    """What this rank holds of the model: parts of its parameters, under their names."""
    layout: Layout


class _Known(NamedTuple):
    """What mesh or process group say of a parameter."""

    ranks: tuple[int, ...]
    """All ranks that hold a part of it."""
    copies: tuple[int, ...]
    """Those that hold the same part as this rank."""


class _Told(NamedTuple):
    """What the first of the ranks that hold a parameter says of it to all others."""

    name: str
    kind: str
    """Shape and placements."""
    leader: int
    ranks: int
    """How many hold a part of it, as is known."""
    content: tuple[float, ...]
    sketch: tuple[float, ...]
    """Of its gradient."""


class _Rank(NamedTuple):
    """What a rank says where meshes and groups do not say all."""

    names: tuple[str, ...]
    groups: tuple[str, ...]
    place: str
    told: tuple[_Told, ...]
    has_loss: bool


def find_layout(
    model: nn.Module, rank: int, world: int, gather: Gather[Any], *, has_loss: bool | None = None
) -> Layout:
    """The layout of a model, on every rank. Gradients count where it is known whether this rank ``has_loss``."""
    if world == 1:
        return Layout()
    parameters = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    replicated, group = _by_ddp(model)
    ranks_of_ddp = tuple(dist.get_process_group_ranks(group)) if group is not None else ()
    known = {
        name: _known(parameter, rank, ranks_of_ddp if name in replicated else ())
        for name, parameter in parameters.items()
    }
    kinds = {name: _kind(parameter) for name, parameter in parameters.items()}
    are_known = all(len(one.ranks) == world for one in known.values())
    groups = Groups(parameters, merged_groups(model)).names
    of_mesh = {name: one for name, one in known.items() if len(one.copies) > 1}
    outline = _number([*kinds.items()])
    outlines = gather((are_known, outline, _number([*of_mesh.items()]), _place(parameters.values())))
    if all(one[:2] == (True, outline) for one in outlines):
        return Layout(
            world=world,
            names=(*parameters, STRANGER),
            copies={parameters[name]: len(one.copies) for name, one in known.items()},
            compared=tuple(parameters[name] for name in of_mesh),
            twins=_firsts(one[2] for one in outlines),
            peers=(0,) * world,
            places=tuple(one[3] for one in outlines),
        )
    led = [name for name, one in known.items() if one.ranks[0] == rank]
    mine = _Rank(
        tuple(parameters),
        groups,
        outlines[rank][3],
        tuple(
            _Told(
                name,
                kinds[name],
                rank,
                len(known[name].ranks),
                _content(parameters[name]),
                () if has_loss is None else _sketch(parameters[name].grad),
            )
            for name in led
        ),
        bool(has_loss),
    )
    everyone: list[_Rank] = gather(mine)
    classes = _classes([told for one in everyone for told in one.told], all(one.has_loss for one in everyone))
    # leaders by the tensor whose part a rank holds
    whose = {name: classes[name, kinds[name], one.ranks[0]] for name, one in known.items()}
    sizes = {name: len(whose[name].leaders) * len(one.ranks) for name, one in known.items()}
    copies = {name: len(whose[name].leaders) * len(one.copies) for name, one in known.items()}
    compared = [
        name for name, one in known.items() if len(one.copies) > 1 or (len(one.ranks) == 1 and sizes[name] == world)
    ]
    twin = _number([(name, whose[name].leaders[0], known[name].copies if name in of_mesh else ()) for name in compared])
    together = [(name, whose[name].leaders[0]) for name in parameters if sizes[name] > 1]
    peer = _number(together) if together else -1 - rank
    own = [name for name in parameters if sizes[name] < world]
    elements = sum(local(p).numel() / copies[name] for name, p in parameters.items() if p.requires_grad)
    are_alike = all(one[1] == outline for one in outlines)
    labels = gather((twin if compared else -1 - rank, peer, tuple(own), elements))
    return Layout(
        world=world,
        names=(*dict.fromkeys(chain.from_iterable(one.names for one in everyone)), STRANGER),
        groups=() if are_alike else tuple(dict.fromkeys(chain.from_iterable(one.groups for one in everyone))),
        are_alike=are_alike,
        own=frozenset(chain.from_iterable(one[2] for one in labels)),
        copies={parameters[name]: count for name, count in copies.items()},
        compared=tuple(parameters[name] for name in compared),
        twins=_firsts(one[0] for one in labels),
        peers=_firsts(one[1] for one in labels),
        places=tuple(one.place for one in everyone),
        elements=sum(one[3] for one in labels),
        rank=rank,
        mine=frozenset(parameters),
        holders={
            name: whose[name].leaders[0] for name in chain.from_iterable(one[2] for one in labels) if name in whose
        },
        is_guessed=any(len(found.leaders) > 1 for found in classes.values()),
    )


class _Class(NamedTuple):
    leaders: tuple[int, ...]
    """Of all groups of ranks that hold the same tensor."""


def _classes(told: Sequence[_Told], have_loss: bool) -> dict[tuple[str, str, int], _Class]:
    """Which groups of ranks hold the same tensor: by content, and by gradients where these are told.

    Where any gradients are far apart, only those that are equal count as one: what flows past the blocks of a pipeline
    gives some of them much the same. Where all ranks have a loss and no tensor at all has one gradient, nothing is
    exchanged, or only now and then: then gradients say nothing of what the tensors are.
    """
    by_content = _joined(told, lambda *_: True)
    if _joined(told, _are_near) == by_content:
        return by_content
    by_gradient = _joined(told, operator.eq)
    has_met = any(one.ranks > 1 for one in told) or any(len(found.leaders) > 1 for found in by_gradient.values())
    return by_gradient if has_met or not have_loss else by_content


def _joined(
    told: Sequence[_Told], are_near: Callable[[Sequence[float], Sequence[float]], bool]
) -> dict[tuple[str, str, int], _Class]:
    found: dict[tuple[str, str, tuple[float, ...]], list[list[_Told]]] = {}
    for one in told:
        alike = found.setdefault((one.name, one.kind, one.content), [])
        near = next((members for members in alike if are_near(members[0].sketch, one.sketch)), None)
        if near is None:
            alike.append([one])
        else:
            near.append(one)
    joined = (members for alike in found.values() for members in alike)
    return {
        (one.name, one.kind, one.leader): _Class(tuple(other.leader for other in members))
        for members in joined
        for one in members
    }


def _are_near(one: Sequence[float], other: Sequence[float]) -> bool:
    if not one or not other:
        return one == other
    norm = max(one[0], other[0])
    if not math.isfinite(norm):
        return math.isfinite(one[0]) == math.isfinite(other[0])
    return all(abs(a - b) <= NEAR * norm for a, b in zip(one, other, strict=True))


def _by_ddp(model: nn.Module) -> tuple[frozenset[str], Any]:
    """The parameters whose gradients DDP exchanges, and among whom."""
    model = getattr(model, "_orig_mod", model)  # compiled
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        return frozenset(), None
    ignored = set(model.parameters_to_ignore)
    names = (name for name, _ in model.module.named_parameters() if name not in ignored)
    return frozenset(map(plain_name, names)), model.process_group


def _known(parameter: Tensor, rank: int, replicated_on: tuple[int, ...]) -> _Known:
    mesh: Any = getattr(parameter, "device_mesh", None)
    if mesh is None:
        ranks = replicated_on or (rank,)
        return _Known(ranks, ranks)
    where: Any = mesh.get_coordinate()
    all_ranks: Tensor = mesh.mesh
    placements: Any = getattr(parameter, "placements", ())
    chosen = all_ranks
    for axis, placement in reversed([*enumerate(placements)]):
        if not placement.is_replicate() and where is not None:
            chosen = chosen.select(axis, where[axis])
    return _Known(tuple(all_ranks.flatten().tolist()), tuple(chosen.flatten().tolist()))


def _kind(parameter: Tensor) -> str:
    return f"{tuple(parameter.shape)} {parameter.dtype} {getattr(parameter, 'placements', '')}"


def _place(parameters: Iterable[Tensor]) -> str:
    """The coordinate in the largest mesh with names, in words."""
    meshes: list[Any] = [mesh for p in parameters if (mesh := getattr(p, "device_mesh", None)) is not None]
    named = [mesh for mesh in meshes if mesh.mesh_dim_names and mesh.get_coordinate() is not None]
    if not named:
        return ""
    mesh = max(named, key=lambda each: each.ndim)
    return ", ".join(f"{name} {at}" for name, at in zip(mesh.mesh_dim_names, mesh.get_coordinate(), strict=True))


def replicas(parameter: Tensor, world: int) -> int:
    """On how many of ``world`` ranks the same elements lie, as far as one rank can tell: all for a plain tensor,
    ``world`` over the shards for a DTensor."""
    mesh, placements = getattr(parameter, "device_mesh", None), getattr(parameter, "placements", ())
    shards = (
        math.prod(mesh.size(axis) for axis, kind in enumerate(placements) if not kind.is_replicate()) if mesh else 1
    )
    return max(1, world // shards)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor: the shard of a DTensor, else all of it."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@torch.no_grad()
def _content(parameter: Tensor) -> tuple[float, ...]:
    """Numbers that other bits would change; none where they cannot be read."""
    try:
        held = local(parameter)
        return tuple(waited_for(checksum_of([held], held.device)))
    except (RuntimeError, NotImplementedError, KeyError, ValueError, TypeError):  # on no device yet, or of another kind
        return ()


@torch.no_grad()
def _sketch(gradient: Tensor | None) -> tuple[float, ...]:
    """The norm of a gradient, and sums of its parts."""
    if gradient is None:
        return (0.0,) * (1 + PARTS)
    held = local(gradient)
    held = held.coalesce().values() if held.is_sparse else held
    numbers = (torch.view_as_real(held) if held.is_complex() else held).reshape(-1).double()
    sums = [numbers[part::PARTS].sum() for part in range(PARTS)]
    return tuple(waited_for(torch.stack([torch.linalg.vector_norm(numbers), *sums])))


def _number(value: object) -> int:
    """A number that is the same for equal values on all ranks."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=7).digest())


def _firsts(labels: Iterable[int]) -> tuple[int, ...]:
    """For each rank the first one with its label."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(label, rank) for rank, label in enumerate(labels))
