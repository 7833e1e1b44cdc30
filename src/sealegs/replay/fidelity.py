"""Explains a rerun that differs from the record: names what happened to the run and was not recorded."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from sealegs.replay.arms import LOST
from sealegs.replay.experiment import Experiment
from sealegs.replay.rerun import Rerun
from sealegs.replay.subject import StepOutcome, Subject
from sealegs.vocabulary import Row

ALIKE = 0.01
"""Share of a departure that may be left where it is explained; also the relative difference that a first step may
have."""
PASSED = 0.05
"""Share of a difference that may be left one step later, if only that step was affected, or by what was fitted to that
step."""
MOST_PARTS, WHOLE = 64, 1e-4
"""Micro-batches or ranks that may have been summed, and the share by which their sum may miss a whole number."""
ROUNDING, LEAP = 1e-6, 10.0
"""Relative difference that rounding explains, and the factor by which a difference must exceed all before it."""
RATES = (0.0, 0.1, 0.5, 2.0, 5.0, 10.0, 30.0, 100.0, 1000.0)
"""Factors on the learning rate that are tried."""
REFINED = 10
"""How often an interval between two of them is halved."""


@dataclass(frozen=True, slots=True)
class Departure:
    """The first step at which the record differs from a rerun."""

    step: int
    signal: Literal["loss", "grad_norm"]
    was: float
    now: float
    agreed: int
    """Steps before it that agree."""

    def __str__(self) -> str:
        return (
            f"step {self.step} has a {self.signal.replace('_', ' ')} of {self.now:.4g}, not {self.was:.4g} as in the "
            f"record, after {self.agreed} step{'s that agree' if self.agreed != 1 else ' that agrees'}"
        )


def departure(experiment: Rerun, apart: float, onset: int = 0) -> Departure | None:
    """Compare the record with reruns. ``apart`` is the difference between two equal reruns.

    What was wrong at a step before the ``onset`` whose update was left out went nowhere: it is another incident.

    On the same machine record and rerun agree bit for bit; on another they part slowly from the first step on. So a
    step departs if it is much further from the record than any step before.
    """
    further = {"loss": max(apart, ROUNDING), "grad_norm": max(apart, ROUNDING)}
    for agreed, step in enumerate(sorted(experiment.seen)):
        seen, row = experiment.seen[step], experiment.rows[step]
        if step < onset and not row["applied"]:
            continue
        for signal, now in (("loss", seen.loss), ("grad_norm", seen.grad_norm)):
            was = float(row.get(signal, now))
            scale = max(abs(now), abs(was)) if math.isfinite(now) and math.isfinite(was) else 1.0
            if not _same(was, now, (LEAP * further[signal] if agreed else ALIKE) * scale):
                return Departure(step, signal, was, now, agreed)  # type: ignore[arg-type]
            if math.isfinite(was) and math.isfinite(now) and scale:
                further[signal] = max(further[signal], abs(was - now) / scale)
    return None


def ranks_apart(rows: Iterable[Row], onset: int) -> str | None:
    """A sentence about the first rank whose weights differ, from the onset on; None where none does.

    Ranks that differed before the onset are nothing new. Steps with a NaN loss are left out: NaN has many bit patterns.
    """
    apart = [row for row in rows if float(row.get("ranks_differ", 0.0)) > 0 and math.isfinite(float(row["loss"]))]
    if not apart or int(apart[0]["step"]) < onset:
        return None
    rank, step = int(apart[0].get("differing_rank", 0)), int(apart[0]["step"])
    return (
        f"the ranks compared their weights at step {step}, and rank {rank} holds others than "
        f"{'the rest' if rank == 0 else 'rank 0'}: no weights give what was recorded"
    )


def explained(experiment: Experiment, left: Departure) -> tuple[str | None, str]:
    """The cause of a departure, and why: what must have happened that was not recorded."""
    if left.agreed == 0:
        return None, f"{left}: this is not the program that was run, so nothing can be tested"
    if left.signal == "grad_norm" and (parts := _summed(experiment, left)):
        return (
            "accumulation-denominator",
            f"{left}: {parts} times as large, and about as many times at the next step, and the loss is the same",
        )
    if left.signal == "grad_norm":
        return (
            "corrupt-gradient",
            f"{left}; its loss is the same, so it is the backward pass or the exchange of gradients",
        )
    if _is_over_at_once(experiment, left):
        return "kernel-fault", f"{left}; the step after it is as the rerun has it, so that the weights were sound"
    step = left.step - 1
    experiment.hold(step)
    for lost, lose in LOST.items():
        if _misfit(_after(experiment, step, before=lose), experiment, left.step) < ALIKE:
            return "optimizer-reset", f"{left}; an optimizer without {lost} at step {step} gives what was recorded"
    if (factor := _fitting_rate(experiment, left)) is not None:
        text = f"a learning rate {factor:.3g} times the one in the log at step {step} gives what was recorded"
        return "unlogged-step-size", f"{left}; {text}"
    unexplained = f"{left}; neither data nor schedule nor another learning rate nor lost moments explain it"
    if abs(left.was - left.now) < experiment.usual.deviation:  # never true if either is not finite
        return None, (
            f"{unexplained}: the update of step {step} was another one, by less than the noise of the loss, so that it "
            "was hardly a memory fault or a bad write; ask what changes gradients after their norm is taken"
        )
    return "corrupt-weight", (
        f"{unexplained}: something that is not in the record changed the weights or what is computed from them: "
        "a memory fault, a bad write, code beside the loop"
    )


def _summed(experiment: Experiment, left: Departure) -> int:
    """How many parts a gradient is the sum of that is recorded as a whole number of times the right one; 0 if it is
    not. One step may be wrong by such a number by chance, or on purpose; parts are summed at the next step, too."""
    after = left.step + 1
    if not (0 < left.now < left.was < math.inf) or after not in experiment.seen:
        return 0
    parts = round(left.was / left.now)
    next_norm, usual = float(experiment.rows[after].get("grad_norm", math.nan)), experiment.seen[after].grad_norm
    is_whole = 2 <= parts <= MOST_PARTS and abs(left.was / left.now - parts) < WHOLE * parts
    return parts if is_whole and usual > 0 and 0.5 < next_norm / usual / parts < 2 else 0


def _is_over_at_once(experiment: Experiment, left: Departure) -> bool:
    """Whether the loss of the next step is far less wrong. Other or lost weights would stay wrong."""
    after = left.step + 1
    if after not in experiment.seen:
        return False
    apart = abs(float(experiment.rows[after]["loss"]) - experiment.seen[after].loss)
    return apart < PASSED * abs(left.was - left.now)  # never true if either is not finite


def _fitting_rate(experiment: Experiment, left: Departure) -> float | None:
    """The factor on the learning rate that gives what was recorded, also at the step after, to which it is not fitted.

    The search takes a grid, and bisects wherever the recorded loss lies between two neighbours. A larger step may lower
    the loss before it raises it, so there may be several such places.
    """
    shows: dict[float, StepOutcome] = {}

    def is_above(factor: float) -> bool:
        if factor not in shows:
            shows[factor] = _after(experiment, left.step - 1, factor=factor)
        return not shows[factor].loss <= left.was

    def fits(factor: float) -> bool:
        return _misfit(shows[factor], experiment, left.step) < ALIKE

    for low, high in [pair for pair in pairwise(RATES) if is_above(pair[0]) != is_above(pair[1])]:
        for _ in range(REFINED):
            middle = math.sqrt(low * high) or high / 2
            low, high = (low, middle) if is_above(low) != is_above(middle) else (middle, high)
            if fits(middle):
                break
    found = sorted(filter(fits, shows), key=lambda factor: _misfit(shows[factor], experiment, left.step))
    return next((factor for factor in found if _foretells(experiment, left, factor)), None)


def _foretells(experiment: Experiment, left: Departure, factor: float) -> bool:
    """Whether a rate, of one step or of all from there on, gives the next step, too; or nobody knows that one.

    A step that is far too large does to a model much what other damage does: of thirty incidents that were made on
    purpose, two had a rate that gave the one step and had nothing to do with what was done.
    """
    after = left.step + 1
    if after not in experiment.seen or not math.isfinite(float(experiment.rows[after]["loss"])):
        return True
    for later in (1.0, factor):
        experiment.go_to(left.step - 1)
        for step, times in ((left.step - 1, factor), (left.step, later)):
            rate, applied = float(experiment.rows[step]["lr"]) * times, bool(experiment.rows[step]["applied"])
            experiment.loop.step(experiment.batches_of(step), lr=rate, applied=applied)
        experiment.steps_run += 3
        if _misfit(experiment.loop.look(experiment.batches_of(after)), experiment, after) < PASSED:
            return True
    return False


def _after(
    experiment: Experiment, step: int, *, factor: float = 1.0, before: Callable[[Subject], None] = lambda subject: None
) -> StepOutcome:
    """What the next step shows if this one is run differently."""
    experiment.go_to(step)
    before(experiment.loop.subject)
    experiment.loop.step(experiment.batches_of(step), lr=float(experiment.rows[step]["lr"]) * factor)
    experiment.steps_run += 2
    return experiment.loop.look(experiment.batches_of(step + 1))


def _misfit(shows: StepOutcome, experiment: Experiment, step: int) -> float:
    """How much of the departure is left at a step in a rerun: of that of the loss, or of that of the gradient norm.

    Some factor on the learning rate always matches the loss, but hardly ever both.
    """
    row, unchanged = experiment.rows[step], experiment.seen[step]
    loss, norm = float(row["loss"]), float(row.get("grad_norm", shows.grad_norm))
    if not all(map(math.isfinite, (loss, shows.loss, shows.grad_norm, norm))):
        return math.inf  # any broken number gives NaN: that proves nothing
    of_loss = abs(shows.loss - loss) / max(abs(unchanged.loss - loss), LEAP * ROUNDING * abs(loss), 1e-12)
    of_norm = abs(shows.grad_norm - norm) / max(abs(unchanged.grad_norm - norm), LEAP * ROUNDING * norm, 1e-12)
    return max(of_loss, of_norm)


def _same(a: float, b: float, allowed: float) -> bool:
    """Whether two values agree. NaN and infinity count as equal: the order of additions decides which one comes."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return not math.isfinite(a) and not math.isfinite(b)
    return abs(a - b) <= allowed
