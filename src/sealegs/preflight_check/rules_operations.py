"""Rules about checkpoints, logs, and the cost of a restart."""

from sealegs.preflight_check.rule import Family, RuleFinding, Unknown
from sealegs.report.commands.preflight import Grade

OPERATIONS = Family("OPS", "operations")
LONG_SECONDS = 3600.0
"""Seconds of work that nobody wants to lose twice a night."""
MANY_STEPS = 5000
"""The same in steps, if the time of a step is not known."""


@OPERATIONS.rule()
def checkpoints_far_apart(
    checkpoint_steps: int | None = None,
    checkpoint_minutes: float | None = None,
    seconds_per_step: float | None = None,
    price_per_hour: float | None = None,
    steps: int | None = None,
) -> RuleFinding | None:
    """A restart would cost much.

    Why: everything since the last checkpoint is done again; on average half the interval, at worst all of it. With the
      cause somewhere before the onset, one goes back further still: PaLM went about 100 steps behind a spike.
    Set: checkpoints so often that a restart costs less than half an hour; 200 to 1000 steps in most runs.
    Sure: established: arithmetic.
    See: Chowdhery et al. 2022 (PaLM), section 5.1; Grattafiori et al. 2024 (Llama 3), section 3.3.4, on interruptions.
    """
    if checkpoint_steps is None and checkpoint_minutes is None:
        raise Unknown("checkpoint_steps")
    checkpoint_steps = checkpoint_steps or 0
    seconds = [60 * checkpoint_minutes] if checkpoint_minutes else []
    if checkpoint_steps > 0 and seconds_per_step:
        seconds.append(checkpoint_steps * seconds_per_step)
    if checkpoint_steps <= 0 and not seconds:
        whole = ""
        if steps and seconds_per_step:
            whole = f", and costs up to {_spelt(steps * seconds_per_step, seconds_per_step, price_per_hour)}"
        return RuleFinding(
            "warning", f"no checkpoints: a restart begins anew{whole}", "checkpoint_steps", "200 to 1000"
        )
    if not seconds:
        if checkpoint_steps <= MANY_STEPS:
            return None
        return RuleFinding(
            "warning", f"a restart costs up to {checkpoint_steps} steps", "checkpoint_steps", "1000 or fewer"
        )
    worst = min(seconds)
    if worst <= LONG_SECONDS:
        return None
    value = f"{max(1, round(1800 / max(seconds_per_step, 1e-6)))}" if seconds_per_step else "30 minutes"
    cost = _spelt(worst, seconds_per_step, price_per_hour)
    knob = "checkpoint_steps" if checkpoint_steps else "checkpoint_minutes"
    return RuleFinding("warning", f"a restart costs up to {cost}", knob, value if checkpoint_steps else "30")


def _spelt(seconds: float, seconds_per_step: float | None, price_per_hour: float | None) -> str:
    """``5000 steps, 12.5 hours, 1225.00 of money``"""
    steps = f"{seconds / seconds_per_step:.0f} steps, " if seconds_per_step else ""
    money = f", {seconds / 3600 * price_per_hour:.2f} of money" if price_per_hour else ""
    return f"{steps}{seconds / 3600:.1f} hours{money}"


@OPERATIONS.rule(from_scratch=True)
def one_checkpoint_alone(keep_checkpoints: int) -> RuleFinding | None:
    """Only the newest checkpoint is kept.

    Why: trouble is often seen after it began: a slow divergence, a flipped bit. The newest checkpoint then holds it
      already, and there is nothing before it to go back to.
    Set: keep three or more, and those that proved healthy.
    Sure: established.
    See: Chowdhery et al. 2022 (PaLM), section 5.1, where going back is the cure.
    """
    if keep_checkpoints != 1:
        return None
    return RuleFinding("warning", "one checkpoint is kept", "keep_checkpoints", "3")


@OPERATIONS.rule()
def checkpoints_without_moments(saves_optimizer: bool, finetunes: bool = False) -> RuleFinding | None:
    """Checkpoints hold the weights alone.

    Why: a run cannot go on from them: moments, step counters and schedule begin anew, in the middle of a run, at a full
      learning rate.
    Set: save the optimizer, the schedule and the random state too.
    Sure: established.
    See: the documentation of torch.optim, on saving and loading state.
    """
    if saves_optimizer:
        return None
    grade: Grade = "note" if finetunes else "error"  # the weights are what a short run is for
    return RuleFinding(grade, "the optimizer is not saved", "saves_optimizer", "true")


@OPERATIONS.rule()
def data_begin_anew(keeps_data_position: bool) -> RuleFinding | None:
    """A resume begins at the first batch again.

    Why: the beginning of the data is seen twice, or many times, and the rest perhaps never; the loss drops at every
      resume, which is memory and not progress. What went wrong on a batch comes again at the same distance.
    Set: keep the place in the data with the checkpoint.
    Sure: established.
    See: the documentation of transformers.TrainingArguments, on ignore_data_skip.
    """
    if keeps_data_position:
        return None
    return RuleFinding("warning", "the place in the data is not kept", "keeps_data_position", "true")


@OPERATIONS.rule()
def log_too_coarse(log_steps: int) -> RuleFinding | None:
    """The log is too coarse to see trouble coming.

    Why: the gradient norm leaps 1 to 4 steps before the loss. Logged every 100th step, a spike is a point, or none; the
      step that it began at, and its batch, cannot be found.
    Set: every step; 10 at most.
    Sure: established; a scalar a step costs next to nothing.
    See: Le Scao et al. 2022 (BLOOM) and its public logs, where the norm leads by 4 steps.
    """
    if log_steps <= 10:
        return None
    return RuleFinding("warning", f"a row every {log_steps} steps", "log_steps", "1")


@OPERATIONS.rule()
def nan_filter_hides(nan_filter: bool) -> RuleFinding | None:
    """Losses that are not finite are replaced in the log.

    Why: the mean of the losses since the last log stands in their place: a run that makes NaN every tenth step looks
      healthy, and one that makes nothing else logs a loss of 0.
    Set: logging_nan_inf_filter to false.
    Sure: established; it is on by default in Hugging Face's Trainer.
    See: the documentation of transformers.TrainingArguments, on logging_nan_inf_filter.
    """
    if not nan_filter:
        return None
    return RuleFinding("warning", "NaN and infinite losses are replaced in the log", "nan_filter", "false")
