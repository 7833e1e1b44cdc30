"""Explains each finding of a Diagnosis in plain words, each with its page in the docs."""

import textwrap
from collections.abc import Iterator

from sealegs.diagnosis.cause_cards import causes
from sealegs.diagnosis.contract import Diagnosis
from sealegs.diagnosis.facts import Facts
from sealegs.diagnosis.fitting import fitting

PAGE = "docs/check.md"
WIDTH = 100
VERDICTS = {
    "healthy": "What tells first of this kind of run is as it should be. Nothing asks for an action; what is "
    "told beside the verdict is good to know.",
    "watch": "Something happened that healed by itself, or that may become more. Look at it when you are at your desk.",
    "act": "The run is damaged, or is getting worse, and waiting does not help. Every step from here on costs money.",
    "unknown": "There is too little in this log to tell. That is no good news and no bad news.",
}
INCIDENTS = {
    "nonfinite": "A loss that is NaN or infinite. If it comes once, one step was bad; if it stays, a weight is NaN, "
    "and everything computed from it will be.",
    "spike": "The loss leapt above what its own past makes likely. What matters is whether it came back: fast within "
    "50 steps, slowly within 500, not quite (lingering), or not at all (divergent).",
    "level_shift": "The loss stepped up and stayed there. Spikes are over in a moment; this is another level.",
    "drift": "The loss rises slowly, by less from step to step than its noise, which is why nobody sees it in time.",
    "collapse": "A policy, a router or a number format has collapsed. The loss need not show it: the finding names the "
    "signal that does.",
    "overflow": "fp16 holds numbers up to 65504. The loss scaler should halve at each overflow and double after 2000 "
    "clean steps; here it did not, or it fell below 1.",
    "plateau": "The loss does not fall any more. That is what the end of training looks like; it may also be too low "
    "a learning rate.",
    "resume_jump": "The loss is another one after the run was started again: something of its state did not come back, "
    "or the data began anew.",
    "epoch_step": "The loss steps down at the beginning of each epoch: the model has seen these data before, and "
    "remembers them. It is benign for the run; the evaluation loss says whether it is for the model.",
}
PROBLEMS = {
    "constant": "A metric that never changes is not measured.",
    "quantised": "The metric has only a few different values: it was rounded on its way, as bf16 does.",
    "smoothed": "What is logged is an average over many steps. Spikes are flattened and come late in it.",
    "hidden-nan": "Rows are missing where a NaN would be: some loggers drop it, or write an empty cell.",
    "missing": "Rows have no value where they should have one.",
    "impossible": "The metric has values that it cannot have, such as a negative norm.",
    "clipped": "The gradient norm never passes one value: it was measured after clipping, which hides every spike.",
    "hovers": "A loss of both signs, to and fro about zero, is a means to a gradient, as that of a policy gradient is: "
    "how high it is says nothing.",
    "flat": "The learning rate does not follow the schedule that the settings claim.",
    "coarse": "So few points were logged that what happens between two of them cannot be seen.",
}


def explained(diagnosis: Diagnosis) -> str:
    """One paragraph for each finding."""
    return "\n".join(["", "What this means", *_paragraphs(diagnosis)])


def _paragraphs(diagnosis: Diagnosis) -> Iterator[str]:
    found = diagnosis.findings
    yield from _paragraph(found.verdict, VERDICTS[found.verdict], "verdicts")
    for kind in dict.fromkeys(problem.kind for problem in found.problems):
        yield from _paragraph(kind, PROBLEMS[kind], "metrics-that-cannot-be-believed")
    yield from _standing(diagnosis)
    for kind in dict.fromkeys(incident.kind for incident in found.incidents):
        yield from _paragraph(kind, INCIDENTS[kind], "incidents")
    facts = Facts(found, diagnosis.rules)
    for hypothesis in diagnosis.hypotheses:
        card = causes()[hypothesis.cause]
        remedies = "; ".join(f"{remedy.do} ({remedy.grade})" for remedy in fitting(facts, card.remedies))
        references = f" See {'; '.join(card.references)}." if card.references else ""
        yield from _paragraph(card.title, f"{card.mechanism} Remedies: {remedies}.{references}", "causes")


def _standing(diagnosis: Diagnosis) -> Iterator[str]:
    """What stands in the first signals of the kind."""
    for one in diagnosis.findings.standing:
        if one.shows:
            what = "calls for action" if one.is_grave else "is to be watched"
            yield from _paragraph(one.shows.replace("-", " "), f"{one.text}. It {what}.", "first-signals")


def _paragraph(name: str, text: str, anchor: str) -> list[str]:
    whole = f"{name.replace('_', ' ')}: {text} ({PAGE}#{anchor})"
    return textwrap.wrap(whole, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
