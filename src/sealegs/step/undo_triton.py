"""Puts many tensors back in one launch, if a flag on the device says so; see ``step/undo.py``.

It is imported only where there are a CUDA device and Triton. A few programs for each multiprocessor share the work.
They read the flag first, so an open gate costs a launch and no more. Bytes are copied, whatever they mean.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 16384
"""Bytes that a program copies at once."""
PROGRAMS = 8
"""For each multiprocessor."""


class Copies:
    """Knows where tensors lay, so that nothing is sent to the device again while they stay there."""

    def __init__(self, device: torch.device) -> None:
        self._programs = PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count
        self._device = device
        self._known: list[tuple[int, int, int]] = []
        self._table: Tensor | None = None
        self._sent: list[Tensor] = []
        """Pinned memory that may still be read."""

    def prepare(self, pairs: list[tuple[Tensor, Tensor]]) -> Callable[[Tensor], None]:
        """What copies the second of each pair into the first if the flag is 1."""
        with_gaps = [pair for pair in pairs if pair[0].stride() != pair[1].stride()]
        lines = [
            (target.data_ptr(), part.data_ptr(), target.nbytes)
            for target, part in pairs
            if target.stride() == part.stride()
        ]
        """Of each pair: where to, where from, how many bytes."""
        if lines and (self._table is None or lines != self._known):
            pinned = torch.tensor(lines, dtype=torch.int64).pin_memory()
            self._sent = [*self._sent[-1:], pinned]
            self._table = pinned.to(self._device, non_blocking=True)
            self._known = lines
        table = self._table

        def put_back(flag: Tensor) -> None:
            for target, part in with_gaps:
                target.copy_(torch.where(flag > 0, part, target))
            if lines:
                _put_back[(self._programs,)](flag, table, len(lines), BLOCK=BLOCK)

        return put_back


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _put_back(  # type: ignore[no-untyped-def]
    flag,
    table,
    count,
    BLOCK: tl.constexpr,  # noqa: N803 -- as Triton writes its constants
):
    if tl.load(flag) > 0:
        place = tl.arange(0, BLOCK)
        for line in range(count):
            target = tl.load(table + 3 * line).to(tl.pointer_type(tl.uint8))
            source = tl.load(table + 3 * line + 1).to(tl.pointer_type(tl.uint8))
            size = tl.load(table + 3 * line + 2)
            for begin in range(tl.program_id(0).to(tl.int64) * BLOCK, size, tl.num_programs(0).to(tl.int64) * BLOCK):
                mask = begin + place < size
                tl.store(target + begin + place, tl.load(source + begin + place, mask=mask), mask=mask)
