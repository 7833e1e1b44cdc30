"""What kind of run it is, from logs as frameworks write them."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from sealegs.diagnosis.curve.loss_curve import curve_of
from sealegs.diagnosis.kind import FIRST, Kind, kind_of
from sealegs.errors import ConfigError
from sealegs.readers.read import read
from sealegs.record.columns import Columns
from sealegs.record.manifest import Manifest
from sealegs.record.run import run_of

ROWS = 60
FALLING = np.linspace(10.8, 3.4, ROWS)
LOW = np.linspace(2.1, 0.9, ROWS)
BOTH_SIGNS = np.sin(np.arange(ROWS))


def kind(
    tmp_path: Path,
    names: str = "loss",
    loss: Sequence[float] | np.ndarray = LOW,
    settings: dict[str, object] | None = None,
    said: str | None = None,
    **recorded: object,
) -> Kind:
    """The kind of a run with these signals."""
    values = {name: np.full(ROWS, 0.5) for name in names.split("|")} | {"step": np.arange(1.0, ROWS + 1)}
    if "loss" in values:
        values["loss"] = np.asarray(loss, np.float64)
    columns = Columns(values, {name: np.ones(ROWS, np.bool_) for name in values}, rows=ROWS)
    manifest = Manifest(run_id="run", settings=settings or {}, recorded=recorded)
    run = run_of(tmp_path, manifest, columns)
    return kind_of(run, curve_of(run), said)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ({"parameters": 1000, "trained_parameters": 4}, "fine-tuning"),
        ({"parameters": 1000, "trained_parameters": 600, "adapter": "lora"}, "fine-tuning"),
        ({"parameters": 1000, "trained_parameters": 600}, "pretraining"),
        ({"parameters": 1000, "trained_parameters": "few"}, "pretraining"),
    ],
)
def test_a_frozen_base_was_trained_before(model: dict[str, object], name: str, tmp_path: Path) -> None:
    """Also one with random weights, whose loss begins as that of a model that knows nothing."""
    assert kind(tmp_path, loss=FALLING, model=model | {"vocabulary": 50_000}).name == name


@pytest.mark.parametrize(
    ("names", "loss", "name", "because"),
    [
        ("loss|reward|policy_entropy", BOTH_SIGNS, "policy-gradient", "reward and policy_entropy are logged"),
        ("reward", LOW, "policy-gradient", "reward is logged"),
        ("loss|kl|clip_share", BOTH_SIGNS, "policy-gradient", "clip_share and kl are logged"),
        ("loss|train/value_loss|train/explained_variance", LOW, "policy-gradient", "are logged"),
        ("loss|preference_accuracy|reward_margin|policy_entropy", LOW, "preference", "reward_margin and"),
        ("loss|token_accuracy|entropy", LOW, "fine-tuning", "the accuracy of target tokens is logged"),
        ("loss|discriminator_loss|generator_loss", LOW, "gan", "discriminator_loss and generator_loss are logged"),
        ("loss|loss_at_timestep/q0", LOW, "diffusion", "its loss is logged by timestep"),
        ("loss|train/loss_simple", LOW, "diffusion", "train/loss_simple is logged"),
        ("loss|eval_mean_iou", LOW, "vision", "eval_mean_iou is logged"),
        ("loss|metrics/mAP50(B)|train/box_loss", LOW, "vision", "metrics/mAP50(B) is logged"),
        ("loss|psnr", LOW, "vision", "psnr is logged"),
        ("loss|mfu", FALLING, "pretraining", "mfu is logged, and its loss begins at 10.8"),
        ("loss|tokens_per_s", LOW, "supervised", "its loss is never negative"),
        ("loss", FALLING, "supervised", "its loss is never negative"),
        ("loss|eval_wer", LOW, "supervised", "its loss is never negative"),
        ("loss|previous_score|critic_time|kl/layer1", LOW, "supervised", "its loss is never negative"),
        ("loss", np.linspace(3.0, -2.0, ROWS), "supervised", "its loss falls"),
        ("loss", BOTH_SIGNS, "unknown", "its loss takes both signs"),
        ("loss", np.full(ROWS, np.nan), "unknown", "no loss is finite"),
    ],
)
def test_the_kind_is_told_by_signals_and_columns(
    tmp_path: Path, names: str, loss: np.ndarray, name: str, because: str
) -> None:
    found = kind(tmp_path, names, loss)
    assert found.name == name
    assert because in found.because


@pytest.mark.parametrize(
    ("settings", "loss", "name"),
    [
        ({"trainer": "GRPOTrainer"}, LOW, "policy-gradient"),
        ({"trainer": "trl.DPOConfig".rpartition(".")[2]}, LOW, "preference"),
        ({"trainer": "SFTTrainer"}, LOW, "fine-tuning"),
        ({"trainer": "Trainer"}, LOW, "supervised"),
        ({"model": {"vocabulary": 50304}}, FALLING, "pretraining"),
        ({"model": {"vocab_size": 50304}}, LOW, "fine-tuning"),
        ({"peft": {"lora_r": 8}}, LOW, "fine-tuning"),
        ({"peft_config": None, "lora": 0}, LOW, "supervised"),
        ({"data": {"image_size": 224}}, LOW, "vision"),
        ({"num_train_timesteps": 1000}, LOW, "diffusion"),
    ],
)
def test_the_kind_is_told_by_settings(tmp_path: Path, settings: dict[str, object], loss: np.ndarray, name: str) -> None:
    assert kind(tmp_path, loss=loss, settings=settings).name == name


def test_a_program_for_language_models_pretrains_where_its_loss_begins_as_a_guess(tmp_path: Path) -> None:
    written = {"format": "nanogpt text", "loss": "loss"}
    assert kind(tmp_path, loss=FALLING, log=written).name == "pretraining"
    assert kind(tmp_path, loss=LOW, log=written).name == "supervised"
    assert kind(tmp_path, loss=FALLING[::-1], log=written).name == "supervised"


@pytest.mark.parametrize(
    ("names", "traits"),
    [
        ("loss|expert_load/0.1", ("moe",)),
        ("loss|router_balance_loss", ("moe",)),
        ("loss|moe/drop_rate", ("moe",)),
        ("loss|amax/fc1|saturated_share", ("low-precision",)),
        ("loss|expert_reward|load_expert_time", ()),
    ],
)
def test_traits_are_told_by_columns(tmp_path: Path, names: str, traits: tuple[str, ...]) -> None:
    assert kind(tmp_path, names).traits == traits


def test_what_is_lacking_is_named_with_a_way_to_log_it(tmp_path: Path) -> None:
    found = kind(tmp_path, "loss|reward")
    assert found.missing == ("policy_entropy or kl or policy_kl",)
    assert found.lacks.endswith(
        "of which policy_entropy or kl or policy_kl would tell first, and is not logged (TRL logs `entropy` and, with "
        "beta above 0, `kl`; verl `actor/entropy` and `actor/ppo_kl`; Stable-Baselines3 `train/entropy_loss`)"
    )
    assert "--log-moe-overload-factor" in kind(tmp_path, "loss|moe/drop_rate").lacks
    assert kind(tmp_path, "loss|reward|kl").lacks == ""


def test_the_user_has_the_last_word(tmp_path: Path) -> None:
    found = kind(tmp_path, "loss|reward", said="fine-tuning+moe")
    assert (found.name, found.traits, found.because) == ("fine-tuning", ("moe",), "as you say")
    assert kind(tmp_path, "loss|reward", said="moe").name == "policy-gradient"
    with pytest.raises(ConfigError, match=r"kind=rl: .rl. is no kind of run; join some of pretraining, .* with \+"):
        kind(tmp_path, said="rl")
    with pytest.raises(ConfigError, match="one of gan and vision"):
        kind(tmp_path, said="gan+vision")


def test_every_kind_has_its_first_signals_and_a_page() -> None:
    pages = Path(__file__).parents[2] / "docs" / "kinds"
    named = {"moe": "mixture-of-experts"}
    assert len(FIRST) == 11
    for part in FIRST.keys() - {"supervised", "unknown"}:
        page = (pages / f"{named.get(part, part)}.md").read_text()
        assert [signal for row in FIRST[part] for signal in row if f"`{signal}" not in page] == []


def test_the_columns_of_grpo_are_known_through_its_file(tmp_path: Path) -> None:
    rows = [
        {"step": i, "loss": 0.001 * i, "reward": 0.1, "kl": 0.01 * i, "entropy": 2.0, "epoch": i / 9} for i in range(40)
    ]
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps({"log_history": rows, "max_steps": 40}))
    run = read(str(path)).run
    assert kind_of(run, curve_of(run)).name == "policy-gradient"
