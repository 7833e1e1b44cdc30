"""Runs a function of tensors that stay in place as one launch: a captured CUDA graph.

Where many small operations take the host longer than the device, one launch for all of them saves that time. A graph
keeps the addresses it was captured with, so every use says which tensors are read, and they are compared.
"""

import gc
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from torch import Tensor

EAGER_USES = 2
"""Uses of the same tensors in a row before a capture: by then kernels are loaded and tables are sent."""
MOST_MOVES = 64
"""Moves of the tensors after which no capture is tried again: in some loops gradients move at every step."""

Result = TypeVar("Result")
Layout: TypeAlias = tuple[list[int], object]
"""Addresses, and what else decides which numbers lie there."""

_invalidated: list[torch.cuda.CUDAGraph] = []
"""Captures that failed. Kept for ever: torch's allocators may still ask them which stream they capture."""


def layout(tensors: Sequence[Tensor]) -> Layout:
    """Where tensors lie, and how many elements of which type: ``tensor.data = ...`` shows in nothing else.

    Strides are left out, since they would cost half as much again. Where all else is equal, they can only reorder the
    same elements, which does not matter, or tell apart two views with gaps of one memory, which nobody trains in turn.
    """
    return addresses(tensors), (list(map(Tensor.numel, tensors)), [tensor.dtype for tensor in tensors])


def addresses(tensors: Iterable[Tensor]) -> list[int]:
    """Addresses of tensors; 0 for one that wraps others (a quantized moment, say), but not for one without elements."""
    return [tensor.data_ptr() or not tensor.numel() for tensor in tensors]


class GraphCapturer:
    """Captures functions into graphs that share one memory pool. After one failure it does not try again."""

    def __init__(self) -> None:
        self.failure = ""
        """Why nothing is captured; empty where captures work."""
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._newest: torch.cuda.CUDAGraph | None = None
        """Kept so that the pool lives: the next capture reuses the memory of graphs that are gone."""

    def record(self, function: Callable[[], Result], device: torch.device) -> Callable[[], Result] | None:
        """The function as one launch; None where that is not possible. Its result is the same object every time."""
        if self.failure:
            return None
        try:
            if self._stream is None or self._stream.device != device:
                self._stream, self._pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
        except Exception as error:
            self.failure = _said(error)
            return None
        try:
            result = _captured(function, graph, self._stream, self._pool)
        except Exception as error:
            self.failure = _said(error.__context__ or error)  # the cause of a bad end comes before it
            _set_right(graph, self._stream, self._pool)
            return None
        self._newest = graph

        def replay() -> Result:
            graph.replay()
            return result

        return replay


class GraphedFunction(Generic[Result]):
    """Runs a function eagerly until its tensors have stayed in place for a while, and replays it from then on."""

    def __init__(self, recorder: GraphCapturer) -> None:
        self._recorder = recorder
        self._key: object = None
        self._uses = 0
        self._moves = 0
        self._replay: Callable[[], Result] | None = None

    def __call__(self, function: Callable[[], Result], now: Layout, device: torch.device) -> Result:
        """The function's result. The next replay overwrites it: clone what is to be kept.

        ``now`` is the layout of all tensors on that device that the function reads and that may move, and whatever else
        it depends on. A tensor without an address cannot be seen to move, so it is not captured.
        """
        if self._moves > MOST_MOVES:
            return function()
        if now != self._key:
            self._key, self._uses, self._replay = now, 0, None
            self._moves += 1
        self._uses += 1
        if self._replay is None and self._uses > EAGER_USES and all(now[0]):
            self._replay = self._recorder.record(function, device)
        return function() if self._replay is None else self._replay()


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _captured(
    function: Callable[[], Result], graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any
) -> Result:
    """Capture by hand: ``torch.cuda.graph`` would wait for the device and free the user's cached memory.

    Other threads (loaders that pin memory, NCCL's watchdog) may go on calling CUDA: ``global`` would not let them.
    """
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)  # nothing runs in a capture, but torch resets its generator before it
    is_collecting = gc.isenabled()
    gc.disable()  # garbage may hold graphs and events, which must not be destroyed during a capture
    try:
        with torch.cuda.stream(stream):
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                return function()
            finally:
                graph.capture_end()
    finally:
        if is_collecting:
            gc.enable()
        current.wait_stream(stream)


def _set_right(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any) -> None:
    """Clean up after a capture that CUDA invalidated, where torch stops half way and believes it is still capturing.

    Its allocator would not free what several streams have used, and its generator would refuse the next dropout. The
    allocator has a call for it; the generator recovers at the end of a capture that succeeds.
    """
    allocator: Any = torch._C
    with suppress(Exception):
        is_new = hasattr(allocator, "_cuda_endAllocateToPool")  # newer than torch 2.6
        end = allocator._cuda_endAllocateToPool if is_new else allocator._cuda_endAllocateCurrentStreamToPool
        end(stream.device.index, pool)  # raises where the capture did end: nothing is to be done then
        _invalidated.append(graph)
        allocator._cuda_releasePool(stream.device.index, pool)
        one = partial(torch.zeros, 1, device=stream.device)
        _captured(one, torch.cuda.CUDAGraph(), stream, torch.cuda.graph_pool_handle())
