"""How long each rank works at a step before it waits for others: times in, the slowest rank out.

DDP tells a rank's communication hook when gradients are ready to be exchanged. Until then the rank has waited for
nobody, so that its time is its own: a slow rank makes all steps slow, but only its own time is long.
"""

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

WINDOW = 50
"""Steps that are judged together."""
CHECK_STEPS = 25
"""How often, in steps, they are."""
FEWEST = 40
"""Steps of these that must have a time: not those around a checkpoint or a pause."""
SLOW = 0.1
"""How much longer than the median of its peers a rank must take to count as slow."""
FEWER = 3.0
"""By how many times fewer steps tell something at the least, since a slow one follows a slow one."""
MOST_ALIKE = 0.95
"""The highest correlation of the noise of a step with that of the next that is reckoned with."""
SMALLEST_SPREAD = 0.01
"""Times vary by at least this much, as a logarithm."""
OF_MEDIAN = 1.2533
"""Standard error of a median in that of a mean, of normal numbers."""
OF_SPREAD = 1.4826
"""Standard deviation in median distances from the median."""
FOUND = ("slowest_rank", "slowest_by", "slowest_surprise")
"""What is found of a window: which rank, how much longer it takes as a share, and how many standard errors that is."""


class OwnTime:
    """Times the work of this rank between an update and the last gradients that it hands to the others."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._began: Any = None
        self._ready: Any = None
        self._before: tuple[Any, Any] | None = None
        """Events of the step before, of which the device may not have come to the second yet."""

    def begin(self) -> None:
        """The update of a step is over, or on its way on the device."""
        self._began, self._ready = self._now(), None

    def ready(self) -> None:
        """Gradients are ready to be exchanged; more may follow."""
        self._ready = self._now()

    def forget(self) -> None:
        """Something else was done meanwhile: a checkpoint, an evaluation."""
        self._began = self._ready = self._before = None

    def seconds(self) -> float:
        """The time of this step; on a device, which is behind the host, of the one before. NaN where it is not
        known."""
        began, ready, self._ready = self._began, self._ready, None
        if not self._is_cuda:
            return math.nan if began is None or ready is None else ready - began
        before, self._before = self._before, None if began is None or ready is None else (began, ready)
        if before is None or not before[1].query():
            return math.nan
        return float(before[0].elapsed_time(before[1])) / 1000

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class OwnTimes:
    """The times of all ranks in the last steps, the same on all of them."""

    def __init__(self, peers: Sequence[int], device: torch.device) -> None:
        self._peers = peers
        self._window = torch.full((WINDOW, len(peers)), math.nan, dtype=torch.float64, device=device)
        self._steps = 0

    def add(self, times: Tensor) -> None:
        """Take in a step: the time of each rank, NaN or nothing above 0 where it is not known."""
        self._window[self._steps % WINDOW] = torch.where(times > 0, times, math.nan)
        self._steps += 1

    @property
    def is_due(self) -> bool:
        """Whether the step that came last completes a window that is to be judged."""
        return self._steps >= WINDOW and self._steps % CHECK_STEPS == 0

    def slowest(self) -> Tensor:
        """What is found of the window, in the order of FOUND."""
        return slowest(self._window, self._peers)


@torch.no_grad()
def slowest(window: Tensor, peers: Sequence[int]) -> Tensor:
    """The rank that is surest to be slow, of times by step and rank; or else the one that takes longest.

    A rank is compared with the median of its peers at each step: what makes all of them slow is no one's doing. NaN
    where too few times are known.
    """
    usual = torch.empty_like(window)
    for first in sorted(set(peers)):
        members = [rank for rank, other in enumerate(peers) if other == first]
        if len(members) == len(peers):
            usual = window.nanmedian(1, keepdim=True).values
        else:
            usual[:, members] = window[:, members].nanmedian(1, keepdim=True).values
    apart = (window / usual).log()
    middle = apart.nanmedian(0).values
    noise = apart - middle
    spread = OF_SPREAD * noise.abs().nanmedian(0).values
    spread = torch.maximum(spread.nan_to_num(0.0), spread.nanmedian()).clamp(min=SMALLEST_SPREAD)
    known = (~apart.isnan()).sum(0)
    telling = known.clamp(min=1) / _times_fewer(noise)
    error = OF_MEDIAN * spread / telling.sqrt() * (1 + 2 / telling)  # of few steps the spread is not known well either
    middle = torch.where(known >= FEWEST, middle, -torch.inf)
    surprise = middle / error
    is_slow = middle >= math.log1p(SLOW)
    order = torch.where(is_slow.any(), torch.where(is_slow, surprise, -torch.inf), middle)
    rank = order.argmax(0, keepdim=True)
    by = middle.gather(0, rank)
    by = torch.where(by.isinf(), torch.nan, by.expm1())
    return torch.cat((rank.double(), by, surprise.gather(0, rank)))


def _times_fewer(noise: Tensor) -> Tensor:
    """By how many times fewer steps tell something than there are: by how alike the noise of a step and of the next is,
    in the median of the ranks, of which a few may be slow in half of the window."""
    size = OF_SPREAD * noise.abs().nanmedian(0).values
    bounded = noise.clamp(-2 * size, 2 * size)
    pairs = (bounded[1:] * bounded[:-1]).nanmean(0) / bounded.square().nanmean(0)
    alike = pairs.nanmedian().nan_to_num(0.0)
    alike = alike + (1 + 4 * alike) / WINDOW  # what a short window makes it too small by
    alike = alike.clamp(0.0, MOST_ALIKE)
    return ((1 + alike) / (1 - alike)).clamp(min=FEWER)
