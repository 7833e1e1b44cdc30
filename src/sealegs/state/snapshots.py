"""Snapshots: up to two copies of a model and its optimizers in memory, restored into the very same tensors.

There are two buffers, never more. Every ``every`` steps a *candidate* is copied over the older snapshot. After
``promote_after`` healthy steps the candidate becomes the newest snapshot, and the former newest the older one. While
the run is in doubt, none is taken, and a candidate is dropped. So, with 50 and 16, the newest is 16 to 66 steps old;
the older one 66 to 100, and then gone until the candidate that took its place is promoted.

A snapshot holds this rank's parameters, buffers and optimizer states, bit for bit, without the frozen weights that it
is told of. Copies go to the device, or to pinned host memory beside the computation. The host waits for neither.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sealegs.errors import ConfigError, SourceError
from sealegs.state import memory
from sealegs.state.extra_state import Stateful
from sealegs.state.frozen import FrozenWeights, Look
from sealegs.state.memory import CPU, Buffer, Place, in_words
from sealegs.state.tensors import ALSO, Apart, Join, Live, OptimizerLayout, filled, walk

_Kind: TypeAlias = tuple[torch.Size, torch.dtype, torch.device]


@dataclass(eq=False, slots=True)
class Snapshot:
    """A moment that a run can go back to."""

    step: int
    """The step to run next."""
    plain: dict[str, Any]
    """Whatever else belongs to the moment. While it is a candidate, later knowledge may be added."""


class Snapshots:
    """The newest and the older snapshot of a model, and the candidate for the next.

    >>> model = nn.Linear(2, 1)
    >>> snapshots = Snapshots(model, [torch.optim.SGD(model.parameters())], every=2, promote_after=1)
    >>> if snapshots.due(2):
    ...     snapshots.take(2, {"batch": 17})
    >>> snapshots.healthy(2)
    >>> before = model.weight.tolist()
    >>> _ = nn.init.zeros_(model.weight)
    >>> snapshots.restore_tensors(snapshots.newest(before=3))
    >>> model.weight.tolist() == before, snapshots.description
    (True, '2 x 4.0 KiB in host memory')
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        also: Mapping[str, Stateful] = MappingProxyType({}),
        frozen: FrozenWeights | None = None,
        every: int = 50,
        soon: bool = False,
        promote_after: int = 16,
        memory: float | None = None,
        place: Literal["auto", "device", "host"] = "auto",
    ) -> None:
        """``memory`` is the most bytes that both may take together; 0 holds none. ``soon`` takes the first at once.
        ``also`` names the loop's own objects; ``frozen`` knows what is left out.

        ``place`` is where they go: on the ``device``, if they fit into half of what is free there; on the ``host``, if
        they fit into ``memory`` or, without it, into half of what is free; ``auto`` tries both. The first snapshot
        decides, when the run has shown what it needs itself. Without enough memory there are no snapshots, and
        ``description`` says why.
        """
        for name, steps in (("every", every), ("promote_after", promote_after)):
            if steps < 1:
                raise ConfigError(f"{name}={steps}: a number of steps, at least 1")
        if memory is not None and not 0 <= memory < math.inf:
            raise ConfigError(f"memory={memory}: bytes for both snapshots together; leave it out for what is free")
        if place not in ("auto", "device", "host"):
            raise ConfigError(f"place={place!r}: one of 'auto', 'device' and 'host'")
        self._model = model
        self._optimizers = tuple(optimizers)
        self._also = also
        self._frozen = frozen
        self._every = every
        self._soon = soon
        self._promote_after = promote_after
        self._memory = memory
        self._places: tuple[Place, ...] = ("device", "host") if place == "auto" else (place,)
        self._place: Place = self._places[0]
        self._where = ""
        self._unavailable_because = "memory=0" if memory == 0 else ""
        self._layout: dict[str, _Kind] = {}
        """Shape, type and device of each tensor; all snapshots share one layout."""
        self._buffers: list[Buffer] = []
        self._kept: list[_Held] = []
        """The healthy snapshots, newest first."""
        self._candidate: _Held | None = None
        self._survived = 0
        self._is_in_doubt = False
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._under_way: list[_Copying] = []
        if not self._unavailable_because:
            left_out = {} if frozen is None else frozen.candidates()
            walk(model, self._optimizers, also, left_out.values())  # refuse now what the first snapshot would refuse

    def due(self, step: int) -> bool:
        """Whether to take a snapshot before a step. Never before step 0, where optimizers have no state."""
        if self._unavailable_because or self._is_in_doubt or self._candidate is not None:
            return False
        newest = self._kept[0].snapshot.step if self._kept else 0
        return step > newest and (step % self._every == 0 or (self._soon and not self._kept))

    @torch.no_grad()
    def take(self, step: int, plain: Mapping[str, Any]) -> None:
        """Copy everything as it is now over the older snapshot; ``step`` is the next to run.

        If tensors have come or gone since the last time, as when a layer is unfrozen, the snapshots start over.
        """
        if self._unavailable_because:
            return
        self.before_update()
        self._candidate = None
        look, left_out = None, frozenset[str]()
        if self._frozen is not None:
            look = self._frozen.look()
            if look.has_arrived:
                self._frozen.settle(look)
                look = None
            left_out = frozenset(self._frozen.left_out())
        live = self._walk(left_out, self._also)
        tensors = live.tensors
        layout = {key: _kind(tensor) for key, tensor in tensors.items()}
        if layout != self._layout:
            self._begin(layout, tensors)
        if not self._buffers:
            return
        del self._kept[1:]
        newest = self._kept[0].buffer if self._kept else None
        buffer = next(buffer for buffer in self._buffers if buffer is not newest)
        self._copy_into(buffer, tensors, live.buffers)
        joins = {key: (tuple(apart.parts), apart.join) for key, apart in live.moments.items()}
        along = {key: (tuple(apart.parts), apart.join) for key, apart in live.of_also.items()}
        self._candidate = _Held(
            Snapshot(step, dict(plain)), buffer, joins, live.settings, live.also, along, left_out, look
        )
        self._survived = 0

    def before_update(self) -> None:
        """Let the device finish its copies before the weights change. The host does not wait."""
        for copying in self._under_way:
            torch.cuda.current_stream(copying.device).wait_event(copying.done)
        self._under_way.clear()

    @property
    def candidate(self) -> Snapshot | None:
        """The snapshot that is taken and not promoted yet."""
        return self._candidate.snapshot if self._candidate is not None else None

    def healthy(self, step: int) -> None:
        """Count a healthy step. A step before the candidate, reported late, says nothing about it."""
        self._is_in_doubt = False
        if self._candidate is None or step < self._candidate.snapshot.step:
            return
        self._survived += 1
        if self._survived >= self._promote_after:
            held, self._candidate = self._candidate, None
            if self._frozen is not None and held.look is not None and self._frozen.settle(held.look):
                return  # it lacks what had changed before
            self._kept.insert(0, held)

    def doubtful(self) -> None:
        """Drop the candidate until the next healthy step: a step was not healthy, or an incident is open."""
        self._is_in_doubt = True
        self._candidate = None

    @property
    def steps(self) -> list[int]:
        """Steps of the healthy snapshots, newest first."""
        return [held.snapshot.step for held in self._kept]

    def newest(self, before: int, *, proven: bool = True) -> Snapshot | None:
        """The newest healthy snapshot at or before a step; or any, to run steps again and not to go on from."""
        return next((held.snapshot for held in self._held(proven) if held.snapshot.step <= before), None)

    def forget_after(self, step: int) -> None:
        """Drop snapshots after a step: the run went back to it."""
        self._kept = [held for held in self._kept if held.snapshot.step <= step]
        if self._candidate is not None and self._candidate.snapshot.step > step:
            self._candidate = None

    @torch.no_grad()
    def restore_tensors(self, snapshot: Snapshot) -> None:
        """Restore parameters, buffers, optimizer states and hyperparameters, each in its place.

        State that an optimizer has lost since is made again; state that it did not have yet is removed. A snapshot that
        does not fit is refused before anything changes. It stays valid.
        """
        held = self._find(snapshot)
        targets, moments = self._targets(held, self._walk(held.left_out))
        if self._frozen is not None:
            self._frozen.refuse_others(self._frozen.described(held.left_out))
            self._frozen.bring_back(held.left_out)
        self.before_update()  # a candidate may still be copied from what is written now
        memory.copy_all((targets[key], part) for key, part in held.buffer.parts.items() if key in targets)
        for optimizer, settings in zip(self._optimizers, held.settings, strict=True):
            settings.put_into(optimizer, moments)

    def also_at(self, snapshot: Snapshot) -> dict[str, Any]:
        """The states of the loop's own objects, which ``restore_tensors`` leaves alone; the caller loads them."""
        held = self._find(snapshot)
        parts = held.buffer.parts
        devices = {name: self._layout[name][2] for names, _ in held.along.values() for name in names}
        tensors = {
            key: join(parts[name].to(devices[name], copy=True) for name in names)
            for key, (names, join) in held.along.items()
        }
        return {name: filled(state, tensors) for name, state in held.also.items()}

    def contents(self, snapshot: Snapshot) -> tuple[Mapping[str, Tensor], dict[str, Tensor], list[OptimizerLayout]]:
        """What it holds: the parts of all tensors, the optimizers' tensors whole, and the optimizers' layouts."""
        held = self._find(snapshot, proven=False)
        parts = held.buffer.parts
        moments = {key: join(parts[name] for name in names) for key, (names, join) in held.joins.items()}
        return parts, moments, held.settings

    def left_out(self, snapshot: Snapshot) -> dict[str, str]:
        """What it lacks because it was frozen, by its names in a checkpoint, with type, shape and digest."""
        held = self._find(snapshot, proven=False)
        if self._frozen is None:
            return {}
        if held.look is not None and self._frozen.settle(held.look):
            raise SourceError(f"the snapshot of step {snapshot.step} lacks frozen weights that had been changed")
        return self._frozen.described(held.left_out)

    @property
    def held_bytes(self) -> int:
        """The memory of both buffers together."""
        return sum(buffer.bytes for buffer in self._buffers)

    @property
    def description(self) -> str:
        """How much is held and where, or why nothing is: ``2 x 0.56 GiB on the device``."""
        if self._unavailable_because:
            return f"none: {self._unavailable_because}"
        return f"2 x {in_words(self._buffers[0].bytes)} {self._where}" if self._buffers else "none yet"

    def drop(self) -> None:
        """Free all memory. The next snapshot starts over."""
        self.before_update()
        self._candidate = None
        self._kept, self._buffers, self._layout = [], [], {}

    def _walk(self, left_out: frozenset[str], also: Mapping[str, Stateful] = MappingProxyType({})) -> Live:
        live = self._frozen.named() if left_out and self._frozen is not None else {}
        return walk(self._model, self._optimizers, also, [each for name, each in live.items() if name in left_out])

    def _held(self, proven: bool) -> "list[_Held]":
        """The healthy snapshots, newest first, and before them the candidate, if they need not be proven."""
        return self._kept if proven or self._candidate is None else [self._candidate, *self._kept]

    def _find(self, snapshot: Snapshot, *, proven: bool = True) -> "_Held":
        held = next((held for held in self._held(proven) if held.snapshot is snapshot), None)
        if held is None:
            raise SourceError(f"the snapshot of step {snapshot.step} is no longer held; ask for newest() again")
        return held

    def _begin(self, layout: dict[str, _Kind], tensors: Mapping[str, Tensor]) -> None:
        """Make two buffers for such tensors, where there is memory for them."""
        self.drop()
        sizes = memory.sizes_of(tensors)
        if not self._find_place(sizes):
            return
        try:
            self._buffers = [Buffer(tensors, self._place), Buffer(tensors, self._place)]
        except (RuntimeError, MemoryError, OSError) as error:  # kinds of memory differ in how they say that it is full
            reason = str(error).partition(". ")[0]
            self._unavailable_because = f"2 x {in_words(sum(sizes.values()))} {self._where} could not be had ({reason})"
            return
        self._layout = layout

    def _find_place(self, sizes: Mapping[torch.device, int]) -> bool:
        """Decide where two snapshots of these sizes go, or why nowhere.

        One alone is no use: each candidate would overwrite it, and leave nothing until it is promoted.
        """
        size = sum(sizes.values())
        two = f"2 x {in_words(size)}"
        if self._memory is not None and 2 * size > self._memory:
            self._unavailable_because = f"{two} are more than memory={self._memory:.0f}; memory={2 * size} is enough"
            return False
        on_host = "in pinned host memory" if any(device.type == "cuda" for device in sizes) else "in host memory"
        full = []
        for place in ("host",) if set(sizes) <= {CPU} else self._places:
            needed = sizes if place == "device" else {} if self._memory is not None else {CPU: size}
            half = {device: memory.free_bytes(device) // 2 for device in needed}
            too_small = [device for device in needed if 2 * needed[device] > half[device]]
            if not too_small:
                self._place = place
                self._where = "on the device" if place == "device" else on_host
                return True
            full += [f"half of the free memory of the {device} ({in_words(half[device])})" for device in too_small]
        self._unavailable_because = f"{two} do not fit into {' or '.join(full)}"
        return False

    def _copy_into(self, buffer: Buffer, tensors: Mapping[str, Tensor], changed_by_forward: set[str]) -> None:
        """Copy on the current stream; what goes to the host and stays unchanged until the update, on another stream."""
        at_once: list[tuple[Tensor, Tensor]] = []
        beside: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
        for key, tensor in tensors.items():
            is_beside = self._place == "host" and tensor.is_cuda and key not in changed_by_forward
            pairs = beside.setdefault(tensor.device, []) if is_beside else at_once
            pairs.append((buffer.parts[key], tensor))
        memory.copy_all(at_once)
        for device, pairs in beside.items():
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)
            stream = self._streams[device]
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                memory.copy_all(pairs)
            self._under_way.append(_Copying(stream.record_event(), device, [source for _, source in pairs]))

    def _targets(self, held: "_Held", live: Live) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The live tensor for each part, and the optimizers' tensors; refuses a snapshot that does not fit."""
        for place, (then, now) in enumerate(zip(held.settings, live.settings, strict=True)):
            if then.sizes != now.sizes:
                _refuse(held, f"optimizer {place}", f"of {then.sizes} parameters", f"of {now.sizes}")
        targets = dict(live.weights)
        moments = {}
        for key, (names, join) in held.joins.items():
            if (apart := live.moments.get(key)) is None:
                devices = {name: self._layout[name][2] for name in names}
                parts = {name: torch.empty_like(held.buffer.parts[name], device=devices[name]) for name in names}
                apart = Apart(join(iter(parts.values())), parts, join)
            targets |= apart.parts
            moments[key] = apart.whole
        found = {key: _kind(tensor) for key, tensor in targets.items()}
        for key in (*(key for key in self._layout if not key.startswith(ALSO)), *found):
            if found.get(key) != self._layout.get(key):
                _refuse(held, key, _said(self._layout.get(key)), _said(found.get(key)))
        return targets, moments


class _Held(NamedTuple):
    """A snapshot and what belongs to it."""

    snapshot: Snapshot
    buffer: Buffer
    joins: dict[str, tuple[tuple[str, ...], Join]]
    """For each optimizer tensor, the keys of its parts and the function that joins them."""
    settings: list[OptimizerLayout]
    also: dict[str, Any]
    """States of the loop's own objects, with a key in the place of each tensor."""
    along: dict[str, tuple[tuple[str, ...], Join]]
    """The same as ``joins``, for those tensors."""
    left_out: frozenset[str]
    """Names of frozen weights that it lacks."""
    look: Look | None
    """Where the device was still looking whether they had changed."""


class _Copying(NamedTuple):
    """A copy that is being made beside the computation."""

    done: torch.cuda.Event
    device: torch.device
    sources: list[Tensor]
    """Kept alive, so that their memory is not reused before the copy is done."""


def _refuse(held: _Held, key: str, then: str, now: str) -> NoReturn:
    raise SourceError(
        f"the snapshot of step {held.snapshot.step} does not fit: {key} was {then} and is {now} now; nothing was "
        "changed, go back to a checkpoint instead"
    )


def _kind(tensor: Tensor) -> _Kind:
    return tensor.shape, tensor.dtype, tensor.device


def _said(kind: _Kind | None) -> str:
    if kind is None:
        return "absent"
    shape, dtype, device = kind
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)} on {device}"
