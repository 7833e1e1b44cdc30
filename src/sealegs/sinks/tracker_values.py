"""What every tracker shows of manifests, rows and events: the same names and the same words in each.

All text on its way to a tracker goes through here, and can be seen: names of others do not end a line or hide anything.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from sealegs.printable import printable, visible
from sealegs.report.event_text import remarkable
from sealegs.vocabulary import Event, Row

Level: TypeAlias = Literal["info", "warn", "error"]

NONFINITE = "nonfinite"
"""``nonfinite/loss`` is 1 at the steps whose loss is NaN or infinite: charts leave those out."""

_LEVELS: dict[str, Level] = {
    "skip": "info",
    "remark": "info",
    "fault": "info",
    "probe": "info",
    "outcome": "info",
    "incident-closed": "info",
    "alarm": "warn",
    "intervention": "warn",
    "stalled": "warn",
    "checkpoint-failed": "warn",
    "folder-lost": "error",
    "folder-back": "info",
    "halt": "error",
}
_COUNTED = {"skipped_in_all": "skips", "incident": "incidents", "number": "interventions"}
"""Numbers that events carry, and the series that each becomes. Nothing is counted here, so a resume goes on."""
_COUNTING = {"skip": ("skipped_in_all",), "alarm": ("skipped_in_all", "incident"), "intervention": ("number",)}


@dataclass(frozen=True, slots=True)
class TrackerMark:
    """An event as a tracker shows it."""

    step: int
    level: Level
    title: str
    text: str


def mark(event: Event) -> TrackerMark | None:
    """The mark for an event that a person at the charts should know of; None for most events.

    >>> mark(Event(kind="skip", step=7, time=0.0, detail={"text": "step 7  SKIP  loss spike: 9"}))
    TrackerMark(step=7, level='info', title='skip at step 7', text='step 7  SKIP  loss spike: 9')
    """
    if event.kind == "end":
        reason, detail = str(event.detail.get("reason", "")), event.detail
        level: Level = "info" if reason in ("finished", "interrupted") else "error"
        why = detail.get("error") or detail.get("by")
        text = f"{reason}: {why}" if why else reason
        text += f"; skipped {detail['skipped']}" if detail.get("skipped") else ""
        text += f"; missing: {detail['missing']}" if detail.get("missing") else ""
        return printable(TrackerMark(event.step, level, f"the run is {reason}", text))
    if event.kind not in _LEVELS:
        return None
    try:
        text = remarkable(event) or event.kind
    except (KeyError, TypeError, ValueError):  # an event of the user's own with that name and other fields
        text = event.kind
    return printable(TrackerMark(event.step, _LEVELS[event.kind], f"{event.kind} at step {event.step}", text))


def counts(event: Event) -> dict[str, float]:
    """The numbers of skipped steps, incidents and interventions so far, where the event has them.

    >>> counts(Event(kind="alarm", step=7, time=0.0, detail={"incident": 2, "skipped_in_all": 5}))
    {'skips': 5.0, 'incidents': 2.0}
    """
    found = {_COUNTED[name]: event.detail.get(name) for name in _COUNTING.get(event.kind, ())}
    return {name: float(value) for name, value in found.items() if isinstance(value, int)}


def numbers(row: Row) -> dict[str, float]:
    """The numbers of a row by signal, and a mark for each that is not finite.

    >>> numbers({"step": 7, "time": 1.5, "loss": float("nan"), "batch_hash": "9f"})
    {'loss': nan, 'nonfinite/loss': 1.0}
    """
    found = {visible(name): float(value) for name, value in row.items() if _is_signal(name, value)}
    return found | {f"{NONFINITE}/{name}": 1.0 for name, value in found.items() if not math.isfinite(value)}


def settings(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The settings by which people compare runs, nested as they are.

    >>> settings({"settings": {"lr": 0.1}, "seed": 1, "dtype": None, "run_id": "a1", "versions": {"torch": "2.9"}})
    {'lr': 0.1, 'versions': {'torch': '2.9'}, 'seed': 1, 'run_id': 'a1'}
    """
    chosen = {**manifest.get("settings", {}), "versions": manifest.get("versions", {})}
    chosen |= {key: manifest[key] for key in ("seed", "dtype", "run_id") if manifest.get(key) is not None}
    return printable(chosen)


def earlier(manifest: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """What a tracker returned for this run when it was started before; empty if it was not.

    >>> earlier({"trackers": [{"name": "wandb", "run_id": "a"}, {"name": "mlflow", "run_id": "b"}]}, "mlflow")
    {'name': 'mlflow', 'run_id': 'b'}
    """
    entries = [*(manifest.get("trackers") or ()), manifest.get("tracker") or {}]  # before 0.1 there was only one
    return next((entry for entry in entries if entry.get("name") == name), {})


def plain_text(value: Any) -> str:
    """A setting or an event's field as text; lists and tables as JSON."""
    return json.dumps(value, default=str) if isinstance(value, Mapping | list | tuple) else visible(str(value))


def _is_signal(name: str, value: object) -> bool:
    return name not in ("step", "time") and not isinstance(value, str)
