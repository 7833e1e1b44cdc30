"""Takes an optimizer's step back where a tensor on its device says so, and the host need not know.

It is for optimizers that cannot be told to skip, and whose memory lies on the device, such as Muon. What the step may
change, weights and every tensor that the optimizer remembers, is copied aside just before it. Then the step is made,
and one kernel puts everything back if the flag is 1. The copy is made as late as that so that it is what the step
begins from, whoever wrote to the weights before: torch does not count every write.

Three things need the host. A step that makes new memory is waited for, and the memory is removed again if the flag was
1: zeros are not the same as nothing. A step that changes a number on the host is waited for as well; from then on the
host decides, since no device can hold such a number back. And memory on another device, or of a kind that cannot be
looked into, is refused before the step.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import is_
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from sealegs.signals.collect import waited_for
from sealegs.state.memory import Buffer, alike, copy_alike, copy_all, free_bytes, in_words, sizes_of

MOST_OF_WHAT_IS_FREE = 0.5
"""Share of the device's free memory that the copies may take."""
MOST_WAITS, FORGOTTEN = 8, 0.1
"""How often the host may wait for new memory before it decides every step; one without forgets a part of a wait."""
TORCH_OWN = frozenset(("defaults", "found_inf", "grad_scale", "_opt_called", "_step_count"))
"""Attributes of an optimizer that torch counts and calls by."""
OPAQUE = (str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator, type)
"""What holds no number that a step could change, or, as a generator, none that a skip promises to keep."""
NUMBERS = (float, int, bool)
Container: TypeAlias = dict[Any, Any] | list[Any]
Place: TypeAlias = tuple[int, Any]
"""Where something is remembered: the container's identity, and the key in it."""


@dataclass(slots=True)
class _Memory:
    """Everything that an optimizer remembers at one moment."""

    containers: list[tuple[Container, Container]] = field(default_factory=list)
    """Each with a copy of itself: the same things in it, not copies of them."""
    tensors: dict[Place, Tensor] = field(default_factory=dict)
    numbers: dict[Place, float] = field(default_factory=dict)
    strange: str = ""
    """What cannot be looked into, where there is something."""


class _Plan:
    """What to copy aside and where to, for one step and for those after it, as long as nothing has moved.

    An optimizer with many matrices keeps the host as busy as the device, so the host's own work makes the step longer.
    To see that nothing has moved takes a fifth of the time of looking at everything.
    """

    def __init__(self, memory: _Memory, copied: list[Tensor], left_out: list[Tensor], parts: list[Tensor]) -> None:
        self.memory = memory
        self.copied = copied
        self.parts = parts
        held = list(map(_held, copied))
        self.passes = alike(zip(parts, held, strict=True))
        self.pairs = list(zip(held, parts, strict=True))
        self.put_back: Callable[[Tensor], None] | None = None
        self._held = held
        self._left_out = left_out
        containers = [container for container, _ in memory.containers]
        self._dicts = [each for each in containers if isinstance(each, dict)]
        self._lists = [each for each in containers if isinstance(each, list)]
        self._keys, self._values = self._kept()
        self._layout = _layout(held)
        self._can_hold = all(map(is_, held, copied))  # what a rank holds of a sharded tensor is asked for at every step

    def holds(self, *, is_before: bool) -> bool:
        """Whether everything lies where it lay. Before a step a number may differ, as a schedule's rate does."""
        if not self._can_hold or any(weight.requires_grad or weight.grad is not None for weight in self._left_out):
            return False
        keys, values = self._kept()
        if (len(keys), len(values)) != (len(self._keys), len(self._values)) or not all(map(is_, keys, self._keys)):
            return False
        if not all(map(is_, values, self._values)):
            new = [(now, was) for now, was in zip(values, self._values, strict=True) if now is not was]
            if not (is_before and all(type(now) is type(was) and type(now) in NUMBERS for now, was in new)):
                return False
            self._values = values
            self._renumber()
        return _layout(self._held) == self._layout

    def _kept(self) -> tuple[list[Any], list[Any]]:
        """The keys of what is remembered by name, and everything that is remembered."""
        keys = list(chain.from_iterable(self._dicts))
        return keys, [*chain.from_iterable(map(dict.values, self._dicts)), *chain.from_iterable(self._lists)]

    def _renumber(self) -> None:
        """Keep the numbers as they are now."""
        found = {id(container): (container, kept) for container, kept in self.memory.containers}
        for where, key in self.memory.numbers:
            container, kept = found[where]
            kept[key] = self.memory.numbers[where, key] = container[key]


class Undo:
    """Makes the steps of one optimizer so that they can be taken back."""

    def __init__(self, optimizer: Optimizer, *, most: float = MOST_OF_WHAT_IS_FREE) -> None:
        self.optimizer = optimizer
        self.why_not = ""
        """Why the host has to decide; empty where it need not."""
        self._most = most
        self._looked_at: tuple[int, int] | None = None
        self._waits = 0.0
        self._shapes: list[Any] = []
        self._buffer: Buffer | None = None
        self._prepare: Prepare | None = None
        self._plan: _Plan | None = None

    @property
    def copied_bytes(self) -> int:
        """Memory that the copies take."""
        return 0 if self._buffer is None else self._buffer.bytes

    def is_possible(self) -> bool:
        """Whether the next step can be taken back on the device. Looks anew where the optimizer's memory is another
        one, as after a checkpoint was loaded."""
        now = self.optimizer.state
        if not self.why_not and (self._looked_at is None or self._looked_at != (id(now), len(now))):
            self.why_not = self._refused(_memory(self.optimizer))
            self._looked_at = (id(now), len(now))
        return not self.why_not

    @torch.no_grad()
    def step(self, flag: Tensor) -> None:
        """Make the step, and take it back if the flag is 1 when the device comes to it."""
        plan = self._plan
        if plan is None or not plan.holds(is_before=True):
            plan = self._plan = None  # with its copies, before others take as much
            plan = self._plan = self._planned()
        for targets, sources in plan.passes:
            copy_alike(targets, sources)
        self.optimizer.step()
        if plan.holds(is_before=False):
            self._waits = max(0.0, self._waits - FORGOTTEN)
            if plan.put_back is None:
                plan.put_back = self._prepared(flag, plan.pairs)
            plan.put_back(flag)
            return
        self._plan = None
        before, after = plan.memory, _memory(self.optimizer)
        pairs = list(zip(map(_held, plan.copied), plan.parts, strict=True))
        replaced = [
            (tensor, was)
            for place, tensor in after.tensors.items()
            if (was := before.tensors.get(place)) is not None and was is not tensor
        ]
        if replaced:
            part_of = {id(tensor): part for tensor, part in zip(plan.copied, plan.parts, strict=True)}
            pairs += [(_held(tensor), part_of[id(was)]) for tensor, was in replaced]
        is_same = before.numbers == after.numbers and before.tensors.keys() == after.tensors.keys()
        if is_same and all(_is_like(target, part) for target, part in pairs):
            self._waits = max(0.0, self._waits - FORGOTTEN)
            self._prepared(flag, pairs)(flag)
            return
        self._look_again(before, after)
        if waited_for(flag)[0] > 0:
            for container, kept in before.containers:
                _refill(container, kept)
            copy_all(pairs[: len(plan.copied)])

    def _look_again(self, before: _Memory, after: _Memory) -> None:
        """The step has made memory or changed numbers: whether the next can be taken back on the device."""
        self._waits += 1
        counted = (place for place, number in before.numbers.items() if not isinstance(number, bool))
        if place := next((place for place in counted if after.numbers.get(place) != before.numbers[place]), None):
            self.why_not = f"it counts on the host ({place[1]!r}), where no device can hold it back"
        elif self._waits > MOST_WAITS:
            self.why_not = "it makes new memory again and again"
        else:
            self.why_not = self._refused(after)
            self._looked_at = (id(self.optimizer.state), len(self.optimizer.state))

    def _planned(self) -> _Plan:
        memory = _memory(self.optimizer)
        copied = self._changeable(memory)
        chosen = {id(tensor) for tensor in copied}
        left_out = [weight for group in self.optimizer.param_groups for weight in group["params"]]
        left_out = [weight for weight in left_out if id(weight) not in chosen]
        return _Plan(memory, copied, left_out, self._parts_for(copied))

    def _changeable(self, memory: _Memory) -> list[Tensor]:
        """What the step may write to, each once: a tensor that is remembered twice is one."""
        held = (p for group in self.optimizer.param_groups for p in group["params"])
        weights = (p for p in held if p.requires_grad or p.grad is not None)
        return list({id(tensor): tensor for tensor in (*weights, *memory.tensors.values())}.values())

    def _refused(self, memory: _Memory) -> str:
        """Why its steps cannot be taken back; empty if they can."""
        if memory.strange:
            return f"it keeps {memory.strange}, into which nobody can look"
        tensors = [_held(tensor) for tensor in self._changeable(memory)]
        is_cuda = any(tensor.is_cuda for tensor in tensors)
        if is_cuda and any(group.get("capturable", True) is False for group in _groups(self.optimizer)):
            return "it counts its steps on the host (fused and capturable are off)"
        if len(devices := {tensor.device for tensor in tensors}) > 1:
            return f"what it remembers lies on {' and '.join(sorted(map(str, devices)))}"
        wanted = sum(sizes_of(_numbered(tensors)).values()) - self.copied_bytes
        if tensors and wanted > self._most * (free := free_bytes(tensors[0].device)):
            return f"a copy of what it changes takes {in_words(wanted)}, and {in_words(free)} are free"
        return ""

    def _parts_for(self, copied: list[Tensor]) -> list[Tensor]:
        tensors = [_held(tensor) for tensor in copied]
        shapes = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]
        if self._buffer is None or shapes != self._shapes:
            self._buffer = None  # before another one takes as much
            self._buffer = Buffer(_numbered(tensors), "device")
            self._shapes = shapes
        return list(self._buffer.parts.values())

    def _prepared(self, flag: Tensor, pairs: list[tuple[Tensor, Tensor]]) -> Callable[[Tensor], None]:
        if self._prepare is None:
            self._prepare = quickest(flag.device)
        return self._prepare(pairs)


Prepare: TypeAlias = Callable[[list[tuple[Tensor, Tensor]]], Callable[[Tensor], None]]
"""Gives what copies the second of each pair into the first if a flag is 1 when the device comes to it, any number of
times as long as no tensor moves."""


def quickest(device: torch.device) -> Prepare:
    """One kernel where there are a CUDA device and Triton, else a few operations a tensor."""
    if device.type == "cuda":
        try:
            from sealegs.step.undo_triton import Copies

            return Copies(device).prepare
        except Exception:  # slower, and the same: the way is chosen by what it costs
            return prepare_in_torch
    return prepare_in_torch


def prepare_in_torch(pairs: list[tuple[Tensor, Tensor]]) -> Callable[[Tensor], None]:
    """What reads and writes every tensor, whatever the flag says."""
    return partial(_put_back_in_torch, pairs)


def _put_back_in_torch(pairs: list[tuple[Tensor, Tensor]], flag: Tensor) -> None:
    is_closed = flag > 0
    for target, part in pairs:
        if target.dtype.itemsize == 1:  # not every operation knows every type of eight bits
            target, part = target.view(torch.uint8), part.view(torch.uint8)
        target.copy_(torch.where(is_closed, part, target))


def _memory(optimizer: Optimizer) -> _Memory:
    """What an optimizer remembers: its state, its groups, and what it keeps besides."""
    found = _Memory()
    _look_into(vars(optimizer), found, set(), are_attributes=True)
    return found


def _look_into(container: Any, found: _Memory, seen: set[int], *, are_attributes: bool = False) -> None:
    """Everything in a container of any depth. Weights are not memory: the groups say which there are.

    The host does this twice in every step, while the device may be waiting for it: what there is much of comes first.
    """
    where = id(container)
    seen.add(where)
    found.containers.append((container, container.copy()))
    tensors, numbers = found.tensors, found.numbers
    for key, value in _items(container):
        kind = type(value)
        if are_attributes and _is_of_torch(key):
            continue
        if kind is nn.Parameter:
            continue
        if kind is Tensor:
            tensors[where, key] = value
        elif kind is float or kind is int or kind is bool:
            numbers[where, key] = value
        elif kind is dict or kind is list or isinstance(value, (dict, list)):
            if id(value) not in seen:
                _look_into(value, found, seen)
        elif isinstance(value, Tensor):
            if not isinstance(value, nn.Parameter):
                if kind is not DTensor:
                    found.strange = found.strange or f"a {kind.__name__}"
                tensors[where, key] = value
        elif isinstance(value, int | float | complex):
            numbers[where, key] = value  # type: ignore[assignment]
        elif isinstance(value, Optimizer):  # one that wraps another
            if id(value) not in seen:
                seen.add(id(value))
                _look_into(vars(value), found, seen, are_attributes=True)
        elif isinstance(value, tuple | set | frozenset):
            if not all(isinstance(item, (*OPAQUE, int, float, complex)) or callable(item) for item in value):
                found.strange = found.strange or f"a {type(value).__name__} of {type(next(iter(value))).__name__}"
        elif not (
            isinstance(value, OPAQUE)
            or callable(value)
            or type(value).__module__.startswith(("torch.distributed", "torch._C._distributed"))
        ):
            found.strange = found.strange or f"a {type(value).__name__}"


def _items(container: Container) -> Iterable[tuple[Any, Any]]:
    return container.items() if isinstance(container, dict) else enumerate(container)


def _layout(tensors: list[Tensor]) -> tuple[list[Any], ...]:
    """Where tensors lie, and how."""
    kinds = [tensor.dtype for tensor in tensors]
    return kinds, *(list(map(asked, tensors)) for asked in (Tensor.data_ptr, Tensor.size, Tensor.stride))


def _is_of_torch(key: Any) -> bool:
    """Whether it is an attribute by which torch counts and calls."""
    return isinstance(key, str) and (key in TORCH_OWN or key.startswith("_optimizer_"))


def _refill(container: Container, kept: Container) -> None:
    if isinstance(container, dict) and isinstance(kept, dict):
        for key in [key for key in container if not (key in kept or _is_of_torch(key))]:
            del container[key]
        container.update((key, value) for key, value in kept.items() if not _is_of_torch(key))
    else:
        container[:] = kept


def _groups(optimizer: Optimizer) -> Iterator[dict[str, Any]]:
    """Those whose steps torch does not count on the device."""
    return (group for group in optimizer.param_groups if not group.get("fused"))


def _held(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor; nobody asks for its gradient."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _numbered(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    return {str(number): tensor for number, tensor in enumerate(tensors)}


def _is_like(tensor: Tensor, part: Tensor) -> bool:
    return tensor.shape == part.shape and tensor.dtype == part.dtype and tensor.device == part.device
