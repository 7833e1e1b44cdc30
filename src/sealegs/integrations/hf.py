"""Attaches a guard to the loop of a Hugging Face Trainer.

from sealegs.integrations import hf

hf.attach(trainer, run="experiments/a1", playbook=sealegs.Playbook.standard())
trainer.train()
"""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from torch.optim.lr_scheduler import ReduceLROnPlateau

from sealegs.diagnosis.kind import kind_of_trainer
from sealegs.errors import ConfigError, MissingExtra, SourceError

try:
    import transformers
    from transformers import PreTrainedModel, Trainer

    from sealegs.integrations.accelerate import refuse_foreign
    from sealegs.integrations.hf_loop import STATE, TrainerLoop, TrainerSchedule
except ModuleNotFoundError as error:
    if error.name not in ("transformers", "accelerate", "torch"):
        raise
    raise MissingExtra("sealegs.integrations.hf", "transformers with accelerate", "huggingface") from None
except MissingExtra:  # a package that transformers' Trainer needs
    raise MissingExtra("sealegs.integrations.hf", "transformers with accelerate", "huggingface") from None

from sealegs.guard import Guard
from sealegs.guard_options import LoopScheduler
from sealegs.integrations.loop_options import (
    LoopOptions,
    guard_options,
    open_loop,
    refuse_options,
    shadows_in_no_state,
)
from sealegs.integrations.patches import Patches
from sealegs.integrations.preflight_advice import advice
from sealegs.preflight_check.config_readers import of_model_config, of_training_arguments
from sealegs.preflight_check.live import preflight
from sealegs.preflight_check.plan import plan_from
from sealegs.record.files import whole_file, writing
from sealegs.report.commands.preflight import Advised

OWN = {
    "model": "the Trainer has it",
    "optimizer": "the Trainer makes it: set optim, or give it optimizers=",
    "scheduler": "the Trainer makes it: set lr_scheduler_type",
    "scaler": "it is the accelerator's: set fp16",
    "clip": "the Trainer clips: set max_grad_norm",
    "resume": "call trainer.train(resume_from_checkpoint=...)",
}
"""Options of a guard that the Trainer owns, and how to set them there."""
NEEDED = (
    "_inner_training_loop",
    "_maybe_log_save_evaluate",
    "_prepare_for_training",
    "_run_epoch",
    "get_batch_samples",
    "training_step",
)
"""Methods of the Trainer that the guard replaces."""


def attach(trainer: Trainer, *, run: str | Path | None, **options: Unpack[LoopOptions]) -> "Attached":
    """Let a guard decide about every update of a Trainer; ``options`` are those of ``sealegs.Guard``.

    Until ``trainer.train()`` this only checks the settings, and may warn. ``run`` is the folder to record into. A run
    that is resumed with ``resume_from_checkpoint`` goes on in its folder.
    """
    attached = Attached(trainer, run, options)
    attached.warn(stacklevel=2)
    return attached


class Attached:
    """A guard in a Trainer's loop, until ``detach``."""

    def __init__(self, trainer: Trainer, run: str | Path | None, options: LoopOptions) -> None:
        _refuse(trainer, options)
        self.guard: Guard | None = None
        """The guard of the present training, or of the last one."""
        self._trainer = trainer
        self._run = run
        self._options = options
        self._loop: TrainerLoop | None = None
        self._entry = Patches()
        """Patches that stay until ``detach``."""
        self._patches = Patches()
        """Patches of one training."""
        self._advice = advice(partial(_asked, trainer, options))
        self.advice = self._advice.advised
        """The report of the pre-flight check; None if the check failed."""
        self._entry.put(trainer, "_prepare_for_training", self._prepare)
        self._entry.put(trainer, "_inner_training_loop", self._inner_loop)
        trainer._sealegs = self

    def warn(self, *, stacklevel: int) -> None:
        """Say once what the pre-flight check has found."""
        if self._trainer.is_world_process_zero():
            self._advice.warn(stacklevel=stacklevel + 1)

    def detach(self) -> None:
        """Leave the Trainer as it was."""
        if self._loop is not None:
            self._end()
        self._entry.undo()
        vars(self._trainer).pop("_sealegs", None)

    def _prepare(self, prepare: Any) -> Any:
        def prepared(max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
            model, loader = prepare(max_steps, train_dataloader, resume_from_checkpoint)
            self._begin(model, loader, resume_from_checkpoint)
            return model, loader

        return prepared

    def _inner_loop(self, run: Any) -> Any:
        def inner_training_loop(*args: Any, **kwargs: Any) -> Any:
            try:
                found = run(*args, **kwargs)
                if (guard := self.guard) is not None:
                    guard.loop.end(skips=guard.watch.skips)
            except BaseException as error:
                if self.guard is not None:
                    self.guard.loop.fail(error)
                raise
            finally:
                self._end()
            return found

        return inner_training_loop

    def _begin(self, model: Any, loader: Any, checkpoint: str | None) -> None:
        trainer = self._trainer
        if trainer.hp_search_backend is not None:
            raise ConfigError("hyperparameter_search: a guard records one run; attach one to a Trainer of each trial")
        schedule = trainer.lr_scheduler
        waits_for_metric = isinstance(schedule, ReduceLROnPlateau) or type(schedule).__name__ == "GreedyLR"
        port = open_loop(
            model,
            trainer.optimizer.optimizer,
            self._options,
            run=self._run,
            scheduler=LoopScheduler(schedule) if waits_for_metric else schedule,
            scaler=trainer.accelerator.scaler,
            goes_on=checkpoint is not None,
            settings=_settings(trainer),
            callbacks=trainer.callback_handler.callbacks,
        )
        port.expect_logs()
        if kind_of_trainer(_class_of(trainer)) == "policy-gradient":
            port.trains_policy(f"its trainer is a {_class_of(trainer)}")
        self.guard = guard = Guard.around(port)
        if not waits_for_metric:
            self._patches.put(trainer, "lr_scheduler", TrainerSchedule)
        loop = TrainerLoop(trainer, guard, loader, self._save)
        if checkpoint is not None:
            self._resume(guard, loop, Path(checkpoint))
        self._note(guard)
        self._loop = loop
        loop.join(self._patches)
        trainer.add_callback(loop)

    def _end(self) -> None:
        if self._loop is not None:
            self._trainer.remove_callback(self._loop)
            self._loop.leave()
            self._loop = None
        self._patches.undo()
        if self.guard is not None:
            self.guard.close()

    def _note(self, guard: Guard) -> None:
        accumulated = self._trainer.args.gradient_accumulation_steps
        guard.watch.note(
            "framework",
            step=guard.number,
            name="transformers.Trainer",
            version=transformers.__version__,
            accumulation=accumulated,
            clip=self._trainer.args.max_grad_norm or None,
        )
        self._advice.note(guard.watch, step=guard.number)

    # Checkpoints of the Trainer

    def _save(self) -> None:
        """Save the guard's state beside what the Trainer has just written."""
        trainer, guard = self._trainer, self.guard
        assert guard is not None
        assert self._loop is not None
        state = {"guard": guard.state_dict(), "data": self._loop.place(), "counted": self._loop.counted}
        if not trainer.args.should_save:
            return
        path = Path(trainer._get_output_dir(None)) / f"checkpoint-{trainer.state.global_step}" / STATE
        with writing(path), whole_file(path) as file:
            file.write(json.dumps(state).encode())

    def _resume(self, guard: Guard, loop: TrainerLoop, checkpoint: Path) -> None:
        step = self._trainer.state.global_step
        guard.loop.take_over_ledger()
        state = _read(checkpoint / STATE)
        guard.loop.resume_at(step, None if state is None else state["guard"])
        told = state or {}
        loop.resume_at(step, told.get("data"), told.get("counted"))
        guard.watch.note("resumed", step=step, checkpoint=checkpoint.name, with_guard=state is not None)


def _refuse(trainer: Any, options: LoopOptions) -> None:
    """Refuse what cannot be guarded, before anything is changed."""
    if not isinstance(trainer, Trainer):
        raise ConfigError(f"trainer={type(trainer).__name__}: give a transformers.Trainer")
    if lacking := [name for name in NEEDED if not hasattr(trainer, name)]:
        raise ConfigError(
            f"transformers {transformers.__version__}: its Trainer has no {lacking[0]}; use one that "
            "`pip install 'sealegs[huggingface]'` brings"
        )
    if hasattr(trainer, "_sealegs"):
        raise ConfigError("trainer: a guard is attached to it already; call detach() on what attach gave")
    refuse_options(options, OWN)
    guard_options(options)
    refuse_foreign(trainer.accelerator)
    if trainer.args.auto_find_batch_size:
        raise ConfigError("auto_find_batch_size=True: it begins the run anew, over and over; find the size first")
    if "lomo" in str(trainer.args.optim).lower():
        raise ConfigError(
            f"optim={trainer.args.optim}: it updates during the backward pass, which nobody can judge first"
        )
    if trainer.args.n_gpu > 1:
        raise ConfigError(f"{trainer.args.n_gpu} GPUs in one process (DataParallel): start it with torchrun")


def _asked(trainer: Any, options: LoopOptions) -> Advised:
    """The pre-flight check of the settings."""
    values = trainer.args.to_dict() | {"max_steps": _steps(trainer)}
    reads = [of_training_arguments(values, "TrainingArguments")]
    if isinstance(trainer.model, PreTrainedModel):
        reads.append(of_model_config(trainer.model.config.to_dict(), "the model's config"))
    optimizers = [] if trainer.optimizer is None else [trainer.optimizer]
    shadows = shadows_in_no_state(trainer.model, optimizers, options, trainer.callback_handler.callbacks)
    # the guard records every step, whatever the Trainer logs
    return preflight(trainer.model, trainer.optimizer, plan=[*reads, shadows, plan_from({"log_steps": 1})])


def _steps(trainer: Any) -> int | None:
    """Steps of the whole run, if they are known before it begins."""
    args = trainer.args
    if args.max_steps > 0:
        return int(args.max_steps)
    try:
        batches = math.ceil(len(trainer.train_dataset) / (args.train_batch_size * args.world_size))
    except TypeError:
        return None
    steps: int = max(math.ceil(batches / args.gradient_accumulation_steps), 1)
    return math.ceil(float(args.num_train_epochs) * steps)


def _settings(trainer: Any) -> dict[str, Any]:
    """The settings of the run. The Trainer itself leaves out their secrets."""
    settings = {"trainer": _class_of(trainer), "training_args": trainer.args.to_sanitized_dict()}
    return json.loads(json.dumps(settings, default=str))  # type: ignore[no-any-return]


def _class_of(trainer: Any) -> str:
    """The trainer's class; of one that is derived from a known trainer, that one, since its name says what it does."""
    classes = [each.__name__ for each in type(trainer).__mro__]
    return next(filter(kind_of_trainer, classes), classes[0])


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
