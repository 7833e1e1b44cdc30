"""The guard in a loop of Accelerate's that does not know of it: its calls are all that there is to see.

``accelerator.backward`` gives the loss, ``accelerator.clip_grad_norm_`` the gradients while they are whole, and
``optimizer.step`` ends the step. The loop keeps its schedule, its ``zero_grad`` and its data: nothing is gone back in.
"""

import atexit
import os
import sys
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from sealegs.errors import ConfigError, RankMissing, RunHalted
from sealegs.integrations.accelerate import AcceleratedGuard, tell_skipped
from sealegs.integrations.launch.loop import folder_of, options_of
from sealegs.integrations.launch.request import Request, report
from sealegs.integrations.patches import Patches

WHAT = "a loop of Accelerate"
_LOOPS: "WeakKeyDictionary[Any, UnchangedLoop]" = WeakKeyDictionary()


def before_backward(accelerator: Any, loss: Any) -> None:
    """A loss is about to be backpropagated; the first one of an accelerator makes its guard."""
    loop = _LOOPS.get(accelerator)
    if loop is None:
        loop = _LOOPS[accelerator] = UnchangedLoop(accelerator)
    loop.take(loss)


def ended(accelerator: Any) -> None:
    """The loop says that it is over."""
    if (loop := _LOOPS.get(accelerator)) is not None:
        loop.end()


class UnchangedLoop:
    """A guard behind the calls of one accelerator; without one, where none can be made."""

    def __init__(self, accelerator: Any) -> None:
        self._guard: AcceleratedGuard | None = None
        self._patches = Patches()
        self._accelerator = accelerator
        self._loss: Tensor | None = None
        """What was backpropagated since the optimizer was called last."""
        self._was_updated = False
        self._process = os.getpid()
        try:
            self._join(Request.here())
        except Exception as error:
            report("refused", WHAT, error)

    def _join(self, asked: Request) -> None:
        accelerator = self._accelerator
        if "unscale_gradients" in vars(accelerator):  # an attach of the program's own
            report("own", WHAT)
            return
        model, optimizer = _trained(accelerator)
        options = options_of(asked)
        if (playbook := options.pop("playbook", None)) is not None and playbook.rungs:
            why = "nobody tells an unchanged loop where to go on, so bad steps are only skipped"
            report("refused", f"{WHAT}: rollback", why)
        # the loop steps its schedule itself
        folder = folder_of(asked, goes_on=False)
        self._guard = guard = AcceleratedGuard(accelerator, model, optimizer, run=folder, scheduler=None, **options)
        guard.loop.set_optimizer_call(lambda _, update: update())  # the loop zeroes the gradients itself
        optimizer.optimizer.register_step_post_hook(self._note_update)
        self._patches.put(optimizer, "step", self._step)
        self._optimizer = optimizer
        atexit.register(self.end)
        report("guarded", WHAT, folder)

    def _note_update(self, *_: Any) -> None:
        self._was_updated = True

    def take(self, loss: Any) -> None:
        """Add a loss to those of this call of the optimizer."""
        if self._guard is not None and isinstance(loss, Tensor):
            share = loss.detach()
            self._loss = share.clone() if self._loss is None else self._loss + share

    def _step(self, step: Any) -> Any:
        def guarded_step(closure: Any = None) -> Any:
            guard, loss, self._loss = self._guard, self._loss, None
            if guard is None or loss is None or closure is not None:
                return step(closure)
            number, self._was_updated = guard.number, False
            try:
                guard.step(loss)
                guard.loop.finish_step()
            except (RunHalted, RankMissing):
                raise
            except Exception as error:
                report("refused", f"{WHAT} from step {number} on", error)
                self._let_go(error)
                return step() if guard.number == number else None
            if self._accelerator.sync_gradients:
                # as Accelerate tells its schedules, which wait while the loss scale is searched for
                has_overflown = self._accelerator.scaler is not None and not self._was_updated
                tell_skipped([self._optimizer], has_overflown)
            return None

        return guarded_step

    def _let_go(self, error: BaseException) -> None:
        guard, self._guard = self._guard, None
        self._patches.undo()
        if guard is not None:
            with suppress(Exception):
                guard.loop.fail(error)
                guard.close()

    def end(self) -> None:
        """The loop is over, or the process is; how, the record says."""
        if os.getpid() != self._process:  # a fork has this, too
            return
        if (error := getattr(sys, "last_value", None)) is not None:
            self._let_go(error)
            return
        guard, self._guard = self._guard, None
        self._patches.undo()
        if guard is not None:
            with suppress(Exception):
                guard.loop.end(skips=guard.watch.skips)
                guard.close()


def _trained(accelerator: Any) -> tuple[Any, Any]:
    """The model and the optimizer of a loop that has one of each."""
    optimizers = accelerator._optimizers
    if len(optimizers) != 1:
        raise ConfigError(
            f"{len(optimizers)} prepared optimizers; a guard decides about one by its loss: call accelerate.attach in "
            "the program for each"
        )
    held = {id(parameter) for group in optimizers[0].param_groups for parameter in group["params"]}
    models = [model for model in accelerator._models if not held.isdisjoint(map(id, model.parameters()))]
    if len(models) != 1:
        raise ConfigError(f"{len(models)} prepared models in one optimizer; call accelerate.attach in the program")
    return models[0], optimizers[0]
