"""``sealegs.preflight``: what is seen of live models, optimizers, schedules and loaders, none of which it changes."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, LRScheduler, OneCycleLR, SequentialLR
from torch.utils.data import DataLoader, Dataset, TensorDataset

import sealegs
from sealegs.errors import ConfigError
from sealegs.lab.model import Transformer
from sealegs.lab.settings import SIZES, ModelSettings
from sealegs.lab.train import build_optimizer, lr_share
from sealegs.preflight_check.structure import read_structure
from sealegs.report.commands.preflight import Advised

NANO = SIZES["nano"]


def lab(**changes: Any) -> Transformer:
    torch.manual_seed(0)
    return Transformer(replace(NANO.model, **changes))


def loss_of(model: Transformer) -> Tensor:
    tokens = torch.arange(32).repeat(2, 1)
    return model.losses(tokens, tokens).total / tokens.numel()


def codes(advised: Advised) -> list[str]:
    return [each.code for each in advised.findings]


class Scaled(nn.Module):
    """A norm that nobody would know by its name."""

    def __init__(self, width: int, floor: float) -> None:
        super().__init__()
        self.gains = nn.Parameter(torch.ones(width))
        self.floor = floor

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.floor).sqrt() * self.gains


class Layer(nn.Module):
    """A layer whose norms stand where one says, as OLMo 2 has them too: on what is added."""

    def __init__(self, width: int, where: str, floor: float) -> None:
        super().__init__()
        self.where = where
        self.mixes = nn.ModuleDict({name: nn.Linear(width, width) for name in "qkvo"})
        self.a, self.b = Scaled(width, floor), Scaled(width, floor)

    def forward(self, x: Tensor) -> Tensor:
        read = self.a(x) if self.where == "pre" else x
        q, k, v = (self.mixes[name](read) for name in "qkv")
        added = self.mixes["o"]((q @ k.mT / 8).softmax(-1) @ v)
        if self.where == "post":
            return self.b(x + added)  # type: ignore[no-any-return]
        return x + (self.b(added) if self.where == "branch" else added)  # type: ignore[no-any-return]


class Own(nn.Module):
    """Somebody's own model: called with names, gives a dict."""

    def __init__(self, where: str = "pre", floor: float = 1e-5, *, last: bool = True, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(40, 16)
        self.stack = nn.Sequential(*(Layer(16, where, floor) for _ in range(3)))
        self.last = Scaled(16, floor) if last else nn.Identity()
        self.readout = nn.Linear(16, 40, bias=False)
        if tied:
            self.readout.weight = self.table.weight

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        return {"scores": self.readout(self.last(self.stack(self.table(ids))))}


def live_lab(name: str) -> Advised:
    settings = SIZES[name]
    torch.manual_seed(0)
    model = Transformer(settings.model)
    optimizer = build_optimizer(model, settings.optimizer)
    scheduler = LambdaLR(optimizer, partial(lr_share, settings.optimizer, settings.steps))
    tokens = torch.randint(settings.model.vocabulary, (2, 16))
    return sealegs.preflight(
        model, optimizer, scheduler, steps=settings.steps, clip=1.0, dtype="fp32", labels=tokens,
        loss=lambda: model.losses(tokens, tokens).total / 32,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["nano", "toy"])
def test_nothing_is_said_of_the_labs_own_objects(name: str) -> None:
    advised = live_lab(name)
    assert (codes(advised), advised.asked) == ([], 41)
    assert {
        "STA1",
        "STA2",
        "STA4",
        "STA5",
        "STA6",
        "STA8",
        "STA9",
        "ARC1",
        "ARC2",
        "ARC5",
        "ARC6",
        "ARC8",
        "SCH1",
    }.isdisjoint(advised.unknown)


def everything(model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler) -> list[Any]:
    state = [optimizer.state_dict(), scheduler.state_dict(), model.state_dict(), torch.get_rng_state()]
    gradients = [None if each.grad is None else each.grad.clone() for each in model.parameters()]
    return copy.deepcopy([*state, gradients, [each.training for each in model.modules()]])


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("steps_before", [0, 3])
def test_nothing_is_changed(steps_before: int) -> None:
    class Noisy(Own):
        def __init__(self) -> None:
            super().__init__()
            self.batch_norm, self.dropout = nn.BatchNorm1d(16), nn.Dropout(0.5)

        def forward(self, ids: Tensor) -> dict[str, Tensor]:
            return {"scores": self.readout(self.dropout(self.batch_norm(self.table(ids).mean(1))))}

    model = Noisy()
    model.stack[1].eval()  # as somebody left it
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = CosineAnnealingLR(optimizer, 100)
    ids = torch.arange(32).view(4, 8)
    for _ in range(steps_before):
        model(ids)["scores"].logsumexp(-1).mean().backward()
        optimizer.step()
        scheduler.step()
    group, before = optimizer.param_groups[0], everything(model, optimizer, scheduler)
    advised = sealegs.preflight(
        model, optimizer, scheduler, steps=100, example={"ids": ids},
        loss=lambda: model(ids)["scores"].logsumexp(-1).mean(),
    )  # fmt: skip
    assert "STA5" in codes(advised), "the stack is not used"
    assert optimizer.param_groups[0] is group
    assert same(before, everything(model, optimizer, scheduler))
    assert not model.table._forward_hooks


# The model.


@pytest.mark.parametrize("where", ["pre", "post", "branch"])
def test_where_norms_stand_is_seen_whatever_they_are_called(where: str) -> None:
    known = read_structure(Own(where))
    assert (known["norm_position"], known["final_norm"], known["embedding_norm"]) == (where, True, False)
    assert (known["layers"], known["width"], known["vocabulary"], known["qk_norm"]) == (3, 16, 40, False)
    for example in (torch.zeros(1, 4, dtype=torch.long), {"ids": torch.zeros(1, 4, dtype=torch.long)}):
        assert read_structure(Own(where), example)["norm_position"] == where


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({}, {"norm_position": "pre", "final_norm": True, "tied_head": True, "qk_norm": False, "norm_eps": 1e-6}),
        ({"norm_position": "post"}, {"norm_position": "post", "final_norm": False}),
        ({"norm": "layernorm"}, {"norm_position": "pre", "final_norm": True}),
        ({"qk_norm": True}, {"qk_norm": True, "norm_position": "pre"}),
        ({"embedding_norm": True}, {"embedding_norm": True, "norm_position": "pre"}),
        ({"tied_head": False}, {"tied_head": False}),
        ({"norm_eps": 0.0}, {"norm_eps": 0.0}),
    ],
)
def test_what_the_lab_can_be_is_seen(changes: dict[str, Any], seen: dict[str, Any]) -> None:
    known = read_structure(lab(**changes))
    assert {name: known[name] for name in seen} == seen


def test_torchs_own_encoder_is_seen() -> None:
    class Encoder(nn.Module):
        def __init__(self, *, norm_first: bool) -> None:
            super().__init__()
            self.embedding = nn.Embedding(50, 16)
            layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=norm_first)
            self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.layers(self.embedding(tokens))  # type: ignore[no-any-return]

    assert [read_structure(Encoder(norm_first=first))["norm_position"] for first in (True, False)] == ["pre", "post"]


@pytest.mark.parametrize(
    ("model", "code"),
    [
        (lambda: lab(norm_eps=0.0), "ARC2"),
        (lambda: Own(floor=0.0), "ARC2"),
        (lambda: lab(norm_position="post"), "ARC1"),
        (lambda: Own(last=False), "ARC8"),
        (lambda: lab(init_std=0.5), "ARC5"),
        (lambda: Own(tied=True), "ARC6"),
    ],
)
def test_what_is_wrong_with_a_model_is_seen(model: Callable[[], nn.Module], code: str) -> None:
    assert code in codes(sealegs.preflight(model()))


def test_trained_weights_are_not_measured_as_initial_ones() -> None:
    model = lab(init_std=0.5)
    assert "ARC5" in codes(sealegs.preflight(model))
    with torch.no_grad():
        model.final_norm.weight.mul_(1.01)  # type: ignore[operator]
    assert {"ARC5", "ARC6"} <= set(sealegs.preflight(model).left_out)


def test_a_model_that_does_not_run_on_token_ids_is_looked_at_all_the_same() -> None:
    class Odd(Own):
        def forward(self, ids: Tensor, speaker: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            return super().forward(ids + speaker)

    advised = sealegs.preflight(Odd())
    assert (codes(advised), "ARC1" in advised.unknown) == ([], True)
    given = (torch.zeros(2, 4, dtype=torch.long), torch.ones(2, 1, dtype=torch.long))
    assert "ARC1" not in sealegs.preflight(Odd(), example=given).unknown
    images = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
    optimizer = torch.optim.AdamW(images.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    assert codes(sealegs.preflight(images, optimizer)) == ["OPT8"]


def test_weights_that_are_not_there_are_said_so() -> None:
    with torch.device("meta"), pytest.raises(ConfigError, match="meta device"):
        sealegs.preflight(Own())


# The state.


def adamw(model: nn.Module, **settings: Any) -> torch.optim.AdamW:
    return build_optimizer(model, replace(NANO.optimizer, **settings))


def test_parameters_without_an_optimizer_are_named() -> None:
    model = lab(tied_head=False)
    optimizer = adamw(model)
    assert model.head is not None
    model.head = nn.Linear(48, 512, bias=False)  # after the optimizer was made
    advised = sealegs.preflight(model, optimizer)
    assert codes(advised)[:2] == ["STA1", "STA2"]
    assert "head.weight" in advised.findings[0].found


def test_parameters_that_are_trained_twice_are_named() -> None:
    model = lab()
    both = [adamw(model), torch.optim.SGD([model.embedding.weight], lr=0.1)]
    [twice] = [each for each in sealegs.preflight(model, both).findings if each.code == "STA4"]
    assert twice.found == "twice: embedding.weight"


def test_frozen_and_standing_parameters_are_named() -> None:
    model = lab()
    model.blocks[0].requires_grad_(False)
    optimizer = adamw(model)
    advised = sealegs.preflight(model, optimizer, loss=lambda: loss_of(model))
    assert codes(advised) == ["STA3"]
    model.blocks[0].requires_grad_(True)

    def detached() -> Tensor:
        with torch.no_grad():
            read = model.blocks[0](model.embedding(torch.arange(8)[None]), (model.cosine[:8], model.sine[:8]))  # type: ignore[index]
        rest = model.blocks[1](read, (model.cosine[:8], model.sine[:8]))  # type: ignore[index]
        return nn.functional.linear(model.final_norm(rest), model.embedding.weight).logsumexp(-1).mean()

    [still] = [each for each in sealegs.preflight(model, adamw(model), loss=detached).findings if each.code == "STA5"]
    assert "blocks.0.attention_norm.weight" in still.found
    assert "and 3 more" in still.found


def test_a_lost_tie_is_seen() -> None:
    model = Own(tied=True)
    assert "STA6" not in codes(sealegs.preflight(model))
    model.readout.weight = nn.Parameter(model.table.weight.detach().clone())  # as a copy to another device does
    assert "STA6" in codes(sealegs.preflight(model))
    assert "STA6" not in codes(sealegs.preflight(Own())), "two that were never one"


class Words(nn.Module):
    """As BERT with a classifier: tables of words, places and kinds of token; two classes as there are two kinds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.word_embeddings = nn.Embedding(40, 16)
        self.token_type_embeddings = nn.Embedding(2, 16)
        self.classifier = nn.Linear(16, 2)
        self.head: nn.Module | None = None
        self.config = type("Config", (), {"tie_word_embeddings": True})()  # of every model, whether it has a head

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.word_embeddings(ids) + self.token_type_embeddings(ids * 0))
        return scores


class Named(Words):
    """The same, and it says which are which, as Hugging Face's models do."""

    def get_input_embeddings(self) -> nn.Module:
        return self.word_embeddings

    def get_output_embeddings(self) -> nn.Module | None:
        return self.head


@pytest.mark.parametrize("kind", [Words, Named])
def test_matrices_that_happen_to_have_one_shape_are_no_tie(kind: type[Words]) -> None:
    model = kind()
    assert "STA6" not in codes(sealegs.preflight(model))
    model.head = nn.Linear(16, 40, bias=False)
    [lost] = [each for each in sealegs.preflight(model).findings if each.code == "STA6"]
    assert lost.found == "apart: head.weight and word_embeddings.weight"
    model.head.weight = model.word_embeddings.weight
    assert "STA6" not in codes(sealegs.preflight(model))


def test_an_optimizer_that_chooses_its_own_rate_is_looked_at() -> None:
    """As Hugging Face's Adafactor with `lr=None`."""
    model = lab()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = None
    assert sealegs.preflight(model, optimizer).asked > 10


def test_weights_that_are_not_finite_are_named() -> None:
    model = lab()
    with torch.no_grad():
        model.embedding.weight[3, 4] = torch.nan
    [bad] = [each for each in sealegs.preflight(model).findings if each.grade == "error"]
    assert (bad.code, bad.found) == ("STA8", "not finite: embedding.weight")


def test_a_resume_that_lost_the_moments_or_the_schedule_is_seen() -> None:
    model = lab()
    optimizer = adamw(model)
    scheduler = LambdaLR(optimizer, lambda step: 1.0, last_epoch=-1)
    for _ in range(40):
        loss_of(model).backward()
        optimizer.step()
        scheduler.step()
    assert codes(sealegs.preflight(model, optimizer, scheduler)) == []
    assert "SCH9" in codes(sealegs.preflight(model, optimizer, LambdaLR(adamw(model), lambda step: 1.0)))
    assert "STA7" in codes(sealegs.preflight(model, adamw(model), scheduler))


# The optimizer and the precision.


def test_what_decays_and_how_is_seen() -> None:
    model = lab()
    everything_alike = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    assert codes(sealegs.preflight(model, everything_alike)) == ["OPT8"]
    through_gradient = torch.optim.Adam([model.embedding.weight], betas=(0.9, 0.95), weight_decay=0.1)
    assert "OPT7" in codes(sealegs.preflight(model, through_gradient))
    decoupled = torch.optim.Adam(model.parameters(), betas=(0.9, 0.95), decoupled_weight_decay=True, weight_decay=0.1)
    assert codes(sealegs.preflight(model, decoupled)) == ["OPT8"]


def test_weights_in_bf16_are_seen_with_what_their_updates_come_to() -> None:
    model = lab().bfloat16()
    advised = sealegs.preflight(model, adamw(model, lr=3e-5))
    [found] = [each for each in advised.findings if each.code == "PRC4"]
    assert found.grade == "error"
    kept = adamw(lab())
    assert "PRC4" not in codes(sealegs.preflight(lab(), kept))


def test_a_scaler_is_asked_for_with_fp16_alone() -> None:
    model = lab()
    scaler = torch.amp.GradScaler("cpu")
    assert codes(sealegs.preflight(model, adamw(model), dtype="fp16")) == ["PRC1"]
    assert codes(sealegs.preflight(model, adamw(model), dtype="fp16", scaler=scaler)) == []
    assert codes(sealegs.preflight(model, adamw(model), dtype="bf16", scaler=scaler)) == ["PRC2"]


# The schedule.


def scheduled(make: Callable[[Optimizer], LRScheduler], steps: int = 1000) -> list[str]:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    return codes(sealegs.preflight(optimizer=optimizer, scheduler=make(optimizer), steps=steps))


def leaping(step: int) -> float:
    return 4.0 if step >= 500 else 1.0


def test_a_schedule_that_is_not_judged_is_said_to_be_none_and_what_to_pass() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    schedule = LambdaLR(optimizer, leaping)
    told = sealegs.preflight(model, optimizer, schedule)
    assert str(told).splitlines()[1] == told.not_judged
    assert told.not_judged.endswith("pass the length of the run, as in sealegs.preflight(..., steps=20_000).")
    judged = sealegs.preflight(model, optimizer, schedule, steps=1000)
    assert "SCH4" in codes(judged)
    assert judged.not_judged == sealegs.preflight(model, optimizer).not_judged == ""
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    assert "waits for a metric" in str(sealegs.preflight(model, optimizer, plateau, steps=1000))


def test_both_betas_are_said_where_they_are_set_at_once() -> None:
    model = nn.Linear(4, 4)
    for betas, code, value in (
        ((0.8, 0.999), "OPT1", "(0.8, 0.95)"),
        ((0.97, 0.999), "OPT1", "(0.9, 0.95)"),
        ((0.9, 0.8), "OPT2", "(0.9, 0.95)"),
    ):
        found = sealegs.preflight(model, torch.optim.AdamW(model.parameters(), betas=betas)).findings
        assert [(each.knob, each.value) for each in found if each.code == code] == [("optimizer.betas", value)]


def warm(step: int) -> float:
    return min(1.0, (step + 1) / 50)


def chained(optimizer: Optimizer, warmup: int = 100, period: int = 900) -> LRScheduler:
    rise = LinearLR(optimizer, 0.01, 1.0, warmup)
    return SequentialLR(optimizer, [rise, CosineAnnealingLR(optimizer, period, eta_min=1e-4)], [warmup])


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (chained, []),
        (lambda optimizer: chained(optimizer, period=600), ["SCH6"]),  # torch's cosine is periodic
        (lambda optimizer: chained(optimizer, period=300), []),  # and may end at a low
        (lambda optimizer: CosineAnnealingLR(optimizer, 1000), ["SCH1"]),
        (lambda optimizer: CosineAnnealingLR(optimizer, 200), ["SCH1"]),
        (lambda optimizer: CosineAnnealingLR(optimizer, 100), ["SCH1", "SCH6"]),  # at the top of its tenth half period
        (lambda optimizer: OneCycleLR(optimizer, 1e-3, total_steps=1001), []),
        (lambda optimizer: LambdaLR(optimizer, lambda step: warm(step) * (step < 500)), ["SCH7"]),
        (
            lambda optimizer: LambdaLR(optimizer, lambda step: warm(step) * (1 - step / 1000 if step > 500 else 0.1)),
            ["SCH4"],
        ),
    ],
)
def test_schedules_of_torch_are_walked_to_the_end(make: Callable[[Optimizer], LRScheduler], found: list[str]) -> None:
    assert sorted(code for code in scheduled(make) if code.startswith("SCH")) == found


def test_a_schedule_is_left_where_it_stands() -> None:
    optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters(), lr=1e-3)
    scheduler = chained(optimizer)
    before = copy.deepcopy((scheduler.state_dict(), optimizer.param_groups[0]["lr"]))
    sealegs.preflight(optimizer=optimizer, scheduler=scheduler, steps=1000)
    assert str(before) == str((scheduler.state_dict(), optimizer.param_groups[0]["lr"]))


# The data.


class WithGenerator(Dataset[Tensor]):
    def __init__(self) -> None:
        self.random = np.random.default_rng(0)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(self.random.random())


def test_loaders_are_looked_at() -> None:
    rows = TensorDataset(torch.arange(8))
    assert codes(sealegs.preflight(loader=DataLoader(rows))) == ["DAT3"]
    assert codes(sealegs.preflight(loader=DataLoader(rows, shuffle=True))) == []
    assert codes(sealegs.preflight(loader=DataLoader(WithGenerator(), shuffle=True, num_workers=2))) == ["DAT4"]
    seeded = DataLoader(WithGenerator(), shuffle=True, num_workers=2, worker_init_fn=print)
    assert codes(sealegs.preflight(loader=seeded)) == []


def test_labels_are_looked_at() -> None:
    labels = torch.full((4, 8), -100)
    assert codes(sealegs.preflight(labels=labels)) == ["DAT1"]
    labels[:3, 4:] = 1
    [found] = sealegs.preflight(labels=labels).findings
    assert (found.code, found.grade) == ("DAT1", "warning"), "a row has none"
    labels[3, 0] = 1
    assert codes(sealegs.preflight(labels=labels)) == []


def test_what_cannot_be_seen_is_said_by_the_names_of_a_plan() -> None:
    assert codes(sealegs.preflight(clip=0.0)) == ["CLIP1"]
    assert codes(sealegs.preflight(plan={"operations": {"keep_checkpoints": 1}})) == ["OPS2"]
    with pytest.raises(ConfigError, match="clipp is no field of a plan; did you mean clip"):
        sealegs.preflight(clipp=1.0)


def test_the_settings_of_the_lab_are_the_lab() -> None:
    """What the file says of the lab's model, and what is seen of it, is the same."""
    from dataclasses import asdict

    from sealegs.preflight_check.config_readers import of_lab

    for changes in ({}, {"norm_position": "post"}, {"qk_norm": True, "tied_head": False}, {"embedding_norm": True}):
        settings = replace(NANO, model=replace(NANO.model, **changes))
        said = of_lab(asdict(settings)).plan.known()
        seen = read_structure(lab(**changes))
        for name in ("width", "layers", "vocabulary", "norm_position", "qk_norm", "tied_head", "embedding_norm"):
            assert said[name] == seen[name], name
        assert said["parameters"] == pytest.approx(seen["parameters"], rel=0.02)
        assert said["init_std"] == pytest.approx(seen["init_std"], rel=0.1)
    assert isinstance(NANO.model, ModelSettings)


def test_what_a_model_says_of_itself_is_read_as_well() -> None:
    """As Hugging Face's models do: a `config` with `to_dict`. The library itself is not installed for tests."""

    class Config:
        tie_word_embeddings = True
        _attn_implementation = "sdpa"

        def to_dict(self) -> dict[str, Any]:
            return {"model_type": "gemma2", "hidden_size": 16, "attn_logit_softcapping": 50.0}

    model = Own()
    model.config = Config()  # type: ignore[assignment]
    assert codes(sealegs.preflight(model)) == ["STA6", "ARC10"], "said to be tied, and is not; a cap that sdpa skips"
    tied = Own(tied=True)
    tied.alike = nn.Parameter(torch.randn_like(tied.table.weight) / 10)
    nn.init.normal_(tied.table.weight, std=0.1)
    tied.config = Config()  # type: ignore[assignment]
    assert codes(sealegs.preflight(tied)) == ["ARC10"]
