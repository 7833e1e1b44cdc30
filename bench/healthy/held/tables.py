"""Healthy trainings on tables: levels in order, counts, several answers, tasks that come and go, the oldest rates."""

import math

import torch
import torch.nn.functional as F
from bench.healthy.contract import Keeper, training
from bench.healthy.held.sources import Split, accuracy, digits, epochs, halves_of, layers, numbered, r_squared, table
from sklearn.datasets import (  # type: ignore[import-untyped,unused-ignore]
    load_breast_cancer,
    load_diabetes,
    load_wine,
)
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR


class Levels(nn.Module):
    """A score, and the thresholds between five levels of it."""

    def __init__(self) -> None:
        super().__init__()
        self.score = layers(10, 16, 1)
        self.first, self.gaps = nn.Parameter(torch.tensor(-1.0)), nn.Parameter(torch.zeros(3))

    def forward(self, columns: Tensor) -> Tensor:
        """Logits of being above each of four thresholds."""
        thresholds = torch.cat([self.first[None], self.first + F.softplus(self.gaps).cumsum(0)])
        above: Tensor = self.score(columns) - thresholds
        return above


@training(
    kind="tabular",
    metric="mean distance in levels",
    about="ordinal: scikit-learn diabetes in five levels, cumulative logits with learned thresholds, batch 12, Adamax",
    is_better_higher=False,
)
def ordered_levels(seed: int, keeper: Keeper) -> float:
    """331 patients, again and again."""
    torch.manual_seed(seed)
    columns, marks, test, truth = table(load_diabetes)
    bounds = marks.quantile(torch.tensor([0.2, 0.4, 0.6, 0.8], dtype=marks.dtype))
    model = Levels()
    steps = keeper.around(model, torch.optim.Adamax(model.parameters(), lr=5e-3, weight_decay=1e-3))
    for rows in steps.batches(epochs(len(columns), 12, 900)):
        is_above = (marks[rows, None] > bounds).float()
        loss = F.binary_cross_entropy_with_logits(model(columns[rows]), is_above, reduction="none").sum(-1).mean()
        loss.backward()
        steps.step(loss)
    with torch.no_grad():
        said = (model(test) > 0).sum(-1)
    return float((said - torch.bucketize(truth, bounds)).abs().float().mean())


def counts(rows: int) -> Split:
    """Calls a day at sites of very different size: from none to thousands, more scattered than a Poisson's."""
    columns = torch.randn(rows, 8)
    rate = torch.exp(1.5 * columns[:, 0] + (2 * columns[:, 1]).sin() + 0.5 * columns[:, 2] * columns[:, 3] + 1)
    gamma = torch.distributions.Gamma(0.7, 0.7 / rate).sample()
    return halves_of(columns, torch.poisson(gamma))


def negative_binomial(said: Tensor, count: Tensor) -> Tensor:
    """Minus its log-likelihood; a mean and a shape, both as logarithms."""
    log_mean, log_shape = said.unbind(-1)
    shape = log_shape.exp()
    known = torch.lgamma(count + shape) - torch.lgamma(shape) - torch.lgamma(count + 1)
    spread = torch.logaddexp(log_mean, log_shape)
    return -(known + shape * (log_shape - spread) + count * (log_mean - spread)).mean()


@training(
    kind="tabular",
    metric="negative log-likelihood",
    about="overdispersed counts over three decades, negative binomial with a learned shape, batch 24, Adam",
    is_better_higher=False,
)
def overdispersed_counts(seed: int, keeper: Keeper) -> float:
    """A batch may hold one count that is more than all others together."""
    torch.manual_seed(seed)
    columns, seen, test, truth = counts(12_000)
    model = layers(8, 64, 64, 2)
    steps = keeper.around(model, torch.optim.Adam(model.parameters(), lr=1e-3))
    for rows in steps.batches(epochs(len(columns), 24, 1500)):
        loss = negative_binomial(model(columns[rows]), seen[rows])
        loss.backward()
        steps.step(loss)
    with torch.no_grad():
        return float(negative_binomial(model(test), truth))


def mixture(said: Tensor, wanted: Tensor) -> Tensor:
    """Minus the log-likelihood under five gaussians."""
    logit, mean, log_deviation = said.chunk(3, -1)
    each = -0.5 * ((wanted - mean) / log_deviation.exp()).square() - log_deviation - 0.5 * math.log(2 * math.pi)
    return -torch.logsumexp(logit.log_softmax(-1) + each, -1).mean()


@training(
    kind="tabular",
    metric="negative log-likelihood",
    about="mixture density network, an inverse problem with up to three answers, loss below zero, batch 32, Adam",
    is_better_higher=False,
)
def several_answers(seed: int, keeper: Keeper) -> float:
    """The narrower the gaussians, the dearer a point between them (Bishop 1994)."""
    torch.manual_seed(seed)
    angle = torch.rand(8000, 1)
    place = angle + 0.3 * (2 * math.pi * angle).sin() + 0.02 * torch.randn(8000, 1)
    inputs, wanted, test, truth = halves_of(place, angle)
    model = layers(1, 48, 48, 15, between=nn.Tanh)
    steps = keeper.around(model, torch.optim.Adam(model.parameters(), lr=3e-3))
    for rows in steps.batches(epochs(len(inputs), 32, 1800)):
        loss = mixture(model(inputs[rows]), wanted[rows])
        loss.backward()
        steps.step(loss)
    with torch.no_grad():
        return float(mixture(model(test), truth))


@training(
    kind="multi-task",
    metric="R2 of the task",
    about="the task and a helper weigh 0.1 and 10, then 1 and 1, then 5 and 0, from one step to the next; AdamW",
)
def fading_helper(seed: int, keeper: Keeper) -> float:
    """Weights of losses that people change on the way: the sum is another one each time."""
    torch.manual_seed(seed)
    columns = torch.randn(5000, 12)
    hidden = torch.tanh(columns @ torch.randn(12, 4, generator=torch.Generator().manual_seed(1)) / 2)
    task = 3 * hidden[:, :1] * hidden[:, 1:2] + hidden[:, 2:3] + 0.3 * torch.randn(5000, 1)
    inputs, wanted, test, truth = halves_of(columns, torch.cat([task, hidden], 1))
    trunk, heads = nn.Sequential(layers(12, 64, 64), nn.ReLU()), nn.Linear(64, 5)
    model = nn.Sequential(trunk, heads)
    steps = keeper.around(model, torch.optim.AdamW(model.parameters(), lr=2e-3), clip=1.0)
    for number, rows in steps.batches(numbered(epochs(len(inputs), 32, 1200))):
        of_task, of_helper = ((0.1, 10.0), (1.0, 1.0), (5.0, 0.0))[number // 400]
        off = (model(inputs[rows]) - wanted[rows]).square()
        loss = of_task * off[:, 0].mean() + of_helper * off[:, 1:].mean()
        loss.backward()
        steps.step(loss)
    with torch.no_grad():
        return r_squared(model(test)[:, 0], truth[:, 0])


@training(
    kind="tabular",
    metric="accuracy",
    about="Pegasos: hinge loss of one row at a time, rate 1 / (0.05 step), which begins at 20; breast cancer, SGD",
)
def pegasos(seed: int, keeper: Keeper) -> float:
    """The first losses are a hundred times the last; mostly the hinge is exactly 0 (Shalev-Shwartz et al. 2007)."""
    torch.manual_seed(seed)
    columns, is_benign, test, truth = table(load_breast_cancer)
    sides = is_benign.float() * 2 - 1
    model = nn.Linear(30, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=20.0)
    steps = keeper.around(model, optimizer, scheduler=LambdaLR(optimizer, lambda step: 1 / (1 + step)))
    for rows in steps.batches(epochs(len(columns), 1, 2000)):
        off = F.relu(1 - sides[rows] * model(columns[rows])[:, 0]).mean()
        loss = off + 0.025 * model.weight.square().sum()
        loss.backward()
        steps.step(loss)
    with torch.no_grad():
        return float(((model(test)[:, 0] > 0) == (truth > 0)).float().mean())


@training(
    kind="tabular",
    metric="accuracy",
    about="the whole of 400 digits in every step, squared error, gradient descent at a rate past the edge of stability",
)
def edge_of_stability(seed: int, keeper: Keeper) -> float:
    """No noise at all: the loss goes up and down by itself, and falls over hundreds of steps (Cohen et al. 2021)."""
    torch.manual_seed(seed)
    pictures, labels, test, truth = digits()
    pictures, wanted = pictures[:400], F.one_hot(labels[:400], 10).float()
    model = nn.Sequential(nn.Flatten(), layers(64, 64, 64, 10, between=nn.Tanh))
    steps = keeper.around(model, torch.optim.SGD(model.parameters(), lr=0.2))
    for _ in steps.batches(range(1500)):
        loss = (model(pictures) - wanted).square().sum(-1).mean()
        loss.backward()
        steps.step(loss)
    return accuracy(model, test, truth)


@training(
    kind="tabular",
    metric="accuracy",
    about="an ensemble of 16 small networks trained as one, sum of their losses, wine, batch 8, Adadelta",
)
def ensemble(seed: int, keeper: Keeper) -> float:
    """Members that have learned all of it beside members that have not."""
    torch.manual_seed(seed)
    columns, grower, test, truth = table(load_wine)
    inside, out = nn.Conv1d(16 * 13, 16 * 12, 1, groups=16), nn.Conv1d(16 * 12, 16 * 3, 1, groups=16)
    model = nn.Sequential(inside, nn.Tanh(), out)
    steps = keeper.around(model, torch.optim.Adadelta(model.parameters(), lr=1.0))

    def votes(rows: Tensor) -> Tensor:
        logits: Tensor = model(rows.repeat(1, 16)[..., None]).view(len(rows), 16, 3)
        return logits

    for rows in steps.batches(epochs(len(columns), 8, 700)):
        each = F.cross_entropy(votes(columns[rows]).flatten(0, 1), grower[rows].repeat_interleave(16), reduction="none")
        loss = each.view(-1, 16).mean(0).sum()
        loss.backward()
        steps.step(loss)
    with torch.no_grad():
        return float((votes(test).softmax(-1).mean(1).argmax(-1) == truth).float().mean())
