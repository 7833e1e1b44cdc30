"""A run whose loss has not fallen in, or whose answers are guesses: what is so, and what to look at first, out."""

import numpy as np
from numpy.typing import NDArray

from sealegs.diagnosis.columns.meaning import HELD_OUT, is_share, nature_of, words_of
from sealegs.diagnosis.curve.loss_curve import LossCurve, beside
from sealegs.diagnosis.curve.stretches import CHOICES
from sealegs.record.run import Run

COMMON = (
    "the labels (all masked), what is trained (frozen weights, an optimizer with other parameters) and the order of "
    "`optimizer.step()` and `scheduler.step()`"
)
RATE = "the learning rate (0, or a warm-up that has hardly begun), "

FEWEST_SCORES = 8
NEAR_CHANCE, NEAR_GUESS = 0.1, 0.01
"""Share by which an accuracy may differ from that of a guess, and a loss from the logarithm."""
FEWEST_MOVING, DISTINCT = 10, 0.9
"""Rows in which a loss moved, and in which it then stands; and the share of the former that differ."""
SAME, SPENT, ABOVE = 1e-6, 1e-3, 1.01
"""Share of a loss by which it is the same but for rounding, of its highest rate below which a rate is spent, and times
its lowest from which on a loss that stands has lost something."""
STILL, LAST = 0.05, 10
"""Times the usual rise from row to row that is one of a learning rate, and the part of the rows that are the last."""
ONE_BATCH = "train on one batch until it is known by heart"


def not_fallen(curve: LossCurve) -> str:
    """The sentence on a loss that is not seen to fall."""
    losses = curve.losses[curve.parts[-1]]
    first, _, last = np.array_split(losses, 3)
    medians = f"median {np.median(first):.4g} in the first third, {np.median(last):.4g} in the last"
    return f"the loss has not fallen in {len(losses)} rows: {medians}"


def stands_still(run: Run, curve: LossCurve) -> str:
    """The sentence on a loss that moved and is the same from a row to the end, to six digits, above its lowest and at a
    rate that is not spent: the model gives the same answers whatever it is shown. Of few digits nobody knows."""
    losses = curve.losses[curve.parts[-1]] if len(curve.finite) else curve.losses[:0]
    if not len(losses) or not losses[-1]:
        return ""
    moved = np.flatnonzero(np.abs(losses - losses[-1]) > SAME * abs(losses[-1]))
    first = int(moved[-1]) + 1 if len(moved) else 0
    before = losses[:first]
    if first < FEWEST_MOVING or len(losses) - first < max(len(losses) // 3, FEWEST_MOVING):
        return ""
    if losses[-1] <= ABOVE * float(before.min()):  # what has come to rest at its lowest has converged
        return ""
    is_fine = [float(f"{loss:.6g}") != loss for loss in (*before.tolist(), float(losses[-1]))]
    if not is_fine[-1] or np.mean(is_fine) < DISTINCT or len(np.unique(before)) < DISTINCT * first:
        return ""
    rates = np.nan_to_num(beside(run, curve, "lr")[curve.parts[-1]], nan=-1.0)  # where it was not logged
    if 0 <= float(np.median(rates[first:])) < SPENT * float(rates.max()):
        return ""
    step = int(curve.steps[curve.parts[-1][first]])
    return (
        f"loss exactly {losses[-1]:.6g} on each of the last {len(losses) - first} rows, since step {step}, after "
        f"{first} rows that differ: the model gives the same answers to everything"
    )


def at_chance(run: Run, curve: LossCurve) -> str:
    """The sentence on a loss and an accuracy that end where those of a guess are; empty where they do not."""
    losses = curve.losses[curve.parts[-1]]
    level = float(np.median(losses[-max(len(losses) // 3, 1) :]))
    for name in run.signals:
        words = set(words_of(name))
        if nature_of(name) != "score" or not words & {"acc", "accuracy"} or words & HELD_OUT:
            continue
        scores = _finite(run, name)
        late = scores[len(scores) // 2 :]
        if len(late) < FEWEST_SCORES or not is_share(scores):
            continue
        score = float(np.median(late))
        for many in CHOICES:
            if abs(score * many - 1) <= NEAR_CHANCE and abs(level / np.log(many) - 1) <= NEAR_GUESS:
                return f"{name} ends at {score:.3g} and the loss at {level:.4g}, as those of a guess among {many:,} do"
    return ""


def look_first(run: Run) -> str:
    """What to look at first, by what was logged of the learning rate and the gradient norm."""
    rates, norms = _finite(run, "lr"), _finite(run, "grad_norm")
    if len(rates) and not rates.any():
        return (
            f"Look first at the schedule: the learning rate is 0 on all {len(rates)} rows that have it. Is it stepped "
            "once an epoch, past its end, or before the optimizer?"
        )
    if len(norms) and not norms.any():
        return (
            f"Look first at what the loss is made of: the gradient norm is 0 on all {len(norms)} rows that have it. "
            "Are the labels all masked, the weights frozen, or is the loss detached?"
        )
    if is_warming_up(run):
        return (
            f"Look again when the warm-up is over: the learning rate has only risen so far, to {rates[-1]:.3g}. If the "
            f"loss is level then, look at {COMMON}, and {ONE_BATCH}."
        )
    known = f" (it is {np.median(rates):.3g})" if len(rates) else ""
    rate = f"the learning rate{known}, " if known else RATE
    return f"Look first at {rate}{COMMON}; then {ONE_BATCH}: where that works, the rest is a matter of time or data."


def is_warming_up(run: Run) -> bool:
    """Whether the learning rate has only risen, and still does in the last rows: one that then stands has no warm-up to
    wait for. Where it was written in few digits it rises in steps, and stands between them, too."""
    rates = _finite(run, "lr")
    if len(rates) < 2 or (np.diff(rates) < 0).any() or rates[-1] <= rates[0]:
        return False
    rises = np.flatnonzero(np.diff(rates) > STILL * (rates[-1] - rates[0]) / len(rates)) + 1
    between = int(np.diff(rises).max()) if len(rises) > 1 else 0
    return len(rates) - int(rises[-1]) <= max(between, len(rates) // LAST)


def _finite(run: Run, signal: str) -> NDArray[np.float64]:
    values = run.written(signal).values if signal in run.signals and run.has_numbers(signal) else np.empty(0)
    found: NDArray[np.float64] = values[np.isfinite(values)]
    return found
