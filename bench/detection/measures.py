"""Flags in, numbers out: what was found within how many steps, and how sure that is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from bench.peers import Flags
from bench.streams import Stream

DELAYS = (0, 1, 8, 32, 200)
"""Steps from onset within which a fault may be found."""
NEVER = -1


def first_flag(flags: Flags, event: Stream) -> int:
    """Steps from the onset to the first flag at or after it; -1 if there is none."""
    found = np.flatnonzero(flags[event.onset :])
    return int(found[0]) if len(found) else NEVER


@dataclass(frozen=True, slots=True)
class Recall:
    """What became of a number of events of one kind."""

    n: int
    within: tuple[int, ...]
    """How many were found within each of the delays."""
    latency: float | None
    """Median steps from onset, of those found within the last delay."""
    lead: float | None
    """Median steps from the first flag to the loss peak, of those found before it; None where there is no peak."""
    before_peak: int | None
    """How many were found before it."""

    def interval(self, delay: int) -> tuple[float, float]:
        """Of the share found within a delay."""
        return wilson(self.within[DELAYS.index(delay)], self.n)

    def share(self, delay: int) -> float:
        """Found within a delay."""
        return self.within[DELAYS.index(delay)] / self.n


def recall(firsts: Sequence[int], peaks: Sequence[int | None]) -> Recall:
    """Of first flags, and of how many steps after the onset the loss peaks, event by event.

    >>> recall([0, 3, -1, 500], [5, 2, 5, None])
    Recall(n=4, within=(1, 1, 2, 2, 2), latency=1.5, lead=5, before_peak=1)
    """
    found = [first for first in firsts if NEVER < first <= DELAYS[-1]]
    leads = [peak - first for first, peak in zip(firsts, peaks, strict=True) if peak and NEVER < first < peak]
    return Recall(
        n=len(firsts),
        within=tuple(sum(first <= delay for first in found) for delay in DELAYS),
        latency=median(found) if found else None,
        lead=median(leads) if leads else None,
        before_peak=len(leads) if any(peaks) else None,
    )


def higher_than(ours: Recall, theirs: Recall, delay: int) -> bool:
    """Whether they find more beyond the intervals, which then do not touch."""
    return theirs.interval(delay)[0] > ours.interval(delay)[1]


def wilson(count: int, n: int) -> tuple[float, float]:
    """95 % interval of a share.

    >>> [round(end, 3) for end in wilson(150, 150)]
    [0.975, 1.0]
    """
    z2, share = 1.96**2, count / n
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    reach = 1.96 * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return max(0.0, middle - reach), min(1.0, middle + reach)


def poisson(count: int) -> tuple[float, float]:
    """95 % interval of the mean of a count; the normal one where it is as good.

    >>> [round(end, 2) for end in poisson(1)]
    [0.03, 5.57]
    """
    if count > 100:
        return count - 1.96 * math.sqrt(count), count + 1.96 * math.sqrt(count)

    def at_most(k: int, mean: float) -> float:
        return math.fsum(math.exp(i * math.log(mean) - mean - math.lgamma(i + 1)) for i in range(k + 1))

    def solve(k: int, wanted: float) -> float:
        low, high = 1e-9, 200.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if at_most(k, middle) > wanted else (low, middle)
        return low

    return (solve(count - 1, 0.975) if count else 0.0), solve(count, 0.025)


# ---- of events that last


def caught(flags: Flags, event: Stream) -> float:
    """The share of the bad steps that is flagged."""
    return float(flags[list(event.bad)].mean())


def any_flag(flags: Flags, event: Stream) -> float:
    """Whether anything is flagged."""
    return float(flags.any())


def at_step(flags: Flags, event: Stream, *, step: int) -> float:
    """Whether this step is flagged."""
    return float(flags[step])


def healthy_flagged(flags: Flags, event: Stream) -> float:
    """How many steps that nothing is wrong with are flagged."""
    return float(np.delete(flags, list(event.bad)).sum())


def accepted_after(flags: Flags, event: Stream) -> float:
    """Steps until 50 in a row are not flagged; infinite if that never comes."""
    flagged = np.flatnonzero(flags)
    starts, ends = np.append(0, flagged + 1), np.append(flagged, len(flags))
    calm = np.flatnonzero(ends - starts >= 50)
    return float(starts[calm[0]]) if len(calm) else math.inf
