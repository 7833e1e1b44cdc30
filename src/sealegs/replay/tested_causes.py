"""Judges causes by the outcomes of the arms: each is necessary, sufficient, not needed or unknown."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from sealegs.errors import ConfigError
from sealegs.replay.arms import (
    IN_PART,
    Arm,
    are_in_the_order_of_text,
    arms,
    is_garbage,
    is_of_rare_tokens,
    one_ulp,
    shaken,
    surprise,
)
from sealegs.replay.batch_tokens import Spotlight, has_no_target, spotlight
from sealegs.replay.experiment import Experiment, Outcome
from sealegs.replay.fidelity import Departure, departure, explained, ranks_apart
from sealegs.replay.learnability import RIGHT, WRONG, taught
from sealegs.replay.locate import Location, locate_first

VISIBLE = 4.0
"""Standard deviations above the usual from which on an anomaly is visible."""
GONE = 0.25
"""Largest share of the anomaly that may be left where it is gone. Less than is visible may be left, too."""
THERE = 0.5
"""Smallest share that is left where the anomaly is still there."""
AGAIN = (1, 2, 3)
"""Seeds of the repetitions where chance plays a part: four reruns all below five placebos have a chance of 1 in 126."""

GROSS = 10.0
"""Times the usual loss from which on a batch is wrong, where no other batch of its kind can teach the model."""
AS_IF = "as if the model knew nothing"

Standing: TypeAlias = Literal["necessary and sufficient", "necessary", "sufficient", "not needed", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """An arm, and what it showed."""

    arm: Arm
    outcome: Outcome
    left: float
    """Share of the anomaly that is left."""
    is_there: bool
    is_gone: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Tested:
    """What the reruns say."""

    onset: int
    again: Outcome
    """The rerun as it was, except that every update is applied."""
    apart: float
    """Difference between the losses of two equal reruns."""
    departure: Departure | None
    """The step at which the record differs from the reruns, if it does."""
    tried: tuple[Tried, ...]
    standings: dict[str, Standing]
    """The standing of every cause that an arm tested."""
    spotlight: Spotlight | None
    """The tokens that carry the loss of the onset, where batches are text."""
    location: Location | None
    """The first operation that gives a number that is not finite, if there is one."""
    cause: str | None
    """The cause that the reruns establish; None where they establish none."""
    because: str
    steps: int
    """Steps run in all."""
    unasked: tuple[str, ...] = ()
    """Arms for which there was no time."""


def judge_causes(
    experiment: Experiment,
    *,
    tell: Callable[[str], None] = lambda text: None,
    seconds: float = math.inf,
    only: Sequence[str] = (),
) -> Tested:
    """Run the incident again, exactly and with one thing changed at a time; start no arm after ``seconds``.

    ``only`` names arms or causes to run besides the placebos. ``all`` also runs arms whose answer is known by then.
    """
    began = time.monotonic()
    every = list(arms(experiment))
    if unknown := set(only) - {"all"} - {name for arm in every for name in (arm.name, arm.cause)}:
        known = ", ".join(arm.name for arm in every)
        raise ConfigError(f"--arms {', '.join(sorted(unknown))}: not one of this incident's, which are {known}; or all")
    apart = experiment.exactly()
    left = departure(experiment, apart, experiment.onset)
    tell(f"run again: {left or f'{len(experiment.seen)} steps are what they were'}")
    again = experiment.run()
    location = None
    if left is None and not all(map(math.isfinite, (*again.losses.values(), *again.grad_norms.values()))):
        location = locate_first(experiment, experiment.window)
        tell(f"looked at every operation: {location or 'all are finite now'}")
    tried: list[Tried] = []
    unasked: list[str] = []
    if left is None and again.size > VISIBLE:
        for arm in every:
            is_named = arm.kind == "placebo" or "all" in only or not {arm.name, arm.cause}.isdisjoint(only)
            if not (is_named if only else _is_open(arm, again, location, tried)):
                continue
            if time.monotonic() - began > seconds:
                unasked.append(arm.name)
                continue
            tried.append(_tried(arm, experiment.run(arm.change), again, _left_by_chance(arm, tried)))
            tell(f"{arm.name}: {arm.does}: {tried[-1].left:.0%} is left")
        if any(each.is_gone for each in tried if each.arm.kind == "placebo") and not unasked:
            for arm in _once_more(tried):
                tried.append(_tried(arm, experiment.run(arm.change), again, _left_by_chance(arm, tried)))
                tell(f"{arm.name}: {tried[-1].left:.0%} is left")
    lit = spotlight(experiment, experiment.peak)
    standings = {cause: _standing(cause, tried) for cause in dict.fromkeys(each.arm.cause for each in tried) if cause}
    cause: str | None
    is_unexplained = left is not None or again.size <= VISIBLE
    if is_unexplained and (ranks := ranks_apart(experiment.capsule.rows, experiment.onset)) is not None:
        cause, because = "ranks-out-of-step", ranks
    elif left is not None:
        cause, because = explained(experiment, left)
    elif location is not None and location.cause is not None:
        cause, because = location.cause, str(location)
    else:
        cause, because = _concluded(experiment, again, tried, standings)
    return Tested(
        onset=experiment.onset,
        again=again,
        apart=apart,
        departure=left,
        tried=tuple(tried),
        standings=standings,
        spotlight=lit,
        location=location,
        cause=cause,
        because=because,
        steps=experiment.steps_run,
        unasked=tuple(unasked),
    )


def _is_open(arm: Arm, again: Outcome, location: Location | None, tried: Sequence[Tried]) -> bool:
    """Whether an arm asks something that is not known yet."""
    if location is not None and location.cause not in (None, arm.cause):
        return False  # an operation has been found as another cause
    is_recorded = arm.cause == "lr-discontinuity"  # a jump in the record is always tested
    if arm.asks == "damage" and not is_recorded and again.damage <= VISIBLE and _goes_with_its_batches(tried):
        return False
    is_answered = any(each.is_gone for each in tried if (each.arm.cause, each.arm.kind) == (arm.cause, "without"))
    return not (arm.cause and arm.kind == "without" and is_answered)


def _left_by_chance(arm: Arm, tried: Sequence[Tried]) -> float:
    """The smallest share that a placebo leaves. Where chance alone ends an anomaly, an arm must remove more."""
    placebos = [each.left for each in tried if each.arm.kind == "placebo" and arm.kind != "placebo"]
    return min((1.0, *placebos))


def _once_more(tried: Sequence[Tried]) -> Iterator[Arm]:
    """Repetitions for an anomaly that a placebo may end, as where a run drifts apart.

    First come placebos, then each arm that removes more than any placebo, for as long as it does. The caller adds the
    outcome of each to ``tried`` before it asks for the next.
    """
    yield from map(one_ulp, AGAIN)
    for does in dict.fromkeys(each.arm.does for each in tried if each.arm.cause and each.arm.kind == "without"):
        for seed in AGAIN:
            if _is_below_chance(same := [each for each in tried if each.arm.does == does], tried):
                yield shaken(same[0].arm, seed)


def _is_below_chance(reruns: Sequence[Tried], tried: Sequence[Tried]) -> bool:
    """Whether every rerun shows less than every placebo, while all placebos but one show a visible anomaly.

    The size counts, whatever the arm measures. The placebos must show something, because a lower learning rate lowers
    the loss even where nothing is wrong.
    """
    least, second, *_ = sorted(each.outcome.size for each in tried if each.arm.kind == "placebo")
    return max(each.outcome.size for each in reruns) < least and second > VISIBLE


def _goes_with_its_batches(tried: Sequence[Tried]) -> bool:
    """Whether other batches leave nothing of the anomaly: then the batches explain all of it that is not damage."""
    return any(each.is_gone for each in tried if each.arm.cause == "bad-data-batch" and each.arm.kind == "without")


def _tried(arm: Arm, outcome: Outcome, again: Outcome, least: float) -> Tried:
    is_all = arm.asks == "all" or again.damage <= VISIBLE
    now, then = (outcome.size, again.size) if is_all else (outcome.damage, again.damage)
    if math.isinf(then):
        return Tried(arm=arm, outcome=outcome, left=float(math.isinf(now)), is_there=now == then, is_gone=now < then)
    left = max(now, 0.0) / then
    is_gone = now < least * max(GONE * then, min(VISIBLE, THERE * then))
    return Tried(arm=arm, outcome=outcome, left=left, is_there=left >= THERE and not is_gone, is_gone=is_gone)


def _standing(cause: str, tried: Sequence[Tried]) -> Standing:
    """A cause is necessary if the incident is gone without it, sufficient if it alone brings the incident.

    Where placebos may end the incident, ranks decide: a cause is necessary if several reruns without it all show less
    than every placebo.
    """
    without = [each for each in tried if each.arm.cause == cause and each.arm.kind == "without"]
    brought = [each for each in tried if each.arm.cause == cause and each.arm.kind == "with"]
    placebos = [each for each in tried if each.arm.kind == "placebo"]
    if any(each.is_gone for each in placebos):
        of_each = [[other for other in without if other.arm.does == each.arm.does] for each in without]
        is_apart = any(len(reruns) > len(AGAIN) and _is_below_chance(reruns, tried) for reruns in of_each)
        return "necessary" if is_apart else "unknown"
    is_necessary = any(each.is_gone for each in without)
    is_sufficient = bool(brought) and all(each.is_there for each in brought)
    if is_necessary:
        return "necessary and sufficient" if is_sufficient else "necessary"
    if is_sufficient:
        return "sufficient"
    return "not needed" if without and all(each.is_there for each in without) else "unknown"


def _concluded(
    experiment: Experiment, again: Outcome, tried: Sequence[Tried], standings: dict[str, Standing]
) -> tuple[str | None, str]:
    """The cause that remains, if one does; otherwise None and the reason."""
    if again.size <= VISIBLE:
        return None, "run again, nothing stands out from the steps before: there is nothing to explain"
    needed = [cause for cause, standing in standings.items() if standing.startswith("necessary")]
    if not needed and any(each.is_gone for each in tried if each.arm.kind == "placebo"):
        return None, "the incident does not survive harmless changes, so its disappearance proves nothing"
    for cause in ("lr-discontinuity", "duplicate-batch", "fp16-overflow"):
        if cause in needed:
            return cause, f"without it the incident is gone, and harmless changes leave it: {standings[cause]}"
    if "stale-beta2" in needed and not _is_wrong_with_any_state(experiment, again, standings):
        others = "; it takes these batches, too" if "bad-data-batch" in needed else ""
        return "stale-beta2", f"with a second moment that forgets sooner the weights stay sound{others}"
    is_of_its_batches = "lr-too-high" not in needed or _goes_with_its_batches(tried)
    if "long-tail-token" in needed and is_of_its_batches and _is_of_rare_tokens_alone(tried, standings):
        text = "without the rare tokens the incident is gone, and harmless changes leave it"
        return "long-tail-token", f"{text}: {standings['long-tail-token']}"
    if "bad-data-batch" in needed:
        return _of_the_batch(experiment, again, standings)
    if "lr-too-high" in needed:
        return "lr-too-high", "with a lower learning rate the weights stay sound, with other batches they do not"
    return None, "nothing that was changed takes the incident away"


def _is_wrong_with_any_state(experiment: Experiment, again: Outcome, standings: dict[str, Standing]) -> bool:
    """Whether the batches are wrong for any state, even if a remedy would soften them.

    A second moment that forgets sooner takes away half of any long damage.
    """
    if standings.get("bad-data-batch") != "necessary and sufficient":
        return False
    if (cost := surprise(experiment)) is not None:
        return is_garbage(experiment, again.losses[experiment.peak], cost)
    lessons = taught(experiment, dear=VISIBLE)
    return lessons is not None and lessons.left >= WRONG


def _is_of_rare_tokens_alone(tried: Sequence[Tried], standings: dict[str, Standing]) -> bool:
    """Whether nothing to speak of is left without the rare tokens, where the batches are at fault with any state.

    Most tokens that are drawn at random are rare, and the others among them are as dear.
    """
    if standings.get("bad-data-batch") != "necessary and sufficient":
        return True
    return all(each.left <= GONE for each in tried if each.arm.cause == "long-tail-token")


def _of_the_batch(experiment: Experiment, again: Outcome, standings: dict[str, Standing]) -> tuple[str | None, str]:
    """The cause where the batch is necessary: what is special about it."""
    if standings["bad-data-batch"] == "necessary":
        return "batch-and-state", "other batches take it away, but an older state stands these ones"
    if has_no_target(experiment, experiment.peak):
        nothing = "every target is left out, and a mean over nothing is no number"
        return "masked-labels", f"it is these batches, with any state: {nothing}"
    if rare := is_of_rare_tokens(experiment):
        if are_in_the_order_of_text(experiment):
            other = "and follow each other as in a text, as if it had been read in another encoding"
            return "bad-data-batch", f"it is these batches, with any state: {rare}, {other}"
        return "long-tail-token", f"it is these batches, with any state: {rare}"
    loss, cost = again.losses[experiment.peak], surprise(experiment)
    if cost is not None and is_garbage(experiment, loss, cost):
        return "bad-data-batch", f"it is these batches, with any state; their loss is {loss:.3g}, {AS_IF}: {cost}"
    if cost is not None and is_garbage(experiment, loss, cost, of_use=IN_PART) and again.damage <= VISIBLE:
        half = "to the model about half of them is no text: whether that half is wrong or hard cannot be told"
        return None, f"it is these batches, with any state; {half}; look at the dearest rows"
    if again.damage > VISIBLE:
        return "bad-data-batch", "it is these batches, with any state, and they damage the weights"
    if cost is None and (lessons := taught(experiment, dear=VISIBLE)) is not None:
        if lessons.left <= RIGHT:
            return "hard-batch", f"it is these batches, with any state, and they can be learnt from: {lessons}"
        if lessons.left >= WRONG:
            return "bad-data-batch", f"it is these batches, with any state, and they teach nothing: {lessons}"
        return None, f"it is these batches, with any state; whether they are wrong or hard cannot be told: {lessons}"
    if cost is None and loss > GROSS * experiment.usual.loss:
        return "bad-data-batch", f"it is this batch, with any state; its loss is {loss:.3g}, {GROSS:g} times the usual"
    return "hard-batch", "it is these batches, with any state, and the loss of batches from before is what it was"
