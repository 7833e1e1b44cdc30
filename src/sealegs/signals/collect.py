"""Device scalars in, host rows out, late: the one door from device to host.

Nothing else on the training path may call ``.item()``, ``.cpu()`` or ``.tolist()``. On CUDA the scalars of a step are
packed into one tensor and copied to pinned memory behind the kernels that make them; the host reads a copy only after
its event has passed, so it never waits for the device. On the CPU there is nothing to wait for.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from sealegs.vocabulary import Number, Row

Signal: TypeAlias = Tensor | Number | str


@dataclass(frozen=True, slots=True)
class _Pending:
    """A step in line. Without device scalars there is nothing to wait for, but its turn."""

    row: dict[str, Number | str]
    names: tuple[str, ...] = ()
    """Which entries of the row are still zeros, to be filled from ``host``."""
    host: Tensor | None = None
    arrived: torch.cuda.Event | None = None

    def is_here(self) -> bool:
        return self.arrived is None or bool(self.arrived.query())


class Collector:
    """Takes the signals of a step, whatever they live on; gives rows in the order of their steps."""

    def __init__(self) -> None:
        self._pending: deque[_Pending] = deque()
        self._spare: list[Tensor] = []

    def put(self, step: int, signals: Mapping[str, Signal]) -> None:
        """Send a step on its way. Tensors must hold one number; they are read as they are now."""
        row: dict[str, Number | str] = {"step": int(step)}
        on_device: dict[str, Tensor] = {}
        for name, signal in signals.items():
            if isinstance(signal, Tensor) and signal.is_cuda:
                row[name] = 0.0  # keeps the place
                on_device[name] = signal.detach()
            else:
                row[name] = _plain(signal)
        if not on_device:
            self._pending.append(_Pending(row))
            return
        packed = _packed(list(on_device.values()))
        host = self._pinned_like(packed)
        host.copy_(packed, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(packed.device))
        self._pending.append(_Pending(row, tuple(on_device), host, arrived))

    def ready(self) -> list[Row]:
        """The rows that have arrived since the last call. Never waits."""
        rows: list[Row] = []
        while self._pending and self._pending[0].is_here():
            rows.append(self._complete(self._pending.popleft()))
        return rows

    def drain(self) -> list[Row]:
        """All rows, waiting for the device where one is still under way: at checkpoints and at the end."""
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
            pending.row.update(zip(pending.names, pending.host.tolist(), strict=True))
            self._spare.append(pending.host)
        return pending.row


def _plain(signal: Signal) -> Number | str:
    """A number of Python's own, also from numpy and CPU tensors; a flag as 0.0 or 1.0."""
    value: Number | str = signal.item() if hasattr(signal, "item") else signal
    return float(value) if isinstance(value, bool) else value


def _packed(scalars: list[Tensor]) -> Tensor:
    """One tensor of all scalars: float32 where that holds them all exactly, else float64."""
    exact = all(scalar.dtype in _FIT_FLOAT32 for scalar in scalars)
    dtype = torch.float32 if exact else torch.float64
    return torch.stack([scalar.reshape(()).to(dtype) for scalar in scalars])


_FIT_FLOAT32 = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.bool})
