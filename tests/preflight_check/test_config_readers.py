"""Settings as programs write them: what is read of them, and what is said of those that are known to be good."""

import ast
import json
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest

from sealegs.cli.preflight import read
from sealegs.errors import ConfigError
from sealegs.lab.settings import PRESETS, SIZES, Settings
from sealegs.preflight_check.config_readers import of_json, of_lab, of_manifest
from sealegs.preflight_check.plan import merged
from sealegs.preflight_check.rule import check
from sealegs.preflight_check.rules import RULES
from sealegs.preflight_check.schedule import curve_of
from sealegs.record.manifest import Manifest
from sealegs.report.commands.preflight import Advised

PUBLIC = Path(__file__).parent / "public"


def advised(*sources: Path) -> Advised:
    plans = [each.plan for source in sources for each in read(str(source))]
    return check(merged(*plans), " ".join(map(str, sources)), RULES)


def said_of(settings: Settings) -> list[str]:
    return [each.code for each in check(of_lab(asdict(settings)).plan, "lab", RULES).findings]


@pytest.mark.parametrize("dtype", ["auto", "fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", [*SIZES, *PRESETS])
def test_nothing_is_said_of_the_labs_own_settings(name: str, dtype: Literal["auto", "fp32", "bf16", "fp16"]) -> None:
    for named in (SIZES, PRESETS):
        if name in named:
            assert said_of(replace(named[name], dtype=dtype)) == []


@pytest.mark.parametrize(
    ("group", "changes", "codes"),
    [
        ("optimizer", {"betas": (0.9, 0.999), "warmup_steps": 1000}, ["SCH3", "OPT1"]),
        ("optimizer", {"clip": 0.0}, ["CLIP1"]),
        ("optimizer", {"weight_decay": 0.0}, ["OPT5"]),
        ("optimizer", {"warmup_steps": 0}, ["SCH1"]),
        ("optimizer", {"warmup_steps": 10}, ["SCH2"]),
        ("optimizer", {"warmup_steps": 400}, ["SCH3"]),
        ("optimizer", {"final_lr_share": 1.0}, ["SCH5"]),
        ("optimizer", {"lr": 0.1}, ["OPT10"]),
        ("model", {"norm_eps": 0.0}, ["ARC2"]),
        ("model", {"norm_position": "post"}, ["ARC1"]),
        ("model", {"naive_softmax": True}, ["PRC5"]),
        ("model", {"naive_log_loss": True}, ["PRC6"]),
        ("model", {"init_std": 0.2}, ["ARC5"]),
        ("cadence", {"checkpoint_steps": 0, "checkpoint_minutes": 0.0}, ["OPS1"]),
        ("cadence", {"keep_checkpoints": 1}, ["OPS2"]),
    ],
)
def test_each_margin_that_the_lab_can_do_without_is_missed(group: str, changes: Any, codes: list[str]) -> None:
    settings = SIZES["toy"]
    assert said_of(replace(settings, **{group: replace(getattr(settings, group), **changes)})) == codes


@pytest.mark.parametrize(
    ("sources", "notes"),
    [
        (["nanogpt-gpt2-124m.toml"], []),
        (["llama-7b"], ["ARC3"]),  # true: 6.7B parameters, no QK-norm; a note, and it says that Llama went through
        (["olmo2-7b", "olmo2-7b/plan.toml"], []),
    ],
)
def test_what_is_said_of_public_runs_is_true(sources: list[str], notes: list[str]) -> None:
    found = advised(*(PUBLIC / source for source in sources))
    assert [(each.code, each.grade) for each in found.findings] == [(code, "note") for code in notes]
    assert found.asked >= 26, "it was asked"


def test_what_a_model_config_says_is_read() -> None:
    [config, _] = read(str(PUBLIC / "llama-7b"))
    known = config.plan.known()
    assert known["parameters"] == pytest.approx(6.738e9, rel=1e-3)
    assert (known["width"], known["layers"], known["norm_eps"], known["qk_norm"]) == (4096, 32, 1e-6, False)
    assert config.names["norm_eps"] == "rms_norm_eps"
    mixture = of_json(b'{"model_type": "mixtral", "hidden_size": 64, "num_local_experts": 8, "vocab_size": 9}', "x")
    assert mixture.plan.architecture.parameters is None, "not by these shapes"


def arguments(**more: Any) -> dict[str, Any]:
    found = of_json(json.dumps({"learning_rate": 1e-3, **more}).encode(), "args")
    return found.plan.known()


def test_what_training_arguments_say_is_read() -> None:
    known = arguments(max_steps=1000, warmup_steps=0, warmup_ratio=0.1, lr_scheduler_type="linear", fp16=True)
    assert (known["warmup_steps"], known["steps"], known["schedule"]) == (100, 1000, "linear")
    assert (known["dtype"], known["scaler"]) == ("fp16", True)
    assert arguments(max_steps=1000, warmup_steps=0.05)["warmup_steps"] == 50, "as from transformers 5 on"
    assert arguments(save_strategy="no")["checkpoint_steps"] == 0
    assert arguments(save_steps=0.1, max_steps=1000)["checkpoint_steps"] == 100
    assert "checkpoint_steps" not in arguments(save_strategy="epoch", save_steps=500)
    assert "steps" not in arguments(max_steps=-1)
    restarts = {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 3}}
    assert arguments(**restarts)["cycles"] == 3
    floor = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-4}}
    assert arguments(**floor)["final_lr_share"] == pytest.approx(0.1)


def test_an_argument_that_means_the_reverse_is_advised_the_reverse(tmp_path: Path) -> None:
    bad = {"learning_rate": 1e-3, "save_only_model": True, "ignore_data_skip": True}
    read_of = of_json(json.dumps(bad).encode(), "args")
    found = {each.code: (each.knob, each.value) for each in check(read_of.plan, "args", RULES, read_of.names).findings}
    assert found["OPS3"] == ("save_only_model", "false")
    assert found["OPS4"] == ("ignore_data_skip", "false")


def test_advice_about_a_pair_can_be_followed_as_it_is_given() -> None:
    settings = replace(SIZES["nano"], optimizer=replace(SIZES["nano"].optimizer, betas=(0.9, 0.999)))
    plan, names = of_lab(asdict(settings))
    (found,) = (each for each in check(plan, "lab", RULES, names).findings if each.code == "OPT1")
    assert (found.knob, found.value) == ("optimizer.betas", "(0.9, 0.95)")
    followed = replace(settings, optimizer=replace(settings.optimizer, betas=ast.literal_eval(found.value)))
    assert "OPT1" not in said_of(followed)
    engine = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.999]}}, "zero_optimization": {}}
    read_of = of_json(json.dumps(engine).encode(), "ds.json")
    told = {each.code: (each.knob, each.value) for each in check(read_of.plan, "ds", RULES, read_of.names).findings}
    assert told["OPT1"] == ("optimizer.params.betas", "(0.9, 0.95)")


def test_under_mup_a_models_spread_is_that_of_its_base_width() -> None:
    config = b'{"model_type": "llama", "hidden_size": 1024, "initializer_range": 0.02, "mup_base_width": 64}'
    table = check(of_json(config, "x").plan, "x", RULES).mup
    assert table is not None
    spreads = {row.tensors: row.init_std for row in table.rows}
    assert spreads == pytest.approx({"embedding": 0.02, "hidden matrices": 0.005, "head": 0.02})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[1, 2]", "neither training arguments"),
        ("{", "not JSON"),
        ('{"learning_rate": "fast"}', "optimizer.lr='fast': Expected"),
        ('{"model_type": "llama", "hidden_size": -3}', "architecture.width=-3: Expected"),
    ],
)
def test_what_is_no_settings_is_refused(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        of_json(text.encode(), "mine.json")


def test_the_manifest_of_any_loop_is_read_by_the_names_that_people_use() -> None:
    settings = {"optim": {"learning_rate": 3e-4, "adam_beta2": 0.999}, "grad_clip": 0, "n_embd": 768, "steps": 1e6}
    found = of_manifest(Manifest(run_id="mine", settings=settings, dtype="fp16"), {"typical_grad_norm": 0.7})
    known = found.plan.known()
    assert known | {} == {
        "lr": 3e-4, "beta2": 0.999, "clip": 0, "width": 768, "steps": 1_000_000, "dtype": "fp16",
        "typical_grad_norm": 0.7,
    }  # fmt: skip
    assert [each.code for each in check(found.plan, "mine", RULES).findings] == ["OPT1", "CLIP1"]


def test_the_labs_schedule_is_simulated_as_it_is_run() -> None:
    from sealegs.lab.train import lr_share

    settings = SIZES["toy"]
    curve = curve_of(of_lab(asdict(settings)).plan.known())
    assert curve is not None
    ran = [settings.optimizer.lr * lr_share(settings.optimizer, settings.steps, step) for step in range(settings.steps)]
    assert curve.rates == pytest.approx(ran)


def test_of_a_long_run_every_corner_is_simulated() -> None:
    known = {"lr": 1.0, "schedule": "cosine-restarts", "cycles": 3.0, "warmup_steps": 2000, "steps": 1_000_000}
    curve = curve_of(known)
    assert curve is not None
    assert len(curve.steps) < 25_000
    whole = curve_of(known | {"steps": 20_000, "warmup_steps": 40})
    assert whole is not None
    for each in (curve, whole):
        points = list(zip(each.steps, each.rates, strict=True))
        leaps = [(a, b) for a, b in pairwise(points) if b[1] - a[1] > 0.5]
        assert [b[0] - a[0] for a, b in leaps] == [1, 1]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "the clip is left out, which is 1.0 in DeepSpeed"),
        ({"gradient_clipping": 0.5}, "updates of Muon are clipped at 0.5"),
        ({"gradient_clipping": 0}, None),
        ({"zero_optimization": {"stage": 0}}, None),
        ({"optimizer": {"type": "AdamW"}}, None),
    ],
    ids=str,
)
def test_deepspeed_clips_what_muon_has_orthogonalised(changes: Any, says: str | None) -> None:
    params = {"lr": 0.02, "betas": [0.9, 0.95], "weight_decay": 0.1}
    settings = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "Muon", "params": params},
    }
    settings |= changes
    own = of_json(json.dumps(settings).encode(), "ds_config.json")
    if "optimizer" not in changes:
        assert (own.plan.optimizer.lr, own.plan.optimizer.beta2) == (0.02, 0.95)
    inside = of_json(json.dumps({"learning_rate": 0.02, "deepspeed": settings}).encode(), "training_args.json")
    found = {finding.code: finding.found for finding in check(own.plan, "ds_config.json", RULES).findings}
    assert found.get("CLIP5") == says
    assert (
        inside.plan.optimizer.clips_updates
        is own.plan.optimizer.clips_updates
        is ("Muon" in str(settings) and settings["zero_optimization"] == {"stage": 2})
    )
