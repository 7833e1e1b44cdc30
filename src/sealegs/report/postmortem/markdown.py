"""Drafts a post-mortem from what a guard knows, and renders a post-mortem as Markdown. Standard library only."""

import math
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from sealegs.report.postmortem import events as happened
from sealegs.report.postmortem import numbers
from sealegs.report.postmortem.values import (
    CandidateCause,
    Cost,
    EvidenceFiles,
    Measured,
    Postmortem,
    Promise,
    Symptoms,
)

FILE = "postmortem.md"
FEWEST = 3
"""The fewest hypotheses that a document must weigh."""
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
) -> Postmortem:
    """What can be said without a diagnosis: symptoms, interventions, their outcome, and the cost.

    The arguments are as in the run folder's files: ``manifest.json``, ``incident.json``, and lines of ``metrics.jsonl``
    and ``events.jsonl`` in the order written, with those of repeated steps. NaN may be a string. ``source`` is the run
    as a user names it on the command line.
    """
    met = numbers.met(incident, rows)
    run_id = str(manifest.get("run_id") or "unnamed")
    source = source or re.sub(r"-[0-9a-f]{8}$", "", run_id)
    told = [numbers.live(event) for event in events]
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


def sections(document: Postmortem) -> dict[str, list[str]]:
    """The lines of each section by title; empty sections have none."""
    return {
        "Symptoms": _symptoms(document.symptoms),
        "Evidence": _evidence(document.evidence),
        "Hypotheses": _hypotheses(document.hypotheses),
        "Discriminating evidence": _list(document.discriminating),
        "Root cause": [plain(document.root_cause)] if document.root_cause else [],
        "Classification": _list(document.classification),
        "Recovery action": _list(document.recovery),
        "Outcome": _list(document.outcome),
        "Cost": [] if document.cost is None else [_cost(document.cost)],
        "Remediation": _list(document.remediation),
        "Verification": _verification(document),
        "Lesson": [plain(document.lesson)] if document.lesson else [],
        "Follow-ups": _list(document.follow_ups),
    }


def empty(document: Postmortem) -> tuple[str, ...]:
    """The titles of the empty sections."""
    return tuple(title for title, lines in sections(document).items() if not lines)


def markdown(document: Postmortem) -> str:
    """The document as text."""
    written, missing = sections(document), empty(document)
    state = "Every section is filled."
    if missing:
        state = f"{len(missing)} of {len(written)} sections {'is' if len(missing) == 1 else 'are'} empty"
        state += f": {', '.join(missing)}."
    lines = [
        f"# Post-mortem: incident {document.incident}, {when(document.time)}, run {plain(document.run_id)}",
        "",
        f"{document.kind.replace('_', ' ').capitalize()} at step {document.symptoms.onset}. {state}",
    ]
    for title, content in written.items():
        reason = document.why_empty.get(title, "nothing is known")
        lines += ["", f"## {title}", "", *(content or [f"EMPTY: {reason}"])]
    return "\n".join(lines) + "\n"


def when(time: float | None) -> str:
    """A time in readable form.

    >>> when(1794756910.5)
    '2026-11-15 15:35:10 UTC'
    """
    return "time not recorded" if time is None else f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M:%S} UTC"


def plain(text: str) -> str:
    """Text escaped so that Markdown leaves it as it is, except what stands in backticks.

    >>> plain("log activation_norm/<layer>, *.weight; run `sealegs replay <RUN>`")
    'log activation_norm/\\\\<layer>, \\\\*.weight; run `sealegs replay <RUN>`'
    """
    parts = " ".join(text.split()).split("`")
    if len(parts) % 2 == 0:  # a single backtick is not one of ours
        parts = ["\\`".join(parts)]
    return "`".join(part if number % 2 else re.sub(r"([<*\[\]])", r"\\\1", part) for number, part in enumerate(parts))


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


def _list(lines: Sequence[str]) -> list[str]:
    return [f"- {plain(line)}" for line in lines]


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
        loss = f"the run ends at step {after.ends_at}" if after.loss is None else shown(after.loss)
        loss = f"did not recover ({loss})" if after.is_back is False else loss
        lines.append(f"loss {after.steps} steps after the peak (mean of up to 10 rows): {loss}")
    lines += [
        f"gradient norm before clipping: {shown(seen.grad_norm)}{at}; baseline {shown(seen.grad_norm_before)}",
        f"learning rate at the onset: {shown(seen.lr)}",
        f"dtype: {seen.dtype or 'not logged'}",
        f"batch index: {batches}",
        f"unusual tokens: {', '.join(seen.unusual_tokens) or 'none flagged'}",
    ]
    return [f"- {line}" for line in lines]


def _range(span: tuple[int, int], name: str = "") -> str:
    several = f"{name}s " if name else ""
    return f"{several}{span[0]} to {span[1]}" if span[1] > span[0] else f"{name + ' ' if name else ''}{span[0]}"


def _evidence(evidence: EvidenceFiles) -> list[str]:
    lines = [f"- tracker: {plain(evidence.tracker or 'none')}; record: {plain(evidence.record)}"]
    lines += _list(evidence.texts)
    if evidence.without_pictures:
        lines.append(f"- pictures: {plain(evidence.without_pictures)}")
    for picture in evidence.pictures:
        lines += ["", f"![{plain(picture.caption)}]({_address(picture.file)})"]
    if evidence.layers:
        lines += ["", "| layer (panel 4) | activation norm before | next one logged | ratio | at step |"]
        lines += ["|---|---:|---:|---:|---:|"]
        for layer in evidence.layers:
            ratio = f"{layer.at / layer.before:.2f}" if layer.before and math.isfinite(layer.at) else ""
            cells = (plain(layer.name), shown(layer.before), shown(layer.at), ratio, str(layer.step))
            lines.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
    return lines


def _address(file: str) -> str:
    return f"<{file}>" if re.search(r"[\s()]", file) else file


def _hypotheses(hypotheses: Sequence[CandidateCause]) -> list[str]:
    lines: list[str] = []
    for number, each in enumerate(hypotheses, 1):
        cited = f"panel{'s' if len(each.panels) > 1 else ''} {', '.join(map(str, each.panels))}"
        lines += ["", f"### H{number}. {plain(each.title)} ({each.grade}; {cited})", ""]
        lines += [f"- for: {plain(text)}" for text in each.evidence_for or ("nothing that was logged",)]
        lines += [f"- against: {plain(text)}" for text in each.evidence_against or ("nothing that was logged",)]
        lines += [f"- not logged: {plain(', '.join(each.missing))}"] if each.missing else []
        lines += [f"- next test: {plain(each.next_test)}"] if each.next_test else []
    if hypotheses and len(hypotheses) < FEWEST:
        lines += ["", f"Only {len(hypotheses)} of {FEWEST}: no other cause explains what this log shows."]
    return lines[1:]


def _cost(cost: Cost) -> str:
    head = f"{cost.lost_steps} steps ({cost.counted}) x {shown(cost.seconds_per_step)} s"
    down = f"plus {cost.downtime_s:.1f} s of downtime"
    if cost.seconds is None:
        return f"{cost.lost_steps} steps ({cost.counted}), {down}; seconds a step were not logged."
    if cost.money is None:
        return f"{head}, {down} = {cost.seconds:.1f} s; price not given."
    price = f"{cost.price_per_hour:.2f} an hour"
    return f"({head}, {down}) x {price} / 3600 = {cost.money:.2g}."


def _verification(document: Postmortem) -> list[str]:
    promises = [f"- [ ] {plain(promised(promise))}" for promise in document.promises]
    if document.measured:
        promises = [f"- [{'x' if each.is_kept else ' '}] {plain(measured(each))}" for each in document.measured]
    return ([plain(document.verification), ""] if document.verification and promises else []) + promises
