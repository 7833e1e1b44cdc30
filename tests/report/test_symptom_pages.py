"""The pages of docs/symptoms are those that the command makes now, and the commands on them can be run."""

import re
import shlex
import textwrap
from pathlib import Path

import pytest

from sealegs.cli.main import COMMANDS, main
from sealegs.diagnosis.cause_cards import causes
from sealegs.diagnosis.symptoms import Symptom, symptoms
from sealegs.gallery.definitions import by_symptom, incidents
from sealegs.report.symptom_pages import files, page

FOLDER = Path(__file__).parents[2] / "docs" / "symptoms"


def test_the_pages_are_as_the_command_writes_them() -> None:
    there = {path.name: path.read_text() for path in FOLDER.iterdir()}
    made = files(by_symptom())
    assert sorted(there) == sorted(made)
    stale = [name for name, text in made.items() if there[name] != text]
    assert stale == [], "make them again: sealegs symptom --write docs/symptoms"


def test_a_page_has_what_its_cards_say() -> None:
    text = page(symptoms()["loss-jumps-after-resume"])
    card = causes()["optimizer-reset"]
    assert card.mechanism in text
    assert all(reference in text for reference in card.references)
    assert all(f"{card.title}: {remedy.do}" in text for remedy in card.remedies)
    assert "](" not in text, "in a terminal a link is noise"
    shown = page(symptoms()["loss-jumps-after-resume"], is_linked=True).splitlines()[-1]
    assert shown.startswith("More: [what a checkpoint lacks](../audit.md) · [all symptoms](README.md) · ")


def test_a_page_leads_to_the_incidents_of_the_gallery_that_show_it() -> None:
    made = files(by_symptom())
    shown = [each for each in incidents().values() if each.symptom is not None]
    assert len(shown) >= 28
    for each in shown:
        assert f"[{each.title}](../gallery/{each.name}.md)" in made[f"{each.symptom}.md"]


def test_two_causes_are_told_apart_once_and_addresses_are_links() -> None:
    text = page(symptoms()["loss-spikes-and-stays-high"], is_linked=True)
    asked = [frozenset(found) for found in re.findall(r"^- \*([^*]+)\*, or \*([^*]+)\*\? ", text, flags=re.MULTILINE)]
    assert len(asked) > 3
    assert len(set(asked)) == len(asked)
    assert "[arXiv:2210.02414](https://arxiv.org/abs/2210.02414) (shrinks" in text
    assert re.findall(r"(?<!\[)arXiv:\d", text) == []
    one = page(symptoms()["grad-norm-nan-loss-zero"], is_linked=True)
    assert "[artidoro/qlora issue 84](https://github.com/artidoro/qlora/issues/84)" in one


def test_what_is_no_cause_stands_on_the_page_too() -> None:
    slow = symptoms()["training-is-slow-on-one-rank"]
    text = page(slow)
    assert slow.reasons
    assert slow.snippet.strip() in text
    assert all(
        f"**{each.title}.** {each.mechanism}" in text and f"- {each.title}: {each.do}." in text for each in slow.reasons
    )
    assert "## References" not in text


@pytest.mark.parametrize("symptom", [each for each in symptoms().values() if each.snippet], ids=lambda each: each.name)
def test_a_snippet_is_python(symptom: Symptom) -> None:
    compile(f"while True:\n{textwrap.indent(symptom.snippet, '  ')}", symptom.name, "exec")


@pytest.mark.parametrize("symptom", symptoms().values(), ids=lambda symptom: symptom.name)
def test_the_command_of_a_page_is_one(symptom: Symptom, capsys: pytest.CaptureFixture[str]) -> None:
    for words in [symptom.command, *re.findall(r"`(sealegs [^`]+)`", symptom.tells)]:
        program, command, *rest = shlex.split(words)
        assert program == "sealegs"
        assert command in COMMANDS
        flags = [word for word in rest if word.startswith("--")]
        if flags:
            with pytest.raises(SystemExit):
                main([command, "--help"])
            assert all(flag in capsys.readouterr().out for flag in flags)


def test_the_command_finds_lists_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["symptom", "grad_norm", "nan", "loss", "0.0"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("# grad_norm is nan and loss is 0.0\n")
    assert "Or is it one of these?" in out
    assert main(["symptom", "loss-is-inf"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("# The loss is inf\n")
    assert "Or is it" not in out
    assert main(["symptom"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(symptoms())
    assert main(["symptom", "--write", str(tmp_path / "pages")]) == 0
    assert len(list((tmp_path / "pages").iterdir())) == len(symptoms()) + 1


def test_words_that_no_page_has_are_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["symptom", "xyzzy"]) == 2
    assert capsys.readouterr().err == (
        "sealegs symptom: WORD='xyzzy': no symptom has any of these words; `sealegs symptom` lists all\n"
    )
