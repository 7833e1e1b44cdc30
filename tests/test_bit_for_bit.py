"""Trainings of many kinds, plainly and under a guard that has nothing to skip: the same to the last bit."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

import sealegs
from sealegs.recovery.playbook import Playbook
from sealegs.signals.tensor_norms import MOST_ADDED

EPOCHS, ROWS, BATCH = 2, 1248, 16
STEPS = EPOCHS * ROWS // BATCH
"""Of a training that does not accumulate: some more than it takes until the statistic judges."""
WORDS, CLASSES = 60, 5


class Reader(nn.Module):
    """Words in, scores of classes out; batch norm and dropout on the way."""

    def __init__(self, wide: int = 24, deep: int = 2, words: int = WORDS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, wide)
        blocks = ((nn.Linear(wide, wide), nn.BatchNorm1d(wide), nn.GELU(), nn.Dropout(0.1)) for _ in range(deep))
        self.blocks = nn.Sequential(*(layer for block in blocks for layer in block))
        self.head = nn.Linear(wide, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.head(self.blocks(self.embedding(tokens).mean(1)))
        return scores


class Chooser(nn.Module):
    """Every batch goes one of two ways, by chance: the other has no gradient. One parameter is complex."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.ways = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.turn = nn.Parameter(torch.randn(16, dtype=torch.complex64))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.ways[int(torch.randint(2, ()))](self.embedding(tokens).mean(1))
        scores: Tensor = self.head((hidden * self.turn).real)
        return scores


class Tied(nn.Module):
    """The words that are to come are told by the table that words are read with; one layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.layers.layers[0].requires_grad_(False)
        self.head = nn.Linear(16, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.head(self.layers(self.embedding(tokens)).mean(1))
        return scores


def in_three_precisions() -> nn.Module:
    """Each part in another, as where some of it must be exact."""
    model = Reader()
    model.embedding.bfloat16()
    model.head.double()
    model.blocks.register_forward_pre_hook(lambda _, given: (given[0].float(),))
    model.head.register_forward_pre_hook(lambda _, given: (given[0].double(),))
    return model


def by_groups(model: nn.Module) -> list[Optimizer]:
    """As many do it: matrices decay. The optimizer has another order than the model."""
    vectors = [p for p in model.parameters() if p.ndim < 2]
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    return [AdamW([{"params": vectors, "weight_decay": 0.0}, {"params": matrices, "weight_decay": 0.1}], lr=0.01)]


def muon_and_adamw(model: nn.Module) -> list[Optimizer]:
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or "embedding" in name]
    known = set(map(id, rest))
    matrices = [p for p in model.parameters() if id(p) not in known]
    return [Muon(matrices, lr=0.02, ns_steps=2), AdamW(rest, lr=0.01)]


def adamw(model: nn.Module, **options: Any) -> list[Optimizer]:
    return [AdamW(model.parameters(), lr=0.01, **options)]


def sgd(model: nn.Module) -> list[Optimizer]:
    return [SGD(model.parameters(), lr=0.1, momentum=0.9)]


@dataclass(frozen=True, kw_only=True)
class Training:
    model: Callable[[], nn.Module] = Reader
    optimizers: Callable[[nn.Module], list[Optimizer]] = adamw
    clip: float | None = 1.0
    scheduled: bool = False
    micro_batches: int = 1
    autocast: torch.dtype | None = None
    scaled: bool = False
    """By a scale that becomes too large again and again: what the scaler skips it skips with a guard or without."""


TRAININGS = {
    "SGD with momentum": Training(optimizers=sgd),
    "unclipped": Training(optimizers=sgd, clip=None),
    "accumulated, seldom clipped": Training(micro_batches=2, scheduled=True, clip=2.0),
    "many parameters in groups": Training(model=lambda: Reader(16, 5), optimizers=by_groups, scheduled=True),
    "a large table, bf16 autocast": Training(
        model=lambda: Reader(64, 1, MOST_ADDED // 64 + 1), autocast=torch.bfloat16
    ),
    "two optimizers": Training(optimizers=muon_and_adamw),
    "Adafactor, tied and frozen": Training(
        model=Tied, optimizers=lambda m: [Adafactor(m.parameters(), lr=0.05)], clip=0.3
    ),
    "bf16 weights": Training(model=lambda: Reader().bfloat16()),
    "three precisions": Training(model=in_three_precisions),
    "by chance, complex": Training(model=Chooser),
    "fp16 autocast": Training(autocast=torch.float16, scaled=True),
    "fp16 autocast, fused, unclipped": Training(
        autocast=torch.float16, scaled=True, optimizers=partial(adamw, fused=True), clip=None
    ),
}


LIKE_OTHERS = ("SGD with momentum", "unclipped", "bf16 weights", "three precisions", "fp16 autocast, fused, unclipped")
"""Of which others show nearly all."""


class Plain:
    """Ends steps as loops do."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[Optimizer],
        *,
        scheduler: OneCycleLR | None,
        scaler: GradScaler | None,
        clip: float | None,
    ) -> None:
        self._model = model
        self._optimizers = optimizers
        self._scheduler = scheduler
        self._scaler = scaler
        self._clip = clip

    def batches(self, loader: Iterable[Any]) -> Iterable[Any]:
        return loader

    def accumulate(self) -> AbstractContextManager[None]:
        return nullcontext()

    def step(self, loss: Tensor) -> None:
        if self._clip is not None:
            if self._scaler is not None:
                for optimizer in self._optimizers:
                    self._scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(self._model.parameters(), self._clip)
        for optimizer in self._optimizers:
            optimizer.step() if self._scaler is None else self._scaler.step(optimizer)
        if self._scaler is not None:
            self._scaler.update()
        if self._scheduler is not None:
            self._scheduler.step()
        for optimizer in self._optimizers:
            optimizer.zero_grad()


def trained(training: Training, keeper: Callable[..., Any], device: str = "cpu") -> tuple[Any, dict[str, Any]]:
    """Who ended its steps, and what a training leaves behind, by name: weights, moments, settings, random state."""
    torch.manual_seed(0)
    tokens = torch.randint(WORDS, (ROWS, 6))
    loader = DataLoader(TensorDataset(tokens, tokens.sum(1) % CLASSES), BATCH, shuffle=True)
    model = training.model().to(device)
    optimizers = training.optimizers(model)
    steps = STEPS // training.micro_batches
    scheduler = OneCycleLR(optimizers[0], 0.03, total_steps=steps + 1) if training.scheduled else None
    scaler = GradScaler(device, init_scale=2.0**18, growth_interval=40) if training.scaled else None
    kept = keeper(model, optimizers, scheduler=scheduler, scaler=scaler, clip=training.clip)
    total, seen = torch.zeros((), device=device), 0
    for _ in range(EPOCHS):
        for inputs, wanted in kept.batches(loader):
            seen += 1
            is_last = seen % training.micro_batches == 0
            with nullcontext() if is_last else kept.accumulate():
                with torch.autocast(device, training.autocast, enabled=training.autocast is not None):
                    scores = model(inputs.to(device))
                loss = 3 * F.cross_entropy(scores.float(), wanted.to(device)) / training.micro_batches
                (loss if scaler is None else scaler.scale(loss)).backward()
                total = total + loss.detach()
            if is_last:
                kept.step(total)
                total = torch.zeros_like(total)
    left = {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "schedule": scheduler and scheduler.state_dict(),
        "scaler": scaler and scaler.state_dict(),
        "random": torch.get_rng_state(),
    }
    return kept, dict(flat("", left))


def flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    else:
        yield name, value
    for key, item in items:
        yield from flat(f"{name}.{key}", item)


def is_same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return bool(a == b)


def differing(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    assert ours.keys() == theirs.keys()
    return [name for name, value in ours.items() if not is_same(value, theirs[name])]


@pytest.fixture
def same_bits_at_any_address() -> Iterator[None]:
    """Two plain trainings with Muon differ where their tensors lie otherwise in memory: oneDNN multiplies bf16 so."""
    before, *_ = torch.backends.mkldnn.set_flags(False)
    yield
    torch.backends.mkldnn.set_flags(before)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in LIKE_OTHERS else name for name in TRAININGS]
)
@pytest.mark.usefixtures("same_bits_at_any_address")
def test_an_untouched_run_is_the_same_bit_for_bit(name: str, tmp_path: Path) -> None:
    training = TRAININGS[name]
    _, plain = trained(training, Plain)
    for folder, playbook in (("as it comes", None), ("with a playbook", Playbook.standard())):
        guard, left = trained(training, partial(sealegs.Guard, run=tmp_path / folder, playbook=playbook))
        guard.close()
        run = sealegs.open_run(tmp_path / folder)
        acted = {event.kind for event in run.events if event.detail.get("acted")}
        assert acted == ({"skip"} if training.scaled else set())
        assert guard.watch.skips == 0, "what the scaler skips is not counted"
        if training.clip is not None:
            assert (run.column("grad_norm") > training.clip).sum() > 20, "else this tests nothing"
        assert differing(left, plain) == []
