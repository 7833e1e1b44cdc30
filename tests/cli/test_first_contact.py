"""A folder in, commands that can be run in it out."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sealegs.cli.first_contact import MOST_BYTES, MOST_COMMANDS, MOST_ENTRIES, suggested
from sealegs.cli.main import main

CASE_ROWS = [{"step": step, "loss": 4 - step / 100, "grad_norm": 1.0, "learning_rate": 1e-4} for step in range(60)]


def commands(folder: Path) -> list[str]:
    return [each.command for each in suggested(folder)]


def trainer_state(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": CASE_ROWS, "max_steps": 60}))


def run_folder(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"schema": 1, "run_id": folder.name}))
    rows = (
        json.dumps({name.replace("learning_rate", "lr"): value for name, value in row.items()}) for row in CASE_ROWS
    )
    (folder / "metrics.jsonl").write_text("".join(f"{row}\n" for row in rows))
    (folder / "events.jsonl").write_text("")


def everything(folder: Path) -> None:
    run_folder(folder / "experiments" / "night")
    trainer_state(folder / "out" / "checkpoint-60")
    lines = (f"step {row['step']} loss {row['loss']:.4f} grad_norm 1.0\n" for row in CASE_ROWS)
    (folder / "my train.log").write_text("".join(lines))
    (folder / "metrics.csv").write_text("step,loss\n" + "".join(f"{row['step']},{row['loss']}\n" for row in CASE_ROWS))
    (folder / "training_args.json").write_text(json.dumps({"learning_rate": 1e-4, "max_steps": 100}))
    (folder / "config.json").write_text(json.dumps({"not": "a model"}))


def test_each_command_that_is_shown_can_be_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    everything(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main([]) == 0
    above, usage, _ = capsys.readouterr().out.partition("usage: sealegs")
    assert above.startswith("in this folder:\n")
    assert usage
    shown = [line.strip().split("  ")[0] for line in above.splitlines()[1:] if line]
    assert shown == [
        "sealegs check night",
        "sealegs dashboard night",
        "sealegs check out",
        "sealegs check metrics.csv",
        "sealegs check 'my train.log'",
    ]
    shutil.rmtree("experiments")
    assert commands(Path())[-1] == "sealegs preflight training_args.json"
    run_folder(tmp_path / "experiments" / "night")
    for command in [*shown, commands(Path())[-1]]:
        if "dashboard" not in command:  # which takes seconds, and has its own tests
            assert main(shlex.split(command)[1:]) in (0, 1), capsys.readouterr().err
    assert capsys.readouterr().err == ""


def test_an_empty_folder_has_the_usage_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("usage: sealegs")
    assert suggested(tmp_path / "not there") == []


def test_the_newest_run_is_named_and_its_incidents_are_seen(tmp_path: Path) -> None:
    run_folder(tmp_path / "experiments" / "old")
    run_folder(tmp_path / "experiments" / "new")
    (tmp_path / "experiments" / "new" / "incidents" / "1").mkdir(parents=True)
    os.utime(tmp_path / "experiments" / "old", (1, 1))
    (tmp_path / "experiments" / "notes").mkdir()  # no run
    assert commands(tmp_path) == ["sealegs check new", "sealegs postmortem new"]


def test_a_run_itself_and_a_trainers_folder_itself(tmp_path: Path) -> None:
    run_folder(tmp_path / "a")
    trainer_state(tmp_path / "b" / "checkpoint-60")
    assert commands(tmp_path / "a") == ["sealegs check .", "sealegs dashboard ."]
    assert commands(tmp_path / "b") == ["sealegs check ."]


def test_what_trackers_wrote(tmp_path: Path) -> None:
    for place in (
        "runs/a/events.out.tfevents.1.host",
        "wandb/offline-run-1/run-1.wandb",
        "lightning_logs/version_0/metrics.csv",
    ):
        (tmp_path / place).parent.mkdir(parents=True)
        (tmp_path / place).write_text("x")
    assert commands(tmp_path) == [
        "sealegs check runs/a",
        "sealegs check lightning_logs/version_0/metrics.csv",
        "sealegs check wandb/offline-run-1",
    ]


@pytest.mark.parametrize(
    ("name", "text", "is_shown"),
    [
        ("mine.toml", "[plan.optimizer]\nlr = 1e-3\n", True),
        ("pyproject.toml", "[project]\nname = 'x'\n", False),
        ("axolotl.yml", "base_model: x\n", True),
        ("compose.yaml", "services: {}\n", False),
        ("config.json", '{"model_type": "llama"}', True),
        ("config.json", '{"port": 80}', False),
        ("large.toml", "[plan.optimizer]\nlr = 1e-3\n" + "#" * MOST_BYTES, False),
    ],
)
def test_settings_are_told_from_other_files_of_their_name(tmp_path: Path, name: str, text: str, is_shown: bool) -> None:
    (tmp_path / name).write_text(text)
    assert commands(tmp_path) == ([f"sealegs preflight {name}"] if is_shown else [])


def test_names_of_strangers_are_quoted_or_left_out(tmp_path: Path) -> None:
    (tmp_path / "-rf.log").write_text("x")
    assert commands(tmp_path) == ["sealegs check ./-rf.log"]
    (tmp_path / "-rf.log").unlink()
    (tmp_path / "a;b.log").write_text("x")
    (tmp_path / "\x1b[2J.log").write_text("x")
    assert commands(tmp_path) == ["sealegs check 'a;b.log'"]


def test_what_is_odd_is_passed_over(tmp_path: Path) -> None:
    """A pipe, which would wait for its other end, a link to nowhere, an empty log, a folder that looks like one."""
    os.mkfifo(tmp_path / "a.toml")
    os.mkfifo(tmp_path / "a.log")
    (tmp_path / "b.log").symlink_to(tmp_path / "nowhere")
    (tmp_path / "c.log").write_text("")
    (tmp_path / "d.log").mkdir()
    assert commands(tmp_path) == []


def test_a_folder_of_many_files_is_not_listed_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(MOST_ENTRIES + 50):
        (tmp_path / f"{number}.txt").touch()
    listed: list[int] = []

    def is_file(mode: int) -> bool:
        listed.append(mode)
        return False

    monkeypatch.setattr("sealegs.cli.first_contact.stat.S_ISREG", is_file)
    assert commands(tmp_path) == []
    assert len(listed) == MOST_ENTRIES


def test_there_are_never_more_than_five(tmp_path: Path) -> None:
    everything(tmp_path)
    assert len(commands(tmp_path)) == MOST_COMMANDS


def test_it_imports_nothing_heavy(tmp_path: Path) -> None:
    everything(tmp_path)
    program = (
        "import sys; from sealegs.cli.main import main; main([]);"
        "sys.exit(bool({'torch', 'numpy', 'tyro', 'rich', 'msgspec'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.DEVNULL)
    assert done.returncode == 0
