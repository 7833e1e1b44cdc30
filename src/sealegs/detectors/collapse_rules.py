"""Levels in, whether a policy or a router has collapsed out: what the live detector and the reading of a log share.

Both ask the same of a run. The detector asks it of the last values of a stream, ``diagnosis/first_signals`` of what
stands at the end of a whole log.
"""

from collections.abc import Sequence
from statistics import median

VANISHED, LITTLE = 0.05, 0.15
"""Share of its highest level that is left of an entropy: next to nothing; or little, and no reward was won for it."""
PAID = 0.3
"""The part of what the reward rose before, by which it must have risen while the second half of the entropy went."""
SURE, NOTABLE = 6.0, 0.25
"""A reward has moved if it did so by so many times what its means wander, and by this share of its size."""
LOST, SURE_OF_FEW = 0.2, 4.0
"""A held-out reward has fallen if it did so by this share of its best, and so many times its noise."""
FEWEST_HELD_OUT = 6
"""Values of a held-out reward from which it is judged."""
APART, APART_FLOOR = 5.0, 0.01
"""Growth of the gap between sampler and trainer; what is below so many nats counts as such."""
MANY_FOLD = 10.0
"""By which a divergence leaps where the policy runs away."""
KL_FLOOR = {"kl": 0.02, "policy_kl": 0.005}
"""What is below counts as this much: from nothing, everything is many-fold."""
MANY_DEAD, SOME_DEAD, MORE_DEAD = 0.5, 0.25, 0.2
"""Share of the experts that get hardly anything: a router that has collapsed, and one to look at; and by how much that
share must have grown from its lowest."""
VIOLATED, LEAST_VIOLATION = 3.0, 2.0
"""Growth of the largest violation from its lowest, and the least that is told."""


def is_unpaid(start: float, middle: float, end: float) -> bool:
    """Whether an entropy was given away for nothing: rewards at the start, where half of it was gone, and in the end.

    A policy that learns trades entropy for reward, the second half of it as well.

    >>> is_unpaid(0.2, 0.6, 0.9), is_unpaid(0.2, 0.6, 0.62)
    (False, True)
    """
    return end - middle < PAID * max(middle - start, 0.0)


def has_risen(before: float, now: float, wander: float) -> bool:
    """Whether a reward has risen by more than it wanders, and by a good part of itself."""
    return now - before >= max(SURE * wander, NOTABLE * abs(before))


def has_fallen(best: float, now: float, noise: float) -> bool:
    """Whether a held-out reward has fallen from its best."""
    return best - now >= max(LOST * abs(best), SURE_OF_FEW * noise)


def noise_about_a_trend(values: Sequence[float]) -> float:
    """Standard deviation of values about a line that may rise or fall: by how their differences differ."""
    bends = [abs(a - 2 * b + c) for a, b, c in zip(values, values[1:], values[2:], strict=False)]
    return median(bends) * 1.4826 / 6**0.5 if bends else 0.0
