"""Signs in the numbers: values that are NaN or infinite, where they came first, and what the loss scale did."""

import math

import numpy as np

from sealegs.diagnosis.facts import Facts
from sealegs.diagnosis.signs.sign import NOT_ASKED, Sign, opposite, so, unlogged
from sealegs.diagnosis.signs.spikes import is_embedding
from sealegs.record.interventions import skipped_steps

EXP_LIMIT = {"fp32": 88.7, "bf16": 88.7, "fp16": 11.1}
"""Largest argument of exp, by precision."""
FP16_NEAR = 6550
"""A tenth of the range of fp16: a norm over a layer's width has single values of its own size."""
MOSTLY = 0.9
"""Share of the losses of NaN that must have no gradient, where they are those of batches without a target."""
MANY_HALVINGS = 64.0
"""A scale that hovers goes up and down by a few halvings."""
NEAR_NOTHING = 0.02
"""Share of the usual loss that a batch with a target has at least, the mean of some batches without one included."""
FIRST_SCALE = 65536.0
"""The loss scale that torch's ``GradScaler`` begins with."""


def nonfinite_stays(facts: Facts) -> Sign:
    """The loss is not finite up to the end of the log."""
    step = facts.first_bad("loss")
    return so(facts.stays_bad, f"panel 1: the loss is not finite from step {step} to the end, step {facts.last}")


def nonfinite_passes(facts: Facts) -> Sign:
    """Some values are not finite, and the loss is finite again at once."""
    count = len(facts.loss.values) - len(facts.loss.finite.values)
    told = f"{count} loss{'' if count == 1 else 'es'}" if count else f"loss or gradients at step {facts.onset}"
    if facts.ends_bad:
        return so(False, "panel 1: the loss of the last row is not finite")
    return so(facts.is_nonfinite and not facts.stays_bad, f"panel 1: {told} not finite, then finite again")


def nonfinite_from_the_start(facts: Facts) -> Sign:
    """The first loss of the log is not finite: no row shows that the run was ever sound."""
    is_first = facts.starts_bad
    return so(is_first, f"panel 1: the first loss of the log, of step {facts.first_bad('loss')}, is not finite")


def nonfinite_before_any_update(facts: Facts) -> Sign:
    """The loss of the first step is not finite: it was measured before any update."""
    step = facts.first_bad("loss")
    is_first = facts.starts_bad and step is not None and step <= 1 and not facts.resumes
    return so(is_first, f"panel 1: the loss of step {step}, the first of the log, is not finite, before any update")


def zero_loss_without_gradient(facts: Facts) -> Sign:
    """The loss is exactly 0 where the gradient norm is not finite, at three rows at least, and was so from the start.

    A 0 that comes after losses far above stands for a NaN, which an update has written.
    """
    norms = facts.series("grad_norm")
    if norms.is_empty:
        return unlogged("grad_norm") if (facts.loss.values == 0).any() else NOT_ASKED
    broken = norms.steps[~np.isfinite(norms.values)]
    zero = facts.loss.steps[facts.loss.values == 0]
    both = np.intersect1d(broken, zero)
    first = f", the first at step {both[0]}" if len(both) else ""
    return so(len(both) >= 3, f"panels 1, 3: {len(both)} losses are exactly 0 at a grad norm of NaN or inf{first}")


def zero_loss_zero_gradient(facts: Facts) -> Sign:
    """The loss is written as exactly 0 where the gradient norm is exactly 0, too, at three rows at least: a sum over
    nothing. A loss that was learned down to nothing does not begin at once, and comes near 0 in other rows: so do
    margins that are kept."""
    norms, losses = facts.series("grad_norm"), facts.written_loss
    zero = losses.steps[losses.values == 0]
    if norms.is_empty:
        return unlogged("grad_norm") if len(zero) else NOT_ASKED
    both = np.intersect1d(norms.steps[norms.values == 0], zero)
    if len(both) < 3:
        return so(False, f"panels 1, 3: {len(both)} losses are exactly 0 at a grad norm of exactly 0")
    before = losses.finite.within(-math.inf, both[0] - 1).values[-10:]
    is_sudden = not len(before) or before.min() > 0.01 * float(losses.finite.values[:3].max())
    positive = losses.finite.values[losses.finite.values > 0]
    is_apart = not len(positive) or positive.min() > NEAR_NOTHING * float(np.median(positive))
    text = f"panels 1, 3: {len(both)} losses are exactly 0 at a grad norm of exactly 0, the first at step {both[0]}"
    return so(bool(is_sudden and is_apart), text)


def weight_breaks_first(facts: Facts) -> Sign:
    """A weight is not finite, and no loss was so before it, unless a gradient broke both at once.

    Not where every update up to then is known to have been finite, or was skipped: something else wrote it.
    """
    if nonfinite_before_any_update(facts).holds:
        return so(False, "panel 1: the first loss is not finite, and no update came before it")
    step, loss = facts.first_bad_weight, facts.first_bad("loss")
    if step is None:
        is_logged = "params_finite" in facts.run.signals or "param_norm" in facts.run.signals
        return so(False, "panel 5: no weight is seen that is not finite") if is_logged else unlogged("params_finite")
    text = f"panel 5: a weight is not finite at step {step}"
    if (alone := weight_breaks_alone(facts)).holds:
        return so(False, alone.text)
    if loss is None or step <= loss:
        return so(True, text)
    # weights are seen every few steps: a gradient that breaks at the last finite loss has broken them by the next
    is_written = not np.isfinite(facts.series("grad_norm").within(loss - facts.stride, loss - 1).values).all()
    return so(is_written, text if is_written else f"{text}, after the loss at step {loss}")


def weight_breaks_alone(facts: Facts) -> Sign:
    """A weight is not finite, and no update made it so: since all were, each had a finite gradient or was skipped."""
    step = facts.first_bad_weight
    if step is None:
        return NOT_ASKED
    norms, weights = facts.series("grad_norm"), [facts.series(name) for name in facts.family("param_norm")]
    flags = facts.series("params_finite")
    sound = [int(one.steps[-1]) for each in weights if not (one := each.finite.within(-math.inf, step - 1)).is_empty]
    sound += flags.steps[(flags.values > 0) & (flags.steps < step)][-1:].tolist()
    if norms.is_empty or not sound:
        return unlogged("grad_norm" if norms.is_empty else "params_finite")
    # a loss that is finite with such a weight was measured before the update that wrote it
    is_before = np.isfinite(facts.loss.within(step, step).values).any()
    since, last = max(sound), step if is_before else step - 1
    made = norms.within(since, last)
    if len(made.values) < last - since + 1:
        return unlogged("grad_norm of every step")
    is_harmless = np.isfinite(made.values) | np.isin(made.steps, skipped_steps(facts.run.events))
    text = (
        f"panels 3, 5: a weight is not finite at step {step}, and the updates since step {since} were finite or skipped"
    )
    return so(bool(is_harmless.all()), text)


def loss_of_nothing(facts: Facts) -> Sign:
    """The loss is NaN where the gradient is exactly 0, or no token has a loss: a mean over no targets, 0/0.

    A forward pass that breaks has a gradient of NaN. Programs that log a 0 for a step that they left out are told from
    this by losses that are finite again, or by weights that are seen to be sound.
    """
    nan = facts.loss.steps[np.isnan(facts.loss.values)]
    if not len(nan) or facts.starts_bad:
        return NOT_ASKED
    counts = {step: text.split() for step, text in facts.texts("token_loss_histogram").items() if step in nan}
    if counts and all(set(each) == {"0"} for each in counts.values()):
        return so(True, f"panel 1: the loss is NaN at step {min(counts)}, where no token has a loss")
    norms = facts.series("grad_norm")
    beside = np.isin(norms.steps, nan)
    if norms.is_empty or not beside.any():
        return unlogged("grad_norm")
    is_zero = norms.values[beside] == 0
    text = f"panels 1, 3: {is_zero.sum()} of {len(is_zero)} losses of NaN have a gradient of exactly 0"
    if is_zero.mean() < MOSTLY or not facts.stays_bad:
        return so(bool(is_zero.mean() >= MOSTLY), text)
    if not _weights_since_broken(facts):
        return unlogged("params_finite")
    return so(facts.first_bad_weight is None, f"{text}, and every weight is finite")


def _weights_since_broken(facts: Facts) -> bool:
    """Whether weights were looked at since the loss is not finite."""
    checked = [facts.series(name) for name in ("params_finite", "param_norm")]
    return any(not series.within(facts.first_bad("loss") or 0, math.inf).is_empty for series in checked)


def nonfinite_at_sound_weights(facts: Facts) -> Sign:
    """The loss is not finite up to the end of the log although the weights are, and gradients are none."""
    if not facts.stays_bad or loss_of_nothing(facts).holds:
        return NOT_ASKED
    if not _weights_since_broken(facts):
        return unlogged("params_finite")
    text = f"panels 1, 5: the loss is not finite to the end, step {facts.last}, and every weight is"
    return so(facts.first_bad_weight is None, text)


def loss_infinite(facts: Facts) -> Sign:
    """The first loss that is not finite is +inf, not NaN: -log of a zero."""
    bad = facts.loss.values[~np.isfinite(facts.loss.values)]
    return so(bool(len(bad)) and bool(bad[0] == math.inf), "panel 1: the first of them is inf, not NaN")


def gradient_first(facts: Facts) -> Sign:
    """A gradient is not finite at a step whose loss still is: the backward pass broke."""
    if not facts.is_nonfinite and not facts.kinds & {"overflow"}:
        return NOT_ASKED
    if "grad_norm" not in facts.run.signals:
        return unlogged("grad_norm")
    if zero_loss_without_gradient(facts).holds:
        return so(False, "panels 1, 3: the loss is exactly 0 where the gradient is not finite: it stands for something")
    loss, norm = facts.first_bad("loss"), facts.first_bad("grad_norm")
    text = (
        f"panels 1, 3: grad norm not finite at step {norm}, loss {f'at step {loss}' if loss is not None else 'never'}"
    )
    return so(norm is not None and (loss is None or norm < loss), text)


def loss_first(facts: Facts) -> Sign:
    """The loss itself is not finite, and no gradient was so before it: the forward pass broke."""
    loss, norm = facts.first_bad("loss"), facts.first_bad("grad_norm")
    if loss is None:
        return NOT_ASKED
    if "grad_norm" not in facts.run.signals:
        return unlogged("grad_norm")
    text = f"panels 1, 3: loss not finite at step {loss}, grad norm {'never' if norm is None else f'at step {norm}'}"
    return so(norm is None or loss <= norm, text)


def forward_breaks(facts: Facts) -> Sign:
    """The loss is the first that is not finite, after usual rows: the end of the forward pass overflowed, or a
    probability was 0."""
    first = loss_first(facts)
    if not first.holds or not came_suddenly(facts).holds:
        return NOT_ASKED
    return so(True, f"{first.text}, and all was as usual up to the row before")


def came_suddenly(facts: Facts) -> Sign:
    """Loss and gradient norm were as usual up to the row before."""
    if not facts.is_nonfinite or facts.focus is None:
        return NOT_ASKED
    step = facts.first_bad("loss")
    step = facts.onset if step is None else step
    losses = facts.loss.finite.within(-math.inf, step - 1).values[-40:]
    if len(losses) < 20:
        return NOT_ASKED
    spread = np.std(losses[:-5]) + 1e-9
    norms = facts.series("grad_norm").finite.within(-math.inf, step - 1).values[-40:]
    grows = len(norms) >= 20 and norms[-5:].max() > 3 * norms[:-5].mean()
    calm = losses[-5:].max() < losses[:-5].mean() + 5 * spread and not grows
    return so(bool(calm), f"panel 1: loss {losses[-1]:.4g} in the row before, as usual")


def infinite_norm_clipped(facts: Facts) -> Sign:
    """The first gradient norm that is not finite is inf, at a finite loss, and is clipped: inf times 1/inf is NaN. Not
    so where the update was skipped."""
    step = facts.first_bad("grad_norm")
    if step is None or not facts.is_nonfinite:
        return NOT_ASKED
    clip = facts.clip_at(step)
    if clip is None:
        return unlogged("optimizer.clip in the settings")
    if step in skipped_steps(facts.run.events):
        return so(False, f"panels 1, 3: grad norm not finite at step {step}, and its update was skipped")
    norm, loss = (facts.series(name).within(step, step).values for name in ("grad_norm", "loss"))
    text = f"panels 1, 3: grad norm inf at step {step}, at a finite loss, and clipped at {clip:g}"
    return so(clip > 0 and bool(np.isposinf(norm).all() and np.isfinite(loss).all()), text)


def finite_again(facts: Facts) -> Sign:
    """A step was not finite, but was finite when the run repeated it with the same batch."""
    if not facts.is_nonfinite or not facts.run.segments.any():
        return NOT_ASKED
    if "batch_hash" not in facts.run.signals:
        return unlogged("batch_hash")
    healed = [
        (step, after)
        for step, before, after in facts.losses_again(after_rollbacks=True)
        if not math.isfinite(before) and math.isfinite(after)
    ]
    text = "panels 1, 10: step {} not finite, and {:.4g} when it came again with the same batch"
    return so(bool(healed), text.format(*healed[0]) if healed else "")


def infinite_in_embedding(facts: Facts) -> Sign:
    """The gradient that is infinite is the embedding's. NaN may be from anywhere, and a loss that is not finite makes
    every gradient so."""
    if not facts.is_nonfinite or loss_first(facts).holds:
        return NOT_ASKED
    step = facts.first_bad("grad_norm")
    told = [] if step is None else list(facts.culprits(step - 1, step + 1).values())
    groups = {name: facts.first_bad(name) for name in facts.groups("grad_norm")}
    first = min((at for at in groups.values() if at is not None), default=None)
    named = dict.fromkeys(told or [name for name, at in groups.items() if at is not None and at == first])
    if not told and not groups:
        return unlogged("grad_norm/<group>")
    if step is not None and np.isnan(facts.series("grad_norm").within(step, step).values).any():
        return so(False, f"panel 3: grad norm NaN at step {step}, not inf")
    return so(any(map(is_embedding, named)), f"infinite first in {', '.join(named)}")


def logits_over_exp(facts: Facts) -> Sign:
    """An attention logit was too large for exp."""
    if not facts.is_nonfinite:
        return NOT_ASKED
    logits = _by_layer(facts, "attention_logit_max")
    if not logits:
        return unlogged("attention_logit_max/<layer>")
    largest, limit = max(top for _, top, _ in logits), EXP_LIMIT[facts.dtype or "fp32"]
    return so(largest > limit, f"largest attention logit {largest:.4g}; exp overflows at {limit:g}")


def activation_vanishes(facts: Facts) -> Sign:
    """The output of a layer went to zero."""
    if not facts.is_nonfinite:
        return NOT_ASKED
    norms = _by_layer(facts, "activation_norm")
    if not norms:
        return unlogged("activation_norm/<layer>")
    smallest, _, name = min(norms)
    return so(smallest < 1e-6, f"panel 4: {name} down to {smallest:.2g}")


def activation_near_limit(facts: Facts) -> Sign:
    """The output of a layer came near 65504."""
    if facts.dtype != "fp16":
        return NOT_ASKED
    norms = _by_layer(facts, "activation_norm")
    if not norms:
        return unlogged("activation_norm/<layer>")
    _, largest, name = max(norms, key=lambda layer: layer[1])
    return so(largest > FP16_NEAR, f"panel 4: {name} up to {largest:.4g}; fp16 ends at 65504")


def is_fp16(facts: Facts) -> Sign:
    """The run computes in fp16."""
    return unlogged("dtype") if facts.dtype is None else so(facts.dtype == "fp16", f"dtype {facts.dtype}")


def is_not_fp16(facts: Facts) -> Sign:
    """The run does not compute in fp16."""
    return opposite(is_fp16(facts))


def gradients_overflow(facts: Facts) -> Sign:
    """Gradient norms that are not finite, under fp16."""
    if facts.dtype != "fp16":
        return NOT_ASKED
    norms = facts.series("grad_norm")
    if norms.is_empty:
        return unlogged("grad_norm")
    bad = ~np.isfinite(norms.values)
    first = f", the first at step {norms.steps[np.argmax(bad)]}" if bad.any() else ""
    return so(bool(bad.any()), f"panel 3: {int(bad.sum())} of {len(bad)} gradient norms not finite{first}")


LONGEST_STILL = 3000
"""Steps without a change of the loss scale from which on it is constant: a scaler doubles it after 2000 clean ones."""


def scale_of(facts: Facts) -> str | None:
    """The history of the loss scale in a word: moving, collapsed, stuck (overflows, and it does not move), constant
    (where a scaler would have doubled it), or still (too short to say); None if it is not logged."""
    scales = facts.series("loss_scale")
    values = scales.finite.values
    if not len(values):
        return None
    if values.min() < 1:
        return "collapsed"
    if len(np.unique(values)) > 1:
        return "moving"
    logged = (facts.series("grad_norm"), facts.loss)
    overflows = [step for each in logged for step in each.steps[~np.isfinite(each.values)][:1].tolist()]
    if overflows and min(overflows) < scales.steps[-1]:
        return "stuck"
    return "constant" if scales.steps[-1] - scales.steps[0] > LONGEST_STILL else "still"


def scale_collapsed(facts: Facts) -> Sign:
    """The loss scale fell below 1 while there was a finite loss. Once there is none, each step halves it, whatever the
    cause was."""
    finite = facts.loss.finite.steps
    scales = facts.series("loss_scale").finite
    last = finite[-1] if len(finite) else -math.inf
    if facts.dtype == "fp16" and last < facts.loss.steps[-1:].max(initial=last) and len(scales.values):
        until = scales.within(-math.inf, float(last)).values
        if scales.values.min() < 1 <= until.min(initial=math.inf):
            return so(False, f"panel 9: loss scale below 1 only after step {last:.0f}, the last with a finite loss")
    return _scale_is(facts, "collapsed", "panel 9: loss scale down to {low:.3g}, from {high:.3g}")


def scale_stands_still(facts: Facts) -> Sign:
    """The loss scale did not move although gradients overflowed."""
    return _scale_is(facts, "stuck", "panel 9: loss scale {high:.6g} throughout, overflows or not")


def scale_moves(facts: Facts) -> Sign:
    """The loss scale moves, whether as it should or until it has collapsed."""
    moving = _scale_is(facts, "moving", "panel 9: loss scale between {low:.6g} and {high:.6g}, as it should")
    return moving if moving.holds is not False else scale_collapsed(facts)


def scale_is_high(facts: Facts) -> Sign:
    """The loss scale is where a scaler begins, or higher: raising it is no remedy."""
    values = facts.series("loss_scale").finite.values
    if not len(values):
        return unlogged("loss_scale")
    return so(bool(values[-1] >= FIRST_SCALE), f"panel 9: loss scale {values[-1]:.6g} in the end")


def scale_falls(facts: Facts) -> Sign:
    """The loss scale has left the level of the first half of the log for good, many halvings below it."""
    if facts.dtype != "fp16":
        return NOT_ASKED
    values = facts.series("loss_scale").finite.values
    if len(values) < 40:
        return unlogged("loss_scale") if not len(values) else NOT_ASKED
    usual, late = float(np.median(values[len(values) // 4 : len(values) // 2])), values[-max(len(values) // 20, 5) :]
    text = f"panel 9: loss scale {usual:.6g} in the first half of the log, at most {late.max():.6g} in the end"
    return so(bool(usual >= MANY_HALVINGS * late.max()), text)


def scale_begins_again(facts: Facts) -> Sign:
    """At a resume the loss scale leaps up by more than a scaler's doubling: its state did not come back."""
    if facts.dtype != "fp16" or not facts.resumes:
        return NOT_ASKED
    scales = facts.series("loss_scale").finite
    if scales.is_empty:
        return unlogged("loss_scale")
    for resume in facts.resumes:
        before, after = scales.within(-math.inf, resume - 1).values[-1:], scales.within(resume, math.inf).values[:1]
        if len(before) and len(after) and after[0] >= 4 * before[0]:
            text = f"panel 9: loss scale {after[0]:.6g} after the resume at step {resume}, {before[0]:.6g} before"
            return so(True, text + (": as in the first row" if after[0] == scales.values[0] else ""))
    return so(False, "panel 9: the loss scale goes on after the resume as before")


def gradients_underflow(facts: Facts) -> Sign:
    """More than half of the gradients are lost in fp16."""
    if facts.dtype != "fp16":
        return NOT_ASKED
    shares = facts.series("underflow_share").finite.values
    if not len(shares):
        return unlogged("underflow_share")
    share = float(np.median(shares[-5:]))
    return so(share > 0.5, f"{share:.0%} of the gradients underflow")


def _by_layer(facts: Facts, signal: str) -> list[tuple[float, float, str]]:
    """Lowest and highest value of each layer, and its name."""
    logged = ((name, facts.series(name).finite.values) for name in facts.groups(signal))
    return [(float(values.min()), float(values.max()), name) for name, values in logged if len(values)]


def _scale_is(facts: Facts, word: str, text: str) -> Sign:
    if facts.dtype != "fp16":
        return NOT_ASKED
    values = facts.series("loss_scale").finite.values
    if not len(values):
        return unlogged("loss_scale")
    return so(scale_of(facts) == word, text.format(low=values.min(), high=values.max()))
