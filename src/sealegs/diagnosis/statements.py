"""What stands beside the numbers, and what it says of causes: settings, lines of the log, what was tried, and what
replay and recovery have found out.

A card names the pre-flight rules that speak for it (``rules`` in ``causes.toml``), ``lines.toml`` the causes of a line,
``attempts.toml`` the causes that an attempt would have cured. Statements count as the signs on a card do; a cause that
was tested on the incident itself is established by that.
"""

from collections.abc import Iterator, Mapping
from typing import Literal

from sealegs.diagnosis.contract import Statement, Tried
from sealegs.diagnosis.facts import LEAD, NEAR, Facts
from sealegs.diagnosis.lines import KnownLine
from sealegs.diagnosis.tried import known_attempts
from sealegs.record.interventions import actions_of

OF_RULES: Mapping[str, Literal["strong", "fits"]] = {"error": "strong", "warning": "fits"}
"""What a rule's grade counts. A note is told, and counts nothing: many healthy runs have it."""


def statements(facts: Facts, rules: Mapping[str, tuple[str, ...]]) -> Iterator[Statement]:
    """Everything that speaks for or against a cause beside the signs; ``rules`` are those of each cause."""
    for advised in facts.findings.advised:
        if (weight := OF_RULES.get(advised.grade)) is not None:
            causes = (cause for cause, codes in rules.items() if advised.code in codes)
            text = f"settings: {advised.text}"
            yield from (Statement(cause=cause, weight=weight, text=text, source="settings") for cause in causes)
    for line in facts.lines:
        if stands(facts, line):
            text = f"the log says: {line.told(facts.last)}"
            found = line.known
            yield from (
                Statement(cause=each, weight=found.weight, text=text, source="lines") for each in found.speaks_for
            )
            yield from (
                Statement(cause=each, weight="against", text=text, source="lines") for each in line.known.against
            )
    for one in facts.findings.tried:
        yield from _of_attempt(facts, one)
    yield from _of_reruns(facts)
    yield from _of_recovery(facts)


def stands(facts: Facts, line: KnownLine) -> bool:
    """Whether a line stands where it speaks for something."""
    if line.known.at == "any":
        return True
    if line.known.at == "end":
        return line.is_last
    until = facts.onset + NEAR * facts.stride
    since = facts.onset - LEAD * facts.stride if line.known.at == "onset" and facts.focus is not None else -1
    return any(since <= step <= until for step in line.steps)


def missed(facts: Facts, one: Tried) -> bool:
    """Whether an attempt was on other batches than those about the onset, so that it shows nothing of them."""
    if one.between is None or facts.focus is None or "skip batches" not in one.kinds:
        return False
    first, last = one.between
    return not (first <= facts.onset + LEAD * facts.stride and facts.sound_before <= last)


def told(facts: Facts, one: Tried) -> str:
    """An attempt in one sentence."""
    more = f"; the trouble begins at step {facts.onset}, so it shows nothing" if missed(facts, one) else ""
    return f"{one.action}: {one.outcome}{more}"


def without_help(facts: Facts) -> frozenset[str]:
    """What was tried and did not help: it is not advised again."""
    idle = (one for one in facts.findings.tried if one.outcome in ("no help", "worse") and not missed(facts, one))
    return frozenset(name for one in idle for name in one.kinds)


def _of_attempt(facts: Facts, one: Tried) -> Iterator[Statement]:
    if one.outcome == "unclear" or missed(facts, one):
        return
    kinds = [each for each in known_attempts() if each.name in one.kinds]
    text = f"tried: {told(facts, one)}"
    for cause in dict.fromkeys(name for kind in kinds for name in kind.cures):
        if one.outcome == "helped":  # of several things at once nobody knows which it was
            is_sure = len(kinds) == 1 and kinds[0].is_specific
            yield Statement(cause=cause, weight="strong" if is_sure else "fits", text=text, source="attempts")
        else:
            yield Statement(cause=cause, weight="against", text=text, source="attempts")


def _of_reruns(facts: Facts) -> Iterator[Statement]:
    """What the reruns of the incident establish, and what they rule out."""
    reruns = facts.reruns
    if reruns is None:
        return
    if reruns.cause is not None:
        yield Statement(cause=reruns.cause, weight="tested", text=f"replay: {reruns.because}", source="replay")
    text = "replay: the incident is there without it too"
    others = (cause for cause in reruns.not_needed if cause != reruns.cause)
    yield from (Statement(cause=cause, weight="rules_out", text=text, source="replay") for cause in others)


def _of_recovery(facts: Facts) -> Iterator[Statement]:
    """A source that recovery took out because its data were bad: the loss went with its share from batch to batch."""
    for event in facts.run.events:
        detail = event.detail
        is_found = event.kind == "intervention" and detail.get("acted") and detail.get("trigger") == "bad-data"
        if is_found and "swap-source" in actions_of(event) and facts.is_of_the_focus(event.step, event.step):
            text = f"recovery: {detail.get('evidence')}"
            yield Statement(cause="bad-data-batch", weight="decides", text=text, source="recovery")
