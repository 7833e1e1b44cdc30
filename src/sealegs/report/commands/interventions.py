"""The log of interventions, from events: who decided what, on which evidence, and what came of it."""

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NotRequired, TypedDict

from sealegs.printable import counted, spanned
from sealegs.record.run import Run
from sealegs.record.schema import speakable
from sealegs.record.stability_tax import tax_of
from sealegs.vocabulary import Event

WIDTH = 100


class Entry(TypedDict):
    """An intervention, with the step and the text of its outcome, or null. What its event does not say is missing."""

    step: int
    time: float | str
    number: NotRequired[int]
    incident: NotRequired[int | None]
    request: NotRequired[str | None]
    decided_by: NotRequired[str]
    trigger: NotRequired[str]
    onset: NotRequired[int]
    evidence: NotRequired[str]
    actions: NotRequired[list[dict[str, Any]]]
    acted: NotRequired[bool]
    text: NotRequired[str]
    outcome: dict[str, Any] | None


class Log(TypedDict):
    """What was done to a run. The stability tax is null where no guard has written one."""

    run: str
    interventions: list[Entry]
    qk_clips: list[dict[str, Any]]
    stability_tax: dict[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervention:
    """One entry of the log: the event of the decision, and the event of its outcome if there is one."""

    decided: Event
    outcome: Event | None
    has_ended: bool = False
    """Whether the run is over, so that no outcome will follow."""

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        head = {"step": self.decided.step, "time": self.decided.time}
        outcome = None if self.outcome is None else {"step": self.outcome.step, **self.outcome.detail}
        return {**head, **self.decided.detail, "outcome": outcome}

    @property
    def _came_of_it(self) -> str:
        return "not known: the run ended before it showed" if self.has_ended else "not known yet"

    def __str__(self) -> str:
        """The entry as a paragraph."""
        return self.told(WIDTH)

    def told(self, width: int) -> str:
        """The entry as a paragraph of at most ``width`` columns."""
        detail = self.decided.detail
        when = datetime.fromtimestamp(self.decided.time, UTC)
        head = f"{detail['number']}. step {self.decided.step}, {when:%Y-%m-%d %H:%M:%S} UTC, by {detail['decided_by']}"
        fields = {
            "trigger": f"{detail['trigger']}, since step {detail['onset']}",
            "evidence": detail["evidence"],
            "action": detail["text"]
            if detail["acted"]
            else f"none (shadow mode); it would have been: {detail['text']}",
            "changed": detail.get("changed", ""),
            "outcome": self._came_of_it if self.outcome is None else self.outcome.detail["text"],
        }
        lines = [
            textwrap.fill(str(value), width, initial_indent=f"   {name:<9} ", subsequent_indent=" " * 13)
            for name, value in fields.items()
            if value
        ]
        return "\n".join([textwrap.fill(head, width, subsequent_indent="   "), *lines])


def interventions(events: Iterable[Event]) -> list[Intervention]:
    """The interventions among the events of a run, oldest first, each with its outcome."""
    told = list(events)
    outcomes = {event.detail["intervention"]: event for event in told if event.kind == "outcome"}
    decided = [event for event in told if event.kind == "intervention"]
    has_ended = any(event.kind == "end" for event in told[-1:])
    return [
        Intervention(decided=event, outcome=outcomes.get(event.detail["number"]), has_ended=has_ended)
        for event in decided
    ]


def contract(run: Run) -> dict[str, Any]:
    """As one JSON object."""
    tax = tax_of(run.events)
    told: dict[str, Any] = speakable(
        {
            "run": run.manifest.run_id,
            "interventions": [each.plain() for each in interventions(run.events)],
            "qk_clips": [{"step": event.step, **event.detail} for event in run.events if event.kind == "qk-clip"],
            "stability_tax": None if tax is None else tax.to_plain(),
        }
    )
    return told


def rescaled(events: Iterable[Event]) -> list[str]:
    """Which heads of attention had their queries and keys rescaled: a sentence for each module, since it may have been
    after every tenth step."""
    steps: dict[tuple[str, bool], list[int]] = {}
    heads: dict[tuple[str, bool], set[int]] = {}
    logits: dict[tuple[str, bool], float] = {}
    for event in events:
        if event.kind != "qk-clip":
            continue
        for each in event.detail["modules"]:
            key = str(each.get("module", "")), bool(event.detail["acted"])
            steps.setdefault(key, []).append(event.step)
            heads.setdefault(key, set()).update(each.get("heads", ()))
            logits[key] = max(logits.get(key, 0.0), float(each.get("logit", 0.0)))
    return [
        f"{module}: queries and keys of {counted(len(heads[module, acted]), 'head')} "
        f"{'rescaled' if acted else 'not rescaled (shadow mode)'} {counted(len(at), 'time')}, "
        f"{spanned('step', at[0], at[-1])}; the largest logit was {logits[module, acted]:.4g}"
        for (module, acted), at in steps.items()
    ]


def page(found: Iterable[Intervention]) -> str:
    """The entries, one after the other."""
    return "\n\n".join(map(str, found))
