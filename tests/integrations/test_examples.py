"""The examples of loops are run, and the docs show what is in them."""

import re
import runpy
import warnings
from pathlib import Path

import pytest

import sealegs

pytestmark = pytest.mark.xdist_group("transformers")
ROOT = Path(__file__).parents[2]


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")  # TrainingArguments' default
@pytest.mark.parametrize(
    ("name", "run", "steps"),
    [
        ("raw_loop", "experiments/raw-loop", 30),
        ("accelerate_loop", "experiments/accelerate", 30),
        ("hf", "experiments/hf/run", 50),  # of fewer the pre-flight check says that they are all warm-up
    ],
)
def test_an_example_skips_what_is_bad_and_goes_on(
    name: str, run: str, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [f"{name}.py", "--steps", str(steps)])
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    *_, skip, end = capsys.readouterr().out.splitlines()
    assert skip.startswith("step 20  SKIP  grad_norm is not finite: nan  in ")
    assert f"{steps} steps" in end
    recorded = sealegs.open_run(tmp_path / run)
    assert recorded.steps.tolist() == list(range(steps))
    assert recorded.column("loss")[-5:].mean() < recorded.column("loss")[:5].mean()


def test_the_example_of_trl_says_what_no_loss_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real GRPOTrainer: its policy learns the task and has nothing left to learn from."""
    pytest.importorskip("trl", reason="trl is not installed: pip install trl")
    monkeypatch.setattr("sys.argv", ["trl_grpo.py", "--steps", "80", "--run", str(tmp_path / "grpo")])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TRL's, and the pre-flight check's of so short a run
        runpy.run_path(str(ROOT / "examples" / "trl_grpo.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "policy entropy has collapsed" in said
    run = sealegs.open_run(tmp_path / "grpo" / "run")
    assert run.manifest.settings["trainer"] == "GRPOTrainer"
    assert run.logged("reward")[1:].all()
    assert run.column("reward")[-10:].mean() > run.column("reward")[1:11].mean() + 0.5
    kinds = {event.kind for event in run.events}
    assert "loss-is-no-measure" in kinds
    assert {"probe", "intervention", "skip", "alarm"}.isdisjoint(kinds)


@pytest.mark.parametrize(
    ("page", "example"),
    [("huggingface.md", "hf.py"), ("accelerate.md", "accelerate_loop.py")],
)
def test_what_a_diff_adds_is_in_the_example(page: str, example: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    (diff,) = re.findall(r"^```diff\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    added = [line[1:].strip() for line in diff.splitlines() if line.startswith("+") and line[1:].strip()]
    program = (ROOT / "examples" / example).read_text()
    called = [re.split(r"[(#]", line)[0].removesuffix(" as guard:").removeprefix("with ").strip() for line in added]
    assert added
    assert [line for line in called if line not in program] == []
