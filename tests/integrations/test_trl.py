"""Trainers of TRL's with a guard; its other tests are those of its example and of its command line."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations import small

import sealegs

pytestmark = pytest.mark.xdist_group("transformers")


@pytest.mark.integration("TRL")
@pytest.mark.conforms("unchanged")
def test_a_reward_trainer(tmp_path: Path) -> None:
    """Its loss compares two answers, and is a measure of the weights."""
    trl: Any = pytest.importorskip("trl", reason="trl is not installed: pip install trl")
    from datasets import Dataset
    from transformers import LlamaForSequenceClassification

    def trained(run: Path | None) -> Any:
        torch.manual_seed(0)
        model = LlamaForSequenceClassification(small.llama().config)
        model.config.num_labels, model.config.pad_token_id = 1, 0
        model.score = torch.nn.Linear(16, 1, bias=False)
        answers = [{"chosen": "aaaa" + "bcdefghi"[i % 8], "rejected": "zzzz" + "bcdefghi"[i % 8]} for i in range(32)]
        settings = {"max_steps": 12, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 1}
        args = trl.RewardConfig(
            output_dir=str(tmp_path / "out"), report_to="none", use_cpu=True, bf16=False, disable_tqdm=True, **settings
        )
        data = Dataset.from_list(answers)
        trainer = trl.RewardTrainer(model=model, args=args, train_dataset=data, processing_class=small.speller())
        if run is not None:
            small.attached(trainer, run, playbook=sealegs.Playbook.standard())
        trainer.train()
        return trainer

    bare, guarded = trained(None), trained(tmp_path / "run")
    assert small.digest(guarded.model) == small.digest(bare.model)
    run = sealegs.open_run(tmp_path / "run")
    assert run.manifest.settings["trainer"] == "RewardTrainer"
    assert run.column("loss")[run.logged("loss")][-1] < run.column("loss")[0]
    assert {"preference_accuracy", "reward_margin"} <= set(run.signals)
    assert "reward" not in run.signals, "no policy is paid it"
    assert "loss-is-no-measure" not in {event.kind for event in run.events}


@pytest.mark.parametrize("follows", [False, True])
def test_a_reference_that_follows_the_policy_is_named(follows: bool, tmp_path: Path) -> None:
    """DPO's reference model stays as it is, unless it is asked to follow: then going back leaves it where it is."""
    trl: Any = pytest.importorskip("trl", reason="trl is not installed: pip install trl")
    from datasets import Dataset

    args = trl.DPOConfig(
        output_dir=str(tmp_path / "out"),
        report_to="none",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        max_steps=1,
        sync_ref_model=follows,
        per_device_train_batch_size=4,
    )
    pairs = [{"prompt": "abc", "chosen": "def", "rejected": "zzz"} for _ in range(8)]
    model, reference = small.llama(), small.llama()
    trainer = trl.DPOTrainer(
        model, reference, args=args, train_dataset=Dataset.from_list(pairs), processing_class=small.speller()
    )
    attached = small.attached(trainer, tmp_path / "run")
    trainer.train()
    told = ["SyncRefModelCallback, which is called by the trainer at each step"] if follows else []
    (joined,) = [event.detail for event in sealegs.open_run(tmp_path / "run").events if event.kind == "guard"]
    assert joined["not_restored"] == told
    advised = [each.found for each in attached.advice.findings if each.code == "STA9"]
    assert advised == [f"in no state: {each}" for each in told]


@pytest.mark.parametrize("is_masked", [False, True])
def test_a_first_batch_without_a_target_is_said(tmp_path: Path, is_masked: bool) -> None:
    from sealegs.integrations.preflight_advice import PreflightWarning

    def collated(rows: list[Any]) -> dict[str, Any]:
        ids = torch.stack([row["input_ids"] for row in rows])
        labels = torch.full_like(ids, -100) if is_masked else ids.clone()
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}

    trainer = small.trainer(tmp_path / "out", max_steps=2)
    trainer.data_collator = collated
    small.attached(trainer, tmp_path / "run")
    if is_masked:
        with pytest.warns(PreflightWarning, match="DAT1 Batches in which no token counts"):
            trainer.train()
    else:
        trainer.train()
    events = sealegs.open_run(tmp_path / "run").events
    told = [text for event in events if event.kind == "preflight" for text in event.detail["findings"]]
    assert any("DAT1 error" in text for text in told) is is_masked
