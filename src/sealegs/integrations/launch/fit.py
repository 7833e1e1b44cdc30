"""The guard in a Lightning Trainer of a program that does not know of it."""

from contextlib import suppress
from functools import partial
from typing import Any

from sealegs.data.loaders import cannot_reposition
from sealegs.errors import ConfigError
from sealegs.integrations.launch.loop import folder_of, options_of
from sealegs.integrations.launch.request import Request, report
from sealegs.integrations.lightning import Guarded

WHAT = "Lightning's Trainer"


def guard(trainer: Any) -> None:
    """Attach a guard, unless the program or an earlier fit has."""
    callbacks = [callback for callback in trainer.callbacks if isinstance(callback, Guarded)]
    if not callbacks:
        asked = Request.here()
        trainer.callbacks.insert(0, LaunchedFit(run=asked.folder, **options_of(asked)))
    elif not isinstance(callbacks[0], LaunchedFit):
        report("own", WHAT)


class LaunchedFit(Guarded):
    """A guard that lets go of the fit where it cannot join it."""

    _has_folder = False
    _warns = False

    def __reduce__(self) -> Any:
        return partial(LaunchedFit, run=self._run, **self._options), ()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Make the guard, or none."""
        try:
            if not pl_module.automatic_optimization:
                raise ConfigError("manual optimization; call lightning.attach in the program, which says what it needs")
            if not self._has_folder:
                goes_on = bool(trainer.ckpt_path or trainer.global_step)
                self._run, self._has_folder = folder_of(Request.here(), goes_on=goes_on), True
            super().on_fit_start(trainer, pl_module)
            self._patches.put(trainer.fit_loop, "_load_combined_loader_states", partial(self._look_first, trainer))
        except Exception as error:
            self._let_go(error)
        else:
            report("guarded", WHAT, self._run)

    def _look_first(self, trainer: Any, load: Any) -> Any:
        def load_or_let_go() -> None:
            loaders = trainer.fit_loop._combined_loader.flattened
            several = "several train loaders at once, which cannot be gone back in" if len(loaders) > 1 else None
            why_not = several or cannot_reposition(loaders[0])
            if self.guard is not None and self.guard.loop.goes_back and why_not:
                self._let_go(f"{why_not} (--playbook needs that; --act does not)")
                trainer.fit_loop._load_combined_loader_states()
            else:
                load()

        return load_or_let_go

    def _let_go(self, why: object) -> None:
        report("refused", WHAT, why)
        self._patches.undo()
        with suppress(Exception):
            self._pause.close()
            if self._loop is not None:
                self._loop.leave()
            if self.guard is not None:
                self.guard.close()
        self.guard = self._loop = self._ranks = None
