"""What a post-mortem says, block by block: a Postmortem in, headings, lists, figures and tables out.

Blocks hold sentences, as ``report/marked_text.py`` has them, and no markup. ``markdown.py`` and ``page.py`` write them,
each in its own language, so that no field of a document has to be escaped where it is filled in. Standard library only.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeAlias

from sealegs.printable import counted
from sealegs.report.postmortem import numbers
from sealegs.report.postmortem.values import (
    CandidateCause,
    Cost,
    EvidenceFiles,
    LayerActivations,
    Measured,
    Picture,
    Postmortem,
    Promise,
    Symptoms,
)

FEWEST = 3
"""The fewest hypotheses that a document must weigh."""


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading of a level from 1 to 3."""

    level: int
    text: str


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A paragraph, or the mark of a section that is empty."""

    text: str
    is_empty: bool = False


@dataclass(frozen=True, slots=True)
class Item:
    """An item of a list."""

    text: str
    is_ticked: bool | None = None
    """Whether its box is ticked; None where it has none."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A list."""

    items: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """A table whose first column is names, the others numbers."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


Block: TypeAlias = Heading | Paragraph | Listed | Table | Picture


def outline(document: Postmortem) -> list[Block]:
    """The whole document."""
    written, missing = sections(document), empty(document)
    state = "Every section is filled."
    if missing:
        state = f"{len(missing)} of {len(written)} sections {'is' if len(missing) == 1 else 'are'} empty"
        state += f": {', '.join(missing)}."
    blocks: list[Block] = [
        Heading(1, title(document)),
        Paragraph(f"{document.kind.replace('_', ' ').capitalize()} at step {document.symptoms.onset}. {state}"),
    ]
    for name, content in written.items():
        reason = document.why_empty.get(name, "nothing is known")
        blocks += [Heading(2, name), *(content or [Paragraph(f"EMPTY: {reason}", is_empty=True)])]
    return blocks


def title(document: Postmortem) -> str:
    """The title of the document."""
    return f"Post-mortem: incident {document.incident}, {when(document.time)}, run {document.run_id}"


def sections(document: Postmortem) -> dict[str, list[Block]]:
    """The content of each section by its name; empty sections have none."""
    return {
        "Symptoms": _list(_symptoms(document.symptoms)),
        "Evidence": _evidence(document.evidence),
        "Hypotheses": _hypotheses(document.hypotheses),
        "Discriminating evidence": _list(document.discriminating),
        "Root cause": _paragraph(document.root_cause),
        "Classification": _list(document.classification),
        "Recovery action": _list(document.recovery),
        "Outcome": _list(document.outcome),
        "Cost": [] if document.cost is None else _paragraph(_cost(document.cost)) + _of_whole_run(document.tax),
        "Remediation": _list(document.remediation),
        "Verification": _verification(document),
        "Lesson": _paragraph(document.lesson),
        "Follow-ups": _list(document.follow_ups),
    }


def empty(document: Postmortem) -> tuple[str, ...]:
    """The names of the empty sections."""
    return tuple(name for name, content in sections(document).items() if not content)


def when(time: float | None) -> str:
    """A time in readable form.

    >>> when(1794756910.5)
    '2026-11-15 15:35:10 UTC'
    """
    return "time not recorded" if time is None else f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M:%S} UTC"


def shown(value: float | None) -> str:
    """A number, or why there is none.

    >>> shown(2.94e-4), shown(float("nan")), shown(None)
    ('0.000294', 'not finite', 'not logged')
    """
    if value is None:
        return "not logged"
    return f"{value:.4g}" if math.isfinite(value) else "not finite"


def promised(promise: Promise) -> str:
    """A promise in words."""
    name = numbers.NAMES.get(promise.signal, promise.signal)
    is_one = promise.last == promise.first
    where = f"step {promise.first}" if is_one else f"steps {promise.first} to {promise.last}"
    if 1 < promise.mean_of <= promise.last - promise.first:
        name = f"every mean of {promise.mean_of} rows of the {name}"
    elif promise.mean_of > 1:
        name = f"mean {name}"
    limit = f"{'at most' if promise.or_equal else 'below'} {shown(promise.below)}"
    then = "" if promise.was is None or not promise.holds(promise.was) else ", kept then too"
    was = "" if promise.was is None else f" (it was {shown(promise.was)}{then})"
    return f"{name} at {where} {limit}{was}"


def measured(result: Measured) -> str:
    """The result of a promise in words."""
    at = "" if result.promise.first == result.promise.last or result.value is None else f" at step {result.step}"
    value = "not measured" if result.value is None else f"{shown(result.value)}{at}"
    return f"{promised(result.promise)}: {value}, {'kept' if result.is_kept else 'broken'}"


def _paragraph(text: str) -> list[Block]:
    return [Paragraph(text)] if text else []


def _list(lines: Sequence[str]) -> list[Block]:
    return [Listed(tuple(map(Item, lines)))] if lines else []


def _symptoms(seen: Symptoms) -> list[str]:
    batches = "not logged"
    if seen.batches is not None and seen.batch_steps is not None:
        batches = f"{_range(seen.batches)} ({_range(seen.batch_steps, 'step')})"
    at = "" if seen.grad_norm_step is None else f" at step {seen.grad_norm_step}"
    lines = [
        f"onset: step {seen.onset}",
        f"loss before (EMA over 50 steps): {shown(seen.loss_before)}",
        f"peak loss: {shown(seen.peak_loss)} at step {seen.peak_step}",
    ]
    for after in seen.after:
        loss = f"the record ends at step {after.ends_at}" if after.loss is None else shown(after.loss)
        loss = f"did not recover ({loss})" if after.is_back is False else loss
        loss += ", done again after the run had gone back" if after.has_gone_back else ""
        lines.append(f"loss {after.steps} steps after the peak (mean of up to 10 rows): {loss}")
    tokens = "not logged" if seen.unusual_tokens is None else ", ".join(seen.unusual_tokens) or "none flagged"
    return [
        *lines,
        f"gradient norm before clipping: {shown(seen.grad_norm)}{at}; baseline {shown(seen.grad_norm_before)}",
        f"learning rate at the onset: {shown(seen.lr)}",
        f"dtype: {seen.dtype or 'not logged'}",
        f"batch index: {batches}",
        f"unusual tokens: {tokens}",
    ]


def _range(span: tuple[int, int], name: str = "") -> str:
    several = f"{name}s " if name else ""
    return f"{several}{span[0]} to {span[1]}" if span[1] > span[0] else f"{name + ' ' if name else ''}{span[0]}"


def _evidence(evidence: EvidenceFiles) -> list[Block]:
    lines = [f"tracker: {evidence.tracker or 'none'}; record: {evidence.record}", *evidence.texts]
    if evidence.without_pictures:
        lines.append(f"pictures: {evidence.without_pictures}")
    return [*_list(lines), *evidence.pictures, *([_layers(evidence.layers)] if evidence.layers else [])]


def _layers(layers: Sequence[LayerActivations]) -> Table:
    rows = []
    for layer in layers:
        ratio = f"{layer.at / layer.before:.2f}" if layer.before and math.isfinite(layer.at) else ""
        rows.append((layer.name, shown(layer.before), shown(layer.at), ratio, str(layer.step)))
    head = "layer (panel 4)", "activation norm before", "nearest to the peak", "ratio", "at step"
    return Table(head, tuple(rows))


def _hypotheses(hypotheses: Sequence[CandidateCause]) -> list[Block]:
    blocks: list[Block] = []
    for number, each in enumerate(hypotheses, 1):
        cited = f"panel{'s' if len(each.panels) > 1 else ''} {', '.join(map(str, each.panels))}"
        blocks.append(Heading(3, f"H{number}. {each.title} ({each.grade}; {cited})"))
        lines = [f"for: {text}" for text in each.evidence_for or ("nothing that was logged",)]
        lines += [f"against: {text}" for text in each.evidence_against or ("nothing that was logged",)]
        lines += [f"not logged: {', '.join(each.missing)}"] if each.missing else []
        lines += [f"next test: {each.next_test}"] if each.next_test else []
        blocks += _list(lines)
    if hypotheses and len(hypotheses) < FEWEST:
        blocks.append(Paragraph(f"Only {len(hypotheses)} of {FEWEST}: no other cause explains what this log shows."))
    return blocks


def _of_whole_run(tax: Sequence[str]) -> list[Block]:
    return _paragraph(f"Of the whole run: {'; '.join(tax)}.") if tax else []


def _cost(cost: Cost) -> str:
    head = f"{counted(cost.lost_steps, 'step')} ({cost.counted}) x {shown(cost.seconds_per_step)} s"
    down = f"plus {shown(cost.downtime_s)} s of downtime"
    if cost.seconds is None:
        return f"{counted(cost.lost_steps, 'step')} ({cost.counted}), {down}; seconds a step were not logged."
    if cost.money is None:
        return f"{head}, {down} = {shown(cost.seconds)} s; price not given."
    price = f"{shown(cost.price_per_hour)} an hour"
    return f"({head}, {down}) x {price} / 3600 = {cost.money:.2g}."


def _verification(document: Postmortem) -> list[Block]:
    items = [Item(promised(promise), is_ticked=False) for promise in document.promises]
    if document.measured:
        items = [Item(measured(each), is_ticked=each.is_kept) for each in document.measured]
    return [*_paragraph(document.verification), Listed(tuple(items))] if items else []
