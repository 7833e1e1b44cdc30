"""The columns of a critic in, whether it is of any use out.

A critic says how much reward is still to come, so that a policy can tell better from worse. One that explains nothing
is no better than a constant, and one that blows up pulls the policy with it. Programs name these columns in their own
ways, and they are no signals of ours: they are known by their names.
"""

import re
from collections.abc import Iterator

import numpy as np

from sealegs.diagnosis.contract import Standing
from sealegs.diagnosis.first_signals.track import Track, track_of
from sealegs.record.run import Run

EXPLAINED = re.compile(r"(?:.*_)?explained_var(?:iance)?|ev_?(?:after|before)")
LOSS = re.compile(
    r"(?:.*_)?(?:value|critic|vf|v|qf\d?|q|value_function)_loss(?:_avg|_mean)?|loss_(?:value_avg|vf?|critic)"
)
ENOUGH = 50
"""Rows from which a critic must explain something."""
SAME = 0.01
"""Share of all that was gained by which rewards at a ceiling differ."""
NOTHING = 0.05
"""The share of the returns' variance below which a critic explains nothing. It may be far below 0."""
BLOWN_UP, PARTS = 20.0, 12
"""By how much the loss of a critic grows where it blows up, from one twelfth of a log to another: it goes to and fro by
as much. It also grows with the reward: that is no fault."""


def judged(run: Run, reward: Track | None) -> Iterator[Standing]:
    """What stands in the columns of a critic."""
    if reward is None or not _is_solved(reward):
        yield from _explains_nothing(run)
    if reward is not None:
        yield from _blows_up(run, reward)


def columns(run: Run, pattern: re.Pattern[str]) -> list[str]:
    """The columns of such a name."""
    return [name for name in run.signals if pattern.fullmatch(re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_"))]


def _is_solved(reward: Track) -> bool:
    """Whether the reward has come up to a ceiling and stands there: returns that are all the same leave nothing to
    explain."""
    gain = float(reward.values.max()) - reward.early(0.0, 0.1)
    return gain > 0 and float(reward.values.max()) - reward.end <= SAME * gain


def _explains_nothing(run: Run) -> Iterator[Standing]:
    """A critic that explains nothing in the second half of a log: at first none does."""
    for name in columns(run, EXPLAINED):
        track = track_of(run, name)
        if track is None or track.rows < ENOUGH or track.values.max() > 1 + 1e-6:  # a percentage, or something else
            continue
        late = float(np.median(track.values[track.rows // 2 :]))
        if late <= NOTHING:
            row = track.since(track.level <= NOTHING, rows=1) or 0
            text = f"{name} is {late:.2g} in the second half of the log: the critic is no better than a constant"
            yield Standing(signal=name, step=int(track.steps[row]), text=text, shows="critic-explains-nothing")
            return


def _blows_up(run: Run, reward: Track) -> Iterator[Standing]:
    """A critic's loss that grows many-fold, at a reward that is no higher for it; whether or not it comes back."""
    for name in columns(run, LOSS):
        track = track_of(run, name)
        if track is None or track.values.min() < 0:
            continue
        width = max(track.rows // PARTS, 5)
        parts = np.array([np.median(track.values[at : at + width]) for at in range(0, track.rows - width + 1, width)])
        lowest = np.minimum.accumulate(parts)
        growth = parts / np.maximum(lowest, 1e-300)
        peak = int(np.argmax(np.where(lowest > 0, growth, 0.0)))
        if not growth[peak] >= BLOWN_UP or lowest[peak] <= 0:
            continue
        low = int(np.argmin(parts[: peak + 1]))
        first, last = low * width, peak * width
        before, then = (
            _mean_from(reward, int(track.steps[row]), int(track.steps[row + width - 1])) for row in (first, last)
        )
        if then > before + float(np.std(reward.means[: max(reward.rows // 5, 5)])) / 2:
            continue
        end = "" if track.end > parts[peak] / 2 else f", {track.end:.3g} in the end"
        text = (
            f"{name} {parts[low]:.3g} about step {track.steps[first]}, {parts[peak]:.3g} about step "
            f"{track.steps[last]}{end}, at a reward of {before:.4g} and {then:.4g}: the critic blew up"
        )
        yield Standing(signal=name, step=int(track.steps[first]), text=text, shows="critic-blows-up")
        return


def _mean_from(track: Track, first: int, last: int) -> float:
    """The mean from one step to another, of five values at the least."""
    begin, end = (int(np.searchsorted(track.steps, step)) for step in (first, last))
    begin = min(begin, max(track.rows - 5, 0))
    return float(track.means[begin : max(end, begin + 5)].mean())
