"""A Lightning callback: the trainer's own loop, with a guard in it.

    from sealegs.integrations.lightning import Guarded

    trainer = Trainer(callbacks=[Guarded(run="experiments/a1", playbook=sealegs.Playbook.standard())])
    trainer.fit(model, loader)

It works with ``lightning`` and with ``pytorch_lightning``, whichever the program has imported.
"""

import json
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, Self, Unpack

from sealegs.errors import ConfigError, MissingExtra, RunHalted, SealegsError
from sealegs.guard_options import LoopScheduler, Telemetry

try:
    from sealegs.guard import Guard
    from sealegs.integrations.lightning_loop import LightningLoop, refuse
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise MissingExtra("sealegs.integrations.lightning", "PyTorch with Lightning", "lightning") from None

from sealegs.integrations.lightning_progress import lacking
from sealegs.integrations.loop_options import (
    LoopOptions,
    guard_options,
    open_loop,
    refuse_options,
    shadows_in_no_state,
)
from sealegs.integrations.patches import Patches
from sealegs.integrations.preflight_advice import advice
from sealegs.preflight_check.live import preflight
from sealegs.report.commands.preflight import Advised
from sealegs.signals.collective import Collective
from sealegs.state.rng import restore_rng, rng_now

HOMES = ("lightning.pytorch", "pytorch_lightning")
OWN = {
    "model": "the trainer has it",
    "optimizer": "configure_optimizers gives them",
    "scheduler": "configure_optimizers gives them",
    "scaler": "it is the precision plugin's: set Trainer(precision='16-mixed')",
    "resume": "call trainer.fit(..., ckpt_path=...)",
}
"""Options of a guard that Lightning owns, and how to set them there."""
PRECISIONS = {"32": "fp32", "64": "fp32", "bf16": "bf16", "16": "fp16"}


def attach(trainer: Any, *, run: str | Path | None, **options: Unpack[LoopOptions]) -> "Guarded":
    """Let a guard decide about every update of a Trainer's fits; ``options`` are those of ``sealegs.Guard``.

    Nothing happens before ``trainer.fit``. It is the same as ``Trainer(callbacks=[Guarded(run=...)])``, which is for
    Trainers that are made from a configuration file.
    """
    if not hasattr(trainer, "callbacks"):
        raise ConfigError(f"trainer={type(trainer).__name__}: give a Trainer of Lightning's")
    if any(isinstance(callback, Guarded) for callback in trainer.callbacks):
        raise ConfigError("trainer: a guard is attached to it already")
    guarded = Guarded(run=run, **options)
    trainer.callbacks.insert(0, guarded)  # callbacks that write checkpoints come last
    return guarded


class Guarded:
    """Lets a guard decide about every update of ``Trainer.fit``; the options are those of ``sealegs.Guard``.

    ``run`` is the folder to record into. ``clip`` is for fits in which Lightning does not clip, such as fused
    optimizers in mixed precision, for which it refuses to. The guard's state is in Lightning's checkpoints: a fit with
    ``ckpt_path`` goes on with it, in the same folder, from the very batch.
    """

    state_key = "sealegs.Guarded"
    _warns = True
    """Whether what the pre-flight check finds is said."""

    def __new__(cls, *, run: str | Path | None, **options: Unpack[LoopOptions]) -> Self:
        """Make an instance that is a ``Callback`` of the Lightning that the program has imported."""
        kind: Any = cls
        made: Any = _made_for(kind, _homes())
        return object.__new__(made)  # type: ignore[no-any-return]

    def __init__(self, *, run: str | Path | None, **options: Unpack[LoopOptions]) -> None:
        refuse_options(options, OWN)
        guard_options(options)
        self.guard: Guard | None = None
        """The guard of the present fit, or of the last one."""
        self.advice: Advised | None = None
        """The report of the pre-flight check."""
        self._run = run
        self._options = options
        self._state: Mapping[str, Any] = {}
        """State from a checkpoint or from the fit before; empty if there was none."""
        self._is_loaded = False
        self._is_fit = True
        self._patches = Patches()
        self._loop: LightningLoop | None = None
        self._ranks: Collective | None = None
        self._pause = ExitStack()

    def __reduce__(self) -> Any:  # its class cannot be found by name
        return partial(Guarded, run=self._run, **self._options), ()

    # Lightning's hooks

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Note whether a fit comes: a guard has no part in anything else."""
        self._is_fit = stage == "fit"

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Make the guard: the model is on its device, the optimizers exist."""
        if missing := lacking(trainer):
            raise ConfigError(f"{_version(trainer)}: its trainer has no {missing}; pip install 'sealegs[lightning]'")
        refuse(trainer, pl_module)
        clip = self._options.get("clip")
        if clip is not None and trainer.gradient_clip_val:
            raise ConfigError(
                f"clip={clip}: Lightning clips already; leave out one of it and "
                f"Trainer(gradient_clip_val={trainer.gradient_clip_val})"
            )
        if not self._is_loaded and self._state and self._state["updates"] != trainer.global_step:
            self._state = {}  # the state is another training's
        # a checkpoint written on an exception, or a failed fit before, has no guard state, but is no new run either
        goes_on = bool(self._state or trainer.ckpt_path or trainer.global_step)
        port = open_loop(
            trainer.strategy.model,
            list(trainer.optimizers),
            self._options,
            run=self._run,
            scheduler=LoopScheduler([config.scheduler for config in trainer.lr_scheduler_configs]),
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            goes_on=goes_on,
            settings=_settings(trainer),
            callbacks=trainer.callbacks,
        )
        self.guard = guard = Guard.around(port)
        try:
            self._ranks = Collective(self._options.get("telemetry", Telemetry()).timeout_s)
            self._loop = loop = LightningLoop(trainer, guard, partial(self._before_data, trainer), clips=clip is None)
        except BaseException:
            guard.close()
            raise
        loop.join(self._patches)
        guard.watch.note("framework", step=guard.number, **_framework(trainer))
        if self._state:
            self._go_on()

    def on_before_zero_grad(self, *_: Any) -> None:
        """A step begins."""
        if self._loop is not None:
            self._loop.zeroed()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """The update is done, the schedules are stepped."""
        if self._loop is not None:
            self._loop.batch_ended()

    def on_validation_start(self, *_: Any) -> None:
        """Pause: validation time is not part of a step."""
        if self.guard is not None and self._loop is not None:
            self._pause.enter_context(self.guard.paused())

    def on_validation_end(self, *_: Any) -> None:
        """Back to training."""
        self._pause.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The fit ends with an error."""
        if isinstance(exception, RunHalted):
            self._end(trainer, reason="halted", error=f"{type(exception).__name__}: {exception}")
        elif isinstance(exception, KeyboardInterrupt):
            self._end(trainer, reason="interrupted", by="SIGINT")
        elif type(exception).__name__ == "SIGTERMException":
            self._end(trainer, reason="interrupted", by="SIGTERM")
        else:
            self._end(trainer, reason="failed", error=f"{type(exception).__name__}: {exception}")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """The fit ended well."""
        self._end(trainer, reason="finished")

    def state_dict(self) -> dict[str, Any]:
        """The state for Lightning's checkpoints. Call it on all ranks, as Lightning does."""
        if self._loop is None:
            return dict(self._state)
        assert self.guard is not None
        assert self._ranks is not None
        of_torch, of_host = rng_now()
        mine: dict[str, Any] = {"data": self.guard.loop.data.position(), "torch": of_torch, "host": of_host}
        return {
            "guard": json.dumps(self.guard.state_dict()),
            "ranks": [
                {"data": json.dumps(each["data"]), "torch": dict(each["torch"]), "host": json.dumps(each["host"])}
                for each in self._ranks.gather(mine)
            ],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state of a checkpoint until the fit starts. Lightning restores it for a validation, too."""
        if not self._is_fit:
            return
        self._state, self._is_loaded = state_dict, True
        if self._loop is not None:  # some strategies load late
            self._go_on()

    # The parts of the hooks

    def _go_on(self) -> None:
        """Go on from the saved state: detectors, counters, the position in the data, and its random state."""
        guard, loop, ranks = self.guard, self._loop, self._ranks
        assert guard is not None
        assert loop is not None
        assert ranks is not None
        guard.loop.take_over_ledger()
        guard.load_state_dict(json.loads(self._state["guard"]))
        of_ranks = self._state["ranks"]
        is_same_world = len(of_ranks) == ranks.world
        if is_same_world:
            mine = of_ranks[ranks.rank]
            position = json.loads(mine["data"])
            if self._is_loaded:
                guard.loop.data.go_to(position)
                loop.before_first = partial(restore_rng, (mine["torch"], json.loads(mine["host"])))
            elif position:  # another fit in this process: Lightning restarts its loader, even the same one
                guard.loop.data.count_from(position["next"], epoch=position["epoch"]["number"] + 1)
        guard.watch.note("resumed", step=guard.number, with_place_in_data=is_same_world, ranks_then=len(of_ranks))
        self._state, self._is_loaded = {}, False

    def _before_data(self, trainer: Any, loader: Any) -> None:
        """Prepare for the first step: the trainer's checkpoint is restored by now."""
        guard = self.guard
        assert guard is not None
        per_step = len(trainer.optimizers)
        if not guard.number and trainer.global_step:  # from a checkpoint without a guard
            guard.loop.take_over_ledger()
            guard.loop.resume_at(trainer.global_step // per_step)
        told = advice(partial(_asked, trainer, loader, self._options))
        told.note(guard.watch, step=guard.number)
        self.advice = told.advised
        if trainer.is_global_zero and self._warns:
            told.warn(stacklevel=4)

    def _end(self, trainer: Any, **told: Any) -> None:
        guard, loop = self.guard, self._loop
        self._patches.undo()
        self._pause.close()
        if guard is None or loop is None:
            return
        # a later fit in this process goes on from there; failed ranks cannot take part in a gather
        is_finished = told["reason"] == "finished"
        self._state = self.state_dict() | {"updates": trainer.global_step} if is_finished else {}
        self._loop = self._ranks = None
        loop.leave()
        try:
            with suppress(SealegsError):  # the disk may be what failed: Lightning raises that itself
                if is_finished:
                    guard.loop.end(skips=guard.watch.skips)
                else:
                    guard.loop.finish()
                    guard.watch.note("end", step=guard.number, skips=guard.watch.skips, **told)
        finally:
            guard.close()


def _homes() -> tuple[str, ...]:
    """The Lightning packages that are imported; if none is, the first that is installed."""
    if imported := tuple(home for home in HOMES if sys.modules.get(home) is not None):
        return imported
    for home in HOMES:
        with suppress(ModuleNotFoundError):
            import_module(home)
            return (home,)
    raise MissingExtra("sealegs.integrations.lightning", "Lightning", "lightning")


@cache
def _made_for(cls: Any, homes: tuple[str, ...]) -> Any:
    """A subclass that is a ``Callback`` of each package: Lightning checks the class of a single callback."""
    callbacks = tuple(import_module(home).Callback for home in homes)
    return type(cls.__name__, (cls, *callbacks), {"__module__": cls.__module__})


def _asked(trainer: Any, loader: Any, options: LoopOptions) -> Advised:
    clip = options.get("clip")
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs if config.interval == "step"]
    precision = str(trainer.precision)
    known: dict[str, Any] = {"dtype": PRECISIONS.get(precision.split("-")[0])}
    if trainer.lightning_module.automatic_optimization or clip is not None:
        known["clip"] = float(clip or trainer.gradient_clip_val or 0.0)
        if trainer.gradient_clip_val and trainer.gradient_clip_algorithm is not None:
            known["clip_by"] = str(trainer.gradient_clip_algorithm)
    return preflight(
        trainer.lightning_module,
        list(trainer.optimizers),
        schedulers[0] if schedulers else None,
        loader=loader,
        scaler=getattr(trainer.precision_plugin, "scaler", None),
        steps=_steps(trainer),
        plan=shadows_in_no_state(trainer.lightning_module, trainer.optimizers, options, trainer.callbacks),
        **{name: value for name, value in known.items() if value is not None},
    )


def _steps(trainer: Any) -> int | None:
    """Steps of the whole run, if they are known."""
    if trainer.max_steps > 0:
        return int(trainer.max_steps)
    batches = max(trainer.fit_loop._combined_loader.limits)
    if batches == float("inf") or not trainer.max_epochs or trainer.max_epochs < 0:
        return None
    return int(trainer.max_epochs * -(-batches // trainer.accumulate_grad_batches))


def _settings(trainer: Any) -> dict[str, Any]:
    return {"lightning": {name: value for name, value in _framework(trainer).items() if value is not None}}


def _framework(trainer: Any) -> dict[str, Any]:
    return {
        "name": type(trainer).__module__.partition(".")[0],
        "version": _version(trainer),
        "precision": str(trainer.precision),
        "accumulation": trainer.accumulate_grad_batches,
        "clip": trainer.gradient_clip_val,
        "strategy": type(trainer.strategy).__name__,
        "automatic_optimization": trainer.lightning_module.automatic_optimization,
        "max_steps": trainer.max_steps,
        "max_epochs": trainer.max_epochs,
    }


def _version(trainer: Any) -> str:
    return str(import_module(type(trainer).__module__.partition(".")[0]).__version__)
