"""Finds the first operation of a step that makes a number that is not finite from finite ones."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from sealegs.replay.rerun import Rerun

UNWRITTEN = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_"})
"""Operations that give memory as it was: what is in it is nobody's."""
HALF_LARGEST = torch.finfo(torch.float16).max


@dataclass(frozen=True, slots=True)
class Range:
    """The range of the numbers in a tensor."""

    dtype: str
    shape: tuple[int, ...]
    low: float
    high: float
    """The largest finite number."""
    not_finite: int

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "one number"
        text = f"{self.dtype} {shape}, {self.low:.4g} to {self.high:.4g}"
        return f"{text}, {self.not_finite} not finite" if self.not_finite else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """The first operation, weight or batch with a number that is not finite."""

    where: Literal["weights", "batch", "forward", "backward", "update"]
    module: str
    """The name of the module in the model, or of the weight."""
    operation: str
    inputs: tuple[Range, ...]
    output: Range | None
    cause: str | None
    """A card of ``causes.toml``, where the operation and its numbers point to one."""
    because: str
    step: int | None = None
    """The step that it belongs to."""

    def __str__(self) -> str:
        if self.where == "weights":
            return f"the weight {self.module} is not finite before the step begins"
        if self.where == "batch":
            return f"a batch of the step is not finite before any operation: {self.output}"
        if self.where == "update":
            return f"the update makes {self.module} not finite, with finite gradients"
        given = "; ".join(map(str, self.inputs))
        return (
            f"{self.operation} in {self.module or 'the loss'}, in the {self.where} pass: {given} in, {self.output} out"
            + (f": {self.because}" if self.because else "")
        )


def locate_first(rerun: Rerun, steps: range) -> Location | None:
    """Look in the first of these steps whose loss, gradients or resulting weights are not finite."""
    rerun.go_to(steps.start)
    for step in steps:
        is_applied = bool(rerun.rows[step]["applied"])
        before = None if is_applied else rerun.loop.capture()
        seen = rerun.loop.step(rerun.batches_of(step), lr=float(rerun.rows[step]["lr"]))
        rerun.steps_run += 1
        if not (math.isfinite(seen.loss) and math.isfinite(seen.grad_norm)) or _bad_weight(rerun.loop.subject.model):
            return locate(rerun, step)
        if before is not None:  # the run went on without this update
            rerun.loop.restore(before)
            rerun.run_unchanged(step)
    return None


def locate_at(rerun: Rerun, step: int) -> Location | None:
    """Look in a step; where it begins with a weight that is not finite, in the step that made it so."""
    found = locate(rerun, step)
    if found is None or found.where != "weights":
        return found
    return locate_first(rerun, range(rerun.steps.start, step)) or found


def locate(rerun: Rerun, step: int) -> Location | None:
    """Run a step again and look at every operation; None if all of them are finite now."""
    found = _looked_at(rerun, step)
    return None if found is None else replace(found, step=step)


def _looked_at(rerun: Rerun, step: int) -> Location | None:
    rerun.hold(step)
    subject, loop = rerun.loop.subject, rerun.loop
    if name := _bad_weight(subject.model):
        return Location(where="weights", module=name, operation="", inputs=(), output=None, cause=None, because="")
    loop.zero()
    watch = _Watch(subject.model)
    with watch:
        subject.gradients(rerun.batches_of(step))
    loop.zero()
    if watch.found is not None:
        return watch.found
    rerun.go_to(step)
    seen = loop.step(rerun.batches_of(step), lr=float(rerun.rows[step]["lr"]))
    name = _bad_weight(subject.model)
    rerun.steps_run += 2
    bad = next((each for each in _numbers(rerun.batches_of(step)) if _is_bad(each)), None)
    if bad is not None and not (math.isfinite(seen.loss) and math.isfinite(seen.grad_norm)):
        output = range_of(bad)
        return Location(where="batch", module="", operation="", inputs=(), output=output, cause=None, because="")
    if not name:
        return None
    return Location(
        where="update",
        module=name,
        operation="optimizer.step",
        inputs=(),
        output=None,
        cause="destructive-update",
        because="",
    )


def _bad_weight(model: nn.Module) -> str:
    return next((name for name, weight in model.named_parameters() if not torch.isfinite(weight).all()), "")


class _Watch(TorchDispatchMode):
    """Looks at every operation of a forward and a backward pass. Fused attention is taken apart for it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Location | None = None
        self._model = model
        self._forward: list[str] = []
        self._backward: list[str] = []
        self._outputs: dict[int, Tensor] = {}
        self._open = ExitStack()
        self._origins: dict[int, Location | None] = {}
        """The places of infinities that are no fault yet, with the operation that made them of finite numbers; None for
        those that were asked for."""
        self._lost: Location | None = None
        """The operation that has made the loss minus infinity."""

    def __enter__(self) -> Any:
        self._open.enter_context(sdpa_kernel(SDPBackend.MATH))  # the other kernels are a single operation
        for name, module in self._model.named_modules():
            for hook in self._hooks(name, module):
                self._open.callback(hook.remove)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._open.close()
        if self._lost is not None and (self.found is None or self.found.where == "backward"):
            self.found = self._lost

    def _hooks(self, name: str, module: nn.Module) -> Sequence[RemovableHandle]:
        def enter(*_: object) -> None:
            self._forward.append(name)

        def leave(_: nn.Module, __: object, output: Any) -> None:
            self._forward.pop()
            for tensor in _tensors(output):
                # the innermost module that returns a tensor owns the gradient that reaches it in the backward pass
                if tensor.requires_grad and id(tensor) not in self._outputs:
                    self._outputs[id(tensor)] = tensor
                    tensor.register_hook(lambda gradient: self._backward.append(name))

        return module.register_forward_pre_hook(enter), module.register_forward_hook(leave)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.found is None:
            given = [value for value in (*args, *(kwargs or {}).values()) for value in _tensors(value)]
            made = [tensor for tensor in _tensors(out) if tensor.is_floating_point()]
            if made:
                asked = any(map(_asks_for_infinity, (*args, *(kwargs or {}).values())))
                self._look(func, given, made, asked)
        return out

    def _look(self, func: Any, given: Sequence[Tensor], made: Sequence[Tensor], asked: bool) -> None:
        """Look at what an operation has made. ``asked`` says that it was given an infinity to write, as for a mask.

        NaN and plus infinity are a fault at once. Minus infinity is one if the loss or something worse comes of it:
        most often it is a mask, for a softmax to take away.
        """
        broken = [tensor for tensor in made if not torch.isfinite(tensor).all()]
        sources = [_place(tensor) for tensor in given]
        origin = next((self._origins[place] for place in sources if self._origins.get(place)), None)
        known = self._origins.keys() & set(sources)
        for tensor in made:
            self._origins.pop(_place(tensor), None)  # its memory may have been another's
        operation = func.overloadpacket.__name__
        if not broken or operation in UNWRITTEN:
            return
        numbers = [tensor for tensor in given if tensor.is_floating_point()]
        if operation.endswith("_"):
            numbers = [tensor for tensor in numbers if all(tensor is not bad for bad in broken)]  # its input is gone
        if any(_is_bad(tensor) and _place(tensor) not in known for tensor in numbers):
            return
        is_given = asked or bool(known) or any(map(_has_infinity, numbers))
        if is_given and not asked and torch.Tag.pointwise in func.tags:
            is_given = not any(_is_new(tensor, numbers) for tensor in broken)
        bad = next((tensor for tensor in broken if _is_bad(tensor)), None)
        has_nan = any(bool(torch.isnan(tensor).any()) for tensor in broken)
        if not is_given or has_nan:
            origin = origin or self._location(operation, numbers, broken[0] if bad is None else bad)
        if has_nan or (bad is not None and origin is not None):
            self.found = origin
            return
        for tensor in broken:
            self._origins[_place(tensor)] = origin
            if tensor.ndim == 0 and not self._is_backward:  # as good as the loss
                self._lost = self._lost or origin

    @property
    def _is_backward(self) -> bool:
        return torch._C._current_autograd_node() is not None

    def _location(self, operation: str, numbers: Sequence[Tensor], bad: Tensor) -> Location:
        stack = self._backward if self._is_backward else self._forward
        cause, because = _reason(operation, numbers, bad)
        return Location(
            where="backward" if self._is_backward else "forward",
            module=stack[-1] if stack else "",
            operation=operation,
            inputs=tuple(map(range_of, numbers)),
            output=range_of(bad),
            cause=cause,
            because=because,
        )


def _place(tensor: Tensor) -> int:
    """Where the numbers of a tensor lie: the same for all views of them."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a tensor made of others
        return id(tensor)


def _asks_for_infinity(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_asks_for_infinity, value))
    return isinstance(value, float) and not math.isfinite(value)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _numbers(batch: Any) -> Iterator[Tensor]:
    """The floating-point numbers in a batch as a capsule has it."""
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        for item in batch:
            yield from _numbers(item)
    elif isinstance(batch, np.ndarray) and batch.dtype.kind == "f":
        yield torch.as_tensor(batch.astype(np.float64))
    elif isinstance(batch, Tensor) and batch.is_floating_point():
        yield batch


def _is_bad(tensor: Tensor) -> bool:
    """Whether a tensor has NaN or plus infinity. Minus infinity may be the mask of a softmax."""
    return not torch.isfinite(tensor).all() and bool((torch.isnan(tensor) | (tensor == math.inf)).any())


def _is_new(made: Tensor, given: Sequence[Tensor]) -> bool:
    """Whether an operation on each number by itself has made one that is not finite of finite ones."""
    try:
        sound = [torch.isfinite(tensor).expand(made.shape) for tensor in given]
    except RuntimeError:  # it did more than that
        return False
    return bool((~torch.isfinite(made) & torch.stack([each.to(made.device) for each in sound]).all(0)).any())


def _has_infinity(tensor: Tensor) -> bool:
    return bool(torch.isinf(tensor).any())


def range_of(tensor: Tensor) -> Range:
    """The extremes of a tensor, and how many of its numbers are not finite."""
    numbers = tensor.detach().float()
    finite = numbers[torch.isfinite(numbers)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (math.nan, math.nan)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Range(dtype, tuple(tensor.shape), low, high, numbers.numel() - len(finite))


def _reason(operation: str, given: Sequence[Tensor], made: Tensor) -> tuple[str | None, str]:
    """The cause that the operation and its numbers point to, if any, and a sentence."""
    first = range_of(given[0]) if given else None
    if first is None:
        return None, ""
    largest = max(abs(first.low), abs(first.high))
    if operation in ("exp", "exp_") and first.high > math.log(torch.finfo(made.dtype).max):
        return "softmax-overflow", f"exp overflows above {math.log(torch.finfo(made.dtype).max):.1f}"
    if operation in ("log", "log2", "log10") and bool((given[0] == 0).any()):
        return "log-of-zero", f"{int((given[0] == 0).sum())} of the numbers are exactly 0"
    if operation in ("rsqrt", "reciprocal") and bool((given[0] == 0).any()):
        return "zero-variance-norm", "the variance is exactly 0, and no epsilon is added to it"
    if operation in ("native_layer_norm", "_fused_rms_norm"):
        return "zero-variance-norm", "a row has no variance, and the epsilon is too small for it"
    if operation == "div" and len(given) > 1 and bool((given[1] == 0).any()):
        return None, "it is divided by 0"
    if "softmax" in operation and bool((given[0] == -math.inf).all(-1).any()):
        return None, "every number of a row is minus infinity: all of it is masked"
    if any(map(_has_infinity, given)) and not _is_new(made, given):
        return None, "it meets an infinity that was put in on purpose, such as a mask"
    if made.dtype == torch.float16:
        return "fp16-overflow", f"fp16 ends at {HALF_LARGEST:.0f}, and the inputs reach {largest:.4g}"
    return None, f"{str(made.dtype).removeprefix('torch.')} overflows, with inputs up to {largest:.4g}"
