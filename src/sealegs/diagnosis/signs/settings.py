"""Signs in the settings: the learning rate, and the settings that add or remove stability margin."""

import math
from collections.abc import Callable

import numpy as np

from sealegs.diagnosis.curve.rises import stretches
from sealegs.diagnosis.facts import LEAD, NEAR, SOON, USUAL, Against, Facts, Series
from sealegs.diagnosis.signs.sign import NOT_ASKED, Sign, opposite, so, unlogged

UNEXPLAINED = 5.0
"""Largest growth of updates beyond that of the gradients. Adam usually moves a weight by a fifth to a half of the
learning rate, and by all of it if gradients agree from step to step: an update may grow by this factor, hardly more."""
WITHOUT_BETA2 = ("sgd", "lion", "adafactor", "adagrad", "rprop", "lbfgs", "signum")
"""Parts of the names of optimizers that divide by no average of squares, or by one that gets longer by itself."""
CLIPS_MUON = 10.0
"""A clip up to which an orthogonalised update is made smaller: its norm is the root of its rank, which is larger."""
OUTGROWN = 2.0
"""Growth of updates with a gradient that a second moment which keeps up does not let through for long."""
NO_RATE, ENDED = 1e-6, 0.15
"""Share of the peak up to which a learning rate is nothing, and of the log for which it must be so. Schedules that
fall to 0 are there for a hundredth of the log."""
ENDS_AT = 0.9
"""Share of the planned steps from which on a warm-up will not end any more."""
TINY = 1e-6
"""Learning rates up to which no run diverges by their size; policies are tuned at them."""
TWICE = 1.9
"""Times the loss of guessing from which on a first loss is far above it."""
FIRST_FEW = 5
"""Rows in which a rate that is at its peak already had no warm-up."""
FIRST_ROWS = 50
"""Rows in which a run without a warm-up shows it, or a fiftieth of the log."""
BEGINS_THERE = 0.05
"""Share by which the first logged rate may differ from that of the settings, to be it."""
HARDLY = 0.25
"""Share of its fall in as many rows before that a loss must still fall not to have turned."""
RISEN = 1.3
"""Growth of a learning rate from its lowest that is worth a look at the loss."""
SAMPLES = 10
"""Samples of the updates before the onset that define what is usual."""

COSINE = 0.02
"""Share of its rise by which a rate may be off a cosine. A straight line is off by 0.1 and more."""

CYCLES = (1, 2)
"""How many times as long as the first a second cycle of a schedule may be."""
FALLEN, ALIKE = 0.9, 0.05
"""Two cycles are alike if they fall below the first share, and nowhere differ by more than the second."""


def lr_jumps(facts: Facts) -> Sign:
    """The learning rate leaps up just before the loss does."""
    if facts.focus is None:
        return NOT_ASKED
    if facts.series("lr").is_empty:
        return unlogged("lr")
    jump = facts.lr_jump_at_onset()
    if jump is None:
        return so(False, f"panel 2: LR smooth about step {facts.onset}")
    return so(True, f"panel 2: LR from {jump.before:.3g} to {jump.after:.3g} at step {jump.step}")


def lr_smooth(facts: Facts) -> Sign:
    """The learning rate continues smoothly around the onset."""
    return opposite(lr_jumps(facts))


def lr_restarts(facts: Facts) -> Sign:
    """The learning rate leaps back up and falls from there as it fell from its peak: the schedule begins again."""
    if facts.focus is None or (jump := facts.lr_jump_at_onset()) is None:
        return NOT_ASKED
    rates = facts.series("lr").finite
    before, after = rates.within(-math.inf, jump.step - 1).values, rates.within(jump.step, math.inf).values
    fell = before[int(np.argmax(before)) :]
    if jump.after > 1.05 * fell[0]:
        return so(False, f"panel 2: LR {jump.after:.3g} from step {jump.step} on, above any before")
    for times in CYCLES:
        first = fell[: -(-len(after) // times)].repeat(times)[: len(after)] / fell[0]
        falls = after[: len(first)] / after[0]
        if first[-1] < FALLEN and np.abs(falls - first).max() < ALIKE:
            again = f"from step {jump.step} on it falls as it did from {fell[0]:.3g}"
            return so(True, f"panel 2: LR back at {jump.after:.3g}, and {again}: the schedule begins again")
    return so(False, f"panel 2: LR {jump.after:.3g} from step {jump.step} on, not as from its peak")


def updates_leap(facts: Facts) -> Sign:
    """Every group of weights suddenly moves many times as far, and neither gradients nor the logged rate explain it."""
    if facts.focus is None or not (facts.leaps or facts.is_nonfinite):
        return NOT_ASKED
    groups = facts.groups("update_ratio") or ("update_rms",)
    # From where it may have begun: updates are sampled, and a slowly rising loss exceeds its noise only later.
    sampled = facts.series(groups[0]).steps
    apart = int(np.median(np.diff(sampled))) if len(sampled) > 1 else 0
    begin = min(facts.focus.start, facts.onset) - max(LEAD * facts.stride, apart)
    leaps = [leap for name in groups if (leap := _update_leap(facts, name, begin)) is not None]
    if not leaps:
        return unlogged("update_ratio/<group>")
    least = min(leaps, key=lambda leap: leap.ratio)
    norms = facts.series("grad_norm").finite
    usual, here = norms.within(-math.inf, begin - 1).values[-USUAL:], norms.within(begin, least.step - 1).values
    if not len(usual) or not len(here):
        return unlogged("grad_norm")
    gradients = float(here.max() / max(usual.mean(), 1e-30))
    text = (
        f"panels 2, 3, 5: for their LR, updates are at least {least.ratio:.2g}-fold in all {len(leaps)} groups at step "
        f"{least.step}, and the gradient norm {gradients:.2g}-fold"
    )
    return so(least.ratio > UNEXPLAINED * max(gradients, 1.0), text)


def updates_outgrow(facts: Facts) -> Sign:
    """Updates grow several-fold with a gradient, at a smooth learning rate: what divides them lags behind."""
    if facts.focus is None or not facts.leaps or lr_jumps(facts).holds:
        return NOT_ASKED
    names = facts.groups("update_ratio") or ("update_rms",)
    begin = min(facts.focus.start, facts.onset) - LEAD * facts.stride
    leaps = [leap for name in names if (leap := _update_leap(facts, name, begin)) is not None]
    gradient = facts.highest("grad_norm")
    if not leaps:
        return unlogged("update_rms")
    if gradient is None:
        return unlogged("grad_norm")
    most = max(leaps, key=lambda leap: leap.ratio)
    updates = f"updates {most.ratio:.2g}-fold at step {most.step}, gradients {gradient.ratio:.2g}-fold"
    text = f"panels 3, 5: for their LR, {updates}"
    return so(most.ratio > OUTGROWN and gradient.ratio > OUTGROWN, text)


def step_size_jumps(facts: Facts) -> Sign:
    """The step size leaps just before the loss does, by the logged learning rate or by the updates."""
    updates = updates_leap(facts)
    return updates if updates.holds else lr_jumps(facts)


def lr_not_restored(facts: Facts) -> Sign:
    """The learning rate after the resume differs from the one at the same step before, or does not continue it."""
    if not facts.resumes:
        return NOT_ASKED
    if facts.series("lr").is_empty:
        return unlogged("lr")
    treated = [one for one in facts.treatments if one.knob == "lr"]
    since = min((one.step for one in treated), default=math.inf)
    for step, before, after in facts.again("lr"):
        if step >= since:
            break
        if isinstance(before, float) and isinstance(after, float) and abs(after - before) > 0.02 * abs(before):
            return so(True, f"panel 2: LR at step {step} {before:.3g} before the resume, {after:.3g} after")
    known = {one.step for one in treated}
    for jump in facts.lr_jumps:
        if any(resume <= jump.step <= resume + 2 * facts.stride for resume in facts.resumes if resume not in known):
            return so(True, f"panel 2: LR {jump.before:.3g} before the resume, {jump.after:.3g} at step {jump.step}")
    if treated:
        return so(False, f"panel 2: {treated[0].text}: a treatment, no loss of state")
    return so(False, "panel 2: LR goes on after the resume as before")


def warm_up_begins_again(facts: Facts) -> Sign:
    """The learning rate falls to next to nothing in the middle of the run and climbs again; the trouble, where there is
    one, comes while it climbs or soon after."""
    if facts.series("lr").is_empty:
        return unlogged("lr")
    again = facts.warm_up_again
    if again is None:
        return so(False, "")
    is_apart = facts.focus is not None and not again.step <= facts.onset <= again.last + SOON * facts.stride
    return NOT_ASKED if is_apart else so(True, f"panel 2: {again}")


def lr_rises(facts: Facts) -> Sign:
    """The learning rate has risen while the loss drifts up."""
    change = facts.change("lr")
    if change is None:
        return unlogged("lr")
    first, last = facts.slow_window
    return so(
        change.ratio > 1.01, f"panel 2: LR {change.usual:.3g}, then {change.value:.3g} in steps {first} to {last}"
    )


def lr_rises_throughout(facts: Facts) -> Sign:
    """The learning rate has risen from the first step to the last: a warm-up without an end."""
    rates = facts.series("lr").finite.values
    if len(rates) < 10:
        return unlogged("lr")
    rises = bool((np.diff(rates) >= 0).all() and rates[-1] > 1.05 * rates[len(rates) * 4 // 5])
    return so(rises, f"panel 2: LR rises from {rates[0]:.3g} to {rates[-1]:.3g}, to the last step")


def lr_rises_as_a_cosine(facts: Facts) -> Sign:
    """The learning rate has risen to the last step as a cosine does, slow, fast and slow, perhaps after a warm-up,
    which is linear; the cosine may have been counted from its first step."""
    rates = facts.series("lr").finite
    if len(rates.values) < 10:
        return unlogged("lr")
    sign = lr_rises_throughout(facts)
    if not sign.holds:
        return sign
    slopes = np.diff(rates.values) / np.diff(rates.steps)
    corner = int(np.argmin(np.diff(slopes[: max(len(slopes) // 5, 2)]))) + 1  # where a warm-up may end
    after = Series(rates.steps[corner:], rates.values[corner:])
    off = min(
        _off_a_cosine(each, int(begun[0])) for each, begun in ((rates, rates[0]), (after, after[0]), (after, rates[0]))
    )
    return so(off < COSINE, f"{sign.text}, as half a cosine does")


def _off_a_cosine(rates: Series, begun: int) -> float:
    """The share of its rise by which a rate is off the first part of a cosine that began at a step, or all of its
    rising half."""
    time = (rates.steps - begun) / (rates.steps[-1] - begun)
    risen = (rates.values - rates.values[0]) / (rates.values[-1] - rates.values[0])
    phases = np.pi * np.linspace(0.5, 1.0, 11)[:, None] * time  # of half a period, which the run need not have finished
    fallen = np.cos(phases)
    shapes = (fallen[:, :1] - fallen) / (fallen[:, :1] - fallen[:, -1:])
    return float(np.abs(risen - shapes).max(axis=1).min())


def lr_falls_then_rises(facts: Facts) -> Sign:
    """The learning rate fell and rises again without a jump, once: an inverted cosine."""
    rates = facts.series("lr").finite
    if len(rates.values) < 20:
        return unlogged("lr")
    warmed_up = len(rates.values) // 10
    low = int(np.argmin(rates.values[warmed_up:])) + warmed_up
    top = rates.values[: low + 1].max()
    is_cycle = len(stretches(rates.values[warmed_up:] < (rates.values[low] + top) / 2)) > 1
    turned = (
        rates.values[-1] > 1.2 * rates.values[low] and top > 1.2 * rates.values[low] and low < 0.9 * len(rates.values)
    )
    # A planned restart warms up in a small part of its decay's time; a cosine rises as slowly as it fell.
    rise = int(np.argmax(rates.values[low:]))
    is_slow = low + rise == len(rates.values) - 1 or rise > low / 3
    jumped = any(jump.step >= rates.steps[low] for jump in facts.lr_jumps)
    lowest = f"{rates.values[low]:.3g} at step {rates.steps[low]}"
    text = f"panel 2: LR {top:.3g}, down to {lowest}, up to {rates.values[-1]:.3g}"
    return so(bool(turned) and is_slow and not jumped and not is_cycle, text)


def loss_turns_with_lr(facts: Facts) -> Sign:
    """Since the learning rate has turned up again, the loss has hardly fallen or rises, while it fell until then."""
    rates, losses = facts.series("lr").finite, facts.loss.finite
    if len(rates.values) < 20 or len(losses.values) < 4 * SAMPLES:
        return unlogged("lr") if rates.is_empty else NOT_ASKED
    warmed_up = len(rates.values) // 10
    low = int(np.argmin(rates.values[warmed_up:])) + warmed_up
    risen = rates.values[-1] / max(rates.values[low], 1e-30)
    here = int(np.searchsorted(losses.steps, rates.steps[low]))
    since, count = len(losses.values) - here, max(len(losses.values) // 20, SAMPLES)
    if risen < RISEN or since < 2 * count or here < 2 * count:
        return so(False, f"panel 2: LR {rates.values[-1]:.3g} at the end, {rates.values[low]:.3g} at its lowest")
    middles = (max(here - since, count // 2), here, len(losses.values) - count // 2)
    before, there, end = (float(np.median(losses.values[at - count // 2 : at + count // 2])) for at in middles)
    text = f"panels 1, 2: loss {there:.4g} where LR was lowest, {end:.4g} in the end, at {risen:.3g} times that LR"
    return so(end > there or there - end < HARDLY * (before - there), text)


def lr_ends_early(facts: Facts) -> Sign:
    """The learning rate is at nothing for the last part of the log: the schedule was over before the run."""
    rates = facts.series("lr").finite
    if rates.is_empty:
        return unlogged("lr")
    nothing = rates.values <= NO_RATE * rates.values.max()
    rows = len(nothing) - (int(np.flatnonzero(~nothing)[-1]) + 1 if not nothing.all() else len(nothing))
    is_long = rows >= max(len(nothing) * ENDED, USUAL // 2)
    since = f" since step {rates.steps[-rows]}, for {rows / len(nothing):.0%} of the log" if is_long else ""
    return so(is_long, f"panel 2: LR {rates.values[-1]:.3g} in the end{since}")


def warm_up_outlasts_the_run(facts: Facts) -> Sign:
    """The learning rate still rises where the planned steps are nearly over."""
    planned, rising = facts.known.number("steps"), lr_rises_throughout(facts)
    if not rising.holds:
        return rising
    if planned is None:
        return unlogged("the planned steps in the settings")
    is_over = 0 < ENDS_AT * planned <= facts.last <= 1.1 * planned
    return so(is_over, f"{rising.text}; {planned:g} steps are planned")


def rate_above_its_setting(facts: Facts) -> Sign:
    """The learning rate at its highest is a whole multiple of the one in the settings: by ranks, or by accumulation.

    Not where it begins with that one and is raised from there: OneCycleLR writes its start into the settings.
    """
    told, rates = facts.known.number("lr"), facts.series("lr").finite.values
    if rates.size == 0 or told is None or told <= 0:
        return unlogged("lr" if rates.size == 0 else "the learning rate in the settings")
    factor = float(rates.max()) / told
    if rates.size > 1 and abs(float(rates[0]) / told - 1) < BEGINS_THERE:
        return NOT_ASKED
    is_whole = math.isfinite(factor) and round(factor) >= 2 and abs(factor - round(factor)) < 0.01 * factor
    return so(
        is_whole, f"panel 2: LR {rates.max():.3g} at its highest, {factor:.3g} times the {told:.3g} of the settings"
    )


def no_warm_up(facts: Facts) -> Sign:
    """The trouble begins in the first steps, and the learning rate had no warm-up: by the settings, or as logged."""
    steps, rates = facts.known.number("warmup_steps"), facts.series("lr").finite
    rows = int((facts.loss.steps < facts.onset).sum())
    begins = len(facts.loss.steps) > 0 and facts.loss.steps[0] <= facts.stride
    if facts.focus is None or not begins or rows > max(len(facts.loss.steps) // 50, FIRST_ROWS):
        return NOT_ASKED
    if len(rates.values) >= 5:
        soon = float(rates.values[:FIRST_FEW].max())
        text = f"panel 2: LR {soon:.3g} in the first {FIRST_FEW} rows, {rates.values.max():.3g} at its peak"
        return so(soon > 0.9 * float(rates.values.max()), text)
    if steps is None:
        return unlogged("lr")
    return so(steps <= 0, f"a warm-up of {steps:g} steps, by the settings")


def rate_is_tiny(facts: Facts) -> Sign:
    """The learning rate has never been above a millionth: to lower it further changes nothing."""
    rates, told = facts.series("lr").finite.values, facts.known.number("lr")
    if not len(rates) and told is None:
        return unlogged("lr")
    highest = float(rates.max()) if len(rates) else float(told or 0.0)
    return so(0 < highest <= TINY, f"panel 2: LR {highest:.3g} at its highest")


def lr_near_peak(facts: Facts) -> Sign:
    """The learning rate is at its highest, or nearly so."""
    rates = facts.series("lr").finite
    here = rates.within(-math.inf, facts.onset).values
    if not len(here):
        return unlogged("lr")
    share = here[-1] / max(rates.values.max(), 1e-30)
    return so(facts.focus is not None and share > 0.9, f"panel 2: LR {here[-1]:.3g}, {share:.0%} of its peak")


def warmup_just_over(facts: Facts) -> Sign:
    """The onset is near the step at which the warm-up reaches the peak. One leap after level rows is no warm-up."""
    if facts.focus is None:
        return NOT_ASKED
    rates = facts.series("lr").finite
    if len(rates.values) < 5:
        return unlogged("lr")
    if (rising := lr_rises_throughout(facts)).holds:
        return opposite(rising)
    top = int(np.argmax(rates.values >= 0.999 * rates.values.max()))
    end = int(rates.steps[top])
    rose = rates.values[top] > 2 * rates.values[0]
    rises = np.diff(rates.values[: top + 1])
    leap = int(np.argmax(rises)) if len(rises) else 0
    if rose and leap >= FIRST_FEW and rises[leap] > 0.5 * (rates.values[top] - rates.values[0]):
        at = int(rates.steps[leap + 1])
        return so(
            False, f"panel 2: LR leaps from {rates.values[leap]:.3g} to {rates.values[leap + 1]:.3g} at step {at}"
        )
    near = -0.3 * end <= facts.onset - end <= max(0.5 * end, NEAR * facts.stride)
    return so(bool(rose and near), f"panel 2: warm-up ends at step {end}, the trouble begins at {facts.onset}")


def beta2_long(facts: Facts) -> Sign:
    """beta2 averages over more than 50 steps."""
    beta2 = facts.known.number("beta2")
    if beta2 is None:
        return unlogged("optimizer.beta2 in the settings")
    return so(beta2 > 0.98, f"beta2 {beta2:g}: the second moment averages {1 / max(1 - beta2, 1e-9):.0f} steps")


def beta2_short(facts: Facts) -> Sign:
    """beta2 follows within some 20 steps."""
    return opposite(beta2_long(facts))


def second_moment_leaps(facts: Facts) -> Sign:
    """The norm of Adam's second moment leaps with the loss."""
    if not facts.leaps:
        return NOT_ASKED
    found = facts.highest("moment2_norm")
    if found is None:
        return unlogged("moment2_norm")
    return so(found.ratio > 5, f"panel 6: second moment {found.ratio:.3g}-fold at step {found.step}")


def clip_off(facts: Facts) -> Sign:
    """Gradients are not clipped, or at so high a norm that it does not matter."""
    clip = facts.clip_at(facts.onset)
    if clip is None:
        return unlogged("optimizer.clip in the settings")
    return so(clip <= 0 or clip > 10, f"clip {clip:g}")


def decay_low(facts: Facts) -> Sign:
    """Weight decay below 0.01."""
    return _decay(facts, lambda decay: decay < 0.01)


def decay_high(facts: Facts) -> Sign:
    """Weight decay above 0.5."""
    return _decay(facts, lambda decay: decay > 0.5)


def init_wide(facts: Facts) -> Sign:
    """The initial weights are more than twice as wide as the model's width calls for."""
    std, usual = facts.known.number("init_std"), facts.known.init_std_from_width
    if std is None or usual is None:
        return unlogged("model.init_std and model.width in the settings")
    return so(std > 2 * usual, f"initial std {std:g}, sqrt(1 / (3 width)) is {usual:.3g}")


def starts_above_uniform(facts: Facts) -> Sign:
    """The first loss is well above that of guessing: logits are wide from the start."""
    vocabulary, losses = facts.known.number("vocabulary"), facts.loss.finite.values[:3]
    if not vocabulary or vocabulary < 2:
        return unlogged("model.vocabulary in the settings")
    if not len(losses) or facts.loss.steps[0] > 20:
        return NOT_ASKED
    return so(
        losses[0] > 1.15 * math.log(vocabulary),
        f"first loss {losses[0]:.4g}, ln({vocabulary:g}) is {math.log(vocabulary):.4g}",
    )


def starts_far_above_uniform(facts: Facts) -> Sign:
    """The first loss is twice that of guessing, or more: no model begins so, trained or not."""
    above, vocabulary = starts_above_uniform(facts), facts.known.number("vocabulary")
    if not above.holds or vocabulary is None:
        return above
    return so(float(facts.loss.finite.values[0]) > TWICE * math.log(vocabulary), above.text)


def post_norm_deep(facts: Facts) -> Sign:
    """Norms after the residual sum, in a deep stack."""
    position, layers = facts.known.values.get("norm_position"), facts.known.number("layers")
    if position is None:
        return unlogged("model.norm_position in the settings")
    return so(position == "post" and (layers or 0) >= 12, f"{position}-norm, {layers or 0:g} layers")


def eps_zero(facts: Facts) -> Sign:
    """Norms divide without an epsilon."""
    eps = facts.known.number("norm_eps")
    return unlogged("model.norm_eps in the settings") if eps is None else so(eps == 0, f"norm eps {eps:g}")


def softmax_naive(facts: Facts) -> Sign:
    """Attention takes exponentials without subtracting the maximum."""
    return _switch(facts, "naive_softmax")


def log_loss_naive(facts: Facts) -> Sign:
    """The loss is log(softmax(x)), not log_softmax(x)."""
    return _switch(facts, "naive_log_loss")


def log_loss_sound(facts: Facts) -> Sign:
    """The settings say that the loss is log_softmax(x)."""
    naive = log_loss_naive(facts)
    return naive if naive.holds is None else so(not naive.holds, "the settings say that the loss is log_softmax(x)")


def _update_leap(facts: Facts, signal: str, begin: int) -> Against | None:
    """The largest update from a step on against the median before, each in units of the logged learning rate."""
    updates, rates = facts.series(signal).finite, facts.series("lr").finite
    near, before = updates.within(begin, facts.near_end), updates.within(-math.inf, begin - 1)
    if near.is_empty or before.is_empty:
        return None
    before = Series(before.steps[-SAMPLES:], before.values[-SAMPLES:])
    # A ratio belongs to the update before its row, which had the rate of that row.
    sizes, usual = (
        part.values / (1.0 if rates.is_empty else rates.at(part.steps - 1).clip(min=1e-30)) for part in (near, before)
    )
    place = int(np.argmax(sizes))
    return Against(int(near.steps[place]), float(sizes[place]), float(np.median(usual)))


def _decay(facts: Facts, is_so: Callable[[float], bool]) -> Sign:
    decay = facts.known.number("weight_decay")
    if decay is None:
        return unlogged("optimizer.weight_decay in the settings")
    return so(is_so(decay), f"weight decay {decay:g}")


def _switch(facts: Facts, name: str) -> Sign:
    if name not in facts.known.values:
        return unlogged(f"model.{name} in the settings")
    return so(facts.known.says(name), f"{name.replace('_', ' ')}")


def no_fixed_beta2(facts: Facts) -> Sign:
    """The optimizer has no average of squared gradients, or one whose length is not a setting."""
    name = facts.known.values.get("optimizer")
    if name is None:
        return unlogged("the optimizer in the settings")
    return so(any(word in str(name).lower() for word in WITHOUT_BETA2), f"optimizer {name}")


def muon_is_clipped(facts: Facts) -> Sign:
    """The optimizer orthogonalises its updates, and clips them by norm with the rest."""
    name, clip = facts.known.values.get("optimizer"), facts.known.number("clip")
    if name is None:
        return unlogged("the optimizer in the settings")
    text = f"optimizer {name}, clipped at {clip or 0:g}"
    return so("muon" in str(name).lower() and clip is not None and 0 < clip <= CLIPS_MUON, text)
