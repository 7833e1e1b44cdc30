"""The loss of a run as a curve: every row in the order written, those that a resume superseded included."""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from sealegs.incidents import AVERAGED, BEYOND, FAST, SLOW, Incident
from sealegs.record.attempts import standing_rows
from sealegs.record.run import Run

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

SHORTEST_PART = 24
"""Fewest rows of a new start from the first step that are judged by themselves."""

ANEW = 0.5
"""Share of what an attempt gained that the next one may have at its first row, and begin with nothing learned."""

ALIKE = 0.01
"""Share by which two first losses differ by the order of the data."""
MANY = 8
"""Starts from which on a log is one of many short runs."""


@dataclass(frozen=True)
class LossCurve:
    """The losses of a run. Time is counted in rows: steps may go back, or advance by hundreds."""

    steps: Indices
    segments: Indices
    """How often the steps have gone back before each row."""
    losses: Floats

    @cached_property
    def finite(self) -> Indices:
        """The rows whose loss is finite."""
        return np.flatnonzero(np.isfinite(self.losses))

    @cached_property
    def interval(self) -> int:
        """The usual number of steps between two rows."""
        forward = np.diff(self.steps)
        forward = forward[forward > 0]
        return int(np.median(forward)) if len(forward) else 1

    @cached_property
    def resumes(self) -> tuple[int, ...]:
        """The first row after each step back."""
        return tuple((np.flatnonzero(np.diff(self.segments)) + 1).tolist())

    @cached_property
    def parts(self) -> tuple[Indices, ...]:
        """The finite rows of each attempt that started at the first step again: a healthy one starts high.

        One of few rows is apart only where it begins as high as the one before it: with nothing learned; or where they
        are many, of as many short runs.
        """
        begun = [row for row in self.resumes if self.steps[row] <= self.steps[0]]
        edges = [0]
        for before, row in pairwise((0, *begun)):
            is_long = row - edges[-1] >= SHORTEST_PART and len(self.steps) - row >= SHORTEST_PART
            if is_long or len(begun) >= MANY or self._begins_anew(before, row):
                edges.append(row)
        cuts = np.searchsorted(self.finite, edges[1:])
        return tuple(np.split(self.finite, cuts))

    def _begins_anew(self, before: int, row: int) -> bool:
        """Whether the losses from a row on begin where those from an earlier row on began, which had not risen."""
        first, last, now = self.losses[before], self.losses[row - 1], self.losses[row]
        return bool(last <= first and now >= first - ANEW * abs(first - last) - ALIKE * abs(first))

    @property
    def last_attempt(self) -> int:
        """How often the run went back in all."""
        return int(self.segments[-1]) if len(self.segments) else 0

    @cached_property
    def standing(self) -> Indices:
        """The rows that the run did not go back over later."""
        return standing_rows(self.steps)

    @cached_property
    def stands(self) -> NDArray[np.bool_]:
        """Whether each row is one of them."""
        stands = np.zeros(len(self.steps), np.bool_)
        stands[self.standing] = True
        return stands

    @cached_property
    def _standing_steps(self) -> Indices:
        return self.steps[self.standing]

    def standing_beyond(self, step: int) -> int:
        """How many standing rows are of later steps."""
        return len(self.standing) - int(np.searchsorted(self._standing_steps, step, side="right"))

    def finite_before(self, row: int, most: int) -> Floats:
        """The last finite losses, so many at the most, that stood when that row was written, without its own."""
        reach = 2 * most
        while True:  # whether a row stands is up to those after it alone
            first = max(row - reach, 0)
            rows = standing_rows(self.steps[first : row + 1]) + first
            losses = self.losses[rows[rows < row]]
            losses = losses[np.isfinite(losses)]
            if len(losses) >= most or not first:
                return losses[-most:]
            reach *= 4

    def after(self, row: int, most: int) -> Indices:
        """The first rows, so many at the most, that followed that row: those of its attempt, or those that stand beyond
        it, if it ended soon."""
        end = int(np.searchsorted(self.segments, self.segments[row], side="right"))
        standing = self.standing
        beyond = max(
            int(np.searchsorted(standing, row, side="right")),
            len(standing) - self.standing_beyond(int(self.steps[row])),
        )
        if end - row - 1 >= AVERAGED or beyond == len(standing):
            return np.arange(row + 1, min(end, row + 1 + most))
        return standing[beyond : beyond + most]

    def attempt_of(self, incident: Incident) -> int:
        """The attempt in which an incident was worst; the first that reached its onset, if its peak is not known."""
        if incident.peak >= incident.start and (self.steps == incident.peak).any():
            return int(self.segments[self.row_of(incident.peak, incident.peak_loss)])
        reached = self.segments[self.steps >= incident.start]
        return int(reached[0]) if len(reached) else self.last_attempt

    def row_of(self, step: int, loss: float) -> int:
        """The row of a step; of several, the one with that loss. NaN stands for a loss that is not finite."""
        rows = np.flatnonzero(self.steps == step)
        off = np.abs(self.losses[rows] - loss) if np.isfinite(loss) else np.isfinite(self.losses[rows])
        return int(rows[np.argmin(np.where(np.isnan(off), np.inf, off))])


def passing(points: int) -> tuple[int, int]:
    """Rows up to which a rise in a log of ``points`` rows is short, and up to which it is a passing one.

    >>> passing(40), passing(1000), passing(100_000)
    ((3, 6), (25, 100), (50, 500))
    """
    return min(FAST, max(points // 40, 3)), min(SLOW, max(points // 10, 6))


def curve_of(run: Run) -> LossCurve:
    """The losses of a run; empty if it has none."""
    if "loss" not in run.signals:
        return LossCurve(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))
    steps, segments, written = run.written("loss", copy=False)
    losses = numbers(written)
    bounded = np.clip(losses, -BEYOND, BEYOND)  # otherwise their squares and sums would be infinite
    return LossCurve(steps, segments, np.where(np.isfinite(losses), bounded, losses))


def numbers(values: NDArray[np.float64]) -> Floats:
    """A column as numbers; text gives NaN."""
    if values.dtype.kind not in "fiub":
        return np.full(len(values), np.nan)
    return values.astype(np.float64, copy=False)


def beside(run: Run, curve: LossCurve, signal: str) -> Floats:
    """A signal at the rows of the curve; NaN where it was not logged with the loss, infinite where it is not finite."""
    if signal not in run.signals or not len(curve.steps):
        return np.full(len(curve.steps), np.nan)
    steps, segments, values = run.written(signal, copy=False)
    values = numbers(values)
    values = np.where(np.isfinite(values), values, np.inf)
    if len(steps) == len(curve.steps) and np.array_equal(steps, curve.steps):
        return values
    # rows are in order of segment and step, so that one number gives their order
    span = int(max(steps.max(), curve.steps.max())) - int(min(steps.min(), curve.steps.min())) + 1
    of_curve, of_signal = curve.segments * span + curve.steps, segments * span + steps
    at = np.minimum(np.searchsorted(of_signal, of_curve), len(of_signal) - 1)
    same = of_signal[at] == of_curve
    found = np.full(len(curve.steps), np.nan)
    found[same] = values[at[same]]
    return found
