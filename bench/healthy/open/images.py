"""Healthy trainings on small images: sklearn's digits, 8 by 8, in many ways."""

from functools import cache

import torch
import torch.nn.functional as F
from bench.healthy.contract import Keeper, training
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.data import DataLoader, TensorDataset

TRAIN = 1437
"""Of 1797 images; the others are held out."""


@cache
def images() -> tuple[Tensor, Tensor]:
    """All of them, between 0 and 1, and what they show."""
    data, target = load_digits(return_X_y=True)
    return torch.tensor(data, dtype=torch.float32) / 16, torch.tensor(target)


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and labels to train on, and held out: the same split for every seed."""
    pixels, labels = images()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(5))
    train, test = order[:TRAIN], order[TRAIN:]
    return pixels[train], labels[train], pixels[test], labels[test]


@torch.no_grad()
def accuracy(model: nn.Module, pixels: Tensor, labels: Tensor) -> float:
    """Share of the images that are told right."""
    model.eval()
    return float((model(pixels).argmax(-1) == labels).float().mean())


@training(kind="image", metric="accuracy", about="digits, 2 % wrong labels, SGD with momentum, batch 32, cosine")
def digits_wrong_labels(seed: int, keeper: Keeper) -> float:
    """Once the rest is learned, a wrong label is the largest loss there is."""
    torch.manual_seed(seed)
    pixels, labels, test, truth = digits()
    wrong = torch.rand(TRAIN) < 0.02
    labels[wrong] = torch.randint(10, (int(wrong.sum()),))
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1125)
    steps = keeper.around(model, optimizer, scheduler=scheduler)
    loader = DataLoader(TensorDataset(pixels, labels), batch_size=32, shuffle=True)
    for _ in range(25):
        for inputs, wanted in steps.batches(loader):
            loss = F.cross_entropy(model(inputs), wanted)
            loss.backward()
            steps.step(loss)
    return accuracy(model, test, truth)


@training(kind="image", metric="accuracy", about="convolutions, BatchNorm, dropout, shifted images, AdamW one-cycle")
def digits_convolutions(seed: int, keeper: Keeper) -> float:
    """A small network of convolutions, augmented."""
    torch.manual_seed(seed)
    pixels, labels, test, truth = digits()
    model = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten()),
        *(nn.Dropout(0.3), nn.Linear(256, 10)),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=675)
    steps = keeper.around(model, optimizer, scheduler=scheduler, clip=5.0)
    loader = DataLoader(TensorDataset(pixels, labels), batch_size=32, shuffle=True)
    for _ in range(15):
        for inputs, wanted in steps.batches(loader):
            across, down = torch.randint(-1, 2, (2,)).tolist()
            shifted = inputs.view(-1, 8, 8).roll((across, down), (1, 2)).flatten(1)
            loss = F.cross_entropy(model(shifted), wanted, label_smoothing=0.1)
            loss.backward()
            steps.step(loss)
    return accuracy(model, test, truth)


@training(kind="image", metric="test MSE", about="autoencoder, loss near zero, batch 64, AdamW", is_better_higher=False)
def autoencoder(seed: int, keeper: Keeper) -> float:
    """Eight numbers for 64 pixels."""
    torch.manual_seed(seed)
    pixels, _, test, _ = digits()
    model = nn.Sequential(
        *(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 8)),
        *(nn.Linear(8, 128), nn.GELU(), nn.Linear(128, 64)),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    steps = keeper.around(model, optimizer, clip=1.0)
    loader = DataLoader(TensorDataset(pixels), batch_size=64, shuffle=True)
    for _ in range(45):
        for (inputs,) in steps.batches(loader):
            loss = F.mse_loss(model(inputs), inputs)
            loss.backward()
            steps.step(loss)
    with torch.no_grad():
        return float(F.mse_loss(model(test), test))


@training(
    kind="image", metric="nearest-neighbour accuracy", about="InfoNCE between two views, batch 8, temperature 0.1"
)
def contrastive(seed: int, keeper: Keeper) -> float:
    """Seven others to tell an image from: some batches have the same digit twice."""
    torch.manual_seed(seed)
    pixels, labels, test, truth = digits()
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    steps = keeper.around(model, optimizer)

    def view(inputs: Tensor) -> Tensor:
        kept = torch.rand_like(inputs) > 0.3
        return F.normalize(model(inputs * kept + 0.1 * torch.randn_like(inputs)), dim=-1)

    loader = DataLoader(TensorDataset(pixels), batch_size=8, shuffle=True, drop_last=True)
    for _ in range(5):
        for (inputs,) in steps.batches(loader):
            likeness = view(inputs) @ view(inputs).T / 0.1
            each = torch.arange(len(inputs))
            loss = (F.cross_entropy(likeness, each) + F.cross_entropy(likeness.T, each)) / 2
            loss.backward()
            steps.step(loss)
    with torch.no_grad():
        known, asked = F.normalize(model(pixels), dim=-1), F.normalize(model(test), dim=-1)
        return float((labels[(asked @ known.T).argmax(-1)] == truth).float().mean())


@training(kind="image", metric="accuracy", about="Muon on matrices, AdamW on the rest, batch 32")
def muon(seed: int, keeper: Keeper) -> float:
    """Two optimizers for one model."""
    torch.manual_seed(seed)
    pixels, labels, test, truth = digits()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    hidden = [each for name, each in model.named_parameters() if each.ndim == 2 and not name.startswith("4.")]
    rest = [each for each in model.parameters() if all(each is not other for other in hidden)]
    optimizers = [torch.optim.Muon(hidden, lr=0.01, weight_decay=0.01), torch.optim.AdamW(rest, lr=2e-3)]
    steps = keeper.around(model, optimizers, clip=1.0)
    loader = DataLoader(TensorDataset(pixels, labels), batch_size=32, shuffle=True)
    for _ in range(14):
        for inputs, wanted in steps.batches(loader):
            loss = F.cross_entropy(model(inputs), wanted)
            loss.backward()
            steps.step(loss)
    return accuracy(model, test, truth)


@training(kind="image", metric="accuracy", about="fp16 autocast with GradScaler on the CPU, batch 32, AdamW")
def half_precision(seed: int, keeper: Keeper) -> float:
    """The scaler begins at 2^16 and searches its scale."""
    torch.manual_seed(seed)
    pixels, labels, test, truth = digits()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scaler = GradScaler("cpu", growth_interval=200)
    steps = keeper.around(model, optimizer, clip=1.0, scaler=scaler)
    loader = DataLoader(TensorDataset(pixels, labels), batch_size=32, shuffle=True)
    for _ in range(15):
        for inputs, wanted in steps.batches(loader):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(inputs), wanted)
            scaler.scale(loss).backward()
            steps.step(loss)
    return accuracy(model, test, truth)


@training(kind="image", metric="accuracy", about="gradient accumulation, 4 micro-batches of 8, SGD with Nesterov")
def accumulated(seed: int, keeper: Keeper) -> float:
    """Four small batches make a step."""
    torch.manual_seed(seed)
    pixels, labels, test, truth = digits()
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    steps = keeper.around(model, optimizer)
    loader = DataLoader(TensorDataset(pixels, labels), batch_size=32, shuffle=True)
    for _ in range(14):
        for inputs, wanted in steps.batches(loader):
            micro = list(zip(inputs.chunk(4), wanted.chunk(4), strict=True))
            total = torch.zeros(())
            for number, (some, theirs) in enumerate(micro):
                loss = F.cross_entropy(model(some), theirs) / len(micro)
                if number < len(micro) - 1:
                    with steps.accumulate():
                        loss.backward()
                else:
                    loss.backward()
                total = total + loss.detach()
            steps.step(total)
    return accuracy(model, test, truth)


@training(kind="image", metric="accuracy on the last task", about="four permutations of the pixels one after another")
def task_switches(seed: int, keeper: Keeper) -> float:
    """Continual learning: every 300 steps the loss jumps up, unannounced, because the task is another."""
    torch.manual_seed(seed)
    pixels, labels, test, truth = digits()
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    steps = keeper.around(model, optimizer, clip=1.0)
    tasks = [torch.randperm(64) for _ in range(4)]
    batches = [(task, torch.randint(TRAIN, (32,))) for task in range(4) for _ in range(300)]
    for task, rows in steps.batches(batches):
        loss = F.cross_entropy(model(pixels[rows][:, tasks[task]]), labels[rows])
        loss.backward()
        steps.step(loss)
    return accuracy(model, test[:, tasks[-1]], truth)


class Experts(nn.Module):
    """Eight small experts, of which a router picks two."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(64, 8)
        self.up, self.down = nn.Parameter(torch.randn(8, 64, 32) / 8), nn.Parameter(torch.randn(8, 32, 64) / 32**0.5)
        self.head = nn.Linear(64, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        """What is shown."""
        return self.routed(inputs)[0]

    def routed(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """What is shown, and how unevenly the experts are used, 1 being even."""
        shares = self.router(inputs).softmax(-1)
        gates, chosen = shares.topk(2)
        gate = torch.zeros_like(shares).scatter(-1, chosen, gates)
        inside = torch.einsum("bi,eih->beh", inputs, self.up).relu()
        mixed = torch.einsum("beh,eho,be->bo", inside, self.down, gate)
        unevenness = 8 * ((gate > 0).float().mean(0) / 2 * shares.mean(0)).sum()
        return self.head(inputs + mixed), unevenness


@training(kind="image", metric="accuracy", about="mixture of 8 experts, top 2, auxiliary loss 0.01, batch 16, AdamW")
def experts(seed: int, keeper: Keeper) -> float:
    """What goes where changes from one step to the next."""
    torch.manual_seed(seed)
    pixels, labels, test, truth = digits()
    model = Experts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    steps = keeper.around(model, optimizer, clip=1.0)
    loader = DataLoader(TensorDataset(pixels, labels), batch_size=16, shuffle=True)
    for _ in range(10):
        for inputs, wanted in steps.batches(loader):
            logits, unevenness = model.routed(inputs)
            loss = F.cross_entropy(logits, wanted) + 0.01 * unevenness
            loss.backward()
            steps.step(loss)
    return accuracy(model, test, truth)
