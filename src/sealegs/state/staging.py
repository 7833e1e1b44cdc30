"""Live tensors in, copies in host memory out, while the device goes on."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def on_host(tensor: Tensor, dtype: torch.dtype, *, pinned: bool = False) -> Tensor:
    """Room on the host for a tensor like this: for this rank's shard of it, where it is sharded."""
    return torch.empty_like(tensor.detach(), dtype=dtype, device="cpu", pin_memory=pinned)


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


class Staging:
    """Host memory for the tensors of a state, kept from one copy to the next; pinned for those of a CUDA device."""

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
        """Begin to copy the tensors as they are when the device comes to this point.

        To be read after ``wait``; to be written to after ``before_update``.
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
        """Let the devices finish copying before they change what is copied. The host does not wait."""
        for event in self._awaited:
            torch.cuda.current_stream(event.device).wait_event(event)
        self._awaited = []

    def wait(self) -> None:
        """Until the copies have arrived: for the thread that reads them."""
        for event in self._under_way:
            event.synchronize()

    def _room(self, name: str, tensor: Tensor) -> Tensor:
        room = self._rooms.get(name)
        if room is None or room.dtype != tensor.dtype or local(room).shape != local(tensor).shape:
            return on_host(tensor, tensor.dtype, pinned=local(tensor).is_cuda)
        return room

    def _copy_beside(self, device: torch.device, sources: Mapping[str, Tensor]) -> None:
        """On a stream of its own, so that the kernels of the training run on meanwhile."""
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        stream.wait_stream(torch.cuda.current_stream(device))
        copied = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(stream):
            for name, source in sources.items():
                local(self._rooms[name]).copy_(source, non_blocking=True)
                source.record_stream(stream)  # its memory is not given away before it is copied
            copied.record(stream)
        self._under_way.append(copied)
