"""Settings in files: as a person names them, and as they lie beside a log."""

import builtins
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from sealegs.diagnosis.settings import known_of
from sealegs.errors import MissingExtra, SourceError
from sealegs.readers.read import read
from sealegs.readers.settings_files import read_settings

LOG = {"log_history": [{"step": step, "loss": 3.0 - step / 100} for step in range(1, 40)]}


def trainer_state(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trainer_state.json").write_text(json.dumps(LOG))
    return folder


@pytest.mark.parametrize(
    ("name", "text", "settings"),
    [
        ("a.toml", "[optimizer]\nlr = 1e-3\n", {"optimizer": {"lr": 1e-3}}),
        ("a.json", '{"lr": 0.001}', {"lr": 1e-3}),
        ("a.yaml", "lr: 0.001\nmodel:\n  width: 8\n", {"lr": 1e-3, "model": {"width": 8}}),
        ("config.yaml", "_wandb:\n  value: {}\nlr:\n  desc: null\n  value: 0.001\n", {"lr": 1e-3}),
        ("wandb-metadata.json", '{"args": ["--lr", "0.001", "--bf16", "--wd=0.1"]}',
         {"lr": "0.001", "bf16": True, "wd": "0.1"}),
    ],
)  # fmt: skip
def test_every_form(name: str, text: str, settings: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert read_settings(tmp_path / name) == settings


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.toml", b"lr = ", "not TOML"),
        ("a.json", b"[1, 2]", "no table of settings"),
        ("a.yaml", b"a: &x [1]\nb: *x\n", "an alias"),
        ("a.yaml", b"a: !!python/object/apply:os.system ['true']\n", "not YAML"),
        ("a.ini", b"[a]\n", "settings are read from TOML, JSON or YAML"),
        ("training_args.bin", pickle.dumps({"lr": 1}), "a pickle, which can run code, is not opened"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_sentence(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError) as error:
        read_settings(tmp_path / name)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_without_a_reader_for_yaml_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refused(name: str, *rest: Any, **more: Any) -> Any:
        if name == "yaml":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refused)
    (tmp_path / "a.yaml").write_text("lr: 1\n")
    with pytest.raises(MissingExtra, match="PyYAML"):
        read_settings(tmp_path / "a.yaml")


def test_what_lies_beside_a_trainer_state_is_read(tmp_path: Path) -> None:
    folder = trainer_state(tmp_path / "checkpoint-500")
    (folder / "config.json").write_text('{"model_type": "llama", "hidden_size": 512}')
    (tmp_path / "training_args.json").write_text('{"learning_rate": 0.001, "adam_beta2": 0.999}')  # of the run
    for source in (folder, folder / "trainer_state.json"):
        log = read(str(source))
        known = known_of(log.run.manifest)
        assert (known.number("lr"), known.number("beta2"), known.number("width")) == (1e-3, 0.999, 512)
        assert "settings from config.json" in log.remarks


def test_a_pickle_beside_it_is_told_and_never_opened(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "ran",)

    folder = trainer_state(tmp_path / "checkpoint-500")
    (folder / "training_args.bin").write_bytes(pickle.dumps(Evil()))
    assert any("training_args.bin is a pickle" in text for text in read(str(folder)).remarks)
    assert not (tmp_path / "ran").exists()


def test_a_config_that_is_another_programs_is_left_alone(tmp_path: Path) -> None:
    rows = "\n".join(f"{step},{3 - step / 100}" for step in range(40))
    (tmp_path / "metrics.csv").write_text(f"step,loss\n{rows}\n")
    (tmp_path / "config.json").write_text('{"learning_rate": 1}')
    (tmp_path / "config.yaml").write_text("learning_rate: 1\n")
    assert not read(str(tmp_path / "metrics.csv")).run.manifest.settings
    (tmp_path / "hparams.yaml").write_text("learning_rate: 2\n")  # Lightning's, beside its metrics.csv
    (tmp_path / "wandb-summary.json").write_text("{}")
    assert read(str(tmp_path / "metrics.csv")).run.manifest.settings == {
        "config": {"learning_rate": 1},
        "hparams": {"learning_rate": 2},
    }


def test_damage_beside_a_log_is_no_reason_not_to_read_it(tmp_path: Path) -> None:
    folder = trainer_state(tmp_path)
    (folder / "config.json").write_text("{")
    log = read(str(folder))
    assert len(log.run.steps) == 39
    assert any("left out" in text and "config.json" in text for text in log.remarks)
