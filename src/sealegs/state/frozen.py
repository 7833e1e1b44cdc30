"""The frozen part of a model, which states leave out: they keep digests of it instead.

Left out is what was frozen when the run began, as long as nobody changes it. A weight that is trained after all, or
that somebody writes to, is held from then on; what was trained once is never left out. So the part only shrinks.

Whenever a state is taken, each tensor is looked at: torch's version counter, its place, and the bits of 64 elements. A
write to others through ``.data``, which torch does not count, shows when a state is restored, where all bits count.
"""

import hashlib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from sealegs.errors import SourceError
from sealegs.signals.collective import TIMEOUT_S, Collective
from sealegs.signals.weights import flat, spacing

LARGE_BUFFER = 2**16
"""Bytes from which on a buffer is left out as well, once a forward pass has left it as it was."""
LOOKED_AT = 64
"""Elements of each tensor that are looked at whenever a state is taken."""


@dataclass(slots=True)
class _Known:
    """A tensor as it was at the beginning."""

    described: str
    """Type, shape and digest: the same however it is sharded."""
    digests: dict[str, int]
    """Of each plain tensor in what this rank has of it."""
    sample: Tensor
    marks: tuple[Any, ...]
    is_buffer: bool


class Look(NamedTuple):
    """What a look has found, which a device may still be working on."""

    marked: list[str]
    """Tensors that were written to, or lie elsewhere: they may be as they were."""
    sampled: list[tuple[list[str], Tensor, torch.cuda.Event | None]]
    """Names, and whether each differs, as soon as it has arrived."""

    @property
    def has_arrived(self) -> bool:
        """Whether nobody has to wait for it."""
        return all(arrived is None for _, _, arrived in self.sampled)


class FrozenWeights:
    """The frozen weights of a model that is trained, where they outweigh the others: of one that is fine-tuned.

    Where less is frozen than trained, states hold it. It may be a copy that follows the rest, as a target network does.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], *, timeout_s: float = TIMEOUT_S) -> None:
        self._model = model
        self._optimizers = optimizers
        self._timeout_s = timeout_s
        self._ranks: Collective | None = None
        self._known: dict[str, _Known] = {}
        """All that were frozen at the beginning."""
        self._has_begun = False
        self._weights: dict[str, Tensor] = {}
        """Those that still are as they were, by their names in a checkpoint."""
        self._buffers: dict[str, Tensor] = {}
        self._is_used = False
        """Whether a state lacks them."""
        self._has_stepped = False
        """Whether a forward pass and an update lie behind the beginning."""
        self._originals: dict[str, list[Tensor]] = {}
        """What weights were before they were trained after all."""
        self._news: list[str] = []
        self._names: dict[str, str] = {}
        """Full names that were made before: it takes a while."""

    def candidates(self) -> dict[str, Tensor]:
        """The weights that would be left out if the run began now, by their names in a checkpoint."""
        named = dict(_parameters(self._model, self._names))
        owned = [each for opt in self._optimizers for group in opt.param_groups for each in group["params"]]
        stepped = {id(each) for each in owned if any(opt.state.get(each) for opt in self._optimizers)}
        trained = [each for each in (*named.values(), *owned) if each.requires_grad or id(each) in stepped]
        memory = set(chain.from_iterable(map(_memory, trained)))
        frozen = {name: each for name, each in named.items() if memory.isdisjoint(_memory(each)) and _has_bits(each)}
        return frozen if size_of(frozen.values()) > size_of(trained) else {}

    @torch.no_grad()
    def begin(self) -> None:
        """Take what is frozen now for what stays so; on all ranks."""
        if self._has_begun:
            return
        self._has_begun = True
        weights = self.candidates()
        if not weights:
            return
        if dist.is_available() and dist.is_initialized():
            self._ranks = Collective(self._timeout_s)
        weights |= dict(_inside(self._model, weights))
        buffers = {name: each for name, each in _buffers(self._model, self._names) if each.nbytes >= LARGE_BUFFER}
        known = {id(each): _known(each) for each in weights.values()}
        known |= {id(each): _known(each, is_buffer=True) for each in buffers.values()}
        for name, tensor in (*weights.items(), *buffers.items()):
            if (found := known[id(tensor)]) is not None:  # of any other kind it is held, as far as that goes
                self._known[name] = found
                (self._buffers if found.is_buffer else self._weights)[name] = tensor

    def left_out(self) -> dict[str, Tensor]:
        """What a state that is taken now leaves out, by its names in a checkpoint."""
        self.begin()
        self._is_used |= bool(self._weights)
        return self._weights | (self._buffers if self._has_stepped else {})

    def described(self, names: Iterable[str]) -> dict[str, str]:
        """Type, shape and digest of tensors that are left out."""
        return {name: self._known[name].described for name in names}

    def refuse_unless_agreed(self, names: Iterable[str]) -> None:
        """Refuse to write a state of which the ranks have left out different weights; on all ranks."""
        if self._ranks is not None and len(set(self._ranks.gather(frozenset(names)))) > 1:
            raise SourceError("frozen weights were changed on some of the ranks only: the state is no whole one")

    def before_update(self) -> None:
        """Notice weights that are about to be trained, while they are as they were."""
        if not self._has_begun:
            self.begin()
            return
        self._has_stepped = True
        self._take_in_thawed()

    @torch.no_grad()
    def look(self) -> Look:
        """Begin to look for changes. The host does not wait."""
        self.begin()
        self._take_in_thawed()
        names = [*self._weights, *self._buffers]
        live = self.named() if names else {}
        marked = [name for name in names if name not in live or _marks(live[name]) != self._known[name].marks]
        there: dict[torch.device, list[str]] = {}
        for name in names:
            if name not in marked:
                there.setdefault(self._known[name].sample.device, []).append(name)
        sampled = []
        for here in there.values():
            then = torch.stack([self._known[name].sample for name in here])
            differs = (torch.stack([_sample(live[name]) for name in here]) != then).any(1)
            sampled.append((here, *_on_its_way(differs)))
        return Look(marked, sampled)

    @torch.no_grad()
    def settle(self, look: Look, *, together: bool = False) -> bool:
        """Take in what a look has found to be changed, and say whether there is any; ``together`` on any rank."""
        changed = set()
        for names, differs, arrived in look.sampled:
            if arrived is not None:
                arrived.synchronize()
            changed |= {name for name, is_other in zip(names, differs.tolist(), strict=True) if is_other}
        live = self.named() if look.marked else {}
        for name in look.marked:
            if name not in live or self._differs(name, live[name]):
                changed.add(name)
            else:
                known = self._known[name]
                known.marks = _marks(live[name])
                (self._buffers if known.is_buffer else self._weights)[name] = live[name]
        if together and self._ranks is not None:
            changed = set().union(*self._ranks.gather(changed))
        self._take_in([name for name in self._weights if name in changed], "have changed since")
        for name in changed & self._buffers.keys():
            del self._buffers[name]
        return bool(changed)

    def news(self) -> list[str]:
        """What was taken in since the last call, in sentences."""
        told, self._news = self._news, []
        return told

    def _take_in_thawed(self) -> None:
        thawed = [name for name, each in self._weights.items() if each.requires_grad]
        if self._is_used:
            self._keep_original(thawed)
        self._take_in(thawed, "are trained from here on")

    def _keep_original(self, names: Sequence[str]) -> None:
        for name in names:
            parts = _plain_parts(self._weights[name]).values()
            self._originals[name] = [part.detach().to("cpu", copy=True) for part in parts]

    def _take_in(self, names: Sequence[str], why: str) -> None:
        for name in names:
            del self._weights[name]
        if names:
            first = names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
            self._news.append(f"{first}, frozen at the start, {why}: snapshots and checkpoints hold them now")

    # Going back to a state that lacks them.

    @torch.no_grad()
    def refuse_others(self, described: Mapping[str, str]) -> None:
        """Refuse where what a state has left out was something else. All bits are compared; nothing changes."""
        is_read = self._has_begun  # else all are read now
        self.begin()
        live = self.named()
        for name, then in described.items():
            if name not in live:
                raise SourceError(f"the base model is another: it had {name}, which was frozen, and has not here")
            known = self._known.get(name) or _known(live[name])
            now = "of a kind without a digest" if known is None else known.described
            if now != then:
                raise SourceError(
                    f"the base model is another: {name}, which was frozen, was {then} there and is {now} here; "
                    "load the one that the run began with"
                )
            may_differ = is_read and name in self._known and name not in self._originals
            if may_differ and self._differs(name, live[name]):
                raise SourceError(f"{name} was frozen then and has been changed since; nobody has kept what it was")

    @torch.no_grad()
    def before_loading(self, tensors: Mapping[str, Any]) -> None:
        """Take in what will be another than at the beginning: it had been trained before the state was taken."""
        others = [
            name for name in self._weights if name in tensors and digests(tensors[name]) != self._known[name].digests
        ]
        self._keep_original(others)
        self._take_in(others, "are others in the state that is restored")

    @torch.no_grad()
    def bring_back(self, names: Iterable[str]) -> None:
        """Give weights that were trained after all the values from before that."""
        live = self.named()
        for name in self._originals.keys() & set(names):
            for part, then in zip(_plain_parts(live[name]).values(), self._originals[name], strict=True):
                part.copy_(then)

    def named(self) -> dict[str, Tensor]:
        """The model's tensors by their names in a checkpoint."""
        live = dict(chain(_parameters(self._model, self._names), _buffers(self._model, self._names)))
        return live if self._known.keys() <= live.keys() else live | dict(_inside(self._model, self._known))

    def _differs(self, name: str, tensor: Tensor) -> bool:
        known = self._known[name]
        try:
            return _kind(tensor) != known.described.rpartition(" ")[0] or digests(tensor) != known.digests
        except (RuntimeError, NotImplementedError):
            return True


class Frozen:
    """A model that does not change, as the reference of DPO: ``Checkpointing(also={"reference": Frozen(reference)})``.

    States have its digests, and another one is refused.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._described: dict[str, str] | None = None

    def state_dict(self) -> dict[str, str]:
        """Type, shape and digest of each tensor, as it was when this was asked for first."""
        if self._described is None:
            self._described = self._now()
        return dict(self._described)

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Refuse the state of another model. Nothing is loaded."""
        now = self._now()
        for name in sorted(state.keys() | now.keys()):
            if (then := state.get(name, "absent")) != (here := now.get(name, "absent")):
                raise SourceError(f"the frozen model is another: {name} was {then} and is {here} here")

    @torch.no_grad()
    def _now(self) -> dict[str, str]:
        tensors = {name: each for name, each in self._model.state_dict().items() if isinstance(each, Tensor)}
        return {name: _described(each) for name, each in tensors.items()}


# A model's tensors by the names that they have in checkpoints; tied ones have several.


def _parameters(model: nn.Module, names: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
    return ((_known_name(model, name, names), each) for name, each in model.named_parameters(remove_duplicate=False))


def _buffers(model: nn.Module, names: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
    return ((_known_name(model, name, names), each) for name, each in model.named_buffers(remove_duplicate=False))


def _known_name(model: nn.Module, name: str, names: dict[str, str]) -> str:
    if name not in names:
        names[name] = full_name(model, name)
    return names[name]


def _inside(model: nn.Module, weights: Container[str]) -> Iterator[tuple[str, Tensor]]:
    """What the state of a module has beside these weights, as the scales of 4-bit ones: ``weight.absmax``."""
    for key, each in model.state_dict().items():
        name = full_name(model, key)
        if isinstance(each, Tensor) and name.rpartition(".")[0] in weights:
            yield name, each


def full_name(model: nn.Module, name: str) -> str:
    """The name without what wrappers and compilers put into it. Parts of a tensor, as 4-bit weights have, keep
    theirs."""
    try:
        return next(iter(dcp_state._get_fqns(model, name)))
    except AttributeError:  # ``weight.absmax`` is in the state of its module, and no attribute of the weight
        owner, _, part = name.rpartition(".")
        return f"{full_name(model, owner)}.{part}"


def _has_bits(tensor: Tensor) -> bool:
    """Whether it can be read: what lies on no device, or keeps to itself where it lies, is held and refused as ever."""
    try:
        return all(part.layout is torch.strided and not part.is_meta for part in _plain_parts(tensor).values())
    except (RuntimeError, NotImplementedError):
        return False


def _memory(tensor: Tensor) -> set[object]:
    """The pieces of memory that it lies in."""
    try:
        return {part.untyped_storage().data_ptr() or id(tensor) for part in _plain_parts(tensor).values()}
    except (RuntimeError, NotImplementedError):
        return {id(tensor)}


def size_of(tensors: Iterable[Tensor]) -> int:
    """Bytes, each tensor once, however it is sharded."""
    return sum(each.numel() * each.element_size() for each in {id(each): each for each in tensors}.values())


# Digests.


def _known(tensor: Tensor, *, is_buffer: bool = False) -> _Known | None:
    """A tensor as it is now; None for one of a kind that cannot be read bit by bit."""
    try:
        return _Known(_described(tensor), digests(tensor), _sample(tensor), _marks(tensor), is_buffer)
    except (RuntimeError, NotImplementedError):
        return None


def _described(tensor: Tensor) -> str:
    """Type, shape and digest. Shards are gathered for it, a tensor at a time, as a forward pass gathers them."""
    found = digests(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)
    return f"{_kind(tensor)} {hashlib.blake2b(repr(sorted(found.items())).encode(), digest_size=8).hexdigest()}"


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def digests(tensor: Tensor) -> dict[str, int]:
    """A digest of the bits of each plain tensor that it consists of, the same on every device.

    >>> digests(torch.tensor([1.0, 2.0])) == digests(torch.tensor([2.0, 1.0]))
    False
    """
    return {key: _digest(part) for key, part in _plain_parts(tensor).items()}


def _plain_parts(tensor: Tensor, key: str = "") -> dict[str, Tensor]:
    """The dense tensors that it consists of: itself, what it wraps, or the storage of a quantised or sparse one."""
    tensor = tensor.detach()
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        inside = {name: getattr(tensor, name) for name in names}
    elif tensor.is_quantized:
        is_per_channel = tensor.qscheme() in (torch.per_channel_affine, torch.per_channel_symmetric)
        scales = tensor.q_per_channel_scales() if is_per_channel else torch.tensor([tensor.q_scale()])
        zeros = tensor.q_per_channel_zero_points() if is_per_channel else torch.tensor([tensor.q_zero_point()])
        inside = {"int_repr": tensor.int_repr(), "scales": scales, "zero_points": zeros}
    elif tensor.layout is torch.sparse_coo:
        inside = {"indices": tensor._indices(), "values": tensor._values()}
    else:
        return {key: tensor}
    parts = ((f"{key}/{name}", item) for name, item in inside.items() if isinstance(item, Tensor))
    return {inner: part for name, item in parts for inner, part in _plain_parts(item, name).items()}


_ROW = 2**16
"""Words of a tensor that each have a factor of their own; so has each row of them."""


def _digest(tensor: Tensor) -> int:
    """A sum of its words times odd factors, modulo 2**64: whichever word changes, so does the sum."""
    words = _words(tensor)
    factors = _factors(_ROW, tensor.device)
    at_once = _ROW * (64 if tensor.is_cuda else 4)  # what caches hold
    sums = [
        block.to(torch.int64).mul_(factors[: block.shape[1]]).sum(1)
        for part in words.split(at_once)
        for block in ([part.view(-1, _ROW)] if len(part) % _ROW == 0 else map(_as_row, part.split(_ROW)))
        if block.numel()
    ]
    if not sums:
        return 0
    rows = torch.cat(sums)
    return int((rows * _factors(len(rows), tensor.device)).sum())


def _as_row(words: Tensor) -> Tensor:
    return words[None]


def _words(tensor: Tensor) -> Tensor:
    """Its bytes in the order of its elements, as words of four, with zeros after the last."""
    own = tensor.contiguous().reshape(-1).view(torch.uint8)
    if len(own) % 4 or own.storage_offset() % 4:
        padded = torch.zeros(-(-len(own) // 4) * 4, dtype=torch.uint8, device=own.device)
        padded[: len(own)] = own
        own = padded
    return own.view(torch.int32)


@cache
def _factors(count: int, device: torch.device) -> Tensor:
    """Odd numbers without a pattern, the same everywhere."""
    mixed = torch.arange(1, count + 1, dtype=torch.int64, device=device) * -7046029254386353131
    for multiplier in (-4658895280553007687, -7723592293110705685):  # as SplitMix64 does
        mixed = (mixed ^ ((mixed >> 30) & 0x3FFFFFFFF)) * multiplier
    return mixed | 1


# What is looked at whenever a state is taken.

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _sample(tensor: Tensor) -> Tensor:
    """The bits of some elements of each part, added up."""
    samples = [_sample_of_part(part) for part in _plain_parts(tensor).values()]
    return samples[0] if len(samples) == 1 else torch.stack([each.to(samples[0].device) for each in samples]).sum(0)


def _sample_of_part(part: Tensor) -> Tensor:
    elements = part.view(-1) if part.is_contiguous() else flat(part)
    few = elements[:: spacing(len(elements), LOOKED_AT)][:LOOKED_AT]
    if few.element_size() not in _BITS:  # a complex number of two
        few = torch.view_as_real(few).flatten()[:LOOKED_AT]
    bits = few.view(_BITS[few.element_size()]).to(torch.int64)
    return bits if len(bits) == LOOKED_AT else nn.functional.pad(bits, (0, LOOKED_AT - len(bits)))


def _marks(tensor: Tensor) -> tuple[Any, ...]:
    """Where each part lies, and how often torch has changed it there."""
    if hasattr(tensor, "__tensor_flatten__"):
        inside = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return tuple(_marks(each) for each in inside if isinstance(each, Tensor))
    return _place(tensor), 0 if tensor.is_inference() else tensor._version


def _place(tensor: Tensor) -> int:
    return (tensor._values() if tensor.layout is torch.sparse_coo else tensor).data_ptr()


def _on_its_way(differs: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """The copy on the host, and when it has arrived."""
    if not differs.is_cuda:
        return differs, None
    room = torch.empty(differs.shape, dtype=differs.dtype, pin_memory=True).copy_(differs, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(differs.device))
    return room, arrived
