"""Fine-tunes as their programs leave them: a ``trainer_state.json`` with the settings beside it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sealegs.cli.check import check
from sealegs.diagnosis.contract import Diagnosis

ADAPTER: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 16,
    "lora_alpha": 32,
    "target_modules": ["q_proj", "v_proj"],
    "base_model_name_or_path": "org/model",
}
ARGUMENTS: dict[str, Any] = {
    "learning_rate": 2e-4,
    "adam_beta2": 0.999,
    "weight_decay": 0.0,
    "warmup_steps": 0,
    "max_steps": 200,
    "lr_scheduler_type": "linear",
    "per_device_train_batch_size": 2,
}


def checked(
    folder: Path,
    losses: Any,
    *,
    norms: Any = None,
    held_out: dict[int, float] | None = None,
    lr: float = 2e-4,
    **settings: dict[str, Any],
) -> Diagnosis:
    """The diagnosis of a folder with a log and so many files of settings."""
    draw = np.random.default_rng(0)
    norms = 0.5 * np.exp(0.2 * draw.normal(size=len(losses))) if norms is None else norms
    rows: list[dict[str, float]] = []
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), 1):
        rate = lr * (1 - step / (len(losses) + 1))
        rows.append({"step": step, "loss": float(loss), "grad_norm": float(norm), "learning_rate": rate})
        if held_out and step in held_out:
            rows.append({"step": step, "eval_loss": held_out[step]})
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": rows, "global_step": len(losses)}))
    for name, values in settings.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    return check(str(folder), metrics={}, pattern=None, rules="calibrated")


def falling(rows: int, noise: float = 0.05) -> Any:
    draw = np.random.default_rng(1)
    return (0.7 + 1.8 * np.exp(-np.arange(rows) / 25)) * np.exp(noise * draw.normal(size=rows))


def test_the_margins_of_a_long_run_are_not_asked_for(tmp_path: Path) -> None:
    found = checked(tmp_path, falling(200), training_args=ARGUMENTS, adapter_config=ADAPTER)
    assert found.findings.verdict == "healthy"
    assert found.findings.kind.name == "fine-tuning"
    assert "nothing to object to" in found.path[0].evidence
    assert found.settings == ()


def test_the_same_settings_without_an_adapter_lack_them(tmp_path: Path) -> None:
    found = checked(tmp_path, 4 + falling(200), training_args=ARGUMENTS)
    assert found.findings.kind.name == "supervised"
    assert "beta2 0.999" in found.path[0].evidence
    assert any("OPT1" in text for text in found.settings)


def test_a_spike_in_a_fine_tune_is_not_laid_to_the_beta2_that_all_have(tmp_path: Path) -> None:
    losses, norms = falling(200), np.full(200, 0.5)
    losses[150:] *= 1 + 2 * np.minimum(np.arange(50) / 6, 1)
    norms[148:] *= 1 + 9 * np.minimum(np.arange(52) / 6, 1)
    tuned = checked(tmp_path, losses, norms=norms, training_args=ARGUMENTS, adapter_config=ADAPTER)
    (tmp_path / "adapter_config.json").unlink()
    other = checked(tmp_path, losses, norms=norms, training_args=ARGUMENTS)
    assert "stale-beta2" in {each.cause for each in other.hypotheses}
    assert {"stale-beta2", "weight-decay-low", "init-too-wide"}.isdisjoint(each.cause for each in tuned.hypotheses)


def test_nothing_that_counts_is_a_reason_to_act(tmp_path: Path) -> None:
    found = checked(tmp_path, np.zeros(60), norms=np.zeros(60), adapter_config=ADAPTER)
    assert found.findings.verdict == "act"
    assert (found.hypotheses[0].cause, found.hypotheses[0].grade) == ("masked-labels", "established")
    still = checked(tmp_path, np.zeros(60), adapter_config=ADAPTER)
    assert still.findings.verdict == "unknown", "a gradient that moves: the loss is written wrongly"


def test_a_loss_summed_over_micro_batches_is_named(tmp_path: Path) -> None:
    losses = falling(200, noise=0.01)
    held_out = {step: float(losses[step - 3 : step + 3].mean()) for step in range(25, 200, 25)}
    summed = checked(
        tmp_path,
        4 * losses,
        held_out=held_out,
        training_args=ARGUMENTS | {"gradient_accumulation_steps": 4},
        adapter_config=ADAPTER,
    )
    assert summed.findings.verdict != "healthy"
    assert summed.hypotheses[0].cause == "accumulation-denominator"
    sound = checked(tmp_path, losses, held_out=held_out)
    assert sound.findings.verdict == "healthy"


@pytest.mark.parametrize(("modules", "traits"), [(["q_proj"], ()), (["q_proj", "gate"], ("moe",)), (None, ("moe",))])
def test_experts_whose_router_stands_still_need_no_loads(
    tmp_path: Path, modules: list[str] | None, traits: tuple[str, ...]
) -> None:
    if modules:
        (tmp_path / "adapter_config.json").write_text(json.dumps(ADAPTER | {"target_modules": modules}))
    model = {"model_type": "mixtral", "num_local_experts": 8, "vocab_size": 32000, "hidden_size": 64}
    found = checked(tmp_path, falling(200), config=model)
    assert found.findings.kind.traits == traits
    assert found.findings.verdict == ("unknown" if traits else "healthy")


@pytest.mark.parametrize(("rate", "codes"), [(2e-4, []), (0.02, ["TUN1"])])
def test_the_rate_of_the_rows_is_held_against_the_adapter(tmp_path: Path, rate: float, codes: list[str]) -> None:
    found = checked(tmp_path, falling(200), lr=rate, adapter_config=ADAPTER)
    assert [text.split()[1].rstrip(":") for text in found.settings] == codes


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"stage": "sft", "finetuning_type": "full"}, "fine-tuning"),
        ({"stage": "dpo", "finetuning_type": "lora"}, "preference"),
        ({"completion_only_loss": None, "assistant_only_loss": False}, "fine-tuning"),
        ({"base_model": "org/model", "micro_batch_size": 2}, "fine-tuning"),
        ({"stage": 2, "zero": True}, "supervised"),
    ],
)
def test_the_arguments_of_a_trainer_say_what_it_trains(tmp_path: Path, settings: dict[str, Any], kind: str) -> None:
    assert checked(tmp_path, falling(60), training_args=settings).findings.kind.name == kind


@pytest.mark.parametrize(("rows", "noise"), [(30, 0.1), (30, 0.2), (30, 0.3), (120, 0.05)])
def test_short_noisy_fine_tunes_are_not_told_to_act(tmp_path: Path, rows: int, noise: float) -> None:
    """One low first row is no level, and a dozen rows at the end are none."""
    told = []
    for seed in range(20):
        draw = np.random.default_rng(seed)
        steps = np.arange(rows)
        drop, settled = draw.choice([0.0, 0.3, 1.0, 2.0]), draw.uniform(3, rows / 3)
        flat = draw.integers(0, 8)
        level = draw.uniform(0.05, 1.5) + drop * np.exp(-np.maximum(steps - flat, 0) / settled)
        losses = level * np.exp(noise * draw.normal(size=rows))
        told.append(checked(tmp_path, losses, adapter_config=ADAPTER).findings.verdict)
    assert "act" not in told


def test_a_level_beyond_the_noise_is_a_reason_to_act(tmp_path: Path) -> None:
    losses = np.exp(0.05 * np.random.default_rng(0).normal(size=60)) * np.where(np.arange(60) < 30, 1.0, 1.6)
    assert checked(tmp_path, losses, adapter_config=ADAPTER).findings.verdict == "act"
