"""Finds problems with the metrics of a run, whatever the run itself did."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from sealegs.diagnosis.contract import Problem
from sealegs.diagnosis.curve.loss_curve import Floats, LossCurve, numbers
from sealegs.diagnosis.curve.rises import heights_of, running_median, stretches
from sealegs.diagnosis.curve.stretches import hidden
from sealegs.record.manifest import dotted
from sealegs.record.run import Run

FEWEST = 8
"""The fewest values from which a metric is judged."""
MEASURED = ("loss", "eval_loss", "grad_norm", "param_norm", "moment1_norm", "moment2_norm", "token_entropy")
"""Our signals that cannot stand still; a part after a slash names a group or layer."""
POSITIVE = ("grad_norm", "lr", "loss_scale", "param_norm", "moment1_norm", "moment2_norm", "tokens_per_s")
"""Signals that cannot be negative."""
FEW = 5
"""Values per distinct value, on average, from which a loss is quantised."""
ALIKE = 0.25
"""Share of neighbours that are the same from which on rounding hides what happens from row to row."""
ENOUGH = 60
"""The fewest values that show whether a loss is quantised or smoothed."""
LATEST = 4_096
"""The most values that are looked at for that: the last ones."""
NOISE, WITHOUT_NOISE = -0.2, 0.3
"""A loss is a running average if the correlation of neighbouring changes lies between these."""
TREND = 33
"""Rows of the running median that is the trend."""
COARSE = 50
"""Steps per row from which an anomaly that is over within 50 steps leaves no trace."""
MISSING = 10
"""Rows missing in one place from which on it is reported."""
AT_THE_TOP = 0.2
"""Share of the gradient norms at their maximum that only clipping explains."""
SCHEDULES = ("lr_scheduler_type", "lr_scheduler", "scheduler", "schedule", "lr_schedule", "lr_decay_style")
WITHOUT = ("", "none", "constant", "flat", "fixed")


FALLEN = 3.0
"""Times all that a loss goes to and fro by, which it must have come down to say something."""
CROSSED = 0.6
"""More negative losses, as a share, in the last third than in the first, by which a loss has gone through zero."""
HOVERING = 0.05
"""Smallest share of negative losses, of positive ones, and of changes of sign, from which on a loss measures
nothing."""


def problems_of(run: Run, curve: LossCurve) -> tuple[Problem, ...]:
    """All problems, those of the loss first."""
    return (
        *_hidden(run, curve),
        *_of_loss(curve),
        *_missing(curve),
        *(problem for signal in run.signals for problem in _of_signal(run, signal)),
        *_schedule(run),
    )


def hovers(losses: Floats) -> bool:
    """Whether losses go to and fro around zero, as those of policy gradients do: such a loss measures nothing.

    A bound on a likelihood may end there, too, but comes down from far above; a likelihood goes through zero once, and
    stays below.

    >>> hovers(np.array([1e-9, -2e-9, 3e-9, 1e-9, -1e-9] * 20)), hovers(np.linspace(3.0, -2.0, 100))
    (True, False)
    >>> hovers(np.append(np.linspace(50.0, 1.0, 30), [1.0, -2.0, 3.0, 1.0, -1.0] * 20))
    False
    >>> hovers(np.linspace(1.0, -2.0, 100) + np.tile([0.5, -0.5], 50))
    False
    """
    negative = losses < 0
    third = len(losses) // 3
    return (
        len(losses) >= ENOUGH
        and not _comes_down(losses)
        and not negative[-third:].mean() - negative[:third].mean() > CROSSED
        and bool(HOVERING < negative.mean() < 1 - HOVERING)
        and bool(np.mean(negative[1:] != negative[:-1]) > HOVERING)
    )


def _comes_down(losses: Floats) -> bool:
    """Whether a loss began far above where all of its second half goes to and fro."""
    late = losses[len(losses) // 2 :]
    first = float(np.median(losses[:FEWEST]))
    return first - float(late.max()) > FALLEN * float(late.max() - late.min())


def _of_loss(curve: LossCurve) -> Iterator[Problem]:
    losses = curve.losses[curve.finite][-LATEST:]
    if hovers(losses):
        yield Problem(
            signal="loss",
            kind="hovers",
            text="the loss goes to and fro about zero, as that of a policy gradient does, and measures nothing",
            hides="everything: whether such a run is well is said by reward, entropy and KL",
        )
        return
    if len(losses) >= ENOUGH and losses.min() < losses.max():
        yield from _quantised(losses)
        yield from _smoothed(losses)
    if curve.interval >= COARSE and len(curve.finite) >= 2:
        yield Problem(
            signal="loss",
            kind="coarse",
            text=f"loss is logged every {curve.interval} steps",
            hides=f"spikes that are back within {curve.interval} steps, and what came first in those that are seen",
        )


def _quantised(losses: Floats) -> Iterator[Problem]:
    recent = losses[len(losses) // 2 :]
    distinct = np.unique(recent)
    if len(distinct) * FEW > len(recent) or len(distinct) < 2:
        return
    step = float(np.diff(distinct).min())
    as_bf16 = bool(np.all(np.frexp(distinct)[0] * 256 % 1 == 0))
    if not as_bf16 and np.mean(recent[1:] == recent[:-1]) < ALIKE:  # decimals finer than the noise hide nothing
        return
    why = "a loss kept in bf16 has eight bits" if as_bf16 else "it was rounded"
    yield Problem(
        signal="loss",
        kind="quantised",
        text=f"{len(distinct)} distinct values in {len(recent)} losses, {step:.2g} apart: {why}",
        hides=f"changes of less than {step:.2g}: plateaus and slow drifts may be rounding",
    )


def _smoothed(losses: Floats) -> Iterator[Problem]:
    """Report a loss that is a running average: noise makes a lower loss follow a high one, and averaging hides that.

    The correlation of neighbouring changes is -0.5 for noise, -0.25 for noise whose neighbours are half alike, about 0
    for a running average of any kind, and near 1 for a curve without noise, about which nothing is reported.
    """
    heights = heights_of(losses)[len(losses) // 4 :]  # the first descent is not noise
    changes = np.diff(heights - running_median(heights, TREND))[TREND // 2 : -(TREND // 2)]
    if len(changes) < ENOUGH:
        return
    reach = 3 * float(np.median(np.abs(changes)))
    changes = np.clip(changes, -reach, reach)  # spikes and shifts are not noise
    size = float(np.mean(changes**2))
    if size < 1e-12:
        return
    alike = float(np.mean(changes[1:] * changes[:-1])) / size
    if NOISE + 2 / np.sqrt(len(changes)) < alike < WITHOUT_NOISE:
        yield Problem(
            signal="loss",
            kind="smoothed",
            text=f"neighbouring changes of the loss have a correlation of {alike:.2f}, where single batches have -0.5: "
            "a running average, or as good as one",
            hides="the height of spikes, and when they began: an average spreads them",
        )


def _hidden(run: Run, curve: LossCurve) -> Iterator[Problem]:
    for first, last in stretches(hidden(run, curve)):
        yield Problem(
            signal="loss",
            kind="hidden-nan",
            text=f"loss is exactly 0 from step {curve.steps[first]} to {curve.steps[last]}, from far above: NaN as "
            "some loggers write it",
            hides="the loss from there on",
        )


def _missing(curve: LossCurve) -> Iterator[Problem]:
    forward = np.diff(curve.steps)
    usual = int(np.quantile(forward[forward > 0], 0.9)) if (forward > 0).any() else 1
    wide = np.flatnonzero(forward > (MISSING + 1) * usual)
    if len(curve.steps) >= ENOUGH and 0 < len(wide) <= 0.05 * len(forward):
        first = int(wide[0])
        more = f", and in {len(wide) - 1} more places" if len(wide) > 1 else ""
        yield Problem(
            signal="loss",
            kind="missing",
            text=f"no loss from step {curve.steps[first]} to {curve.steps[first + 1]}, where a row comes every "
            f"{usual} steps{more}",
            hides="what happened there: some loggers leave out what is not finite",
        )


def is_frozen(signal: str, logged: Iterable[str]) -> bool:
    """Whether a norm is that of weights of which no gradient is logged, while gradients of others are.

    >>> is_frozen("param_norm/base", ["param_norm/base", "grad_norm/adapter"]), is_frozen("param_norm/base", [])
    (True, False)
    """
    kind, _, part = signal.partition("/")
    parts = {name.partition("/")[2] for name in logged if name.startswith("grad_norm/")}
    return kind == "param_norm" and bool(part and parts) and part not in parts


def _of_signal(run: Run, signal: str) -> Iterator[Problem]:
    family = signal.partition("/")[0]
    if family not in MEASURED and family not in POSITIVE:
        return
    values = numbers(run.series(signal)[1])
    values = values[np.isfinite(values)]
    if len(values) < FEWEST:
        return
    low, high = float(values.min()), float(values.max())
    if low == high and family in MEASURED and not is_frozen(signal, run.signals):
        is_norm = family == "grad_norm" and low > 0
        why = (
            "it was logged after clipping, or the metric is broken"
            if is_norm
            else "the metric is broken, or nothing is trained"
        )
        yield Problem(
            signal=signal,
            kind="constant",
            text=f"{signal} is {low:.4g} on all of its {len(values)} rows: {why}",
            hides=f"everything that {signal} could tell",
        )
    elif family == "grad_norm" and high > 0:
        share = float(np.mean(values >= high * (1 - 1e-4)))
        if share >= AT_THE_TOP:
            yield Problem(
                signal=signal,
                kind="clipped",
                text=f"{share:.0%} of {signal} are {high:.4g}, and none is above: it was logged after clipping",
                hides="how high the gradients were: log the norm that clip_grad_norm_ returns",
            )
    if low < 0 and family in POSITIVE:
        yield Problem(
            signal=signal,
            kind="impossible",
            text=f"{signal} is negative on {int(np.sum(values < 0))} rows ({low:.4g}): it cannot be",
            hides=f"what {signal} was",
        )


def _schedule(run: Run) -> Iterator[Problem]:
    if "lr" not in run.signals:
        return
    rates = numbers(run.series("lr")[1])
    rates = rates[np.isfinite(rates)]
    claimed = claimed_schedule(run.manifest.settings)
    if claimed and len(rates) >= FEWEST and rates.min() == rates.max():
        yield Problem(
            signal="lr",
            kind="flat",
            text=f"lr is {rates[0]:.4g} on all of its {len(rates)} rows, and the settings say {claimed}",
            hides="which rate was in force: the schedule is not stepped, or another rate is logged",
        )


def claimed_schedule(settings: Mapping[str, Any]) -> str:
    """What settings say about a schedule, at any depth; empty if they name none, or a constant one.

    >>> claimed_schedule({"training": {"lr_scheduler_type": "cosine"}})
    'lr_scheduler_type = cosine'
    """
    told = ((name.rpartition(".")[2], value) for name, value in dotted(settings))
    claims = (f"{key} = {value}" for key, value in told if key in SCHEDULES and str(value).lower() not in WITHOUT)
    return next(claims, "")
