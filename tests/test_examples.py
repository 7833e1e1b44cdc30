"""The examples are run."""

import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
Example = Callable[..., tuple[int, str, str]]


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Example:
    """`python examples/NAME ...` in this process and an empty folder; gives exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(name: str, *words: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", [name, *words])
        try:
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        except SystemExit as end:
            return int(str(end.code)), *capsys.readouterr()
        return 0, *capsys.readouterr()

    return run


def test_three_ways(example: Example, tmp_path: Path) -> None:
    fault = "lr-spike:factor=60,steps=10@215"
    code, out, err = example("three_ways.py", "--size", "nano", "--steps", "275", "--fault", fault, "--folder", "runs")
    assert code == 0, err
    gaps = dict(re.findall(r"^(unguarded|guarded) +\S+ +(\S+)", out, flags=re.MULTILINE))
    assert abs(float(gaps["guarded"])) < 0.03
    assert float(gaps["unguarded"]) > 0.3
    assert "outcome   helped" in out
    endings = ["clean", "unguarded", "guarded"]
    assert sorted(path.name for path in (tmp_path / "runs").iterdir() if path.is_dir()) == sorted(
        ["beginning", *endings]
    )

    assert "TESTED CAUSE: unlogged step size" in out
    pages = [line.split()[0] for line in out.partition("What to open, offline:\n\n")[2].splitlines()]
    incident = "runs/guarded/incidents/1/postmortem"
    assert pages == [f"{incident}.html", f"{incident}.md", "runs/dashboard.html"]
    assert re.search(r"a learning rate 60(\.\d)? times the one in the log", Path(pages[0]).read_text())
    title, state = Path(pages[1]).read_text().splitlines()[:3:2]
    assert re.search(r"run guarded-\w+$", title)
    assert state.endswith("Every section is filled.")
    dashboard = Path(pages[2]).read_text()
    assert re.findall(r"<h2>(\w+)</h2>", dashboard)[:3] == endings
    assert 'href="guarded/incidents/1/postmortem.html"' in dashboard


def test_grpo_toy(example: Example, tmp_path: Path) -> None:
    words = ("--run", "grpo", "--steps", "3", "--inject", "constant-reward@1")
    code, out, err = example("grpo_toy.py", *words)
    assert code == 0, err
    assert re.fullmatch(r"reward on held-out questions: 0\.\d\d\n", out)
    assert '"reward":0.0,' in (tmp_path / "grpo" / "metrics.jsonl").read_text()


def test_what_is_wrong_is_one_sentence(example: Example, tmp_path: Path) -> None:
    code, _, err = example("three_ways.py", "--fault", "fire@3")
    assert code != 0
    assert err.startswith("three_ways.py: ")
    assert len(err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.xdist_group("lightning")  # importing it takes some seconds
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning")  # Lightning's own
def test_lightning_module(example: Example, tmp_path: Path) -> None:
    code, out, err = example("lightning_module.py", str(tmp_path / "run"))
    assert code == 0
    cost, skipped = err.splitlines()
    assert re.fullmatch(r"sealegs: .*: skipped 2 of 200 steps \(nonfinite 2\), 1\.0%, .*", skipped)
    assert re.match(r"sealegs: .*: stability cost ", cost)
    # a step that was slow, too, says so in between
    assert len(re.findall(r"step \d+  SKIP  loss is not finite: nan  .*rejected 1 of 10", out)) == 2, "once an epoch"
    assert (tmp_path / "run" / "manifest.json").exists()
