"""What a guard needs of a DeepSpeed engine: its partitions as tensors, its counters as a state, its overflow flag.

Everything here goes by names inside DeepSpeed, which change from release to release: ``INTERNALS`` lists them, and
``tests/integrations/test_deepspeed_internals.py`` looks for each in the release that is installed.
"""

import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sealegs.integrations.patches import Patches
from sealegs.signals.layout import STRANGER, Divided, Layout
from sealegs.step.update import NORMALISING

INTERNALS: Mapping[str, tuple[str, ...]] = {
    "deepspeed.runtime.engine:DeepSpeedEngine": (
        *("backward", "step", "save_checkpoint", "load_checkpoint", "is_gradient_accumulation_boundary"),
        *("managed_gradient_accumulation", "gradient_accumulation_steps", "gradient_clipping", "clip_fp32_gradients"),
        *("zero_optimization_stage", "zero_compute_grad_norm", "fp16_enabled", "get_global_grad_norm"),
        *("zero_hpz_partition_size", "autotp_size", "is_deepcompile_active", "_take_model_step"),
    ),
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer": (
        *("check_overflow", "scaled_global_norm", "_update_scale", "step"),
    ),
    "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3": (
        *("check_overflow", "_get_norm_groups", "_update_scale", "step"),
        *("checkpoint_event_prologue", "checkpoint_event_epilogue"),
    ),
    "deepspeed.runtime.bf16_optimizer:BF16_Optimizer": ("get_grads_for_norm", "step"),
    "deepspeed.runtime.fp16.fused_optimizer:FP16_Optimizer": ("_skip_invalid_grad_norm", "_update_scale", "step"),
    "deepspeed.runtime.fp16.unfused_optimizer:FP16_UnfusedOptimizer": (
        *("_skip_invalid_grad_norm", "_update_scale", "step"),
    ),
    "deepspeed.runtime.utils:CheckOverflow": ("has_overflow", "check_using_norm"),
    "deepspeed.runtime.utils": ("combine_grad_norm_groups", "get_global_norm_of_tensors"),
}
"""Names that are called or replaced, by where they are."""

Judge = Callable[[float | Tensor | None], bool]
"""Gets the norm of all gradients, without the loss scale, or None where the guard is to measure them; says whether the
step goes."""


class EngineOptimizer(Optimizer):
    """The optimizer inside an engine as a guard sees it: the partitions of this rank, and their states.

    DeepSpeed makes the update itself; ``step`` only says that it may.
    """

    def __init__(self, inner: Optimizer, groups: list[list[Tensor]], places: list[int]) -> None:
        """``groups`` are the partitions of each group, ``places`` which group of ``inner`` has their settings."""
        self.goes = False
        """Whether the step under way was let through."""
        self.changed: list[tuple[MutableMapping[str, Any], str, Any]] = []
        """Settings that hold for the step under way alone: the group, the name, and the value before."""
        self._inner = inner
        self._groups = [_Group(inner, place, group) for place, group in zip(places, groups, strict=True)]
        kind = type(inner)
        self.normalises = isinstance(inner, NORMALISING) or "adam" in kind.__name__.lower()
        self.__class__ = type(kind.__name__, (EngineOptimizer,), {"__module__": kind.__module__})

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        """All partitions, also where DeepSpeed shows its optimizer one at a time."""
        return self._groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The states of the partitions."""
        return self._inner.state

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        """The settings that groups were made with."""
        return self._inner.defaults

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it is never given one
        """Let DeepSpeed's own step through, with the settings as they are now."""
        self.goes = True
        self._now: list[tuple[MutableMapping[str, Any], str, Any]] = [
            (group, name, group[name]) for group in self._groups for name in ("lr", "weight_decay") if name in group
        ]

    def use_settings(self) -> None:
        """Give DeepSpeed's step the settings that ``step`` was called with, until ``put_back``."""
        for group, name, value in self._now if self.goes else ():
            if group[name] != value:
                self.changed.append((group, name, group[name]))
                group[name] = value

    def put_back(self) -> None:
        """The step is over: settings are the user's again."""
        while self.changed:
            group, name, value = self.changed.pop()
            group[name] = value

    def zero_grad(self, set_to_none: bool = True) -> None:
        """DeepSpeed does."""


class _Group(MutableMapping[str, Any]):
    """A group of the inner optimizer, with this rank's partitions as its parameters."""

    def __init__(self, optimizer: Optimizer, place: int, partitions: list[Tensor]) -> None:
        self._optimizer, self._place, self._partitions = optimizer, place, partitions

    def __getitem__(self, name: str) -> Any:
        return self._partitions if name == "params" else self._optimizer.param_groups[self._place][name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name != "params":
            self._optimizer.param_groups[self._place][name] = value

    def __delitem__(self, name: str) -> None:
        del self._optimizer.param_groups[self._place][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._optimizer.param_groups[self._place])

    def __len__(self) -> int:
        return len(self._optimizer.param_groups[self._place])


class HeldWeights(nn.Module):
    """The trained parameters of a module as one rank holds them, under the names that the module gives them."""

    def __init__(self, module: nn.Module, held: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        object.__setattr__(self, "_module", module)
        self._held = dict(held)

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Parts, where the engine divides parameters."""
        yield from self._held.items()

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The same without names."""
        yield from self._held.values()

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """The module's."""
        module: nn.Module = self._module  # type: ignore[assignment]
        yield from module.named_buffers(*args, **kwargs)


def inner_optimizer(engine: Any) -> EngineOptimizer:
    """The optimizer of an engine, as a guard sees it."""
    inner, outer = engine.basic_optimizer, engine.optimizer
    if engine.zero_optimization_stage() == 3:
        by_group: dict[int, list[Tensor]] = {}
        for sub_group, partition in enumerate(outer.fp32_partitioned_groups_flat):
            by_group.setdefault(outer.sub_group_to_group_id[sub_group], []).append(partition)
        return EngineOptimizer(inner, list(by_group.values()), list(by_group))
    groups = [list(group["params"]) for group in inner.param_groups]
    return EngineOptimizer(inner, groups, list(range(len(groups))))


def divided(engine: Any, optimizer: EngineOptimizer, world: int) -> Divided:
    """What this rank holds of an engine's training, and of what other ranks hold copies."""
    stage = engine.zero_optimization_stage()
    trained = {name: each for name, each in engine.module.named_parameters() if each.requires_grad}
    if stage == 3:
        trained = {name: nn.Parameter(each.ds_tensor) for name, each in trained.items()}
    held = HeldWeights(engine.module, trained)
    of_weights = 1 if stage == 3 else world
    copies: dict[Tensor, int] = dict.fromkeys(trained.values(), of_weights)
    masters = (each for group in optimizer.param_groups for each in group["params"])
    copies |= {each: 1 if stage else world for each in masters if each not in copies}
    sizes = (each.ds_numel for each in engine.module.parameters() if each.requires_grad) if stage == 3 else ()
    return Divided(
        held,
        Layout(
            world=world,
            names=(*(name for name, _ in engine.module.named_parameters()), STRANGER),
            copies=copies,
            compared=() if stage == 3 else tuple(trained.values()),
            twins=tuple(range(world)) if stage == 3 else (0,) * world,
            peers=(0,) * world,
            places=("",) * world,
            elements=float(sum(sizes)) or None,
        ),
    )


class EngineState:
    """What an engine counts beside the weights: steps, samples, the loss scale. It goes back with the run."""

    COUNTERS = ("global_steps", "skipped_steps", "global_samples")

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {
            "counted": {name: getattr(self._engine, name) for name in self.COUNTERS},
            "scale": _plain_fields(_scaler_of(self._engine.optimizer)),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Count from there."""
        for name, value in state["counted"].items():
            setattr(self._engine, name, value)
        scaler = _scaler_of(self._engine.optimizer)
        for name, value in state["scale"].items():
            setattr(scaler, name, value)

    def refresh(self) -> None:
        """The partitions have gone back: so does what ranks keep whole of them."""
        if self._engine.zero_optimization_stage() == 3:
            self._engine.optimizer.checkpoint_event_prologue()
            self._engine.optimizer.checkpoint_event_epilogue()


def _scaler_of(optimizer: Any) -> Any:
    """The object that keeps the loss scale; None where there is none."""
    return getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)


def _plain_fields(scaler: Any) -> dict[str, Any]:
    if scaler is None:
        return {}
    names = [each.name for each in fields(scaler)] if is_dataclass(scaler) else list(vars(scaler))
    values = {name: getattr(scaler, name) for name in names}
    return {name: value for name, value in values.items() if isinstance(value, int | float | None)}


def loss_scale(engine: Any) -> float:
    """The factor that is in the gradients when DeepSpeed looks at them."""
    if not engine.fp16_enabled():
        return 1.0
    optimizer = engine.optimizer
    return float(optimizer.loss_scale if hasattr(optimizer, "loss_scale") else optimizer.cur_scale)


def overflow_of(engine: Any, patches: Patches, judge: Judge) -> Any:
    """Let ``judge`` decide where DeepSpeed itself decides about an overflow, with the norm that it has just measured.

    Where the step does not go, DeepSpeed's own overflow flag is raised, and its own code skips.
    """
    optimizer = engine.optimizer
    for name, join in (
        ("scaled_global_norm", _join_stages_1_and_2),
        ("_get_norm_groups", _join_stage_3),
        ("get_grads_for_norm", _join_bf16),
        ("overflow_checker", _join_stage_0),
    ):
        if hasattr(optimizer, name):
            join(engine, patches, judge)
            return
    _join_torch(engine, patches, judge)


def _join_check(engine: Any, patches: Patches, judge: Judge) -> None:
    """An overflow that DeepSpeed has found before it measures a norm."""
    optimizer = engine.optimizer

    def check(check: Callable[..., None]) -> Callable[..., None]:
        def checked(*args: Any, **kwargs: Any) -> None:
            check(*args, **kwargs)
            if optimizer.overflow:
                judge(math.inf)

        return checked

    patches.put(optimizer, "check_overflow", check)


def _join_stages_1_and_2(engine: Any, patches: Patches, judge: Judge) -> None:
    optimizer = engine.optimizer
    _join_check(engine, patches, judge)

    def measure(measure: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def measured(*args: Any, **kwargs: Any) -> Tensor:
            norm = measure(*args, **kwargs)
            if judge(norm / optimizer.loss_scale):
                return norm
            optimizer.check_grad_overflow = True  # the norm is looked at; the guard puts it back after the step
            return torch.full_like(norm, math.inf)

        return measured

    patches.put(optimizer, "scaled_global_norm", measure)


def _join_stage_3(engine: Any, patches: Patches, judge: Judge) -> None:
    from deepspeed.runtime.utils import combine_grad_norm_groups

    optimizer = engine.optimizer
    _join_check(engine, patches, judge)

    def measure(measure: Callable[[], list[Tensor]]) -> Callable[[], list[Tensor]]:
        def measured() -> list[Tensor]:
            norms = measure()
            if judge(combine_grad_norm_groups(norms) / optimizer.loss_scale):
                return norms
            return [torch.full_like(torch.as_tensor(norm), math.inf) for norm in norms]

        return measured

    patches.put(optimizer, "_get_norm_groups", measure)


def _join_bf16(engine: Any, patches: Patches, judge: Judge) -> None:
    from deepspeed.runtime.utils import get_global_norm_of_tensors

    optimizer = engine.optimizer

    def read(read: Callable[..., Any]) -> Callable[..., Any]:
        def was_read(for_clipping: bool = False) -> Any:
            gradients = read(for_clipping)
            if for_clipping:
                return gradients
            norm = get_global_norm_of_tensors(
                input_tensors=gradients[0], mpu=optimizer.mpu, norm_type=optimizer.norm_type
            )
            if judge(norm):
                return gradients
            return [torch.full((1,), math.inf, device=norm.device)], {}

        return was_read

    patches.put(optimizer, "get_grads_for_norm", read)


def _join_stage_0(engine: Any, patches: Patches, judge: Judge) -> None:
    """Whole gradients of 16 bits, with masters beside them."""
    optimizer = engine.optimizer

    def check(check: Callable[..., bool]) -> Callable[..., bool]:
        def checked(*args: Any, **kwargs: Any) -> bool:
            has_overflow = check(*args, **kwargs)
            norms = [torch.linalg.vector_norm(each.grad, dtype=torch.float64) for each in _with_gradient(engine)]
            norm = torch.linalg.vector_norm(torch.stack(norms)) / loss_scale(engine) if norms else math.nan
            return not judge(math.inf if has_overflow else norm) or has_overflow

        return checked

    patches.put(optimizer.overflow_checker, "has_overflow", check)
    patches.put(optimizer.overflow_checker, "check_using_norm", check)


def _with_gradient(engine: Any) -> Iterator[nn.Parameter]:
    return (each for each in engine.module.parameters() if each.grad is not None)


def _join_torch(engine: Any, patches: Patches, judge: Judge) -> None:
    """An optimizer of torch's, which DeepSpeed calls as it is: it gets the flag that the engine looks for."""
    optimizer = engine.optimizer

    def step(step: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(step)  # with the mark of a schedule, which would warn of a step that is not its own
        def stepped(*args: Any, **kwargs: Any) -> Any:
            optimizer.overflow = not judge(None)
            return None if optimizer.overflow else step(*args, **kwargs)

        return stepped

    patches.put(optimizer, "step", step)
