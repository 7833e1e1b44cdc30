"""One signal over a whole log in, and how it moved out: levels, stretches that last to the end, leaps that stay.

Everything is compared by medians of five rows, so that one batch says nothing, and in units of what the signal itself
does: no level is right for all runs. A long log is read in stretches of equal length, so that the work is bounded.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sealegs.diagnosis.curve.loss_curve import Floats, Indices
from sealegs.record.run import Run

FEWEST = 20
"""Values from which a signal is judged."""
MOST = 2_000
"""Values that are looked at: a longer log is read in so many stretches, by the median and the mean of each."""
WIDTH = 5
"""Rows of the running median."""
STAYS = 8
"""Rows to the end, at the least, in which something must have stayed."""
SOON = 10
"""A leap takes at most one part in so many of the log."""


@dataclass(frozen=True)
class Track:
    """The finite values of one signal, in order."""

    signal: str
    steps: Indices
    """The first step of each value."""
    values: Floats
    means: Floats
    """The same as ``values``, but in a long log the means of the stretches, where ``values`` are their medians."""

    @property
    def rows(self) -> int:
        """How many values there are."""
        return len(self.values)

    @property
    def lasting(self) -> int:
        """Rows to the end in which something must have stayed: a tenth of the log, and not many in a long one."""
        return max(STAYS, min(self.rows // 10, 50))

    @cached_property
    def level(self) -> Floats:
        """The running median; at both ends of fewer rows."""
        half = WIDTH // 2
        padded = np.concatenate([np.full(half, np.nan), self.values, np.full(half, np.nan)])
        windows = np.sort(np.lib.stride_tricks.sliding_window_view(padded, WIDTH), axis=1)  # NaN comes last
        count = np.isfinite(windows).sum(axis=1)
        at = np.arange(self.rows)
        return np.asarray((windows[at, (count - 1) // 2] + windows[at, count // 2]) / 2)

    def early(self, first: float = 0.0, last: float = 0.2) -> float:
        """The median from one share of the log to another, of five rows at the least."""
        begin, end = int(first * self.rows), int(last * self.rows)
        return float(np.median(self.values[begin : max(end, begin + WIDTH)]))

    @cached_property
    def end(self) -> float:
        """The median of the last rows."""
        return float(np.median(self.values[-self.lasting :]))

    def since(self, holds: NDArray[np.bool_], *, rows: int | None = None) -> int | None:
        """The first row from which on something holds to the end; None if that is fewer rows than it takes."""
        wrong = np.flatnonzero(~holds)
        first = int(wrong[-1]) + 1 if len(wrong) else 0
        return first if self.rows - first >= (self.lasting if rows is None else rows) else None

    def leap(self, factor: float, floor: float) -> int | None:
        """The row at which the signal leaps by a factor and stays there to the end, or None.

        Nothing before it is near what it never comes down to after it, and it takes at most a tenth of the log: what
        grows slowly does not leap, however far. The first fifth of a log is no past. What is below ``floor`` counts as
        such.
        """
        highest = np.maximum.accumulate(np.maximum(self.level, floor))
        lowest = np.minimum.accumulate(self.level[::-1])[::-1]
        begin, gap = max(self.rows // 5, WIDTH), max(self.rows // SOON, 2)
        last = self.rows - self.lasting
        at = np.arange(begin, last - gap + 1)
        if not len(at):
            return None
        ratio = lowest[at + gap] / np.maximum(highest[at - 1], 1e-300)
        best = int(np.argmax(ratio))
        if not ratio[best] >= factor:
            return None
        row = int(at[best])
        return row + int(np.argmax(self.level[row : row + gap + 1] > 2 * highest[row - 1]))

    def grows(self, factor: float, floor: float) -> int | None:
        """The row from which on the signal is so many times as high as before the middle of the log, up to the end."""
        usual = max(self.early(0.3, 0.5), floor)
        return self.since(self.level >= factor * usual)

    def runs_away(self, factor: float, floor: float) -> int | None:
        """The row from which on it leaps or grows so far, whichever is seen first."""
        rows = [row for row in (self.leap(factor, floor), self.grows(factor, floor)) if row is not None]
        return min(rows, default=None)

    def falls(self, share: float) -> int | None:
        """The row from which on the signal is at most that share of its highest level before, up to the end."""
        high = float(self.level[: self.rows - self.lasting].max())
        return self.since(self.level <= share * high) if high > 0 else None


def track_of(run: Run, signal: str, *, fewest: int = FEWEST) -> Track | None:
    """The signal as it is judged; None if it was not logged as numbers, or too rarely."""
    if signal not in run.signals or not run.has_numbers(signal):
        return None
    steps, values = run.series(signal)
    is_finite = np.isfinite(values)
    if not is_finite.all():
        steps, values = steps[is_finite], values[is_finite]
    if len(values) < fewest:
        return None
    if len(values) <= MOST:
        return Track(signal, steps, values, values)
    size = -(-len(values) // MOST)
    whole = len(values) // size * size  # rows that fill no stretch are the first: the end tells more
    cut = values[len(values) - whole :].reshape(-1, size)
    return Track(signal, steps[len(steps) - whole :: size], np.median(cut, axis=1), cut.mean(axis=1))


def in_words(run: Run, signal: str, *, fewest: int = FEWEST) -> str:
    """``reward 0.21 at first, 0.68 in the end``; empty where it was logged too rarely to say, or not at all."""
    track = track_of(run, signal, fewest=fewest)
    return "" if track is None else f"{signal} {track.early(0.0, 0.1):.4g} at first, {track.end:.4g} in the end"


def tracks_of(run: Run, signal: str) -> Iterator[Track]:
    """The signal itself, and the signal by layer or group."""
    for name in run.signals:
        if (name == signal or name.startswith(f"{signal}/")) and (track := track_of(run, name)) is not None:
            yield track
