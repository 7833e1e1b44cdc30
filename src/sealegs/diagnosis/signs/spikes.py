"""Signs of spikes: the shape of a loss that leaps, and of the gradients, tokens and activations around it."""

import math
import re

import numpy as np

from sealegs.diagnosis.curve.saw_tooth import OF_THE_RATE
from sealegs.diagnosis.facts import LEAPS, LIMITS, NEAR, SOON, Against, Facts
from sealegs.diagnosis.signs.sign import NOT_ASKED, Sign, so, unlogged

MANY_FOLD = 30.0
"""Multiple of the usual gradient norm: the threshold of the decision tree."""
CALM_FOLD = 3.0
CLIMB, GROWN = 20, 1.5
"""Rows up to half of a rise, and growth of the gradients meanwhile, from which on it is a climb: an update or a batch
takes the loss up within a few rows."""
EARLY = 3000
"""Steps, in the first quarter of a log, in which gradients that climb are of how the model was made."""
CLIMBED = 4.0
"""Growth of the gradients before the loss from which on they have climbed."""
SURPRISING_NATS = 10.0
"""Loss of a token that the model thought all but impossible: a probability below 1 in 20,000."""


def gradient_many_fold(facts: Facts) -> Sign:
    """The gradient norm at the spike is more than 30 times the mean before it."""
    found = _gradient(facts)
    if isinstance(found, Sign):
        return found
    text = (
        f"panel 3: grad norm {found.value:.4g} at step {found.step}, {found.usual:.3g} before: {found.ratio:.3g}-fold"
    )
    return so(MANY_FOLD < found.ratio < math.inf, text)


def gradient_calm(facts: Facts) -> Sign:
    """The loss leaps, and the gradient norm does not."""
    found = _gradient(facts)
    if isinstance(found, Sign):
        return found
    return so(found.ratio < CALM_FOLD, f"panel 3: grad norm {found.value:.3g}, {found.usual:.3g} before: no leap")


def gradient_as_before(facts: Facts) -> Sign:
    """The loss leaps, and no gradient norm about it is above the largest of the hundred before: a batch that gives the
    weights a push would show, unless the norm was measured after clipping."""
    found = _gradient(facts)
    if isinstance(found, Sign):
        return found
    before = facts.before("grad_norm").values
    if facts.is_clipped_when_measured or len(before) < NEAR:
        return NOT_ASKED
    largest = float(before.max())
    return so(found.value <= largest, f"panel 3: grad norm {found.value:.3g}, up to {largest:.3g} before: as before")


def gradient_ramps(facts: Facts) -> Sign:
    """The gradient norm grows several-fold over a few rows and the loss follows: not the effect of one batch."""
    if facts.focus is None or not (facts.leaps or facts.is_nonfinite):
        return NOT_ASKED
    norms = facts.series("grad_norm").finite.within(facts.onset - 20 * facts.stride, facts.onset + NEAR * facts.stride)
    before = facts.before("grad_norm")
    if norms.is_empty or before.is_empty:
        return unlogged("grad_norm")
    top = int(np.argmax(norms.values))
    calm = np.flatnonzero(norms.values[:top] <= 2 * before.values.mean())
    first = int(calm[-1]) + 1 if len(calm) else 0
    rows, growth = top - first, norms.values[top] / max(norms.values[first], 1e-30)
    text = f"panel 3: grad norm grows {growth:.3g}-fold over {rows} rows up to step {norms.steps[top]}"
    return so(rows >= 3 and growth >= 5, text)


def gradient_alone(facts: Facts) -> Sign:
    """The gradient norm leaps at a step whose loss, measured before the update, is as usual."""
    found, losses = _gradient(facts), facts.before("loss").values
    if isinstance(found, Sign):
        return found
    here = facts.loss.within(found.step, found.step).values
    if not len(here) or len(losses) < NEAR:
        return NOT_ASKED
    usual = float(losses[-20:].mean())
    is_usual = abs(here[0] - usual) <= 4 * facts.noise("loss") + 0.02 * abs(usual)
    text = f"panels 1, 3: grad norm {found.value:.4g} at step {found.step}, while the loss is {here[0]:.4g} as before"
    return so(found.ratio > MANY_FOLD and bool(is_usual), text)


def back_at_once(facts: Facts) -> Sign:
    """The loss is back within three rows of the onset, and stays there."""
    if not facts.leaps or facts.focus is None or not math.isfinite(facts.focus.limit):
        return NOT_ASKED
    rows = _rows_above(facts)
    counted = "1 row" if rows == 1 else f"{rows} rows"
    is_back = rows <= 3 and facts.is_over and not facts.persists
    return so(is_back, f"panel 1: {counted} out of the usual, then as before")


def burst_of_rows(facts: Facts) -> Sign:
    """The loss is high for 4 to 100 rows and falls back as suddenly as it rose: a stretch of other data."""
    if not facts.leaps or facts.focus is None or facts.focus.end is None or facts.focus.trajectory == "divergent":
        return NOT_ASKED
    course = facts.loss.finite.within(facts.onset, facts.last).values[:104]
    if len(course) < 8:
        return NOT_ASKED
    rows = int(np.argmax(course[3:-1] - course[4:])) + 4  # up to the steepest fall
    inside, after = course[:rows], course[rows : rows + 4]
    height = inside.max() - facts.focus.usual
    # A model recovers gradually; a stretch of other data ends at once.
    falls = inside[-1] - after.mean() > 0.5 * height and inside.min() > facts.focus.usual + 0.3 * height
    return so(bool(falls), f"panel 1: {rows} rows about {inside.mean():.4g}, then {after.mean():.4g} at once")


def heals_slowly(facts: Facts) -> Sign:
    """The loss is not back within 50 rows."""
    if not facts.leaps or facts.focus is None:
        return NOT_ASKED
    after = facts.loss.finite.within(facts.onset + 40 * facts.stride, facts.onset + 60 * facts.stride).values
    level = f"{after.mean():.4g} about 50 rows on" if len(after) else "the log ends before 50 rows"
    return so(facts.persists, f"panel 1: {level}, {facts.focus.usual:.4g} before")


def climbs_with_gradients(facts: Facts) -> Sign:
    """The loss takes many rows to climb, and the gradients are larger meanwhile: no single update or batch did it."""
    focus = facts.focus
    if focus is None or not facts.leaps or not facts.persists or math.isnan(focus.usual):
        return NOT_ASKED
    norms = facts.series("grad_norm").finite
    if norms.is_empty:
        return unlogged("grad_norm")
    course = facts.loss.finite.within(facts.onset, focus.peak)
    halfway = np.flatnonzero(course.values > (focus.usual + focus.peak_loss) / 2)
    rows = int(halfway[0]) if len(halfway) else 0
    before, during = facts.before("grad_norm").values, norms.within(facts.onset, focus.peak).values
    if len(before) < NEAR or len(during) < NEAR:
        return NOT_ASKED
    ratio = float(np.median(during) / max(np.median(before), 1e-30))
    text = f"panels 1, 3: {rows} rows to half of its height, gradient norm {ratio:.3g}-fold meanwhile"
    return so(rows >= CLIMB and ratio > GROWN, text)


def goes_on_rising(facts: Facts) -> Sign:
    """The incident ends in a climb or in NaN."""
    if facts.focus is None:
        return NOT_ASKED
    return so(facts.focus.trajectory == "divergent", f"panel 1: the loss diverges from step {facts.onset} on")


def leaps_recur(facts: Facts) -> Sign:
    """Three or more leaps of the loss; by the textbook's rule every healthy run has as many."""
    if facts.rules == "textbook":
        return NOT_ASKED
    starts = [incident.start for incident in facts.incidents if incident.kind in LEAPS]
    steps = ", ".join(map(str, starts[:5]))
    return so(len(starts) >= 3, f"panel 1: {len(starts)} leaps of the loss, at {steps}")


def few_tokens_dear(facts: Facts) -> Sign:
    """A few tokens of the batch have a loss above 10 nats, the others are as usual."""
    shares = _high_loss_tokens(facts)
    if isinstance(shares, Sign):
        return shares
    here, before = shares
    text = f"panel 7: {here:.1%} of the tokens above {SURPRISING_NATS:g} nats, {before:.2%} before"
    return so(max(3 * before, 0.002) < here < 0.25, text)


def all_tokens_dear(facts: Facts) -> Sign:
    """A quarter of the tokens or more has a loss above 10 nats: the whole batch, or the model."""
    shares = _high_loss_tokens(facts)
    if isinstance(shares, Sign):
        return shares
    return so(shares[0] >= 0.25, f"panel 7: {shares[0]:.0%} of the tokens above {SURPRISING_NATS:g} nats")


def embedding_stands_out(facts: Facts) -> Sign:
    """The embedding's output grows more than any other layer's."""
    if not facts.leaps:
        return NOT_ASKED
    grown = _grown_layers(facts)
    if not grown:
        return unlogged("activation_norm/<layer>")
    ratio, layer = max(grown)
    return so(ratio >= 2 and is_embedding(layer), f"panel 4: {layer} {ratio:.2g}-fold, the most of {len(grown)}")


def activations_grow(facts: Facts) -> Sign:
    """The output of some block has at least doubled."""
    if facts.focus is None:
        return NOT_ASKED
    grown = _grown_layers(facts)
    if not grown:
        return unlogged("activation_norm/<layer>")
    ratio, layer = max(grown)
    return so(ratio >= 2 and not is_embedding(layer), f"panel 4: {layer} {ratio:.2g}-fold")


def attention_logits_grow(facts: Facts) -> Sign:
    """Attention logits are above 50 and have doubled."""
    names = facts.family("attention_logit_max")
    if not names:
        return unlogged("attention_logit_max/<layer>")
    for name in names:
        values = facts.series(name).finite.within(-math.inf, facts.onset + SOON * facts.stride).values
        if len(values) >= 4 and values[-3:].max() > max(LIMITS.attention_logit, 2 * np.median(values)):
            return so(True, f"{name} {values[-3:].max():.3g}, usually {np.median(values):.3g}")
    return so(False, "attention logits stay as they were")


def gradients_grow(facts: Facts) -> Sign:
    """The gradient norm has been rising while the loss did."""
    trend, change = facts.trend("grad_norm"), facts.change("grad_norm")
    if trend is None or change is None:
        return unlogged("grad_norm")
    return so(trend >= 0.5 and change.ratio > 1.1, f"panel 3: grad norm {change.usual:.3g}, then {change.value:.3g}")


def gradient_climbs_before(facts: Facts) -> Sign:
    """Early in the run the gradient norm has climbed many-fold, from row to row, before the loss leaves its course."""
    rows = int((facts.loss.steps < facts.onset).sum())
    if facts.focus is None or facts.onset > EARLY or rows > len(facts.loss.steps) / 4:
        return NOT_ASKED
    norms = facts.series("grad_norm").finite.within(-math.inf, facts.onset - 1).values
    if len(norms) < 2 * CLIMB:
        return unlogged("grad_norm") if not len(norms) else NOT_ASKED
    levels = np.array([float(np.median(part)) for part in np.array_split(norms, 8)])
    lowest = int(np.argmin(levels))
    rises = np.diff(levels[lowest:]) > 0
    growth = levels[-1] / max(levels[lowest], 1e-30)
    text = f"panel 3: grad norm {levels[lowest]:.3g} at its lowest, {levels[-1]:.3g} just before step {facts.onset}"
    return so(len(rises) >= 3 and bool(rises.mean() >= 0.75) and growth >= CLIMBED, text)


def gradients_vanish(facts: Facts) -> Sign:
    """The gradient norm has fallen to a small part of what it was: nothing is learned any more."""
    if facts.focus is None:
        return NOT_ASKED
    before = facts.before("grad_norm").values
    after = facts.series("grad_norm").finite.within(facts.onset + facts.stride, math.inf).values
    if not len(before) or not len(after):
        return NOT_ASKED if len(before) else unlogged("grad_norm")
    ratio = float(np.median(after[-20:]) / before.mean())
    return so(ratio < 0.1, f"panel 3: grad norm {np.median(after[-20:]):.3g}, {before.mean():.3g} before")


def is_young(facts: Facts) -> Sign:
    """The anomaly begins early: in the first tenth of the rows, or the first 100, and in the first 3000 steps."""
    rows, steps = int((facts.loss.steps < facts.onset).sum()), facts.loss.steps
    early = facts.onset <= 3000 and rows <= max(len(steps) / 10, 100)
    return so(facts.focus is not None and early, f"it begins at step {facts.onset} of {steps[-1] if len(steps) else 0}")


def _rows_above(facts: Facts) -> int:
    """Rows from the onset until three in a row are back."""
    assert facts.focus is not None
    noise = facts.noise("loss")
    limit = facts.focus.usual + (4 * noise if math.isfinite(noise) else 0.0)
    values = facts.loss.finite.within(facts.onset, facts.last).values
    above = ~(values <= max(limit, facts.focus.limit))
    calm = np.convolve(above, np.ones(3), "valid") == 0 if len(above) >= 3 else np.zeros(0)
    first = int(np.argmax(above)) if above.any() else 0
    places = np.flatnonzero(calm)
    places = places[places > first]
    return int(places[0]) if len(places) else len(values)


def comes_in_turns(facts: Facts) -> Sign:
    """All that rises does so with a fixed period, and the learning rate has none."""
    periodic = facts.findings.periodic
    return so(bool(periodic) and OF_THE_RATE not in periodic, f"panel 1: {periodic}")


def _gradient(facts: Facts) -> Against | Sign:
    """The highest gradient norm about a leap of the loss; or why not."""
    if not facts.leaps:
        return NOT_ASKED
    found = facts.highest("grad_norm")
    return found if found is not None else unlogged("grad_norm")


def _high_loss_tokens(facts: Facts) -> tuple[float, float] | Sign:
    """The share of tokens above 10 nats at a leap of the loss, and before it; or why not."""
    if not facts.leaps:
        return NOT_ASKED
    told = {
        step: share
        for step, text in facts.texts("token_loss_histogram").items()
        if (share := _high_loss_share(text)) is not None
    }
    first = facts.onset - facts.stride
    near = [share for step, share in told.items() if first <= step <= facts.onset + SOON * facts.stride]
    before = [share for step, share in told.items() if step < first]
    return (max(near), float(np.mean(before))) if near and before else unlogged("token_loss_histogram")


def _high_loss_share(histogram: str) -> float | None:
    """The share of its tokens above 10 nats; None where it is no histogram."""
    try:
        counts = np.array([float(word) for word in histogram.replace(",", " ").strip("[]").split()])
    except ValueError:
        return None
    bins = int(SURPRISING_NATS * 2)  # half a nat each
    return float(counts[bins:].sum() / counts.sum()) if len(counts) > bins and counts.sum() > 0 else None


def is_embedding(name: str) -> bool:
    """Whether the name of a layer or a tensor is that of an embedding; GPT-2's are wte and wpe."""
    parts = re.split(r"[._]", name.lower())
    return any("embed" in part or part in ("emb", "embs", "wte", "wpe") for part in parts)


def _grown_layers(facts: Facts) -> list[tuple[float, str]]:
    names = facts.groups("activation_norm")
    found = ((facts.highest(name), name.partition("/")[2]) for name in names)
    return [(against.ratio, layer) for against, layer in found if against is not None]
