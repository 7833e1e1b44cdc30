"""A guard in a DeepSpeed engine: ZeRO 0 to 3, by itself, under Accelerate or in a Hugging Face Trainer.

engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
guard = sealegs.integrations.deepspeed.attach(engine, run="experiments/a1")
for batch in guard.batches(loader):
    loss = engine(batch)
    engine.backward(loss)
    engine.step()
guard.close()
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar, Unpack

import torch.distributed as dist
from torch import Tensor

from sealegs.errors import ConfigError, MissingExtra, SourceError

try:
    import deepspeed
    from deepspeed.runtime.engine import DeepSpeedEngine
except ModuleNotFoundError as error:
    if error.name not in ("deepspeed", "torch"):
        raise
    raise MissingExtra("sealegs.integrations.deepspeed", "DeepSpeed", "deepspeed") from None

from sealegs.guard import Guard
from sealegs.guard_options import LoopScheduler, Telemetry, skip_ranges
from sealegs.integrations.deepspeed_engine import (
    EngineState,
    divided,
    inner_optimizer,
    loss_scale,
    overflow_of,
)
from sealegs.integrations.loop_options import LoopOptions, guard_options, open_loop, refuse_options
from sealegs.integrations.patches import Patches
from sealegs.record.files import whole_file, writing
from sealegs.signals.collective import Collective
from sealegs.step.skip_way import Skipping
from sealegs.vocabulary import Verdict

T = TypeVar("T")
STATE = "sealegs.json"
"""The file with the guard's state in a checkpoint of the engine."""
OLDEST, NEXT = (0, 19, 8), (0, 20)
"""The releases whose internals are known: from the one on, and before the other."""
OWN = {
    "clip": "DeepSpeed clips: set gradient_clipping in its config",
    "attention_logit": "DeepSpeed updates the weights, and no head can be rescaled after it; leave it out",
}
"""Options of a guard that DeepSpeed owns, and how to set them there."""
CHECKPOINTS = (
    "the weights are divided by DeepSpeed; write checkpoints with engine.save_checkpoint, which takes the guard along"
)


def attach(engine: DeepSpeedEngine, *, run: str | Path | None, **options: Unpack[LoopOptions]) -> "EngineGuard":
    """Let a guard decide about every update of an engine; ``options`` are those of ``sealegs.Guard``.

    Attach on every rank, after ``deepspeed.initialize`` or ``accelerator.prepare``. The loop stays as it is. With
    ``resume=True`` or ``"auto"`` a run whose folder is there goes on in it, from the step that
    ``engine.load_checkpoint`` brings back.
    """
    return EngineGuard(engine, run, options)


class EngineGuard(Guard):
    """A guard whose steps are those of an engine."""

    def __init__(
        self, engine: DeepSpeedEngine, run: str | Path | None, options: LoopOptions, callbacks: Sequence[object] = ()
    ) -> None:
        refuse_engine(engine)
        refuse_options(options, OWN)
        checkpointing = guard_options(options).checkpointing
        if checkpointing.every:
            raise ConfigError(f"checkpoint_every={checkpointing.every}: {CHECKPOINTS}")
        self._engine: Any = engine
        self._state = EngineState(engine)
        self._optimizer = inner_optimizer(engine)
        self._loss: Tensor | None = None
        self._norm: float | None = None
        """The norm of the gradients of this step, once it is judged."""
        self._goes: bool | None = None
        """Whether the step under way goes, once it is judged."""
        self.verdict = Verdict(step=0)
        """That of the last step."""
        self._patches = Patches()
        self._ranks = Collective(options.get("telemetry", Telemetry()).timeout_s)
        self._rank, self._world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        also = {**checkpointing.also, "deepspeed": self._state}
        given: Any = {
            **options,
            "act": Skipping(way="host") if options.get("act", True) is True else options["act"],
            "checkpoint_every": replace(checkpointing, also=also),
        }
        schedule = engine.lr_scheduler
        self.loop = open_loop(
            engine.module,
            self._optimizer,
            given,
            run=run,
            scheduler=LoopScheduler(schedule) if hasattr(schedule, "state_dict") else None,
            scaler=None,
            goes_on=bool(options.get("resume")),
            settings={"deepspeed": _config_of(engine)},
            callbacks=callbacks,
            divided=divided(engine, self._optimizer, self._world),
        )
        self.loop.set_optimizer_call(lambda _, update: update())
        self.loop.measure_before_exchange(engine.module.parameters(), "DeepSpeed")
        self._join()
        self.watch.note(
            "framework",
            step=self.number,
            name="deepspeed",
            version=deepspeed.__version__,
            stage=engine.zero_optimization_stage(),
            accumulation=engine.gradient_accumulation_steps(),
            clip=engine.gradient_clipping() or None,
        )

    def batches(self, loader: Iterable[T], *, skip: Sequence[tuple[int, int]] = ()) -> Iterator[T]:
        """The batches of a loader; see ``Guard.batches``."""
        skip_ranges(self.loop.data, skip)
        if type(loader).__module__.startswith("accelerate."):  # prepared: it has marks and epochs of its own
            from sealegs.integrations.accelerate_loader import handed_out

            return handed_out(self, loader, by_ourselves=self.loop.goes_back)
        return self.loop.batches(loader)

    def step(self, loss: Tensor | None, **_: Any) -> NoReturn:
        """The engine's own step is guarded."""
        raise ConfigError("guard.step: the step of this guard is the engine's; call engine.step()")

    def close(self) -> None:
        """Finish, release the folder, and leave the engine as it was."""
        self._patches.undo()
        super().close()

    def resume_from(self, folder: Path) -> None:
        """Go on with the guard that is in a checkpoint of the engine, which has loaded it."""
        state = _read(folder / STATE)
        is_fresh = self.loop.data.number is None
        self.loop.take_over_ledger()
        self.loop.resume_at(self._engine.global_steps, None if state is None else state["guard"])
        place = state["data"][self._rank] if state is not None and len(state["data"]) == self._world else None
        if place and (is_fresh or self.loop.goes_back):
            self.loop.data.go_to(place)
        self.watch.note("resumed", step=self.number, checkpoint=folder.name, with_guard=state is not None)

    def _join(self) -> None:
        engine, patches = self._engine, self._patches
        patches.put(engine, "backward", self._backward)
        patches.put(engine, "step", self._step)
        patches.put(engine, "save_checkpoint", self._save)
        patches.put(engine, "load_checkpoint", self._load)
        patches.put(engine, "clip_fp32_gradients", self._clip)
        if hasattr(engine.optimizer, "_update_scale"):
            patches.put(engine.optimizer, "_update_scale", self._update_scale)
        overflow_of(engine, patches, self._judge)

    # The engine's loop

    def _backward(self, backward: Any) -> Any:
        def guarded(loss: Tensor, *args: Any, **kwargs: Any) -> Any:
            share = loss.detach()
            if kwargs.get("scale_wrt_gas", args[1] if len(args) > 1 else True):
                share = share / self._engine.gradient_accumulation_steps()
            self._loss = share if self._loss is None else self._loss + share
            engine = self._engine
            is_last = not engine.managed_gradient_accumulation() or engine.is_gradient_accumulation_boundary()
            with nullcontext() if is_last else self.loop.accumulate():
                return backward(loss, *args, **kwargs)

        return guarded

    def _clip(self, clip: Any) -> Any:
        def seen_first() -> Any:
            self.before_clipping(self._engine.gradient_clipping())
            return clip()

        return seen_first

    def _step(self, step: Any) -> Any:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            engine = self._engine
            if engine.managed_gradient_accumulation() and not engine.is_gradient_accumulation_boundary():
                return step(*args, **kwargs)
            is_probe = self.loop.data.is_probe
            before, number = self._state.state_dict(), self.number
            checks = getattr(engine.optimizer, "check_grad_overflow", None)
            self._goes = self._norm = None
            try:
                result = step(*args, **kwargs)
            finally:
                self._optimizer.put_back()
                if checks is not None:
                    engine.optimizer.check_grad_overflow = checks
                self._loss = None
            goes: bool | None = vars(self)["_goes"]
            if goes is None:
                raise ConfigError(
                    f"deepspeed {deepspeed.__version__}: its {type(engine.optimizer).__name__} made a step and showed "
                    "no gradient norm; attach the guard after all other changes to the engine"
                )
            if is_probe:
                self._state.load_state_dict(before)
            elif not goes:
                self._skipped(kwargs.get("lr_kwargs") or (args[0] if args else None))
            self.verdict = self.loop.finish_step()
            if self.number != number + (not is_probe):
                self._state.refresh()
            return result

        return guarded

    def _judge(self, norm: float | Tensor | None) -> bool:
        """Decide about the step under way, once."""
        if self._goes is not None:
            return self._goes
        engine = self._engine
        if self._loss is None:
            raise ConfigError("engine.step: no loss was seen in this step; call engine.backward(loss) before it")
        self._norm = None if norm is None else float(norm)
        signals: dict[str, Any] = {"loss_scale": loss_scale(engine)} if engine.fp16_enabled() else {}
        if norm is not None and engine.gradient_clipping():
            signals["clip_norm"] = float(engine.gradient_clipping())
        self.loop.decide(self._loss, grad_norm=self._norm, **signals)
        self._optimizer.goes = False
        self.loop.update()
        self._optimizer.use_settings()
        self._goes = self._optimizer.goes
        return self._goes

    def _update_scale(self, update: Any) -> Any:
        """An overflow of fp16 halves the scale, a step that the guard rejects for another reason does not."""

        def by_overflow(has_overflow: bool = False) -> None:
            if not self.loop.data.is_probe:
                update(has_overflow and self._is_overflow())

        return by_overflow

    def _is_overflow(self) -> bool:
        """Whether DeepSpeed would have skipped this step by itself, to find its loss scale."""
        return bool(self._engine.fp16_enabled()) and not (self._norm is not None and math.isfinite(self._norm))

    def _skipped(self, lr_kwargs: Mapping[str, Any] | None) -> None:
        engine = self._engine
        if not self._is_overflow() and engine.lr_scheduler is not None:
            engine.lr_scheduler.step(**(lr_kwargs or {}))
        elif not self._is_overflow():  # who steps it looks at this flag, and the engine has done so already
            engine.optimizer.overflow = False
        if self._norm is not None:  # DeepSpeed says inf of every step that it skips
            engine._global_grad_norm = self._norm
            if hasattr(engine.optimizer, "_global_grad_norm"):
                engine.optimizer._global_grad_norm = self._norm

    # Checkpoints of the engine

    def _save(self, save: Any) -> Any:
        def saved(save_dir: Any, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
            tag = f"global_step{self._engine.global_steps}" if tag is None else tag
            state = super(EngineGuard, self).state_dict()
            places = self._ranks.gather(self.loop.data.position())
            with self.paused():
                result = save(save_dir, tag, *args, **kwargs)
            if self._rank == 0:
                path = Path(save_dir) / str(tag) / STATE
                with writing(path), whole_file(path) as file:
                    file.write(json.dumps({"guard": state, "data": places}).encode())
            return result

        return saved

    def _load(self, load: Any) -> Any:
        def loaded(*args: Any, **kwargs: Any) -> Any:
            path, client = load(*args, **kwargs)
            if path is not None:
                self.resume_from(Path(path).parent)
            return path, client

        return loaded

    def weights(self) -> list[Tensor]:
        """This rank's part of the weights, the live tensors: what updates change, and nothing else does."""
        return [each for group in self._optimizer.param_groups for each in group["params"]]


def refuse_engine(engine: Any) -> None:
    """Refuse engines whose updates no guard can decide about, and releases whose internals are not known."""
    if not isinstance(engine, DeepSpeedEngine):
        raise ConfigError(f"engine={type(engine).__name__}: give what deepspeed.initialize or prepare made")
    version = tuple(int(part) for part in deepspeed.__version__.split("+")[0].split(".")[:3] if part.isdecimal())
    if not OLDEST <= version < NEXT:
        known = f"from {'.'.join(map(str, OLDEST))} on, before {'.'.join(map(str, NEXT))}"
        raise ConfigError(
            f"deepspeed {deepspeed.__version__}: a guard goes by its internals, and knows those {known}; use one of "
            "these, as `pip install 'sealegs[deepspeed]'` brings"
        )
    if type(engine) is not DeepSpeedEngine:
        raise ConfigError(
            f"engine={type(engine).__name__}: only plain engines are guarded, no pipelines and no hybrids"
        )
    if "backward" in vars(engine):
        raise ConfigError("engine: a guard is attached to it already; close that one")
    if engine.optimizer is None or not hasattr(engine, "basic_optimizer"):
        raise ConfigError("engine: it has no optimizer; give deepspeed.initialize one, or one in its config")
    config = engine._config
    offload = [config.zero_config.offload_optimizer, config.zero_config.offload_param]
    for is_so, what in (
        (engine.has_moe_layers, "experts of DeepSpeed's own (MoE)"),
        (engine.autotp_size() > 1 or engine.mp_world_size > 1, "tensor parallel"),
        (engine.sequence_parallel_size > 1, "sequence parallel"),
        (engine.zero_hpz_partition_size() > 1, "zero_hpz_partition_size"),
        (type(engine.optimizer).__name__.startswith("MiCS"), "mics_shard_size"),
        (bool(engine.zenflow), "zenflow"),
        (any(each is not None and each.device == "nvme" for each in offload), "offload to nvme"),
        (engine.is_deepcompile_active(), "deepcompile"),
        (getattr(engine, "torch_autocast_z0_gradscaler", None) is not None, "torch_autocast with a GradScaler"),
    ):
        if is_so:
            raise ConfigError(f"engine with {what}: a guard was never tested in one; leave that out")
    if engine.zero_optimization() and not engine.zero_compute_grad_norm():
        raise ConfigError("zero_optimization.compute_grad_norm=false: the guard judges by that norm; set it to true")


def _config_of(engine: Any) -> dict[str, Any]:
    return json.loads(json.dumps(engine._config._param_dict, default=str))  # type: ignore[no-any-return]


def _read(path: Path) -> dict[str, Any] | None:
    """The guard's part of a checkpoint; None if it was written without one."""
    try:
        state: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise SourceError(f"{path}: cannot be read ({error}); delete it to go on without the guard's memory") from error
    if not isinstance(state, dict) or not {"guard", "data"} <= state.keys():
        raise SourceError(f"{path}: is not what a guard has saved; delete it to go on without the guard's memory")
    return state
