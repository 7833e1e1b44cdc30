"""Whole programs below `sealegs run`: none of them is changed, and each starts as its users start it."""

import json
import os
import shlex
import string
import subprocess
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.integrations import small

import sealegs
from sealegs.errors import ConfigError
from sealegs.integrations.preflight_advice import PreflightWarning
from sealegs.readers.settings_files import read_settings

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
HAS_PEFT = find_spec("peft") is not None


def launched(place: Path, *words: str, command: Sequence[str | Path], code: int = 0) -> tuple[str, str]:
    """`sealegs run WORDS -- COMMAND` in a folder: what the program printed, and what the command told last."""
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [BIN / "sealegs", "run", *words, "--", *command],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stderr
    *_, told = done.stderr.splitlines()
    return done.stdout, told.removeprefix("sealegs run: ")


def ends(printed: str) -> dict[str, Any]:
    """What each training ended with; some of them print more."""
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found


def skips_in(run: Path) -> list[tuple[int, bool]]:
    """The steps at which an update was bad, and whether it was left out."""
    return [(event.step, event.detail["acted"]) for event in sealegs.open_run(run).events if event.kind == "skip"]


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """Where the program with Trainers was launched, what it printed, and what the command told."""
    place = tmp_path_factory.mktemp("trainers")
    program: list[str | Path] = [sys.executable, "-m", "tests.integrations.launched_trainer", place]
    return place, *launched(place, "--playbook", "standard", "--run", "r", command=program)


@pytest.mark.xdist_group("transformers")
def test_trainers_of_a_program(trainers: tuple[Path, str, str], tmp_path: Path) -> None:
    place, printed, told = trainers
    found = ends(printed)
    bare = small.trainer(tmp_path / "bare")
    bare.train()
    assert found["healthy"] == small.digest(bare.model, bare.optimizer.optimizer)
    by_hand = small.trainer(tmp_path / "by-hand")
    attached = small.attached(by_hand, None)
    with small.broken(by_hand.model, lambda: attached.guard.number, (f"nan-gradient@{small.NAN}",)):
        by_hand.train()
    assert found["struck"] == small.digest(by_hand.model, by_hand.optimizer.optimizer)
    assert found["resumed"] == found["damaged"] == found["saved"]
    assert found["left"] == "[]"

    runs = place / "experiments"
    names = ["r", "r-2", "r-3", "r-4", *(["r-5"] if HAS_PEFT else [])]
    assert sorted(path.name for path in runs.iterdir()) == names
    assert skips_in(runs / "r") == []
    assert skips_in(runs / "r-2") == [(small.NAN, True)]
    assert [event.detail["checkpoint"] for event in sealegs.open_run(runs / "r-3").events if event.kind == "resumed"]
    places = " and ".join(str(runs / name) for name in names)
    assert told.startswith(f"guarded transformers.Trainer, recorded in {places}; ")
    assert "a guard of the program's own" in told
    assert "auto_find_batch_size=True: " in told
    assert "sealegs.json: cannot be read" in told
    assert "rollback: its data cannot be gone back in" in told


@pytest.mark.xdist_group("transformers")
@pytest.mark.skipif(not HAS_PEFT, reason="peft is not installed: pip install peft")
def test_the_example_of_lora(trainers: tuple[Path, str, str]) -> None:
    place, printed, _ = trainers
    assert "30 steps, weights finite" in printed.splitlines()
    run = place / "experiments" / "r-5"
    assert len(sealegs.open_run(run).steps) == 30
    assert skips_in(run) == [(20, True)]


@pytest.mark.long
@pytest.mark.xdist_group("transformers")
@pytest.mark.integration("TRL")
@pytest.mark.conforms("nan")
def test_trl_sft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A console script, which starts `accelerate launch`, which starts TRL's own program.

    The base on disk has one embedding so large that its token makes gradients NaN, at a loss like any other.
    """
    pytest.importorskip("trl", reason="trl is not installed: pip install trl")
    make_model_and_data(tmp_path, rare="z")
    settings = shlex.split("""
        --model_name_or_path model --dataset_name data --max_steps 8 --per_device_train_batch_size 4 --report_to none
        --packing --max_length 16 --use_cpu --bf16 false --save_strategy steps --save_steps 1 --save_only_model
        --disable_tqdm true --output_dir
    """)
    _, told = launched(tmp_path, "--act", "--run", "sft", command=[BIN / "trl", "sft", *settings, "guarded"])
    assert told == f"guarded transformers.Trainer, recorded in {tmp_path / 'experiments' / 'sft'}"
    run = sealegs.open_run(tmp_path / "experiments" / "sft")
    (joined,) = [event.detail for event in run.events if event.kind == "guard"]
    assert (joined["act"], joined["playbook"]) == (True, None)
    assert run.manifest.settings["trainer"] == "SFTTrainer"
    assert run.steps[run.logged("loss")].tolist() == list(range(8))

    from trl.scripts import sft

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    sft.main(*sft.make_parser().parse_args_and_config([*settings, "bare"]))
    guarded, bare = (weights_after_each_step(tmp_path / name, 8) for name in ("guarded", "bare"))
    (struck, _), *_ = skipped = skips_in(run.folder)
    assert struck > 2, "some steps before it, in which nothing happens"
    assert guarded[:struck] == bare[:struck]
    assert [guarded[step] == guarded[step - 1] for step in range(1, 8)] == [
        (step, True) in skipped for step in range(1, 8)
    ]
    assert [has_nan(weights) for weights in bare] == [step >= struck for step in range(8)]
    assert not any(map(has_nan, guarded))


def make_model_and_data(place: Path, *, rare: str) -> None:
    """A model with random weights that spells, and rows of the alphabet; but for one they lack a letter.

    The square of that letter's embedding is beyond float32, so the derivative of its norm is zero times infinity.
    """
    model, speller = small.llama(tie_word_embeddings=False), small.speller()
    with torch.no_grad():
        model.get_input_embeddings().weight[speller.convert_tokens_to_ids(rare)] = 3e38
    model.save_pretrained(place / "model")
    speller.save_pretrained(place / "model")
    others = string.ascii_lowercase.replace(rare, "")
    rows = [{"text": (others * 2)[first : first + 12]} for first in range(len(others))]
    (place / "data").mkdir()
    (place / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, [*rows, {"text": rare * 12}])))


def weights_after_each_step(folder: Path, steps: int) -> list[bytes]:
    """The file of the weights in each checkpoint."""
    return [(folder / f"checkpoint-{step}" / "model.safetensors").read_bytes() for step in range(1, steps + 1)]


def has_nan(weights: bytes) -> bool:
    """Whether a file of weights is damaged."""
    from safetensors.torch import load

    return any(bool(tensor.isnan().any()) for tensor in load(weights).values())


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(
    ("start", "words"),
    [
        ((str(BIN / "torchrun"), "--nproc-per-node", "2"), ("--playbook", "standard")),
        pytest.param(
            *((str(BIN / "accelerate"), "launch", "--cpu", "--num_processes", "1"), ("--act",)), marks=pytest.mark.long
        ),
        pytest.param((sys.executable,), (), marks=pytest.mark.long),
    ],
    ids=["torchrun", "accelerate launch", "watched"],
)
def test_loops_of_accelerate(start: tuple[str, ...], words: tuple[str, ...], tmp_path: Path) -> None:
    is_watched = not words
    command: list[str | Path] = [*start, HERE / "launched_loop.py", *(["fail"] if is_watched else [])]
    printed, told = launched(tmp_path, "--run", "r", *words, command=command, code=int(is_watched))
    found = ends(printed)
    assert found["healthy"] == found["bare"]
    assert found["bare"][2], "gradients are the loop's to zero"
    assert found["accumulated"] == found["bare accumulated"]
    assert found["two"] == found["bare two"]
    runs = tmp_path / "experiments"
    names = ["r", "r-2", "r-3", *(["r-4"] if is_watched else [])]
    assert sorted(path.name for path in runs.iterdir()) == names, "one of each loop, however many ranks"
    assert skips_in(runs / "r") == []
    struck = skips_in(runs / "r-3")
    if is_watched:
        assert struck[0] == (small.NAN, False)
        assert found["struck"] == found["bare struck"]
    else:
        assert struck == [(small.NAN, True)]
        assert found["struck"][:2] == found["attached"]
        assert ("rollback: nobody tells an unchanged loop" in told) == ("--playbook" in words)
    endings = [
        event.detail["reason"]
        for name in names
        for event in sealegs.open_run(runs / name).events
        if event.kind == "end"
    ]
    assert endings == [
        "finished",
        "finished",
        "ended-badly" if is_watched else "finished",
        *(["failed"] if is_watched else []),
    ]
    assert f"{'watched' if is_watched else 'guarded'} a loop of Accelerate, recorded in {runs / 'r'} and " in told
    assert "2 prepared optimizers" in told


@pytest.mark.long
@pytest.mark.xdist_group("lightning")
def test_fits_of_lightning(tmp_path: Path) -> None:
    program: list[str | Path] = [sys.executable, HERE / "launched_fit.py", tmp_path / "out"]
    printed, told = launched(tmp_path, "--playbook", "standard", "--run", "r", command=program)
    found = ends(printed)
    assert found["healthy"] == found["bare healthy"]
    assert found["struck"] != found["bare struck"]
    assert found["stream"] == found["bare stream"]
    assert found["by hand"] == found["bare by hand"]
    runs = tmp_path / "experiments"
    assert skips_in(runs / "r") == []
    assert [step for step, acted in skips_in(runs / "r-2") if acted] == [20]
    assert "cannot be brought back to an earlier batch" in told
    assert "manual optimization" in told


@pytest.mark.xdist_group("transformers")
def test_the_plugin_of_axolotl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the base class of its plugins, which has no part in this."""
    monkeypatch.setitem(sys.modules, "axolotl.integrations.base", SimpleNamespace(BasePlugin=object))
    settings = read_settings(ROOT / "examples" / "axolotl.yaml")
    plugin: Any = import_module("sealegs.integrations.axolotl")
    assert settings["plugins"] == [f"{plugin.__name__}.{plugin.SealegsPlugin.__name__}"]
    ours = {name for name in settings if name.startswith("sealegs_")}
    assert ours == plugin.SealegsArgs.model_fields.keys(), "the example has each of ours, and none besides"
    plugin.SealegsArgs.model_validate({name: settings[name] for name in ours}, strict=True)
    assert plugin.SealegsPlugin().get_input_args() == "sealegs.integrations.axolotl.SealegsArgs"
    trainer = small.trainer(tmp_path, max_steps=3)
    with pytest.raises(ConfigError, match="playbook='bold': there are standard, observe"):
        plugin.SealegsPlugin().post_trainer_create(plugin.SealegsArgs(sealegs_playbook="bold"), trainer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PreflightWarning)
        plugin.SealegsPlugin().post_trainer_create(plugin.SealegsArgs(sealegs_playbook="standard"), trainer)
    trainer.train()
    events = sealegs.open_run(tmp_path / "sealegs").events
    assert [event.detail["playbook"] for event in events if event.kind == "guard"] == ["standard"]
