"""A clipping limit and the gradient norms of healthy steps in, the limit that can be kept out, with the reason.

A limit below the usual norm clips most steps, which is another learning rate and no guard against the rare step.
"""

import math
from collections.abc import Sequence
from statistics import median, quantiles
from typing import NamedTuple

FEWEST = 20
"""Healthy norms from which a clipping limit can be checked."""
CLIPPED = 10
"""One healthy step in so many is clipped by a limit that is chosen by the norms."""


class ClipLimit(NamedTuple):
    """A clipping limit, and why it is this one."""

    value: float | None
    """None where no lower limit than the one in force is sane."""
    because: str


def clip_limit(wanted: float, norms: Sequence[float], now: float | None = None) -> ClipLimit:
    """A clipping limit, checked against the norms of healthy steps before clipping; ``now`` is the one in force.

    >>> clip_limit(0.5, [0.6 + step / 500 for step in range(100)]).because
    '0.5 would clip 100% of the healthy steps, whose median norm is 0.699: 0.78 clips one in 10'
    >>> clip_limit(0.5, [0.6] * 5)
    ClipLimit(value=0.5, because='not checked: 5 norms of healthy steps are known')
    """
    if len(norms) < FEWEST:
        return ClipLimit(wanted, f"not checked: {len(norms)} norms of healthy steps are known")
    usual = median(norms)
    share = sum(norm > wanted for norm in norms) / len(norms)
    told = f"{wanted:g} would clip {share:.0%} of the healthy steps, whose median norm is {usual:.4g}"
    if wanted >= usual:
        return ClipLimit(wanted, told)
    limit = float(f"{quantiles(norms, n=CLIPPED)[-1]:.3g}")
    if now is not None and 0 < now <= limit < math.inf:
        return ClipLimit(None, f"{told}, and the present {now:g} clips more than one in {CLIPPED} already")
    return ClipLimit(limit, f"{told}: {limit:g} clips one in {CLIPPED}")
