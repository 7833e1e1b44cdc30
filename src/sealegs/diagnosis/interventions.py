"""What interventions say about a run: a curve can be smooth because its steep steps were left out."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np

from sealegs.diagnosis.contract import Health
from sealegs.record.interventions import NOT_FINITE, Done, done_to, skipped_steps, spelt
from sealegs.record.run import Run
from sealegs.record.unlearned_sources import Division, Unlearned

MANY = 0.001
"""Share of the steps above which skips of finite steps are more than an accident."""
NEVER_LEARNED = "what was in them was never learned"
ONE_OF_SEVERAL = "another model is trained in turns with it, and what one loses the other wins"
LOOK_AT_SKIPS = (
    "Look at the batches that were skipped (the `skip` events say why, their rows have `batch_index`): if they are "
    "bad, leave them out; if they are sound, the rules are too strict for this run: loosen them, or judge without "
    "skipping (`act=False`)."
)
WITHOUT_CAUSE = (
    "Find out why before you go on from a checkpoint of before it: `sealegs replay` tries one thing at a time."
)


def done_in(run: Run) -> Done | None:
    """The interventions in a run; None where its log does not tell."""
    if not run.has_events:
        return None
    steps = len(run.written("loss").steps) if "loss" in run.signals else 0
    done = done_to(run.events, steps=steps, last=int(run.steps[-1]) if len(run.steps) else 0)
    return replace(done, unlearned=_unlearned(run)) if done.skips.count else done


def _unlearned(run: Run) -> Unlearned | None:
    """The source that lost the largest part of itself to skips; of a repeated step, the first pass counts."""
    if "sources" not in run.signals:
        return None
    steps, _, sources = run.written("sources")
    known, first = np.unique(steps, return_index=True)
    skips = Counter(map(str, sources[first[np.isin(known, skipped_steps(run.events))]].tolist()))
    division = Division()
    for text, count in Counter(map(str, sources.tolist())).items():
        division.add(text, steps=count, skips=skips[text])
    return division.worst()


def weighed(curve: tuple[Health, str], done: Done | None) -> tuple[Health, str]:
    """The verdict on a curve, revised by the interventions: a halt makes it `act`, many skips make it `watch`."""
    verdict, because = curve
    if (ended := how_it_stands(done)) is not None:
        return "act", ended if verdict != "act" else f"{because}; {ended[:1].lower()}{ended[1:]}"
    if done is not None and done.is_one_of_several and verdict == "act":
        return "watch", f"{because}; but its loss is not its own: {ONE_OF_SEVERAL}"
    if done is not None and verdict == "healthy" and (doubt := _how_it_ended(done)):
        return "watch", doubt
    if done is None or not (lost := _lost(done)):
        return verdict, because
    if verdict == "act":
        return verdict, f"{because}; {lost}"
    return "watch", lost + ("" if verdict == "healthy" else f"; {because}")


def how_it_stands(done: Done | None) -> str | None:
    """One sentence about a run that was halted; None for any other."""
    if done is None:
        return None
    if (halted := done.halted) is not None:
        why = halted.detail.get("error") if halted.kind == "end" else halted.detail.get("evidence")
        why = why or halted.detail.get("text") or "it does not say why"
        return f"The run was halted at step {halted.step}: {why}"
    return None


def is_done(run: Run, done: Done | None, knob: str, value: str) -> bool:
    """Whether the guard does already what a remedy asks for: it skips what is not finite, clips as low, or has taken
    the source out."""
    if done is None:
        return False
    if knob == "gate" and value == "non-finite":
        return any(done.skips.reasons.get(name) for name in NOT_FINITE)
    if knob == "swap":
        return bool(done.actions.get("swap-source"))
    if knob == "clip" and "clip_norm" in run.signals:
        norms = run.column("clip_norm")
        return bool(len(norms)) and bool(norms[-1] <= _number(value))
    return knob == "clip_value" and _clips_elements_at(run) <= _number(value)


def _clips_elements_at(run: Run) -> float:
    """The value that recovery clips the elements of gradients at; infinite where it does not."""
    acted = (event for event in run.events if event.kind == "intervention" and event.detail.get("acted"))
    margins = (margin for event in acted for margin in event.detail.get("margins") or ())
    values = [margin.get("value") for margin in margins if margin.get("margin") == "clip_value"]
    return min((value for value in values if isinstance(value, int | float)), default=math.inf)


def _number(value: str) -> float:
    """The number that a remedy sets; NaN, which nothing is below, where it sets none.

    >>> _number("0.5"), _number("AdamW's groups")
    (0.5, nan)
    """
    return float(value) if value.replace(".", "", 1).isdigit() else math.nan


def _how_it_ended(done: Done) -> str:
    """One sentence about an incident that was still open at the end. The curve decides whether it is damage."""
    if done.ended_badly is not None:
        return f"the run ended badly: {done.ended_badly.detail.get('why', 'it does not say how')}"
    if done.open_since is not None:
        number, step = done.open_since.detail.get("incident"), done.open_since.step
        return f"incident {number}, since step {step}, was not over when the record ends"
    return ""


def lost_much(done: Done | None) -> bool:
    """Whether more sound data were skipped than can be an accident."""
    return done is not None and bool(_lost(done))


def _lost(done: Done) -> str:
    """What was lost to skips where that is much: of all data, or of one source."""
    share = spelt(done.skips.finite / max(done.steps, done.skips.finite, 1))
    of_all = f"{done.skips.finite:,} of {done.steps:,} steps ({share}) were skipped though finite: {NEVER_LEARNED}"
    told = [of_all] if done.skips.finite > MANY * done.steps else []
    told += [str(done.unlearned)] if done.unlearned is not None and done.unlearned.is_much else []
    return "; ".join(told)
