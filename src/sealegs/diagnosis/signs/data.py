"""Signs in the data: which batches a run saw, what was in them, and what the held-out loss says."""

import math
from collections import defaultdict

import numpy as np

from sealegs.diagnosis.facts import SOON, Facts
from sealegs.diagnosis.signs.sign import NOT_ASKED, Sign, opposite, so, unlogged
from sealegs.record.unlearned_sources import shares_of

RECENT = 50
"""Rows within which a repeated batch is the loader's doing; later it may be the next epoch."""
NEEDED = 10
"""Losses on each side of a resume that a comparison needs."""
LITTLE_LEFT = 0.25
"""Share of the loss of the first epoch below which what is seen again and again is known by heart."""
GAUSSIAN = 0.6745
"""The median distance of normal noise from its middle, in standard deviations."""
FELL = 1.2
"""How far the held-out loss must have come down for a constant ratio to say something."""
FEW_RISES = 4
"""Evaluations before the trouble from which on one may be left out."""
AGAIN, AGAIN_SHARE = 2, 0.5
"""Resumes after which the loss is lower, and the share of all of them, from which on it is no chance."""


def batch_repeats(facts: Facts) -> Sign:
    """A batch around the onset came a short while before, too."""
    first, last = facts.onset - 5 * facts.stride, facts.onset + SOON * facts.stride
    if facts.focus is None:
        first, last = 0, facts.last
    hashes = _hashes(facts, first - RECENT * facts.stride, last)
    if not hashes:
        return unlogged("batch_hash")
    last_at: dict[str, int] = {}
    found = []
    for step, digest in hashes.items():
        before = last_at.get(digest)
        if before is not None and step - before <= RECENT * facts.stride:
            found.append((step, before))
        last_at[digest] = step
    if not found or found[-1][0] < first:
        return so(False, f"panel 10: no batch about step {facts.onset} is one of the {RECENT} before it")
    step, before = found[0]
    more = f", and so on {len(found)} times up to step {found[-1][0]}" if len(found) > 1 else ""
    return so(True, f"panel 10: the batch of step {step} is that of step {before} again{more}")


def batches_differ(facts: Facts) -> Sign:
    """The batch of the onset did not come before."""
    return opposite(batch_repeats(facts))


def same_batch_harmless(facts: Facts) -> Sign:
    """The batch of the onset came at another time, and its loss was as usual then."""
    seen = _same_batch_elsewhere(facts)
    if seen is None:
        return unlogged("batch_hash")
    calm = [loss for _, loss, usual in seen if loss <= usual]
    text = f"panels 1, 10: the batch of step {facts.onset} had loss {calm[0]:.4g} at another time" if calm else ""
    return so(bool(calm), text)


def same_batch_bad_again(facts: Facts) -> Sign:
    """The batch of the onset came at another time, and its loss leapt then, too."""
    seen = _same_batch_elsewhere(facts)
    if seen is None:
        return unlogged("batch_hash")
    bad = [(loss, step) for step, loss, usual in seen if not loss <= usual]
    text = "panels 1, 10: the same batch leapt to {:.4g} at step {} too".format(*bad[0]) if bad else ""
    return so(bool(bad), text)


def entropy_low(facts: Facts) -> Sign:
    """The tokens around the onset are far more alike than usual: repeated or degenerate text."""
    return _entropy(facts, -1, "fewer different tokens")


def entropy_high(facts: Facts) -> Sign:
    """The tokens around the onset are far more different than usual: noise, or a broken encoding."""
    return _entropy(facts, +1, "more different tokens")


def entropy_usual(facts: Facts) -> Sign:
    """The tokens around the onset are as different as usual."""
    low, high = entropy_low(facts), entropy_high(facts)
    if low.holds is None or not low.text:
        return low
    return so(not low.holds and not high.holds, low.text)


def sources_change(facts: Facts) -> Sign:
    """The mixture of sources around the onset is not the one from before."""
    if facts.focus is None:
        return NOT_ASKED
    told = facts.texts("sources")
    if not told:
        return unlogged("sources")
    first, last = facts.onset, min(facts.onset + SOON * facts.stride, facts.untreated_until)
    before = _shares([text for step, text in told.items() if first - 200 * facts.stride <= step < first])
    after = _shares([text for step, text in told.items() if first <= step <= last])
    name = max(before | after, key=lambda source: abs(after.get(source, 0) - before.get(source, 0)), default="")
    if not before or not after:
        return NOT_ASKED
    text = (
        f"panel 10: {name} is {after.get(name, 0):.0%} of the rows after step {first}, {before.get(name, 0):.0%} before"
    )
    return so(abs(after.get(name, 0) - before.get(name, 0)) > 0.25, text)


def eval_flat(facts: Facts) -> Sign:
    """The held-out loss does not move while the training loss does: the data changed, not the model."""
    if facts.focus is None:
        return NOT_ASKED
    held_out = facts.series("eval_loss").finite
    before = held_out.within(-math.inf, facts.onset).values[-6:]
    after = held_out.within(facts.onset + 1, math.inf).values[:3]
    if len(before) < 2 or not len(after):
        return _eval_unlogged(facts)
    # Its noise is how far it rose before: the differences of a steeply falling loss are large, but not noise. The
    # largest of several rises is left out: it may be the first evaluation that the trouble has hit.
    rises = np.sort(np.diff(before).clip(min=0.0))
    noise = 2 * float(rises[-2 if len(rises) >= FEW_RISES else -1]) if len(rises) else 0.0
    moved = abs(facts.focus.peak_loss - facts.focus.usual)
    usual = min(float(before[-1]), float(np.median(before)))  # the last may be hit already
    is_flat = after.max() - usual <= max(noise, 0.1 * moved if math.isfinite(moved) else 0.0, 0.002 * usual)
    return so(bool(is_flat), f"panel 1: evaluation loss {usual:.4g} before, {after.max():.4g} after")


def eval_flat_meanwhile(facts: Facts) -> Sign:
    """The held-out loss was measured while the training loss was high, and had not moved: the data changed."""
    focus = facts.focus
    if focus is None:
        return NOT_ASKED
    end = focus.end if focus.end is not None else facts.last
    sign = eval_flat(facts)
    is_meanwhile = not facts.series("eval_loss").finite.within(facts.onset + 1, end).is_empty
    return sign if is_meanwhile or sign.holds is None else so(False, sign.text)


def eval_rises(facts: Facts) -> Sign:
    """The held-out loss is up, too: the model is worse."""
    return opposite(eval_flat(facts))


def eval_turns(facts: Facts) -> Sign:
    """The held-out loss has risen from its lowest while the training loss went on falling."""
    held_out = facts.series("eval_loss").finite
    if len(held_out.values) < 4:
        return _eval_unlogged(facts)
    lowest = int(np.argmin(held_out.values))
    # Second differences, since a trend is no noise; their median, since a loss that falls steeply at first is curved.
    curved = np.abs(np.diff(held_out.values, 2))
    noise = float(np.median(curved)) / (GAUSSIAN * math.sqrt(6)) if len(held_out.values) > 4 else 0.0
    rise = held_out.values[max(lowest + 1, len(held_out.values) - 3) :].min(initial=np.inf) - held_out.values[lowest]
    train = facts.loss.finite
    count = max(len(train.values) // 20, 1)
    there = train.within(-math.inf, held_out.steps[lowest]).values[-count:]
    if not len(there):
        return NOT_ASKED
    falls = there.mean() - train.values[-count:].mean()
    is_damaged = facts.persists and held_out.steps[lowest] <= facts.onset  # then it rose with the incident
    text = (
        f"panel 1: evaluation loss {held_out.values[lowest]:.4g} at step {held_out.steps[lowest]}, "
        f"{held_out.values[-1]:.4g} at the end, while the training loss fell by {falls:.3g}"
    )
    turns = math.inf > rise > max(4 * noise, 0.02 * abs(held_out.values[lowest])) and falls > 0
    return so(bool(turns) and not is_damaged, text)


def eval_plateau(facts: Facts) -> Sign:
    """The held-out loss has stopped falling, too."""
    values = facts.series("eval_loss").finite.values
    if len(values) < 4:
        return _eval_unlogged(facts)
    gained = values[-4:-2].mean() - values[-2:].mean()
    return so(bool(gained < 0.002 * values[-1]), f"panel 1: evaluation loss {values[-4]:.4g}, then {values[-1]:.4g}")


def falls_by_epochs(facts: Facts) -> Sign:
    """The training loss falls in steps, where the data begins again."""
    found = [incident.start for incident in facts.incidents if incident.kind == "epoch_step"]
    return so(bool(found), f"panel 1: the loss steps down at {', '.join(map(str, found[:4]))}")


def ends_next_to_nothing(facts: Facts) -> Sign:
    """The loss in the end is a small part of that of the first epoch, or of the first tenth of the log."""
    losses, epochs = facts.loss.finite, facts.series("epoch").finite
    if len(losses.values) < NEEDED * 2:
        return NOT_ASKED
    over = epochs.steps[epochs.values >= epochs.values[0] + 1] if len(epochs.values) else epochs.steps
    first = losses.within(-math.inf, int(over[0])).values if len(over) else losses.values[: len(losses.values) // 10]
    if not len(first):
        return NOT_ASKED
    level, end = float(np.median(first)), float(np.median(losses.values[-NEEDED:]))
    return so(0 <= end < LITTLE_LEFT * level, f"panel 1: loss {level:.4g} in the first epoch, {end:.4g} in the end")


def train_is_multiple_of_eval(facts: Facts) -> Sign:
    """The training loss has been a whole multiple of the held-out loss all along, while both fell."""
    ratio, text = _train_to_eval(facts)
    if isinstance(text, Sign):
        return text
    return so(round(ratio) >= 2 and abs(ratio - round(ratio)) < 0.04 * ratio, text)


def train_in_bits(facts: Facts) -> Sign:
    """The training loss has been the held-out loss times 1 / ln 2, or ln 2, all along: bits and nats."""
    ratio, text = _train_to_eval(facts)
    if isinstance(text, Sign):
        return text
    return so(any(abs(ratio - of) < 0.015 * of for of in (math.log(2), 1 / math.log(2))), text)


def _train_to_eval(facts: Facts) -> tuple[float, str | Sign]:
    """How many times the held-out loss the training loss is, all along, and the sentence; or why that is not known."""
    held_out, losses = facts.series("eval_loss").finite, facts.loss.finite
    if len(held_out.values) < FEW_RISES + 2:
        return math.nan, _eval_unlogged(facts)
    pairs = [
        (float(np.median(near)) / value, value)
        for step, value in zip(held_out.steps.tolist(), held_out.values.tolist(), strict=True)
        if value > 0 and len(near := losses.within(step - 5 * facts.stride, step + 5 * facts.stride).values)
    ][1:]  # at first the loss falls too steeply to say
    if len(pairs) < FEW_RISES:
        return math.nan, NOT_ASKED
    ratios, values = np.array(pairs).T
    ratio, spread = float(np.median(ratios)), float(np.ptp(np.quantile(ratios, [0.1, 0.9])))
    if spread > 0.1 * ratio or values.max() < FELL * values.min():
        return math.nan, NOT_ASKED
    return ratio, f"panel 1: the loss is {ratio:.3g} times the evaluation loss beside it, at {len(ratios)} steps"


def multiple_is_the_accumulation(facts: Facts) -> Sign:
    """That multiple is the number of micro-batches to a step, as the settings have it."""
    multiple, parts = train_is_multiple_of_eval(facts), facts.known.number("accumulation")
    if not multiple.holds:
        return multiple
    if parts is None:
        return unlogged("accumulation in the settings")
    factor = multiple.text.partition(" is ")[2].partition(" ")[0]
    return so(round(float(factor)) == parts, f"the settings accumulate {parts:g} micro-batches")


def lower_after_resume(facts: Facts) -> Sign:
    """After a resume the loss is lower than before it, and steps up later: the data was seen before."""
    lower = _lower_after(facts)
    if not lower:
        return so(False, "panel 1: no resume after which the loss is lower") if facts.resumes else NOT_ASKED
    resume, (loss, expected) = next(iter(lower.items()))
    return so(True, f"panel 1: loss {loss:.4g} after the resume at step {resume}, {expected:.4g} by its trend")


def lower_after_each_resume(facts: Facts) -> Sign:
    """After most of several resumes the loss is lower than before: each time the data begins where it was known."""
    lower = list(_lower_after(facts))
    steps = ", ".join(map(str, lower[:4]))
    text = f"panel 1: the loss is lower after {len(lower)} of {len(facts.resumes)} resumes, at {steps}"
    return so(len(lower) >= max(AGAIN, AGAIN_SHARE * len(facts.resumes)), text)


def eval_flat_at_resumes(facts: Facts) -> Sign:
    """The held-out loss goes on over a resume as before it, where the training loss does not."""
    lower = _lower_after(facts)
    held_out = facts.series("eval_loss").finite
    if not lower:
        return NOT_ASKED
    for resume, (loss, expected) in lower.items():
        before = held_out.within(-math.inf, resume - 1).values[-4:]
        after = held_out.within(resume, math.inf).values[:1]
        if len(before) < 2 or not len(after):
            continue
        moved = before[-1] - after[0] - max(float(np.median(-np.diff(before))), 0.0)
        text = f"panel 1: evaluation loss {before[-1]:.4g} before the resume at step {resume}, {after[0]:.4g} after"
        return so(moved < 0.5 * (expected - loss), text)
    return _eval_unlogged(facts)


def _lower_after(facts: Facts) -> dict[int, tuple[float, float]]:
    """The resumes after which the loss is lower than by its trend: what it is, and what it should be."""
    found: dict[int, tuple[float, float]] = {}
    for resume in facts.resumes:
        losses = facts.loss.finite
        before = losses.within(-math.inf, resume - 1).values[-RECENT:]
        after = losses.within(resume, math.inf).values[:20]
        if len(before) < NEEDED or len(after) < NEEDED:
            continue
        spread = np.std(np.diff(before)) / math.sqrt(2)
        slope, begin = np.polyfit(np.arange(len(before)), before, 1)  # an early loss falls in any case
        expected = begin + slope * (len(before) + len(after) / 2)
        fallen = min(expected, before.mean()) - after.mean()
        if fallen > 5 * spread / math.sqrt(len(after)) and fallen > 0.01 * before.mean():
            found[resume] = float(after.mean()), float(expected)
    return found


def data_not_restored(facts: Facts) -> Sign:
    """After the resume, the same steps had other batches than before it."""
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


def data_begins_again(facts: Facts) -> Sign:
    """After a resume the batches are those of much earlier steps, in the same order."""
    if not facts.resumes:
        return NOT_ASKED
    hashes = _hashes(facts)
    if not hashes:
        return unlogged("batch_hash")
    steps, digests = list(hashes), list(hashes.values())
    for resume in facts.resumes:
        place = int(np.searchsorted(steps, resume))
        row = digests[place : place + 5]
        starts = [at for at, digest in enumerate(digests[: max(place - 5, 0)]) if row[:1] == [digest]]
        same = next((at for at in starts if len(row) == 5 and digests[at : at + 5] == row), None)
        if same is not None:
            return so(
                True, f"panel 10: from the resume at step {resume} on, the batches are those from step {steps[same]}"
            )
    return so(False, "panel 10: no batches come again after a resume")


def _eval_unlogged(facts: Facts) -> Sign:
    """The held-out loss was not measured, or not often enough about the incident."""
    return unlogged("eval_loss more often" if "eval_loss" in facts.run.signals else "eval_loss")


def _hashes(facts: Facts, first: float = -math.inf, last: float = math.inf) -> dict[int, str]:
    numbers = facts.series("batch_index").within(first, last)
    told = facts.texts("batch_hash", first, last)
    return told or dict(zip(numbers.steps.tolist(), map(str, numbers.values.tolist()), strict=True))


def _same_batch_elsewhere(facts: Facts) -> list[tuple[int, float, float]] | None:
    """Rows with the batch of the onset, except the worst: step, loss, and the highest loss that is usual there."""
    if not facts.leaps:
        return []
    if "batch_hash" not in facts.run.signals:
        return None
    steps, segments, digests = facts.run.written("batch_hash")
    seen = np.isin(digests, digests[steps == facts.onset])
    at, of, values = facts.run.written("loss")
    found = []
    for step, segment in zip(steps[seen].tolist(), segments[seen].tolist(), strict=True):
        here = values[(at == step) & (of == segment)]
        beside = values[(of == segment) & (abs(at - step) <= 10 * facts.stride) & (at != step)]
        if len(here) and len(beside):
            found.append((int(step), float(here[-1]), float(np.median(beside)) + 5 * facts.noise("loss")))
    worst = max((row for row in found if row[0] == facts.onset), key=lambda row: row[1], default=None)
    return [row for row in found if row != worst]


def _entropy(facts: Facts, direction: int, words: str) -> Sign:
    if facts.focus is None or not (facts.leaps or facts.is_nonfinite):
        return NOT_ASKED
    # only the batch itself counts: one that came ten steps later says nothing
    last = min(max(facts.focus.peak, facts.onset), facts.near_end)
    before, near = facts.before("token_entropy").values, facts.series("token_entropy").within(facts.onset, last).values
    if len(before) < 5 or not len(near):
        return unlogged("token_entropy")
    mean, spread = before.mean(), max(float(np.std(before)), 0.01 * float(before.mean()))
    value = float(near.min() if direction < 0 else near.max())
    is_far = direction * (value - mean) > max(5 * spread, 0.05 * mean)
    return so(
        bool(is_far), f"panel 10: token entropy {value:.3g} nats, {mean:.3g} before{': ' + words if is_far else ''}"
    )


def _shares(texts: list[str]) -> dict[str, float]:
    """The share of each source in all of these batches, each of which counts the same."""
    shares: dict[str, float] = defaultdict(float)
    known = [each for text in texts if (each := shares_of(text))]
    for each in known:
        for name, share in each.items():
            shares[name] += share / len(known)
    return dict(shares)
