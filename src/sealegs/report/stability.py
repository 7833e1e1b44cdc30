"""What it cost to keep a run standing, in sentences: the tax that its guard counted, and an estimate of caution."""

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from sealegs.record.run import Run
from sealegs.record.stability_tax import tax_of
from sealegs.vocabulary import Event

Floats: TypeAlias = NDArray[np.float64]
Indices: TypeAlias = NDArray[np.int64]

ROUNDING = 1e-9
"""Share of a rate by which it may differ although the schedule has not changed it."""


def told_of_tax(run: Run) -> list[str]:
    """The sentences; none where no guard has counted."""
    tax = tax_of(run.events)
    if tax is None:
        return []
    return [str(tax), *filter(None, (_caution(run),))]


def _caution(run: Run) -> str:
    """What a warm-up and a lowered rate cost, if learning goes by the rate: an estimate, and said to be one."""
    if "lr" not in run.signals:
        return ""
    rates = run.column("lr")
    known = np.isfinite(rates)
    steps, rates = run.steps[known], rates[known]
    if len(rates) < 2 or not rates.max() > 0:
        return ""
    lengths = np.diff(steps, append=2 * steps[-1] - steps[-2])
    factors = _factors(run, steps)
    own = rates / factors  # what recovery warms up again is no warm-up of the schedule
    rises = np.diff(own, append=-np.inf) > ROUNDING * np.abs(own)
    peak = int(np.argmin(rises))  # later rises are no warm-up: a leap, a restart
    reached = np.ones(len(own))
    reached[:peak] = own[:peak] / max(own[peak], 1e-30)
    warmup = float(((1 - reached) * lengths).sum())
    lowered = float((reached * (1 - factors) * lengths).sum())
    parts = [
        f"{what} cost the learning of about {lost:.0f} steps ({lost / lengths.sum():.1%})"
        for what, lost in (("the warm-up", warmup), ("rates that recovery lowered", lowered))
        if lost >= 0.5
    ]
    return f"estimated, not measured: against the schedule's own peak, {' and '.join(parts)}" if parts else ""


def _factors(run: Run, steps: Indices) -> Floats:
    """What recovery has left of the learning rate at each step."""
    factors, left = np.ones(len(steps)), 1.0
    for event in run.events:
        if event.kind != "intervention" or not event.detail["acted"]:
            continue
        first = event.detail.get("to_step", event.step)
        left, begun, over = _lowered(event, left, first)
        warmed = np.clip((steps - begun + 1) / max(over, 1), 1 / max(over, 1), 1.0)
        factors = np.where(steps >= first, left * np.where(steps >= begun, warmed, 1.0), factors)
    return factors


def _lowered(event: Event, before: float, first: int) -> tuple[float, int, int]:
    """What is left of the rate after an intervention, and from which step it is warmed up again over how many."""
    told = event.detail.get("adjustments")
    if isinstance(told, Mapping):
        left, begun, over = (told.get(name) for name in ("lr", "rewarm_from", "rewarm_steps"))
        if isinstance(left, int | float) and 0 < left <= 1 and isinstance(begun, int) and isinstance(over, int):
            return float(left), begun, over
    left, over = before, 0
    for action in event.detail["actions"]:  # an older record has the actions alone, as has what is damaged
        factor = action.get("factor")
        if action.get("action") == "lower-lr" and isinstance(factor, float) and 0 < factor < 1:
            again = action.get("rewarm_steps")
            left, over = left * factor, again if isinstance(again, int) else 0
    return left, first, over
