"""Reads the lines of ``events.jsonl`` into events whose fields have the types that their readers count on.

A line without kind, step and time is no event. A known field of another type counts as missing. Whoever asks an event
for a field that events of its kind have (``detail["text"]``), and this one does not, gets a value that says nothing.
Fields and kinds that are not known are left as they are. Standard library only, because a guard reads with it, too.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from sealegs.record.reading import parse_json, read_bytes, reading
from sealegs.record.typed import fits, unspelt
from sealegs.vocabulary import Event

UNSAID = "not recorded"
LATEST = 253_402_300_800.0
"""The end of the year 9999, beyond which there are no dates."""

_OBJECTS = ("findings", "actions", "modules")
FIELDS: dict[str, Any] = {
    **dict.fromkeys(("number", "incident", "intervention", "onset", "to_step", "start", "end", "peak", "steps"), int),
    **dict.fromkeys(("tried", "of", "skipped_in_a_row", "skipped_in_all", "batches"), int),
    **dict.fromkeys(("loss", "factor", "seconds", "pre_loss", "usual", "limit", "peak_loss"), float),
    **dict.fromkeys(("grad_norm_peak", "recovery_loss"), float),
    **dict.fromkeys(("act", "acted", "goes_on", "is_condemned"), bool),
    **dict.fromkeys(("text", "reason", "evidence", "trigger", "decided_by", "result", "where", "sink"), str),
    **dict.fromkeys(("by", "request", "error", "why", "culprit", "because", "skipped"), str),
    **dict.fromkeys(("versions", "passed_over", "not_as_saved", "cost", "tax"), Mapping),
    "checkpoint": int | str,
    "trajectory": Literal["fast", "slow", "lingering", "divergent"],
}
"""The types of fields that are read somewhere, in events of any kind."""
NULL = {
    "intervention": ("incident", "request"),
    "resume": ("checkpoint",),
    "incident-closed": ("end", "trajectory", "recovery_loss"),
    "end": ("by", "error"),
    "probe": ("factor",),
}
"""Fields of a kind that may be null."""

NEEDED: dict[str, dict[str, Any]] = {
    **{kind: {"text": UNSAID} for kind in ("skip", "alarm", "halt", "remark", "fault", "snapshots")},
    **{kind: {"text": UNSAID} for kind in ("folder-lost", "folder-back")},
    "silent-corruption": {"text": UNSAID},
    "no-recompute": {"reason": UNSAID},
    "resume": {"passed_over": {}, "changed": {}, "checkpoint": None},
    "resume-audit": {"not_as_saved": {}, "changed": []},
    "sink-failed": {"sink": "a sink", "reason": UNSAID},
    "checkpoint-failed": {"reason": UNSAID},
    "capsule-failed": {"reason": UNSAID},
    "request-refused": {"reason": UNSAID},
    "stalled": {"seconds": float("nan"), "where": UNSAID},
    "probe": {"is_condemned": False, "loss": float("nan")},
    "incident-look": {"number": 0, "text": UNSAID},
    "weights-excused": {"reason": UNSAID},
    "incident-closed": {"number": 0, "text": UNSAID},
    "outcome": {"intervention": 0, "result": "not known yet", "text": UNSAID},
    "intervention": {
        "number": 0,
        "decided_by": UNSAID,
        "trigger": UNSAID,
        "onset": UNSAID,
        "evidence": UNSAID,
        "text": UNSAID,
        "acted": False,
        "changed": "",
        "actions": [],
    },
    "qk-clip": {"limit": float("nan"), "modules": [], "text": UNSAID, "acted": False, "number": 0},
    "end": {"reason": UNSAID},
}
"""Fields that an event of a kind has, with what stands for a missing one."""


class Detail(dict[str, Any]):
    """The particulars of an event as they were written; a field that its kind has is never a ``KeyError``."""

    def __init__(self, kind: str, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._kind = kind

    def __missing__(self, name: str) -> Any:
        return NEEDED.get(self._kind, {})[name]


def load_events(path: Path) -> tuple[Event, ...]:
    """The events in a file; none where there is no file."""
    try:
        with reading(path):
            return read_events(read_bytes(path, path.parent).splitlines())
    except FileNotFoundError:
        return ()


def read_events(lines: Iterable[bytes]) -> tuple[Event, ...]:
    """The events of a file, in order. Lines that are none, such as one torn by a kill, are left out."""
    return tuple(event for line in lines if (event := read_event(line)) is not None)


def read_event(line: bytes) -> Event | None:
    """The event of a line, if it is one."""
    try:
        values = parse_json(line)
    except ValueError:
        return None
    if not isinstance(values, dict):
        return None
    kind, step, time = (values.pop(name, None) for name in ("kind", "step", "time"))
    if not (isinstance(kind, str) and fits(step, int) and fits(time, float) and 0 <= time < LATEST):
        return None
    return Event(kind=kind, step=step, time=time, detail=_sound(kind, values))


def _sound(kind: str, values: Mapping[str, Any]) -> Detail:
    """The particulars of an event, each of its type."""
    detail = Detail(kind, {})
    for name, spelt in values.items():
        value = unspelt(spelt, FIELDS.get(name))
        if name == "changed":
            value = _changes(kind, value)
        elif name in _OBJECTS and kind != "preflight":  # whose findings are sentences
            value = [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
        elif name in FIELDS and not fits(value, FIELDS[name]):
            if value is not None or name not in NULL.get(kind, ()):
                continue
        elif name == "cost":
            value = {part: number for part, number in value.items() if fits(number, float | None)}
        detail[name] = value
    return detail


def plain_events(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Events as the lines of their file: no detail takes the place of kind, step or time."""
    heads = ((event, {"kind": event.kind, "step": event.step, "time": event.time}) for event in events)
    return [Detail(event.kind, {**head, **event.detail, **head}) for event, head in heads]


def _changes(kind: str, value: Any) -> Any:
    """What was changed: sentences of an intervention or an audit, or settings before and after of a resume."""
    if kind == "resume":
        pairs = value if isinstance(value, dict) else {}
        return {name: pair for name, pair in pairs.items() if isinstance(pair, list) and len(pair) == 2}
    if kind == "resume-audit":
        return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []
    if kind == "intervention":
        return value if isinstance(value, str) else ""
    return value
