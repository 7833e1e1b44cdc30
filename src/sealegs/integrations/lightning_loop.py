"""Lightning's own loop, in which a guard decides about every update.

The guard joins at four places, on the objects of this trainer alone and until the fit is over:

- the strategy's ``backward`` gives the loss of a step, before anyone scales it;
- the precision plugin's ``optimizer_step`` makes the update. The closure has run and the gradients are complete: the
  guard measures, Lightning's hooks and clipping follow, the guard decides, and the optimizer is called or not;
- its ``clip_gradients`` clips in manual optimization: the guard measures before it;
- the train loader passes its batches through ``guard.batches``.

After Lightning's own step, when its schedules have been stepped, the guard finishes the step. It may go back, and then
Lightning's counters follow.
"""

import inspect
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sealegs.data.stateful import NOTHING
from sealegs.errors import ConfigError
from sealegs.guard import Guard
from sealegs.integrations.lightning_progress import Progress
from sealegs.integrations.patches import Patches
from sealegs.recovery.adjustments import RecentSchedules

PROBE = -1
"""The step number under which schedules are kept during a probe."""


class LightningLoop:
    """A trainer's loop with a guard in it."""

    def __init__(self, trainer: Any, guard: Guard, begin: Callable[[Any], None], *, clips: bool) -> None:
        """``begin`` gets the loader before the first batch, or None if there are several. ``clips``: Lightning or the
        module clips, and not the guard."""
        self._trainer = trainer
        self._guard = guard
        self._begin: Callable[[Any], None] | None = begin
        self._clips = clips
        self._progress = Progress(trainer)
        self._optimizers: list[Optimizer] = list(trainer.optimizers)
        self._schedules = RecentSchedules(
            self._optimizers, [config.scheduler for config in trainer.lr_scheduler_configs]
        )
        self._loss: Tensor | None = None
        """The loss that was backpropagated since the last decision."""
        self._is_measured = False
        self._stepping: Optimizer | None = None
        self._others: dict[Optimizer, Callable[[], None] | None] = {}
        """Optimizers of the last decision that have not been called since, each with its update if it has one."""
        self._steps = self._calls = 0
        """Steps and optimizer calls in this batch."""
        self._number = 0
        """The number of the next step, as far as Lightning's counters know."""
        self._expected: int | None = None
        """The number of the next batch if none is left out; None before the first."""
        self._epoch = 0
        """The epoch of the data in which Lightning's counters are."""
        self._is_at_end = False
        """Whether the run has gone back to the end of an epoch, and Lightning does not know yet."""
        self.before_first: Callable[[], None] | None = None
        """Called when Lightning requests the first batch."""
        self._unused: Any = None
        """The loader, if it was started and gave no batch since."""

    def join(self, patches: Patches) -> None:
        """Replace the methods."""
        trainer = self._trainer
        patches.put(trainer.strategy, "backward", self._backward)
        patches.put(trainer.precision_plugin, "optimizer_step", self._optimizer_step)
        patches.put(trainer.precision_plugin, "clip_gradients", self._clip_gradients)
        patches.put(trainer.fit_loop, "_load_combined_loader_states", self._load_loader_states)
        patches.put(trainer.fit_loop.epoch_loop, "reset", self._reset)
        if not trainer.lightning_module.automatic_optimization:  # otherwise Lightning calls the hook
            for optimizer in trainer.strategy._lightning_optimizers:
                patches.put(optimizer, "zero_grad", self._zero_grad)
        self._guard.loop.set_optimizer_call(self._call)

    def leave(self) -> None:
        """Give the loaders back; the caller undoes the patches."""
        combined = self._trainer.fit_loop._combined_loader
        if combined is not None:
            combined.flattened = [
                each.loader if isinstance(each, GuardedLoader) else each for each in combined.flattened
            ]

    # A step

    def _backward(self, backward: Any) -> Any:
        def backward_and_note(closure_loss: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._others:
                raise ConfigError(
                    f"{len(self._optimizers)} optimizers with losses of their own: a guard decides about all of them "
                    "by one loss; step them all after one manual_backward, or train without the guard"
                )
            loss = closure_loss.detach()
            self._loss = loss.clone() if self._loss is None else self._loss + loss
            return backward(closure_loss, *args, **kwargs)

        return backward_and_note

    def _clip_gradients(self, clip: Any) -> Any:
        def measure_and_clip(optimizer: Any, clip_val: float = 0.0, *args: Any, **kwargs: Any) -> Any:
            if clip_val > 0 and not self._clips:
                raise ConfigError("clip=...: the module clips already, with self.clip_gradients; leave out one of them")
            if self._loss is not None:  # otherwise the gradients have been decided about already
                by = args[0] if args else kwargs.get("gradient_clip_algorithm", "norm")
                is_bound = clip_val > 0 and by == "norm" and len(self._optimizers) == 1
                self._measure(clip_val if is_bound else None)
            return clip(optimizer, clip_val, *args, **kwargs)

        return measure_and_clip

    def _optimizer_step(self, step: Any) -> Any:
        plugin = self._trainer.precision_plugin

        def guarded_step(optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
            if kwargs:
                raise ConfigError(f"optimizer.step({', '.join(kwargs)}=...): the guard calls it without arguments")
            result = closure()
            self._calls += 1
            if self._loss is None and optimizer in self._others:
                if (update := self._others.pop(optimizer)) is not None:
                    plugin._after_closure(model, optimizer)
                    update()
            elif self._loss is None and model.automatic_optimization:  # the training step gave None
                step(optimizer, model=model, closure=lambda: result)
            elif self._loss is None:
                raise ConfigError("optimizer.step(): no loss is known; call self.manual_backward(loss) before it")
            else:
                self._decide(optimizer, model, self._loss)
            return result

        return guarded_step

    def _decide(self, optimizer: Optimizer, model: Any, loss: Tensor) -> None:
        if self._steps and self._guard.loop.goes_back:
            raise ConfigError(
                "training_step: it makes several updates of one batch, and no state between them can be gone back to; "
                "give a playbook without rungs, or none"
            )
        self._steps += 1
        self._measure()
        self._trainer.precision_plugin._after_closure(model, optimizer)
        self._others = {each: None for each in self._optimizers if each is not optimizer}
        self._stepping = optimizer
        self._loss, self._is_measured = None, False
        self._guard.step(loss)

    def _measure(self, norm: float | None = None) -> None:
        """Measure before anyone clips. ``norm`` is the norm to which the gradients will be clipped, if known."""
        if self._clips and (norm is not None or not self._is_measured):
            self._is_measured = True
            self._guard.before_clipping(norm)

    def _call(self, optimizer: Optimizer, update: Callable[[], None]) -> None:
        if optimizer is self._stepping:
            update()
        else:
            self._others[optimizer] = update

    def _zero_grad(self, zero_grad: Any) -> Any:
        def zero_and_note(*args: Any, **kwargs: Any) -> Any:
            if len(self._optimizers) == 1:  # with several, the others may still hold gradients
                self.zeroed()
            return zero_grad(*args, **kwargs)

        return zero_and_note

    def zeroed(self) -> None:
        """Gradients were dropped: what was backpropagated before is no part of a step."""
        self._loss, self._is_measured = None, False

    def batch_ended(self) -> None:
        """Finish the step after Lightning's own, and let its counters follow."""
        steps, calls = self._steps, self._calls
        self._steps = self._calls = 0
        if self._guard.loop.data.is_probe:
            self._progress.uncount_updates(calls, steps=1)
            self._schedules.go_to(PROBE)
        else:
            self._number += steps
        self._guard.loop.finish_step()
        self._follow(is_batch_end=True)

    def _follow(self, *, is_batch_end: bool = False) -> None:
        """Follow the guard if it went back, by the playbook or by request.

        At the end of a batch Lightning may be about to validate.
        """
        back, self._number = self._number - self._guard.number, self._guard.number
        if not back:
            return
        for optimizer in self._optimizers:
            optimizer.zero_grad()  # gradients of weights that are gone
        self.zeroed()
        self._progress.uncount_updates(back * len(self._optimizers), steps=back)
        if self._expected is None:  # the positions of several loaders are not known
            return
        data = self._guard.loop.data
        position = data.position()
        following, there = position["next"], position["epoch"]
        if following == self._expected:  # steps were counted back, the data go on
            return
        is_end = bool(data.is_at_end(position))
        self._progress.go_back(
            batches=self._expected - following,
            epochs=self._epoch - there["number"],
            place=following - there["first"],
            is_end=is_end,
        )
        if is_batch_end:
            self._progress.skip_validation(not is_end)  # an epoch that ends once more validates once more
        self._is_at_end = is_end and not is_batch_end
        self._expected, self._epoch = following, there["number"]

    # The data

    def _load_loader_states(self, load: Any) -> Any:
        """Wrap the loaders at the moment when Lightning has made them, and has not started them."""

        def load_and_hand_out() -> None:
            load()
            combined = self._trainer.fit_loop._combined_loader
            loaders = combined.flattened
            if self._guard.loop.goes_back and len(loaders) > 1:
                raise ConfigError(
                    f"{len(loaders)} train loaders at once: they cannot be brought back to an earlier batch together; "
                    "give one, or a playbook without rungs"
                )
            if self._begin is not None:
                begin, self._begin = self._begin, None
                begin(loaders[0] if len(loaders) == 1 else None)
            if len(loaders) == 1:
                limit = combined.limits[0]
                self._guard.loop.data.by_epoch, self._guard.loop.data.limit = (
                    True,
                    None if limit == math.inf else int(limit),
                )
                combined.flattened = [GuardedLoader(loaders[0], self._hand_out)]
            elif self.before_first is not None:
                self.before_first()

        return load_and_hand_out

    def _hand_out(self, loader: Any) -> Iterator[Any]:
        # Lightning reads a batch ahead where a loader has no length; a guard has to know which batch is trained on
        self._trainer.fit_loop._data_fetcher.prefetch_batches = 0
        if self._unused is loader:  # a loader that Lightning has reloaded is started twice, and draws a seed each time
            iter(loader)
        self._unused = loader
        return self._batches(loader)

    def _batches(self, loader: Any) -> Iterator[Any]:
        self._unused = None
        if self.before_first is not None:
            before_first, self.before_first = self.before_first, None
            before_first()
        data = self._guard.loop.data
        if self._expected is None:
            self._expected, self._number = data.following, self._guard.number
        else:
            self._epoch += 1  # as Lightning has counted
        batches = self._guard.batches(loader)
        self._follow()
        while not self._is_at_end:
            batch = next(batches, NOTHING)
            if batch is NOTHING:
                break
            if data.is_probe:
                self._schedules.remember(PROBE)
                self._progress.repeat_batch()
            elif data.number is not None:
                if data.number != self._expected:
                    self._progress.move_batch(data.number - self._expected)
                self._expected, self._epoch = data.number + 1, data.epoch
            yield batch
            self._follow()
        self._expected = data.following
        self._progress.end_epoch(is_again=self._is_at_end)
        self._is_at_end = False

    def _reset(self, reset: Any) -> Any:
        """Suppress Lightning's warning that a plain loader does not resume: through a guard it does."""

        def reset_quietly() -> None:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
                reset()

        return reset_quietly


class GuardedLoader:
    """A train loader whose batches pass through a guard; otherwise the loader itself."""

    def __init__(self, loader: Any, hand_out: Callable[[Any], Iterator[Any]]) -> None:
        self.loader = loader
        self._hand_out = hand_out

    def __iter__(self) -> Iterator[Any]:
        return self._hand_out(self.loader)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not made yet, as when it is copied
            raise AttributeError(name)
        return getattr(self.loader, name)


def refuse(trainer: Any, module: Any) -> None:
    """Refuse what cannot be guarded, before anything is changed."""
    kinds = {each.__name__ for each in type(trainer.strategy).__mro__}
    if not kinds & {"SingleDeviceStrategy", "DDPStrategy"}:
        raise ConfigError(
            f"strategy={type(trainer.strategy).__name__}: a guard joins one device and DDP; use strategy='ddp'"
        )
    updates = type(trainer.precision_plugin).optimizer_step.__qualname__
    if updates not in ("Precision.optimizer_step", "MixedPrecision.optimizer_step"):
        raise ConfigError(
            f"precision={type(trainer.precision_plugin).__name__}: it updates in a way of its own ({updates})"
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise ConfigError("training_step(dataloader_iter): batches are taken past the guard; take (batch, batch_idx)")
    if any(type(optimizer).__name__ == "_MockOptimizer" for optimizer in trainer.optimizers) or not trainer.optimizers:
        raise ConfigError("configure_optimizers: it gives no optimizer, so there is nothing to guard")
    if len(trainer.optimizers) > 1 and getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise ConfigError(f"{len(trainer.optimizers)} optimizers with a loss scale: use precision='bf16-mixed'")
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in trainer.optimizers):
        raise ConfigError("optimizer=LBFGS: it evaluates the model several times a step, which nobody can judge first")
