"""Marks for the events and incidents of a run: where something happened, what, and where to read about it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sealegs.diagnosis.contract import Findings
from sealegs.record.interventions import is_rejected
from sealegs.record.run import Run
from sealegs.report.event_text import remarkable
from sealegs.vocabulary import Event

KINDS = ("incident", "intervention", "skip", "checkpoint", "other")
"""Kinds of marks, the gravest first."""
SEVERAL = {
    "incident": "incidents",
    "intervention": "interventions",
    "skip": "skips",
    "checkpoint": "checkpoints",
    "other": "events",
    "repeated batch": "repeated batches",
}
MOST = 250
"""The most marks of a kind: those too close to be told apart become one mark with their count. Incidents and
interventions, each with a page of its own, do only if there are more of them."""
MOST_OF_ALL = 1500
"""The most marks of a kind on a page of many runs."""
AROUND = 100
"""Steps around the beginning of an incident that are drawn one by one, however long the run."""
OTHERS = (
    *("fault", "halt", "resume", "stalled", "sink-failed", "checkpoint-failed", "folder-lost", "folder-back"),
    *("announced", "remark", "end"),
)
POSTMORTEMS = ("postmortem.html", "postmortem.md")
_ODD = np.uint64(0x9E3779B97F4A7C15)
"""Its powers make one number of several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelMark:
    """Something that happened at a step, or from one step to another."""

    kind: str
    first: int
    last: int
    text: str
    number: int = 0
    """Number of the incident or the intervention, from 1."""
    page: Path | None = None
    """The post-mortem, if there is one."""


def marks_of(run: Run, findings: Findings | None) -> tuple[PanelMark, ...]:
    """Everything that happened to a run."""
    found = _incidents(run, findings)
    for event in run.events:
        match event.kind:
            case "intervention":
                number = int(event.detail.get("number", 0))
                found.append(_at(event, "intervention", f"intervention {number}: {_sentence(event)}", number))
            case "skip":
                found.append(_at(event, "skip", _sentence(event)))
            case "alarm" | "halt" if is_rejected(event) and not (event.kind == "halt" and event.detail.get("acted")):
                found.append(_at(event, "skip", _sentence(event)))
            case "checkpoint":
                found.append(_at(event, "checkpoint", f"step {event.step}: checkpoint"))
            case kind if kind in OTHERS:
                found.append(_at(event, "other", f"{kind}: {_sentence(event)}"))
    return tuple(found)


def thinned(marks: Sequence[PanelMark], steps: int, runs: int = 1) -> tuple[PanelMark, ...]:
    """The marks of one of so many runs, with those that could not be told apart in ``steps`` steps merged."""
    most = min(MOST, max(MOST_OF_ALL // runs, 5))
    close = max(steps // most, 1)
    numbers = {kind: {mark.number for mark in marks if mark.kind == kind} for kind in ("incident", "intervention")}
    apart = {kind for kind, found in numbers.items() if len(found) <= most}
    kept: dict[tuple[str, int], list[PanelMark]] = {}
    for mark in marks:
        kept.setdefault((mark.kind, -mark.number if mark.kind in apart else mark.first // close), []).append(mark)
    return tuple(_joined(together) for together in kept.values())


def _joined(marks: Sequence[PanelMark]) -> PanelMark:
    first, last = min(mark.first for mark in marks), max(mark.last for mark in marks)
    if len({mark.number for mark in marks}) == 1 and (len(marks) == 1 or marks[0].number):
        return replace(marks[0], first=first, last=last)
    text = f"{len(marks)} {SEVERAL[marks[0].kind]}, steps {first} to {last}; the first: {marks[0].text}"
    return replace(marks[0], first=first, last=last, text=text)


def _at(event: Event, kind: str, text: str, number: int = 0) -> PanelMark:
    return PanelMark(kind=kind, first=event.step, last=event.step, text=text, number=number)


def _sentence(event: Event) -> str:
    try:
        told = remarkable(event)
    except (KeyError, TypeError, ValueError, AttributeError):  # an event of another version
        told = None
    for key in ("text", "what", "reason"):
        told = told or event.detail.get(key)
    is_shadow = event.kind in ("skip", "alarm", "halt") and event.detail.get("acted") is False
    return f"{told or event.kind}{' (not done: shadow mode)' if is_shadow else ''}"


def _incidents(run: Run, findings: Findings | None) -> list[PanelMark]:
    """Incidents that the guard met live, then those that only hindsight finds."""
    live: dict[int, PanelMark] = {}
    for event in run.events:
        detail = event.detail
        if event.kind == "alarm" and "incident" in detail:
            number = int(detail["incident"])
            text = f"incident {number}: {_sentence(event)}"
            live.setdefault(number, _at(event, "incident", text, number))
        elif event.kind == "incident-closed" and "number" in detail:
            number, start = int(detail["number"]), int(detail.get("start", event.step))
            end = detail.get("end")
            last = event.step if end is None else int(end)
            live[number] = PanelMark(kind="incident", first=start, last=last, text=_sentence(event), number=number)
    seen = findings.incidents if findings else ()
    end_of_run = int(run.steps[-1]) if len(run.steps) else 0
    after: list[PanelMark] = []
    for incident in seen:
        last = end_of_run if incident.end is None else incident.end
        met = next((mark for mark in live.values() if mark.first <= last and incident.start <= mark.last), None)
        if met is None:
            number = incident.number if not live else max(live) + 1 + len(after)
            text = f"incident {number}{str(incident).partition(str(incident.number))[2]}"
            after.append(PanelMark(kind="incident", first=incident.start, last=last, text=text, number=number))
        elif met.last == met.first:  # never closed: hindsight knows how long it lasted
            live[met.number] = replace(met, last=max(last, met.last))
    return [replace(mark, page=_postmortem(run.folder, mark.number)) for mark in [*live.values(), *after]]


def _postmortem(folder: Path, number: int) -> Path | None:
    pages = (folder / "incidents" / str(number) / name for name in POSTMORTEMS)
    return next((page for page in pages if page.is_file()), None)


def windows(marks: Iterable[PanelMark], most_steps: int) -> list[tuple[int, int]]:
    """The steps around incidents that are drawn in full, as far as ``most_steps`` reaches."""
    around = [
        (mark.first - AROUND, min(mark.last, mark.first + AROUND) + AROUND) for mark in marks if mark.kind == "incident"
    ]
    return around[: most_steps // (3 * AROUND)]


def repeated(steps: NDArray[Any], hashes: NDArray[np.bytes_]) -> tuple[PanelMark, ...]:
    """Marks of batches that came before, in the order of their steps; as in ``thinned``, those that could not be told
    apart are one. A loader of few batches repeats each of millions, so that no mark is made for each.

    >>> [mark.text for mark in repeated(np.array([0, 1, 2]), np.array([b"a", b"b", b"a"]))]
    ['step 2: batch a came at step 0 already']
    """
    before = _came_before(hashes)
    places = np.flatnonzero(before >= 0)
    if not len(places):
        return ()
    close = max((int(steps[-1]) - int(steps[0]) + 1) // MOST, 1)
    _, firsts, counts = np.unique(steps[places] // close, return_index=True, return_counts=True)
    lasts = firsts + counts - 1
    return tuple(
        _repeats(int(steps[place]), int(steps[last]), int(steps[before[place]]), hashes[place], count)
        for place, last, count in zip(places[firsts], places[lasts], counts.tolist(), strict=True)
    )


def _came_before(hashes: NDArray[np.bytes_]) -> NDArray[np.int64]:
    """For each place the last one before it with the same digest, -1 where there is none.

    Numbers are sorted in a tenth of the time of texts; two digests of one number are two all the same.
    """
    words = -(-hashes.dtype.itemsize // 8)
    parts = hashes.astype(f"S{8 * words}", copy=False).view(np.uint64).reshape(len(hashes), words)
    numbers = parts @ np.cumprod(np.full(words, _ODD))
    before = np.full(len(hashes), -1)
    in_order = np.sort(numbers)
    if not (in_order[1:] == in_order[:-1]).any():  # as mostly: their places take five times as long to sort
        return before
    distinct = in_order[np.append(True, in_order[1:] != in_order[:-1])]
    if len(distinct) <= 1 << 16:  # small numbers are sorted in a tenth of the time
        numbers = np.searchsorted(distinct, numbers).astype(np.uint16)
    order = np.argsort(numbers, kind="stable")
    ordered = hashes[order]
    same = (ordered[1:] == ordered[:-1]) & (ordered[1:] != b"")
    before[order[1:][same]] = order[:-1][same]
    return before


def _repeats(first: int, last: int, before: int, digest: bytes, count: int) -> PanelMark:
    """Batches at neighbouring steps that came before, in one mark."""
    text = f"step {first}: batch {digest.decode(errors='replace')} came at step {before} already"
    if count > 1:
        text = f"{count} {SEVERAL['repeated batch']}, steps {first} to {last}; the first: {text}"
    return PanelMark(kind="repeated batch", first=first, last=last, text=text)
