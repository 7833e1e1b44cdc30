"""Every step of the tutorial is run, in order, and says what the page shows."""

import re
import shlex
from pathlib import Path

import pytest
from tests.pages import all_blocks, assert_said, programs_of

import sealegs
from sealegs.cli.main import main

PAGE = (Path(__file__).parents[1] / "docs" / "tutorial.md").read_text()
EXIT_CODES = {"sealegs check train.log": 1}  # 1: it found something


def run(command: str) -> None:
    """A line of the page, in this process: to import torch again takes longer than to train."""
    words = shlex.split(command)
    if words[:2] == ["python", "train.py"]:
        exec(compile(Path("train.py").read_text(), "train.py", "exec"), {"__name__": "__main__"})  # noqa: S102 - our own docs
        return
    assert words[0] == "sealegs", command
    assert main(words[1:]) == EXIT_CODES.get(command, 0), command


@pytest.mark.trains
def test_every_step_runs_and_says_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    said, counted = "", dict.fromkeys(("python", "diff", "bash", "text"), 0)
    for language, block in all_blocks(PAGE):
        counted[language] += 1
        if language == "python":
            Path("train.py").write_text(block)
        elif language == "diff":
            before, after = programs_of(block)
            program = Path("train.py").read_text()
            assert program.count(before) == 1, before
            Path("train.py").write_text(program.replace(before, after))
        elif language == "bash" and not block.startswith("pip install"):
            (command,) = block.splitlines()
            command, _, kept = command.partition(" > ")
            run(command)
            said = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
            if kept:
                Path(kept).write_text(said)
        elif language == "text":
            assert_said(block, said)
    assert counted == {"python": 1, "diff": 3, "bash": 9, "text": 7}
    left = [event.step for event in sealegs.open_run("experiments/watched").events if event.kind == "skip"]
    assert left == [150]
    assert sealegs.open_run("experiments/guarded").steps.tolist() == list(range(375))
