"""The events of a run in, doubts about its checkpoints out: which were saved after something had begun to go wrong.

A resume asks, where no checkpoint is proven. Standard library only; events of another version count as far as they can
be read.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

from sealegs.record.events import load_events, plain_events
from sealegs.record.interventions import COOL
from sealegs.record.schema import EVENTS

JUDGED = ("skip", "alarm", "halt")
"""Kinds of events that stand for a rejected step, or belong to an incident."""
REPLICAS = "replicas"
"""The detector of ranks that hold different weights."""
ASKED = "asked"
"""Trigger of a person's request, which is no sign of an incident."""


@dataclass(frozen=True, slots=True)
class BadStretch:
    """An incident, as far as the events tell."""

    number: int
    onset: int
    end: int | None = None
    """The step at which the loss was back; None while it is not."""

    def casts_doubt_on(self, step: int) -> bool:
        """Whether a state was saved within it. The step before the onset may have done the damage."""
        return step >= self.onset and (self.end is None or step < self.end)


class Doubts:
    """What the record of a run says against the states that it has saved."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stretches: list[BadStretch] | None = None

    def about(self, step: int) -> str:
        """Why the state before a step may be damaged; empty where nothing says so."""
        if self._stretches is None:  # once, and only where somebody asks: a record may be long
            self._stretches = stretches_of(plain_events(load_events(self._folder / EVENTS)))
        found = next((stretch for stretch in self._stretches if stretch.casts_doubt_on(step)), None)
        return "" if found is None else f"not proven, and saved after the onset of an incident at step {found.onset}"


def stretches_of(events: Sequence[Mapping[str, Any]]) -> list[BadStretch]:
    """The incidents of a run. With a playbook an event closes each; without one, it is over when no step is rejected
    any more. But of ranks that held different weights nothing is over before they are known to be the same again.

    >>> alarm = {"kind": "alarm", "step": 52, "incident": 1, "findings": []}
    >>> stretches_of([alarm]), stretches_of([alarm, {"kind": "guard", "step": 60, "playbook": "standard"}])
    ([BadStretch(number=1, onset=52, end=62)], [BadStretch(number=1, onset=52, end=None)])
    """
    found = bad_stretches(events)
    if any(event.get("playbook") is not None for event in [one for one in events if one["kind"] == "guard"][-1:]):
        return found
    last: dict[int, int] = {}
    apart: set[int] = set()
    for event in events:
        if event["kind"] in JUDGED and _is_step(number := event.get("incident")):
            last[number] = event["step"]
            if any(finding.get("detector") == REPLICAS for finding in _findings(event)):
                apart.add(number)
    return [
        replace(one, end=last[one.number] + COOL)
        if one.end is None and one.number in last and one.number not in apart
        else one
        for one in found
    ]


def bad_stretches(events: Iterable[Mapping[str, Any]]) -> list[BadStretch]:
    """The incidents of a run in order, without those that the run went back behind when it was resumed.

    >>> alarm = {"kind": "alarm", "step": 52, "incident": 1, "findings": [{"lasts": 3}]}
    >>> closed = {"kind": "incident-closed", "step": 90, "number": 1, "start": 50, "recovery_loss": 2.5}
    >>> bad_stretches([alarm]), bad_stretches([alarm, closed])
    ([BadStretch(number=1, onset=50, end=None)], [BadStretch(number=1, onset=50, end=90)])
    >>> bad_stretches([alarm, {"kind": "guard", "step": 40}])
    []
    >>> bad_stretches([alarm, closed, {"kind": "intervention", "step": 30, "trigger": "asked", "onset": 30}])
    [BadStretch(number=1, onset=50, end=90)]
    """
    found: list[BadStretch] = []
    first = last = -2  # of the unbroken row of skips up to here: an incident may have begun with them
    for event in events:
        kind, step, number = event["kind"], event["step"], event.get("incident")
        if kind == "guard":  # a process begins: what comes later than its step will be met again, or not
            found, first, last = [stretch for stretch in found if stretch.onset < step], -2, -2
        elif kind in JUDGED:
            first, last = (first if step == last + 1 else step), step
            if _is_step(number):
                found = _alarmed(found, number, min(first, step - _rows_before(event)))
        elif (
            kind == "intervention" and found and event.get("trigger") != ASKED and _is_step(onset := event.get("onset"))
        ):
            found[-1] = replace(found[-1], onset=min(found[-1].onset, onset))
        elif kind == "incident-closed" and found:
            onset = event["start"] if _is_step(event.get("start")) else found[-1].onset
            found[-1] = replace(found[-1], onset=min(found[-1].onset, onset), end=None)
            if event.get("recovery_loss") is not None:  # of all: an alarm with a new number may come while one is open
                found = [replace(stretch, end=step) if stretch.end is None else stretch for stretch in found]
    return found


def _alarmed(found: list[BadStretch], number: int, onset: int) -> list[BadStretch]:
    """The incidents after an alarm, which belongs to the last one or begins another."""
    if found and found[-1].number == number:
        return [*found[:-1], BadStretch(number, min(found[-1].onset, onset))]
    return [*found, BadStretch(number, onset)]


def _rows_before(event: Mapping[str, Any]) -> int:
    """How many rows before its alarm an incident began, by the finding that looks farthest back."""
    lasts = (finding.get("lasts") for finding in _findings(event))
    return max((rows for rows in lasts if _is_step(rows)), default=1) - 1


def _findings(event: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    findings = event.get("findings")
    yield from (finding for finding in findings if isinstance(finding, dict)) if isinstance(findings, list) else ()


def _is_step(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
