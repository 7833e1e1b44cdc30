"""Messages to a person about events: what happened, what to do first, and where to look."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sealegs.printable import printable
from sealegs.record.schema import INCIDENTS
from sealegs.report.event_text import remarkable
from sealegs.vocabulary import Event, Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message to a person."""

    kind: str
    """The kind of the event: ``alarm``, ``halt``, ..."""
    run: str
    step: int
    title: str
    """What happened, in a few words; the first line."""
    verdict: str
    """What happened, with its numbers."""
    first: str
    """What to do first."""
    page: str
    """Where to look."""
    key: tuple[Any, ...]
    """Messages with equal keys say the same."""
    is_last: bool = False
    """Whether no other message may follow: such messages are never held back."""

    @property
    def text(self) -> str:
        """The whole message as lines."""
        return "\n".join([f"{self.run}: {self.title}", self.verdict, f"first: {self.first}", f"page: {self.page}"])


class Messenger:
    """Writes the messages about one run. Most events, skips among them, need no person and give none."""

    def __init__(self, folder: Path, page: str | None = None) -> None:
        self._folder = folder
        self._page = page
        self._acts = False
        self._playbook: str | None = None
        self._halted = False
        self._last: Row = {}
        self.has_ended = False
        """Whether an event has said how the run ended."""

    def saw(self, row: Row) -> None:
        """Remember the state of the run."""
        if "loss" in row:
            self._last = row

    def message(self, event: Event) -> Message | None:
        """The message about an event, if there is one."""
        detail = event.detail
        match event.kind:
            case "guard":
                self._acts, self._playbook = bool(detail.get("act")), detail.get("playbook")
            case "alarm":
                number = detail.get("incident")
                return self._written(event, f"incident {number} began", self._about_trouble(number), incident=number)
            case "incident-closed":
                number = detail.get("number")
                first = f"nothing; `sealegs postmortem {self._folder}#{number}` writes it up"
                return self._written(event, f"incident {number} ended", first, incident=number)
            case "intervention":
                return self._about_intervention(event)
            case "halt":
                return self._about_halt(event)
            case "stalled":
                first = "look at the process and the machine; stop it and resume if it does not go on"
                return self._written(event, "stands still", first, key=(detail.get("where"),))
            case "folder-lost":
                first = "bring it back to its place if you can: no checkpoint is written until then"
                return self._written(event, "its folder is gone", first, key=(detail.get("text"),))
            case "end":
                return self._about_end(event)
        return None

    def closed(self, how: str = "closed", error: BaseException | None = None) -> Message | None:
        """The message about a run that is over without an event that says how."""
        if self.has_ended:
            return None
        reason = {} if error is None else {"error": f"{type(error).__name__}: {error}"}
        event = Event(kind="end", step=int(self._last.get("step", 0)), time=0.0, detail={"reason": how, **reason})
        return self._about_end(event)

    def _about_trouble(self, number: object) -> str:
        if not self._acts:
            return f"nothing is done about it here; `sealegs check {self._folder}`, and stop the run if it stays"
        if self._playbook in (None, "observe"):
            return f"see whether the loss comes back: the guard only skips; `sealegs check {self._folder}`"
        again = f"if it comes back, `sealegs replay {self._folder}#{number}`"
        return f"nothing yet, playbook {self._playbook} decides; {again}"

    def _about_halt(self, event: Event) -> Message:
        """A weight is not finite, or the budget is spent: the end of the run, unless a playbook handles it."""
        treated = self._acts and self._playbook not in (None, "observe")
        self._halted |= not treated
        title = "halted" if self._acts else "would be halted, but nothing acts on it"
        title = f"would be halted, playbook {self._playbook} decides" if treated else title
        number = event.detail.get("incident")
        first = self._about_trouble(number) if treated else self._check_and_resume
        return self._written(event, title, first, incident=number, is_last=not treated)

    def _about_intervention(self, event: Event) -> Message:
        detail = event.detail
        halts = any(isinstance(action, Mapping) and _is_halt(action) for action in detail.get("actions", ()))
        self._halted |= halts and bool(detail.get("acted"))
        first = self._check_and_resume if halts else "nothing, unless it comes back"
        first += f"; `sealegs interventions {self._folder}` has all that was done"
        number = detail.get("number")
        title = f"intervention {number}: {detail.get('text', '')}"
        return self._written(event, title, first, incident=detail.get("incident"), key=(number,), is_last=halts)

    def _about_end(self, event: Event) -> Message | None:
        reason = str(event.detail.get("reason", "ended"))
        self.has_ended = True
        if reason == "halted" and self._halted:  # the message went out at the decision
            return None
        first = {
            "finished": f"nothing; `sealegs dashboard {self._folder}` draws it",
            "closed": f"see whether it is done; `sealegs dashboard {self._folder}` draws it",
            "interrupted": "resume it from its last checkpoint",
        }.get(reason, self._check_and_resume)
        if event.detail.get("missing") and reason in ("finished", "closed"):
            first = "see to the disk, and whether what is missing can be done without"
        return self._written(event, reason, first, key=(reason,), is_last=True)

    @property
    def _check_and_resume(self) -> str:
        return f"`sealegs check {self._folder}`; mend the cause, then resume from the last healthy checkpoint"

    def _written(
        self,
        event: Event,
        title: str,
        first: str,
        *,
        incident: object = None,
        key: tuple[object, ...] = (),
        is_last: bool = False,
    ) -> Message:
        told = Message(
            kind=event.kind,
            run=self._folder.name,
            step=event.step,
            title=f"{title} (step {event.step})",
            verdict=self._verdict(event),
            first=first,
            page=self._place(incident),
            key=(event.kind, incident, *key),
            is_last=is_last,
        )
        return printable(told)  # names and errors of others are in it, and its line ends are ours

    def _verdict(self, event: Event) -> str:
        try:
            if sentence := remarkable(event):
                return sentence
        except (KeyError, TypeError, ValueError):  # an event of the user's own with that name and other fields
            return event.kind
        why = event.detail.get("error") or event.detail.get("by")
        told = [str(why)] if why else []
        told += [f"{name} {float(self._last[name]):.4g}" for name in ("loss", "grad_norm") if name in self._last]
        told += [f"skipped {skipped}"] if (skipped := event.detail.get("skipped")) else []
        told += [f"missing: {missing}"] if (missing := event.detail.get("missing")) else []
        return ", ".join(told) or "no step was made"

    def _place(self, incident: object) -> str:
        if self._page is not None:
            return self._page.replace("{run}", self._folder.name)
        folder = self._folder.absolute()
        return f"{socket.gethostname()}:{folder if incident is None else folder / INCIDENTS / str(incident)}"


def _is_halt(action: Mapping[str, Any]) -> bool:
    return "halt" in str(action.get("action", "")).lower()
