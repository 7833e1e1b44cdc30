"""Rules about the learning rate over the whole run, which is simulated."""

import math
from itertools import pairwise

from sealegs.preflight_check.rule import Family, RuleFinding, Unknown
from sealegs.preflight_check.schedule import RateCurve
from sealegs.report.commands.preflight import Grade

SCHEDULE = Family("SCH", "schedule")
LONG_WARMUP = 2000
"""Steps of a warm-up in long runs; in others a twentieth of the run."""
FEWEST_STEPS = 100
"""Steps of a run below which nobody can say that it lacks a warm-up, nor that it has the margin."""
DECAYING = ("cosine", "linear", "inverse-sqrt", "stable-decay", "cosine-restarts")


@SCHEDULE.rule(margin=True, from_scratch=True)
def no_warmup(curve: RateCurve, schedule_step: int = 0, steps: int = 0, decay_steps: int = 0) -> RuleFinding | None:
    """The learning rate begins at its height.

    Why: at first v is an average over a handful of gradients, and m / sqrt(v) is near +-1 in every entry: full steps in
      directions that are mostly noise, while the loss is at its steepest. What they break takes long to mend.
    Set: a linear warm-up: 2000 steps in long runs, a twentieth of short ones.
    Sure: established for Transformers with Adam.
    See: Liu et al. 2020, On the variance of the adaptive learning rate and beyond; Xiong et al. 2020, On layer
      normalization in the Transformer architecture.
    """
    if schedule_step or not curve.rates[0] >= 0.5 * curve.peak > 0 or _rises_at_once(curve):
        return None
    if len(curve.steps) < FEWEST_STEPS:
        raise Unknown("steps")
    first = curve.rates[0] / curve.peak
    length = steps or decay_steps
    value = f"{warmup_for(length)}" if length else f"{LONG_WARMUP}, or 5 % of a short run"
    return RuleFinding("warning", f"the first step has {first:.0%} of the peak", "warmup_steps", value)


@SCHEDULE.rule(margin="SCH1", from_scratch=True)
def warmup_too_short(
    curve: RateCurve, beta2: float, schedule_step: int = 0, steps: int = 0, decay_steps: int = 0
) -> RuleFinding | None:
    """The warm-up is shorter than the memory of the second moment.

    Why: v has seen 1 / (1 - beta2) gradients before it is an average of any use: 20 at 0.95, 1000 at 0.999. A peak that
      comes sooner is divided by what the first, steepest steps have left. Long runs take some 2000 steps: what a
      broken start costs them is much, and what a warm-up costs is nothing.
    Set: warmup_steps to 2 / (1 - beta2) or more; to a tenth of a run that is too short for that; to 2000 in long runs.
    Sure: supported: a rule of thumb that was measured.
    See: Ma and Yarats 2021, On the adequacy of untuned warmup for adaptive optimization.
    """
    reached, memory = curve.steps[curve.top] + 1, 1 / (1 - beta2) if beta2 < 1 else 0.0
    is_over = curve.top < 0.9 * len(curve.rates)
    length = steps or decay_steps  # a schedule that ends shows how long the run is meant to be
    most = length / 10 if length else math.inf
    if schedule_step or not is_over or curve.rates[0] >= 0.5 * curve.peak:
        return None
    if not reached < min(round(memory), most):
        if not 10 * reached < warmup_for(length):
            return None
        found = f"the peak is reached after {reached} of {length} steps"
        return RuleFinding("note", found, "warmup_steps", f"{warmup_for(length)}")
    found = f"the peak is reached after {reached} steps, v averages {memory:.0f}"
    value = f"{2 * memory:.0f} or more" if 2 * memory <= most else f"{math.ceil(most)}, a tenth of the run"
    value += "" if length else ", or a tenth of a shorter run"
    return RuleFinding("warning", found, "warmup_steps", value)


@SCHEDULE.rule()
def warmup_without_end(warmup_steps: int, steps: int) -> RuleFinding | None:
    """The warm-up fills the run.

    Why: a rate that still rises at the end has never been at its peak, and never came down: the last part of the
      descent, where a falling rate lets the loss settle, is missing.
    Set: warmup_steps to a twentieth of the run, or 2000 steps of a long one.
    Sure: established.
    See: Touvron et al. 2023 (Llama), section 2.3: 2000 steps of some 250,000.
    """
    if warmup_steps <= steps / 2:
        return None
    grade: Grade = "error" if warmup_steps >= steps else "warning"
    found = f"a warm-up of {warmup_steps} in a run of {steps} steps"
    return RuleFinding(grade, found, "warmup_steps", f"{warmup_for(steps)}")


@SCHEDULE.rule()
def rate_leaps(curve: RateCurve) -> RuleFinding | None:
    """The learning rate leaps up.

    Why: moments are made for the rate and the gradients of the last steps. A rate that is a multiple of the last one
      moves weights further than the loss is straight: the same fault as a schedule that is set wrongly at a resume.
    Set: no leaps: a warm-up after every restart, parts that meet where they join.
    Sure: established; here a rate of 30 times for ten steps leaves lasting damage (docs/benchmarks).
    See: Loshchilov and Hutter 2017, SGDR, where restarts leap on purpose.
    """
    leap = _leap(curve)
    if leap is None:
        return None
    before, after = curve.rates[leap - 1], curve.rates[leap]
    found = f"from {before:.3g} to {after:.3g} at step {curve.steps[leap]}"
    return RuleFinding("warning", found, "schedule", "one without leaps, or a warm-up after each")


@SCHEDULE.rule()
def rate_never_falls(curve: RateCurve, schedule: str = "", finetunes: bool = False) -> RuleFinding | None:
    """The learning rate stays at its peak.

    Why: at a constant rate the loss stops at a level that the noise of the gradients sets; a rate that comes down to a
      tenth gives the last part of the gain. A cosine that ends where it begins is a mistake; a constant is a choice.
    Set: final_lr_share to 0.1.
    Sure: established.
    See: Hoffmann et al. 2022 (Chinchilla), appendix B.
    """
    if curve.top > 0.9 * len(curve.rates) or min(curve.rates[curve.top :]) < 0.99 * curve.peak:
        return None
    meant = schedule not in DECAYING  # a schedule without a name has only its rates to show
    if meant and finetunes:  # a few hundred steps settle nowhere
        return None
    found = (
        f"a constant rate of {curve.peak:g}"
        if meant
        else f"the lowest rate after the warm-up is the peak, {curve.peak:g}"
    )
    knob, value = ("schedule", "cosine, to a tenth") if meant else ("final_lr_share", "0.1")
    return RuleFinding("note" if meant else "error", found, knob, value)


@SCHEDULE.rule()
def upside_down(curve: RateCurve, warmup_steps: int = 0) -> RuleFinding | None:
    """The learning rate rises to the end.

    Why: a cosine with its sign turned, or a periodic one that runs past its half period, has its largest rate where the
      model is most finely tuned: the loss rises slowly, then for good.
    Set: the schedule the right way up; T_max of a cosine to the number of steps.
    Sure: established.
    See: the documentation of torch.optim.lr_scheduler.CosineAnnealingLR, which is periodic.
    """
    later = curve.rates[max(warmup_steps, 1) :] if warmup_steps < len(curve.rates) / 2 else []
    if len(later) < 10 or _leap(curve) is not None:
        return None
    last, lowest = later[-1], min(later)
    rises = last > later[len(later) * 4 // 5] * 1.02 or _comes_up_again(curve)
    if not (rises and last > 1.5 * lowest and last > 0.3 * curve.peak):
        return None
    return RuleFinding("error", f"from {lowest:.3g} up to {last:.3g} at the end", "schedule", "one that comes down")


@SCHEDULE.rule()
def rate_is_spent(curve: RateCurve, steps: int) -> RuleFinding | None:
    """The learning rate is at zero long before the end.

    Why: steps at a rate of nothing cost as much as others and change nothing. The schedule was made for a shorter run.
    Set: decay_steps to the number of steps.
    Sure: established.
    See: Hoffmann et al. 2022 (Chinchilla), appendix B.
    """
    spent = next((step for step, rate in _from_the_end(curve) if rate > 1e-3 * curve.peak), 0)
    if steps - spent < 0.05 * steps or steps < 100:
        return None
    return RuleFinding("warning", f"at step {spent} of {steps} there is nothing left", "decay_steps", str(steps))


@SCHEDULE.rule()
def ends_half_way(curve: RateCurve, steps: int, schedule: str = "") -> RuleFinding | None:
    """The run ends while the learning rate is still high.

    Why: a schedule that was made for a longer run, or a restart in mid-cycle, leaves out the part in which the rate
      comes down and the loss with it: a schedule a quarter too long already costs some loss.
    Set: decay_steps to the number of steps; restarts so that a cycle ends with the run.
    Sure: established; on purpose where a run is to be gone on with.
    See: Hoffmann et al. 2022 (Chinchilla), appendix B and figure A1.
    """
    last = curve.rates[-1]
    fallen = last < 0.95 * curve.peak and curve.top < 0.9 * len(curve.rates)
    if schedule not in DECAYING or schedule == "inverse-sqrt" or not fallen or last <= 0.3 * curve.peak:
        return None
    found = f"at the last of {steps} steps the rate is {last / curve.peak:.0%} of its peak"
    return RuleFinding("warning", found, "decay_steps", str(steps))


@SCHEDULE.rule()
def restart_misaligned(schedule_step: int, optimizer_step: int) -> RuleFinding | None:
    """Schedule and optimizer are not at the same step.

    Why: after a resume that brings back only one of them, the warm-up comes again in the middle of a run, or the rate
      of the end at its beginning. The first steps then leap.
    Set: load the scheduler's state with the optimizer's; or step it to where the optimizer is.
    Sure: established; a scheduler that is stepped once an epoch looks the same, and is then meant.
    See: the documentation of torch.optim, on saving and loading schedulers.
    """
    # a loss scaler skips some of the optimizer's steps
    if abs(schedule_step - optimizer_step) <= max(20, optimizer_step // 100):
        return None
    found = f"the schedule is at step {schedule_step}, the optimizer at {optimizer_step}"
    return RuleFinding("error", found, "schedule_step", str(optimizer_step))


def warmup_for(steps: int) -> int:
    """How long a warm-up should be in a run of so many steps.

    >>> warmup_for(150), warmup_for(10_000), warmup_for(1_000_000)
    (7, 500, 2000)
    """
    return min(LONG_WARMUP, max(1, steps // 20))


def _leap(curve: RateCurve) -> int | None:
    """The first place where the rate rises by a fifth of the peak in one step, and not beside such steps.

    Between two steps that are not neighbours the curve is smooth: what it rises there is no leap.
    """
    points = list(zip(curve.steps, curve.rates, strict=True))
    rises = [(after - before) / (now - then) for (then, before), (now, after) in pairwise(points)]
    for place, rise in enumerate(rises):
        beside = max(rises[place - 1] if place else 0.0, rises[place + 1] if place + 1 < len(rises) else 0.0)
        if rise > 0.2 * curve.peak and rise > 3 * beside and place:
            return place + 1
    return None


def _comes_up_again(curve: RateCurve) -> bool:
    """Whether the last way of the rate is up, after one down: the last low is far below the end, the top since then.

    A periodic schedule has several lows, and any place before the end may be one of its tops.
    """
    since = curve.rates[curve.top :]
    bottom = 1.01 * min(since) + 1e-3 * curve.peak
    low = max(place for place, rate in enumerate(since) if rate <= bottom)
    return since[-1] > 1.5 * since[low] and since[-1] >= 0.95 * max(since[low:])


def _rises_at_once(curve: RateCurve) -> bool:
    """Whether it goes up from the first step on: a warm-up that begins high."""
    return curve.rates[0] < curve.rates[min(5, len(curve.rates) - 1)]


def _from_the_end(curve: RateCurve) -> list[tuple[int, float]]:
    return list(zip(curve.steps, curve.rates, strict=True))[::-1]
