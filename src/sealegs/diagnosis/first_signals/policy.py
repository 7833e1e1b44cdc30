"""The signals of a policy that is trained for reward in, what stands in them out.

A loss of such a run measures nothing. What tells is the reward, against the best that this run has had; the entropy of
the policy, whose ends are to try nothing more and to say anything; its divergence, which grows slowly while all is
well; and whether there is anything to learn from at all. Reward alone wanders, and entropy falls where a task is
solved: so most of these are to be watched. Two that go together, or a reward that is lost for good, call for action.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from sealegs.detectors.collapse_rules import (
    APART,
    APART_FLOOR,
    FEWEST_HELD_OUT,
    KL_FLOOR,
    LITTLE,
    MANY_FOLD,
    NOTABLE,
    SURE,
    VANISHED,
    has_fallen,
    has_risen,
    is_unpaid,
    noise_about_a_trend,
)
from sealegs.diagnosis.contract import Standing
from sealegs.diagnosis.first_signals import critic
from sealegs.diagnosis.first_signals.reward import HALF, LARGE, NO_GAIN, Course, course_of, reward_of
from sealegs.diagnosis.first_signals.track import WIDTH, Track, track_of
from sealegs.record.run import Run

FLAT = 1.5
"""Standard errors by which the second half of a reward that has not risen differs from its beginning, at the most."""
STEADY = 4 * SURE
"""Times that it wanders, which a reward must have gained to have fallen by half of that beyond doubt."""
SELDOM = 0.1
"""Share of the rows whose reward is above its lowest, where a policy has found next to nothing."""
ENOUGH = 50
"""Rows from which a reward that is no better in the end says something; twice as many, where it goes with prompts."""
OF_PROMPTS = ("completion_length", "cut_share", "zero_spread_share", "reward_std")
"""Signals of a policy that writes texts, a group of them for a prompt."""
LOST = 0.8
"""Share of what was gained that is gone where a reward has collapsed; half of it is worth a look."""
ON_THE_WAY_BACK = 0.3
"""Share of the fall from which on a reward is coming back."""
NOTHING = 0.01
"""Share of its highest level that is left of an entropy: as good as nothing."""
SMALL_ENTROPY = 0.05
"""Nats below which a policy tries nothing."""
EXPLODED, MORE_NATS = 3.0, 0.5
"""Times its early level, and nats more, from which on an entropy has exploded."""
NO_SPREAD = 0.95
"""Share of groups without a spread from which on hardly anything is left to learn from."""
DEAD = 1e-3
"""Share of its usual norm below which a gradient is none."""
GRADIENT_GROWS = 5.0
SHORT, LONG = 0.1, 4.0
"""Share of its length that is left where completions collapse, and the factor by which they leap."""
ALL_CUT, SOME_CUT = 0.85, 0.5
ALL_CLIPPED, SOME_CLIPPED = 0.6, 0.3
MOST_CLIPPED, FAR = 0.5, 0.1
"""Share of the ratios that are clipped, and nats from the policy that the samples are of, beyond which updates are too
large throughout: a ratio at the usual clip of 0.2 is 0.02 nats away, and the clip is there for the few."""
RATIO = 10.0
"""Growth of the largest importance ratio, and the least that is told."""

CONFIRMS = ("entropy-vanishes", "entropy-explodes", "kl-leaps", "sampler-apart", "length-collapses", "completions-cut")
"""What makes a fall of the reward a collapse."""


def judged(run: Run) -> Iterator[Standing]:
    """What stands in the first signals of a policy, the gravest first."""
    reward, gradient = reward_of(run), track_of(run, "grad_norm")
    course = course_of(reward) if reward is not None else None
    writes = any(name in run.signals for name in OF_PROMPTS)
    found = [
        *(_of_reward(reward, course, writes=writes) if reward is not None and course is not None else ()),
        *_nothing_to_learn(run, reward, gradient, course),
        *_entropy(track_of(run, "policy_entropy"), reward, gradient, course),
        *_divergence(run),
        *_completions(run, course),
        *_updates(run),
        *_held_out(run, reward, course),
        *critic.judged(run, reward),
    ]
    is_worst = reward is not None and reward.end <= float(reward.values.min())
    yield from sorted(_together(found, is_worst=is_worst), key=lambda one: not one.is_grave)


def _together(found: list[Standing], *, is_worst: bool) -> Iterator[Standing]:
    """What calls for action because two go together. Some count only where they confirm another.

    An entropy that explodes calls for it where the reward ends at its lowest, too: anything is said, and nothing won.
    """
    shown = {one.shows for one in found}
    confirmed = not shown.isdisjoint((*CONFIRMS, "gradient-grows"))
    is_blind = {"reward-flat", "critic-explains-nothing"} <= shown
    is_away = "kl-leaps" in shown and not shown.isdisjoint(("entropy-explodes", "gradient-grows"))
    for one in found:
        is_told = one.shows not in ("gradient-grows", "reward-lower") or (one.shows == "reward-lower" and confirmed)
        is_grave = one.is_grave or (one.shows in ("reward-falls", "reward-lower") and confirmed)
        is_grave |= one.shows in ("kl-leaps", "entropy-explodes") and is_away
        is_grave |= one.shows == "entropy-explodes" and is_worst
        is_grave |= one.shows == "reward-flat" and is_blind
        if is_told:
            yield replace(one, is_grave=is_grave, shows=one.shows.replace("reward-lower", "reward-falls"))


def _of_reward(reward: Track, course: Course, *, writes: bool) -> Iterator[Standing]:
    """A reward that is lost, or is no better than at first in a log of the whole run that is long enough to say so.

    The policy ``writes`` texts, or acts in an environment.
    """
    lowest = float(reward.values.min())
    above = reward.means > lowest + 1e-9 * max(abs(lowest), 1.0)
    seldom, lately = float(above.mean()), float(above[-max(reward.rows // 5, 1) :].mean())
    if reward.rows >= ENOUGH and 0 < max(seldom, lately) <= SELDOM:
        text = (
            f"reward {lowest:.4g}, its lowest, in {(~above).sum()} of {reward.rows} rows and {1 - lately:.0%} of "
            "the last fifth: hardly ever is anything rewarded"
        )
        yield _standing(reward, 0, text, "reward-flat", is_grave=True)
        return
    if course.is_lower:
        fall = _fall(reward, course)
        yield fall
        if fall.shows == "reward-falls":
            return
    is_whole = reward.steps[0] <= 2 * int(np.median(np.diff(reward.steps)))
    early, late = reward.means[: reward.rows // 5], reward.means[reward.rows // 2 :]
    width = max(5, reward.rows // 20)  # the means of so many rows wander by more than the noise of each explains
    error = max(float(np.std(reward.means)), course.wander * np.sqrt(width)) * np.sqrt(1 / len(early) + 1 / len(late))
    off, gain = float(late.mean() - early.mean()), course.end - course.start
    if writes:  # the reward of prompts goes with them: a small gain is a gain
        is_level = abs(off) <= FLAT * error and not course.has_gained
        is_level &= course.best - course.start <= NOTABLE * course.size or course.start * course.best < 0
    else:
        is_level = gain <= course.wander or (off <= FLAT * error and gain < NO_GAIN * course.wander)
    is_long = reward.rows >= (2 if writes else 1) * ENOUGH
    if is_whole and is_long and is_level and not course.has_learned and lowest < float(reward.values.max()):
        text = (
            f"reward {course.start:.4g} at first, {course.best:.4g} at its best and {course.end:.4g} in the end of "
            f"{reward.rows} rows, which is no more than it wanders: nothing is gained"
        )
        yield _standing(reward, 0, text, "reward-flat")


def _fall(reward: Track, course: Course) -> Standing:
    """Most of what was gained, or most of what there was; a smaller fall counts where another signal confirms it."""
    gain, fall, size = course.best - course.start, course.best - course.end, course.size
    has_gained = gain >= SURE * course.wander
    is_lost = (has_gained and fall >= LOST * gain and fall >= LARGE * size) or fall >= HALF * size
    is_back = course.end - course.lowest >= ON_THE_WAY_BACK * (course.best - course.lowest)
    is_notable = is_lost or fall >= (NOTABLE if has_gained else LARGE) * size
    is_notable |= gain >= STEADY * course.wander and fall >= HALF * gain  # whatever zero means on its scale
    gained = f" from {course.start:.4g}" if has_gained else ""
    text = (
        f"reward{gained} up to {course.best:.4g} at step {_step(reward, course.best_row)}, and {course.end:.4g} in the "
        f"end, lower since step {_step(reward, course.fallen_row)}"
    )
    shows = "reward-falls" if is_notable else "reward-lower"
    return _standing(reward, course.fallen_row, text, shows, is_grave=is_lost and not is_back)


def _entropy(
    entropy: Track | None, reward: Track | None, gradient: Track | None, course: Course | None
) -> Iterator[Standing]:
    """An entropy that falls to near nothing, or explodes. One of both signs, of a density, has no such ends.

    Where all of it is negative it is the loss of an entropy bonus, which some frameworks call by the same name.
    """
    if entropy is not None and entropy.values.max() <= 0:
        entropy = replace(entropy, values=-entropy.values)
    if entropy is None or entropy.values.min() < 0:
        return
    high = float(entropy.level[: entropy.rows - entropy.lasting].max())
    row = entropy.falls(VANISHED)
    if (
        row is None
        and (low := entropy.falls(LITTLE)) is not None
        and (_is_unpaid(entropy, low, reward) or _is_driven(entropy, low, gradient))
    ):
        row = low
    if row is not None:
        is_none = entropy.end <= min(NOTHING * high, SMALL_ENTROPY)
        text = (
            f"policy entropy {high:.4g} at its highest, {entropy.end:.2g} in the end, down there since step "
            f"{_step(entropy, row)}: the policy tries nothing new"
        )
        learned = course is not None and course.has_learned
        yield _standing(entropy, row, text, "entropy-vanishes", is_grave=is_none and not learned)
    usual = entropy.early()
    row = entropy.since(entropy.level >= max(EXPLODED * usual, usual + MORE_NATS))
    if row is not None and row > 0:
        text = f"policy entropy {usual:.4g} at first, {entropy.end:.4g} in the end, since step {_step(entropy, row)}"
        yield _standing(entropy, row, text, "entropy-explodes")


def _is_unpaid(entropy: Track, low: int, reward: Track | None) -> bool:
    """Whether the entropy was given away for nothing. A policy that learns trades it for reward: while it falls from
    half of its highest to next to nothing, the reward goes on rising by a good part of what it rose until then."""
    if reward is None:
        return False
    half = int(np.flatnonzero(entropy.level > HALF * entropy.level[:low].max())[-1])
    width = max(WIDTH, reward.rows // 20)
    at = int(np.searchsorted(reward.steps, entropy.steps[half]))
    start, middle = reward.means[:width].mean(), reward.means[max(at - width, 0) : at + 1].mean()
    return is_unpaid(float(start), float(middle), float(reward.means[-width:].mean()))


def _is_driven(entropy: Track, low: int, gradient: Track | None) -> bool:
    """Whether the entropy goes where the gradient leaps and stays up for a while: a term of the loss takes it away. A
    policy that becomes sure by itself has less and less gradient."""
    if gradient is None:
        return False
    half = int(np.flatnonzero(entropy.level > HALF * entropy.level[:low].max())[-1])
    width = max(2 * WIDTH, gradient.rows // 20)
    last = int(np.searchsorted(gradient.steps, entropy.steps[half]))
    if last < 2 * width or gradient.rows < last + width:
        return False
    usual = float(np.median(gradient.values[: last - width]))
    held = np.lib.stride_tricks.sliding_window_view(gradient.values[last - width : last + width], width)
    return usual > 0 and float(np.median(held, axis=1).max()) >= GRADIENT_GROWS * usual


def _divergence(run: Run) -> Iterator[Standing]:
    """A divergence that leaps many-fold and stays, or is many times what it was in the first half of the log."""
    for name, floor in KL_FLOOR.items():
        track = track_of(run, name)
        if track is None:
            continue
        if (row := track.runs_away(MANY_FOLD, floor)) is not None:
            before = max(float(np.median(track.values[:row])), 0.0)
            whose = "the reference" if name == "kl" else "the policy that the samples are of"
            text = f"divergence from {whose} {before:.3g} before step {_step(track, row)}, {track.end:.3g} in the end"
            yield _standing(track, row, text, "kl-leaps")
    gradient = track_of(run, "grad_norm")
    if gradient is not None and (row := gradient.runs_away(GRADIENT_GROWS, 0.0)) is not None:
        yield _standing(gradient, row, "", "gradient-grows")


def _nothing_to_learn(
    run: Run, reward: Track | None, gradient: Track | None, course: Course | None
) -> Iterator[Standing]:
    """Groups whose rewards are all the same, or a gradient of nothing: no step from there on teaches anything."""
    shares, spread = track_of(run, "zero_spread_share"), track_of(run, "reward_std")
    dead_row = _dead_since(gradient)
    learned = course is not None and course.has_learned
    track, row, text = None, None, ""
    if shares is not None:
        track, row = shares, shares.since(shares.level >= NO_SPREAD, rows=max(10, shares.rows // 5))
        text = f"{shares.end:.0%} of the groups have no spread of rewards"
    elif spread is not None:
        track, row = spread, spread.since(spread.level <= 1e-6 * spread.values.max(), rows=max(10, spread.rows // 5))
        text = "the rewards of a group are all the same"
    is_constant = reward is not None and reward.values.min() == reward.values.max()
    if row is None and reward is not None and is_constant and _has_no_loss(run):
        text = f"the reward is {reward.end:.4g} and the loss exactly 0 in every row: nothing is learned"
        yield _standing(reward, 0, text, "nothing-to-learn", is_grave=True)
        return
    if row is None and reward is not None and is_constant and dead_row is None:
        # that of an episode at its best is constant, too: without a spread or a gradient nobody knows
        text = f"the reward is {reward.end:.4g} in every row: the task is solved, or the reward says nothing"
        yield _standing(reward, 0, text, "reward-flat")
        return
    if row is None and reward is not None and is_constant:
        track, row, text = reward, 0, f"the reward is {reward.end:.4g} in every row"
    if track is None or row is None:
        if gradient is None or dead_row is None:
            return
        track, row, text = gradient, dead_row, "the gradient is nothing"
    elif gradient is not None and dead_row is not None:
        text += ", and the gradient is nothing"
    what = "nothing is learned any more" if dead_row is not None else "hardly anything is left to learn from"
    is_long = gradient is not None and dead_row is not None and gradient.rows - dead_row > gradient.rows / 2
    is_lower = course is not None and course.is_lower
    is_grave = is_long or (dead_row is not None and not learned) or (is_lower and track is not gradient)
    is_grave |= is_constant and row == 0
    is_at_its_lowest = reward is not None and reward.end <= float(reward.values.min())
    is_grave |= is_at_its_lowest and track.rows >= ENOUGH and row <= track.rows // 4  # not even at first
    solved = f"; the reward is at its best, {course.end:.4g}" if learned and course is not None else ""
    text = f"{text}: {what}, since step {_step(track, row)}{solved}"
    yield _standing(track, row, text, "nothing-to-learn", is_grave=is_grave)


def _has_no_loss(run: Run) -> bool:
    """Whether the loss is exactly 0 wherever it was logged."""
    losses = track_of(run, "loss")
    return losses is not None and not losses.values.any()


def _dead_since(gradient: Track | None) -> int | None:
    """The row from which on a gradient is nothing, against what it is where it is something."""
    if gradient is None:
        return None
    living = gradient.values[gradient.values > 0]
    usual = float(np.median(living[: max(len(living) // 2, 1)])) if len(living) else 0.0
    return gradient.since(gradient.level <= DEAD * usual, rows=max(10, gradient.rows // 5))


def _completions(run: Run, course: Course | None) -> Iterator[Standing]:
    """Completions that become very short, leap in length, or are all cut."""
    length, cut = track_of(run, "completion_length"), track_of(run, "cut_share")
    if length is not None and length.values.min() >= 0:
        if (row := length.falls(SHORT)) is not None:
            high = float(length.level[:row].max()) if row else length.end
            text = (
                f"completions of {high:.4g} tokens at their longest, {length.end:.3g} since step {_step(length, row)}"
            )
            yield _standing(length, row, text, "length-collapses")
        elif (row := length.leap(LONG, 1.0)) is not None:
            before = float(np.median(length.values[:row]))
            text = f"completions of {before:.4g} tokens before step {_step(length, row)}, {length.end:.4g} since"
            yield _standing(length, row, text, "length-leaps")
    row = None if cut is None else cut.since(cut.level >= ALL_CUT)
    if cut is not None and row is not None and (cut.early() < SOME_CUT or row <= cut.rows // 2):
        text = f"{cut.end:.0%} of the completions are cut since step {_step(cut, row)}, {cut.early():.0%} at first"
        is_grave = course is not None and not course.has_gained and cut.rows >= ENOUGH and row <= cut.rows // 2
        yield _standing(cut, row, text, "completions-cut", is_grave=is_grave)


def _updates(run: Run) -> Iterator[Standing]:
    """Ratios that are clipped throughout, and a sampler whose probabilities are not the trainer's."""
    clip = track_of(run, "clip_share")
    row = None if clip is None else clip.since(clip.level >= ALL_CLIPPED)
    if clip is not None and row is not None and clip.early() < SOME_CLIPPED:
        text = f"{clip.end:.0%} of the ratios are clipped since step {_step(clip, row)}, {clip.early():.0%} at first"
        yield _standing(clip, row, text, "clip-saturates")
    elif (far := _too_large(clip, track_of(run, "policy_kl"))) is not None:
        yield far
    for name, factor, floor, words in (
        ("logp_gap", APART, APART_FLOOR, "mean log-probability gap between sampler and trainer"),
        ("logp_gap_max", RATIO, 0.5, "largest log-probability gap between sampler and trainer"),
        ("importance_ratio_max", RATIO, 1.0, "largest importance ratio"),
    ):
        track = track_of(run, name)
        if track is None:
            continue
        track = replace(track, values=np.abs(track.values))
        if (row := track.runs_away(factor, floor)) is not None:
            before = float(np.median(track.values[: max(row, 1)]))
            text = f"{words} {before:.3g} before step {_step(track, row)}, {track.end:.3g} in the end"
            yield _standing(track, row, text, "sampler-apart")
            return


def _too_large(clip: Track | None, divergence: Track | None) -> Standing | None:
    """Updates that go further than their samples reach, in the second half of the log and in the end."""
    for track, limit, words in (
        (divergence, FAR, "nats from the policy that the samples are of"),
        (clip, MOST_CLIPPED, "of the ratios are clipped"),
    ):
        if track is None or min(float(np.median(track.values[track.rows // 2 :])), track.end) < limit:
            continue
        row = track.since(track.level >= limit) or 0
        text = f"{track.end:.2g} {words} in the end: updates are too large for their samples"
        return _standing(track, row, text, "clip-saturates")
    return None


def _held_out(run: Run, reward: Track | None, course: Course | None) -> Iterator[Standing]:
    """A held-out reward that falls while the reward in training rises: what is learned is the scorer.

    It may come back later, where what pleases the scorer can be had beside what is meant.
    """
    held_out = track_of(run, "eval_reward", fewest=FEWEST_HELD_OUT)
    if held_out is None or reward is None or course is None or reward.signal == held_out.signal:
        return
    values = held_out.values
    pairs, lows = np.minimum(values[:-1], values[1:]), np.maximum(values[:-1], values[1:])
    falls = np.maximum.accumulate(pairs) - lows  # two in a row: the best and the lowest of many single ones are chance
    low = int(np.argmax(falls))
    high = int(np.argmax(pairs[: low + 1]))
    fall, best = float(falls[low]), float(pairs[high])
    end = float(np.median(values[-3:]))
    before, then, last = (_around(reward, step) for step in (*held_out.steps[[high, low + 1]], reward.steps[-1]))
    is_up = has_risen(before, min(then, last), course.wander)
    if not is_up or not has_fallen(
        float(values[high]), float(values[high]) - fall, noise_about_a_trend(values.tolist())
    ):
        return
    is_back = end >= best - fall / 2
    since = f"and {end:.4g} in the end" if not is_back else f"{best - fall:.4g} after that, and {end:.4g} in the end"
    text = (
        f"held-out reward {best:.4g} at step {held_out.steps[high]}, {since}, while the reward in training "
        f"rose from {before:.4g} to {last:.4g}"
    )
    is_grave = not is_back and fall >= HALF * abs(best)
    yield _standing(held_out, high, text, "held-out-reward-falls", is_grave=is_grave)


def _around(track: Track, step: int) -> float:
    """The level about a step."""
    return float(track.level[min(int(np.searchsorted(track.steps, step)), track.rows - 1)])


def _step(track: Track, row: int) -> int:
    return int(track.steps[row])


def _standing(track: Track, row: int, text: str, shows: str, *, is_grave: bool = False) -> Standing:
    return Standing(signal=track.signal, step=_step(track, row), text=text, shows=shows, is_grave=is_grave)
