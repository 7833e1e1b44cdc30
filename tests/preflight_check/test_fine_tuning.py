"""A fine-tune is not told what is good practice in pretraining, and is told what goes wrong in fine-tunes."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sealegs.cli.preflight import read
from sealegs.preflight_check.config_readers import of_settings
from sealegs.preflight_check.live import preflight
from sealegs.preflight_check.plan import merged, plan_from
from sealegs.preflight_check.rule import check
from sealegs.preflight_check.rules import RULES
from sealegs.report.commands.preflight import page

USUAL = {
    "learning_rate": 2e-4,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.03,
    "max_steps": 300,
    "bf16": True,
    "fp16": False,
    "logging_steps": 1,
    "save_steps": 100,
    "save_total_limit": 1,
    "group_by_length": True,
    "logging_nan_inf_filter": False,
    "per_device_train_batch_size": 2,
}
ADAPTER = {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": ["q_proj"], "base_model_name_or_path": "x"}
LLAMA = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 32000} | {
    "intermediate_size": 11008, "num_attention_heads": 32, "rms_norm_eps": 1e-5, "initializer_range": 0.02,
    "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip


def codes_of(*sources: dict[str, Any]) -> list[str]:
    plans = [of_settings(source, "here").plan for source in sources]
    return [each.code for each in check(merged(*plans), "here", RULES).findings]


def test_what_is_usual_in_a_fine_tune_is_no_finding() -> None:
    assert codes_of(USUAL, ADAPTER, LLAMA) == []
    assert codes_of(USUAL | {"learning_rate": 1e-5, "completion_only_loss": True}) == []
    assert codes_of(USUAL | {"lr_scheduler_type": "constant"}, ADAPTER) == []


def test_the_same_settings_from_random_weights_are_advised() -> None:
    assert {"OPT1", "OPT5", "SCH2", "DAT3", "OPS2"} <= set(codes_of(USUAL, LLAMA))


def test_the_page_says_what_was_left_out() -> None:
    advised = check(of_settings(ADAPTER, "here").plan, "here", RULES)
    assert advised.left_out == [rule.code for rule in RULES if rule.from_scratch]
    assert f"{len(advised.left_out)} are about a run from random weights" in page(advised)


@pytest.mark.parametrize(
    ("known", "grade"),
    [
        ({"adapter": True, "lr": 2e-4}, None),
        ({"adapter": True, "lr": 2e-6}, "note"),
        ({"adapter": True, "lr": 2e-6, "objective": "pairs"}, None),
        ({"adapter": True, "lr": 2e-3}, "warning"),
        ({"adapter": True, "lr": 1e-2}, "error"),
        ({"adapter": False, "lr": 2e-5}, None),
        ({"adapter": False, "lr": 2e-4}, "note"),
        ({"adapter": False, "lr": 2e-4, "parameters": 8 * 10**9}, "warning"),
        ({"adapter": False, "lr": 2e-4, "parameters": 10**8}, None),
    ],
)
def test_the_rate_of_another_training(known: dict[str, Any], grade: str | None) -> None:
    findings = check(plan_from({"finetunes": True, **known}), "here", RULES).findings
    assert [(each.code, each.grade) for each in findings] == ([("TUN1", grade)] if grade else [])


def test_a_base_in_four_bits_computes_as_the_run_does() -> None:
    base = LLAMA | {"quantization_config": {"load_in_4bit": True, "bnb_4bit_compute_dtype": "float16"}}
    [found] = check(merged(*(of_settings(each, "here").plan for each in (USUAL, ADAPTER, base))), "x", RULES).findings
    assert (found.code, found.grade, found.value) == ("TUN3", "warning", "bf16")
    base["quantization_config"] = {"load_in_4bit": True, "bnb_4bit_compute_dtype": "bfloat16"}
    assert codes_of(USUAL, ADAPTER, base) == []


def test_the_yaml_of_axolotl(tmp_path: Path) -> None:
    file = tmp_path / "qlora.yaml"
    file.write_text(
        "base_model: org/model\nload_in_4bit: true\nadapter: qlora\nmicro_batch_size: 2\nnum_epochs: 3\n"
        "optimizer: adamw_torch\nlr_scheduler: cosine\nlearning_rate: 0.02\nbf16: auto\nwarmup_ratio: 0.03\n"
    )
    [found] = read(str(file))
    known = found.plan.known()
    assert {name: known[name] for name in ("finetunes", "adapter", "quantised", "lr", "schedule", "optimizer")} == {
        "finetunes": True,
        "adapter": True,
        "quantised": "4-bit",
        "lr": 0.02,
        "schedule": "cosine",
        "optimizer": "adamw",
    }
    assert "dtype" not in known, "auto is up to the machine"
    assert found.names["schedule"] == "lr_scheduler"
    assert [each.code for each in check(found.plan, "x", RULES, found.names).findings] == ["TUN1"]


def test_the_yaml_of_llama_factory(tmp_path: Path) -> None:
    file = tmp_path / "sft.yaml"
    file.write_text(
        "model_name_or_path: org/model\nstage: sft\nfinetuning_type: full\npure_bf16: true\ncutoff_len: 2048\n"
        "learning_rate: 1.0e-5\nlr_scheduler_type: cosine\nwarmup_ratio: 0.1\nlogging_steps: 10\n"
    )
    [found] = read(str(file))
    [advice] = check(found.plan, "x", RULES, found.names).findings
    assert (advice.code, advice.grade) == ("PRC4", "error"), "updates of 1e-5 are rounded away in bf16"
    file.write_text(file.read_text().replace("pure_bf16: true", "bf16: true").replace("stage: sft", "stage: dpo"))
    [found] = read(str(file))
    assert check(found.plan, "x", RULES).findings == []
    assert found.plan.finetuning.objective == "pairs"


def test_a_folder_with_an_adapter_is_a_fine_tune(tmp_path: Path) -> None:
    (tmp_path / "training_args.json").write_text(json.dumps(USUAL))
    (tmp_path / "adapter_config.json").write_text(json.dumps(ADAPTER))
    assert check(merged(*(each.plan for each in read(str(tmp_path)))), "x", RULES).findings == []


BOS, EOS, PAD = 1, 2, 0


class Speaks(nn.Module):
    """A model with the tokens of a configuration, that takes any batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 4)
        self.config = SimpleNamespace(bos_token_id=BOS, eos_token_id=EOS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        out: Tensor = self.table(input_ids) @ self.table.weight.T
        return out


def said_of(rows: list[list[int]], counts: list[list[int]]) -> list[str]:
    """The findings about a batch: 0 is padding, ``counts`` says which tokens are labels."""
    ids = torch.tensor(rows)
    labels = torch.where(torch.tensor(counts).bool(), ids, -100)
    example = {"input_ids": ids, "attention_mask": (ids != PAD).long()}
    advised = preflight(Speaks(), example=example, labels=labels, finetunes=True)
    return [each.code for each in advised.findings]


PROMPT, ANSWER = [BOS, 5, 6, 7, 8], [9, 10, 11, EOS]
LEARNED = [0] * 5 + [1] * 4


def test_a_batch_whose_answers_count_is_sound() -> None:
    assert said_of([PROMPT + ANSWER, [*PROMPT, 9, 10, EOS, PAD]], [LEARNED, [*LEARNED[:8], 0]]) == []


@pytest.mark.parametrize(
    ("rows", "counts", "code"),
    [
        ([PROMPT + ANSWER] * 2, [[0] * 9] * 2, "DAT1"),
        ([PROMPT + ANSWER] * 2, [[1] * 5 + [0] * 4] * 2, "TUN5"),
        ([PROMPT + ANSWER] * 2, [[0] * 5 + [1, 1, 1, 0]] * 2, "TUN6"),
        ([[BOS, *PROMPT, 9, 10, EOS]] * 2, [LEARNED] * 2, "TUN7"),
        ([[PAD, *PROMPT, 9, 10, EOS], PROMPT + ANSWER], [LEARNED] * 2, "TUN4"),
    ],
    ids=["all masked", "prompts count", "no end", "two beginnings", "padded on the left"],
)
def test_a_batch_shows_what_is_wrong_with_it(rows: list[list[int]], counts: list[list[int]], code: str) -> None:
    assert said_of(rows, counts) == [code]


def test_a_live_adapter_is_a_fine_tune() -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    base = transformers.LlamaForCausalLM(config)
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    trained = [each for each in model.parameters() if each.requires_grad]
    advised = preflight(model, torch.optim.AdamW(trained, lr=2e-4, weight_decay=0.0), steps=300)
    assert [each.code for each in advised.findings] == []
    assert "STA3" in advised.left_out
    for each in base.parameters():
        each.requires_grad_(True)


@pytest.mark.parametrize(("lr", "grade"), [(1e-5, "error"), (3e-3, "warning")])
def test_a_trial_step_shows_what_bf16_rounds_away(lr: float, grade: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False).to(torch.bfloat16)
    inputs = torch.randn(8, 64, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    advised = preflight(model, optimizer, loss=lambda: model(inputs).float().square().mean(), finetunes=True)
    [found] = [each for each in advised.findings if each.code == "PRC4"]
    assert found.grade == grade
    share = int(found.found.rpartition("changes ")[2].partition("%")[0])
    assert share < 30 if grade == "error" else share > 80


class Normed(nn.Module):
    """A table, a norm and a head."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(20, 8), nn.LayerNorm(8), nn.Linear(8, 20)
        nn.init.constant_(self.norm.weight, gain)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.table(tokens)))
        return out


def test_weights_that_were_trained_are_known_by_their_norms_unless_the_run_goes_on() -> None:
    def left_out(gain: float, *, has_moments: bool = False) -> list[str]:
        model = Normed(gain)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        if has_moments:
            model(torch.zeros(1, 2, dtype=torch.long)).sum().backward()
            optimizer.step()
        return preflight(model, optimizer).left_out

    assert "OPT1" in left_out(0.7)
    assert left_out(1.0) == []
    assert left_out(0.7, has_moments=True) == []
