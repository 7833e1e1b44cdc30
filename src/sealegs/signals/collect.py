"""Brings device scalars to the host as rows, late and without waiting: the one door from device to host.

Nothing else on the training path may call ``.item()``, ``.cpu()`` or ``.tolist()``. On CUDA the scalars of a step are
packed into one tensor and copied to pinned memory behind the kernels that make them. The host reads a copy only after
its event has passed, so it never waits for the device. On the CPU there is nothing to wait for.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch import Tensor

from sealegs.vocabulary import Number, Row

Signal: TypeAlias = Tensor | Number | str | list[int] | None
"""A tensor holds one number, or several that belong together and are written as text, as a list of counts does. None
was not measured."""
Names: TypeAlias = tuple[str, ...] | Callable[[list[float]], Mapping[str, Number | str]]
"""A name for each number, or a function that makes signals of the numbers on the host, where that costs no launch."""
Block: TypeAlias = tuple[Names, Tensor]
"""Numbers that come in one tensor."""


@dataclass(frozen=True, slots=True)
class _Pending:
    """A step in line. Without device tensors it waits only for its turn."""

    row: dict[str, Number | str]
    layout: tuple[tuple[Names, int], ...] = ()
    """For each part of ``host``, its names and how many numbers it has. The row holds their places."""
    host: Tensor | None = None
    arrived: torch.cuda.Event | None = None

    def is_here(self) -> bool:
        return self.arrived is None or bool(self.arrived.query())


class Collector:
    """Takes the signals of a step, wherever they live, and gives rows in the order of their steps."""

    def __init__(self) -> None:
        self._pending: deque[_Pending] = deque()
        self._spare: list[Tensor] = []
        self._events: list[torch.cuda.Event] = []

    def put(self, step: int, signals: Mapping[str, Signal], blocks: Sequence[Block] = ()) -> None:
        """Send a step on its way. Tensors are read as they are now."""
        row: dict[str, Number | str] = {"step": int(step)}
        on_device: list[Block] = []
        named: list[tuple[Names, Signal]] = [((name,), signal) for name, signal in signals.items()]
        for names, signal in (*named, *blocks):
            if signal is None:  # what is not known has no key, such as the rate of an optimizer that chooses it itself
                continue
            if isinstance(signal, Tensor) and signal.is_cuda:
                if not callable(names):
                    row.update(dict.fromkeys(names, 0.0))  # keeps the places
                is_flat = signal.dim() == 1 and not signal.requires_grad
                on_device.append((names, signal if is_flat else signal.detach().reshape(-1)))
            elif isinstance(signal, Tensor):
                _fill(row, names, signal.detach().reshape(-1).tolist())
            else:
                assert not callable(names)
                row[names[0]] = _plain(signal)
        if not on_device:
            self._pending.append(_Pending(row))
            return
        packed = _packed([tensor for _, tensor in on_device])
        host = self._pinned_like(packed)
        host.copy_(packed, non_blocking=True)
        arrived = self._events.pop() if self._events else torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(packed.device))
        layout = tuple((names, tensor.numel()) for names, tensor in on_device)
        self._pending.append(_Pending(row, layout, host, arrived))

    def ready(self) -> list[Row]:
        """The rows that have arrived since the last call. Never waits."""
        rows: list[Row] = []
        while self._pending and self._pending[0].is_here():
            rows.append(self._complete(self._pending.popleft()))
        return rows

    def older_than(self, newest: int) -> list[Row]:
        """All rows but the ``newest``, waiting where they have not arrived: the same on all ranks, whatever their
        pace."""
        rows: list[Row] = []
        while len(self._pending) > newest:
            pending = self._pending.popleft()
            if pending.arrived is not None:
                pending.arrived.synchronize()
            rows.append(self._complete(pending))
        return rows

    def drain(self) -> list[Row]:
        """All rows, waiting for the device if necessary: at checkpoints and at the end."""
        for pending in self._pending:
            if pending.arrived is not None:
                pending.arrived.synchronize()
        return self.ready()

    def _pinned_like(self, packed: Tensor) -> Tensor:
        for i, spare in enumerate(self._spare):
            if spare.shape == packed.shape and spare.dtype == packed.dtype:
                return self._spare.pop(i)
        return torch.empty_like(packed, device="cpu", pin_memory=True)

    def _complete(self, pending: _Pending) -> Row:
        if pending.host is not None:
            numbers = iter(pending.host.tolist())
            for names, count in pending.layout:
                _fill(pending.row, names, list(islice(numbers, count)))
            self._spare.append(pending.host)
            assert pending.arrived is not None
            self._events.append(pending.arrived)
        return pending.row


def waited_for(tensor: Tensor) -> list[float]:
    """The numbers of a tensor, at once: on a CPU, or where something is wrong and waiting does not matter."""
    numbers: list[float] = tensor.detach().reshape(-1).double().tolist()
    return numbers


def named_now(blocks: Sequence[Block]) -> dict[str, Number | str]:
    """The signals of blocks, at once: where something is wrong and waiting does not matter."""
    row: dict[str, Number | str] = {}
    for names, numbers in blocks:
        _fill(row, names, waited_for(numbers))
    return row


def _fill(row: dict[str, Number | str], names: Names, numbers: list[float]) -> None:
    if callable(names):
        row.update(names(numbers))
    elif len(names) == 1 and len(numbers) != 1:
        row[names[0]] = " ".join(f"{number:g}" for number in numbers)
    else:
        row.update(zip(names, map(_plain, numbers), strict=True))


def _plain(signal: Any) -> Number | str:
    """A plain Python number, also from numpy; a flag as 0.0 or 1.0. Whatever else is left to the record."""
    value: Number | str = signal.item() if hasattr(signal, "item") else signal
    return float(value) if isinstance(value, bool) else value


def _packed(parts: list[Tensor]) -> Tensor:
    """All parts in one tensor: float32 where that holds them exactly, else float64."""
    if len(parts) == 1 and parts[0].dtype in (torch.float32, torch.float64):
        return parts[0]
    exact = all(part.dtype in _FIT_FLOAT32 for part in parts)
    dtype = torch.float32 if exact else torch.float64
    return torch.cat([part.to(dtype) for part in parts])


_FIT_FLOAT32 = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.bool})
