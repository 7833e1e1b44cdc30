"""``sealegs gallery``: the list, an incident that is really made, and what is refused."""

import json
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sealegs.cli import gallery
from sealegs.cli.main import main
from sealegs.drills.loops import LabLoop
from sealegs.gallery.definitions import Incident, incidents
from sealegs.record.run import open_run
from sealegs.report.commands.gallery import Gallery, Outcome
from sealegs.report.postmortem import plots

DOCS = Path(__file__).parents[2] / "docs"
SAMPLED = 24
"""CPU seconds, of a busy machine and with pictures, that an incident may have taken to have its turn in `make test`."""


def of_today() -> Incident:
    """Those that are soon done have their turn, one a day: the same in every process of a day."""
    short = [each for each in incidents().values() if each.seconds <= SAMPLED]
    return short[datetime.now(UTC).date().toordinal() % len(short)]


def made(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, Outcome]:
    code = main(["gallery", "run", name, "--out", str(folder), "--json"])
    return code, msgspec.convert(json.loads(capsys.readouterr().out), Outcome)


def holds_together(incident: Incident, folder: Path, code: int, outcome: Outcome) -> None:
    """It came out as its definition says, and what is named lies there."""
    assert (outcome.found, outcome.cause or "", outcome.guard) == (incident.found, incident.named, incident.guard)
    assert code == 0
    assert {"outcome.json", "verdict.json", "clean", "unguarded", "guarded"} <= {path.name for path in folder.iterdir()}
    assert all((folder / file).is_file() for file in outcome.files)
    assert json.loads((folder / "verdict.json").read_text())["verdict"] == outcome.verdict
    struck = bool(incident.practice.faults) or incident.runs == "gan"
    assert any(event.kind == "fault" for event in open_run(folder / "unguarded").events) == struck


def test_the_incident_of_today_comes_out_as_its_page_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "can_draw", lambda: False)  # pictures take the longest, and are looked at elsewhere
    monkeypatch.setattr(gallery, "_draw", lambda folder: None)
    incident = of_today()
    holds_together(incident, tmp_path / "made", *made(incident.name, tmp_path / "made", capsys))


@pytest.mark.long
@pytest.mark.parametrize("incident", incidents().values(), ids=lambda each: each.name)
def test_every_incident_comes_out_as_its_page_says(
    incident: Incident, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    holds_together(incident, tmp_path / "made", *made(incident.name, tmp_path / "made", capsys))


def test_the_list_names_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gallery"]) == 0
    out = capsys.readouterr().out
    assert main(["gallery", "list"]) == 0
    assert capsys.readouterr().out == out
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[1 : len(incidents()) + 1]] == list(incidents())
    found = sum(each.found == "found" for each in incidents().values())
    assert f"{len(incidents())} incidents; the cause is found in {found}." in out
    assert main(["gallery", "list", "--json"]) == 0
    listed = msgspec.convert(json.loads(capsys.readouterr().out), Gallery)
    assert [each.name for each in listed.incidents] == list(incidents())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("run", "nan-gradiant"), "did you mean nan-gradient"),
        (("run",), "NAME: which incident? `sealegs gallery list` lists them"),
        (("run", "nan-gradient", "--out", "full"), "--out full: there is something in it"),
        (("run", "nan-gradient", "--add", "x"), "--add x: `run` has none; it is for `pages FOLDER`"),
        (("list", "nan-gradient"), "`sealegs gallery run nan-gradient` runs one"),
        (("list", "--out", "x"), "--out x: `list` has none; it is for `run NAME`"),
        (("pages",), "NAME: which folder?"),
        (("pages", "x", "--json"), "--json: `pages` prints nothing to read; leave it out"),
    ],
)
def test_what_it_does_not_know_is_one_sentence(
    words: tuple[str, ...],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("full").mkdir()
    Path("full", "something").touch()
    assert main(["gallery", *words]) == 2
    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["gallery", "--help"])
    assert "sealegs gallery run nan-gradient" in capsys.readouterr().out


def test_an_interrupt_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: LabLoop, folder: Path, *_: object, **__: object) -> float:
        folder.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(LabLoop, "ending", interrupted)
    assert main(["gallery", "run", "nan-gradient", "--out", str(tmp_path / "made")]) == 130
    assert capsys.readouterr().err == "sealegs gallery: interrupted\n"
    assert not (tmp_path / "made").exists()


@pytest.mark.long
def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    """In a process of its own, in the middle of its first run."""
    folder = tmp_path / "made"
    words = [sys.executable, "-m", "sealegs", "gallery", "run", "nan-gradient", "--out", str(folder)]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        while not (folder / "clean" / "metrics.jsonl").exists():
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130
    assert err.splitlines()[-1] == "sealegs gallery: interrupted"
    assert "Traceback" not in err
    assert not folder.exists()


@pytest.mark.parametrize(("name", "kind"), [("gallery", Gallery), ("gallery-run", Outcome)])
def test_the_schema_in_the_documents_is_the_one_that_holds(name: str, kind: Any) -> None:
    assert json.loads((DOCS / f"{name}.schema.json").read_text()) == msgspec.json.schema(kind)
