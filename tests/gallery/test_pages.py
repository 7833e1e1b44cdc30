"""The pages of docs/gallery are made of what came out last, and the definitions agree with it."""

import re
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from sealegs.cli.main import main
from sealegs.diagnosis.symptoms import symptoms
from sealegs.errors import SourceError
from sealegs.gallery.definitions import Incident, incidents
from sealegs.gallery.pages import Outcomes, files, page

FOLDER = Path(__file__).parents[2] / "docs" / "gallery"
OUTCOMES = Outcomes(FOLDER / "outcomes")
AGAIN = "make them again: sealegs gallery pages docs/gallery"


def test_the_pages_are_as_the_command_writes_them() -> None:
    there = {path.name: path.read_text("utf-8") for path in FOLDER.iterdir() if path.is_file()}
    made = files(OUTCOMES)
    assert sorted(there) == sorted(made), AGAIN
    assert [name for name, text in made.items() if there[name] != text] == [], AGAIN


def test_there_is_no_outcome_without_an_incident() -> None:
    assert sorted(path.stem for path in OUTCOMES.folder.iterdir()) == sorted(incidents())


@pytest.mark.parametrize("incident", incidents().values(), ids=lambda each: each.name)
def test_a_definition_says_what_came_out(incident: Incident) -> None:
    outcome = OUTCOMES.of(incident)
    assert outcome.name == incident.name
    assert (outcome.found, outcome.guard, outcome.seconds) == (incident.found, incident.guard, incident.seconds)
    assert (outcome.cause or "") == incident.named
    if outcome.found == "found":
        assert outcome.cause in incident.cards
    if outcome.found == "wrong":
        assert outcome.cause not in incident.cards


def test_nothing_that_lies_there_is_large() -> None:
    large = {path.name: path.stat().st_size for path in FOLDER.rglob("*") if path.stat().st_size > 40_000}
    assert large == {}
    assert sum(path.stat().st_size for path in FOLDER.rglob("*")) < 1_500_000


def test_a_curve_is_a_picture_of_its_own() -> None:
    for path in FOLDER.glob("*.svg"):
        root = ET.fromstring(path.read_text("utf-8"))  # noqa: S314 - our own file
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert len(root.findall(".//{*}polyline")) >= 2


def test_a_page_says_where_nothing_was_found() -> None:
    each = next(each for each in incidents().values() if each.found == "not found")
    text = page(each, OUTCOMES.of(each))
    assert "The cause is **not found**" in text
    assert each.truth in text


def test_no_page_names_a_folder_of_the_machine_that_made_it() -> None:
    for path in FOLDER.rglob("*.*"):
        assert not re.search(r"/(tmp|home|work|Users)/", path.read_text("utf-8")), path.name


def test_an_outcome_takes_the_place_of_the_former_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pages, made = tmp_path / "pages", tmp_path / "made"
    shutil.copytree(FOLDER, pages)
    made.mkdir()
    source = (pages / "outcomes" / "nan-gradient.json").read_text("utf-8")
    seconds = incidents()["nan-gradient"].seconds
    (made / "outcome.json").write_text(source.replace(f'"seconds": {seconds}', '"seconds": 4321'))
    assert main(["gallery", "pages", str(pages), "--add", str(made)]) == 0
    assert capsys.readouterr().out == f"wrote {len(incidents())} pages to {pages}\n"
    assert "About 4321 seconds" in (pages / "nan-gradient.md").read_text("utf-8")


def test_an_outcome_that_cannot_be_read_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "outcome.json").write_text("{}")
    for place in (tmp_path, tmp_path / "nowhere"):
        assert main(["gallery", "pages", str(tmp_path / "pages"), "--add", str(place)]) == 2
        assert "cannot be read" in capsys.readouterr().err
    with pytest.raises(SourceError, match="sealegs gallery run nan-gradient"):
        Outcomes(tmp_path).of(incidents()["nan-gradient"])


def test_every_symptom_that_is_named_has_its_page() -> None:
    named = {each.symptom for each in incidents().values()} - {None}
    assert named <= symptoms().keys()
    assert len(named) >= 8
