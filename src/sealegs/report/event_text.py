"""The sentences about events that a person should read; standard library only, for terminals, pages and trackers."""

from collections.abc import Mapping, Sequence
from typing import Any

from sealegs.printable import printable
from sealegs.vocabulary import Event

OBSERVING = "observe"
"""The name of a playbook without rungs, as guard events have it."""
OBSERVES = (
    "its playbook observes (`Playbook.observe()`): it skips rejected updates, keeps capsules and halts, and never "
    "rolls back, lowers a rate or takes data out"
)


def is_observing(playbooks: Sequence[Any]) -> bool:
    """Whether the newest of the playbooks that guard events name takes no action."""
    return playbooks[-1:] == [OBSERVING]


def remarkable(event: Event) -> str | None:
    """A sentence, if the event is one that a person at the terminal should read; otherwise None.

    It is one line: events quote names and texts of others, in which what cannot be seen is spelt out.
    """
    detail = printable(event.detail)
    match event.kind:
        case "resume":
            return how_resumed(detail)
        case "resume-audit":
            words = [f"{name}: {told}" for name, told in detail["not_as_saved"].items()] + list(detail["changed"])
            return f"not as it was before the resume: {'; '.join(words)}" if words else None
        case "sink-failed":
            if detail.get("goes_on"):
                return str(detail["reason"])
            return f"{detail['sink']} is off from here on, the run goes on: {detail['reason']}"
        case "skip" | "alarm" | "halt" | "remark" | "fault":
            return str(detail["text"])
        case "silent-corruption":
            return f"step {event.step}  {detail['text']}"
        case "no-recompute":
            return f"step {event.step}  batches are not computed again: {detail['reason']}"
        case "intervention":
            done = "" if detail["acted"] else " (not done: shadow mode)"
            return f"step {event.step}  {detail['text']}{done}: {detail['evidence']}  {detail['changed']}".rstrip()
        case "outcome" | "incident-look" | "incident-closed" | "snapshots" | "folder-lost" | "folder-back":
            return str(detail["text"])
        case "weights-excused":
            return f"step {event.step}  the weights are let off: {detail['reason']}"
        case "qk-clip":  # after every tenth step, perhaps: the first is news
            done = "" if detail["acted"] else " (not done: shadow mode)"
            return f"step {event.step}  {detail['text']}{done}" if detail["number"] <= 1 else None
        case "probe":
            found = "bad too" if detail["is_condemned"] else "as it should be"
            tried = detail.get("tried", 1)
            subject = "a batch from before has a" if tried == 1 else f"{tried} batches from before have a mean"
            return f"step {event.step}  {subject} loss of {detail['loss']:.4g}: {found}"
        case "checkpoint-failed":
            return f"no checkpoint at step {event.step}, the run goes on: {detail['reason']}"
        case "capsule-failed":
            return f"the capsule lacks something, the run goes on: {detail['reason']}"
        case "stalled":
            return f"no step for {detail['seconds']:.0f} s, waiting in {detail['where']}"
    return None


def how_resumed(detail: Mapping[str, Any]) -> str:
    """Where a resumed run goes on and why there, and with which other settings.

    >>> how_resumed({"checkpoint": 20, "passed_over": {"40": "suspect"}, "because": "no checkpoint is proven yet"})
    'passed over checkpoint 40: suspect; goes on at step 20 (no checkpoint is proven yet)'
    """
    words = [f"passed over checkpoint {step}: {reason}" for step, reason in detail["passed_over"].items()]
    words += [f"{name} changed from {old} to {new}" for name, (old, new) in detail.get("changed", {}).items()]
    start, because = detail["checkpoint"], detail.get("because")
    words.append("there is no checkpoint yet: starts anew" if start is None else f"goes on at step {start}")
    return "; ".join(words) + (f" ({because})" if because else "")
