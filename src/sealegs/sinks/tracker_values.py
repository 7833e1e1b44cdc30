"""Manifests, rows and events in, what every tracker shows of them out: the same names and the same words in each."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

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
    "halt": "error",
}
_COUNTED = {"skipped_in_all": "skips", "incident": "incidents", "number": "interventions"}
"""What events know of their own number, and the series that it becomes: nothing to count, so a resume goes on."""
_COUNTING = {"skip": ("skipped_in_all",), "alarm": ("skipped_in_all", "incident"), "intervention": ("number",)}


@dataclass(frozen=True, slots=True)
class TrackerMark:
    """Something that happened, as a tracker shows it."""

    step: int
    level: Level
    title: str
    text: str


def mark(event: Event) -> TrackerMark | None:
    """What a person who looks at the charts should know of an event; most are none of their business.

    >>> mark(Event(kind="skip", step=7, time=0.0, detail={"text": "step 7  SKIP  loss spike: 9"}))
    TrackerMark(step=7, level='info', title='skip at step 7', text='step 7  SKIP  loss spike: 9')
    """
    if event.kind == "end":
        reason, detail = str(event.detail.get("reason", "")), event.detail
        level: Level = "info" if reason in ("finished", "interrupted") else "error"
        why = detail.get("error") or detail.get("by")
        text = f"{reason}: {why}" if why else reason
        text += f"; skipped {detail['skipped']}" if detail.get("skipped") else ""
        return TrackerMark(event.step, level, f"the run is {reason}", text)
    if event.kind not in _LEVELS:
        return None
    try:
        text = remarkable(event) or event.kind
    except (KeyError, TypeError, ValueError):  # somebody's own event of that name, with other particulars
        text = event.kind
    return TrackerMark(event.step, _LEVELS[event.kind], f"{event.kind} at step {event.step}", text)


def counts(event: Event) -> dict[str, float]:
    """How many steps were skipped, incidents met and interventions made by now, where the event says so.

    >>> counts(Event(kind="alarm", step=7, time=0.0, detail={"incident": 2, "skipped_in_all": 5}))
    {'skips': 5.0, 'incidents': 2.0}
    """
    found = {_COUNTED[name]: event.detail.get(name) for name in _COUNTING.get(event.kind, ())}
    return {name: float(value) for name, value in found.items() if isinstance(value, int)}


def numbers(row: Row) -> dict[str, float]:
    """The numbers of a row by signal, and a mark for each that is none.

    >>> numbers({"step": 7, "time": 1.5, "loss": float("nan"), "batch_hash": "9f"})
    {'loss': nan, 'nonfinite/loss': 1.0}
    """
    found = {name: float(value) for name, value in row.items() if _is_signal(name, value)}
    return found | {f"{NONFINITE}/{name}": 1.0 for name, value in found.items() if not math.isfinite(value)}


def settings(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What a person compares runs by, nested as it is.

    >>> settings({"settings": {"lr": 0.1}, "seed": 1, "dtype": None, "run_id": "a1", "versions": {"torch": "2.9"}})
    {'lr': 0.1, 'versions': {'torch': '2.9'}, 'seed': 1, 'run_id': 'a1'}
    """
    chosen = {**manifest.get("settings", {}), "versions": manifest.get("versions", {})}
    return chosen | {key: manifest[key] for key in ("seed", "dtype", "run_id") if manifest.get(key) is not None}


def earlier(manifest: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """What a tracker said of this run when it had it before; nothing, if it had not.

    >>> earlier({"trackers": [{"name": "wandb", "run_id": "a"}, {"name": "mlflow", "run_id": "b"}]}, "mlflow")
    {'name': 'mlflow', 'run_id': 'b'}
    """
    entries = [*(manifest.get("trackers") or ()), manifest.get("tracker") or {}]  # before 0.1 there was but one
    return next((entry for entry in entries if entry.get("name") == name), {})


def plain_text(value: Any) -> str:
    """A setting or a particular as text, lists and tables as JSON."""
    return json.dumps(value, default=str) if isinstance(value, Mapping | list | tuple) else str(value)


def _is_signal(name: str, value: object) -> bool:
    return name not in ("step", "time") and not isinstance(value, str)
