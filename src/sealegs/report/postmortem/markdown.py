"""Drafts a post-mortem from what a guard knows, and writes a post-mortem as Markdown. Standard library only."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from sealegs.report.marked_text import block_of, cell_of, markdown_of
from sealegs.report.postmortem import events as happened
from sealegs.report.postmortem import numbers
from sealegs.report.postmortem.blocks import Block, Heading, Item, Listed, Paragraph, Table, outline
from sealegs.report.postmortem.values import EvidenceFiles, Picture, Postmortem

FILE = "postmortem.md"
NOT_YET = "not diagnosed yet: run `sealegs postmortem {}`"
DIAGNOSED = (
    *("Hypotheses", "Discriminating evidence", "Root cause", "Remediation"),
    *("Verification", "Lesson", "Follow-ups"),
)
"""Sections that need a diagnosis, so that a draft leaves them empty."""


def draft(
    manifest: Mapping[str, Any],
    incident: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    events: Sequence[Mapping[str, Any]],
    *,
    source: str | None = None,
    until: float = math.inf,
) -> Postmortem:
    """What can be said without a diagnosis: symptoms, interventions, their outcome, and the cost.

    The arguments are as in the run folder's files: ``manifest.json``, ``incident.json``, and lines of ``metrics.jsonl``
    in the order written, with those of repeated steps; NaN may be a string there. ``events`` are those that
    ``record.events.plain_events`` gives. ``source`` is the run as a user names it on the command line. After ``until``
    other trouble begins, if any does.
    """
    met = numbers.met(incident, rows, until=until)
    run_id = str(manifest.get("run_id") or "unnamed")
    source = source or re.sub(r"-[0-9a-f]{8}$", "", run_id)
    told = list(events)
    recovery, outcome = happened.recovery(met, told), happened.outcome(met, told)
    why = dict.fromkeys(DIAGNOSED, NOT_YET.format(f"{source}#{met.number}"))
    why |= {} if recovery else {"Recovery action": "the log has no record of what was done"}
    why |= {} if outcome else {"Outcome": f"the incident was still open at step {met.last}, the last that is recorded"}
    tracker = manifest.get("tracker") or {}
    return Postmortem(
        incident=met.number,
        kind=met.kind,
        time=happened.time_of(met, told),
        run_id=run_id,
        symptoms=numbers.symptoms(met, manifest),
        evidence=EvidenceFiles(
            record=source,
            tracker=", ".join(filter(None, map(_place, manifest.get("trackers") or [tracker]))) or None,
            without_pictures=f"not drawn yet: run `sealegs postmortem {source}#{met.number}`",
            layers=numbers.layers(met),
        ),
        classification=numbers.classification(met),
        recovery=recovery,
        outcome=outcome,
        cost=happened.cost(met, manifest, told),
        why_empty=why,
    )


def _place(tracker: Mapping[str, Any]) -> str:
    return str(tracker.get("uri") or tracker.get("run_id") or tracker.get("name") or "")


def markdown(document: Postmortem) -> str:
    """The document as text."""
    return "\n\n".join(map(_written, outline(document))) + "\n"


def _written(block: Block) -> str:
    match block:
        case Heading(level, text):
            return f"{'#' * level} {_heading(text)}"
        case Paragraph(text):
            return block_of(text)
        case Listed(items):
            return "\n".join(map(_item, items))
        case Table(head, rows):
            return "\n".join([_row(head), f"|---|{'---:|' * (len(head) - 1)}", *map(_row, rows)])
        case Picture(file=file, caption=caption):
            return f"![{markdown_of(caption)}]({quote(file)})"


def _heading(text: str) -> str:
    """Markdown would take number signs at the end for a part of the heading's own."""
    written = markdown_of(text)
    return re.sub(r"(?:^| )(?=#+$)", r"\g<0>\\", written)


def _item(item: Item) -> str:
    if item.is_ticked is None:
        return f"- {block_of(item.text)}"
    return f"- [{'x' if item.is_ticked else ' '}] {markdown_of(item.text)}"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(map(cell_of, cells))} |"
