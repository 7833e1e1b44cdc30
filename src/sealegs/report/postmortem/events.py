"""What was done about an incident, what came of it and what it cost, from its events. Standard library only."""

import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise

from sealegs.printable import counted, spanned
from sealegs.report.event_text import OBSERVES, is_observing
from sealegs.report.postmortem.numbers import BASELINE, Met, Plain, finite
from sealegs.report.postmortem.values import Cost

_SKIPPING = ("skip", "alarm", "halt")
"""Kinds of events that may report a skipped update."""


def recovery(met: Met, events: Sequence[Plain]) -> tuple[str, ...]:
    """What was done about the incident; empty where the log does not tell."""
    if not events:
        return ()
    lines = []
    skips = _skips(met, events)
    done = [event for event in skips if event.get("acted")]
    if skips:
        steps = [int(event["step"]) for event in done or skips]
        told = f"{counted(len(steps), 'update')}, {spanned('step', min(steps), max(steps))}"
        lines.append(f"skipped {told}" if done else f"none was skipped (shadow mode); it would have been {told}")
    for event in _interventions(met, events):
        parameters = "; ".join(map(_parameters, event.get("actions") or ()))
        text = f"{event.get('text', 'an intervention')}{f' ({parameters})' if parameters else ''}"
        changed = f": {event['changed']}" if event.get("changed") else ""
        text = f"{text}{changed}" if event.get("acted") else f"none (shadow mode); it would have been: {text}"
        lines.append(f"step {event['step']}, by {event.get('decided_by', 'somebody')}: {text}")
    lines += [str(event.get("text", "")) for event in during(met, events) if event["kind"] == "counted-back"]
    observes = is_observing([event.get("playbook") for event in events if event["kind"] == "guard"])
    if not lines:
        why = f"; {OBSERVES}" if observes else ""
        return (f"none: no update was skipped, and nothing else was done{why}",)
    return (*lines, *([f"nothing else was to be done: {OBSERVES}"] if observes else []))


def outcome(met: Met, events: Sequence[Plain]) -> tuple[str, ...]:
    """Where the trajectory resumed; empty while that is open."""
    numbers = {event.get("number") for event in _interventions(met, events)}
    told = [
        f"intervention {event['intervention']} {event['text']}"
        for event in events
        if event["kind"] == "outcome" and event.get("intervention") in numbers
    ]
    later = [event for event in events if event["kind"] in ("halt", "end") and event["step"] >= met.start]
    halted = next((event for event in later if event["kind"] == "end" or event.get("acted", True)), None)
    ours = [event for event in during(met, events) if event["kind"] == "halt"]
    only_told = next((event for event in ours if not event.get("acted", True)), None)
    if only_told is not None:
        told.append(f"the run was not halted (shadow mode); it would have been at step {only_told['step']}")
    if met.end is not None and met.recovery_loss is not None:
        limit = "" if met.limit is None else f", limit {met.limit:.4g}"
        after = counted(met.end - met.start, "step")
        text = f"the trajectory resumed at step {met.end}, {after} after the onset: loss {met.recovery_loss:.4g}"
        return (f"{text} (mean of 10 rows{limit})", *told)
    if halted is not None and (halted["kind"] == "halt" or halted.get("reason") in ("halted", "failed")):
        return (f"did not resume: the run was halted at step {halted['step']}", *told)
    if met.end is not None or met.trajectory in ("lingering", "divergent"):
        return (f"did not resume: {met.trajectory or 'closed'} at step {met.end or met.last}", *told)
    return tuple(told)


def cost(met: Met, manifest: Plain, events: Sequence[Plain]) -> Cost:
    """Steps that were skipped or repeated; without interventions, the steps until the trajectory resumed."""
    back = (event for event in during(met, events) if event["kind"] == "counted-back")
    ours = {id(event) for event in (*_skips(met, events), *_interventions(met, events), *back)}
    done = [event for event in events if id(event) in ours]
    skipped, again = steps_spent(done)
    downtime = sum(float(event.get("seconds", 0.0)) for event in done if _is_done(event, "intervention"))
    counted = f"{skipped} skipped, {again} done once more" if again and skipped else "done once more"
    counted, lost = counted if again else "skipped", skipped + again
    if not lost:
        lost = (met.last if met.end is None else met.end) - met.start
        counted = f"from the onset to {'the last one' if met.recovery_loss is None else 'where it resumed'}"
    return Cost(
        lost_steps=lost,
        counted=counted,
        seconds_per_step=_seconds_per_step(met.before[-BASELINE:]),
        price_per_hour=manifest.get("price_per_hour") or None,
        downtime_s=downtime + _stopped(met, events),
    )


def steps_spent(events: Iterable[Plain]) -> tuple[int, int]:
    """Counts of skipped steps and of repeated ones; a step that was both counts as repeated."""
    skipped: list[int] = []
    settled = again = 0
    for event in events:
        if _is_done(event, "intervention"):
            back_to = int(event.get("to_step", event["step"]))
            skipped = [step for step in skipped if step < back_to]
            again += int((event.get("cost") or {}).get("steps", 0))
        elif event["kind"] == "counted-back":  # their numbers are used again, but no rollback event counts them
            last = max(len(skipped) - int(event.get("steps", 0)), 0)
            settled, skipped = settled + len(skipped) - last, skipped[:last]
        elif _is_done(event, *_SKIPPING) and event.get("skipped_in_a_row"):
            skipped.append(int(event["step"]))
    return settled + len(skipped), again


def time_of(met: Met, events: Sequence[Plain]) -> float | None:
    """The time at which the incident began."""
    rows = (row["time"] for row in met.course if "time" in row)
    alarms = (e["time"] for e in events if e["kind"] == "alarm" and e.get("incident") == met.number and "time" in e)
    return next(rows, next(alarms, None))


def during(met: Met, events: Sequence[Plain]) -> Sequence[Plain]:
    """The events from the onset to the end of the incident in the order written, since steps may go back in between.

    Where the record has no alarm of this incident, the steps of the events decide.
    """
    alarms = [place for place, e in enumerate(events) if e["kind"] == "alarm" and e.get("incident") == met.number]
    if not alarms:
        last = math.inf if met.end is None else met.end
        return [event for event in events if met.start <= event["step"] <= last]
    first = alarms[0]
    while first and events[first - 1]["step"] >= met.start:
        first -= 1
    closed = (place for place, e in enumerate(events) if e["kind"] == "incident-closed" and e["number"] == met.number)
    if (end := max(closed, default=None)) is not None:
        return events[first : end + 1]
    end = next((place for place, e in enumerate(events) if place > alarms[-1] and _is_past(met, e)), len(events))
    return events[first:end]


def _is_past(met: Met, event: Plain) -> bool:
    """Whether an event is of after an incident that no event closed: another one's alarm, or of a step after it."""
    is_another = event["kind"] == "alarm" and event.get("incident", met.number) != met.number
    return is_another or bool(event["step"] > met.course_end)


def _skips(met: Met, events: Sequence[Plain]) -> list[Plain]:
    """Updates that were skipped, or would have been in shadow mode."""
    return [event for event in during(met, events) if event["kind"] in _SKIPPING and event.get("skipped_in_a_row")]


def _is_done(event: Plain, *kinds: str) -> bool:
    """Whether an event of these kinds took effect, which in shadow mode it does not."""
    return event["kind"] in kinds and bool(event.get("acted"))


def _interventions(met: Met, events: Sequence[Plain]) -> list[Plain]:
    """The interventions during the incident, those by people included."""
    meant = [event for event in events if event["kind"] == "intervention" and event.get("incident") == met.number]
    meanwhile = [e for e in during(met, events) if e["kind"] == "intervention" and e.get("incident") is None]
    return sorted([*meant, *meanwhile], key=events.index)


def _parameters(action: Plain) -> str:
    """``rollback back=0, skip=10``"""
    pairs = (f"{name}={value}" for name, value in action.items() if name != "action" and value is not None)
    return f"{action.get('action', '')} {', '.join(pairs)}".strip()


def _seconds_per_step(rows: Sequence[Plain]) -> float | None:
    if seconds := finite("step_s", rows):
        return statistics.median(seconds)
    times = [(row["step"], row["time"]) for row in rows if "time" in row]
    apart = [(later - time) / (after - step) for (step, time), (after, later) in pairwise(times) if after > step]
    return statistics.median(apart) if apart else None


def _stopped(met: Met, events: Sequence[Plain]) -> float:
    """Seconds without training: up to each resume whose previous process ended within the incident."""
    stopped = 0.0
    rows = [row for row in (*met.before, *met.course, *met.line) if "time" in row]
    for event in (event for event in events if event["kind"] == "resume" and "time" in event):
        last = max((row for row in rows if row["time"] < event["time"]), key=lambda row: row["time"], default=None)
        if last is not None and met.start <= last["step"] <= met.course_end:
            stopped += event["time"] - last["time"]
    return stopped
