"""The page of a symptom, as Markdown: what it usually is, how to tell, what to do first; and the list of all.

Mechanisms, tests, remedies and references are those of the cause cards.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from sealegs.diagnosis.cause_cards import Cause, causes
from sealegs.diagnosis.symptoms import Symptom, symptoms

MADE = (
    "<!-- Made by `sealegs symptom --write docs/symptoms` from src/sealegs/diagnosis/symptoms.toml and causes.toml: "
    "change those. -->"
)
GRADES = {
    "safe": "costs nothing if it is another cause",
    "opt-in": "changes the run",
    "show-only": "a person's decision",
}


def write(folder: Path) -> int:
    """Write all pages and their index, and return how many there are."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files().items():
        (folder / name).write_text(text, encoding="utf-8")
    return len(symptoms())


def files() -> Mapping[str, str]:
    """What is to lie in the folder of the pages, by the names of the files."""
    pages = {f"{each.name}.md": f"{MADE}\n{page(each, is_linked=True)}\n" for each in symptoms().values()}
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
        ]
    )


def page(symptom: Symptom, *, is_linked: bool = False) -> str:
    """The page of a symptom; with links where it lies among the other pages."""
    cards = [causes()[name] for name in symptom.causes]
    lines = [
        f"# {symptom.title}",
        "",
        f"Others say: {', '.join(symptom.searched)}.",
        "",
        "## What it usually is",
        symptom.usually,
        "",
        "The most common first:",
        *(f"{number}. **{card.title}.** {card.mechanism}" for number, card in enumerate(cards, 1)),
        "",
        "## How to tell in five minutes",
        "With Sealegs:",
        "```bash",
        symptom.command,
        "```",
        symptom.tells,
        "",
        "Without it:",
        *(f"- {step}" for step in symptom.by_hand),
        *_tests(cards),
        "",
        "## What to do first",
        symptom.first,
        "",
        "Then, by the cause:",
        *_remedies(cards),
        "",
        "## References",
        *(f"- {text}" for text in _once(text for card in cards for text in card.references)),
    ]
    return "\n".join(lines + (_links(symptom) if is_linked else []))


def _tests(cards: list[Cause]) -> list[str]:
    """What tells two causes of the page apart, by the test of either card."""
    titles = {card.name: card.title for card in cards}
    lines = [
        f"- *{card.title}*, or *{titles[test.apart_from]}*? {test.do[:1].upper()}{test.do[1:]}."
        for card in cards
        for test in card.tests
        if test.apart_from in titles
    ]
    return ["", "To tell one cause from another:", *lines] if lines else []


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


def _links(symptom: Symptom) -> list[str]:
    more = f"More: {symptom.see} · " if symptom.see else ""
    case = (
        f" · [an incident like it](../../tests/cases/{symptom.case}.md), which is run as a test" if symptom.case else ""
    )
    always = "[all symptoms](README.md) · [what `sealegs check` does](../check.md) · [guard a loop](../guard.md)"
    return ["", f"{more}{always}{case}"]


def _once(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))
