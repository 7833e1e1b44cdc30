"""Frozen values that refuse what cannot work, and the named starting points."""

from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest

from sealegs.errors import ConfigError
from sealegs.lab.model import Transformer
from sealegs.lab.settings import PRESETS, SIZES, Settings

IMPOSSIBLE = {
    "steps": 0,
    "seed": -1,
    "threads": -1,
    "price_per_hour": -1.0,
    "model.vocabulary": 0,
    "model.context": 0,
    "model.layers": 0,
    "model.width": 97,
    "model.heads": 5,
    "model.hidden": 0,
    "model.norm_eps": -1e-6,
    "model.z_loss": -1.0,
    "model.rotary_base": 0.5,
    "model.init_std": 0.0,
    "model.mup_base_width": 0,
    "model.experts": -1,
    "model.experts_per_token": 0,
    "model.balance_weight": -0.1,
    "model.balance_rate": float("nan"),
    "model.router_z_weight": -1.0,
    "data.sources": {},
    "data.batch": 0,
    "data.accumulation": 3,
    "data.held_out": 0.0,
    "data.sentences": 1,
    "optimizer.lr": float("nan"),
    "optimizer.betas": (0.9, 1.0),
    "optimizer.eps": 0.0,
    "optimizer.weight_decay": -0.1,
    "optimizer.clip": float("nan"),
    "optimizer.qk_clip": -1.0,
    "optimizer.warmup_steps": -1,
    "optimizer.final_lr_share": 1.5,
    "cadence.evaluate_steps": -1,
    "cadence.evaluate_batches": 0,
    "cadence.checkpoint_steps": -1,
    "cadence.checkpoint_minutes": float("nan"),
    "cadence.keep_checkpoints": 0,
    "cadence.snapshot_steps": 0,
    "cadence.detail_steps": 0,
}


def with_value(settings: Settings, name: str, value: Any) -> Settings:
    group, _, field = name.rpartition(".")
    if not group:
        return replace(settings, **{field: value})
    return replace(settings, **{group: replace(getattr(settings, group), **{field: value})})


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_an_impossible_value_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        with_value(Settings(), name, IMPOSSIBLE[name])
    sentence = str(caught.value)
    # a width that the heads do not divide is told of by either name
    assert name in sentence or (name, "model.heads") == ("model.width", sentence.split("=")[0])
    assert "\n" not in sentence


def test_every_number_has_an_impossible_value_here() -> None:
    """A new setting without a check would go unnoticed."""

    def numbers(value: Any, prefix: str = "") -> list[str]:
        names: list[str] = []
        for entry in fields(value):
            current = getattr(value, entry.name)
            if is_dataclass(current):
                names += numbers(current, f"{prefix}{entry.name}.")
            elif not isinstance(current, bool | str) and current is not None:
                names.append(prefix + entry.name)
        return names

    assert set(numbers(Settings())) <= IMPOSSIBLE.keys() | {"model.init_std"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "float32"),
        ("device", "gpu"),
        ("model.norm", "batchnorm"),
        ("data.rows", "x"),
        ("model.init_std", "wide"),
    ],
)
def test_a_word_that_is_no_choice_is_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}='{value}'"):
        with_value(Settings(), name, value)


def test_a_weight_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data.sources.stdlib=0.0: a weight above 0"):
        with_value(Settings(), "data.sources", {"grammar": 1.0, "stdlib": 0.0})


@pytest.mark.parametrize(("size", "parameters"), [("nano", 71e3), ("toy", 0.5e6), ("small", 10e6), ("x1", 49e6)])
def test_sizes_are_what_they_say(size: str, parameters: float) -> None:
    import torch

    with torch.device("meta"):
        model = Transformer(SIZES[size].model)
    assert model.parameter_count() == pytest.approx(parameters, rel=0.02)


def test_the_worked_example_is_as_written_down() -> None:
    preset = PRESETS["seed-002"]
    assert (preset.seed, preset.steps, preset.dtype, preset.data.batch) == (42, 2000, "fp32", 8)
    assert (preset.optimizer.lr, preset.optimizer.warmup_steps) == (3e-4, 100)
    assert round(preset.data.sentences * (1 - preset.data.held_out)) == 240


def test_every_preset_keeps_the_margins() -> None:
    for preset in PRESETS.values():
        assert preset.optimizer.betas == (0.9, 0.95)
        assert (preset.optimizer.weight_decay, preset.optimizer.clip) == (0.1, 1.0)
        assert (preset.model.norm_position, preset.model.norm, preset.model.activation) == ("pre", "rmsnorm", "swiglu")
