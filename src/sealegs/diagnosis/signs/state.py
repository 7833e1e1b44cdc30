"""Signs in the state: resumes, weights, moments, ranks, and losses with implausible values."""

import math
import re
from collections.abc import Callable

import numpy as np

from sealegs.diagnosis.curve.loss_curve import Floats
from sealegs.diagnosis.curve.rises import median
from sealegs.diagnosis.facts import DRIFT_STEPS, LIMITS, NEAR, SOON, Facts
from sealegs.diagnosis.signs import data as signs_of_data
from sealegs.diagnosis.signs import numbers
from sealegs.diagnosis.signs import settings as signs_of_settings
from sealegs.diagnosis.signs.sign import NOT_ASKED, Sign, opposite, so, unlogged
from sealegs.record.manifest import dotted

OF_WEIGHTS = re.compile(r"(?!.*(?:grad|layer_?norm|rms_?norm))(?:.*[/_.])?(?:param|weight|lora|adapter).*norm")
"""Names of columns with the norm of weights."""
REWARD = re.compile(r"reward|\breturns?\b|ep_?ret|ep_rew|score")
"""Names under which loops log their objective."""
WAITED = 200
"""Steps after which a loss that is back is known to stay."""
COURSE = 200
"""Rows after a resume whose course is compared with what came before."""
STILL = 50
"""Rows in which a norm of weights must have moved, if anything is updated."""
NO_CHANCE, TWICE_SO = 0.15, 0.45
"""Distance from a whole number at which a ratio is taken for one: of all ratios a third are so near. Where two signals
must have the same ratio it may be further."""
LEAST_PARTS = 2
ABOVE_GUESSING, AS_GUESSING, A_THIRD = 0.05, 0.01, 0.33
"""Share of the loss of guessing by which a first loss is above it, and below it, where nothing was learned; and the
part of all ratios that may lie so near a whole number."""
FAR_BEYOND = 100.0
"""How many times its norm a group of weights becomes that no update has made so."""


def resumed_before(facts: Facts) -> Sign:
    """The run was resumed shortly before the onset."""
    step = facts.resumed_before
    return so(step is not None, f"the run was resumed at step {step}, the trouble begins at {facts.onset}")


def moments_dropped(facts: Facts) -> Sign:
    """The optimizer's second moment is a small part of what it was before the resume."""
    resume = facts.resumed_before
    if resume is None:
        return NOT_ASKED
    moments = facts.series("moment2_norm").finite
    before = moments.within(-math.inf, resume - 1).values[-5:]
    after = moments.within(resume, resume + 20 * facts.stride).values[:1]
    if not len(before) or not len(after):
        return unlogged("moment2_norm")
    ratio = after[0] / max(before.mean(), 1e-30)
    return so(ratio < 0.3, f"panel 6: second moment {after[0]:.3g} after the resume, {before.mean():.3g} before")


def moments_kept(facts: Facts) -> Sign:
    """The optimizer's second moment came back with the resume."""
    return opposite(moments_dropped(facts))


def calibrates_again(facts: Facts) -> Sign:
    """After a resume the updates, or the gradients, leap and settle as fast as a second moment fills up again."""
    resume = facts.resumed_before
    if resume is None:
        return NOT_ASKED
    names = ("update_rms", *facts.groups("update_ratio"), "grad_norm")
    name = next((name for name in names if name in facts.run.signals), None)
    if name is None:
        return unlogged("grad_norm")
    beta2 = facts.known.number("beta2")
    if beta2 is None:
        return unlogged("optimizer.beta2 in the settings")
    memory = 1 / max(1 - beta2, 1e-3)
    series = facts.series(name).finite
    before = series.within(-math.inf, resume - 1).values[-20:]
    early = series.within(resume, resume + memory).values
    late = series.within(resume + memory, resume + 3 * memory).values
    if len(before) < 3 or not len(early) or not len(late):
        return NOT_ASKED
    leap, rest = (float(value / max(np.median(before), 1e-30)) for value in (early.max(), np.median(late)))
    text = f"panels 3, 5: {name} {leap:.3g}-fold after the resume, {rest:.3g}-fold from {memory:.0f} steps on"
    return so(leap > 2 and rest - 1 < (leap - 1) / 3, text)


def leaps_with_resume(facts: Facts) -> Sign:
    """The first loss after the resume is unusual. No update came before it, so weights, data or metric have changed."""
    first = _first_after_resume(facts)
    if first is None:
        return NOT_ASKED
    _, loss, usual, limit = first
    text = f"panel 1: loss {loss:.4g} in the first step after the resume, before any update; {usual:.4g} before"
    return so(loss > limit, text)


def leaps_after_resume(facts: Facts) -> Sign:
    """The first loss after the resume is as usual, and leaps a few updates later: the updates have changed."""
    first = _first_after_resume(facts)
    if first is None or not facts.leaps:
        return NOT_ASKED
    step, loss, usual, limit = first
    text = f"panel 1: loss {loss:.4g} at step {step}, {usual:.4g} before the resume, and leaps at step {facts.onset}"
    return so(loss <= limit and step < facts.onset <= step + NEAR, text)


def goes_on_from_earlier(facts: Facts) -> Sign:
    """The losses after a resume are those from an earlier step on, at the same pace: another checkpoint was loaded."""
    for resume in facts.resumes:
        before = facts.loss.finite.within(-math.inf, resume - 1)
        after = facts.loss.finite.within(resume, math.inf).values[:COURSE]
        if len(after) < COURSE // 4 or len(before.values) < 2 * len(after):
            continue
        noise = max(float(np.std(np.diff(part))) for part in (before.values[-COURSE:], after)) / math.sqrt(2)
        rows = len(after) // NEAR * NEAR
        now = after[:rows].reshape(-1, NEAR).mean(axis=1)
        means = np.convolve(before.values, np.ones(NEAR) / NEAR, "valid")
        starts = np.arange(len(means) - rows + NEAR)
        off = np.abs(means[starts[:, None] + np.arange(0, rows, NEAR)[None, :]] - now).mean(axis=1)
        best = int(np.argmin(off))
        apart = noise / math.sqrt(NEAR)
        is_off = now[0] - float(before.values[-2 * NEAR :].mean()) > 4 * apart
        has_shape = now[0] - now[-1] > 6 * apart
        is_earlier = len(before.values) - best > rows + NEAR
        if is_off and has_shape and is_earlier and off[best] < 2 * apart:
            step = int(before.steps[best])
            text = f"panel 1: the {rows} losses after the resume at step {resume} are as those from step {step} on"
            return so(True, f"{text}, at the same pace")
    return so(False, "") if facts.resumes else NOT_ASKED


def parts_restored(facts: Facts) -> Sign:
    """What the resume restored and what it did not, as far as the log tells; holds if it restored anything."""
    if not facts.resumes:
        return NOT_ASKED
    batches = signs_of_data.data_not_restored(facts)
    told = {
        "learning rate": signs_of_settings.lr_not_restored(facts),
        "second moment": moments_dropped(facts),
        "loss scale": numbers.scale_begins_again(facts),
        "batches": batches if batches.text else signs_of_data.data_begins_again(facts),
    }
    words = {None: "not logged", False: "as before", True: "not as before"}
    parts = [f"{name} {words[sign.holds]}" for name, sign in told.items() if sign.text or sign.holds is None]
    text = f"after the resume: {', '.join(parts)}; the random state leaves no trace"
    return so(any(sign.holds is False and sign.text for sign in told.values()), text)


def same_batch_other_loss(facts: Facts) -> Sign:
    """After the resume, the same step with the same batch has another loss, from the first such step on."""
    if "batch_hash" not in facts.run.signals or not facts.run.segments.any():
        return NOT_ASKED
    pairs = facts.losses_again()
    if not pairs:
        return NOT_ASKED
    step, before, after = pairs[0]
    apart = abs(after - before) > 0.01 * abs(before)
    return so(apart, f"panels 1, 10: same batch at step {step}, loss {before:.5g} before the resume, {after:.5g} after")


def versions_change(facts: Facts) -> Sign:
    """A resumed process ran on other versions or another kind of machine."""
    if not facts.resumes:
        return NOT_ASKED
    old = dict(facts.run.manifest.versions)
    told = [event for event in facts.run.events if event.kind == "resume" and event.detail.get("versions")]
    if not told or not old:
        return unlogged("versions at a resume")
    changed = [
        f"{name} {old.get(name)} -> {new}"
        for event in told
        for name, new in dict(event.detail["versions"]).items()
        if name in old and old[name] != new
    ]
    return so(bool(changed), ", ".join(changed[:4]) or "the versions are the same after the resume")


def settings_change(facts: Facts) -> Sign:
    """A resumed process ran with other settings."""
    changed = [
        f"{name} {value}"
        for event in facts.run.events
        if event.kind == "resume"
        for name, value in dotted(event.detail.get("changed") or {})
        if name != "steps"
    ]
    return so(bool(changed), f"changed at a resume: {', '.join(changed[:4])}")


def ranks_differ(facts: Facts) -> Sign:
    """Some ranks hold other weights than the rest."""
    series = facts.series("ranks_differ")
    if series.is_empty:
        return unlogged("ranks_differ")
    apart = series.values > 0
    first = series.steps[np.argmax(apart)] if apart.any() else None
    return so(
        bool(apart.any()), f"from step {first} on {series.values.max():.0f} ranks hold other weights than the rest"
    )


def computed_wrongly(facts: Facts) -> Sign:
    """A rank has computed a micro-batch otherwise than two others."""
    told = [event for event in facts.run.events if event.kind == "silent-corruption"]
    if not told and not any(event.kind == "recompute" for event in facts.run.events):
        return unlogged("silent-corruption")
    text = str(told[-1].detail.get("text", "")) if told else ""
    return so(bool(told), f"{len(told)} times, the last at step {told[-1].step}: {text}" if told else "")


def one_rank_stands_out(facts: Facts) -> Sign:
    """The largest gradient of the bad step came from one rank."""
    if facts.focus is None:
        return NOT_ASKED
    first, last = facts.onset - 5 * facts.stride, facts.onset + SOON * facts.stride
    told = list(facts.culprits(first, last).values())
    ranks = [text for text in told if "rank" in text]
    if not told:
        return unlogged("culprit")
    return so(bool(ranks), f"the worst gradient: {(ranks or told)[0]}")


def weights_stand_still(facts: Facts) -> Sign:
    """No logged norm of weights has changed by one digit, at a learning rate above 0."""
    names = [name for name in facts.run.signals if OF_WEIGHTS.search(name.lower()) and facts.run.has_numbers(name)]
    norms = {name: facts.series(name).finite.values for name in names}
    logged = {name: values for name, values in norms.items() if len(values) >= STILL}
    if not logged:
        return unlogged("param_norm")
    rates = facts.series("lr").finite.values
    stands = all(values.min() == values.max() for values in logged.values())
    is_some = any(values.max() > 0 for values in logged.values()) and (not len(rates) or rates.max() > 0)
    name, values = next(iter(logged.items()))
    return so(stands and is_some, f"panel 5: {name} is {values[0]:.6g} in all of {len(values)} rows")


def weights_grow(facts: Facts) -> Sign:
    """The weights of a group have more than doubled in 200 steps."""
    return _weights(facts, lambda ratio: ratio > LIMITS.norm_factor)


def weights_shrink(facts: Facts) -> Sign:
    """The weights of a group have more than halved in 200 steps."""
    return _weights(facts, lambda ratio: ratio < 1 / LIMITS.norm_factor)


def weights_halved(facts: Facts) -> Sign:
    """By the onset the weights of a group are less than half of their largest norm."""
    if facts.focus is None:
        return NOT_ASKED
    names = facts.family("param_norm")
    for name in names:
        norms = facts.series(name).finite.within(-math.inf, facts.onset).values
        if len(norms) and norms[-1] < 0.5 * norms.max():
            return so(True, f"panel 5: {name} {norms.max():.4g} at its largest, {norms[-1]:.4g} at step {facts.onset}")
    return so(False, "panel 5: no group's weights have halved") if names else unlogged("param_norm/<group>")


def weights_leap(facts: Facts) -> Sign:
    """The norm of the weights changed by a tenth between two rows: no update does that."""
    if facts.focus is None:
        return NOT_ASKED
    names = facts.family("param_norm")
    if not names:
        return unlogged("param_norm")
    found: list[tuple[float, str]] = []
    for name in names:
        norms = facts.series(name).finite.within(facts.onset - 20 * facts.stride, facts.onset + 20 * facts.stride)
        change = np.abs(np.diff(norms.values)) / np.maximum(norms.values[:-1], 1e-30)
        if len(change) and change.max() > max(0.1, 10 * float(np.median(change))):
            place = int(np.argmax(change))
            before, after = norms.values[place : place + 2]
            step = norms.steps[place + 1]
            found.append((float(change[place]), f"panel 5: {name} {before:.4g}, then {after:.4g} at step {step}"))
    if not found:
        return so(False, "panel 5: the norm of the weights goes on as before")
    return so(True, max(found)[1])


def one_group_leaps(facts: Facts) -> Sign:
    """The weights of one group alone leap, a hundredfold or more: an update that is too large moves all of them."""
    if facts.focus is None:
        return NOT_ASKED
    names = facts.groups("param_norm")
    if len(names) < 2:
        return unlogged("param_norm/<group>")
    near = 20 * facts.stride
    leapt, others = "", 1.0
    for name in names:
        norms = facts.series(name).within(facts.onset - near, facts.onset + facts.stride).values
        norms = np.where(np.isfinite(norms), norms, np.inf)
        factor = float((norms[1:] / np.maximum(norms[:-1], 1e-30)).max(initial=1.0))
        if factor >= FAR_BEYOND and not leapt:
            leapt = f"panel 5: {name} {factor:.3g}-fold about step {facts.onset}"
        else:
            others = max(others, factor)
    return so(bool(leapt) and others < 2, f"{leapt}, no other group 2-fold" if leapt else "panel 5: no group leaps")


def stuck_at_uniform(facts: Facts) -> Sign:
    """The loss stays at the logarithm of the vocabulary or of the batch size: the model guesses."""
    values = _at_end(facts)
    if values is None:
        return NOT_ASKED
    level = float(values.mean())
    for name in ("vocabulary", "batch"):
        size = facts.known.number(name)
        if size and size > 2 and abs(level - math.log(size)) < 0.015 * level:
            guess = f"ln({size:g}), the {name}, is {math.log(size):.4g}"
            return so(True, f"panel 1: loss {level:.4g} +- {values.std():.2g} to the end; {guess}")
    if facts.known.number("vocabulary") is None:
        return unlogged("model.vocabulary in the settings")
    return so(False, f"panel 1: loss {level:.4g} at the end")


def back_at_the_start(facts: Facts) -> Sign:
    """The loss is flat at the level it began with: everything that was learned is gone."""
    values, first = _at_end(facts), facts.loss.finite.values[:3]
    if values is None or facts.focus is None or not len(facts.loss.steps) or facts.loss.steps[0] > 20:
        return NOT_ASKED
    is_there = abs(values.mean() - first.mean()) < 0.05 * first.mean() and facts.focus.usual < 0.9 * first.mean()
    return so(bool(is_there), f"panel 1: loss {values.mean():.4g} to the end, {first.mean():.4g} in the first rows")


def exactly_zero(facts: Facts) -> Sign:
    """The loss is exactly 0, from the start or after values far above: it was not learned down to that."""
    values = facts.loss.finite.values
    zeros = np.flatnonzero(values == 0)
    beside = values[max(zeros[0] - NEAR, 0) : zeros[0]] if len(zeros) else values[:0]
    is_learned = len(beside) > 0 and beside.min() < 0.01 * values[:3].max()
    is_many = len(zeros) >= 3 or 0 < len(zeros) == len(values)
    return so(is_many and not is_learned, f"panel 1: {len(zeros)} losses are exactly 0")


def multiple_of_uniform(facts: Facts) -> Sign:
    """The first loss is a whole multiple of the loss of guessing: a sum that should be a mean."""
    vocabulary, first = facts.known.number("vocabulary"), facts.loss.finite.values[:3]
    if not vocabulary or vocabulary < 2:
        return unlogged("model.vocabulary in the settings")
    if not len(first) or facts.loss.steps[0] > 20:
        return NOT_ASKED
    factor = first.mean() / math.log(vocabulary)
    parts = facts.known.number("accumulation")
    wavers = float(first.std()) / math.sqrt(len(first)) / math.log(vocabulary)
    if parts is not None and parts >= LEAST_PARTS:  # no chance is in it where the settings name the number
        is_whole = abs(factor - parts) <= ABOVE_GUESSING * parts
    else:
        is_whole = _is_little_above_whole(factor, wavers)
    text = (
        f"panel 1: first loss {first.mean():.4g} is {factor:.3g} times ln({vocabulary:g}); accumulation {parts or 1:g}"
    )
    return so(is_whole and (parts is None or parts >= LEAST_PARTS), text)


def multiple_by_the_settings(facts: Facts) -> Sign:
    """That multiple is the number of micro-batches to a step, as the settings have it."""
    multiple, parts = multiple_of_uniform(facts), facts.known.number("accumulation")
    if not multiple.holds:
        return multiple
    return unlogged("accumulation in the settings") if parts is None else multiple


def _is_little_above_whole(factor: float, wavers: float) -> bool:
    """Whether a first loss is 2, 3, ... times that of a model that begins as models do: a little above guessing, and
    below it by the noise alone. Of large factors that is any: a third of all ratios count at the most."""
    if not math.isfinite(factor) or factor < LEAST_PARTS - AS_GUESSING * factor:
        return False
    slack = max(AS_GUESSING * factor, min(wavers, NO_CHANCE))
    above = (factor + slack) % 1.0
    return above <= min(slack + ABOVE_GUESSING * factor, A_THIRD)


def _is_multiple(factor: float, *, within: float, at_most: float = NO_CHANCE) -> bool:
    """Whether it is 2, 3, ... but for a share of itself, and nearer to it than chance would have it; losses near the
    largest number make it infinite."""
    if not math.isfinite(factor) or round(factor) < 2:
        return False
    return abs(factor - round(factor)) < min(within * factor, at_most)


def scaled_by_whole_number(facts: Facts) -> Sign:
    """Loss and gradient norm change by the same whole factor at once."""
    if facts.focus is None or facts.focus.kind not in ("level_shift", "resume_jump", "spike") or not facts.persists:
        return NOT_ASKED
    ratios = []
    for signal in ("loss", "grad_norm"):
        before, after = (
            facts.before(signal).values,
            facts.series(signal).finite.within(facts.onset + facts.stride, math.inf).values[:SOON],
        )
        if not len(before) or not len(after):
            return unlogged("grad_norm")
        ratios.append(float(np.median(after) / max(np.median(before), 1e-30)))
    whole = [max(ratio, 1 / max(ratio, 1e-30)) for ratio in ratios]
    close = all(_is_multiple(ratio, within=0.08, at_most=TWICE_SO) for ratio in whole)
    is_same = close and round(whole[0]) == round(whole[1])
    return so(
        is_same, f"panels 1, 3: loss {ratios[0]:.3g}-fold and grad norm {ratios[1]:.3g}-fold at once, and stays so"
    )


def level_shifts(facts: Facts) -> Sign:
    """The loss moves to another level and stays there."""
    focus = facts.focus
    if focus is None:
        return NOT_ASKED
    return so(focus.kind == "level_shift", f"panel 1: from {focus.usual:.4g} to another level at step {focus.start}")


def back_for_long(facts: Facts) -> Sign:
    """The loss has been back for as long as one waits to see whether it stays."""
    focus = facts.focus
    if focus is None or focus.end is None or not facts.came_back:
        return NOT_ASKED
    since = facts.last - focus.end
    return so(since >= WAITED, f"panel 1: the loss has been back for {since} steps")


def is_flat(facts: Facts) -> Sign:
    """The loss has stopped falling."""
    found = [incident for incident in facts.incidents if incident.kind == "plateau"]
    if not found:
        return so(False, "")
    losses = facts.loss.finite.within(found[0].start, math.inf).values
    level = float(median(losses)) if len(losses) else math.nan
    return so(True, f"panel 1: flat at {level:.4g} from step {found[0].start} on")


def flat_from_the_start(facts: Facts) -> Sign:
    """The loss has never fallen: flat from the first rows on."""
    sign = is_flat(facts)
    values = facts.loss.finite.values
    if not sign.holds or len(values) < 2 * NEAR:
        return so(False, sign.text)
    first, rest = float(np.median(values[:NEAR])), values[NEAR:]
    spread = float(np.std(rest))
    is_so = abs(first - float(np.median(rest))) < max(2 * spread, 0.02 * abs(first))
    return so(is_so, f"panel 1: loss {first:.4g} in the first rows, {np.median(rest):.4g} in all others")


def loss_hovers(facts: Facts) -> Sign:
    """The loss goes to and fro around zero, and measures nothing."""
    found = [it.text for it in facts.findings.problems if it.signal == "loss" and it.kind == "hovers"]
    return so(bool(found), found[0] if found else "the loss does not go to and fro about zero")


def reward_logged(facts: Facts) -> Sign:
    """The log has the objective behind such a loss: rewards or returns."""
    if not loss_hovers(facts).holds:
        return NOT_ASKED
    found = [name for name in facts.run.signals if REWARD.search(name.lower())]
    return so(True, f"the log has {', '.join(found[:3])}") if found else unlogged("reward, entropy, kl")


def metric_doubtful(facts: Facts) -> Sign:
    """Something is wrong with the loss as a metric, besides being logged rarely."""
    known = ("coarse", "missing", "hovers")
    found = [it for it in facts.findings.problems if it.signal == "loss" and it.kind not in known]
    return so(bool(found), found[0].text if found else "nothing is wrong with the loss as a metric")


def _first_after_resume(facts: Facts) -> tuple[int, float, float, float] | None:
    """Step and loss of the first row after the resume, the usual loss before it, and the highest usual loss.

    None if the log lacks the first step after the resume: later rows have seen updates.
    """
    resume = facts.resumed_before
    losses = facts.loss.finite
    if resume is None or facts.stride > 1:
        return None
    before, here = losses.within(-math.inf, resume - 1).values[-20:], losses.within(resume, resume).values
    if len(before) < NEAR or not len(here):
        return None
    noise = float(np.std(np.diff(before))) / math.sqrt(2)
    return resume, float(here[0]), float(before.mean()), float(before.mean()) + 4 * noise + 0.02 * abs(before.mean())


def _weights(facts: Facts, is_so: Callable[[float], bool]) -> Sign:
    names = facts.family("param_norm")
    if not names:
        return unlogged("param_norm/<group>")
    found = [(change, name) for name in names if (change := facts.change(name)) is not None and is_so(change.ratio)]
    meanwhile = (facts.onset - DRIFT_STEPS, facts.last if facts.focus is None else facts.focus.end or facts.last)
    fast = [one for one in facts.norm_changes if meanwhile[0] <= one.step <= meanwhile[1] + DRIFT_STEPS]
    if fast and not found and is_so(fast[0].value / fast[0].before):
        return so(True, f"panel 5: {fast[0]}")
    if not found:
        return so(False, "panel 5: no group's weights changed 2-fold in 200 steps")
    change, name = max(found, key=lambda item: abs(math.log(max(item[0].ratio, 1e-30))))
    return so(True, f"panel 5: {name} {change.usual:.4g}, then {change.value:.4g} within 200 steps")


def _at_end(facts: Facts) -> Floats | None:
    """The last losses, if they hardly move."""
    values = facts.loss.finite.values[-50:]
    return values if len(values) >= 20 and values.std() < 0.02 * values.mean() else None
