"""Cuts the stretch around one incident out of a run, so that a diagnosis is about this incident alone.

The run is cut where it went back because of the incident: the attempt in which the incident was worst counts, not the
one that went well. The part before shows what was usual, and starts after the previous incident. The part after shows
how it went on, and ends before the next incident. Steps that are not finite, and that are no part of it, are left out.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from sealegs.diagnosis.curve.loss_curve import curve_of, numbers
from sealegs.diagnosis.curve.stretches import NEAR, closed_up
from sealegs.diagnosis.incident_order import BENIGN, WATCHED
from sealegs.incidents import AVERAGED, Incident
from sealegs.record.run import Run

BEFORE, AFTER = 2000, 600
"""The most rows before and after the onset that a diagnosis sees."""
LEAST_BEFORE = 100
"""The fewest rows before the onset, even if they reach into another incident."""
SHOWN_BEFORE, SHOWN_AFTER = 150, 600
"""Rows before and after the onset that are counted and drawn."""


def stretch(run: Run, incident: Incident, others: Sequence[Incident] = ()) -> Run:
    """The part of a run that explains an incident."""
    curve = curve_of(run)
    stride = curve.interval
    first = incident.start - BEFORE * stride
    for other in others:
        end = -math.inf if other.end is None else other.end
        if first <= end < incident.start - LEAST_BEFORE * stride:
            first = int(end) + 1
    last = min(incident.start + AFTER * stride, own_until(run, incident, others))
    apart = incident.start - AVERAGED * stride
    before = [step for steps in _not_finite(run, incident) if steps[-1] < apart for step in steps]
    return run.cut(curve.attempt_of(incident), first, last, before)


def own_until(run: Run, incident: Incident, others: Sequence[Incident] = ()) -> float:
    """The last step before other trouble began, once the incident was over; what comes hardly after it is its own."""
    if incident.end is None:
        return math.inf
    curve = curve_of(run)
    over = max(incident.end, incident.peak, incident.start) + AVERAGED * curve.interval
    begun = [steps[0] for steps in _not_finite(run, incident)]
    for other in others:
        if other.kind not in BENIGN + WATCHED and curve.attempt_of(other) == curve.attempt_of(incident):
            begun.append(other.start)
    return min((step - 1 for step in begun if step > over), default=math.inf)


def _not_finite(run: Run, incident: Incident) -> Iterator[list[int]]:
    """The steps of each stretch whose losses or gradients are not finite, as the incident's attempt went.

    Gradients do not count where a scaler looks for its scale.
    """
    line = run.seen_from(curve_of(run).attempt_of(incident))
    if "loss" not in line.signals:
        return
    steps, losses = line.series("loss")
    is_bad = ~np.isfinite(numbers(losses))
    if "grad_norm" in line.signals and "loss_scale" not in line.signals:
        at, norms = line.series("grad_norm")
        is_bad |= np.isin(steps, at[~np.isfinite(numbers(norms))])
    for first, last in closed_up(is_bad, NEAR):
        yield steps[first : last + 1][is_bad[first : last + 1]].tolist()


def went_back(run: Run, incident: Incident) -> bool:
    """Whether a rollback or a resume ended the attempt, so that its further course is unknown."""
    curve = curve_of(run)
    return curve.attempt_of(incident) < curve.last_attempt


def rows_about(run: Run, incident: Incident) -> list[dict[str, Any]]:
    """The rows around an incident in the order written, from every attempt, as the lines of the file."""
    stride = curve_of(run).interval
    first = incident.start - SHOWN_BEFORE * stride
    last = max(incident.start + SHOWN_AFTER * stride, incident.peak + SHOWN_AFTER * stride, incident.end or 0)
    return list(run.written_rows(first, last))
