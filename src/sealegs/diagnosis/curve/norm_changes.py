"""Weight norms in, the groups out whose norm changed more than twofold in 200 steps: the rule of the live guard."""

from typing import NamedTuple

import numpy as np

from sealegs.detectors.proportion import SAMPLES, SMALLEST_SHARE, Proportion
from sealegs.diagnosis.curve.loss_curve import Floats
from sealegs.record.run import Run

LIMITS = Proportion()


class NormChange(NamedTuple):
    """The first change of a group's norm that is too fast."""

    signal: str
    step: int
    value: float
    before: float

    def __str__(self) -> str:
        """``param_norm/head has grown from 20 to 41 within 200 steps, by step 1180``"""
        word = "grown" if self.value > self.before else "shrunk"
        span = f"within {LIMITS.window} steps, by step {self.step}"
        return f"{self.signal} has {word} from {self.before:.4g} to {self.value:.4g} {span}"


def norm_changes(run: Run) -> tuple[NormChange, ...]:
    """The first too fast change of each group, in the rows that stand."""
    names = tuple(name for name in run.signals if name.partition("/")[0] == "param_norm" and run.has_numbers(name))
    found = (_change(run, name, _whole(run, names)) for name in names)
    return tuple(change for change in found if change is not None)


def _whole(run: Run, names: tuple[str, ...]) -> Floats:
    """The norm of all weights at each step."""
    if "param_norm" in names:
        return np.asarray(run.column("param_norm", copy=False))
    return np.asarray(np.sqrt(sum(np.nan_to_num(run.column(name)) ** 2 for name in names)))


def _change(run: Run, name: str, whole: Floats) -> NormChange | None:
    column = run.column(name, copy=False)
    rows = np.flatnonzero(run.logged(name, copy=False))
    rows = rows[np.isfinite(column[rows]) & (column[rows] > 0)]
    if not len(rows) or run.steps[rows[-1]] - run.steps[rows[0]] < LIMITS.young:
        return None
    begun = run.steps[rows[0]] + LIMITS.young
    rows = rows[np.unique(run.steps[rows] // (LIMITS.window // SAMPLES), return_index=True)[1]]
    steps, norms = run.steps[rows], column[rows]
    first: NormChange | None = None
    for back in range(1, min(SAMPLES, len(rows) - 1) + 1):
        now, before = norms[back:], norms[:-back]
        larger = np.maximum(now, before)
        is_change = larger > LIMITS.norm_factor * np.minimum(now, before)
        is_change &= (steps[back:] - steps[:-back] <= LIMITS.window) & (steps[back:] >= begun)
        is_change &= ~(larger < SMALLEST_SHARE * whole[rows[back:]])  # NaN is not judged small
        if is_change.any() and (first is None or steps[back:][is_change][0] < first.step):
            at = int(np.argmax(is_change))
            first = NormChange(name, int(steps[back + at]), float(now[at]), float(before[at]))
    return first
