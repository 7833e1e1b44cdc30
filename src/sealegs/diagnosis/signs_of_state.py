"""Facts in, Signs out: resumes, weights, moments, ranks, and losses that have no right to be what they are."""

import math
from collections.abc import Callable

import numpy as np

from sealegs.diagnosis.evidence import NOT_ASKED, Sign, so, unlogged
from sealegs.diagnosis.facts import SOON, Facts, Floats
from sealegs.record.manifest import dotted


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
    sign = moments_dropped(facts)
    return sign if sign.holds is None or not sign.text else so(not sign.holds, sign.text)


def lr_not_restored(facts: Facts) -> Sign:
    """The learning rate after the resume is not what it was at the same step, or does not go on from there."""
    if not facts.resumes:
        return NOT_ASKED
    if facts.series("lr").is_empty:
        return unlogged("lr")
    for step, before, after in facts.again("lr"):
        if isinstance(before, float) and isinstance(after, float) and abs(after - before) > 0.02 * abs(before):
            return so(True, f"panel 2: LR at step {step} {before:.3g} before the resume, {after:.3g} after")
    for jump in facts.lr_jumps:
        if any(resume <= jump.step <= resume + 2 * facts.stride for resume in facts.resumes):
            return so(True, f"panel 2: LR {jump.before:.3g} before the resume, {jump.after:.3g} at step {jump.step}")
    return so(False, "panel 2: LR goes on after the resume as before")


def data_not_restored(facts: Facts) -> Sign:
    """At the same steps other batches came after the resume than before it."""
    if not facts.resumes:
        return NOT_ASKED
    signal = "batch_hash" if "batch_hash" in facts.run.signals else "batch_index"
    if signal not in facts.run.signals:
        return unlogged("batch_hash")
    pairs = list(facts.again(signal))
    other = [step for step, before, after in pairs if before != after]
    if not pairs:
        return NOT_ASKED
    return so(len(other) > len(pairs) / 2, f"panel 10: {len(other)} of {len(pairs)} repeated steps saw other batches")


def same_batch_other_loss(facts: Facts) -> Sign:
    """At the same step and with the same batch the loss is another after the resume, from the first such step on."""
    if "batch_hash" not in facts.run.signals or not facts.run.segments.any():
        return NOT_ASKED
    same = {step for step, before, after in facts.again("batch_hash") if before == after}
    pairs = [
        (step, a, b)
        for step, a, b in facts.again("loss")
        if step in same and isinstance(a, float) and isinstance(b, float)
    ]
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


def one_rank_stands_out(facts: Facts) -> Sign:
    """The largest gradient of the bad step came from one rank."""
    if facts.focus is None:
        return NOT_ASKED
    first, last = facts.onset - 5 * facts.stride, facts.onset + SOON * facts.stride
    told = [text for step, text in facts.texts("culprit").items() if first <= step <= last]
    ranks = [text for text in told if "rank" in text]
    if not told:
        return unlogged("culprit")
    return so(bool(ranks), f"the worst gradient: {(ranks or told)[0]}")


def weights_grow(facts: Facts) -> Sign:
    """The weights of a group have more than doubled in 200 steps."""
    return _weights(facts, lambda ratio: ratio > 2)


def weights_shrink(facts: Facts) -> Sign:
    """The weights of a group have more than halved in 200 steps."""
    return _weights(facts, lambda ratio: ratio < 0.5)


def weights_leap(facts: Facts) -> Sign:
    """The norm of the weights changed by a tenth between two rows: no update does that."""
    if facts.focus is None:
        return NOT_ASKED
    names = [name for name in ("param_norm", *facts.groups("param_norm")) if name in facts.run.signals]
    if not names:
        return unlogged("param_norm")
    for name in names:
        norms = facts.series(name).finite.within(facts.onset - 20 * facts.stride, facts.onset + 20 * facts.stride)
        change = np.abs(np.diff(norms.values)) / np.maximum(norms.values[:-1], 1e-30)
        if len(change) and change.max() > max(0.1, 10 * float(np.median(change))):
            place = int(np.argmax(change))
            values = norms.values[place : place + 2]
            return so(True, f"panel 5: {name} {values[0]:.4g}, then {values[1]:.4g} at step {norms.steps[place + 1]}")
    return so(False, "panel 5: the norm of the weights goes on as before")


def attention_logits_grow(facts: Facts) -> Sign:
    """Attention logits are above 50 and have doubled."""
    names = facts.groups("attention_logit_max")
    if not names:
        return unlogged("attention_logit_max/<layer>")
    for name in names:
        values = facts.series(name).finite.within(-math.inf, facts.onset + SOON * facts.stride).values
        if len(values) >= 4 and values[-3:].max() > 50 and values[-3:].max() > 2 * np.median(values):
            return so(True, f"{name} {values[-3:].max():.3g}, usually {np.median(values):.3g}")
    return so(False, "attention logits stay as they were")


def gradients_grow(facts: Facts) -> Sign:
    """The gradient norm has been rising while the loss did."""
    trend, change = facts.trend("grad_norm"), facts.change("grad_norm")
    if trend is None or change is None:
        return unlogged("grad_norm")
    return so(trend >= 0.5 and change.ratio > 1.1, f"panel 3: grad norm {change.usual:.3g}, then {change.value:.3g}")


def gradients_vanish(facts: Facts) -> Sign:
    """The gradient norm has fallen to a small part of what it was: nothing is learned any more."""
    if facts.focus is None:
        return NOT_ASKED
    before = facts.before("grad_norm").values
    after = facts.series("grad_norm").finite.within(facts.onset + facts.stride, math.inf).values
    if not len(before) or not len(after):
        return unlogged("grad_norm")
    ratio = float(np.median(after[-20:]) / before.mean())
    return so(ratio < 0.1, f"panel 3: grad norm {np.median(after[-20:]):.3g}, {before.mean():.3g} before")


def stuck_at_uniform(facts: Facts) -> Sign:
    """The loss stands at the logarithm of the vocabulary or of the batch: the model guesses."""
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
    """The loss is flat at the level it began with: all that was learned is gone."""
    values, first = _at_end(facts), facts.loss.finite.values[:3]
    if values is None or facts.focus is None or facts.loss.steps[0] > 20:
        return NOT_ASKED
    is_there = abs(values.mean() - first.mean()) < 0.05 * first.mean() and facts.focus.usual < 0.9 * first.mean()
    return so(bool(is_there), f"panel 1: loss {values.mean():.4g} to the end, {first.mean():.4g} in the first rows")


def exactly_zero(facts: Facts) -> Sign:
    """The loss is exactly 0."""
    values = facts.loss.finite.values
    count = int((values == 0).sum())
    return so(count >= 3 or (count > 0 and count == len(values)), f"panel 1: {count} losses are exactly 0")


def multiple_of_uniform(facts: Facts) -> Sign:
    """The first loss is a whole multiple of what guessing costs: summed where it should be averaged."""
    vocabulary, first = facts.known.number("vocabulary"), facts.loss.finite.values[:3]
    if not vocabulary or vocabulary < 2:
        return unlogged("model.vocabulary in the settings")
    if not len(first) or facts.loss.steps[0] > 20:
        return NOT_ASKED
    factor = first.mean() / math.log(vocabulary)
    parts = facts.known.number("accumulation")
    is_whole = round(factor) >= 2 and abs(factor - round(factor)) < 0.05 * factor
    text = (
        f"panel 1: first loss {first.mean():.4g} is {factor:.3g} times ln({vocabulary:g}); accumulation {parts or 1:g}"
    )
    return so(is_whole and (parts is None or round(factor) == parts), text)


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
        ratios.append(float(np.median(after) / np.median(before)))
    whole = [max(ratio, 1 / ratio) for ratio in ratios]
    close = all(round(ratio) >= 2 and abs(ratio - round(ratio)) < 0.08 * ratio for ratio in whole)
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


def is_flat(facts: Facts) -> Sign:
    """The loss has stopped falling."""
    found = [incident for incident in facts.findings.incidents if incident.kind == "plateau"]
    return so(bool(found), f"panel 1: flat at {found[0].pre_loss:.4g} from step {found[0].start} on" if found else "")


def metric_doubtful(facts: Facts) -> Sign:
    """Something is wrong with the loss as a metric, beyond that it is seldom logged."""
    found = [it for it in facts.findings.problems if it.signal == "loss" and it.kind not in ("coarse", "missing")]
    return so(bool(found), found[0].text if found else "nothing is wrong with the loss as a metric")


def _weights(facts: Facts, is_so: Callable[[float], bool]) -> Sign:
    names = [name for name in ("param_norm", *facts.groups("param_norm")) if name in facts.run.signals]
    if not names:
        return unlogged("param_norm/<group>")
    found = [(change, name) for name in names if (change := facts.change(name)) is not None and is_so(change.ratio)]
    if not found:
        return so(False, "panel 5: no group's weights changed 2-fold in 200 steps")
    change, name = max(found, key=lambda item: abs(math.log(max(item[0].ratio, 1e-30))))
    return so(True, f"panel 5: {name} {change.usual:.4g}, then {change.value:.4g} within 200 steps")


def _at_end(facts: Facts) -> Floats | None:
    """The last losses, where they hardly move."""
    values = facts.loss.finite.values[-50:]
    return values if len(values) >= 20 and values.std() < 0.02 * values.mean() else None
