"""What the attempts of a run say: what was changed from one to the next, and whether it helped.

A setting that was changed at a restart is a treatment. It is no cause of what came before it, and where the same
trouble came again under it, that speaks against the cause that it was to treat.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from sealegs.diagnosis.curve.loss_curve import LossCurve
from sealegs.diagnosis.settings import NAMES
from sealegs.incidents import Incident
from sealegs.record.attempts import Attempt
from sealegs.record.run import Run

MOST_TOLD = 12
"""The most attempts that a page lists, the last ones; JSON has all of them."""
MOST_CHANGES = 4
"""The most changed settings that a line names."""
MOST_TREATED = 200
"""The most attempts whose treatments are looked at, the last ones."""
COMPARED = 8
"""The fewest rows of an attempt, or steps that two attempts share, by which a changed rate is told from a schedule."""
ALIKE = 0.02
"""Share by which the ratio of two rates may vary where the one is the other, scaled."""
TROUBLES = (("nonfinite",), ("overflow",), ("spike", "level_shift", "drift"))
"""Kinds of incidents that are the same trouble coming again. A jump at a resume is of the resume's own making."""


class Treatment(NamedTuple):
    """Something that was changed from one attempt to the next."""

    attempt: int
    step: int
    """The first step under it."""
    knob: str
    """Our name of the setting."""
    before: float
    after: float
    """NaN where the values are no numbers."""
    text: str


def attempts_in(run: Run) -> tuple[Attempt, ...]:
    """The attempts of a run that made more than one; none of a run that was made in one go."""
    return run.attempts if len(run.attempts) > 1 else ()


def treatments(run: Run, curve: LossCurve, incidents: Sequence[Incident]) -> tuple[Treatment, ...]:
    """What was changed at each restart: settings that the log prints anew, or a learning rate that was scaled down
    after a trouble. A rate that is another one without either was not restored."""
    attempts = attempts_in(run)
    if not attempts:
        return ()
    troubled = min(
        (curve.attempt_of(it) for it in incidents if any(it.kind in kinds for kinds in TROUBLES)), default=None
    )
    found: list[Treatment] = []
    for before, one in list(pairwise(attempts))[-MOST_TREATED:]:
        ours = [_of_setting(one, name, *pair) for name, pair in one.changed.items() if _knob(name)]
        if troubled is not None and troubled < one.number and not any(each.knob == "lr" for each in ours):
            ours += _scaled_rate(run, before, one)
        found += ours
    return tuple(found)


def without_help(curve: LossCurve, incidents: Sequence[Incident], treated: Sequence[Treatment]) -> Mapping[str, str]:
    """The knobs that were turned because of a trouble that then came again, with a sentence each."""
    attempt_of = list(zip(incidents, _in_order(curve, incidents), strict=True))
    found: dict[str, str] = {}
    for one in treated:
        if one.knob == "lr" and not one.after < one.before:
            continue
        for kinds in TROUBLES:
            earlier = [it for it, attempt in attempt_of if it.kind in kinds and attempt < one.attempt]
            again = [it for it, attempt in attempt_of if it.kind in kinds and attempt >= one.attempt]
            if earlier and again:
                name = again[0].kind.replace("_", " ")
                found[one.knob] = f"{one.text}, and it came again: {name} at step {again[0].start}"
    return found


def _in_order(curve: LossCurve, incidents: Sequence[Incident]) -> list[int]:
    """The attempt of each incident. They come in the order of rows, so that two alike are of two attempts."""
    found: list[int] = []
    start = -1
    for incident in incidents:
        attempt = curve.attempt_of(incident)
        least = found[-1] + (incident.start <= start) if found else 0
        if attempt < least:
            rows = (curve.steps == incident.peak) & (curve.segments >= least)
            attempt = int(curve.segments[np.argmax(rows)]) if rows.any() else attempt
        found.append(attempt)
        start = incident.start
    return found


def lines(attempts: Sequence[Attempt]) -> list[str]:
    """A line for each attempt, the last ones of many."""
    left_out = len(attempts) - MOST_TOLD
    told = [_line(one, is_last=one is attempts[-1]) for one in attempts[-MOST_TOLD:]]
    return ([f"{left_out} earlier attempts: --json has all of them"] if left_out > 0 else []) + told


def contract(attempts: Sequence[Attempt]) -> list[dict[str, Any]]:
    """The attempts as the values of ``--json``."""
    return [
        {
            "number": one.number + 1,
            "first": one.first,
            "last": one.last,
            "goes_on_from": None if one.parent is None else {"attempt": one.parent + 1, "step": one.begun_from},
            "told_by": one.told_by,
            "given_up_from": one.given_up_from,
            "changed": {name: {"before": before, "after": after} for name, (before, after) in one.changed.items()},
        }
        for one in attempts
    ]


def _line(one: Attempt, *, is_last: bool) -> str:
    """``2: steps 301 to 420, from step 300 of 1 (loading checkpoint ...); lr 0.001 to 0.0005; given up from 351 on``"""
    words = [f"{one.number + 1}: steps {one.first} to {one.last}"]
    if one.number:
        words[0] += ", anew" if one.parent is None else f", from step {one.begun_from} of {one.parent + 1}"
    if one.told_by and not one.told_by.startswith("steps go back"):
        words[0] += f" ({_short(one.told_by)})"
    changes = [f"{name} {_short(before)} to {_short(after)}" for name, (before, after) in one.changed.items()]
    changes.sort(key=lambda text: _knob(text.partition(" ")[0]) == "")
    more = [f"{len(changes) - MOST_CHANGES} more settings"] if len(changes) > MOST_CHANGES else []
    if changes:
        words.append(", ".join([*changes[:MOST_CHANGES], *more]))
    if one.given_up_from is not None:
        words.append("given up" if one.given_up_from <= one.first else f"given up from {one.given_up_from} on")
    elif is_last:
        words.append("the last: the verdict is of this one")
    return "; ".join(words)


def _short(value: Any, most: int = 60) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= most else f"{text[: most - 3]}..."


@cache
def _knobs() -> dict[str, str]:
    return {theirs: ours for ours, names in NAMES.items() for theirs in names.split()}


def _knob(name: str) -> str:
    """Our name of a setting, by its dotted name; empty if it is none that a run is treated with."""
    return _knobs().get(name.rpartition(".")[2].lower().replace("-", "_"), "")


def _of_setting(one: Attempt, name: str, before: Any, after: Any) -> Treatment:
    text = f"{name} was changed from {_short(before)} to {_short(after)} at step {one.first}"
    return Treatment(one.number, one.first, _knob(name), _number(before), _number(after), text)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def _scaled_rate(run: Run, before: Attempt, one: Attempt) -> list[Treatment]:
    """A learning rate that is the earlier one times a factor below 1, over the steps that both attempts have.

    A schedule that begins again has another shape, so that its ratio to the earlier one varies.
    """
    if "lr" not in run.signals or not run.has_numbers("lr") or before.last < one.first:
        return []
    steps, segments, rates = run.written("lr", copy=False)
    begin, middle, end = np.searchsorted(segments, [before.number, one.number, one.number + 1]).tolist()
    same, old, new = np.intersect1d(steps[begin:middle], steps[middle:end], return_indices=True)
    earlier, later = rates[begin:middle][old], rates[middle:end][new]
    known = np.isfinite(earlier) & np.isfinite(later) & (earlier > 0) & (later > 0)
    if known.sum() < COMPARED:
        return []
    ratio = later[known] / earlier[known]
    factor = float(np.median(ratio))
    if factor >= 1 - ALIKE or float(np.ptp(ratio)) > ALIKE * factor:
        return []
    values = float(earlier[known][0]), float(later[known][0])
    text = f"lr was {values[0]:.3g} and is {values[1]:.3g} from step {int(same[0])} on, {factor:.3g} times as high"
    return [Treatment(one.number, one.first, "lr", *values, text)]
