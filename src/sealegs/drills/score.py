"""Scores a drill from its run folders with and without a guard: was it seen, was harm prevented, what did it cost?"""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from sealegs.drills.catalogue import Drill
from sealegs.record.run import open_run
from sealegs.report.commands.drill import Verdict
from sealegs.report.commands.interventions import interventions
from sealegs.report.postmortem.events import steps_spent
from sealegs.vocabulary import Event

CLOSE = 2.0
"""Largest gap to the clean twin, in clean spreads, at which a run is as good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The score of a drill. Gaps are to the clean twin, in units of the clean spread."""

    drill: Drill
    struck: bool
    watched: float
    """The gap of the run without the guard; NaN if it was lost."""
    guarded: float
    """The gap of the run with the guard; NaN if it was halted."""
    seen: int | None
    """The step of the first skip or alarm from the fault on."""
    latency: int | None
    skipped: int
    done_again: int
    """Steps that were repeated after a rollback."""
    done: tuple[str, ...]
    """The interventions in words."""
    halted: bool
    rank: int | None = None
    """The rank that the first skip or alarm from the fault on names."""
    cause: str | None = None
    """The cause in the post-mortem of the watched run, after its replay."""
    why: str = ""
    """What the replay says, or why there was none."""

    @property
    def is_right(self) -> bool | None:
        """Whether the cause is the injected one, and the rank the struck one if there is one.

        None without an incident, or if no cause is expected.
        """
        wanted = self.drill.causes or self.drill.shown
        if not wanted or not self.why:
            return None
        return self.cause in wanted and self.drill.rank in (None, self.rank)

    @property
    def prevented(self) -> float | None:
        """The share of the harm that was prevented; None if there was none."""
        if not self._is_harm:
            return None
        if math.isnan(self.guarded):
            return 0.0
        return 1.0 if math.isnan(self.watched) else min(max(1 - self.guarded / self.watched, 0.0), 1.0)

    @property
    def _is_harm(self) -> bool:
        return not self.watched <= CLOSE

    @property
    def verdict(self) -> Verdict:
        """The score in a word."""
        if self.halted:
            return "stopped"
        if self.drill.is_benign:
            return "disturbed" if self.done else "left alone"
        if not self.struck:
            return "not struck"
        if math.isnan(self.guarded):
            return "lost"
        if self.guarded > CLOSE:
            is_told = self.seen is not None or self.is_right is True
            return "observed" if self.drill.shown and is_told else "damaged"
        if self._is_harm or self.seen is not None:
            return "survived"
        return "no effect" if abs(self.watched) <= CLOSE else "harmless"


def score(
    drill: Drill,
    at: int,
    watched: Path,
    guarded: Path,
    gaps: tuple[float, float],
    explain: Callable[[Path], tuple[str | None, str]] | None = None,
) -> Score:
    """Score two runs of a drill by their gaps to the twin; ``explain`` gives the cause of what a run shows."""
    run = open_run(guarded)
    since = _since(drill, at)
    found = [event for event in run.events if event.kind in ("skip", "alarm") and event.step is not None]
    first = next((event for event in found if event.step >= since), None)
    seen = None if first is None else first.step
    reason = next((event.detail["reason"] for event in reversed(run.events) if event.kind == "end"), None)
    cause, why = explain(watched) if explain is not None else (None, "")
    skipped, again = steps_spent({"kind": each.kind, "step": each.step, **each.detail} for each in run.events)
    return Score(
        drill=drill,
        struck=not drill.faults or any(event.kind == "fault" for event in run.events),
        watched=gaps[0],
        guarded=gaps[1],
        seen=seen,
        latency=None if seen is None else seen - since,
        skipped=skipped,
        done_again=again,
        done=done_in(run.events),
        halted=reason == "halted",
        rank=None if first is None else _rank_in(first),
        cause=cause,
        why=why,
    )


def done_in(events: Iterable[Event]) -> tuple[str, ...]:
    """The interventions in words. To go on is a decision too, but does nothing."""
    decided = [each.decided.detail for each in interventions(events)]
    return tuple(
        str(detail.get("changed") or detail["text"])
        for detail in decided
        if any(action["action"] != "continue" for action in detail["actions"])
    )


def _rank_in(event: Event) -> int | None:
    """The rank that an event names: its gradient stood out, or its weights differ."""
    named = re.search(r"\brank (\d+)", " ".join((event.detail.get("culprit", ""), event.detail["text"])))
    return None if named is None else int(named[1])


def _since(drill: Drill, at: int) -> int:
    """The step of the first strike; for what breaks by itself, the first step."""
    if not drill.faults:
        return at if drill.control else 0
    return min((fault.step for fault in drill.struck(at)), default=at)
