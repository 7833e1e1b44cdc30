"""A seed and a keeper in, held-out quality out: tables with rare, large, censored and wrong targets."""

import itertools

import torch
import torch.nn.functional as F
from bench.healthy.contract import Keeper, training
from bench.healthy.frozen.sources import (
    average_precision,
    diabetes,
    index_batches,
    r_squared,
    ranks_gini,
    roc_auc,
    split,
    standardized,
    wine,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def perceptron(*widths: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers of these widths with an activation between."""
    layers: list[nn.Module] = []
    for wide, next_wide in itertools.pairwise(widths):
        layers += [nn.Linear(wide, next_wide), act()]
    return nn.Sequential(*layers[:-1])


@training(
    kind="tabular",
    metric="average precision",
    about="fraud, one positive in a thousand, batch 64, positives weighted 20 times, Adam",
)
def one_in_a_thousand(seed: int, keeper: Keeper) -> float:
    """Payments, of which a few are fraud of two different patterns."""
    torch.manual_seed(seed)
    count = 140_000
    is_fraud = torch.rand(count) < 0.001
    columns = torch.randn(count, 16)
    columns[:, 10:] = columns[:, 10:].exp()  # amounts and counts are skewed in any ledger
    pattern = torch.randint(0, 2, (count,))
    columns[is_fraud & (pattern == 0), :4] += 2.6
    columns[is_fraud & (pattern == 1), 4:8] -= 2.6
    inputs, labels, test_inputs, test_labels = split(columns, is_fraud, 0.5)

    model = perceptron(16, 64, 32, 1)
    steps = keeper.around(model, torch.optim.Adam(model.parameters(), lr=1e-3))
    for rows in steps.batches(index_batches(len(inputs), 64, 1600)):
        loss = F.binary_cross_entropy_with_logits(
            model(inputs[rows])[:, 0], labels[rows].float(), pos_weight=torch.tensor(20.0)
        )
        loss.backward()
        steps.step(loss)
    return average_precision(model(test_inputs)[:, 0], test_labels)


def focal(logits: Tensor, labels: Tensor, gamma: float = 2.0, alpha: float = 0.75) -> Tensor:
    """Cross entropy that leaves out what is already known (Lin et al. 2017)."""
    entropy = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    weight = alpha * labels + (1 - alpha) * (1 - labels)
    return (weight * (1 - torch.exp(-entropy)) ** gamma * entropy).mean()


@training(kind="tabular", metric="ROC AUC", about="one positive in ten, focal loss, batch 32, AdamW, clip 1.0")
def focal_tenth(seed: int, keeper: Keeper) -> float:
    """Positives lie in a shell around the others' centre, with overlap."""
    torch.manual_seed(seed)
    is_positive = (torch.rand(16_000) < 0.1).float()
    direction = F.normalize(torch.randn(16_000, 6), dim=1)
    radius = 2.0 + 0.7 * torch.randn(16_000) + 1.6 * is_positive
    noise = torch.randn(16_000, 6)
    inputs, labels, test_inputs, test_labels = split(
        torch.cat([direction * radius[:, None], noise], 1), is_positive, 0.4
    )
    model = perceptron(12, 48, 48, 1, act=nn.SiLU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    steps = keeper.around(model, optimizer, clip=1.0)
    for rows in steps.batches(index_batches(len(inputs), 32, 1200)):
        loss = focal(model(inputs[rows])[:, 0], labels[rows])
        loss.backward()
        steps.step(loss)
    return roc_auc(model(test_inputs)[:, 0], test_labels)


def tweedie(log_mean: Tensor, wanted: Tensor, power: float = 1.5) -> Tensor:
    """Negative log-likelihood of a compound Poisson-gamma up to what the mean does not change."""
    return (
        -wanted * torch.exp((1 - power) * log_mean) / (1 - power) + torch.exp((2 - power) * log_mean) / (2 - power)
    ).mean()


@training(
    kind="tabular",
    metric="normalized Gini",
    about="insurance claims: most are 0, some are hundreds of means; Tweedie 1.5, batch 128, Adam",
)
def claims(seed: int, keeper: Keeper) -> float:
    """Policies with few claims, whose cost has a Pareto tail."""
    torch.manual_seed(seed)
    count = 60_000
    columns = torch.randn(count, 8)
    rate = 0.12 * torch.exp(0.8 * columns[:, 0] + 0.5 * columns[:, 1] * (columns[:, 2] > 0))
    number = torch.poisson(rate)
    severity = torch.rand(count).clamp_min(1e-6) ** (-1 / 2.2) * torch.exp(0.4 * columns[:, 3])
    inputs, cost, test_inputs, test_cost = split(columns, number * severity, 0.5)

    model = perceptron(8, 32, 32, 1)
    nn.init.constant_(next(reversed(list(model.parameters()))), float(cost.mean().log()))
    steps = keeper.around(model, torch.optim.Adam(model.parameters(), lr=1e-3))
    for rows in steps.batches(index_batches(len(inputs), 128, 1200)):
        loss = tweedie(model(inputs[rows])[:, 0], cost[rows])
        loss.backward()
        steps.step(loss)
    return ranks_gini(model(test_inputs)[:, 0], test_cost)


def cox(risk: Tensor, time: Tensor, is_event: Tensor) -> Tensor:
    """Negative partial log-likelihood within a batch, by Breslow; 0 where the batch saw no event."""
    order = time.argsort(descending=True)
    risk, is_event = risk[order], is_event[order]
    at_risk = torch.logcumsumexp(risk, 0)
    return ((at_risk - risk) * is_event).sum() / is_event.sum().clamp_min(1)


def concordance(risk: Tensor, time: Tensor, is_event: Tensor) -> float:
    """Harrell's C: of pairs whose order is known, the share whose risks say so."""
    comparable = (time[:, None] < time[None, :]) & is_event[:, None].bool()
    agree = (risk[:, None] > risk[None, :]).float() + 0.5 * (risk[:, None] == risk[None, :]).float()
    return float(agree[comparable].mean())


@training(kind="tabular", metric="concordance", about="Cox partial likelihood, 60 % censored, batch 12, Adam")
def survival(seed: int, keeper: Keeper) -> float:
    """Patients who are followed until they die or leave."""
    torch.manual_seed(seed)
    columns = torch.randn(3000, 10)
    hazard = torch.exp(columns[:, 0] - 0.7 * columns[:, 1] ** 2 + 0.8 * columns[:, 2] * columns[:, 3])
    death = -torch.log(torch.rand(3000)) / hazard
    leaves = -torch.log(torch.rand(3000)) / 1.2
    followed = torch.stack([torch.minimum(death, leaves), (death <= leaves).float()], 1)
    inputs, outcome, test_inputs, test_outcome = split(columns, followed, 0.33)

    model = nn.Sequential(perceptron(10, 32, 32, 1, act=nn.Tanh), nn.Flatten(0))
    loader = DataLoader(TensorDataset(inputs, outcome), batch_size=12, shuffle=True, drop_last=True)
    steps = keeper.around(model, torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-4))
    for _epoch in range(8):
        for rows, (time, is_event) in ((rows, known.unbind(1)) for rows, known in steps.batches(loader)):
            loss = cox(model(rows), time, is_event)
            loss.backward()
            steps.step(loss)
    return concordance(model(test_inputs).detach(), *test_outcome.unbind(1))


@training(
    kind="tabular", metric="R2", about="scikit-learn diabetes, raw targets, sum of squares, batch 4, SGD with momentum"
)
def diabetes_sum_of_squares(seed: int, keeper: Keeper) -> float:
    """The loss is a sum over the batch, in the square of the target's own unit."""
    torch.manual_seed(seed)
    inputs, wanted, test_inputs, test_wanted = standardized(diabetes())
    model = perceptron(10, 16, 1, act=nn.Tanh)
    nn.init.constant_(next(reversed(list(model.parameters()))), float(wanted.mean()))
    optimizer = torch.optim.SGD(model.parameters(), lr=2e-5, momentum=0.9)
    steps = keeper.around(model, optimizer)
    loader = DataLoader(TensorDataset(inputs, wanted), batch_size=4, shuffle=True)
    for _epoch in range(20):
        for columns, progression in steps.batches(loader):
            loss = F.mse_loss(model(columns)[:, 0], progression, reduction="sum")
            loss.backward()
            steps.step(loss)
    return r_squared(model(test_inputs)[:, 0].detach(), test_wanted)


@training(
    kind="tabular", metric="R2", about="lognormal targets, MSE on the raw scale, batch 32, Adam; one row can be half"
)
def lognormal_prices(seed: int, keeper: Keeper) -> float:
    """Prices are products of many things, and nobody took their logarithm."""
    torch.manual_seed(seed)
    columns = torch.randn(24_000, 6)
    log_price = columns @ torch.tensor([0.6, -0.4, 0.3, 0.2, 0.0, 0.0]) + 0.3 * torch.sin(2 * columns[:, 4])
    price = torch.exp(log_price + 0.6 * torch.randn(24_000))
    inputs, wanted, test_inputs, test_wanted = split(columns, price, 0.5)
    model = nn.Sequential(perceptron(6, 64, 64, 1), nn.Softplus())
    steps = keeper.around(model, torch.optim.Adam(model.parameters(), lr=1e-3))
    for rows in steps.batches(index_batches(len(inputs), 32, 1500)):
        loss = F.mse_loss(model(inputs[rows])[:, 0], wanted[rows])
        loss.backward()
        steps.step(loss)
    return r_squared(model(test_inputs)[:, 0].detach(), test_wanted)


@training(
    kind="tabular",
    metric="cross entropy",
    about="scikit-learn wine, SGD with momentum, rate down tenfold twice, batch 8",
    is_better_higher=False,
)
def wine_step_decay(seed: int, keeper: Keeper) -> float:
    """A small table learnt many times over."""
    torch.manual_seed(seed)
    inputs, grower, test_inputs, test_grower = standardized(wine())
    model = perceptron(13, 24, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=270, gamma=0.1)
    steps = keeper.around(model, optimizer, scheduler=schedule)
    for rows in steps.batches(index_batches(len(inputs), 8, 800)):
        loss = F.cross_entropy(model(inputs[rows]), grower[rows])
        loss.backward()
        steps.step(loss)
    return F.cross_entropy(model(test_inputs), test_grower).item()
