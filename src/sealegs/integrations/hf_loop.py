"""The loop of a Hugging Face Trainer with a guard in it: one run of ``trainer.train()``.

The methods here replace the Trainer's own, and each still calls the one it replaces, except ``optimizer.step``. The
Trainer's counters follow the guard: ``global_step`` is the number of the step, also after a rollback, and the schedule
counts attempts::

    _run_epoch <-----------------------------------------------------------------+
        |                                                                        |  another epoch, if a rollback
        v                                                                        |  or left-out batches ended the
    get_batch_samples ---- no batches left for a step ----> on_epoch_end --------+  data before max_steps
     ^  |   a rollback that somebody asked for is seen here;
     |  |   a probe batch runs here, through decide and update, and is no step
     |  v
     |  training_step          each micro-batch of the step; after the last one: guard.loop.decide
     |  |
     |  v
     |  (the Trainer clips)
     |  |
     |  v
     |  optimizer.step         guard.loop.update, which ends with finish_step
     |  |
     |  +-- after a rollback:  global_step and the averages go back, later checkpoints are given up,
     |  |                      and this step is not logged, evaluated or saved
     |  v
     |  on_step_end
     |  |
     |  v
     +- _maybe_log_save_evaluate
"""

import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from transformers import TrainerCallback
from transformers.trainer_utils import has_length

from sealegs.guard import Guard
from sealegs.integrations.accelerate import is_skipped, tell_skipped, unscale_once
from sealegs.integrations.accelerate_loader import handed_out, has_places
from sealegs.integrations.patches import Patches
from sealegs.integrations.preflight_advice import advice
from sealegs.loop_port import RESERVED
from sealegs.preflight_check.live import of_batch
from sealegs.readers.names import live_names

STATE = "sealegs.json"
"""The file with the guard's state in a checkpoint of the Trainer."""
PACE = ("runtime", "samples_per_second", "steps_per_second")
OF_A_REWARD_MODEL = {
    "mean_reward": "trainer/mean_reward",
    "eval_mean_reward": "trainer/eval_mean_reward",
    "accuracy": "preference_accuracy",
    "margin": "reward_margin",
}
"""What a trainer of reward models means by names that others have, too: no policy is paid its reward."""
MEASURED = frozenset(
    (
        *("loss", "grad_norm", "learning_rate", "epoch", "eval_loss", "train_loss", "total_flos"),
        *(f"{mode}_{pace}" for mode in ("train", "eval") for pace in PACE),
    )
)
"""Names in a log of what the guard measures itself, and of summaries."""
KEPT = 512
"""Steps for which the Trainer's loss averages are kept, so that a rollback can restore them."""


class TrainerSchedule:
    """Replaces the Trainer's schedule, because the guard steps the schedule together with the optimizer.

    The Trainer reads the learning rate after an update, and means the rate of that update.
    """

    def __init__(self, schedule: Any) -> None:
        self.schedule = schedule
        self._used: list[Any] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.schedule, name)

    def step(self, *_: Any, **__: Any) -> None:
        """Do nothing: the guard has stepped the schedule."""

    def get_last_lr(self) -> list[Any]:
        """The rate of the present update, or of the next one between updates."""
        return self.schedule.get_last_lr() if self._used is None else self._used

    def begin_update(self) -> None:
        """Keep the rate: the schedule is about to be stepped."""
        self._used = list(self.schedule.get_last_lr())

    def end_update(self) -> None:
        """Forget the kept rate: the Trainer has read it."""
        self._used = None


class _Averages(NamedTuple):
    """The averages in the Trainer's log, before a step."""

    step: int
    since_log: Tensor
    in_all: float
    last_log: int


class TrainerLoop(TrainerCallback):  # type: ignore[misc]  # it is not typed
    """Connects a Trainer's loop with a guard."""

    def __init__(self, trainer: Any, guard: Guard, loader: Any, save: Callable[[], None]) -> None:
        """``save`` is called when the Trainer has written a checkpoint."""
        self._trainer = trainer
        self._guard = guard
        self._loader = loader
        self._save = save
        self._schedule = trainer.lr_scheduler if isinstance(trainer.lr_scheduler, TrainerSchedule) else None
        self._loss: Tensor | None = None
        self._tokens = 0
        self._has_looked = False
        """Whether the first batch has been looked at: what of it counts for the loss."""
        self._is_elsewhere = False
        """Whether this step went back: then nothing is logged, evaluated or saved after it."""
        self._has_gone_back = False
        self._kept: deque[_Averages] = deque(maxlen=KEPT)
        self._epoch: Any = None
        """The Trainer's iterator over its epoch. A new object is the only sign of a new epoch."""
        self._batches: Iterator[Any] = iter(())
        self._handed = 0
        """Micro-batches that the Trainer has counted in this epoch."""
        self._in_epoch = 0
        """Micro-batches that the Trainer expects in this epoch."""
        is_of_rewards = any(each.__name__ == "RewardTrainer" for each in type(trainer).__mro__)
        self._renamed = OF_A_REWARD_MODEL if is_of_rewards else {}
        self._is_exhausted = False
        self.reads = guard.loop.goes_back
        """Whether the guard reads the data itself, to know its position in them; otherwise the Trainer reads."""
        self._began: tuple[int, int] = 0, 0
        """The Trainer's epoch, and, if the Trainer reads, the number of its first batch."""
        self._is_ahead = False
        """Whether the data are not where the Trainer counts them, since batches were left out before it was resumed."""
        self._resumed: tuple[int, int] | None = None
        """``counted`` in the checkpoint that the run resumes from, if the guard reads."""
        self._epochs_ahead = 0
        """Epochs by which the data are ahead of the Trainer's count."""

    def join(self, patches: Patches) -> None:
        """Replace the Trainer's methods."""
        trainer = self._trainer
        unscale_once(patches, trainer.accelerator, self._guard)
        patches.put(trainer, "training_step", self._training_step)
        patches.put(trainer, "get_batch_samples", self._get_batch_samples)
        patches.put(trainer, "_run_epoch", self._run_epoch)
        patches.put(trainer, "_maybe_log_save_evaluate", self._maybe_log_save_evaluate)
        patches.put(trainer.optimizer, "step", self._step)

    def leave(self) -> None:
        """Close the data iterator."""
        close = getattr(self._batches, "close", None)
        if close is not None:
            close()

    def resume_at(self, step: int, place: Mapping[str, Any] | None, counted: Sequence[int] | None) -> None:
        """Resume from a checkpoint of a step: at the checkpoint's position in the data, or where the Trainer counts.

        ``counted`` is the value of ``self.counted`` in the checkpoint.
        """
        data = self._guard.loop.data
        number, epoch, into = trainers = self._trainers_place(step)
        if place and not self._trainer.args.ignore_data_skip:
            number = place["next"]
            self._is_ahead = number != trainers[0]  # batches were left out
        if place and "loader" in place:  # from a guard that read the data
            self.reads = True
            data.go_to(place)
        else:
            if place and self._is_ahead:
                epoch, into = place["epoch"]["number"], number - place["epoch"]["first"]
            self.reads |= (self._is_ahead or bool(data.skipped)) and has_places(self._loader)
            if self.reads:
                data.count_from(number, epoch=epoch, into=into)
            elif number > trainers[0]:  # a stream: the Trainer goes as far as it counts, the rest is left out here
                data.count_from(trainers[0], epoch=epoch)
                data.skip(trainers[0], number - trainers[0])
            else:
                data.count_from(number, epoch=epoch)
        if self.reads and counted is not None:
            self._resumed = (counted[0], counted[1])

    def _trainers_place(self, step: int) -> tuple[int, int, int]:
        """The number of the next batch, its epoch, and its place in that epoch, if none was left out."""
        every = self._trainer.args.gradient_accumulation_steps
        length = len(self._loader) if has_length(self._loader) else None
        epoch, steps = (0, step) if length is None else divmod(step, max(-(-length // every), 1))
        into = 0 if self._trainer.args.ignore_data_skip else steps * every
        return epoch * (length or 0) + into, epoch, into

    def place(self) -> dict[str, Any]:
        """The position of the next batch, for a checkpoint: its number, its epoch, and the epoch's first batch.

        If the guard reads, it gives its own position, which has more.
        """
        data = self._guard.loop.data
        if self.reads:
            return data.position()
        number, first = self._began
        if self._is_epoch_over():
            number, first = number + 1, data.following
        return {"next": data.following, "epoch": {"number": number, "first": first}}

    @property
    def counted(self) -> tuple[int, int]:
        """The epoch in which the Trainer counts the next micro-batch, and its micro-batches so far."""
        return (self._began[0] + 1, 0) if self._is_epoch_over() else (self._began[0], self._handed)

    def _is_epoch_over(self) -> bool:
        data = self._guard.loop.data
        return data.is_last if self.reads else data.following - self._began[1] >= self._in_epoch

    # The Trainer's loop, from the outside in

    def _run_epoch(self, run: Callable[..., None]) -> Callable[..., None]:
        def run_epoch(**given: Any) -> None:
            is_resumed = given["epoch"] == given["epochs_trained"] and given["resume_from_checkpoint"] is not None
            if is_resumed and self._resumed is not None:
                epoch, given["steps_trained_in_current_epoch"] = self._resumed
                self._epochs_ahead = epoch - given["epoch"]
            handed = given["steps_trained_in_current_epoch"] if is_resumed else 0
            given["epoch"] += self._epochs_ahead
            given["epochs_trained"] += self._epochs_ahead
            # no limit but the data: a run that went back takes more steps than planned
            given["num_update_steps_per_epoch"] = sys.maxsize
            self._begin_epoch(given, handed)
            run(**given)
            while self._is_unfinished(given["epoch"]):
                began = self._guard.number
                given["epoch"] += 1
                self._begin_epoch(given, 0)
                run(**given)
                if self._guard.number == began:
                    return

        return run_epoch

    def _begin_epoch(self, given: Mapping[str, Any], handed: int) -> None:
        self._handed, self._in_epoch = handed, given["steps_in_epoch"]
        self._began = given["epoch"], self._guard.loop.data.following - handed

    def _is_unfinished(self, epoch: int) -> bool:
        """Whether the data ended before the steps, since batches were repeated or left out."""
        state, control = self._trainer.state, self._trainer.control
        is_last = epoch + 1 >= state.num_train_epochs
        has_ended = self._is_exhausted and not control.should_training_stop
        is_short = self._has_gone_back or self._is_ahead or bool(self._guard.loop.data.skipped)
        # otherwise an epoch was stopped early
        return is_short and is_last and has_ended and state.global_step < state.max_steps

    def _may_be_short(self) -> bool:
        """Whether an epoch may have fewer batches than the Trainer has counted."""
        return self._guard.loop.goes_back or self._is_ahead or bool(self._guard.loop.data.skipped)

    def _get_batch_samples(self, get: Callable[..., Any]) -> Callable[..., Any]:
        def get_batch_samples(epoch_iterator: Any, num_batches: int, device: Any) -> Any:
            if epoch_iterator is not self._epoch:
                self._epoch, self._is_exhausted = epoch_iterator, False
                self._batches = self._of_epoch(epoch_iterator)
            if self._was_asked_back():
                self._went_back()
                self._trainer.state.global_step = self._guard.number
                self._is_elsewhere = False
            self._keep_averages()
            wanted = self._until_update()
            batches, items = get(self._batches, wanted, device)
            if len(batches) < wanted and self._may_be_short() and not self._is_update(len(batches)):
                if batches:  # the Trainer would count them for the first step of the next epoch
                    self._guard.watch.note("step-incomplete", left_out=len(batches), of=wanted)
                batches, items = [], None
            self._handed += len(batches)
            self._is_exhausted = not batches
            if not batches:
                self._trainer.control.should_epoch_stop = True
            return batches, items

        return get_batch_samples

    def _of_epoch(self, epoch_iterator: Any) -> Iterator[Any]:
        """The batches to train on. Probe batches are run here, and are no steps of the Trainer."""
        guard = self._guard
        self.reads |= bool(guard.loop.data.skipped) and has_places(self._loader)
        given = self._loader if self.reads else epoch_iterator
        batches = handed_out(guard, given, by_ourselves=self.reads)
        for batch in batches:
            if guard.loop.data.is_probe:
                self._probe(batch)
            else:
                yield batch

    def _until_update(self) -> int:
        """Micro-batches up to the one at which the Trainer will update."""
        every = self._trainer.args.gradient_accumulation_steps
        to_multiple = every - self._handed % every
        to_end = self._in_epoch - self._handed
        return to_end if 0 < to_end < to_multiple else to_multiple

    def _is_update(self, more: int) -> bool:
        handed = self._handed + more
        return more > 0 and (handed == self._in_epoch or handed % self._trainer.args.gradient_accumulation_steps == 0)

    def _training_step(self, train: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def training_step(model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            loss = train(model, inputs, num_items_in_batch)
            if not self._has_looked:
                self._has_looked = True
                self._look_at(inputs)
            share = loss.detach()
            self._loss = share if self._loss is None else self._loss + share
            ids = inputs.get("input_ids") if hasattr(inputs, "get") else None
            self._tokens += ids.numel() if isinstance(ids, Tensor) else 0
            if self._trainer.accelerator.sync_gradients:
                # before the Trainer clips and waits for the loss: the device is busy meanwhile
                total, self._loss, tokens, self._tokens = self._loss, None, self._tokens, 0
                self._guard.before_clipping(self._trainer.args.max_grad_norm or None)
                self._guard.loop.decide(total, tokens=tokens * self._trainer.args.world_size or None)
            return loss

        return training_step

    def _look_at(self, inputs: Any) -> None:
        """Say what is wrong with a batch of texts, if anything is: nobody prints one."""
        if not isinstance(inputs, Mapping):
            return
        told = advice(partial(of_batch, self._trainer.model, inputs))
        if told.advised is None or told.advised.findings:
            told.note(self._guard.watch, step=self._guard.number)
            if self._trainer.is_world_process_zero():
                told.warn(stacklevel=2)

    def _step(self, _: Callable[..., Any]) -> Callable[..., None]:
        """Replace the step of Accelerate's optimizer by the guard's."""

        def step(closure: Any = None) -> None:
            trainer, guard = self._trainer, self._guard
            if self._schedule is not None:
                self._schedule.begin_update()
            number = guard.number
            verdict = guard.loop.update()
            tell_skipped([trainer.optimizer], is_skipped(verdict, number, guard))
            if guard.number != number + 1:
                self._went_back()
            trainer.state.global_step = guard.number - 1  # the Trainer adds one

        patched: Any = step
        patched._wrapped_by_lr_sched = True  # otherwise torch warns that nobody counts the calls
        self._trainer.optimizer._opt_called = True
        return step

    def _probe(self, batch: Any) -> None:
        """Run a batch that was healthy before, to see its loss and gradient norm now."""
        trainer, guard = self._trainer, self._guard
        number = guard.number
        trainer.current_gradient_accumulation_steps = 1
        trainer.accelerator.gradient_state._set_sync_gradients(True)
        trainer.training_step(
            trainer.model_wrapped, batch, trainer._get_num_items_in_batch([batch], trainer.args.device)
        )
        guard.loop.update()
        if guard.number != number:
            self._went_back()
            trainer.state.global_step = guard.number
            self._is_elsewhere = False
            self._keep_averages()

    # What the Trainer logs, evaluates and saves

    def _keep_averages(self) -> None:
        trainer = self._trainer
        if self._guard.loop.goes_back:
            since_log = trainer._tr_loss.detach().clone()
            self._kept.append(
                _Averages(self._guard.number, since_log, trainer._total_loss_scalar, trainer._globalstep_last_logged)
            )

    def _went_back(self) -> None:
        """Set the Trainer's averages back to the step that the run went back to, if they are known."""
        trainer, number = self._trainer, self._guard.number
        self._is_elsewhere = self._has_gone_back = True
        then = next((kept for kept in reversed(self._kept) if kept.step == number), None)
        self._kept = deque((kept for kept in self._kept if kept.step < number), maxlen=KEPT)
        if then is None:
            trainer._tr_loss.zero_()
            trainer._globalstep_last_logged = min(trainer._globalstep_last_logged, number)
        else:
            trainer._tr_loss.copy_(then.since_log)
            trainer._total_loss_scalar, trainer._globalstep_last_logged = then.in_all, then.last_log
        if trainer.is_world_process_zero():
            self._give_up_checkpoints(number)

    def _give_up_checkpoints(self, number: int) -> None:
        """Rename checkpoints of later steps: the run has left their line, but the Trainer resumes from the highest."""
        state, given_up, left = self._trainer.state, [], []
        for folder in sorted(Path(self._trainer._get_output_dir(None)).glob("checkpoint-*")):
            step = folder.name.removeprefix("checkpoint-")
            if (
                step.isdecimal() and int(step) > number and (folder / STATE).is_file()
            ):  # otherwise it is not of this run
                try:
                    aside = folder.rename(folder.with_name(f"given-up-{datetime.now(UTC):%Y%m%d-%H%M%S}-{folder.name}"))
                except OSError as error:  # the rollback itself is done, and the run goes on
                    left.append(f"{folder.name} ({error.strerror})")
                    continue
                given_up.append(aside.name)
                if state.best_model_checkpoint == str(folder):
                    state.best_model_checkpoint = str(aside)
        if given_up or left:
            text = f"the run went back to step {number}: the Trainer is not to resume from {', '.join(given_up + left)}"
            self._guard.watch.note("checkpoints-given-up", step=number, checkpoints=given_up, left=left, text=text)

    def _was_asked_back(self) -> bool:
        """Whether the user's code has taken the run back between two steps, with ``guard.ask``."""
        return bool(self._guard.number != self._trainer.state.global_step)

    def _maybe_log_save_evaluate(self, do: Callable[..., None]) -> Callable[..., None]:
        def log_save_evaluate(*args: Any, **kwargs: Any) -> None:
            control = self._trainer.control
            if self._was_asked_back():
                control.should_log = control.should_evaluate = control.should_save = False
            in_all = self._trainer._total_loss_scalar
            if control.should_evaluate or control.should_save:
                with self._guard.paused():
                    do(*args, **kwargs)
            else:
                do(*args, **kwargs)
            self._leave_out_nan(in_all)

        return log_save_evaluate

    def _leave_out_nan(self, in_all: float) -> None:
        """Drop a NaN loss whose update was skipped once it is logged: subtracting it from the sum would leave NaN."""
        trainer = self._trainer
        if trainer._globalstep_last_logged == trainer.state.global_step:
            trainer._tr_loss.zero_()
        if self._guard.loop.acts and not math.isfinite(trainer._total_loss_scalar) and math.isfinite(in_all):
            trainer._total_loss_scalar = in_all

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The Trainer has counted the step, and decided what is due."""
        if self._schedule is not None:
            self._schedule.end_update()
        if self._has_gone_back:  # the Trainer counts the batches that it was given, repeated ones too
            steps = -(-self._in_epoch // args.gradient_accumulation_steps)
            state.epoch = state.global_step / steps
        if self._is_elsewhere:
            self._is_elsewhere = False
            control.should_log = control.should_evaluate = control.should_save = False

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Clear the stop at the end of the data: nobody asked for it."""
        if self._is_exhausted:
            control.should_epoch_stop = False

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        """A held-out loss belongs to the next step, whose weights it was measured with."""
        if metrics and "eval_loss" in metrics:
            self._guard.watch.see(self._guard.number, eval_loss=float(metrics["eval_loss"]))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """What a trainer logs comes after its step, and is averaged over the steps since the log before."""
        told = {
            name: float(value) for name, value in (logs or {}).items() if name not in MEASURED and _is_number(value)
        }
        names = live_names(told, RESERVED) | self._renamed
        self._guard.loop.take_logged({names[name]: value for name, value in told.items()})

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The Trainer has written a checkpoint."""
        self._save()


def _is_number(value: Any) -> bool:
    """A tensor is none: reading it may mean waiting for a device."""
    return isinstance(value, int | float) and not isinstance(value, bool)
