"""Words in, an exit code out."""

import contextlib
import os
import pty
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement

from sealegs.cli.main import COMMANDS, main


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_help_lists_every_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    out = capsys.readouterr().out
    assert all(f"  {command} " in out for command in COMMANDS)
    assert "examples:" in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"sealegs {metadata.version('sealegs')}\n"


def test_an_unknown_command_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert capsys.readouterr().err == "sealegs: no command is called 'trian'; did you mean `sealegs train`?\n"


def test_an_interrupt_is_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("sealegs.cli.train.main", interrupted)
    assert main(["train"]) == 130
    assert capsys.readouterr().err == "sealegs train: interrupted\n"


def closed(words: str, place: Path) -> None:
    program = Path(sys.executable).with_name("sealegs")
    done = subprocess.run(f"{program} {words}", shell=True, cwd=place, capture_output=True, text=True)  # noqa: S602
    assert done.returncode in (0, 1)
    assert "Traceback" not in done.stderr + done.stdout


def test_closed_outputs_are_no_traceback(tmp_path: Path) -> None:
    """Of a command that goes on all the same, and of one that has nothing else to do."""
    np.save(tmp_path / "counter.npy", np.arange(3000) % 64)
    words = "train --run a --size nano --steps 1 --threads 1 --data.sources counter.npy --cadence.evaluate-batches 1"
    closed(f"{words} 2>&- | head -c 1", tmp_path)
    assert (tmp_path / "experiments" / "a" / "checkpoints" / "1").is_dir()
    for end in ("2>&-", ">&-", "| head -c 1"):
        closed(f"check experiments/a {end}", tmp_path)


def test_help_imports_nothing_heavy() -> None:
    """What keeps `sealegs --help` fast, without a clock."""
    program = (
        "import sys; from sealegs.cli.main import main; main(['--help']);"
        "sys.exit(bool({'torch', 'numpy', 'tyro', 'rich', 'msgspec'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], stdout=subprocess.DEVNULL).returncode == 0


def on_a_terminal(*words: str, **environment: str) -> str:
    """What a command writes to a terminal."""
    ours, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | environment
    command = [sys.executable, "-m", "sealegs", *words]
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment | {"TERM": "xterm-256color"})
    os.close(theirs)
    said = b""
    with contextlib.suppress(OSError):  # Linux ends it so
        while part := os.read(ours, 65536):
            said += part
    os.close(ours)
    process.wait()
    return said.decode()


@pytest.mark.parametrize("words", [["health", "--help"], ["health", "--nonsense"]])
def test_no_color_is_obeyed(words: list[str]) -> None:
    coloured, plain = on_a_terminal(*words), on_a_terminal(*words, NO_COLOR="1")
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain
    assert "\x1b[" in on_a_terminal(*words, NO_COLOR=""), "an empty one says nothing"


# Without the extras: a folder that holds links to what `pip install sealegs` brings, and to nothing else.


def closure(name: str) -> set[str]:
    """A distribution and all that it needs, without extras."""
    needed = {name}
    for text in metadata.requires(name) or []:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            needed |= closure(requirement.name)
    return needed


@pytest.fixture(scope="session")
def base_install(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base-install")
    for name in sorted(closure("sealegs") - {"sealegs"}):
        for file in metadata.files(name) or []:
            top = Path(file.parts[0])
            if top.name not in ("..", "__pycache__") and not (folder / top).exists():
                (folder / top).symlink_to(Path(str(file.locate())).parents[len(file.parts) - 1] / top)
    package = Path(__file__).parents[2] / "src" / "sealegs"
    (folder / "sealegs").symlink_to(package)
    return folder


def run_in(base: Path, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    program = "import sys; from sealegs.cli.main import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-S", "-c", program, *words],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(base)},
        capture_output=True,
        text=True,
    )


def test_the_base_install_has_no_torch_and_still_helps(base_install: Path, tmp_path: Path) -> None:
    assert not (base_install / "torch").exists()
    for words in (["--help"], ["train", "--help"]):
        done = run_in(base_install, *words, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert "train" in done.stdout


def test_training_without_torch_says_what_to_install(base_install: Path, tmp_path: Path) -> None:
    done = run_in(base_install, "train", "--run", "a", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "sealegs train: sealegs train needs PyTorch, which is not installed: pip install 'sealegs[lab]'\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_watching_without_torch_says_what_to_install(base_install: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import sealegs; sealegs.Watch('a')"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(base_install)},
        capture_output=True,
        text=True,
    )
    assert done.stderr.splitlines()[-1] == (
        "sealegs.errors.MissingExtra: sealegs.Watch needs PyTorch, which is not installed: pip install 'sealegs[torch]'"
    )


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "sealegs", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("sealegs ")
