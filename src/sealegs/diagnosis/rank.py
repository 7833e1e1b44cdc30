"""Makes a Diagnosis from Findings: walks the decision tree, weighs every cause, and names the first action.

The weighing is simple enough to check by hand. Each sign on a card is read once. A sign of ``decides`` gives three
points, of ``strong`` two, of ``opens`` and ``fits`` one, of ``against`` minus two. A sign of ``rules_out`` drops the
card, or leaves a hypothesis if a deciding sign holds. A sign that was not logged counts nothing, and is listed as
missing. What settings, lines of the log, attempts, replay and recovery say (``statements.py``) counts in the same way;
a cause that replay has tested on the incident is established, and the first.

A cause is *established* with a deciding sign and nothing against it. It is *supported* with a strong or opening sign,
three points, and two signs off different signals of which one is specific: a symptom that many causes have, however
often it shows, makes a *hypothesis*, as does one sign alone. A hypothesis has at least one point; with less a cause is
not listed. Causes are ordered by grade, then points, then their place in the file, where the more common cause comes
first. What each sign is read off, and which are symptoms, is in ``signs/worth.py``.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from sealegs.diagnosis import interventions, statements
from sealegs.diagnosis.cause_cards import Cause, Remedy, Situation, causes
from sealegs.diagnosis.contract import Diagnosis, Findings, Grade, Hypothesis, Statement
from sealegs.diagnosis.damage import announced_change, gradients_have_grown
from sealegs.diagnosis.facts import Facts
from sealegs.diagnosis.findings import RULES, onsets
from sealegs.diagnosis.fitting import fitting, makes_sense
from sealegs.diagnosis.incident_order import gravity
from sealegs.diagnosis.not_fallen import look_first
from sealegs.diagnosis.questions import ending, walk
from sealegs.diagnosis.signs import registry
from sealegs.diagnosis.signs.sign import Sign
from sealegs.diagnosis.signs.worth import GENERIC, source_of
from sealegs.diagnosis.tried import kinds_of
from sealegs.errors import ConfigError

GRADES: tuple[Grade, ...] = ("established", "supported", "hypothesis", "ruled out")
DECIDES, STRONG, FITS, AGAINST = 3, 2, 1, -2
SUPPORTED = 3
INDEPENDENT = 2
"""Signals that must speak for a supported cause: two signs off one signal are one observation."""
MOST = 8
"""The most causes that are listed, besides those that are ruled out."""
COMPARED = 100_000
"""Rows in which both sets of rules are compared: three sigma find thousands of incidents in a million."""
ASIDE: frozenset[Situation] = frozenset(
    {"metric", "memory", "stuck", "ranks", "stopped", "column", "schedule", "units"}
)
"""Situations that a run can show although nothing happened to it."""
SILENT: frozenset[Situation] = frozenset({"memory", "ranks", "schedule", "units"})
"""Situations that do harm while the training loss is as it should be."""
LOST = ("misaligned-restart", "optimizer-reset")
"""Causes that are a part of the state that a resume did not bring back, and that every update needs."""
UNITS = ("train-is-multiple-of-eval", "train-in-bits", "starts-far-above-uniform")
"""Signs of a loss that is not in the units that it should be in, or of a model that begins far from where it should."""
LONG_RUNS = ("stale-beta2", "weight-decay-low")
"""Causes that the settings of nearly every fine-tune would open, and that a few thousand steps leave no time for."""
STUCK = ("exactly-zero", "zero-loss-zero-gradient", "stuck-at-uniform", "back-at-the-start", "multiple-of-uniform")
"""Signs of a loss that has no right to be what it is."""
FIRST: tuple[Situation, ...] = ("policy-gradient", "preference", "gan", "moe", "low-precision")
"""Situations beside the loss, in the first signals of a kind."""
TELLING = 5
"""The most missing signals that are named where the cause is unknown."""
CHANGED = (
    "Leave the weights alone: they show no damage. If the data, the task or the parts of the loss changed about step "
    "{step} on purpose, announce it there next time (`guard.announce`); if not, compare the batches before and after."
)
"""The action where the loss rose and nothing else did."""
CHANGED_OR_DIVERGED = (
    "Leave the weights alone for now, and find out whether the data, the task or the parts of the loss changed about "
    "step {step} on purpose: gradients have grown with the loss, as harder data make them. If so, announce it there "
    "next time (`guard.announce`); if not, reload the last checkpoint before step {step}, halve the LR."
)
"""The action where the loss rose and gradients did, too."""
IN_TURNS = (
    "Leave the weights alone, and find out what comes in turns: list the sources, the files and the learning rate over "
    "two periods; shuffle the data across them if they are not meant to come so."
)
"""The action where all rises are those of a period."""
LOOK_INTO = "Look into what the loss does not show: {text}."
"""The action where a finding beside the loss stands."""
SPLITS = (
    "run those steps again, first with the same batches, then with others: if it rises with both, it is the step size "
    "or the weights; with the same batches alone, the data; with neither, the machine"
)
"""The test that splits the causes of a leap of which nothing is known."""
OPEN = ("plateau", "metric-wrong", "unknown")
"""Causes that leave open why a loss does not fall."""
LEAVE_IT = ("hard-batch", "plateau")
"""Causes whose first action is to leave the run alone."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """A sign that holds, or a statement, as it is weighed."""

    text: str
    source: str
    """The signal that it is read off, or what it is a statement of."""
    is_specific: bool
    """Whether it points at this cause, and is no symptom that many causes have."""


@dataclass(frozen=True, slots=True)
class Weighed:
    """A card, weighed against a run."""

    card: Cause
    grade: Grade | None
    """None where too little speaks for the cause."""
    points: int
    hypothesis: Hypothesis


@np.errstate(divide="ignore", invalid="ignore", over="ignore")  # NaN in, NaN out: the code below looks for NaN
def diagnose(
    findings: Findings,
    *,
    source: str,
    format: str,  # noqa: A002 - the word of the contract
    rules: str = "calibrated",
    mapping: Mapping[str, str] | None = None,
    remarks: tuple[str, ...] = (),
) -> Diagnosis:
    """Diagnose a run from what it shows by itself."""
    if rules not in RULES:
        raise ConfigError(f"rules={rules!r}: one of {', '.join(RULES)}")
    facts = Facts(findings, rules)
    path, unanswered = walk(facts)
    weighed = rank(facts)
    if findings.verdict == "healthy" and (harm := _beside_the_loss(facts, weighed)):
        findings = replace(findings, verdict="watch", because=f"{harm}; the training loss does not show it")
    if findings.verdict in ("healthy", "unknown") and (end := _end(facts)):
        because = f"{end}; before it, {findings.because}"
        findings = replace(findings, verdict="watch", because=because)
    told = [one.text for one in findings.standing if one.text not in findings.because]
    again = facts.warm_up_again
    if again is not None and not registry.SIGNS["warm-up-begins-again"](facts).holds:  # it is no cause of the incident
        told.append(str(again))
    compared = how_the_rules_differ(facts)
    missing = (name for item in weighed[:3] for name in item.hypothesis.missing if item.grade != "ruled out")
    return Diagnosis(
        source=source,
        format=format,
        findings=findings,
        path=path,
        hypotheses=tuple(item.hypothesis for item in weighed),
        first_action=first_action(facts, weighed, ending(facts, path)),
        log_next_time=tuple(
            name
            for name in dict.fromkeys([*findings.kind.missing, *unanswered, *missing])
            if name != registry.WENT_BACK
        ),
        rules=rules,
        mapping=dict(mapping or {}),
        remarks=(*remarks, *told, *findings.notices, compared),
        compared=compared,
        lines=tuple(line.told(facts.last) for line in facts.lines),
        settings=tuple(f"{one.grade} {one.code}: {one.text}" for one in findings.advised),
        tried=tuple(statements.told(facts, one) for one in findings.tried),
    )


def _end(facts: Facts) -> str:
    """The line in which the log ends, where a run dies of it."""
    return next((f"the log ends: {line.text}" for line in facts.lines if line.is_the_end), "")


def _beside_the_loss(facts: Facts, weighed: Sequence[Weighed]) -> str:
    """What is wrong although the loss is as it should be: state that a resume lost and the next one loses again, data
    that are known by heart, copies that part. Losses in two units are wrong whatever the cause."""
    are_of_two_units = _in_two_units(facts)
    for item in weighed:
        is_silent = not SILENT.isdisjoint(item.card.explains) and item.card.name not in LEAVE_IT
        is_sure = item.grade in ("established", "supported") and (is_silent or item.card.name in LOST)
        if is_sure or (item.grade == "hypothesis" and are_of_two_units and "units" in item.card.explains):
            return f"{item.card.name.replace('-', ' ')}: {item.hypothesis.evidence_for[0]}"
    return ""


def _in_two_units(facts: Facts) -> bool:
    return any(registry.SIGNS[name](facts).holds for name in UNITS)


def rank(facts: Facts) -> tuple[Weighed, ...]:
    """The causes that come into question, the likeliest first; those that are ruled out last."""
    said = registry.read(facts)
    shown = set(situations(facts, said))
    kind = facts.findings.kind
    tested = facts.reruns.cause if facts.reruns is not None else None
    cards = (
        card for card in causes().values() if card.name == tested or (shown & set(card.explains) and card.is_for(kind))
    )
    beside: dict[str, list[Statement]] = {}
    for one in statements.statements(facts, {name: card.rules for name, card in causes().items()}):
        beside.setdefault(one.cause, []).append(one)
    for card in causes().values():  # what was changed from attempt to attempt, and the trouble came again
        if card.remedies and (failed := facts.tried.get(card.remedies[0].knob)):
            beside.setdefault(card.name, []).append(
                Statement(cause=card.name, weight="against", text=failed, source="attempts")
            )

    def weighed_with_all(card: Cause) -> Weighed:
        return weigh(
            msgspec.structs.replace(card, opens=()) if kind.is_trained_before and card.name in LONG_RUNS else card,
            said,
            is_known=card.was_written_for(kind),
            beside=beside.get(card.name, ()),
        )

    weighed = [weighed_with_all(card) for card in cards]
    left_over = tested if facts.reruns is not None and facts.reruns.is_by_exclusion else None
    others = (item for item in weighed if item.card.name != left_over)
    if left_over is not None and any(item.grade == "established" for item in others):
        said_of_it = beside[left_over]
        beside[left_over] = [replace(one, weight="fits") if one.weight == "tested" else one for one in said_of_it]
        weighed = [weighed_with_all(item.card) if item.card.name == left_over else item for item in weighed]
        tested = None
    listed = sorted(
        (item for item in weighed if item.grade),
        key=lambda item: (item.card.name != tested, GRADES.index(item.grade or "ruled out"), -item.points),
    )
    likely = [item for item in listed if item.grade != "ruled out"][:MOST]
    asks = facts.findings.verdict == "act"
    if (likely and likely[0].grade == "hypothesis") or (shown - ASIDE and not likely):
        likely.append(_unknown(likely, weighed, SPLITS if not likely and facts.leaps and asks else ""))
    likely = [item if item.card.name == tested else _with_test(facts, item, likely) for item in likely]
    return (*likely, *(item for item in listed if item.grade == "ruled out"))


def situations(facts: Facts, said: Mapping[str, Sign]) -> Iterator[Situation]:
    """What the run shows that needs a cause."""
    if facts.is_nonfinite:
        yield "nonfinite"
    if facts.findings.periodic:
        yield "turns"
    elif facts.leaps:
        yield "spike"
        if facts.persists:
            yield "elevation"
    if "drift" in facts.kinds and not facts.findings.periodic:
        yield "drift"
    if (
        "overflow" in facts.kinds
        or said["scale-collapsed"].holds
        or said["scale-falls"].holds
        or said["gradients-underflow"].holds
    ):
        yield "overflow"
    measures = facts.findings.kind.loss_measures
    unrestored = (
        "lr-not-restored",
        "warm-up-begins-again",
        "scale-begins-again",
        *(("lower-after-resume",) if measures else ()),
    )
    if facts.resumed_before is not None or any(said[name].holds for name in unrestored):
        yield "resume"
    if "plateau" in facts.kinds:
        yield "plateau"
    if (measures and any(said[name].holds for name in STUCK)) or said["zero-loss-without-gradient"].holds:
        yield "stuck"
    is_repeated = any(one.signal == "batch_hash" for one in facts.findings.standing)
    turns = measures and (said["eval-turns"].holds or said["held-out-turns"].holds)
    if "epoch_step" in facts.kinds or turns or is_repeated:
        yield "memory"
    if said["ranks-differ"].holds or said["computed-wrongly"].holds:
        yield "ranks"
    if any(one.is_strong for one in facts.findings.columns):
        yield "column"
    turns = said["loss-turns-with-lr"].holds and said["lr-falls-then-rises"].holds
    if turns or said["lr-ends-early"].holds or said["warm-up-outlasts-the-run"].holds:
        yield "schedule"
    if any(said[name].holds for name in UNITS):
        yield "units"
    if any(line.is_the_end for line in facts.lines):
        yield "stopped"
    if facts.findings.problems:
        yield "metric"
    yield from (situation for situation in FIRST if any(one.of == situation for one in facts.shown.values()))


def weigh(card: Cause, said: Mapping[str, Sign], *, is_known: bool = True, beside: Sequence[Statement] = ()) -> Weighed:
    """Weigh one card: its points, its grade, and the sentences for and against it.

    ``beside`` is what settings, lines and attempts say of it. Unless the run is known to be of a kind that the card was
    written for, the cause is a hypothesis at the most.
    """

    def holding(*names: str) -> list[Evidence]:
        held = [name for name in names if said[name].holds]
        return [Evidence(said[name].text, source_of(name), name not in GENERIC) for name in held]

    def stated(weight: str) -> list[Evidence]:
        return [Evidence(one.text, one.source, weight != "fits") for one in beside if one.weight == weight]

    deciding, strong = holding(*card.decides) + stated("decides"), holding(*card.strong) + stated("strong")
    opening, fitting = holding(*card.opens), holding(*card.fits) + stated("fits")
    against = holding(*card.against) + stated("against")
    excluding = holding(*card.rules_out) + stated("rules_out")
    tested = stated("tested")
    speaking = tested + deciding + strong + opening + fitting
    points = DECIDES * len(deciding) + STRONG * len(strong) + FITS * len(opening + fitting) + AGAINST * len(against)
    is_backed = len({one.source for one in speaking}) >= INDEPENDENT and any(one.is_specific for one in speaking)
    grade: Grade | None = None
    if deciding or strong or opening:
        is_supported = points >= SUPPORTED and is_backed
        grade = "supported" if is_supported else "hypothesis" if points > 0 else None
    if deciding and not against:
        grade = "established"
    if excluding:
        grade = "ruled out" if not deciding else "hypothesis"
    if not is_known and grade in ("established", "supported"):
        grade = "hypothesis"
    if tested:
        grade = "established"
    missing = [said[name].missing for name in card.signs if said[name].holds is None]
    hypothesis = Hypothesis(
        cause=card.name,
        grade=grade or "hypothesis",
        evidence_for=tuple(dict.fromkeys(one.text for one in speaking)),
        evidence_against=tuple(dict.fromkeys(one.text for one in excluding + against)),
        missing=tuple(dict.fromkeys(missing)),
    )
    return Weighed(card, grade, points, hypothesis)


def first_action(facts: Facts, weighed: tuple[Weighed, ...], ending: str = "") -> str:
    """What to do first: go back if the damage stays, then the remedy of the likeliest cause, or the deciding test.

    Before that test comes the action in which the decision tree ends, where it ends in one.
    """
    likely = [item for item in weighed if item.grade != "ruled out"]
    done = facts.findings.done
    if (ended := interventions.how_it_stands(done)) is not None:
        return f"{ended}. {_action(facts, likely, ending) if likely else interventions.WITHOUT_CAUSE}"
    if not likely and interventions.lost_much(done):
        return interventions.LOOK_AT_SKIPS
    action = _action(facts, likely, ending)
    if facts.findings.standing and action.startswith("Leave it"):
        rest = f" As for the loss: {action[:1].lower()}{action[1:]}" if likely else ""
        return f"{LOOK_INTO.format(text=facts.findings.standing[0].text)}{rest}"
    return action


def _action(facts: Facts, likely: Sequence[Weighed], ending: str) -> str:
    """The action that the curve and the causes call for."""
    is_level = bool(facts.findings.unlearned) or _is_flat_from_the_start(facts)
    if is_level and not (
        likely and (likely[0].grade in ("established", "supported") or likely[0].card.name not in OPEN)
    ):
        return look_first(facts.run)
    if not likely:
        return _leave(facts) if facts.findings.verdict != "unknown" else f"Cannot tell: {facts.findings.because}."
    if facts.findings.verdict == "watch" and facts.findings.cleared:
        rise = min(facts.findings.cleared, key=gravity)
        change = announced_change(facts.run, rise)
        if change:
            return f"Leave it: {change}."
        has_grown = gradients_have_grown(facts.findings, rise)
        return (CHANGED_OR_DIVERGED if has_grown else CHANGED).format(step=rise.start)
    if facts.findings.verdict == "watch" and facts.findings.periodic:
        return IN_TURNS
    top = likely[0]
    if facts.findings.verdict == "healthy" and "metric" in top.card.explains and not _in_two_units(facts):
        return "Leave it: nothing asks for an action; what is logged could show more, as told below."
    if facts.findings.verdict == "healthy" and facts.findings.kind.is_trained_before:
        return _leave(facts)  # steps at epochs, a saw-tooth: usual there
    asks = facts.findings.verdict == "act"  # otherwise it is over, or unclear: no reason to give up what was learned
    if top.card.name in LEAVE_IT and top.grade != "hypothesis" and not asks:
        return f"Leave it: {_orders(facts, top.card.remedies)}."
    parts, past = [], _how_it_passed(facts)
    is_spared = top.card.spares_weights and not (top.grade == "hypothesis" and facts.leaps)  # that is no proof
    is_sound = facts.is_over or facts.is_only_scale or is_spared
    if asks and (facts.persists or facts.stays_bad) and not is_sound:
        at = f" (step {facts.checkpoint_before})" if facts.checkpoint_before is not None else ""
        is_late = len(facts.loss.finite.within(0, facts.sound_before - 1).values) > 0
        is_spoilt = facts.sound_before - 1 == facts.spoilt_update
        when = (
            f"from before the update of step {facts.spoilt_update}"
            if is_spoilt
            else f"before step {facts.sound_before}"
        )
        parts.append(f"reload the last checkpoint {when}{at}" if is_late else "begin again")
    is_of_a_kind = bool(facts.shown) and not set(FIRST).isdisjoint(top.card.explains[:1])
    if asks and not parts and is_of_a_kind and not top.card.spares_weights:
        since = min(one.step for one in facts.shown.values())
        checkpoint = facts.checkpoint_until(since)
        saved = f" (step {checkpoint})" if checkpoint is not None else ""
        parts.append(f"stop, and go back to the last checkpoint before step {since}{saved}")
    if top.grade == "hypothesis":
        parts += [ending] if ending and asks else []
        signals = f"log {', '.join(top.hypothesis.missing[:4]) or 'more signals'}"
        if not asks and (top.card.name == "unknown" or facts.is_held):  # nobody runs it again to find out
            so_far = f"Leave it, {past}" if past else "Leave it for now, and look again in 200 steps"
            return f"{so_far}; to know more the next time, {signals}."
        test = top.hypothesis.next_test or signals
        parts.append(_before_the_test(facts, likely, past) if not parts else "then find out")
        parts[-1] += f": {test}"
    elif top.card.name in LEAVE_IT:  # the run asks for an action, and to leave it is none
        parts.append(f"find out: {top.hypothesis.next_test}")
    elif orders := _orders(facts, top.card.remedies):
        is_lasting = (
            not (facts.came_back or facts.is_overcome)
            or set(top.card.explains) <= ASIDE.union(FIRST)
            or _is_of_the_loader(facts, top)
        )
        parts.append(
            orders if asks or is_lasting else f"leave it, {past or 'the loss is back'}; if it comes again, {orders}"
        )
    elif not parts:  # every remedy was tried, or is in force
        so_far = f"leave it, {past}; find out" if past and not asks else "find out"
        parts.append(f"{so_far}: {top.hypothesis.next_test or 'what else changed about the onset'}")
    text = ", ".join(part for part in parts if part)
    return text[:1].upper() + text[1:] + "."


def _leave(facts: Facts) -> str:
    """The action where none is called for; of a run in which something stands beside the loss, when to look again."""
    nothing = "Leave it: nothing asks for an action."
    if facts.norm_rise is None or facts.findings.verdict != "healthy":
        return nothing
    return f"{nothing[:-1]} while the loss falls; look again when it stops, since gradients grow."


def _how_it_passed(facts: Facts) -> str:
    """Why the present weights are not those that an incident spoilt; empty where they may be."""
    if facts.findings.verdict != "act":
        if facts.is_held:
            return "its update was skipped"
        if facts.is_overcome:
            return "the run went back and has passed it"
    return "the loss is back" if facts.is_over or registry.SIGNS["back-for-long"](facts).holds else ""


def _before_the_test(facts: Facts, likely: Sequence[Weighed], past: str) -> str:
    """How a test is called for that nothing goes before."""
    if past:
        return f"leave it, {past}; find out"
    is_well = facts.findings.verdict == "healthy" and not _beside_the_loss(facts, likely) and not _end(facts)
    return "leave it, nothing asks for an action; to know more" if is_well else "find out"


def _is_of_the_loader(facts: Facts, top: Weighed) -> bool:
    """Whether a loader was stuck, and is the cause: the loss comes back, the loader is as it was."""
    is_stuck = any(one.signal in ("batch_hash", "batch_index") for one in facts.findings.standing)
    return is_stuck and "batch-repeats" in top.card.decides


def how_the_rules_differ(facts: Facts) -> str:
    """One sentence that compares what the calibrated rules and the textbook rules find here."""
    (other,) = (rules for rules in RULES if rules != facts.rules)
    steps = facts.loss.steps[-COMPARED:]
    here = [incident.start for incident in facts.findings.incidents if len(steps) and incident.start >= steps[0]]
    found = {facts.rules: here, other: onsets(facts.run, facts.curve, rules=other, rows=COMPARED)}
    where = f"in the last {COMPARED:,} rows: " if len(facts.loss.steps) > COMPARED else ""
    return where + "; ".join(f"{name} rules: {_counted(found[name])}" for name in RULES)


def _counted(found: Sequence[int]) -> str:
    steps = [str(step) for step in found]
    more = ", ..." if len(steps) > 5 else ""
    return f"{len(steps)} incident{'' if len(steps) == 1 else 's'}" + (
        f" (at {', '.join(steps[:5])}{more})" if steps else ""
    )


def _orders(facts: Facts, remedies: tuple[Remedy, ...]) -> str:
    """The remedies that can be carried out, in words."""
    orders, idle, done = [], statements.without_help(facts), facts.findings.done
    for remedy in fitting(facts, remedies):
        if remedy.grade == "show-only":
            continue
        if remedy.lowers_the_rate and (registry.SIGNS["rate-is-tiny"](facts).holds or _is_flat_from_the_start(facts)):
            continue
        if interventions.is_done(facts.run, done, remedy.knob, remedy.value):
            continue
        if idle and any(each.name in idle for each in kinds_of(remedy.do)):  # it was tried, and did not help
            continue
        orders.append(remedy.do)
    return ", ".join(orders)


def _is_flat_from_the_start(facts: Facts) -> bool:
    return registry.SIGNS["flat-from-the-start"](facts).holds is True


def _with_test(facts: Facts, item: Weighed, likely: list[Weighed]) -> Weighed:
    """The cause, with the test that splits it from its likeliest rival: its own, or the rival's. Without either, its
    first test."""
    own = {test.apart_from: test.do for test in reversed(item.card.tests) if makes_sense(facts, test)}
    for rival in (other.card for other in likely if other is not item):
        theirs = (test.do for test in rival.tests if test.apart_from == item.card.name and makes_sense(facts, test))
        if test := own.get(rival.name) or next(theirs, ""):
            return replace(item, hypothesis=replace(item.hypothesis, next_test=test))
    first = next((test.do for test in item.card.tests if makes_sense(facts, test)), "")
    return replace(item, hypothesis=replace(item.hypothesis, next_test=first)) if first else item


def _unknown(likely: list[Weighed], weighed: list[Weighed], test: str) -> Weighed:
    """The card for an unknown cause, with a test. It names the signals that most of the other causes miss."""
    missed = Counter(name for item in weighed for name in item.hypothesis.missing)
    missing = tuple(name for name, _ in missed.most_common(TELLING))
    between = (
        "no sign decides between the causes above"
        if len(likely) > 1
        else "what speaks for the cause above is not enough"
    )
    text = between if likely else "no sign speaks for any known cause"
    hypothesis = Hypothesis(cause="unknown", grade="hypothesis", evidence_for=(text,), missing=missing, next_test=test)
    return Weighed(causes()["unknown"], "hypothesis", 0, hypothesis)
