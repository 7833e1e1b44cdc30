"""A person intervenes in a run that is under way, and it is logged as any other intervention."""

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest
from tests.forked import start

from sealegs.cli.main import main
from sealegs.record import manifest as manifests
from sealegs.record import requests
from sealegs.record.run import open_run
from sealegs.record.writer import RunWriter
from sealegs.report.commands.interventions import Intervention, interventions
from sealegs.vocabulary import Event

under_way = pytest.mark.xdist_group("ranks")  # one run serves all


def command(folder: Path, words: list[str]) -> None:
    """In a process of its own, which says nothing."""
    os.chdir(folder)
    with Path(os.devnull).open("w") as nowhere:
        sys.stdout = sys.stderr = nowhere
        sys.exit(main(words))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, BaseProcess]]:
    """A run in the folder ``a``, which goes on until it is stopped."""
    folder = tmp_path_factory.mktemp("running")
    np.save(folder / "counter.npy", np.arange(30_000) % 64)
    words = [
        *("train", "--run", "./a", "--size", "nano", "--steps", "1000000", "--threads", "1", "--playbook", "standard"),
        *("--data.sources", "counter.npy", "--cadence.evaluate-steps", "0", "--cadence.snapshot-steps", "20"),
    ]
    child = start(command, folder, words)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (
        (folder / "a" / "metrics.jsonl").exists() and len(open_run(folder / "a").steps) > 60
    ):
        time.sleep(0.1)
    yield folder, child
    child.kill()
    child.join()


@pytest.mark.parametrize("does", [True, False])
def test_what_a_run_does_as_it_ends_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], does: bool
) -> None:
    """It halts, and is gone, between two looks."""
    writer = RunWriter.create(tmp_path / "a", manifests.describe("a"))

    def looked(events: Sequence[Event]) -> list[Intervention]:
        found = interventions(events)
        if requests.is_under_way(writer.folder):
            request, _ = requests.Inbox(writer.folder).take()
            assert request is not None
            if does:
                done = {"actions": [{"action": "halt"}], "text": "halt: enough", "request": request.id}
                writer.event("intervention", 5, number=1, decided_by="person x", trigger="asked", **done)
            writer.close()
        return found

    monkeypatch.setattr("sealegs.cli.do.interventions", looked)
    assert main(["do", str(tmp_path / "a"), "halt", "--wait", "60"]) == (0 if does else 2)
    said = capsys.readouterr()
    assert ("halt: enough" in said.out, "the run ended before" in said.err) == (does, not does)


@under_way
def test_words_are_carried_out_and_logged(
    running: tuple[Path, BaseProcess], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, child = running
    monkeypatch.chdir(folder)
    for words in (["lr", "0.5"], ["skip", "10"], ["clip", "0.5"], ["rollback"]):
        assert main(["do", "./a", *words, "--wait", "60"]) == 0, words
    out = capsys.readouterr().out
    assert "learning rate x 0.5" in out
    assert "went back from step" in out
    assert main(["do", "./a", "swap", "nowhere", "--wait", "60"]) == 2
    assert "source='nowhere'" in capsys.readouterr().err
    assert main(["interventions", "./a", "--json"]) == 0
    logged = json.loads(capsys.readouterr().out)["interventions"]
    assert [entry["actions"][0]["action"] for entry in logged] == ["lower-lr", "skip-batches", "tighten", "rollback"]
    assert all(entry["decided_by"].startswith("person ") for entry in logged)
    assert logged[-1]["to_step"] < logged[-1]["step"]

    assert main(["do", "./a", "halt", "--wait", "60"]) == 0
    child.join(timeout=60)
    assert child.exitcode == 1
    assert main(["do", "./a", "halt"]) == 2
    assert "no process is training this run" in capsys.readouterr().err
    assert main(["interventions", "./a"]) == 0
    text = capsys.readouterr().out
    assert text.count("by person ") == 5
    assert list((folder / "a" / requests.FOLDER).iterdir()) == []


@under_way
@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["fly"], "one of rollback, lr, skip, clip, clip-qk, swap, halt"),
        (["lr"], "say `lr FACTOR`"),
        (["clip-qk", "0"], "the largest attention logit that is left alone, above 0"),
        (["lr", "much"], "'much' is no number"),
        (["lr", "2"], "between 0 and 1"),
        (["halt", "now"], "say `halt`"),
    ],
)
def test_what_cannot_be_asked_for_is_a_sentence(
    words: list[str],
    part: str,
    running: tuple[Path, BaseProcess],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(running[0])
    assert main(["do", "./a", *words]) == 2
    error = capsys.readouterr().err
    assert part in error
    assert len(error.splitlines()) == 1


def test_a_run_without_interventions_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import sealegs

    sealegs.Watch(tmp_path / "quiet").close()
    assert main(["interventions", str(tmp_path / "quiet")]) == 0
    assert "quiet: nothing was done to this run" in capsys.readouterr().out
    with sealegs.Watch(tmp_path / "skipped") as watch:
        finding = {"detector": "nonfinite", "severity": "GATE", "spoils_update": True}
        watch.note("skip", step=7, acted=True, findings=[finding], text="step 7  SKIP")
    assert main(["interventions", str(tmp_path / "skipped")]) == 0
    assert "skipped: 1 skipped step, and nothing else was done to this run" in capsys.readouterr().out
    assert main(["interventions", str(tmp_path / "absent")]) == 2
