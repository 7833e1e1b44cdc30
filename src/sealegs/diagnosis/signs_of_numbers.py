"""Facts in, Signs out: values that are NaN or infinite, where they came first, and what the loss scale did."""

import math

import numpy as np

from sealegs.diagnosis.evidence import NOT_ASKED, Sign, so, unlogged
from sealegs.diagnosis.facts import Facts

EXP_LIMIT = {"fp32": 88.7, "bf16": 88.7, "fp16": 11.1}
"""Where exp overflows."""


def nonfinite_stays(facts: Facts) -> Sign:
    """The loss is not finite any more, to the end of the log."""
    step = facts.first_bad("loss")
    return so(facts.stays_bad, f"panel 1: the loss is not finite from step {step} to the end, step {facts.last}")


def nonfinite_passes(facts: Facts) -> Sign:
    """Some values are not finite, and the loss is finite again at once."""
    bad = ~np.isfinite(facts.loss.values)
    count = int(bad.sum())
    return so(facts.is_nonfinite and not facts.stays_bad, f"panel 1: {count} losses not finite, then finite again")


def weight_not_finite(facts: Facts) -> Sign:
    """A weight is NaN or infinite."""
    step = facts.first_bad_weight
    if step is None and "params_finite" not in facts.run.signals and "param_norm" not in facts.run.signals:
        return unlogged("params_finite")
    return so(step is not None, f"panel 5: a weight is not finite at step {step}")


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


def infinite_in_embedding(facts: Facts) -> Sign:
    """The gradient of the embedding is the one that is not finite."""
    if not facts.is_nonfinite:
        return NOT_ASKED
    step = facts.first_bad("grad_norm")
    told = [text for when, text in facts.texts("culprit").items() if step is not None and abs(when - step) <= 1]
    groups = {name: facts.first_bad(name) for name in facts.groups("grad_norm")}
    first = min((at for at in groups.values() if at is not None), default=None)
    named = [*told, *(name for name, at in groups.items() if at is not None and at == first)]
    if not told and not groups:
        return unlogged("grad_norm/<group>")
    return so(
        any("embed" in name.lower() or "wte" in name for name in named), f"not finite first in {', '.join(named)}"
    )


def logits_over_exp(facts: Facts) -> Sign:
    """An attention logit was beyond what exp can take."""
    if not facts.is_nonfinite:
        return NOT_ASKED
    tops = [
        series.max() for name in facts.groups("attention_logit_max") if len(series := facts.series(name).finite.values)
    ]
    if not tops:
        return unlogged("attention_logit_max/<layer>")
    limit = EXP_LIMIT[facts.dtype or "fp32"]
    return so(max(tops) > limit, f"largest attention logit {max(tops):.4g}; exp overflows at {limit:g}")


def activation_vanishes(facts: Facts) -> Sign:
    """The output of a layer went to zero."""
    if not facts.is_nonfinite:
        return NOT_ASKED
    names = facts.groups("activation_norm")
    if not names:
        return unlogged("activation_norm/<layer>")
    low = [(values.min(), name) for name in names if len(values := facts.series(name).finite.values)]
    smallest, name = min(low, default=(1.0, ""))
    return so(smallest < 1e-6, f"panel 4: {name} down to {smallest:.2g}")


def activation_near_limit(facts: Facts) -> Sign:
    """The output of a layer came near 65504."""
    if facts.dtype != "fp16":
        return NOT_ASKED
    names = facts.groups("activation_norm")
    if not names:
        return unlogged("activation_norm/<layer>")
    tops = [(values.max(), name) for name in names if len(values := facts.series(name).finite.values)]
    largest, name = max(tops, default=(0.0, ""))
    return so(largest > 6550, f"panel 4: {name} up to {largest:.4g}; fp16 ends at 65504")


def is_fp16(facts: Facts) -> Sign:
    """The run computes in fp16."""
    return Sign(None, missing="dtype") if facts.dtype is None else so(facts.dtype == "fp16", f"dtype {facts.dtype}")


def is_not_fp16(facts: Facts) -> Sign:
    """The run does not compute in fp16."""
    return Sign(None, missing="dtype") if facts.dtype is None else so(facts.dtype != "fp16", f"dtype {facts.dtype}")


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


def scale_of(facts: Facts) -> str | None:
    """The history of the loss scale in a word: moving, constant, collapsed or stuck; None where it is not logged."""
    scales = facts.series("loss_scale")
    values = scales.finite.values
    if not len(values):
        return None
    if values.min() < 1:
        return "collapsed"
    bad = facts.series("grad_norm")
    overflows = bad.steps[~np.isfinite(bad.values)]
    if len(np.unique(values)) == 1:
        is_owed = len(overflows) > 0 and overflows[0] < scales.steps[-1]
        return "stuck" if is_owed else "constant" if scales.steps[-1] - scales.steps[0] > 3000 else "moving"
    return "moving"


def scale_collapsed(facts: Facts) -> Sign:
    """The loss scale fell below 1."""
    return _scale_is(facts, "collapsed", "panel 9: loss scale down to {low:.3g}, from {high:.3g}")


def scale_stands_still(facts: Facts) -> Sign:
    """The loss scale did not move although gradients overflowed, or for more than 3000 steps."""
    sign = _scale_is(facts, "stuck", "panel 9: loss scale {high:.6g} throughout, overflows or not")
    return sign if sign.holds else _scale_is(facts, "constant", "panel 9: loss scale {high:.6g} throughout")


def scale_moves(facts: Facts) -> Sign:
    """The loss scale halves and doubles as it should."""
    return _scale_is(facts, "moving", "panel 9: loss scale between {low:.6g} and {high:.6g}, as it should")


def gradients_underflow(facts: Facts) -> Sign:
    """More than half of the gradients are lost in fp16."""
    if facts.dtype != "fp16":
        return NOT_ASKED
    shares = facts.series("underflow_share").finite.values
    if not len(shares):
        return unlogged("underflow_share")
    share = float(np.median(shares[-5:]))
    return so(share > 0.5, f"{share:.0%} of the gradients underflow")


def _scale_is(facts: Facts, word: str, text: str) -> Sign:
    if facts.dtype != "fp16":
        return NOT_ASKED
    values = facts.series("loss_scale").finite.values
    if not len(values):
        return unlogged("loss_scale")
    return so(scale_of(facts) == word, text.format(low=values.min(), high=values.max()))
