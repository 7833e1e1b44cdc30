"""What it cost to keep a run standing, in sentences: the tax that its guard counted, and an estimate of caution."""

import numpy as np

from sealegs.record.run import Run
from sealegs.record.stability_tax import tax_of


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
    peak = int(np.argmin(np.diff(rates, append=-np.inf) > 0))  # later rises are no warm-up: a leap, a restart
    warmup = float(((1 - rates[:peak] / max(rates[peak], 1e-30)) * lengths[:peak]).sum())
    lowered = float(((1 - _factors(run, steps)) * lengths)[peak:].sum())
    parts = [
        f"{what} cost the learning of about {lost:.0f} steps ({lost / lengths.sum():.1%})"
        for what, lost in (("the warm-up", warmup), ("rates that recovery lowered", lowered))
        if lost >= 0.5
    ]
    return f"estimated, not measured: against the schedule's own peak, {' and '.join(parts)}" if parts else ""


def _factors(run: Run, steps: "np.typing.NDArray[np.int64]") -> "np.typing.NDArray[np.float64]":
    """What recovery has left of the learning rate at each step."""
    factors = np.ones(len(steps))
    for event in run.events:
        if event.kind != "intervention" or not event.detail["acted"]:
            continue
        for action in event.detail["actions"]:
            factor = action.get("factor")
            if action.get("action") == "lower-lr" and isinstance(factor, float) and 0 < factor < 1:
                factors[steps >= event.detail.get("to_step", event.step)] *= factor
    return factors
