"""Moves the counters of a Lightning trainer, so that its loop goes on where the guard has gone.

Lightning counts batches in the epoch and in all, updates, and epochs. It validates, steps schedules and ends by these
counts. They are private, so everything that knows their names is here.
"""

from typing import Any

NEEDED = (
    "_combined_loader",
    "_load_combined_loader_states",
    "epoch_loop._batches_that_stepped",
    "epoch_loop._skip_next_val",
    "epoch_loop.automatic_optimization.optim_progress.optimizer.step",
    "epoch_loop.batch_progress.is_last_batch",
    "epoch_loop.manual_optimization.optim_step_progress",
    "epoch_loop.reset",
    "epoch_progress",
)
"""Attributes that a fit loop must have for a guard to join it."""


class Progress:
    """A trainer's counters of batches, updates and epochs."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._fit = trainer.fit_loop
        self._loop = trainer.fit_loop.epoch_loop

    def move_batch(self, by: int) -> None:
        """Let the next batch be another one than the one after the last."""
        self._shift(by, by)

    def repeat_batch(self) -> None:
        """Do not count the next batch: it takes the place of the last one, and no validation comes after it."""
        self._shift(-1, -1)
        self.skip_validation()

    def skip_validation(self, is_skipped: bool = True) -> None:
        """Skip the validation at the end of the next batch, or of the present one."""
        self._loop._skip_next_val = is_skipped

    def go_back(self, *, batches: int, epochs: int, place: int, is_end: bool) -> None:
        """Go back to an earlier batch, perhaps of an earlier epoch, at ``place`` in it or at its end."""
        counted = self._loop.batch_progress.current.ready
        self._shift(place - counted if epochs else -batches, -batches)
        _add(self._fit.epoch_progress.current, -epochs)
        self._loop.batch_progress.is_last_batch = self._fit._data_fetcher.done = is_end

    def uncount_updates(self, count: int, *, steps: int) -> None:
        """Uncount ``count`` calls of an optimizer in ``steps`` steps."""
        if self._trainer.lightning_module.automatic_optimization:
            calls = self._loop.automatic_optimization.optim_progress.optimizer.step
        else:
            calls = self._loop.manual_optimization.optim_step_progress
        _add(calls.total, -count)
        self._loop._batches_that_stepped -= steps

    def end_epoch(self, *, is_again: bool) -> None:
        """End an epoch whose data ended before the count: do what Lightning does after the last batch of an epoch.

        ``is_again``: the run went back to where that batch had been trained on, and its schedules stepped.
        """
        progress, batches = self._loop.batch_progress, self._trainer.num_training_batches
        progress.is_last_batch = True
        validates = self._trainer.val_check_batch == float("inf")
        if batches != float("inf"):
            self._shift(batches - progress.current.ready, batches - progress.current.ready)
            validates = True
        if not is_again:
            self._loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        self.skip_validation(not validates)
        self._loop.on_advance_end(self._fit._data_fetcher)
        self._loop._batches_that_stepped -= 1  # on_advance_end has counted a step that no batch made

    def _shift(self, in_epoch: int, in_all: int) -> None:
        progress = self._loop.batch_progress
        _add(progress.current, in_epoch)
        _add(progress.total, in_all)
        self._fit._data_fetcher.fetched += in_epoch


def lacking(trainer: Any) -> str | None:
    """The first attribute that a guard needs and a trainer's loop lacks."""
    for path in NEEDED:
        found = trainer.fit_loop
        for name in path.split("."):
            if not hasattr(found, name):
                return f"fit_loop.{path}"
            found = getattr(found, name)
    return None


def _add(following: Any, count: int) -> None:
    """Add to all stages of a counter: ready, started, processed, completed."""
    for stage in vars(following):
        setattr(following, stage, getattr(following, stage) + count)
