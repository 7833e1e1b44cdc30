"""A function of tensors that stay where they are in, the same function as one launch out: a captured CUDA graph.

Where many small operations take the host longer than the device, one launch for all of them is what is left to win. A
graph keeps the addresses it was captured with, so every use says which tensors are read, and they are compared.
"""

import gc
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from torch import Tensor

EAGER_USES = 2
"""So often in a row the same tensors are used before a capture: by then kernels are loaded and tables sent."""
MOST_MOVES = 64
"""So often tensors may move before nobody looks where they are any more: gradients do in some loops, at every step."""

Result = TypeVar("Result")
Layout: TypeAlias = tuple[list[int], object]
"""Addresses, and what else decides which numbers lie there."""

_invalidated: list[torch.cuda.CUDAGraph] = []
"""Captures that came to no good end. Held for ever: torch's allocators may still ask them which stream they capture."""


def layout(tensors: Sequence[Tensor]) -> Layout:
    """Where tensors lie, and how many elements of which kind: ``tensor.data = ...`` shows in nothing else.

    Without strides, which would cost half as much again: where all this is equal, they can differ in the order of the
    same elements, which does not matter, or between two views with gaps of one memory, which nobody trains in turn.
    """
    return addresses(tensors), (list(map(Tensor.numel, tensors)), [tensor.dtype for tensor in tensors])


def addresses(tensors: Iterable[Tensor]) -> list[int]:
    """Where tensors lie; 0 for one that wraps others (a quantized moment, say), but not for one of no elements."""
    return [tensor.data_ptr() or not tensor.numel() for tensor in tensors]


class GraphCapturer:
    """Captures functions, which then share one pool of memory. Where it fails once it does not try again."""

    def __init__(self) -> None:
        self.failure = ""
        """Why nothing is captured, where nothing is."""
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._newest: torch.cuda.CUDAGraph | None = None
        """Keeps the pool: the next capture is to find the memory of those that are gone, instead of asking for more."""

    def record(self, function: Callable[[], Result], device: torch.device) -> Callable[[], Result] | None:
        """The function as one launch; None where that cannot be had. Its result is the same object every time."""
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
            self.failure = _said(error.__context__ or error)  # what ends a capture badly comes before its end
            _set_right(graph, self._stream, self._pool)
            return None
        self._newest = graph

        def replay() -> Result:
            graph.replay()
            return result

        return replay


class GraphedFunction(Generic[Result]):
    """A function, run eagerly until its tensors have stayed where they are for a while, and replayed from then on."""

    def __init__(self, recorder: GraphCapturer) -> None:
        self._recorder = recorder
        self._key: object = None
        self._uses = 0
        self._moves = 0
        self._replay: Callable[[], Result] | None = None

    def __call__(self, function: Callable[[], Result], now: Layout, device: torch.device) -> Result:
        """Its result. That of a replay is written over by the next: clone what is to be kept.

        ``now`` is the layout of all tensors on that device that it reads and that may move, and whatever else it
        depends on. What lies at no address cannot be seen to move, and is not captured.
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
    """By hand, as ``torch.cuda.graph`` would wait for the device and give the cached memory of the user's back.

    Other threads (loaders that pin memory, NCCL's watchdog) may go on calling CUDA: ``global`` would not let them.
    """
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)  # nothing runs in a capture, but before it torch sets its generator back
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
    """Where CUDA invalidated a capture, torch stops half way through its end, and goes on as if it were capturing.

    Its allocator would not free what several streams have used, and its generator refuse the next dropout. The one is
    told, the other comes to itself at the end of a capture that goes well.
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
