"""Applies the live statistic to a loss curve if it is calibrated for it; or the rules of the textbook.

The statistic is calibrated for losses of every step, in runs of at least a thousand; from the first negative loss on it
begins anew, on a scale of both signs, as in the live guard. Our own runs are judged
by the whole fold that judged them live, other logs by the statistic of the loss alone. A run too long for that is
screened: the statistic judges only the surroundings of its highest points.

The statistic over whole curves is ``stats/streaming.py``'s ``scan``; that module names its three other forms.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from sealegs import judge
from sealegs.detectors import drift
from sealegs.detectors.spike import STRICTER, SUSPICIOUS, YOUNG
from sealegs.detectors.textbook import MonotonicRise, ThreeSigma
from sealegs.diagnosis.curve.loss_curve import Floats, Indices, LossCurve, beside
from sealegs.diagnosis.curve.rises import median, stretches
from sealegs.diagnosis.curve.stretches import Stretch, closed_up
from sealegs.incidents import AVERAGED, SLOW, incidents_of
from sealegs.record.run import Run
from sealegs.stats import streaming
from sealegs.stats.calibration import CalibrationAudit
from sealegs.vocabulary import Row

LONG = 1000
"""Rows from which on the statistic knows its tail; it does not judge shorter runs."""
ALARM = 0.5e-5
"""Chance of a false alarm per row: half of the live budget, since the gradient norm has the other half."""
IN_A_ROW, EACH = 3, 1e-3
"""IN_A_ROW rows with a chance below EACH are an alarm, too: 1e-9 if batches are independent, and far below the budget
if neighbours are half alike."""
SMALLEST = 1.05
"""A rise by less than this factor is no spike, as in the live guard."""
MOST_FOLDED = 8_192
"""Rows of our own runs that the whole fold judges: 0.1 ms each."""
MOST_SCANNED = 100_000
"""Rows that the statistic of the loss judges: 4 us each."""
SHORT = drift.BLOCK
"""A shorter rise needs an alarm of the statistic, if that is calibrated. Its slow channel has blocks of this length."""
SCREENED = 40
"""The most high points that are judged in longer runs, each with BEFORE rows before and AFTER rows after it."""
BEFORE, AFTER = 800, 100
BLOCK = 64
"""Rows of a block: the screen compares a point with the median of the block before its own."""
PART = 65_536
"""Windows that are averaged at a time."""
FOLDED = (
    *("grad_norm", "clip_norm", "normalised", "loss_scale", "grads_finite", "params_finite"),
    *("gate_closed", "loss_p", "grad_norm_p"),
)
"""Numbers that the detectors of loss and gradient norm use, besides the loss. An incident here is one of the loss, so
that the others, of learning rate, throughput, weights and ranks, are not asked."""


def judges_from(curve: LossCurve) -> int:
    """The row from which on the live statistic judges short rises; beyond the last row if it is not calibrated."""
    losses = curve.losses[curve.finite]
    are_known = bool((losses > 0).all()) or bool((losses < 0).any())  # zeros among positive ones may have been NaN
    is_calibrated = len(losses) >= LONG and curve.interval == 1 and are_known
    return YOUNG if is_calibrated else len(curve.losses)


def surprising(run: Run, curve: LossCurve, most_folded: int = MOST_FOLDED) -> list[Stretch]:
    """Alarms of the live statistic, if it is calibrated for the curve."""
    if run.manifest.created and len(curve.losses) <= most_folded:
        return _as_live(run, curve)
    if judges_from(curve) == len(curve.losses):
        return []
    return sorted({one for rows in curve.parts for one in _surprising(curve.losses, rows)})


def _surprising(losses: Floats, rows: Indices) -> Iterator[Stretch]:
    """The same for the rows of one start: on the logarithm up to the first negative loss, then on a scale of both
    signs. A loss of exactly 0 is on neither."""
    first = next(iter(np.flatnonzero(losses[rows] < 0)), len(rows))
    known = rows[losses[rows] != 0]
    split = int(np.sum(losses[rows[:first]] != 0))
    for part, is_signed in ((known[:split], False), (known[split:], True)):
        values = losses[part] / np.median(np.abs(losses[part])) if is_signed and len(part) else np.log(losses[part])
        for begin, end, judged_from in _windows(values):
            p, after = streaming.scan(values[begin:end], limit=SUSPICIOUS, is_signed=is_signed)
            p[:LONG] *= ALARM / judge.YOUNG_ALARM  # the tail is known only roughly until then, as in the live guard
            heights = np.arcsinh(values[begin:end] / after.unit) if is_signed else values[begin:end]
            high = _alarms(heights, p, is_signed=is_signed)
            high[: judged_from - begin] = False
            for a, b in closed_up(high, gap=10):
                yield Stretch(int(part[begin + a]), int(part[begin + b]), "spike")


def is_screened(curve: LossCurve) -> bool:
    """Whether the statistic judges only some of the rows."""
    return len(curve.finite) > MOST_SCANNED


def _windows(heights: Floats) -> Iterator[tuple[int, int, int]]:
    """Stretches to judge: where each begins, where it ends, and the row from which on its alarms count."""
    count = len(heights)
    if count <= MOST_SCANNED:
        yield 0, count, YOUNG
        return
    blocks = count // BLOCK
    medians = median(heights[: blocks * BLOCK].reshape(blocks, BLOCK))
    above = heights[BLOCK : blocks * BLOCK].reshape(blocks - 1, BLOCK) - medians[:-1, None]
    usual = np.maximum(1.4826 * median(np.abs(above)), streaming.SMALLEST_SCALE)
    highest = (above / usual[:, None]).max(axis=1)
    near = np.zeros(count, dtype=bool)
    for block in np.argsort(highest)[-SCREENED:].tolist():
        row = (block + 1) * BLOCK
        near[max(row - AFTER, YOUNG) : row + BLOCK + AFTER] = True
    for first, last in stretches(near):
        yield max(first - BEFORE, 0), last + 1, first


def _alarms(heights: Floats, p: Floats, *, is_signed: bool) -> NDArray[np.bool_]:
    """Which values are alarms, after the calibration of the p-values has been audited and corrected. A loss of both
    signs needs a smaller p and may stay high, as in the live guard."""
    audit = CalibrationAudit(float(len(p)), float(np.sum(p < 0.01)), float(np.sum(p < 0.001)))
    alarms = p < ALARM / (STRICTER if is_signed else 1.0) / audit.correction
    for first, last in (
        () if is_signed else stretches(p < EACH)
    ):  # uncorrected: a burst by itself would make the p-values look uncalibrated
        alarms[first : last + 1] |= last - first + 1 >= IN_A_ROW
    for at in np.flatnonzero(alarms).tolist():
        alarms[at] = heights[at] - np.median(heights[max(at - 32, 0) : at + 1]) > np.log(SMALLEST)
    return np.asarray(alarms)


def _as_live(run: Run, curve: LossCurve) -> list[Stretch]:
    rows = list(_rows(run, curve))
    found = []
    for incident in incidents_of(rows, judge.replay(rows)):
        peak = curve.row_of(incident.peak, incident.peak_loss)
        same = curve.segments == curve.segments[peak]  # the run may have gone through a step several times
        end = incident.peak if incident.end is None or incident.end < incident.peak else incident.end
        within = np.append(peak, np.flatnonzero(same & (curve.steps >= incident.start) & (curve.steps <= end)))
        is_open = incident.end is None and bool(curve.segments[peak] == curve.segments[-1])
        found.append(Stretch(int(within.min()), int(within.max()), incident.kind, is_open))
    return found


def _rows(run: Run, curve: LossCurve) -> Iterator[Row]:
    """The rows in the order written, with the signals that the detectors use."""
    beside_loss = {signal: beside(run, curve, signal) for signal in FOLDED if signal in run.signals}
    announced: set[tuple[int, int]] = set()
    if "announced" in run.signals:
        steps, segments, _ = run.written("announced")
        announced = set(zip(segments.tolist(), steps.tolist(), strict=True))
    losses = zip(curve.segments.tolist(), curve.steps.tolist(), curve.losses.tolist(), strict=True)
    for at, (segment, step, loss) in enumerate(losses):
        row: dict[str, float | str] = {"step": step, "loss": loss}
        row |= {signal: float(values[at]) for signal, values in beside_loss.items() if not np.isnan(values[at])}
        if (segment, step) in announced:
            row["announced"] = ""
        yield row


def by_the_book(curve: LossCurve) -> list[Stretch]:
    """The textbook's rules, literally: three sigma over the last 100 values, and rises without a break for 200 steps.

    A spike lasts until the mean of ten rows is within half a sigma of the mean before it, or for 500 rows.
    """
    return sorted(found for rows in curve.parts for found in _by_the_book(curve, rows))


def _by_the_book(curve: LossCurve, rows: Indices) -> Iterator[Stretch]:
    """The same for the rows of one start."""
    rule, losses = ThreeSigma(), curve.losses[rows]
    is_last = bool(len(rows) and rows[-1] == curve.finite[-1])
    if len(losses) > rule.window:
        mean, sigma = _windowed(losses[:-1], rule.window)
        averaged = np.lib.stride_tricks.sliding_window_view(losses, AVERAGED).mean(axis=1)
        free = 0
        for alarm in np.flatnonzero(losses[rule.window :] > mean + rule.sigmas * sigma).tolist():
            at = alarm + rule.window
            if at < free:
                continue
            calm = np.flatnonzero(averaged[at + 1 : at + SLOW + 1] <= mean[alarm] + 0.5 * sigma[alarm])
            last = at + AVERAGED + int(calm[0]) if len(calm) else at + SLOW
            is_open = is_last and last >= len(rows)
            yield Stretch(int(rows[at]), int(rows[min(last, len(rows) - 1)]), "spike", is_open)
            free = last + 1
    steps = curve.steps[rows]
    for first, last in stretches(np.diff(losses) > 0):
        if steps[last + 1] - steps[first] >= MonotonicRise().steps:
            is_open = is_last and last + 1 == len(losses) - 1
            yield Stretch(int(rows[first]), int(rows[last + 1]), "drift", is_open)


def _windowed(losses: Floats, width: int) -> tuple[Floats, Floats]:
    """Mean and standard deviation of every window of ``width`` values, in parts: all at once take a gigabyte."""
    means, sigmas = [], []
    for begin in range(0, len(losses) - width + 1, PART):
        part = losses[begin : begin + PART + width - 1]
        level = float(np.median(part))  # so that squares of large losses do not hide the spread of small ones
        windows = np.lib.stride_tricks.sliding_window_view(part - level, width)
        mean = np.einsum("ij->i", windows) / width
        squares = np.einsum("ij,ij->i", windows, windows) / width
        means.append(mean + level)
        sigmas.append(np.sqrt(np.maximum(squares - mean**2, 0.0)))
    return np.concatenate(means or [np.empty(0)]), np.concatenate(sigmas or [np.empty(0)])
