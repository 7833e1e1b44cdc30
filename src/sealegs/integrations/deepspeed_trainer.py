"""A guard in the DeepSpeed engine that a Hugging Face Trainer makes when it begins to train.

from sealegs.integrations import deepspeed_trainer

deepspeed_trainer.attach(trainer, run="experiments/a1")
trainer.train()
"""

from pathlib import Path
from typing import Any, Unpack

from sealegs.errors import ConfigError
from sealegs.integrations.deepspeed import OWN, EngineGuard
from sealegs.integrations.loop_options import LoopOptions, guard_options, refuse_options
from sealegs.integrations.patches import Patches

OF_TRAINER = {**OWN, "resume": "call trainer.train(resume_from_checkpoint=...)", "skip": "the Trainer reads the data"}
"""Options of a guard that the Trainer or DeepSpeed own, and how to set them there."""


def attach(trainer: Any, *, run: str | Path | None, **options: Unpack[LoopOptions]) -> "AttachedEngine":
    """Let a guard decide about every update of the engine of a Trainer; ``options`` are those of ``sealegs.Guard``.

    Steps are skipped and the run is halted. It is never taken back: the Trainer reads the data, and counts.
    """
    return AttachedEngine(trainer, run, options)


class AttachedEngine:
    """A guard in the engine of a Trainer, for each of its trainings."""

    def __init__(self, trainer: Any, run: str | Path | None, options: LoopOptions) -> None:
        if not getattr(trainer, "is_deepspeed_enabled", False):
            raise ConfigError(
                f"trainer={type(trainer).__name__}: give a transformers.Trainer whose arguments have deepspeed=; "
                "sealegs.integrations.hf.attach guards others"
            )
        refuse_options(options, OF_TRAINER)
        if guard_options(options).has_rungs:
            raise ConfigError(
                f"playbook={guard_options(options).playbook!r}: under DeepSpeed the Trainer cannot be taken back; "
                "leave it out, or give Playbook.observe()"
            )
        self.guard: EngineGuard | None = None
        """The guard of the present training, or of the last one."""
        self._trainer = trainer
        self._run = run
        self._options = options
        self._patches = Patches()
        self._patches.put(trainer, "_prepare_for_training", self._prepare)
        self._patches.put(trainer, "_inner_training_loop", self._inner_loop)

    def detach(self) -> None:
        """Leave the Trainer as it was."""
        self._patches.undo()

    def _prepare(self, prepare: Any) -> Any:
        def prepared(max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
            found = prepare(max_steps, train_dataloader, resume_from_checkpoint)
            options: Any = {**self._options, "resume": resume_from_checkpoint is not None}
            callbacks = self._trainer.callback_handler.callbacks
            self.guard = EngineGuard(self._trainer.model_wrapped, self._run, options, callbacks)
            if resume_from_checkpoint is not None:
                self.guard.resume_from(_newest_in(Path(resume_from_checkpoint)))
            return found

        return prepared

    def _inner_loop(self, run: Any) -> Any:
        def inner_training_loop(*args: Any, **kwargs: Any) -> Any:
            try:
                found = run(*args, **kwargs)
                if self.guard is not None:
                    self.guard.loop.end(skips=self.guard.watch.skips)
            except BaseException as error:
                if self.guard is not None:
                    self.guard.loop.fail(error)
                raise
            finally:
                if self.guard is not None:
                    self.guard.close()
            return found

        return inner_training_loop


def _newest_in(checkpoint: Path) -> Path:
    """The part of a Trainer's checkpoint that DeepSpeed has written."""
    latest = checkpoint / "latest"
    if not latest.is_file():
        raise ConfigError(f"{checkpoint}: DeepSpeed has not written it, there is no file {latest.name}")
    return checkpoint / latest.read_text().strip()
