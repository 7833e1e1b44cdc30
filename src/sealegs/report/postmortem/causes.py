"""What a post-mortem says about causes, from the diagnosis and the reruns of an incident."""

import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace

import msgspec

from sealegs.diagnosis.cause_cards import Remedy, causes
from sealegs.diagnosis.facts import Facts
from sealegs.diagnosis.fitting import fitting, healthy_norms
from sealegs.diagnosis.rank import Weighed, situations, weigh
from sealegs.diagnosis.signs import registry
from sealegs.record.schema import unspell
from sealegs.report.commands.replay import ArmShown, Replayed
from sealegs.report.postmortem.blocks import FEWEST
from sealegs.report.postmortem.values import CandidateCause
from sealegs.stats.clip_limit import clip_limit

MOST_LIKELY, MOST_RULED_OUT = 5, 4
ORDER = ("established", "supported", "hypothesis", None, "ruled out")
"""Grades, the likeliest first; None is a cause that too little speaks for."""
FAVOURED = ("necessary and sufficient", "necessary", "sufficient")
"""Standings of a cause that the reruns speak for, the strongest first."""
OUT = "not needed"
"""The standing of a cause without which the incident is there all the same."""
OF_THE_BATCHES = ("long-tail-token", "bad-data-batch", "hard-batch")
"""Causes that all say: these batches, with any state. Reruns without them, or of them, do not tell these apart."""
TELLING = 8
"""The most lines of discriminating evidence."""
NOT_IN_THE_RECORD = frozenset(
    {
        *(
            "corrupt-weight",
            "corrupt-gradient",
            "kernel-fault",
            "ranks-out-of-step",
            "dependency-change",
            "metric-wrong",
        ),
        *("optimizer-reset", "resume-state-missing", "data-order", "lr-discontinuity", "unlogged-step-size"),
        "misaligned-restart",
    }
)
"""Causes that a rerun may lack. All others are in the state, the batches and the rates that it starts from."""
PANEL_WORDS = (
    (10, ("batch", "entropy", "source", "data", "shuffl", "epoch")),
    (3, ("grad", "clip")),
    (9, ("scale", "fp16", "dtype", "overflow", "precision")),
    (4, ("activation", "attention", "logit", "softmax", "norm")),
    (6, ("moment", "beta", "optimizer", "adam")),
    (2, ("lr", "learning rate", "rate", "warm")),
    (7, ("token",)),
    (5, ("weight", "param", "init", "decay")),
    (8, ("throughput", "seconds", "slow")),
)
"""Words that point to a panel, for a cause without a sign that has a number."""


def hypotheses(facts: Facts, replayed: Replayed | None) -> tuple[CandidateCause, ...]:
    """At least three causes, where that many explain the signs; the tested one first, ruled-out ones last."""
    said = registry.read(facts)
    shown = set(situations(facts, said)) or {"spike"}
    tested = {replayed.cause, *replayed.causes} if replayed is not None else set()
    cards = [card for card in causes().values() if card.name != "unknown"]
    weighed = [weigh(card, said) for card in cards if shown & set(card.explains) or card.name in tested]
    # what reruns speak for comes first, so that none of it is left out for its place
    weighed.sort(key=lambda each: (_place_by_reruns(each.card.name, replayed), ORDER.index(each.grade), -each.points))
    likely = [each for each in weighed if each.grade in ORDER[:3] or each.card.name in tested]
    out = [each for each in weighed if each.grade == "ruled out" and each not in likely]
    more = [each for each in weighed if each.grade is None and each not in likely]
    likely = likely[: max(MOST_LIKELY, len(tested))]
    out = out[:MOST_RULED_OUT]
    likely += more[: max(FEWEST - len(likely) - len(out), 0)]
    names = [each.card.name for each in (*likely, *out)]
    found = [_hypothesis(each, names) for each in (*likely, *out)]
    return tuple(found if replayed is None else _tested(found, replayed))


def unless_the_log_knows(facts: Facts, replayed: Replayed | None) -> Replayed | None:
    """The reruns, without a cause that is merely left over where the log establishes another one."""
    if replayed is None or not replayed.is_by_exclusion:
        return replayed
    said = registry.read(facts)
    shown = set(situations(facts, said))
    cards = (card for card in causes().values() if shown & set(card.explains) and card.name != replayed.cause)
    is_known = any(weigh(card, said).grade == "established" for card in cards)
    return msgspec.structs.replace(replayed, cause=None) if is_known else replayed


def panels_in(texts: Sequence[str]) -> tuple[int, ...]:
    """The panels that sentences cite.

    >>> panels_in(["panels 1, 3: grad norm 47", "panel 10: no batch repeats", "beta2 0.95"])
    (1, 3, 10)
    """
    cited = (re.match(r"panels? ([\d, ]+):", text) for text in texts)
    return tuple(sorted({int(number) for match in cited if match for number in match[1].split(",")}))


def discriminating(found: Sequence[CandidateCause], replayed: Replayed | None) -> tuple[str, ...]:
    """The evidence between the hypotheses: one line per rerun, otherwise the signs that favour some over others."""
    numbers = {each.cause: f"H{number}" for number, each in enumerate(found, 1)}
    ruled_out = {each.cause for each in found if each.grade == "ruled out"}
    if replayed is not None and (told := tuple(_reruns(replayed, numbers, ruled_out))):
        return told
    lines = []
    sentences = dict.fromkeys(text for each in found for text in (*each.evidence_for, *each.evidence_against))
    for sentence in sentences:
        favoured = [numbers[each.cause] for each in found if sentence in each.evidence_for]
        against = [each for each in found if sentence in each.evidence_against]
        out = [numbers[each.cause] for each in against if each.grade == "ruled out"]
        doubted = [numbers[each.cause] for each in against if each.grade != "ruled out"]
        words = (("favours", favoured), ("speaks against", doubted), ("rules out", out))
        if len(favoured) < len(found):
            lines.append(f"{sentence}: {', '.join(f'{verb} {_and(names)}' for verb, names in words if names)}")
    return tuple(lines[:TELLING])


def root_cause(found: Sequence[CandidateCause], replayed: Replayed | None, command: str, has_capsule: bool) -> str:
    """One sentence: the cause, or that it is unknown and which test would tell."""
    if replayed is not None and replayed.cause is not None:
        return f"{title_of(replayed.cause)}, tested: {replayed.because}."
    top = next((each for each in found if each.grade not in ("ruled out", "not supported")), None)
    if top is not None and top.grade == "established" and replayed is None:
        return f"{top.title}, established by the log and not replayed: {top.evidence_for[0]}."
    if top is not None and top.grade == "established" and replayed is not None and replayed.departure:
        seen = "the reruns show that something was at work which the record does not hold"
        return f"{top.title}, established by the log: {top.evidence_for[0]}; {seen}: {replayed.departure}."
    first = top or next((each for each in found if each.grade != "ruled out"), None)
    test = first.next_test if first is not None else ""
    if replayed is None and has_capsule:
        test = f"`sealegs replay {command}`"
    reason = f" ({replayed.because})" if replayed is not None else f"; likeliest is H1, {top.title}" if top else ""
    missing = f"log {', '.join(first.missing[:4])}" if first is not None and first.missing else "log more signals"
    return f"Not known yet{reason}, and this is the test that would tell: {test or missing}."


def blamed(found: Sequence[CandidateCause], replayed: Replayed | None) -> str | None:
    """The cause whose remedy is proposed: the tested one, otherwise one that the log at least supports."""
    if replayed is not None and (replayed.cause is not None or not replayed.departure):
        return replayed.cause
    top = next(iter(found), None)
    enough = ("established", "supported") if replayed is None else ("established",)
    return top.cause if top is not None and top.grade in enough else None


def remedies(facts: Facts, cause: str) -> list[Remedy]:
    """The remedies of a card that make sense here, the smallest change first."""
    card = causes().get(cause)
    found = fitting(facts, card.remedies if card is not None else ())
    return sorted(found, key=lambda remedy: ("safe", "opt-in", "show-only").index(remedy.grade))


def doubt_of_clip(facts: Facts, clip: float) -> str:
    """What is to be said where a clip that a rerun is made with would clip most healthy steps of the run."""
    limit = clip_limit(clip, healthy_norms(facts))
    return f"in the run itself not clip {clip:g}: {limit.because}" if limit.value != clip else ""


def told(remedy: Remedy) -> str:
    """A remedy with its setting and value, and its grade where it is not safe."""
    grade = "" if remedy.grade == "safe" else f"{remedy.grade}; "
    return f"{remedy.do} ({grade}{remedy.knob}: {remedy.value})"


def title_of(cause: str) -> str:
    """The title on the cause's card."""
    card = causes().get(cause)
    return card.title if card is not None else cause.replace("-", " ")


def _hypothesis(weighed: Weighed, names: Sequence[str]) -> CandidateCause:
    """The hypothesis, with the test against the likeliest other cause that its card has a test for."""
    told = weighed.hypothesis
    texts = (*told.evidence_for, *told.evidence_against)
    tests = [test for test in weighed.card.tests if test.apart_from in names] or list(weighed.card.tests)
    tests.sort(key=lambda test: names.index(test.apart_from) if test.apart_from in names else len(names))
    return CandidateCause(
        cause=told.cause,
        title=weighed.card.title,
        grade=weighed.grade or "not supported",
        panels=panels_in(texts) or (_panel_of(" ".join((told.cause, *texts))),),
        evidence_for=told.evidence_for,
        evidence_against=told.evidence_against,
        missing=told.missing,
        next_test=tests[0].do if tests and weighed.grade != "ruled out" else "",
    )


def _panel_of(text: str) -> int:
    """The panel to look at, if no sentence names one.

    >>> _panel_of("stale-beta2 beta2 0.95: the second moment averages 20 steps")
    6
    """
    words = text.lower().replace("-", " ")
    return next((panel for panel, parts in PANEL_WORDS if any(part in words for part in parts)), 1)


def _place_by_reruns(cause: str, replayed: Replayed | None) -> int:
    """The place of a cause among all, as the reruns have it: the one that they establish, those that they favour."""
    if replayed is None:
        return 0
    if cause == replayed.cause:
        return -len(FAVOURED) - 1
    return -len(FAVOURED) + FAVOURED.index(standing) if (standing := _standing(cause, replayed)) in FAVOURED else 0


def _standing(cause: str, replayed: Replayed) -> str:
    """What the reruns say of a cause. A record that differs from them rules out what they start from."""
    if replayed.departure and cause not in NOT_IN_THE_RECORD and cause != replayed.cause:
        return OUT
    return replayed.causes.get(cause, "unknown")


def _tested(found: Sequence[CandidateCause], replayed: Replayed) -> list[CandidateCause]:
    """The hypotheses, revised by the reruns: the established cause first, then those that they favour, and the causes
    that are not needed ruled out."""
    likely: list[CandidateCause] = []
    out: list[CandidateCause] = []
    for each in sorted(found, key=lambda one: _place_by_reruns(one.cause, replayed)):
        panels, standing = tuple(sorted({1, *each.panels})), _standing(each.cause, replayed)
        if each.cause == replayed.cause:
            told = (f"panel 1: {replayed.because} (rerun)", *each.evidence_for)
            likely.append(replace(each, grade="tested", evidence_for=told, panels=panels, next_test=""))
        elif standing == OUT and not (replayed.cause is None and each.grade == "established"):
            why = replayed.departure or "the incident is there without it too"
            told = (f"panel 1: {why} (rerun)", *each.evidence_against)
            out.append(replace(each, grade="ruled out", evidence_against=told, panels=panels, next_test=""))
        elif standing in FAVOURED:
            shown = f"panel 1: the reruns show it as {standing}"
            if _is_same_family(each.cause, replayed):
                shown = f"panel 1: the reruns show these batches as {standing}; they do not tell it from H1"
            told = (shown, *each.evidence_for)
            grade = each.grade if each.grade in ("established", "supported") else "hypothesis"
            likely.append(replace(each, grade=grade, evidence_for=told, panels=panels))
        else:
            (out if each.grade == "ruled out" else likely).append(each)
    return likely + out


def _reruns(replayed: Replayed, numbers: dict[str, str], ruled_out: Set[str]) -> Iterator[str]:
    if replayed.departure:
        out = [number for cause, number in numbers.items() if cause in ruled_out and _standing(cause, replayed) == OUT]
        verdicts = [f"favours {_numbered(replayed.cause, numbers)}"] if replayed.cause else []
        verdicts += [f"rules out {_and(out)}"] if out else []
        yield f"panels 1, 3, run again from the same state and data: {replayed.departure}: {', '.join(verdicts)}"
    if replayed.location:
        name = f": favours {_numbered(replayed.cause, numbers)}" if replayed.cause else ""
        yield f"panel 1, every operation looked at: {replayed.location}{name}"
    placebos = [arm for arm in replayed.arms if arm.kind == "placebo"]
    is_sound = all(arm.shows == "there" for arm in placebos)
    if placebos:
        left = ", ".join(f"{arm.name} {_share(arm)}" for arm in placebos)
        means = "what the other reruns show counts" if is_sound else "what the other reruns show proves nothing"
        yield f"panel 1, left of the incident after harmless changes: {left}: {means}"
    for arm in (arm for arm in replayed.arms if arm.kind != "placebo"):
        verdict = _verdict(arm, _numbered(arm.cause, numbers), replayed)
        verdict = verdict if is_sound or _standing(arm.cause, replayed) in FAVOURED else "tells nothing"
        yield f"panel 1, rerun with {arm.name} ({arm.does}): {_share(arm)} of the incident is left: {verdict}"


def _verdict(arm: ArmShown, name: str, replayed: Replayed) -> str:
    """What one rerun says of its cause, as all reruns together have it. Only the established cause is favoured, if
    there is one: what else the incident needs is no other root cause."""
    standing = _standing(arm.cause, replayed)
    if standing == OUT:
        return f"rules out {name}"
    shows = arm.shows == ("gone" if arm.kind == "without" else "there")
    if shows and standing in FAVOURED:
        if replayed.cause in (None, arm.cause):
            return f"favours {name}"
        if _is_same_family(arm.cause, replayed):
            what = "needs these batches" if arm.kind == "without" else "comes with these batches alone"
            return f"the incident {what}: H1 and {name} both say so, and this does not tell them apart"
        return f"the incident needs {name}, too" if arm.kind == "without" else f"{name} alone can bring it, too"
    is_against = arm.kind == "with" and arm.shows == "gone" and arm.cause != replayed.cause
    return f"speaks against {name}" if is_against else f"leaves {name} open"


def _is_same_family(cause: str, replayed: Replayed) -> bool:
    """Whether a cause and the tested one, which is the first, both say that it is these batches."""
    return cause != replayed.cause and {cause, replayed.cause} <= set(OF_THE_BATCHES)


def _numbered(cause: str, numbers: dict[str, str]) -> str:
    return numbers.get(cause) or f"{cause.replace('-', ' ')} (not among the hypotheses)"


def _share(arm: ArmShown) -> str:
    left = float(unspell(arm.left))
    return f"{left:.0%}" if left < 10 else "more than all"


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
