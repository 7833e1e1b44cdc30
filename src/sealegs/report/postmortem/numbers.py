"""The numbers of a post-mortem, from an incident and its rows. Standard library and numpy: a guard uses it, too."""

import math
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

from sealegs.record.attempts import Attempts, attempts_of_rows
from sealegs.record.schema import unspell
from sealegs.report.postmortem.values import After, LayerActivations, Promise, Symptoms

Plain: TypeAlias = Mapping[str, Any]

EMA_STEPS = 50
BASELINE = 50
"""Rows before the onset that show the usual gradient norm and the usual seconds per step."""
LEAD = 4
"""Rows right before the onset that may already show the trouble: a gradient leaps before the loss that it spoils."""
AVERAGED = 10
AFTER = (50, 500)
CALM_FOLD, CALM_DEVIATIONS = 3.0, 4.0
"""A promise is a gradient norm below this many times its baseline, a loss below this many deviations above usual."""
TYPES = {
    "fast": "type 1 (recoverable): back within 50 steps",
    "slow": "type 1 (recoverable): back within 500 steps",
    "lingering": "type 2 (lingering): not back within 500 steps",
    "divergent": "type 3 (divergent): climbs, or is not finite",
}
NAMES = {
    "loss": "loss",
    "grad_norm": "gradient norm before clipping",
    "clipped_norm": "gradient norm after clipping",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    """An incident and the rows around it, from the attempt in which it was worst."""

    number: int
    kind: str
    start: int
    peak: int
    peak_loss: float
    grad_norm_peak: float | None
    usual: float | None
    limit: float | None
    end: int | None
    trajectory: str | None
    recovery_loss: float | None
    before: tuple[Plain, ...]
    """The rows up to the onset."""
    course: tuple[Plain, ...]
    """The rows from the onset on, until the run went back."""
    line: tuple[Plain, ...]
    """The rows that led to the final weights: the newest row of each step."""
    until: float
    """The last step before other trouble began; infinite where none did."""

    @property
    def own(self) -> tuple[Plain, ...]:
        """The rows of its course before other trouble began."""
        return tuple(row for row in self.course if row["step"] <= self.until)

    @property
    def is_left_behind(self) -> bool:
        """Whether the run went back in the incident, so that its end counts steps anew.

        One that went back later, because of another incident, has not left this one behind.
        """
        if not self.course or self._is_back_in_course:
            return False
        return not self.line or self.course[-1] not in self.line[-len(self.course) :]

    @property
    def _is_back_in_course(self) -> bool:
        """Whether the loss of this attempt was back by the end of the incident, or right after it."""
        if self.end is None or self.limit is None:
            return False
        rows = [(row["step"], float(row["loss"])) for row in self.course if "loss" in row]
        up_to = [loss for step, loss in rows if step <= self.end][-AVERAGED:]
        after = [loss for step, loss in rows if step > self.end][:AVERAGED]
        return any(len(part) == AVERAGED and sum(part) / AVERAGED <= self.limit for part in (up_to, after))

    @property
    def course_end(self) -> float:
        """The last step of the incident, as its attempt counts steps."""
        return math.inf if self.end is None or self.is_left_behind else self.end

    @property
    def last(self) -> int:
        """The last step of the rows."""
        return int(self.line[-1]["step"]) if self.line else self.start


def live(spelt: Plain) -> dict[str, Any]:
    """A line of a file, with NaN and the infinities as numbers."""
    return {name: unspell(value) for name, value in spelt.items()}


def met(incident: Plain, rows: Sequence[Plain], *, until: float = math.inf) -> Met:
    """The incident among its rows, which come in the order they were written; other trouble begins after ``until``."""
    known, told = live(incident), [live(row) for row in rows]
    start, peak, peak_loss = int(known["start"]), int(known["peak"]), float(known["peak_loss"])
    found = attempts_of_rows(told)
    line = _merged(told, found)
    here = [place for place, row in enumerate(told) if int(row["step"]) == peak and _is(row.get("loss"), peak_loss)]
    if peak < start:  # of a version that took the rows after a rollback for the incident's
        here = [place for place, row in enumerate(told) if int(row["step"]) >= start][:1]
    if here:
        count = int((found.of_rows <= found.of_rows[here[0]]).sum())
        attempt = _merged(told[:count], attempts_of_rows(told[:count]))
    else:  # the rows are gone, as after a guard's rollback
        attempt = [row for row in line if int(row["step"]) < start]
    return Met(
        number=int(known["number"]),
        kind=str(known["kind"]),
        start=start,
        peak=peak,
        peak_loss=peak_loss,
        grad_norm_peak=_number(known.get("grad_norm_peak")),
        usual=_number(known.get("usual")),
        limit=_number(known.get("limit")),
        end=known.get("end"),
        trajectory=known.get("trajectory"),
        recovery_loss=known.get("recovery_loss"),
        before=tuple(row for row in attempt if int(row["step"]) < start),
        course=tuple(row for row in attempt if int(row["step"]) >= start),
        line=tuple(line),
        until=until,
    )


def symptoms(met: Met, manifest: Plain) -> Symptoms:
    """What was observed."""
    norm, norm_step = _highest_norm(met)
    first, last = _worst(met)
    indices = finite("batch_index", (row for row in (first, last) if row is not None))
    numbered = [*map(int, indices)]
    rates = [row["lr"] for row in (*met.before[-1:], *met.course[:1]) if "lr" in row]
    return Symptoms(
        onset=met.start,
        loss_before=ema(finite("loss", met.before)),
        peak_loss=met.peak_loss,
        peak_step=met.peak,
        after=tuple(_after(met, steps) for steps in AFTER),
        grad_norm=norm,
        grad_norm_step=norm_step,
        grad_norm_before=_usual_norm(met),
        lr=rates[-1] if rates else None,
        dtype=manifest.get("dtype") or _recorded_dtype(manifest),
        batches=(numbered[0], numbered[1]) if len(numbered) == 2 else None,
        batch_steps=None if first is None or last is None else (int(first["step"]), int(last["step"])),
    )


def _recorded_dtype(manifest: Plain) -> str | None:
    """The precision that the guard has seen itself."""
    match manifest.get("recorded"):
        case {"precision": {"dtype": str(dtype)}}:
            return dtype
    return None


def ema(losses: Sequence[float]) -> float | None:
    """Exponential moving average, with weights normalised for a short past.

    >>> ema([2.0, 2.0, 2.0]), ema([])
    (2.0, None)
    """
    kept, total, weights = 1 - 2 / (EMA_STEPS + 1), 0.0, 0.0
    for loss in losses:
        total, weights = kept * total + loss, kept * weights + 1.0
    return total / weights if weights else None


def layers(met: Met) -> tuple[LayerActivations, ...]:
    """The activations of each layer: the values nearest to the peak, against the mean before the onset."""
    found = []
    names = dict.fromkeys(name for row in met.own for name in row if name.startswith("activation_norm/"))
    for name in names:
        row = min((row for row in met.own if name in row), key=lambda row: abs(int(row["step"]) - met.peak))
        before = _mean(finite(name, met.before)[-5:])
        found.append(
            LayerActivations(name=name.partition("/")[2], before=before, at=float(row[name]), step=int(row["step"]))
        )
    return tuple(found)


def promises(
    met: Met, usual: "Usual | None" = None, *, first: int | None = None, clip: float | None = None
) -> tuple[Promise, ...]:
    """What a remedy must achieve, as far as the steps before show what is usual; from the onset or from ``first`` on.

    A mean of n rows varies less than a row by a factor of sqrt(n), so it must stay that much nearer to the usual.
    """
    found = []
    norm, _ = _highest_norm(met)
    baseline = _usual_norm(met)
    first = met.start if first is None else first
    last = max(int(min(met.peak + AFTER[0], met.until)), first)
    level, deviation = met.usual, None if met.usual is None or met.limit is None else 2 * (met.limit - met.usual)
    if usual is not None:
        level, deviation = _number(unspell(usual.loss)), _number(unspell(usual.deviation))
        baseline = _number(unspell(usual.grad_norm))
    if level is not None and deviation is not None:
        row = Promise(signal="loss", first=first, last=last, below=level + CALM_DEVIATIONS * deviation, was=None)
        nearer = level + CALM_DEVIATIONS * deviation / math.sqrt(AVERAGED)
        found += [_with_what_was(each, met) for each in (row, replace(row, below=nearer, mean_of=AVERAGED))]
    if baseline is not None:
        found.append(Promise(signal="grad_norm", first=first, last=last, below=CALM_FOLD * baseline, was=norm))
        if clip is not None:
            found.append(Promise(signal="clipped_norm", first=first, last=last, below=clip, was=None, or_equal=True))
    return tuple(found)


class Usual(Protocol):
    """What was usual before the onset, as reruns found it; NaN may be a string."""

    @property
    def loss(self) -> float | str: ...  # noqa: D102
    @property
    def deviation(self) -> float | str: ...  # noqa: D102
    @property
    def grad_norm(self) -> float | str: ...  # noqa: D102


def _with_what_was(promise: Promise, met: Met) -> Promise:
    """The promise with the value that the failed attempt had in these steps."""
    signal = promise.signal
    was = promise.highest({int(row["step"]): float(row[signal]) for row in met.own if signal in row})
    return replace(promise, was=None if was is None else was[0])


def classification(met: Met) -> tuple[str, ...]:
    """The trajectory and the kind of the incident."""
    if met.trajectory is None and met.end is not None and met.is_left_behind:
        return "trajectory: not known: the run went back before it could show", f"kind: {met.kind.replace('_', ' ')}"
    course = TYPES.get(met.trajectory or "", "not known: it was still open, or there were too few steps before it")
    return f"trajectory: {met.trajectory or 'open'}, {course}", f"kind: {met.kind.replace('_', ' ')}"


def _is(loss: float | None, peak: float) -> bool:
    if loss is None:
        return False
    return math.isclose(loss, peak, rel_tol=1e-6) if math.isfinite(peak) else not math.isfinite(loss)


def _merged(rows: Sequence[Plain], found: Attempts) -> list[Plain]:
    """The rows that stand, each with the signals of all rows of its step."""
    kept = zip(found.begins.tolist(), found.standing.tolist(), strict=True)
    return [dict(ChainMap(*map(dict, reversed(rows[first : last + 1])))) for first, last in kept]


def _number(value: Any) -> float | None:
    return None if value is None or math.isnan(value) else float(value)


def finite(signal: str, rows: Iterable[Plain]) -> list[float]:
    """The values of a signal that are finite numbers."""
    values = (row.get(signal) for row in rows)
    return [float(value) for value in values if isinstance(value, float | int) and math.isfinite(value)]


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(value / len(values) for value in values) if values else None  # their sum may be too large


def _after(met: Met, steps: int) -> After:
    """The loss ``steps`` after the peak, in the rows that led to the final weights."""
    target = met.peak + steps
    place = next((place for place, row in enumerate(met.line) if row["step"] >= target and "loss" in row), None)
    if place is None:
        is_given_up = met.end is not None and met.recovery_loss is None
        return After(steps=steps, loss=None, ends_at=met.last, is_back=False if is_given_up else None)
    rows = [row for row in met.line[: place + 1] if row["step"] > met.peak and "loss" in row][-AVERAGED:]
    has_recovered = met.recovery_loss is not None and met.end is not None and met.end <= target
    if has_recovered:  # what is not finite then is other trouble
        rows = [row for row in rows if math.isfinite(row["loss"])] or rows
    loss = math.fsum(float(row["loss"]) for row in rows) / len(rows)
    is_back = math.isfinite(loss) and (has_recovered or met.limit is None or loss <= met.limit)
    return After(steps=steps, loss=loss, is_back=is_back, has_gone_back=met.is_left_behind)


def _usual_norm(met: Met) -> float | None:
    """The mean gradient norm before anything showed; that of all rows before the onset, if there are only few."""
    return _mean(finite("grad_norm", met.before[:-LEAD])[-BASELINE:] or finite("grad_norm", met.before))


def _highest_norm(met: Met) -> tuple[float | None, int | None]:
    """The highest gradient norm of the incident and its first step; a norm that is not finite is the highest."""
    course = [row for row in met.course if "grad_norm" in row and row["step"] <= met.course_end]
    if not course:
        return met.grad_norm_peak, None
    rows = [*(row for row in met.before[-LEAD:] if "grad_norm" in row), *course]
    sizes = [row["grad_norm"] if math.isfinite(row["grad_norm"]) else math.inf for row in rows]
    place = sizes.index(max(sizes))
    return sizes[place], int(rows[place]["step"])


def last_bad_batch(met: Met) -> int | None:
    """The last step whose loss is above half of the rise; later, if batches that a model has begun to learn end at
    once: the last step above a quarter of it, before one of less than half of its height."""
    _, last = _worst(met)
    before = ema(finite("loss", met.before))
    if last is None or before is None or not math.isfinite(met.peak_loss) or met.kind == "nonfinite":
        return None if last is None else int(last["step"])
    heights = {int(row["step"]): row["loss"] - before for row in met.course if "loss" in row}
    steps = [step for step in heights if step >= max(int(last["step"]), met.peak)]
    end = next((step for step in steps if not heights[step] > (met.peak_loss - before) / 4), None)
    high = [step for step in steps if end is not None and step < end]
    return high[-1] if high and end and heights[end] < heights[high[-1]] / 2 else int(last["step"])


def _worst(met: Met) -> tuple[Plain | None, Plain | None]:
    """The first and the last row that is not finite, or whose loss is above half of the rise."""
    before = ema(finite("loss", met.before))
    half = (before + met.peak_loss) / 2 if before is not None and math.isfinite(met.peak_loss) else math.nan
    rows = [row for row in met.course if "loss" in row]
    if not rows:
        return None, None
    last = rows[0]
    for row in rows:
        is_finite = math.isfinite(row["loss"]) and math.isfinite(row.get("grad_norm", 0.0))
        is_bad = not is_finite if met.kind == "nonfinite" or math.isnan(half) else row["loss"] > half
        if row["step"] > met.peak and not is_bad:
            break
        last = row
    return rows[0], last
