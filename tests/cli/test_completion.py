"""The scripts that complete commands and options, asked by the shells themselves."""

import importlib
import shutil
import subprocess
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from sealegs.cli.completion import SHELLS, script
from sealegs.cli.main import COMMANDS, OPTIONS, main


@pytest.fixture(scope="module")
def scripts() -> dict[str, str]:
    return {shell: script(shell, COMMANDS, OPTIONS) for shell in SHELLS}


def test_the_command_prints_it(scripts: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--print-completion", "fish"]) == 0
    assert capsys.readouterr().out == f"{scripts['fish']}\n"
    for words in (["--print-completion"], ["--print-completion", "tcsh"]):
        assert main(words) == 2
        assert "give bash, zsh or fish" in capsys.readouterr().err


def test_every_option_of_every_command_is_in_it(scripts: dict[str, str]) -> None:
    asked = 0
    for command in COMMANDS:
        options = getattr(importlib.import_module(f"sealegs.cli.{command}"), "Options", None)
        for each in fields(options) if is_dataclass(options) else ():
            if "Positional" in str(each.type) or (each.name in ("fresh", "settings") and command == "train"):
                continue
            asked += 1
            flag = f"--{each.name.replace('_', '-')}"
            line = next(line for line in scripts["bash"].splitlines() if line.strip().startswith(f"{command})"))
            assert flag in line, f"{command} {flag}"
    assert asked > 50


def completed(line: str, text: str, tmp_path: Path) -> list[str]:
    """What bash makes of a line, with the cursor at its end."""
    (tmp_path / "script").write_text(text)
    words, quotes = line.split(" "), "''"
    program = (
        f"source {tmp_path / 'script'}; COMP_WORDS=({' '.join(word or quotes for word in words)}); "
        f"COMP_CWORD={len(words) - 1}; _sealegs; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


def test_bash_completes(scripts: dict[str, str], tmp_path: Path) -> None:
    text = scripts["bash"]
    assert completed("sealegs ch", text, tmp_path) == ["check"]
    assert set(COMMANDS) < set(completed("sealegs ", text, tmp_path))
    assert completed("sealegs check train.log --js", text, tmp_path) == ["--json"]
    assert completed("sealegs check tr", text, tmp_path) == [], "files are the shell's own"


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_takes_its_script(shell: str, scripts: dict[str, str], tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed here")
    (tmp_path / "script").write_text(scripts[shell])
    flag = "--no-execute" if shell == "fish" else "-n"
    assert subprocess.run([shell, flag, str(tmp_path / "script")], capture_output=True).stderr == b""
