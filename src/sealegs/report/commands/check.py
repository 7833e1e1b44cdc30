"""The report of ``sealegs check``: a Diagnosis as text for a tired person, or as JSON whose keys are a contract.

The page is short; ``--explain`` shows the whole text.
"""

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sealegs.diagnosis import attempts
from sealegs.diagnosis.contract import Diagnosis, Hypothesis, Problem
from sealegs.diagnosis.incident_order import gravity
from sealegs.diagnosis.symptoms import symptom_of
from sealegs.incidents import Incident
from sealegs.record.interventions import Done
from sealegs.record.schema import speakable
from sealegs.report.panel_names import with_panel_names

WIDTH = 100
MOST_UNJUDGED = 20
"""Lines of the whole text that name columns that were not judged; JSON has all of them."""
MOST_LINES = 35
"""Lines of the page. All of it is behind ``--explain``."""
SHOWN_ATTEMPTS = 3
SHOWN_INCIDENTS = 3
"""Attempts and incidents on the page: the last, and the gravest."""
MOST_INCIDENTS = 100
"""Incidents that the whole text lists; JSON has all of them."""
READ_ON = "What such runs usually have, and what to do first"
VERDICTS = {
    "healthy": "HEALTHY",
    "watch": "WATCH",
    "act": "ACT",
    "unknown": "CANNOT TELL",
}


class Block(NamedTuple):
    """Some lines of the page, under a title that several may share."""

    title: str
    rank: int
    """How soon it is left out where the page is too long: the highest first."""
    lines: list[str]


def page(diagnosis: Diagnosis) -> str:
    """The verdict, the first action and the reason, then causes with for and against: at most ``MOST_LINES`` lines."""
    head = [*headline(diagnosis), "", *_origin(diagnosis)]
    blocks = [block for block in _blocks(diagnosis) if block.lines]
    room = MOST_LINES - len(head) - 2
    kept: list[Block] = []
    titles: set[str] = set()
    for block in sorted(blocks, key=lambda block: block.rank):
        cost = len(block.lines) + (0 if block.title in titles else 2)
        if cost <= room:
            kept.append(block)
            titles.add(block.title)
            room -= cost
    lines = list(head)
    told: set[str] = set()
    for block in blocks:
        if block in kept:
            lines += [] if block.title in told else ["", block.title]
            lines += block.lines
            told.add(block.title)
    return "\n".join([*lines, "", _more(diagnosis, [block for block in blocks if block not in kept])])


def headline(diagnosis: Diagnosis) -> list[str]:
    """The verdict, the first action and the reason, each a line where it can be."""
    found = diagnosis.findings
    lines = _cut(_wrapped(f"{VERDICTS[found.verdict]}: {with_panel_names(found.because)}", "", "  "), 3)
    lines += _wrapped(f"First action: {diagnosis.first_action}", "", "  ")
    return lines + _cut(_wrapped(why(diagnosis), "", "  "), 2)


def why(diagnosis: Diagnosis) -> str:
    """The reason for the first action, in one line; empty where the verdict says it all."""
    top = next((each for each in diagnosis.hypotheses if each.grade != "ruled out"), None)
    if top is None or diagnosis.findings.verdict == "healthy":
        return ""
    if top.cause == "unknown":
        return "Why: the cause is not known: no sign of this log decides for one."
    text = next(iter(top.evidence_for), "")
    return f"Why: {_name(top)} ({top.grade}){': ' if text else ''}{with_panel_names(text)}"


def _origin(diagnosis: Diagnosis, most: int = 1) -> list[str]:
    """Where it was read from and what it is, with at most so many lines of columns that were not judged."""
    found = diagnosis.findings
    steps = found.run.steps
    span = f"steps {steps[0]} to {steps[-1]}" if len(steps) else "no steps"
    taken = _taken(diagnosis.mapping)
    lines = _cut(_wrapped(f"{diagnosis.source}: {diagnosis.format}, {len(steps):,} rows, {span}", ""), 2)
    lines += _cut(_wrapped(f"read {taken}" if taken else "", "  "), 2)
    lines += _wrapped(f"kind of run: {found.kind.words}", "  ")
    return lines + _cut(_wrapped(f"not judged: {', '.join(found.unjudged)}", "  ") if found.unjudged else [], most)


def _blocks(diagnosis: Diagnosis) -> list[Block]:
    """What can stand on the page, in the order in which it stands there."""
    found = diagnosis.findings
    remarks = [text for text in diagnosis.remarks if text != diagnosis.compared and text not in found.because]
    made = attempts.attempts_in(found.run)
    grave = [text for text in diagnosis.settings if not text.startswith("note")]
    incidents = sorted(found.incidents[:MOST_INCIDENTS], key=gravity)
    chosen = sorted(incidents[:SHOWN_INCIDENTS], key=lambda incident: incident.start)
    likely = [each for each in diagnosis.hypotheses if each.grade != "ruled out"]
    if found.verdict == "healthy" and found.problems:  # they are told above, and nothing else needs a cause
        likely = [each for each in likely if each.cause not in ("metric-wrong", "unknown")]
    return [
        Block("Notices", 6, _cut([line for text in remarks for line in _wrapped(text, "  ")], 4)),
        Block(
            "What was done to the run",
            3,
            _cut([line for text in deeds(found.done) for line in _wrapped(text, "  ")], 4),
        ),
        Block("What was tried", 2, _cut([line for text in diagnosis.tried for line in _wrapped(text, "  ")], 5)),
        Block("Metrics that cannot be believed", 3, _cut(_problems(found.problems), 4)),
        Block("Attempts", 2, _attempts(attempts.lines(made))),
        *(
            Block("Incidents", 1 if incident == incidents[0] else 5, _cut(_incident(incident), 2))
            for incident in chosen
        ),
        Block("Lines of the log", 3, _cut([line for text in diagnosis.lines for line in _wrapped(text, "  ")], 6)),
        Block("Settings", 5, _cut([line for text in grave for line in _wrapped(text, "  ")], 4)),
        *(
            Block("Causes, the likeliest first", (1, 2, 4)[number - 1], _cause(diagnosis, number, each))
            for number, each in enumerate(likely[:3], 1)
        ),
        Block(
            "What this log cannot show", 7, _cut([line for text in found.unseen for line in _wrapped(text, "  ")], 3)
        ),
        Block("Log this next time", 6, _cut(_wrapped(", ".join(diagnosis.log_next_time), "  ", "  "), 2)),
        Block(READ_ON, 8, _cut(_read_on(diagnosis), 1)),
    ]


def _read_on(diagnosis: Diagnosis) -> list[str]:
    """The page of the symptom that the likeliest cause shows itself as, where something is wrong."""
    top = next((each for each in diagnosis.hypotheses if each.grade != "ruled out"), None)
    symptom = symptom_of(top.cause) if top is not None and diagnosis.findings.verdict != "healthy" else None
    return _wrapped(f"sealegs symptom {symptom.name}", "  ") if symptom is not None else []


def _attempts(told: Sequence[str]) -> list[str]:
    """The last attempts: the verdict is of the last."""
    left_out = max(len(told) - SHOWN_ATTEMPTS, 0)
    lines = [f"  {left_out} earlier: --explain"] if left_out else []
    return lines + [line for text in told[left_out:] for line in _cut(_wrapped(text, "  "), 2)]


def _cause(diagnosis: Diagnosis, number: int, each: Hypothesis) -> list[str]:
    """A cause with the most telling of what speaks for and against it."""
    if each.cause == "unknown":
        which = "none of them" if number > 1 else "not known"
        test = (
            [f"next test {each.next_test}"] if each.next_test and each.next_test not in diagnosis.first_action else []
        )
        lines = _wrapped(f"{number}. {which}: {'; '.join(each.evidence_for)}", "  ")
        return lines + [line for text in test for line in _cut(_wrapped(text, " " * 5, " " * 15), 2)]
    lines = _wrapped(f"{number}. {_name(each)} ({each.grade})", "  ")
    texts = [("for", text) for text in each.evidence_for[:2]] + [
        ("against", text) for text in each.evidence_against[:2]
    ]
    if each.next_test and each.next_test not in diagnosis.first_action:
        texts.append(("next test", each.next_test))
    for name, text in texts:
        lines += _cut(_wrapped(f"{name:<9} {with_panel_names(text)}", " " * 5, " " * 15), 2)
    return lines


def _more(diagnosis: Diagnosis, left_out: Sequence[Block]) -> str:
    """What else there is, as far as it fits on a line."""
    more = len(diagnosis.findings.incidents) - SHOWN_INCIDENTS
    parts = [f"{more:,} incident{'s' if more > 1 else ''}"] if more > 0 else []
    titles = (block.title for block in left_out if block.title not in ("Incidents", READ_ON))
    parts += dict.fromkeys(title.partition(",")[0].lower() for title in titles)
    rest = "the decision tree, and what each word means"
    while parts:
        line = f"--explain shows more ({', '.join(parts)}), {rest}"
        if len(line) <= WIDTH:
            return line
        parts.pop()
    return f"--explain shows {rest}"


def _cut(lines: list[str], most: int) -> list[str]:
    """Lines, at most so many: the last ends in dots if there are more."""
    if len(lines) <= most:
        return lines
    last = lines[most - 1]
    return [*lines[: most - 1], f"{last if len(last) <= WIDTH - 4 else last[: WIDTH - 4].rstrip()} ..."]


def whole(diagnosis: Diagnosis) -> str:
    """All of it: the most important first, so that one can stop reading."""
    found = diagnosis.findings
    made = attempts.attempts_in(found.run)
    lines = [
        *headline(diagnosis),
        "",
        *_origin(diagnosis, MOST_UNJUDGED),
        *(line for remark in diagnosis.remarks for line in _wrapped(remark, "  ")),
        *_section("What was done to the run", [line for text in deeds(found.done) for line in _wrapped(text, "  ")]),
        *_section("What was tried", [line for text in diagnosis.tried for line in _wrapped(text, "  ")]),
        *_section("Metrics that cannot be believed", _problems(found.problems)),
        *_section("Attempts", [line for text in attempts.lines(made) for line in _wrapped(text, "  ")]),
        *_section("Incidents", _incidents(found.incidents)),
        *_section("Lines of the log", [line for text in diagnosis.lines for line in _wrapped(text, "  ")]),
        *_section("Settings", [line for text in diagnosis.settings for line in _wrapped(text, "  ")]),
        *_section("Causes, the likeliest first", _hypotheses(diagnosis.hypotheses)),
        *_section(f"The way through the decision tree ({diagnosis.rules} rules)", _path(diagnosis)),
        *_section("What this log cannot show", [line for text in found.unseen for line in _wrapped(text, "  ")]),
        *_section("Log this next time", _wrapped(", ".join(diagnosis.log_next_time), "  ", "  ")),
        *_section(READ_ON, _read_on(diagnosis)),
    ]
    return "\n".join(lines)


def _taken(mapping: Mapping[str, str]) -> str:
    """The column that each signal was taken from; of experts, layers and buckets the first and how many there are."""
    families: dict[str, list[str]] = {}
    for ours, theirs in mapping.items():
        if ours != theirs:
            families.setdefault(ours if "/" not in ours else f"{ours.partition('/')[0]}/...", []).append(theirs)
    return ", ".join(
        f"{ours} from {theirs[0]!r}" + (f" and {len(theirs) - 1} more" if len(theirs) > 1 else "")
        for ours, theirs in families.items()
    )


def contract(diagnosis: Diagnosis) -> dict[str, Any]:
    """The object of ``--json``: NaN and the infinities are strings, as in the run folder."""
    found = diagnosis.findings
    told: dict[str, Any] = {
        "source": diagnosis.source,
        "format": diagnosis.format,
        "steps": len(found.run.steps),
        "signals": list(found.run.signals),
        "kind": {
            "name": found.kind.name,
            "traits": list(found.kind.traits),
            "because": found.kind.because,
            "first_signals": list(found.kind.first),
            "missing": list(found.kind.missing),
        },
        "verdict": found.verdict,
        "because": found.because,
        "skips": _skips(found.done),
        "interventions": _interventions(found.done),
        "metric_problems": [
            {"signal": each.signal, "kind": each.kind, "text": each.text, "hides": each.hides}
            for each in found.problems
        ],
        "incidents": [
            {
                name: getattr(incident, name)
                for name in (
                    *("start", "peak", "end", "kind", "trajectory", "pre_loss", "peak_loss", "recovery_loss"),
                    "grad_norm_peak",
                )
            }
            for incident in found.incidents
        ],
        "columns": {
            "judged": list(found.judged),
            "not_judged": list(found.unjudged),
            "findings": [
                {name: getattr(each, name) for name in ("signal", "step", "shows", "text", "is_strong", "lasts")}
                for each in found.columns
            ],
        },
        "attempts": attempts.contract(attempts.attempts_in(found.run)),
        "path": [
            {name: getattr(answer, name) for name in ("question", "text", "answer", "evidence", "next")}
            for answer in diagnosis.path
        ],
        "hypotheses": [
            {
                "cause": each.cause,
                "grade": each.grade,
                "for": list(each.evidence_for),
                "against": list(each.evidence_against),
                "missing": list(each.missing),
                "next_test": each.next_test,
            }
            for each in diagnosis.hypotheses
        ],
        "first_action": diagnosis.first_action,
        "log_next_time": list(diagnosis.log_next_time),
        "rules": diagnosis.rules,
        "mapping": dict(diagnosis.mapping),
        "remarks": [*diagnosis.remarks, *found.unseen],
        "lines": list(diagnosis.lines),
        "settings": [{"code": each.code, "grade": each.grade, "text": each.text} for each in found.advised],
        "tried": [{"action": each.action, "outcome": each.outcome} for each in found.tried],
    }
    spoken: dict[str, Any] = speakable(told)
    return spoken


def deeds(done: Done | None) -> list[str]:
    """What was done to a run, a sentence each; empty if nothing was."""
    if done is None:
        return []
    told = []
    if done.skips.count:
        told.append(f"Skipped {done.told_of_skips}.")
    if done.not_acted:
        several = "s were" if done.not_acted != 1 else " was"
        told.append(
            f"{done.not_acted:,} step{several} rejected, and nothing acted on it: in shadow mode, or by a watch."
        )
    if done.interventions:
        actions = f" ({_listed(done.actions)})" if done.actions else ""  # a start from scratch has none
        outcomes = f"; {_listed(done.outcomes)}" if done.outcomes else ""
        told.append(f"Interventions: {done.interventions}{actions}{outcomes}.")
        told += [f"{change[:1].upper()}{change[1:]}." for change in done.changes]
    return told


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _skips(done: Done | None) -> dict[str, Any] | None:
    if done is None:
        return None
    skips = done.skips
    return {
        "count": skips.count,
        "share": skips.share(done.steps),
        "reasons": dict(skips.reasons),
        "first": skips.first,
        "last": skips.last,
        "finite": skips.finite,
        "not_acted": done.not_acted,
        "unlearned": done.unlearned._asdict() if done.unlearned is not None else None,
    }


def _interventions(done: Done | None) -> dict[str, Any] | None:
    if done is None:
        return None
    return {"count": done.interventions, "by_action": dict(done.actions), "outcomes": dict(done.outcomes)}


def _section(title: str, lines: Sequence[str]) -> list[str]:
    """A section of the page; empty if there is nothing to say."""
    return ["", title, *lines] if lines else []


def _wrapped(text: str, indent: str, then: str | None = None) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  " if then is None else then)


def _problems(problems: Sequence[Problem]) -> list[str]:
    return [
        line
        for problem in problems
        for line in _wrapped(problem.text + (f". Hides: {problem.hides}" if problem.hides else ""), "  ")
    ]


def _incidents(found: Sequence[Incident]) -> list[str]:
    more = len(found) - MOST_INCIDENTS
    told = [f"and {more:,} more: --json has all of them"] if more > 0 else []
    return [line for incident in found[:MOST_INCIDENTS] for line in _incident(incident)] + told


def _incident(incident: Incident) -> list[str]:
    """``steps 312 to 362  spike, lingering: loss 2.31 before, 5.84 at step 312, 3.4 after; gradient norm up to 47``"""
    start, end = incident.start, incident.end
    where = f"step {start}" if start == end else f"steps {start} to {'the end' if end is None else end}"
    if end is not None and end < start:
        where = f"from step {start} until the run had gone back and come to step {end}"
    words = [f"{incident.kind.replace('_', ' ')}{', ' + incident.trajectory if incident.trajectory else ''}: "]
    before = "" if math.isnan(incident.pre_loss) else f"{incident.pre_loss:.4g} before, "
    highest = "not finite" if math.isnan(incident.peak_loss) else f"{incident.peak_loss:.4g}"
    words.append(f"loss {before}{highest} at step {incident.peak}")
    if incident.recovery_loss is not None:
        words.append(f", {incident.recovery_loss:.4g} after")
    if incident.grad_norm_peak == incident.grad_norm_peak:
        is_finite = math.isfinite(incident.grad_norm_peak)
        reached = f"up to {incident.grad_norm_peak:.4g}" if is_finite else "not finite"
        words.append(f"; gradient norm {reached}")
    return _wrapped(f"{where}  {''.join(words)}", "  ", " " * 6)


def _hypotheses(hypotheses: Sequence[Hypothesis]) -> list[str]:
    lines: list[str] = []
    for number, each in enumerate((each for each in hypotheses if each.grade != "ruled out"), 1):
        lines += _wrapped(f"{number}. {_name(each)} ({each.grade})", "  ")
        texts = [("for", text) for text in each.evidence_for] + [("against", text) for text in each.evidence_against]
        texts += [("not logged", ", ".join(each.missing))] if each.missing else []
        texts += [("next test", each.next_test)] if each.next_test else []
        for name, text in texts:
            lines += _wrapped(f"{name:<11} {with_panel_names(text)}", " " * 5, " " * 17)
    out = [
        f"{_name(each)} ({'; '.join(map(with_panel_names, each.evidence_against))})"
        for each in hypotheses
        if each.grade == "ruled out"
    ]
    return lines + (_wrapped(f"ruled out: {', '.join(out)}", "  ") if out else [])


def _name(hypothesis: Hypothesis) -> str:
    return hypothesis.cause.replace("-", " ")


def _path(diagnosis: Diagnosis) -> list[str]:
    lines: list[str] = []
    for answer in diagnosis.path:
        lines += _wrapped(f"{answer.question:<5} {answer.text}", "  ", " " * 8)
        lines += _wrapped(with_panel_names(f"{answer.answer}: {answer.evidence}"), " " * 8, " " * 10)
    return lines
