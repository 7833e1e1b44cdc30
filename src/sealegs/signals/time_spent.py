"""Counts where the time of a guarded loop goes: to the loop itself, or to what keeps it standing.

On a GPU the host runs ahead of the device, and its own time says little about what a run pays. There a part begins and
ends with an event in the stream: the time between them has passed for the device, whether it computed or had to wait
for the host. The events are read when they have come to pass, and nobody waits for them.
"""

import time
from collections import defaultdict, deque
from collections.abc import Mapping
from contextlib import suppress
from itertools import pairwise
from statistics import median
from typing import Any, Literal, TypeAlias, get_args

import torch

from sealegs.record.stability_tax import PARTS, StabilityTax
from sealegs.vocabulary import Row

Part: TypeAlias = Literal[
    "signals", "verdicts", "snapshots", "copies", "checkpoints", "probes", "recomputed", "recovery", "own", "paused"
]
"""What time is charged to. ``own`` is what the loop would do without a guard, ``paused`` what is no training, and
``copies`` what of snapshots is not of every step."""
_EACH_STEP = frozenset(("signals", "verdicts", "snapshots", "own"))
_EVERY = 7
"""On a GPU, steps from one that is timed to the next. Steps are sampled every tenth, mostly: it meets one in ten."""
_FIRST = 70
"""Steps at the beginning that are all timed and stand for themselves: what is made once, at the first step or the first
that is sampled, must not count seven times."""
_MOST_PENDING = 256
_PLAIN_STEPS = 256
"""Steps whose median tells how long a step takes while no checkpoint is being written."""


class _Span:
    """Charges what is done inside the ``with`` block to a part; parts inside it are left out."""

    def __init__(self, spent: "TimeSpent", part: Part) -> None:
        self._spent = spent
        self._part = part

    def __enter__(self) -> None:
        self._spent.enter(self._part)

    def __exit__(self, *_: object) -> None:
        self._spent.leave()


class TimeSpent:
    """The time of a run by what it was spent on, from the first process on that could tell."""

    def __init__(self) -> None:
        self._spans = {part: _Span(self, part) for part in get_args(Part)}
        self._is_cuda = False
        self._began = self._since = time.perf_counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        """What stands for itself: on the host all there is."""
        self._sampled: defaultdict[str, float] = defaultdict(float)
        """What was timed in one step of several, and stands for all of them."""
        self._inside: list[Part] = []
        self._is_timed = True
        """Whether the parts of the step under way are timed."""
        self._lap: list[tuple[Part | None, Any]] = []
        """Events of a stretch on the device, each with the part that ends there."""
        self._lap_from = 0
        """How deep the parts were nested where the stretch began."""
        self._pending: deque[tuple[bool, list[tuple[Part | None, Any]]]] = deque(maxlen=_MOST_PENDING)
        """Stretches that have not come to pass, each with whether its step stands for others, too."""
        self._steps = self._timed_steps = 0
        """All steps, and those of them that were timed and stand for others."""
        self._skipped = self._repeated = 0
        self._before = StabilityTax(whole_s=0.0, steps=0, parts={})
        """What earlier processes of the run have paid."""
        self._plain_steps_s: deque[float] = deque(maxlen=_PLAIN_STEPS)
        self._slowed_s = 0.0
        """How much longer steps took while a checkpoint was being written."""

    def follow(self, device: torch.device) -> None:
        """Go by the time of a device from here on: that of the model."""
        self._is_cuda = device.type == "cuda"

    def of(self, part: Part) -> _Span:
        """A ``with`` block whose time is charged to a part."""
        return self._spans[part]

    def begin_step(self) -> None:
        """A step is about to be decided."""
        self._steps += 1
        self._is_timed = not self._stands_for_others or self._steps % _EVERY == 0
        self._timed_steps += self._stands_for_others and self._is_timed
        while self._pending and self._pending[0][1][-1][1].query():
            self._settle(*self._pending.popleft())

    @property
    def _stands_for_others(self) -> bool:
        """Whether a step that is timed now stands for those around it."""
        return self._is_cuda and self._steps > _FIRST

    def enter(self, part: Part) -> None:
        """Charge the time from here on to a part, until ``leave``."""
        if self._is_cuda:
            self._turn_on_device(part)
        else:
            self._turn_on_host()
        self._inside.append(part)

    def leave(self) -> None:
        """The part is over; the one around it goes on."""
        if self._is_cuda:
            self._turn_on_device(None)
        else:
            self._turn_on_host()
        self._inside.pop()
        if self._lap and len(self._inside) <= self._lap_from:
            self._pending.append((self._stands_for_others, self._lap))
            self._lap = []

    def _turn_on_host(self) -> None:
        """Charge the time since the last turn to the part that it was spent on."""
        now = time.perf_counter()
        if self._inside:
            self._seconds[self._inside[-1]] += now - self._since
        self._since = now

    def _turn_on_device(self, to: Part | None) -> None:
        """The same by an event in the stream, where a stretch is timed or begins."""
        part = self._inside[-1] if self._inside else None
        begins = to is not None and not self._lap and (self._is_timed or to not in _EACH_STEP)
        if not (self._lap or begins) or torch.cuda.is_current_stream_capturing():
            return
        if begins:
            self._lap_from = len(self._inside)
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        is_charged = not begins and (self._is_timed or part not in _EACH_STEP)
        self._lap.append((part if is_charged else None, event))

    def _settle(self, stands_for_others: bool, lap: list[tuple[Part | None, Any]]) -> None:
        for (_, before), (part, event) in pairwise(lap):
            if part is not None:
                seconds = self._sampled if stands_for_others and part in _EACH_STEP else self._seconds
                with suppress(RuntimeError):  # of another device, where the loop has changed it: that is not counted
                    seconds[part] += before.elapsed_time(event) / 1000

    def saw(self, row: Row, *, is_skipped: bool) -> None:
        """A step is judged: what it took, and whether it was in vain."""
        self._skipped += is_skipped
        step_s = row.get("step_s")
        if not isinstance(step_s, float):
            return
        if "saving" not in row:
            self._plain_steps_s.append(step_s)
        elif self._plain_steps_s:  # the thread that writes takes time from the loop
            self._slowed_s += step_s - median(self._plain_steps_s)

    def went_back(self, steps: int) -> None:
        """So many steps are to be done again."""
        self._repeated += steps

    def tax(self, price_per_hour: float | None = None) -> StabilityTax:
        """What the run has paid until now."""
        whole = time.perf_counter() - self._began
        scale = (self._steps - _FIRST) / self._timed_steps if self._timed_steps else 0.0
        names = {*self._seconds, *self._sampled}
        spent = {name: self._seconds.get(name, 0.0) + scale * self._sampled.get(name, 0.0) for name in names}
        spent["snapshots"] = spent.get("snapshots", 0.0) + spent.pop("copies", 0.0)
        spent["checkpoints"] = spent.get("checkpoints", 0.0) + max(self._slowed_s, 0.0)
        beside = sum(seconds for name, seconds in spent.items() if name != "own")
        # of a step that was in vain, all but what is counted already
        step_s = max(whole - beside, 0.0) / self._steps if self._steps else 0.0
        spent |= {"skipped": self._skipped * step_s, "repeated": self._repeated * step_s}
        before = self._before
        return StabilityTax(
            whole_s=round(before.whole_s + whole, 3),
            steps=before.steps + self._steps,
            parts={name: round(before.parts.get(name, 0.0) + max(spent.get(name, 0.0), 0.0), 3) for name in PARTS},
            price_per_hour=price_per_hour,
        )

    def state_dict(self) -> dict[str, Any]:
        """What was paid until now, and when that was, as JSON values."""
        return {"tax": self.tax().to_plain(), "time": time.time()}

    def load_state_dict(self, state: Mapping[str, Any], left_off_at: float | None, *, was_down: bool) -> None:
        """Go on from what another process had paid when it was saved; its last sign of life was at ``left_off_at``.

        What it did after that is done again, and until now the run ``was_down``, unless it had finished.
        """
        if self._steps:  # it is this process that goes back to an earlier state of its own
            return
        try:
            before, saved_at = StabilityTax.from_plain(state["tax"]), float(state["time"])
        except (KeyError, TypeError, ValueError):  # of an older version: it starts from nothing
            return
        parts, whole = dict(before.parts), before.whole_s
        if left_off_at is not None:
            down = time.time() - left_off_at if was_down else 0.0
            for name, seconds in (("repeated", left_off_at - saved_at), ("downtime", down)):
                parts[name] = parts.get(name, 0.0) + max(seconds, 0.0)
                whole += max(seconds, 0.0)
        self._before = StabilityTax(whole_s=whole, steps=before.steps, parts=parts)
