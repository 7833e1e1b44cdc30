"""Chooses how an optimizer that cannot be told to skip is kept from a bad update: taken back, or not called at all.

Where the device takes steps back, the host never waits, and every step costs a copy of what it changes. Where the host
decides, nothing is copied, and the host waits for each verdict. Which is cheaper depends on the model's size and on the
host. So both are tried on the run itself, some steps each in turn: the updates are the same, bit for bit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Literal, TypeAlias, get_args

import torch

from sealegs.errors import ConfigError

Way: TypeAlias = Literal["device", "host"]
Asked: TypeAlias = Literal["auto", "device", "host"]

ASKED = 4
"""Steps before which all ranks are asked whether they can take them back: until all memory is made."""
BEGIN = 10
"""Steps before anything is measured: the first make memory and compile kernels."""
BLOCK, DROPPED, BLOCKS = 7, 3, 6
"""Steps in a row that go one way, those of them that are not counted, and how many such blocks there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipping:
    """How updates are skipped, in the place of True: ``act=Skipping(way="device")``."""

    way: Asked = "auto"
    """For an optimizer whose kernels cannot be told to skip, on CUDA: ``"device"`` makes its step and takes it back
    there, ``"host"`` waits for each verdict, ``"auto"`` measures both and takes the cheaper."""
    fuse: bool = False
    """Turn ``fused`` on where torch's ``Adam``, ``AdamW`` and ``SGD`` have it off: then nothing is copied, and nobody
    waits. The last bits of the weights differ from those without."""

    def __post_init__(self) -> None:
        if self.way not in get_args(Asked):
            raise ConfigError(f"Skipping.way={self.way!r}: one of {', '.join(get_args(Asked))}")
        if not isinstance(self.fuse, bool):
            raise ConfigError(f"Skipping.fuse={self.fuse!r}: True or False")


class SkipWay:
    """Which way the next step goes, of a run in which both may be possible."""

    def __init__(
        self,
        asked: Asked,
        *,
        clock: Callable[[], Any] | None = None,
        agree: Callable[[bool], bool] = lambda mine: mine,
    ) -> None:
        """``clock()`` marks a moment on the device; ``agree`` says whether something is so on all ranks."""
        self._clock = clock or _on_the_device
        self._agree = agree
        self._steps = 0
        self._marks: list[Any] = []
        self.way: Way | None = None if asked == "auto" else asked
        """None until it is chosen."""
        self.measured: dict[Way, float] = {}
        """Milliseconds of a step, either way."""

    def next(self, *, is_possible: bool) -> Way:
        """The way of the step that comes. Ranks make their steps together, and go the same way: where one of them
        cannot take a step back, the host decides on all."""
        if self.way == "host":
            return "host"
        if not (self._agree(is_possible) if self._steps < ASKED else is_possible):
            self.way = "host"
        elif self.way is None and self._steps == BEGIN + BLOCKS * BLOCK:
            self.way = self._chosen()
        return self.way or self._tried()

    def stepped(self) -> None:
        """A step's update is on its way to the device."""
        self._steps += 1
        if self.way is None and self._steps >= BEGIN:
            self._marks.append(self._clock())

    def _tried(self) -> Way:
        block = max(0, self._steps - BEGIN) // BLOCK
        return "host" if block % 2 else "device"

    def _chosen(self) -> Way:
        """The cheaper one. It waits for the device, once."""
        took: dict[Way, list[float]] = {"device": [], "host": []}
        for place, (before, now) in enumerate(pairwise(self._marks)):
            if place % BLOCK >= DROPPED:
                now.synchronize()
                took["host" if place // BLOCK % 2 else "device"].append(before.elapsed_time(now))
        self._marks.clear()
        self.measured = {way: round(median(times), 3) for way, times in took.items()}
        return "device" if self._agree(self.measured["device"] <= self.measured["host"]) else "host"


def _on_the_device() -> torch.cuda.Event:
    mark = torch.cuda.Event(enable_timing=True)
    mark.record()
    return mark
