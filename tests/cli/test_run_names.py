"""A run has one name in all commands that look at it."""

from pathlib import Path

import pytest

from sealegs.cli.main import main
from sealegs.cli.run_names import folder_of, place_of
from sealegs.record.manifest import describe
from sealegs.record.writer import RunWriter


def run_at(folder: Path) -> None:
    writer = RunWriter.create(folder, describe(folder.name))
    writer.row({"step": 0, "loss": 2.0})
    writer.close()


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_bare_name_is_a_run_here_or_one_in_experiments() -> None:
    run_at(Path("near"))
    run_at(Path("experiments/far"))
    assert place_of("near") == "near"
    assert place_of("far") == "experiments/far"
    assert folder_of("nowhere") == Path("experiments/nowhere"), "where it would be"
    assert folder_of("sub/run") == Path("sub/run")


def test_a_folder_here_that_is_no_run_gives_way_to_a_run_of_that_name() -> None:
    Path("night").mkdir()
    assert place_of("night") == "night", "a checkpoint folder of another framework"
    run_at(Path("experiments/night"))
    assert place_of("night") == "experiments/night"
    Path("night").rmdir()
    run_at(Path("night"))
    assert place_of("night") == "night"


@pytest.mark.parametrize("command", ["check", "interventions", "health", "preflight", "dashboard"])
def test_commands_find_a_run_in_the_folder_that_one_is_in(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    run_at(Path("near"))
    assert main([command, "near"]) != 2, capsys.readouterr().err
