"""The guard in a Hugging Face Trainer of a program that does not know of it: for one call of ``trainer.train()``."""

from contextlib import suppress
from typing import Any

from sealegs.integrations.accelerate_loader import has_places
from sealegs.integrations.hf import Attached
from sealegs.integrations.launch.loop import folder_of, options_of
from sealegs.integrations.launch.request import Request, report

WHAT = "transformers.Trainer"


def guarded(trainer: Any) -> "LaunchedTrainer | None":
    """Attach a guard, unless the program has."""
    if hasattr(trainer, "_sealegs"):
        report("own", WHAT)
        return None
    return LaunchedTrainer(trainer, Request.here())


class LaunchedTrainer(Attached):
    """A guard that lets go of the Trainer where it cannot join its loop."""

    def __init__(self, trainer: Any, asked: Request) -> None:
        super().__init__(trainer, asked.folder, options_of(asked))
        self._asked = asked
        self._is_answered = False
        """Whether the command has been told what became of this training."""

    def _begin(self, model: Any, loader: Any, checkpoint: str | None) -> None:
        self._is_answered = True
        playbook = self._options.get("playbook")
        try:
            self._run = folder = folder_of(self._asked, goes_on=checkpoint is not None)
            if playbook is not None and playbook.rungs and not has_places(loader):
                del self._options["playbook"]
                report("refused", f"{WHAT}: rollback", "its data cannot be gone back in, so bad steps are only skipped")
            super()._begin(model, loader, checkpoint)
        except Exception as error:
            with suppress(Exception):
                self._end()
            self.guard = None
            report("refused", WHAT, error)
        else:
            report("guarded", WHAT, folder)

    def was_joined(self) -> None:
        """Training is over: say so, if the loop never came to where a guard begins."""
        if not self._is_answered:
            report("refused", WHAT, f"{type(self._trainer).__name__} has a loop of its own")
