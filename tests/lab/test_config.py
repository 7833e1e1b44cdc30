"""Presets, a TOML file and a manifest in, ``Settings`` out."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from sealegs.errors import ConfigError, SourceError
from sealegs.lab.config import of_run, overlaid, starting_point
from sealegs.lab.settings import PRESETS, SIZES, Settings
from sealegs.record import manifest as manifests
from sealegs.record.writer import RunWriter


def toml(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def test_file_goes_over_size_goes_over_preset(tmp_path: Path) -> None:
    path = toml(
        tmp_path,
        """
        steps = 7
        [model]
        z_loss = 1e-4
        init_std = "from width"
        [data.sources]
        grammar = 0.5
        stdlib = 2
        [optimizer]
        betas = [0.9, 0.99]
        """,
    )
    settings = starting_point(preset="seed-002", size="toy", config=path)
    assert settings.steps == 7
    assert settings.seed == 42
    assert settings.model.width == SIZES["toy"].model.width
    assert settings.model.z_loss == 1e-4
    assert settings.data.sources == {"grammar": 0.5, "stdlib": 2.0}
    assert settings.data.rows == "documents"
    assert settings.optimizer.betas == (0.9, 0.99)


def test_a_file_may_name_its_starting_point_and_the_command_line_another(tmp_path: Path) -> None:
    path = toml(tmp_path, 'size = "nano"\nsteps = 9')
    assert starting_point(config=path).model == SIZES["nano"].model
    assert starting_point(size="small", config=path).model == SIZES["small"].model
    assert starting_point(config=toml(tmp_path, 'preset = "demo"')) == PRESETS["demo"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("stpes = 3", "no setting is called stpes; did you mean steps?"),
        ("[model]\nwdith = 3", "no setting is called model.wdith; did you mean model.width?"),
        ("[modle]\nwidth = 3", "no setting is called modle; did you mean model?"),
        ("zzz = 3", "no setting is called zzz; known are steps, seed"),
        ('steps = "many"', "steps='many': Expected `int`, got `str`"),
        ("steps = 3.5", "steps=3.5: Expected `int`"),
        ('dtype = "fp64"', "dtype='fp64': Invalid enum value"),
        ("model = 3", r"model=3: a table of settings, \[model\]"),
        ("[model]\nheads = 5", "model.heads=5: model.width=96 must be a multiple"),
        ("[optimizer]\nbetas = [0.9]", r"optimizer.betas=\[0.9\]: Expected `array` of length 2"),
        ('size = "tiny"', "size='tiny': one of nano, toy, small, x1"),
        ("size = 3", "size=3: one of nano, toy, small, x1"),
        ("steps = ", "not TOML"),
    ],
)
def test_what_cannot_be_is_refused_by_name(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        starting_point(config=toml(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="cannot be read"):
        starting_point(config=tmp_path / "none.toml")


@pytest.mark.parametrize("name", [*PRESETS, *SIZES])
def test_settings_survive_the_manifest(name: str) -> None:
    settings = (PRESETS | SIZES)[name]  # type: ignore[operator]
    assert overlaid(Settings(), json.loads(json.dumps(asdict(settings))), where="manifest") == settings


def test_a_resumed_run_knows_its_settings(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    settings = overlaid(SIZES["nano"], {"steps": 30}, where="test")
    RunWriter.create(folder, manifests.describe("a", settings=asdict(settings))).close()
    assert of_run(folder, preset=None, size=None, config=None) == settings
    assert of_run(folder, preset=None, size="nano", config=toml(tmp_path, "steps = 60")).steps == 60
    with pytest.raises(ConfigError, match=r"--size x1: .* was started with model.layers=2; leave it out"):
        of_run(folder, preset=None, size="x1", config=None)
