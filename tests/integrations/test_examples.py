"""The examples of loops are run, and the docs show what is in them."""

import re
import runpy
import shlex
import sys
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.integrations import small

import sealegs
from sealegs.cli.main import main
from sealegs.preflight_check.config_readers import of_settings
from sealegs.readers.settings_files import read_settings

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


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("axolotl.yaml", {"lr": 2e-4, "schedule": "cosine", "clip": 1.0}),
        ("llama_factory.yaml", {"lr": 1e-4, "warmup_steps": 10, "clip": 1.0}),
    ],
)
def test_an_example_of_settings_is_read_and_has_nothing_wrong(
    name: str, says: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path = ROOT / "examples" / name
    known = of_settings(read_settings(path), name).plan.known()
    says |= {"finetunes": True, "adapter": True, "objective": "answers"}
    assert {field: known.get(field) for field in says} == says
    assert main(["preflight", str(path)]) == 0
    assert "nothing to say" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["axolotl.yaml", "llama_factory.yaml", "unsloth_lora.py"])
def test_the_command_in_an_example_starts_what_it_names(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Their programs are not here: one of that name says what it was started with."""
    (line,) = re.findall(r"^#? *(sealegs run .*?)(?: \[.*)?$", (ROOT / "examples" / name).read_text(), re.MULTILINE)
    _, *words = shlex.split(line)
    program, *given = words[words.index("--") + 1 :]
    (tmp_path / program).write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / program).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert main(words) == 0
    assert capfd.readouterr().out == f"{' '.join(given)}\n"
    assert (ROOT / "examples" / Path(given[-1]).name).is_file()


def test_the_example_of_unsloth_trains_with_what_stands_in_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unsloth needs a GPU: here its two calls are PEFT's. The trainer, and all that it is told, is TRL's own."""
    trl = pytest.importorskip("trl", reason="trl is not installed: pip install trl")
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")

    def adapted(model: Any, *, random_state: int, **settings: Any) -> Any:
        return peft.get_peft_model(model, peft.LoraConfig(**settings))

    loader = SimpleNamespace(from_pretrained=lambda **_: (small.llama(), small.speller()), get_peft_model=adapted)
    monkeypatch.setitem(sys.modules, "unsloth", SimpleNamespace(FastLanguageModel=loader))
    monkeypatch.setattr(trl, "SFTConfig", partial(trl.SFTConfig, use_cpu=True, bf16=False))
    monkeypatch.setattr("sys.argv", ["unsloth_lora.py", "--steps", "2", "--out", str(tmp_path)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TRL's
        runpy.run_path(str(ROOT / "examples" / "unsloth_lora.py"), run_name="__main__")
    assert capsys.readouterr().out.splitlines()[-1] == "2 steps"
