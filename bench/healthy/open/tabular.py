"""Healthy trainings on tables: few rows a batch, rare classes, wrong labels, heavy tails."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from bench.healthy.contract import Keeper, Training, training
from sklearn.datasets import load_breast_cancer  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for inside, outside in pairwise(widths):
        layers += [nn.Linear(inside, outside), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def fixed(*shape: int) -> Tensor:
    """Normal numbers that make the problem: the same for every seed, so that seeds differ by the training alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


def drawn(count: int, batch: int, steps: int) -> Tensor:
    """Row numbers, a line a step, without replacement within an epoch."""
    epochs = [torch.randperm(count)[: count // batch * batch] for _ in range(steps * batch // count + 1)]
    return torch.cat(epochs)[: steps * batch].view(steps, batch)


@training(kind="tabular", metric="recall", about="1 % positives, gaussian features, batch 16, AdamW, clip 1.0")
def rare_positives(seed: int, keeper: Keeper) -> float:
    """One row in a hundred is what it is all about, and most batches have none."""
    torch.manual_seed(seed)
    toward = fixed(10)
    toward *= 5.0 / toward.norm()

    def table(rows: int) -> tuple[Tensor, Tensor]:
        wanted = (torch.rand(rows) < 0.01).float()
        return torch.randn(rows, 10) + wanted[:, None] * toward, wanted

    features, wanted = table(16 * 900)
    model = mlp(10, 32, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    steps = keeper.around(model, optimizer, clip=1.0)
    loader = DataLoader(TensorDataset(features, wanted), batch_size=16, shuffle=True)
    for inputs, labels in steps.batches(loader):
        loss = F.binary_cross_entropy_with_logits(model(inputs).squeeze(-1), labels)
        loss.backward()
        steps.step(loss)
    features, wanted = table(50_000)
    with torch.no_grad():
        found = model(features).squeeze(-1) > 0
    return float(found[wanted > 0].float().mean())


@training(kind="tabular", metric="accuracy", about="sklearn's breast cancer, 1 % wrong labels, batch 8, Adam")
def breast_cancer(seed: int, keeper: Keeper) -> float:
    """455 patients, 18 epochs."""
    torch.manual_seed(seed)
    data, target = load_breast_cancer(return_X_y=True)
    features, wanted = torch.tensor(data, dtype=torch.float32), torch.tensor(target)
    order = torch.randperm(len(wanted), generator=torch.Generator().manual_seed(5))
    train, test = order[:455], order[455:]
    features = (features - features[train].mean(0)) / features[train].std(0)
    noisy = wanted.clone()
    flipped = train[torch.rand(len(train)) < 0.01]
    noisy[flipped] = 1 - noisy[flipped]
    model = mlp(30, 32, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    steps = keeper.around(model, optimizer)
    loader = DataLoader(TensorDataset(features[train], noisy[train]), batch_size=8, shuffle=True)
    for _ in range(18):
        for inputs, labels in steps.batches(loader):
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            steps.step(loss)
    with torch.no_grad():
        return float((model(features[test]).argmax(-1) == wanted[test]).float().mean())


def wrong_labels(batch: int) -> Callable[[int, Keeper], float]:
    """Ten classes apart from each other, 1 % of the labels drawn anew, 1000 steps."""

    def train(seed: int, keeper: Keeper) -> float:
        torch.manual_seed(seed)
        centres = fixed(10, 20)

        def table(rows: int) -> tuple[Tensor, Tensor]:
            wanted = torch.randint(10, (rows,))
            return centres[wanted] + torch.randn(rows, 20), wanted

        features, wanted = table(5000)
        wrong = torch.rand(5000) < 0.01
        wanted[wrong] = torch.randint(10, (int(wrong.sum()),))
        model = mlp(20, 64, 10)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        steps = keeper.around(model, optimizer, clip=1.0)
        for rows in steps.batches(drawn(5000, batch, 1000)):
            loss = F.cross_entropy(model(features[rows]), wanted[rows])
            loss.backward()
            steps.step(loss)
        features, wanted = table(10_000)
        with torch.no_grad():
            return float((model(features).argmax(-1) == wanted).float().mean())

    train.__name__ = f"wrong_labels_batch_{batch}"
    return train


def small_regression(batch: int) -> Callable[[int, Keeper], float]:
    """A smooth function of eight numbers with some noise, 1500 steps."""

    def train(seed: int, keeper: Keeper) -> float:
        torch.manual_seed(seed)
        frequencies = fixed(8, 3) / 8**0.5

        def table(rows: int) -> tuple[Tensor, Tensor]:
            features = torch.randn(rows, 8)
            return features, (features @ frequencies).sin().sum(-1) + features[:, 0] * features[:, 1] / 2

        features, wanted = table(4000)
        wanted = wanted + 0.1 * torch.randn(4000)
        model = mlp(8, 64, 64, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        steps = keeper.around(model, optimizer)
        for rows in steps.batches(drawn(4000, batch, 1500)):
            loss = F.mse_loss(model(features[rows]).squeeze(-1), wanted[rows])
            loss.backward()
            steps.step(loss)
        features, wanted = table(5000)
        with torch.no_grad():
            return float(F.mse_loss(model(features).squeeze(-1), wanted))

    train.__name__ = f"small_regression_batch_{batch}"
    return train


def in_batches(
    of: Callable[[int], Callable[[int, Keeper], float]], sizes: Sequence[int], metric: str, about: str
) -> list[Training]:
    """The same training in batches of several sizes."""
    return [
        training(kind="tabular", metric=metric, about=f"{about}, batch {size}", is_better_higher=metric == "accuracy")(
            of(size)
        )
        for size in sizes
    ]


wrong_labels_batch_4, wrong_labels_batch_8, wrong_labels_batch_16, wrong_labels_batch_32 = in_batches(
    wrong_labels, (4, 8, 16, 32), "accuracy", "ten classes, 1 % wrong labels, AdamW, clip 1.0, 1000 steps"
)
small_regression_batch_8, small_regression_batch_32, small_regression_batch_128 = in_batches(
    small_regression, (8, 32, 128), "test MSE", "a smooth function with noise, Adam, no clipping, 1500 steps"
)


@training(
    kind="tabular", metric="median error", about="targets with Student's t noise, 2 dof, Huber", is_better_higher=False
)
def heavy_tails(seed: int, keeper: Keeper) -> float:
    """What Huber's loss is for: single targets are a hundred deviations out."""
    torch.manual_seed(seed)
    slopes = fixed(12) / 3

    def table(rows: int) -> tuple[Tensor, Tensor]:
        features = torch.randn(rows, 12)
        return features, (features @ slopes).tanh() * 3

    features, wanted = table(20_000)
    wanted = wanted + torch.distributions.StudentT(2.0).sample((20_000,))
    model = mlp(12, 64, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1200)
    steps = keeper.around(model, optimizer, scheduler=scheduler)
    for rows in steps.batches(drawn(20_000, 32, 1200)):
        loss = F.huber_loss(model(features[rows]).squeeze(-1), wanted[rows])
        loss.backward()
        steps.step(loss)
    features, wanted = table(5000)
    with torch.no_grad():
        return float((model(features).squeeze(-1) - wanted).abs().median())


@training(
    kind="tabular", metric="test MSE", about='reduction="sum", last batch of an epoch is short', is_better_higher=False
)
def summed_loss(seed: int, keeper: Keeper) -> float:
    """The loss is as large as the batch, and one batch in 34 has 8 rows instead of 64."""
    torch.manual_seed(seed)
    features = torch.rand(2120, 6) * 2 - 1
    clean = 10 * (torch.pi * features[:, 0] * features[:, 1]).sin() + 20 * features[:, 2] ** 2 + 10 * features[:, 3]
    wanted = clean + torch.randn(2120)
    model = mlp(6, 64, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    steps = keeper.around(model, optimizer, clip=100.0)
    loader = DataLoader(TensorDataset(features[:1672], wanted[:1672]), batch_size=64, shuffle=True)
    for _ in range(40):
        for inputs, targets in steps.batches(loader):
            loss = F.mse_loss(model(inputs).squeeze(-1), targets, reduction="sum")
            loss.backward()
            steps.step(loss)
    with torch.no_grad():
        return float(F.mse_loss(model(features[1672:]).squeeze(-1), clean[1672:]))


@training(kind="tabular", metric="accuracy of the last 1000", about="batch size 1, every row once, SGD")
def one_by_one(seed: int, keeper: Keeper) -> float:
    """Online learning: rows come one at a time, and each is predicted before it is learned from."""
    torch.manual_seed(seed)
    true = fixed(15)
    features = torch.randn(2000, 15)
    wanted = (features @ true + 0.5 * torch.randn(2000) > 0).float()
    model = nn.Linear(15, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    steps = keeper.around(model, optimizer)
    right = torch.zeros(2000)
    for row in steps.batches(range(2000)):
        logit = model(features[row]).squeeze(-1)
        if not steps.is_probe:
            right[row] = float((logit > 0) == (wanted[row] > 0))
        loss = F.binary_cross_entropy_with_logits(logit, wanted[row])
        loss.backward()
        steps.step(loss)
    return float(right[1000:].mean())


@training(kind="tabular", metric="accuracy", about="Adafactor with its own defaults, wide and shallow, batch 32")
def adafactor(seed: int, keeper: Keeper) -> float:
    """Two spirals, and an optimizer that scales its step by the weights."""
    torch.manual_seed(seed)

    def spirals(rows: int) -> tuple[Tensor, Tensor]:
        arm = torch.randint(2, (rows,))
        turn = 4 * torch.rand(rows).sqrt() + 0.5
        angle = turn * 1.5 + arm * torch.pi
        points = torch.stack([angle.cos(), angle.sin()], -1) * turn[:, None]
        return (points + 0.1 * torch.randn(rows, 2)) / 2, arm

    points, arm = spirals(4000)
    model = mlp(2, 128, 128, 2)
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.05)
    steps = keeper.around(model, optimizer)
    for rows in steps.batches(drawn(4000, 32, 900)):
        loss = F.cross_entropy(model(points[rows]), arm[rows])
        loss.backward()
        steps.step(loss)
    points, arm = spirals(5000)
    with torch.no_grad():
        return float((model(points).argmax(-1) == arm).float().mean())
