"""Moments of a process's life at which it is killed: announced by it as they come, or met by it in a system call."""

import os
import random
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple

from sealegs.recovery.playbook_runner import PlaybookRunner
from sealegs.state.checkpoints import Checkpoints


class Phase(NamedTuple):
    """A part of a life, and about what there is of it."""

    weight: int
    """How often it is chosen."""
    times: int
    """How often it comes in a life."""
    lasts_s: float
    calls: int
    """System calls for files that are made in it; 0 where there are hardly any."""


PHASES = {
    "training": Phase(4, 50, 0.006, 0),
    "saving": Phase(5, 3, 0.03, 60),
    "rolling back": Phase(5, 1, 0.05, 33),
    "resuming": Phase(4, 1, 0.15, 53),
    "closing": Phase(3, 1, 0.04, 6),
}
SIGNALS = {signal.SIGKILL: 2, signal.SIGTERM: 1, signal.SIGINT: 1}
"""How often each is chosen."""
CALLS = frozenset({"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "os.scandir", "shutil.rmtree"})
"""What Python tells of before it asks the system for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """When to kill, with which signal."""

    phase: str
    count: int
    """The how manieth time that the phase begins in this life."""
    signal: int
    delay_s: float = 0.0
    """So long after its beginning, by the clock of whoever watches."""
    calls: int = 0
    """Or, where it is not 0, before this of the system calls that are made in it."""
    at_latest: int = sys.maxsize
    """The step of this life at which it is killed where the phase does not come."""
    is_graceful: bool = False
    """Whether the process handles the signal, as a job does that saves before it stops."""
    again_after_s: float | None = None
    """When the same signal comes once more."""

    def __str__(self) -> str:
        when = f"call {self.calls}" if self.calls else f"{1000 * self.delay_s:.0f} ms"
        how = " handled" if self.is_graceful else ""
        again = "" if self.again_after_s is None else f", again after {1000 * self.again_after_s:.0f} ms"
        return f"{self.phase} {self.count}, {when}, {signal.Signals(self.signal).name}{how}{again}"


def drawn(chance: random.Random, phases: Sequence[str]) -> Moment:
    """A moment in one of these phases."""
    (name,) = chance.choices(phases, [PHASES[phase].weight for phase in phases])
    phase = PHASES[name]
    (number,) = chance.choices(list(SIGNALS), list(SIGNALS.values()))
    is_graceful = number != signal.SIGKILL and chance.random() < 0.5
    return Moment(
        phase=name,
        count=chance.randint(1, phase.times),
        signal=number,
        delay_s=chance.uniform(0, phase.lasts_s),
        calls=chance.randint(1, phase.calls) if phase.calls and chance.random() < 0.5 else 0,
        at_latest=chance.randint(10, 60) + (40 if name in ("saving", "rolling back") else 0),
        is_graceful=is_graceful,
        again_after_s=chance.uniform(0, 0.05) if is_graceful and chance.random() < 0.2 else None,
    )


class Announcer:
    """Tells of the phases of this process as they begin, and kills it where the moment is a system call."""

    def __init__(self, tell: Callable[[str, Any], None], moment: Moment | None) -> None:
        self._tell = tell
        self._moment = moment
        self._begun: Counter[str] = Counter()
        self._calls = 0
        self._here = threading.local()
        self._during(Checkpoints, "_write", "saving")
        self._during(PlaybookRunner, "_carry_out", "rolling back")
        if moment is not None and moment.calls:
            sys.addaudithook(self._called)

    def begin(self, phase: str) -> None:
        """From here on this thread is in it, until it begins another one."""
        self._here.phase = phase
        self._begun[phase] += 1
        self._tell(phase, self._begun[phase])

    @contextmanager
    def _within(self, phase: str) -> Iterator[None]:
        before = getattr(self._here, "phase", None)
        self.begin(phase)
        try:
            yield
        finally:
            self._here.phase = before

    def _during(self, owner: type, name: str, phase: str) -> None:
        function = getattr(owner, name)

        @wraps(function)
        def announced(*arguments: Any, **options: Any) -> Any:
            with self._within(phase):
                return function(*arguments, **options)

        setattr(owner, name, announced)

    def _called(self, event: str, _: tuple[Any, ...]) -> None:
        moment = self._moment
        if moment is None or event not in CALLS or getattr(self._here, "phase", None) != moment.phase:
            return
        if self._begun[moment.phase] >= moment.count:
            self._calls += 1
            if self._calls == moment.calls:
                self._tell("killed", moment.phase)
                os.kill(os.getpid(), moment.signal)
