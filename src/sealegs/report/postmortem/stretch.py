"""Cuts the stretch around one incident out of a run, so that a diagnosis is about this incident alone.

The run is cut where it went back because of the incident: the attempt in which the incident was worst counts, not the
one that went well. The part before shows what was usual, and starts after the previous incident.
"""

import math
from collections.abc import Sequence
from typing import Any

from sealegs.diagnosis.curve.loss_curve import curve_of
from sealegs.incidents import Incident
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
    return run.cut(curve.attempt_of(incident), first, incident.start + AFTER * stride)


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
