"""Memory for copies of tensors: host staging for checkpoints, and buffers for snapshots.

``Staging`` copies a state to host memory while training goes on. ``Buffer`` holds one snapshot, on the device or the
host. The rest says how much memory a copy takes and how much is free.
"""

import math
import mmap
import os
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def on_host(tensor: Tensor, dtype: torch.dtype, *, pinned: bool = False) -> Tensor:
    """Host memory for a tensor like this; for a sharded one, for this rank's shard."""
    return torch.empty_like(tensor.detach(), dtype=dtype, device="cpu", pin_memory=pinned)


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


class Staging:
    """Host memory for a state's tensors, reused from copy to copy; pinned for tensors on a CUDA device."""

    def __init__(self) -> None:
        self._rooms: dict[str, Tensor] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._under_way: list[torch.cuda.Event] = []
        self._awaited: list[torch.cuda.Event] = []

    @property
    def held_bytes(self) -> int:
        """Host memory in use."""
        return sum(local(room).nbytes for room in self._rooms.values())

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Begin to copy the tensors, as they are when the device comes to this point.

        Read the copies after ``wait``; change the tensors after ``before_update``.
        """
        self._rooms = {name: self._room(name, tensor) for name, tensor in tensors.items()}
        sources = {name: local(tensor) for name, tensor in tensors.items()}
        self._under_way = []
        for device in {source.device for source in sources.values()}:
            ours = {name: source for name, source in sources.items() if source.device == device}
            if device.type == "cuda":
                self._copy_beside(device, ours)
            else:
                for name, source in ours.items():
                    local(self._rooms[name]).copy_(source)
        self._awaited = list(self._under_way)
        return self._rooms

    def before_update(self) -> None:
        """Let the devices finish copying before the tensors change. The host does not wait."""
        for event in self._awaited:
            torch.cuda.current_stream(event.device).wait_event(event)
        self._awaited = []

    def wait(self) -> None:
        """Wait until the copies have arrived; for the thread that reads them."""
        for event in self._under_way:
            event.synchronize()

    def _room(self, name: str, tensor: Tensor) -> Tensor:
        room = self._rooms.get(name)
        if room is None or room.dtype != tensor.dtype or local(room).shape != local(tensor).shape:
            return on_host(tensor, tensor.dtype, pinned=local(tensor).is_cuda)
        return room

    def _copy_beside(self, device: torch.device, sources: Mapping[str, Tensor]) -> None:
        """Copy on a stream of its own, so that the training's kernels go on meanwhile."""
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        stream.wait_stream(torch.cuda.current_stream(device))
        copied = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(stream):
            for name, source in sources.items():
                local(self._rooms[name]).copy_(source, non_blocking=True)
                source.record_stream(stream)  # its memory is not reused before it is copied
            copied.record(stream)
        self._under_way.append(copied)


Place: TypeAlias = Literal["device", "host"]
"""Where a copy lies: on its original's device, or in host memory."""

CPU = torch.device("cpu")

_ALIGNED_BYTES = 64
"""Alignment of a tensor: kernels read up to 32 bytes at once."""
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


class Buffer:
    """Memory for one copy: one block per source device, with a part for every tensor."""

    def __init__(self, tensors: Mapping[str, Tensor], place: Place) -> None:
        sizes = sizes_of(tensors)
        self.bytes = sum(sizes.values())
        self.parts: dict[str, Tensor] = {}
        blocks = {device: self._block(size, device, place) for device, size in sizes.items()}
        taken = dict.fromkeys(sizes, 0)
        for key, tensor in tensors.items():
            begin = taken[tensor.device]
            part = blocks[tensor.device][begin : begin + tensor.nbytes].view(tensor.dtype)
            strides = torch.empty_like(tensor, device="meta").stride()  # the same order without gaps: quick to copy to
            self.parts[key] = part.as_strided(tensor.shape, strides)
            taken[tensor.device] += _aligned(tensor.nbytes)

    def _block(self, size: int, device: torch.device, place: Place) -> Tensor:
        if place == "host" and device.type == "cuda":
            block = _pinned(size)
            weakref.finalize(self, _unpin, block, device).atexit = False  # a process that ends gives all back anyway
            return block
        return torch.empty(size, dtype=torch.uint8, device=device if place == "device" else CPU)


def sizes_of(tensors: Mapping[str, Tensor]) -> dict[torch.device, int]:
    """Bytes of one copy by source device, in whole pages, which is what the host allocates."""
    sizes: dict[torch.device, int] = {}
    for tensor in tensors.values():
        sizes[tensor.device] = sizes.get(tensor.device, 0) + _aligned(tensor.nbytes)
    return {device: max(1, math.ceil(size / mmap.PAGESIZE)) * mmap.PAGESIZE for device, size in sizes.items()}


def copy_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy into the first of each pair, on the current stream, in one pass for pairs that are alike.

    Host memory that CUDA copies from or to must be pinned, since nobody waits for the copy.
    """
    for targets, sources in alike(pairs):
        copy_alike(targets, sources)


def alike(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Pairs that can be copied in one pass, together: the first of each, and the second."""
    groups: dict[object, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in pairs:
        if target.numel():
            kind = target.device, source.device, target.dtype, target.stride() == source.stride()
            targets, sources = groups.setdefault(kind, ([], []))
            targets.append(target)
            sources.append(source)
    return list(groups.values())


def copy_alike(targets: list[Tensor], sources: list[Tensor]) -> None:
    """One pass of ``copy_all``."""
    torch._foreach_copy_(targets, sources, non_blocking=targets[0].is_cuda or sources[0].is_cuda)


def free_bytes(device: torch.device) -> int:
    """What a device can still give to this process, beyond the most that it has used."""
    if device.type != "cuda":
        return _free_on_host() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # all ranks of a host ask for the same
    free, _ = torch.cuda.mem_get_info(device)
    # between two steps most of what is reserved is unused, and in the middle of the next it is in use again
    never_used = torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
    return free + max(never_used, 0)


def in_words(size: float) -> str:
    """A number of bytes, in words.

    >>> in_words(601295421), in_words(5 * 2**20), in_words(4096)
    ('0.56 GiB', '5.00 MiB', '4.0 KiB')
    """
    for unit, power in (("GiB", 30), ("MiB", 20)):
        if size >= 0.1 * 2**power:
            return f"{size / 2**power:.2f} {unit}"
    return f"{size / 2**10:.1f} KiB"


def _aligned(size: int) -> int:
    return math.ceil(size / _ALIGNED_BYTES) * _ALIGNED_BYTES


def _pinned(size: int) -> Tensor:
    """Pin exactly so many bytes; torch would take the next power of two, and keep it when it is freed.

    The mapping is shared: a fork, as by a loader, would duplicate private pages, of which the device knows one.
    """
    block = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    error = int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), size, 1))  # 1: for all devices
    if error:
        with suppress(RuntimeError):
            torch.ones(1, device="cuda")  # CUDA repeats an error at the next kernel: let it be this one
        raise MemoryError(f"pinning it failed with CUDA error {error}")
    return block


def _unpin(block: Tensor, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # a copy may still be under way
    torch.cuda.cudart().cudaHostUnregister(block.data_ptr())


def _free_on_host() -> int:
    """Free memory as the system reports it, within the limit of a container."""
    try:
        lines = (line.split() for line in _MEMINFO.read_text().splitlines())
        free = next(1024 * int(number) for name, number, *_ in lines if name == "MemAvailable:")
    except (OSError, StopIteration):
        free = _half_of_the_host()
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        details = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except OSError:
        return free
    return free if limit == "max" else max(0, min(free, int(limit) - used + int(details["inactive_file"])))


def _half_of_the_host() -> int:
    """Half of the host's memory, where the system does not say what is free; a gibibyte where it says nothing."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):
        return 2**30
