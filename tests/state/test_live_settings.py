"""A plain loop in; its settings in the manifest, and answers of pre-flight and diagnosis from them, out."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, SequentialLR

import sealegs
from sealegs.cli.main import main
from sealegs.diagnosis.facts import Facts
from sealegs.diagnosis.findings import look
from sealegs.diagnosis.settings import known_of
from sealegs.diagnosis.signs.settings import beta2_long, clip_off, decay_low
from sealegs.record import manifest as manifests
from sealegs.state.live_settings import RecordedSettings, model_settings, optimizer_settings, schedule_settings


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.RMSNorm(8, eps=1e-6), nn.Linear(8, 8)) for _ in range(3))
        self.head = nn.Linear(8, 32, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)  # type: ignore[no-any-return]


def made() -> tuple[Small, AdamW, SequentialLR]:
    torch.manual_seed(0)
    model = Small()
    matrices = [each for each in model.parameters() if each.ndim > 1]
    vectors = [each for each in model.parameters() if each.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.001}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = AdamW(groups, lr=1e-3, betas=(0.9, 0.999))
    parts = [LinearLR(optimizer, 0.1, total_iters=5), CosineAnnealingLR(optimizer, 95, eta_min=1e-4)]
    return model, optimizer, SequentialLR(optimizer, parts, milestones=[5])


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain loop that says nothing about itself."""
    folder = tmp_path_factory.mktemp("runs") / "a"
    model, optimizer, scheduler = made()
    with sealegs.Guard(model, optimizer, run=folder, scheduler=scheduler, clip=1.0) as guard:
        for (tokens,) in guard.batches([(torch.randint(32, (4, 6)),) for _ in range(6)]):
            loss = loss_of(model, tokens)
            loss.backward()
            guard.step(loss, tokens=24)
    return folder


def preflight(capsys: pytest.CaptureFixture[str], folder: Path) -> dict[str, Any]:
    main(["preflight", str(folder), "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_manifest_says_what_the_objects_show(guarded: Path) -> None:
    recorded = manifests.load(guarded).recorded
    optimizer = recorded["optimizer"]
    assert [optimizer[name] for name in ("class", "lr", "betas", "clip")] == ["AdamW", 1e-3, [0.9, 0.999], 1.0]
    assert (optimizer["weight_decay"], optimizer["decays_vectors"], optimizer["decays_embeddings"]) == (
        1e-3,
        False,
        True,
    )
    assert optimizer["groups"][0]["tensors"] == {"embeddings": 1, "matrices": 4}
    assert optimizer["groups"][1] == {"lr": 1e-3, "weight_decay": 0.0, "tensors": {"vectors": 6}, "parameters": 48}
    schedule = recorded["schedule"]
    assert (schedule["warmup_steps"], schedule["schedule"], schedule["decay_steps"]) == (5, "cosine", 100)
    assert schedule["final_lr_share"] == pytest.approx(0.1)
    seen = {"addends": 1, "autocast": True, "dtype": "bf16"}
    assert recorded["precision"] == {"weights_dtype": "fp32", "scaler": False, **seen}
    assert recorded["data"] == {"ranks": 1, "batch": 4, "sequence_length": 6, "accumulation": 1, "batch_tokens": 24}
    model = recorded["model"]
    shape = {"class": "Small", "layers": 3, "width": 8, "vocabulary": 32, "tied_head": False, "norm_eps": 1e-6}
    assert {name: model[name] for name in shape} == shape
    assert model["norms"] == {"RMSNorm": 3}
    assert {"deterministic", "float32_matmul_precision", "threads"} <= recorded["environment"].keys()


def test_preflight_answers_from_it(guarded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = preflight(capsys, guarded)
    assert {"OPT1", "OPT5", "SCH2"} <= {each["code"] for each in found["findings"]}, "beta2, decay, warm-up"
    assert not {"OPT7", "OPT8", "OPT10", "CLIP1", "CLIP2", "SCH1", "PRC1", "PRC4"} & set(found["unknown"])


@pytest.mark.parametrize("how", ["an adapter", "most is frozen"])
def test_a_fine_tune_gets_no_advice_for_pretraining(
    how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the very settings that a run from random weights is warned of."""
    model, _, _ = made()
    if how == "an adapter":
        model.peft_config = {"default": SimpleNamespace(peft_type="LORA")}  # type: ignore[assignment]
    else:
        model.requires_grad_(False)
        next(each for each in model.modules() if isinstance(each, nn.Linear)).requires_grad_(True)
    optimizer = AdamW([each for each in model.parameters() if each.requires_grad], lr=2e-4)
    with sealegs.Guard(model, optimizer, run=tmp_path / "tuned", clip=1.0) as guard:
        for (tokens,) in guard.batches([(torch.randint(32, (4, 6)),) for _ in range(30)]):
            loss = loss_of(model, tokens)
            loss.backward()
            guard.step(loss)
    found = preflight(capsys, tmp_path / "tuned")
    assert {"OPT1", "OPT5", "SCH2"}.isdisjoint(each["code"] for each in found["findings"])
    assert manifests.load(tmp_path / "tuned").recorded["model"].get("adapter") == ("lora" if "adapter" in how else None)
    assert look(sealegs.open_run(tmp_path / "tuned")).kind.name == "fine-tuning"


def test_a_diagnosis_answers_from_it(guarded: Path) -> None:
    facts = Facts(look(sealegs.open_run(guarded)))
    assert beta2_long(facts).holds
    assert decay_low(facts).holds
    assert clip_off(facts).holds is False
    assert facts.dtype == "bf16"


def test_what_the_user_wrote_goes_before_it(guarded: Path) -> None:
    manifest = manifests.load(guarded)
    said = replace(manifest, settings={"learning_rate": 0.5, "adam_beta2": 0.95}, dtype="fp32")
    known = known_of(said)
    assert (known.number("lr"), known.number("beta2"), known.dtype) == (0.5, 0.95, "fp32")
    assert known.number("weight_decay") == 1e-3, "which the user did not say"


def test_a_watch_records_the_objects_that_it_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer, scheduler = made()
    shown: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "clip": 1.0}
    with sealegs.Watch(tmp_path / "a", **shown) as watch:
        watch.see(0, loss=1.0, grad_norm=1.0)
    recorded = manifests.load(tmp_path / "a").recorded
    assert (recorded["optimizer"]["betas"], recorded["schedule"]["warmup_steps"]) == ([0.9, 0.999], 5)
    assert "dtype" not in recorded["precision"], "no forward pass was seen"
    assert not {"OPT1", "OPT5", "CLIP1", "SCH2", "PRC4"} & set(preflight(capsys, tmp_path / "a")["unknown"])
    with sealegs.Watch(tmp_path / "b") as watch:
        watch.see(0, loss=1.0)
    assert manifests.load(tmp_path / "b").recorded.keys() == {"environment"}


def test_the_functions_of_hugging_face_say_their_warm_up() -> None:
    transformers = pytest.importorskip("transformers")
    optimizer = SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, 10, 100)
    told = schedule_settings([schedule])
    assert (told["warmup_steps"], told["steps"], told["schedule"]) == (10, 100, "cosine")


def test_what_cannot_be_known_is_left_out() -> None:
    optimizer = SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    told = schedule_settings([LambdaLR(optimizer, lambda step: 1 / (1 + step))])
    assert told == {"class": ["LambdaLR"], "arguments": [{}]}
    assert "betas" not in optimizer_settings([optimizer])
    classifier = nn.Sequential(nn.EmbeddingBag(100, 8), nn.Linear(8, 2))
    assert not {"vocabulary", "width", "heads", "norms"} & model_settings(classifier).keys()


def test_what_cannot_be_read_is_said_and_costs_nothing() -> None:
    said: list[str] = []
    written: list[Any] = []
    recorded = RecordedSettings(written.append, said.append)

    def unreadable() -> dict[str, Any]:
        raise KeyError(1)

    recorded.add("model", unreadable)
    recorded.add("data", lambda: {"ranks": 1})
    recorded.write()
    assert said == ["model: KeyError: 1"]
    assert written == [{"data": {"ranks": 1}}]
