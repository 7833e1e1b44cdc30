"""Finds the stretches of a curve in which something is wrong, with one function per kind."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sealegs.detectors.nonfinite import NonFinite
from sealegs.detectors.overflow import Overflow
from sealegs.diagnosis.curve.loss_curve import Floats, LossCurve, beside
from sealegs.diagnosis.curve.rises import SMALLEST, CurveRise, heights_of, median, rises_of, stretches
from sealegs.record.run import Run
from sealegs.vocabulary import Severity

NEAR = 10
"""Rows between two that are not finite, up to which they are one stretch."""
SCALER_SEARCH = 20
"""Rows at the start of a run in which gradients may overflow, because a scaler searches for its scale."""
AFTER_RESUME = 3
"""Rows after a resume in which a rise belongs to the resume."""
RESUMED = 2.0
"""Noise of a row by which the loss of the first rows after a resume must exceed what stood before, to have leapt."""
ROUNDED = 2.5
"""Times the last digit that a rise must be: losses of 0.0001 and 0.0003 may be 0.00015 and 0.00025."""
HIDDEN = 3
"""Losses of exactly 0 in a row, after others far above, that were NaN."""
SETTLED = 0.5
"""Share of its height that a rise must keep to be a new level, and not a spike."""
AROUND = 3
"""Rows around a change of the loss scale, or an overflow, that are looked at."""
COOL_DOWN = 100
"""Rows within which overflows are one incident, as in the live guard."""
PLATEAU_LEAST = 64
"""Fewest rows of a plateau."""
CONTINUED = 100
"""Rows that lie before a log that is the continuation of another one."""
PLATEAU_MOVE = 2e-3
"""Largest change of the loss on a plateau, as a share, from its first to its last third."""
SEEN = 2.0
"""Standard errors of a median by which a loss must have fallen to be seen to fall."""

CHOICES = (2, 10, 100, 256, 1000, 32_000, 32_768, 50_257, 50_304, 65_536, 128_256, 151_936)
"""Sizes of the sets among which models usually choose: two answers, digits, classes, bytes, vocabularies."""
AT_THE_GUESS, STILL = 2e-3, 5e-3
"""Share by which a loss may differ from the logarithm of such a number, and by which it may go to and fro: whoever
gives all the same chance has the same loss on every batch."""


class Stretch(NamedTuple):
    """Rows in which something is wrong."""

    first: int
    last: int
    kind: str
    is_open: bool = False
    """Whether it is not over at the end of the log."""
    leap: float = 0.0
    """How far it leaps above the trend, where it does: a logarithm, mostly."""
    is_held: bool = False
    """Whether it is of the last rows, and their updates were skipped: what came of it is in no row, and it spoilt
    nothing."""


def nonfinite(run: Run, curve: LossCurve) -> list[Stretch]:
    """Losses that are not finite, and gradients that often are not although no scaler explains it."""
    rows = len(curve.losses)
    bad, broken = _not_finite(run, curve)
    found = [Stretch(a, b, "nonfinite", b == rows - 1) for a, b in closed_up(bad, NEAR)]
    if broken.any():
        rule = NonFinite()
        often = broken.sum() > rule.share * np.isfinite(beside(run, curve, "grad_norm")).sum()
        found += [
            Stretch(a, b, "nonfinite", b == rows - 1)
            for a, b in closed_up(broken, NEAR)
            if often or b - a + 1 >= rule.in_a_row
        ]
    return found


def not_finite_rows(run: Run, curve: LossCurve) -> NDArray[np.bool_]:
    """The rows of which such stretches are made: in between, up to ``NEAR`` rows may be sound."""
    bad, broken = _not_finite(run, curve)
    return bad | broken


def _not_finite(run: Run, curve: LossCurve) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Rows whose loss is not finite, with the gradients right before; and those whose gradient alone is not."""
    rows = len(curve.losses)
    bad = ~np.isfinite(curve.losses) | hidden(run, curve)
    bad[: _unmeasured(curve)] = False
    norms = beside(run, curve, "grad_norm")
    broken = np.isinf(norms) & ~bad
    goes_on = broken[SCALER_SEARCH - 1 : SCALER_SEARCH + 1].all() and rows > SCALER_SEARCH
    begun = SCALER_SEARCH - int(np.argmin(np.append(broken[:SCALER_SEARCH][::-1], False))) if goes_on else SCALER_SEARCH
    broken[:begun] &= curve.losses[:begun] == 0  # no scaler is looking for its scale there, nor where it finds none
    if has_scaler(run, curve):
        broken[:] = False
    for first, last in stretches(broken):  # right before a loss that is not finite, they are its beginning
        if last + 1 < rows and bad[last + 1]:
            bad[first : last + 1], broken[first : last + 1] = True, False
    return bad, broken


def _unmeasured(curve: LossCurve) -> int:
    """Rows at the beginning without a finite loss, where finite ones follow in the same attempt: the means of nothing
    that loggers write before the first update. Weights that are not finite would not have come back."""
    first = int(curve.finite[0]) if len(curve.finite) else 0
    return first if first and curve.segments[first] == curve.segments[0] else 0


def hidden(run: Run, curve: LossCurve) -> NDArray[np.bool_]:
    """Losses that were NaN and were written as 0, by loggers that sum finite values: from far above to exactly 0.

    They stay there, without a gradient, or come with a gradient norm that is not finite.
    """
    losses = curve.losses
    mask = np.zeros(len(losses), dtype=bool)
    if not (losses == 0.0).any():
        return mask
    all_norms = beside(run, curve, "grad_norm")
    for first, last in stretches(losses == 0.0):
        before = losses[max(first - NEAR, 0) : first]
        before = before[np.isfinite(before)]
        if last - first + 1 < HIDDEN or not len(before):
            continue
        norms = all_norms[first : last + 1]
        is_for_good = last == len(losses) - 1 and not (norms > 0).any()
        if before.min() > 0.01 * np.abs(losses[curve.finite[:3]]).max() and (is_for_good or np.isinf(norms).any()):
            mask[first : last + 1] = True
    return mask


def risen(run: Run, curve: LossCurve) -> list[Stretch]:
    """Spikes, new levels, drifts and jumps at a resume."""
    found = []
    masked = hidden(run, curve)
    quantum = _quantum(curve)
    for part in curve.parts:
        rows = part[~masked[part]]
        if not len(rows):
            continue
        losses = curve.losses[rows]
        heights = heights_of(losses)
        for rise in rises_of(losses, heights):
            is_open = rise.last == len(rows) - 1 and rows[-1] == curve.finite[-1]
            first, last = int(rows[rise.first]), int(rows[rise.last])
            is_lasting = is_open or rise.last - rise.first > len(rows) / 10
            near = losses[max(rise.first - NEAR, 0) : rise.last + 1]
            is_rounding = near[-1 - rise.last + rise.first :].max() - near.min() < ROUNDED * quantum
            if is_as_before(curve, first) or is_rounding:
                continue
            kind = "resume_jump" if _is_resume(curve, first) else _kind(heights, rise, is_lasting=is_lasting)
            found.append(Stretch(first, last, kind, is_open, rise.leap))
    return found


def _quantum(curve: LossCurve) -> float:
    """The least by which two losses differ: that of their last digit, where they were rounded."""
    losses = np.unique(curve.losses[curve.finite])
    return float(np.diff(losses).min()) if len(losses) > 1 else 0.0


def _kind(heights: Floats, rise: CurveRise, *, is_lasting: bool) -> str:
    inside = heights[rise.first : rise.last + 1] - rise.level
    third = max(len(inside) // 3, 1)
    if rise.is_slow and np.median(inside[:third]) < SETTLED * np.median(inside[-third:]):
        return "drift"
    is_level = len(inside) >= 2 * NEAR and np.median(inside[third:]) > SETTLED * np.quantile(inside, 0.9)
    return "level_shift" if is_lasting and (rise.is_slow or is_level) else "spike"


def _is_resume(curve: LossCurve, row: int) -> bool:
    return any(resume <= row < resume + AFTER_RESUME for resume in curve.resumes)


def is_as_before(curve: LossCurve, row: int) -> bool:
    """Whether a row is right after a resume, and the loss is as it was at these steps: far back it was higher."""
    if not _is_resume(curve, row):
        return False
    before = curve.finite_before(row, 2 * NEAR)
    after = curve.losses[row : row + NEAR]
    if len(before) < NEAR or not np.isfinite(after).any():
        return False
    noise = float(np.std(np.diff(before))) / np.sqrt(2)
    return bool(np.nanmedian(after) <= np.median(before) + RESUMED * noise)


def has_scaler(run: Run, curve: LossCurve) -> bool:
    """Whether the loss is scaled. A scale of 1 is none, as loggers write it in bf16."""
    scales = beside(run, curve, "loss_scale")
    return not bool((np.isnan(scales) | (scales == 1)).all())


def overflowed(run: Run, curve: LossCurve) -> list[Stretch]:
    """What the overflow detector finds in the history of the loss scale; rows without any change are left out.

    A scale that has collapsed and is below 1 up to the end is not over.
    """
    if not has_scaler(run, curve):
        return []
    scales = beside(run, curve, "loss_scale")
    norms = beside(run, curve, "grad_norm")
    changes = np.append(False, scales[1:] != scales[:-1])
    matters = changes | np.isinf(norms) | ~np.isfinite(curve.losses)
    near = np.ones(2 * AROUND + 1)
    matters = np.convolve(matters, near)[AROUND : AROUND + len(matters)] > 0
    rows = np.flatnonzero(matters & ~np.isnan(scales))
    detector = Overflow(growth_interval=int(curve.steps[-1]) + 1)  # a constant scale is no incident
    state, bad = detector.init(), np.zeros(len(scales), dtype=bool)
    matter: list[int] = rows.tolist()
    for place, row in enumerate(matter):
        now = {"step": int(curve.steps[row]), "loss": float(curve.losses[row]), "loss_scale": float(scales[row])}
        now |= {} if np.isnan(norms[row]) else {"grad_norm": float(norms[row])}
        finding = detector.look(state, now)
        state = detector.learn(state, now)
        if finding is not None and finding.severity >= Severity.ALARM:
            bad[[row, matter[max(place - state.owed_rows, 0)]]] = True  # an overflow after which nothing was lowered
    if len(sound := np.flatnonzero(scales >= 1)):  # the detector tells of a collapse once, and of no rest in it
        bad[sound[-1] + 1 :] = np.logical_or.accumulate(bad[sound[-1] + 1 :])
    return [Stretch(a, b, "overflow", len(scales) - b <= NEAR) for a, b in closed_up(bad, COOL_DOWN)]


def flat(run: Run, curve: LossCurve) -> list[Stretch]:
    """A loss that has not come down since its last start: its last third is level with its first, within three standard
    errors."""
    rows = curve.parts[-1] if len(curve.finite) else curve.finite
    losses = curve.losses[rows]
    is_continued = len(curve.steps) > 0 and curve.steps[0] > CONTINUED * curve.interval  # it fell before
    if len(losses) < PLATEAU_LEAST or is_continued or hidden(run, curve).any():
        return []
    first, _, last = np.array_split(losses, 3)
    level = float(median(losses))
    noise = 1.4826 * float(median(np.abs(losses - level)))
    fallen = float(median(first) - median(last))
    doubt = 3 * 1.25 * noise * np.sqrt(2 / len(first))
    has_never_fallen = float(losses[:3].max()) - level < 5 * max(noise, PLATEAU_MOVE * abs(level))
    if has_never_fallen and abs(fallen) <= max(PLATEAU_MOVE * abs(level), min(doubt, SMALLEST * abs(level))):
        return [Stretch(int(rows[0]), int(rows[-1]), "plateau", is_open=True)]
    return []


def has_fallen(curve: LossCurve) -> bool:
    """Whether the losses of the last start are seen to fall, above their noise: from their first rows, or from their
    first third, to their last third. A log that goes on from an earlier one fell before."""
    losses = curve.losses[curve.parts[-1]]
    if len(losses) < 2 or curve.steps[0] > CONTINUED * curve.interval:
        return True
    noise = 1.4826 * float(median(np.abs(np.diff(losses)))) / np.sqrt(2)
    last = losses[-(len(losses) // 3) :]
    begun = float(losses[:3].max()) - float(median(losses)) >= 5 * max(noise, PLATEAU_MOVE * abs(float(median(last))))
    return begun or any(
        float(median(first) - median(last)) > SEEN * 1.25 * noise * np.sqrt(1 / len(first) + 1 / len(last))
        for first in (losses[: len(losses) // 3], losses[: max(len(losses) // 8, 3)])
    )


def guessed(curve: LossCurve, vocabulary: float | None) -> int:
    """Among how many a model guesses whose loss stands at the logarithm of its vocabulary, or of a usual number where
    that is not known; 0 if it does not."""
    losses = curve.losses[curve.finite]
    level = float(median(losses))
    noise = 1.4826 * float(median(np.abs(losses - level)))
    near = (
        count
        for count in ([int(vocabulary)] if vocabulary else CHOICES)
        if abs(level - np.log(count)) <= AT_THE_GUESS * level
    )
    return next(near, 0) if noise <= STILL * level else 0


def closed_up(mask: NDArray[np.bool_], gap: int) -> list[tuple[int, int]]:
    """Runs of True, joined over gaps of up to ``gap``."""
    found: list[tuple[int, int]] = []
    for first, last in stretches(mask):
        if found and first - found[-1][1] - 1 <= gap:
            found[-1] = found[-1][0], last
        else:
            found.append((first, last))
    return found
