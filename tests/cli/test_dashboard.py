"""``sealegs dashboard``: words in, one file or one sentence out."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import util
from pathlib import Path
from typing import Any

import pytest
from tests.report.runs import row, write

from sealegs.cli import dashboard
from sealegs.cli.main import main

Said = tuple[int, str, str]


def losses() -> Iterator[dict[str, Any]]:
    """Thirty rows of which one panel is drawn: most of a page's time goes into its panels, which others look at."""
    yield from ({name: row(step)[name] for name in ("step", "loss")} for step in range(30))


@pytest.fixture
def draw(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Said]:
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        write(tmp_path / "experiments" / name, losses())

    def run(*words: str) -> Said:
        code = main(["dashboard", *words])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def pages(folder: Path) -> set[str]:
    return {
        str(path.relative_to(folder)) for path in folder.rglob("*") if ".html" in path.name or "partial" in path.name
    }


def test_a_run_has_its_page_in_its_folder(draw: Callable[..., Said], tmp_path: Path) -> None:
    code, out, err = draw("a")
    assert (code, err) == (0, "")
    assert out.startswith("experiments/a/dashboard.html  ")
    assert pages(tmp_path) == {"experiments/a/dashboard.html"}


def test_several_runs_and_foreign_logs_have_theirs_here(draw: Callable[..., Said], tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("step,loss\n" + "".join(f"{step},{3 - step / 50}\n" for step in range(50)))
    assert draw("a", "experiments/b", "log.csv")[0] == 0
    assert pages(tmp_path) == {"dashboard.html"}
    assert all(f"<h2>{name}</h2>" in (tmp_path / "dashboard.html").read_text() for name in ("a", "b", "log.csv"))


def test_runs_of_one_name_have_their_paths(draw: Callable[..., Said], tmp_path: Path) -> None:
    write(tmp_path / "old" / "a", losses())
    assert draw("a", "old/a", "-o", "both.html")[0] == 0
    page = (tmp_path / "both.html").read_text()
    assert "<h2>experiments/a</h2>" in page
    assert "<h2>old/a</h2>" in page


BAD: dict[str, tuple[list[str], str]] = {
    "no run": ([], "which run?"),
    "no such run": (["nothing"], "nothing: no such file or folder"),
    "twice": (["a", "a"], "experiments/a: given twice"),
    "no page": (["a", "-o", "a.txt"], "-o a.txt: the name of a page ends in .html"),
    "no folder": (["a", "-o", "there/a.html"], "-o there/a.html: is in no folder that there is"),
    "a folder": (["a", "-o", "folder.html"], "-o folder.html: is a folder"),
    "both": (["a", "-o", "a.html", "--serve"], "--serve writes no file"),
    "serve nothing": (["nothing", "--serve"], "nothing: no such file or folder"),
    "damaged": (["damaged"], "not a manifest"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_no_file(case: str, draw: Callable[..., Said], tmp_path: Path) -> None:
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "experiments" / "damaged").mkdir()
    (tmp_path / "experiments" / "damaged" / "manifest.json").write_text('{"schema": "?", "run_id": 3}')
    words, sentence = BAD[case]
    code, out, err = draw(*words)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert err.startswith("sealegs dashboard: ")
    assert sentence in err
    assert pages(tmp_path) == {"folder.html"}


def test_a_full_disk_leaves_the_old_page(
    draw: Callable[..., Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "old.html").write_text("old")

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    code, _, err = draw("a", "-o", "old.html")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "free some space" in err
    assert (tmp_path / "old.html").read_text() == "old"
    assert pages(tmp_path) == {"old.html"}


def test_without_bokeh_the_install_line_is_said(draw: Callable[..., Said], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "find_spec", lambda name: None if name == "bokeh" else util.find_spec(name))
    code, _, err = draw("a")
    assert code == 2
    assert err == "sealegs dashboard: a page needs Bokeh, which is not installed: pip install 'sealegs[dashboard]'\n"


def test_the_command_starts_without_bokeh_and_torch() -> None:
    program = "import sys, sealegs.cli.dashboard, sealegs.report.dashboard.values\n"
    program += "print({'bokeh', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
