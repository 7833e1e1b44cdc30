"""Builds the Postmortem of one incident from what was recorded, diagnosed, and tested by reruns."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sealegs.diagnosis.contract import Diagnosis
from sealegs.diagnosis.facts import Facts
from sealegs.diagnosis.findings import closed, look
from sealegs.diagnosis.incident_order import BENIGN, WATCHED
from sealegs.diagnosis.rank import diagnose
from sealegs.diagnosis.settings import known_of
from sealegs.errors import SourceError
from sealegs.incidents import BEFORE, FEWEST, KINDS, USUAL, Incident
from sealegs.record.events import plain_events
from sealegs.record.manifest import Manifest, dotted
from sealegs.record.reading import is_number, read_bytes, read_object, reading
from sealegs.record.run import Run
from sealegs.record.schema import CAPSULE, INCIDENT, INCIDENT_DATA, INCIDENTS, REPLAY, VERIFIED, unspell
from sealegs.record.typed import typed
from sealegs.report.commands.contracts import read_back
from sealegs.report.commands.incident_data import IncidentData
from sealegs.report.commands.replay import Replayed, TokenShown
from sealegs.report.commands.replay import read as read_replay
from sealegs.report.commands.verify import Verified
from sealegs.report.commands.verify import read as read_verified
from sealegs.report.fixes import Circumstances, Fix, in_words, remediation
from sealegs.report.marked_text import code_of
from sealegs.report.postmortem import causes, numbers
from sealegs.report.postmortem.markdown import draft
from sealegs.report.postmortem.stretch import own_until, rows_about, stretch, went_back
from sealegs.report.postmortem.values import Postmortem
from sealegs.report.stability import told_of_tax

MILD = BENIGN + WATCHED
RARE = 10
"""The most times that an unusual token may have been seen before."""
MOST_TOKENS, MOST_ROWS = 5, 2
"""The most unusual tokens, and the most of their rows, that are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An incident and everything that is known about it."""

    source: str
    """The run as a user names it on the command line."""
    run: Run
    incident: Incident
    data: IncidentData | None = None
    """What ``sealegs scan --incident`` found in the corpus."""
    others: tuple[Incident, ...] = ()
    replayed: Replayed | None = None
    has_capsule: bool = False
    verified: Verified | None = None

    @property
    def name(self) -> str:
        """``night#2``"""
        return f"{self.source}#{self.incident.number}"

    @property
    def unchanged_replay(self) -> Replayed | None:
        """The reruns, if they show the incident. If the record differs from them, their batch at the onset is sound."""
        return self.replayed if self.replayed is not None and self.replayed.departure is None else None


@np.errstate(divide="ignore", invalid="ignore", over="ignore")  # as in the diagnosis, whose signs are asked here, too
def postmortem_of(case: Case) -> Postmortem:
    """Fill every section that can be filled."""
    run, incident, replayed = case.run, case.incident, case.replayed
    manifest = asdict(run.manifest)
    events = plain_events(run.events)
    rows = rows_about(run, incident)
    until = own_until(run, incident, case.others)
    document = draft(manifest, asdict(incident), rows, events, source=case.source, until=until)
    met = numbers.met(asdict(incident), rows, until=until)
    facts, diagnosis = diagnosed(case)
    replayed = causes.unless_the_log_knows(facts, replayed)
    found = causes.hypotheses(facts, replayed)
    cause = causes.blamed(found, replayed)
    remedies = causes.remedies(facts, cause) if cause is not None else []
    here = _circumstances(case, document, numbers.last_bad_batch(met))
    is_tested = replayed is not None and replayed.cause == cause
    fixes = remediation(cause, here) if cause is not None and is_tested else ()
    chosen = [remedy for remedy in remedies if remedy.knob in {fix.knob for fix in fixes}] if fixes else remedies[:1]
    changes = [causes.told(remedy) for remedy in chosen]
    # a hard batch stays hard: the promises hold from the step after it
    first = _last_bad(document) + 1 if cause == "hard-batch" else None
    usual = None if replayed is None else replayed.usual
    promises = numbers.promises(met, usual, first=first, clip=_clip_with(fixes, run.manifest))
    told = list(causes.discriminating(found, replayed))
    if replayed is None:
        told.append(f"not replayed: {_how_to_replay(case)}")
    if case.data is not None:
        told.append(
            f"of the {case.data.rows} rows of steps {' to '.join(map(str, case.data.steps))}: {case.data.conclusion}"
        )
    why = {
        "Hypotheses": "no cause explains what this log shows",
        "Remediation": f"no cause is known; until then: {diagnosis.first_action}",
        "Lesson": "there is none before the cause is established",
        "Verification": "too few steps before the onset to say what is usual",
        "Follow-ups": "nothing is left to do",
    }
    symptoms = replace(document.symptoms, unusual_tokens=_unusual(case.unchanged_replay))
    is_named = cause is not None and found[0].grade in ("tested", "established")
    return replace(
        document,
        symptoms=symptoms,
        evidence=replace(
            document.evidence, record=str(run.folder), texts=tuple(_rows_of(case.unchanged_replay)), without_pictures=""
        ),
        tax=tuple(told_of_tax(run)),
        hypotheses=found,
        discriminating=tuple(told),
        root_cause=causes.root_cause(found, replayed, case.name, case.has_capsule),
        classification=(
            *document.classification,
            f"root cause: {cause.replace('-', ' ') if cause is not None and is_named else 'not known yet'}",
        ),
        remediation=(
            *(f"{change}{'' if is_named else ', if it is H1'}" for change in changes),
            *([f"in a rerun: {in_words(fixes)} ({_as_given(fixes)})"] if fixes else []),
            *(
                doubt
                for fix in fixes
                if fix.name == "clip" and (doubt := causes.doubt_of_clip(facts, float(fix.value)))
            ),
        ),
        fixes=fixes,
        verification=_how_to_verify(case, has_remedy=bool(remedies or fixes))
        if case.verified is None
        else case.verified.how,
        promises=promises,
        measured=() if case.verified is None else case.verified.results,
        lesson=_lesson(document, cause, changes or [in_words(fixes)]) if cause and is_named else "",
        follow_ups=tuple(_follow_ups(case, diagnosis, [causes.told(each) for each in remedies if each not in chosen])),
        why_empty={**document.why_empty, **why},
    )


def diagnosed(case: Case) -> tuple[Facts, Diagnosis]:
    """The diagnosis of this incident alone, from the stretch of the run around it."""
    found = look(stretch(case.run, case.incident, case.others))
    ours = tuple(each for each in found.incidents if each.kind not in MILD and _overlap(each, case.incident))
    if math.isfinite(own_until(case.run, case.incident, case.others)):  # too few rows after it to see that it was over
        ours = tuple(each if each.end is not None else case.incident for each in ours)
    findings = replace(found, incidents=ours or (case.incident,))
    is_cut_short = went_back(case.run, case.incident)
    return Facts(findings, is_cut_short=is_cut_short), diagnose(findings, source=case.source, format="")


def open_incident(folder: Path) -> tuple[Incident, Replayed | None, bool]:
    """Read the folder of an incident: the incident, the reruns, and whether it can be run again."""
    path = folder / INCIDENT
    try:
        with reading(path):
            incident = typed(Incident, read_object(path, folder))
    except FileNotFoundError:
        raise SourceError(f"{path}: missing; restore it from a copy") from None
    replayed = None
    if (folder / REPLAY).exists():
        with reading(folder / REPLAY, cure="run `sealegs replay` again"):
            replayed = read_replay(read_bytes(folder / REPLAY, folder))
    return incident, replayed, (folder / CAPSULE / f"{CAPSULE}.json").is_file()


def open_verified(folder: Path | None) -> Verified | None:
    """The result of a rerun with the remedy, if there was one."""
    path = None if folder is None else folder / VERIFIED
    if path is None or folder is None or not path.exists():
        return None
    with reading(path, cure="run `sealegs verify` again"):
        return read_verified(read_bytes(path, folder))


def open_data(folder: Path | None) -> IncidentData | None:
    """What was found in the corpus, if it was searched."""
    path = None if folder is None else folder / INCIDENT_DATA
    if path is None or folder is None or not path.exists():
        return None
    with reading(path, cure="run `sealegs scan --incident` again"):
        return read_back(read_bytes(path, folder), IncidentData)


def folders_of(run: Run) -> dict[int, Path]:
    """The folders of a run's incidents, by number."""
    folder = run.folder / INCIDENTS
    there = [entry for entry in folder.iterdir() if is_number(entry.name)] if folder.is_dir() else []
    return {int(entry.name): entry for entry in sorted(there, key=lambda e: int(e.name)) if (entry / INCIDENT).exists()}


def logged_incidents(run: Run) -> dict[int, Incident]:
    """Incidents without a folder: live ones under their numbers, then those that only the diagnosis finds."""
    seen = list(look(run).incidents)
    live: dict[int, Incident] = {}
    for event in run.events:
        detail = event.detail
        if event.kind == "incident-closed" and "number" in detail:
            with suppress(ValueError):  # of another version
                live[detail["number"]] = typed(Incident, {"kind": "spike", **detail})
        elif event.kind == "alarm" and "incident" in detail:
            number = detail["incident"]
            then = run.seen_from(run.attempt_at(event.time))
            live.setdefault(number, _of_alarm(then, event.step, number, detail, seen))
    met = [replace(each, end=each.start if each.end is None else each.end) for each in live.values()]
    after: list[Incident] = []
    for each in seen:
        if not any(_overlap(each, other) for other in met):
            number = each.number if not live else max(live) + 1 + len(after)
            after.append(replace(closed(run, each), number=number))
    return dict(sorted((live | {each.number: each for each in after}).items()))


def _of_alarm(run: Run, step: int, number: int, detail: Mapping[str, Any], seen: list[Incident]) -> Incident:
    """An incident of which the record has only the alarm: as the diagnosis sees it, if it does."""
    for each in seen:
        if each.kind not in MILD and each.start <= step and (each.end is None or step <= each.end):
            return replace(closed(run, each), number=number)
    findings = [finding for finding in detail.get("findings", ()) if finding.get("severity") in ("ALARM", "HALT")]
    family = str(findings[0].get("detector")).partition("/")[0] if findings else ""
    losses, norms = (
        dict(zip(run.steps[(known := run.logged(name) & (run.steps <= step))], run.column(name)[known], strict=True))
        if name in run.signals
        else {}
        for name in ("loss", "grad_norm")
    )
    before = np.array([loss for at, loss in losses.items() if at < step and np.isfinite(loss)][-USUAL:])
    usual = float(before.mean()) if len(before) else np.nan
    return Incident(
        number=number,
        start=step,
        kind=KINDS.get(family, "spike"),
        pre_loss=float(before[-BEFORE:].mean()) if len(before) else np.nan,
        usual=usual,
        limit=usual + 0.5 * float(before.std()) if len(before) >= FEWEST else np.nan,
        peak=step,
        peak_loss=float(losses.get(step, np.nan)),
        grad_norm_peak=float(norms.get(step, np.nan)),
    )


def _overlap(one: Incident, other: Incident) -> bool:
    infinite = float("inf")
    ends = [infinite if each.end is None else each.end for each in (one, other)]
    return one.start <= ends[1] and other.start <= ends[0]


def _how_to_replay(case: Case) -> str:
    if case.has_capsule:
        return f"run `sealegs replay {case.name}`"
    return (
        "this incident left no capsule to run again; a guard with a playbook leaves one, `Playbook.observe()` without "
        "acting on it"
    )


def _how_to_verify(case: Case, *, has_remedy: bool) -> str:
    seed = case.run.manifest.seed
    start = f"from the seed {seed}" if seed is not None else "from the start, or from a checkpoint before the onset,"
    start = f"from the state in `{INCIDENTS}/{case.incident.number}/{CAPSULE}`" if case.has_capsule else start
    change = "the change above" if has_remedy else "the change that the cause will ask for"
    command = f" (`sealegs verify {case.name}`)" if case.has_capsule and case.replayed is not None else ""
    return f"Run again {start} with {change}{command}, and expect:"


def _circumstances(case: Case, document: Postmortem, last_bad: int | None) -> Circumstances:
    """The circumstances on which the smallest change depends."""
    arms = case.replayed.arms if case.replayed is not None else []
    return Circumstances(
        onset=document.symptoms.onset,
        last_bad=document.symptoms.onset if last_bad is None else last_bad,
        clip=_clip_of(case.run.manifest),
        usual_norm=document.symptoms.grad_norm_before,
        masking_helps=any(arm.cause == "long-tail-token" and arm.shows == "gone" for arm in arms),
        settings=dict(dotted(case.run.manifest.settings)),
    )


def _last_bad(document: Postmortem) -> int:
    steps = document.symptoms.batch_steps
    return document.symptoms.onset if steps is None else steps[1]


def _clip_of(manifest: Manifest) -> float | None:
    return known_of(manifest).number("clip") or None


def _clip_with(fixes: Sequence[Fix], manifest: Manifest) -> float | None:
    """The clipping norm with the change."""
    return next((fix.number for fix in fixes if fix.name == "clip"), _clip_of(manifest))


def _as_given(fixes: Sequence[Fix]) -> str:
    return " ".join(f"`--fix {fix}`" for fix in fixes)


def _unusual(replayed: Replayed | None) -> tuple[str, ...] | None:
    """The highest-loss tokens of the onset that were hardly seen before; None where no replay has shown tokens."""
    if replayed is None or not replayed.tokens:
        return None

    def told(token: TokenShown) -> str:
        loss = float(unspell(token.loss))
        return f"{code_of(repr(token.text))} ({token.times} in the batch, {token.before} before, loss {loss:.4g})"

    rare = [token for token in replayed.tokens if token.before < RARE]
    return tuple(told(token) for token in rare[:MOST_TOKENS])


def _rows_of(replayed: Replayed | None) -> list[str]:
    return [
        f"row {row.row} of the batch at the onset ({row.origin}): loss {float(unspell(row.loss)):.4g}, gradient norm "
        f"{float(unspell(row.grad_norm)):.4g} alone: {row.text!r}".replace("`", "'")
        for row in (replayed.rows[:MOST_ROWS] if replayed is not None else ())
    ]


def _lesson(document: Postmortem, cause: str, remedies: list[str]) -> str:
    """The lesson in one line."""
    what = f"{document.kind.replace('_', ' ')} at step {document.symptoms.onset}"
    return f"{what}: {'; '.join([causes.title_of(cause), *remedies])}."


def _follow_ups(case: Case, diagnosis: Diagnosis, remedies: list[str]) -> list[str]:
    lines = [] if case.replayed is not None else [f"test the cause: {_how_to_replay(case)}"]
    lines += [f"to decide: {remedy}" for remedy in remedies]
    if diagnosis.log_next_time:
        lines.append(f"log next time: {', '.join(diagnosis.log_next_time)}")
    lines += [problem.text for problem in diagnosis.findings.problems]
    if not case.run.manifest.price_per_hour:
        lines.append(
            "give the run a price an hour (`price_per_hour` in its manifest), so that the next one has its cost"
        )
    return lines
