"""The page of a symptom, as Markdown: what it usually is, how to tell, what to do first; and the list of all.

Mechanisms, tests, remedies and references are those of the cause cards.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from sealegs.diagnosis.cause_cards import Cause, causes
from sealegs.diagnosis.symptoms import Symptom, symptoms

MADE = (
    "<!-- Made by `sealegs symptom --write docs/symptoms` from src/sealegs/diagnosis/symptoms.toml and causes.toml: "
    "change those. -->"
)
GRADES = {
    "safe": "costs nothing",
    "opt-in": "changes the run",
    "show-only": "a person's decision",
}
IN_BRACKETS = (
    "Then, by the cause. In brackets are the setting, its value, and what it costs if the cause is another: it *costs "
    "nothing*; it *changes the run*, so do it where the cause is likely, and one thing at a time; or it is *a person's "
    "decision*, since it changes the data, the machine or the plan."
)
PRINTED = (
    "`trainer_state.json` lies in the Trainer's checkpoints (`out/checkpoint-500`), so there is none before the first "
    "is saved. What the Trainer prints will do as well: `sealegs check train.log`."
)
MEASURED = " ([measured](../benchmarks/2026-11-18-kinds.md))"
ADDRESSES = (
    (re.compile(r"\barXiv:(\d{4}\.\d{4,5})"), r"[\g<0>](https://arxiv.org/abs/\1)"),
    (re.compile(r"(?<!/)\b((?:[a-z0-9-]+\.)+(?:com|co|ai|org|io)/[\w./-]*\w)"), r"[\1](https://\1)"),
    (re.compile(r"\b([\w-]+/[\w.-]+) issue (\d+)"), r"[\g<0>](https://github.com/\1/issues/\2)"),
)
"""What is an address in a reference, and the link that it becomes."""

Shown = Mapping[str, Sequence[tuple[str, str]]]
"""Incidents of the gallery by the symptom that they show: name and title."""


def write(folder: Path, shown: Shown) -> int:
    """Write all pages and their index, and return how many there are."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files(shown).items():
        (folder / name).write_text(text, encoding="utf-8")
    return len(symptoms())


def files(shown: Shown) -> Mapping[str, str]:
    """What is to lie in the folder of the pages, by the names of the files."""
    pages = {
        f"{each.name}.md": f"{MADE}\n{page(each, is_linked=True, shown=shown.get(each.name, ()))}\n"
        for each in symptoms().values()
    }
    return pages | {"README.md": f"{MADE}\n{index()}\n"}


def index() -> str:
    """The list of all pages."""
    rows = [f"- [{each.title}]({each.name}.md)" for each in symptoms().values()]
    return "\n".join(
        [
            "# Symptoms",
            "",
            "A page for each thing that people see and search for: what it usually is, how to tell in five minutes",
            "with Sealegs and without, and what to do first. `sealegs symptom WORDS` finds the page by the words of a",
            "question, and `sealegs check LOG` looks at the log itself.",
            "",
            *rows,
            "",
            "The causes on these pages are the cards of [causes.toml](../../src/sealegs/diagnosis/causes.toml).",
            "To skip a bad update before it is made, see [the guard](../guard.md).",
        ]
    )


def page(symptom: Symptom, *, is_linked: bool = False, shown: Sequence[tuple[str, str]] = ()) -> str:
    """The page of a symptom; with links where it lies among the other pages."""
    cards = [causes()[name] for name in symptom.causes]
    brought = [*((each.title, each.mechanism) for each in symptom.reasons), *((it.title, it.mechanism) for it in cards)]
    references = _once(text for card in cards for text in card.references)
    lines = [
        f"# {symptom.title}",
        "",
        f"Others say: {', '.join(symptom.searched)}.",
        "",
        "## What it usually is",
        symptom.usually,
        "",
        "The most common first:",
        *(f"{number}. **{title}.** {mechanism}" for number, (title, mechanism) in enumerate(brought, 1)),
        "",
        "## How to tell in five minutes",
        "With Sealegs:",
        "```bash",
        symptom.command,
        "```",
        symptom.tells,
        *(["", PRINTED] if "trainer_state.json" in symptom.command else []),
        *(["", f"How well this is known: {symptom.known}{MEASURED if is_linked else ''}."] if symptom.known else []),
        "",
        "Without it:",
        *(f"- {step}" for step in symptom.by_hand),
        *(["", "```python", *symptom.snippet.strip().splitlines(), "```"] if symptom.snippet else []),
        *_tests(symptom, cards),
        "",
        "## What to do first",
        symptom.first,
        "",
        _in_brackets(is_linked=is_linked) if cards else "Then, by what it is:",
        *(f"- {each.title}: {each.do}." for each in symptom.reasons),
        *_remedies(cards),
    ]
    if references:
        lines += ["", "## References", *(f"- {_linked(text) if is_linked else text}" for text in references)]
    return "\n".join(lines + (_links(symptom, shown) if is_linked else []))


def _in_brackets(*, is_linked: bool) -> str:
    return IN_BRACKETS if is_linked else IN_BRACKETS.replace("*", "")


def _tests(symptom: Symptom, cards: list[Cause]) -> list[str]:
    """What tells two causes of the page apart: of each two the test that comes first, and tests that are alike once."""
    titles = {card.name: card.title for card in cards}
    firsts: dict[frozenset[str], tuple[str, str]] = {}
    for card in cards:
        for test in card.tests:
            if test.apart_from in titles:
                which = f"*{card.title}*, or *{titles[test.apart_from]}*?"
                firsts.setdefault(frozenset((card.name, test.apart_from)), (which, test.do))
    lines = [f"- *{each.title}*? {_sentence(each.test)}" for each in symptom.reasons]
    lines += [f"- {which} {_sentence(do)}" for which, do in firsts.values()]
    return ["", "To tell one cause from another:", *lines] if lines else []


def _sentence(do: str) -> str:
    return f"{do[:1].upper()}{do[1:]}."


def _remedies(cards: list[Cause]) -> list[str]:
    """The remedies of each card; of two that set one thing alike, for other signs of a log, the first."""
    lines = []
    for card in cards:
        of_card = {(remedy.knob, remedy.value): remedy for remedy in reversed(card.remedies)}
        lines += [
            f"- {card.title}: {remedy.do} (`{remedy.knob}`: {remedy.value}; {GRADES[remedy.grade]})."
            for remedy in card.remedies
            if of_card[remedy.knob, remedy.value] is remedy
        ]
    return lines


def _linked(reference: str) -> str:
    """A reference whose addresses are links.

    >>> _linked("PaLM, arXiv:2204.02311 (z-loss); pytorch/ao issue 3356")
    'PaLM, [arXiv:2204.02311](https://arxiv.org/abs/2204.02311) (z-loss); [pytorch/ao issue 3356](https://github.com/pytorch/ao/issues/3356)'
    """
    for address, link in ADDRESSES:
        reference = address.sub(link, reference)
    return reference


def _links(symptom: Symptom, shown: Sequence[tuple[str, str]]) -> list[str]:
    return ["", " · ".join(chain(_more(symptom), _incidents(symptom, shown)))]


def _more(symptom: Symptom) -> Iterator[str]:
    always = "[all symptoms](README.md) · [what `sealegs check` does](../check.md) · [guard a loop](../guard.md)"
    yield f"More: {symptom.see} · {always}" if symptom.see else always


def _incidents(symptom: Symptom, shown: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Incidents of the gallery, which can be run again; and the log that is checked in a test."""
    if shown:
        taken = ", ".join(f"[{title}](../gallery/{name}.md)" for name, title in shown)
        yield f"taken apart in the [gallery](../gallery/README.md): {taken}"
    if symptom.case:
        yield f"[a log that shows it](../../tests/cases/{symptom.case}.md), on which `sealegs check` is tested"


def _once(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))
