"""A reward in, its course out: whether it rose, was lost, or only wandered."""

from dataclasses import dataclass

import numpy as np

from sealegs.detectors.collapse_rules import NOTABLE, SURE, noise_about_a_trend
from sealegs.diagnosis.curve.loss_curve import Floats
from sealegs.diagnosis.first_signals.track import FEWEST, Track, track_of
from sealegs.record.run import Run

NO_GAIN = 4.0
"""Times it wanders that a gain is which nobody would see."""
FEWEST_RISING = 8
"""The fewest rewards that rise beyond doubt."""
BEYOND_DOUBT = 2 * SURE
"""Times it wanders that a gain of any size is learning."""
FEWEST_BENDS = 4
"""The fewest bends of a row of blocks that tell how they wander about a trend."""
THIRDS = 12
"""The fewest rewards of which all of the last third are above all of the first beyond doubt."""
HALF = 0.5
"""Share of what was gained whose loss is worth a look."""
LARGE = 0.3
"""Smallest fall, as a share of the reward's own size, that is a collapse; ``NOTABLE`` is one that is worth a look."""


@dataclass(frozen=True, slots=True)
class Course:
    """The course of a reward, by means of a twentieth of the log."""

    start: float
    best: float
    end: float
    best_row: int
    fallen_row: int
    """The first row from which on it is nearer to its end than to its best."""
    wander: float
    """What neighbouring means differ by where nothing happens."""
    lowest: float
    is_apart: bool = False
    """Whether all of its last third is above all of its first."""

    @property
    def has_learned(self) -> bool:
        """Whether it rose by more than it wanders, and is still up."""
        gain = self.best - self.start
        is_gain = gain >= SURE * self.wander and gain >= NOTABLE * self.size and gain > 0
        is_gain |= gain >= BEYOND_DOUBT * self.wander > 0  # whatever zero means on its scale
        return (is_gain or self.is_apart) and self.best - self.end < LARGE * gain

    @property
    def size(self) -> float:
        """The reward's own size."""
        return max(abs(self.best), abs(self.lowest))

    @property
    def has_gained(self) -> bool:
        """Whether it was ever higher than at first by more than it wanders: the best of many is high by chance."""
        return self.best - self.start > NO_GAIN * self.wander

    @property
    def is_lower(self) -> bool:
        """Whether it is surely below its best, and by half of what was gained, if anything was."""
        gain, fall = self.best - self.start, self.best - self.end
        return fall > 0 and fall >= SURE * self.wander and (gain < SURE * self.wander or fall >= HALF * gain)


def course_of(reward: Track) -> Course:
    """How a reward went. Means are moving ones, so that no edge of a block decides."""
    width = max(5, reward.rows // 20)
    sums = np.concatenate([[0.0], np.cumsum(reward.means)])
    means = (sums[width:] - sums[:-width]) / width
    noise = float(np.std(np.diff(reward.means))) / np.sqrt(2 * width)
    blocks = means[::width]
    wander = _wander(blocks)
    best_row = int(np.argmax(means))
    early, _, late = np.array_split(reward.means, 3)
    end = float(means[-width - 1 :].max())  # of the last two widths: a single good batch is no recovery
    half = (means[best_row] + end) / 2
    above = np.flatnonzero(means >= half)
    return Course(
        start=float(means[0]),
        best=float(means[best_row]),
        end=end,
        best_row=best_row,
        fallen_row=min(int(above[-1]) + width // 2 + 1, reward.rows - 1),
        wander=max(noise, wander),
        lowest=float(means[best_row:].min()),
        is_apart=reward.rows >= THIRDS and bool(late.min() > early.max()),
    )


def _wander(blocks: Floats) -> float:
    """What means of blocks differ by where nothing happens. A rise is no wandering, where there are enough to see it
    by."""
    if len(blocks) < FEWEST_BENDS + 2:
        return float(1.4826 / np.sqrt(2) * np.median(np.abs(np.diff(blocks)))) if len(blocks) > 2 else 0.0
    return noise_about_a_trend(blocks.tolist())


def reward_of(run: Run, *, fewest: int = FEWEST) -> Track | None:
    """The reward by which a run is judged: that in training, or that of the evaluations where no other was logged."""
    for signal in ("reward", "eval_reward"):
        if (track := track_of(run, signal, fewest=fewest)) is not None:
            return track
    return None


def has_learned(run: Run) -> bool:
    """Whether the reward has risen beyond doubt and is still up: then the policy has not collapsed, whatever else was
    logged."""
    reward = reward_of(run, fewest=FEWEST_RISING)
    return reward is not None and course_of(reward).has_learned
