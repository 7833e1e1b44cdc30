"""Healthy trainings by their losses: rare heights, whole distributions, counts that are mostly none, lists of any
length, learned doubt, logged choices, constraints, an energy, a score, weights that come late, the worst of a batch."""

import math

import torch
import torch.nn.functional as F
from bench.healthy.contract import Keeper, training
from bench.healthy.late.sources import accuracy, digits, epochs, halves_of, layers, numbered, r_squared
from sklearn import datasets  # type: ignore[import-untyped,unused-ignore]
from torch import Tensor, nn

TAIL = 0.4


class Tails(nn.Module):
    """A generalised Pareto distribution for every row, all of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale, self.shape = layers(4, 32, 1), nn.Parameter(torch.tensor(0.0))

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Logarithm of the scale, and the shape."""
        return self.log_scale(inputs)[:, 0], F.softplus(self.shape)


@training(
    kind="tabular",
    metric="error of the log 99 % quantile",
    about="floods: heights over a threshold, generalised Pareto with a learned shape, one in 100 is 10 scales; Adam",
    is_better_higher=False,
)
def rare_heights(seed: int, keeper: Keeper) -> float:
    """The largest are what it is about."""
    torch.manual_seed(seed)
    inputs = torch.randn(6000, 4)
    log_scale = 1.0 + inputs[:, 0] + 0.5 * torch.sin(2 * inputs[:, 1])
    heights = log_scale.exp() / TAIL * (torch.rand(6000).clamp_min(1e-6) ** -TAIL - 1)
    model = Tails()
    steps = keeper.around(model, torch.optim.Adam(model.parameters(), lr=5e-3))
    for rows in steps.batches(epochs(5000, 16, 1250)):
        said, shape = model(inputs[rows])
        loss = (said + (1 + 1 / shape) * torch.log1p(shape * heights[rows] / said.exp())).mean()
        loss.backward()
        steps.step(loss)
    with torch.no_grad():
        said, shape = model(inputs[5000:])
        quantile = said + ((0.01**-shape - 1) / shape).log()
        return float((quantile - log_scale[5000:] - math.log((0.01**-TAIL - 1) / TAIL)).abs().mean())


@training(
    kind="tabular",
    metric="test CRPS",
    about="CRPS of a gaussian in raw units, friedman2, noise grows with the target; RMSprop, linear decay, batch 32",
    is_better_higher=False,
)
def whole_distributions(seed: int, keeper: Keeper) -> float:
    """The loss begins at hundreds and is never below what the noise costs."""
    torch.manual_seed(seed)
    columns, target = datasets.make_friedman2(n_samples=2400, random_state=seed)
    inputs, means = torch.tensor(columns, dtype=torch.float32), torch.tensor(target, dtype=torch.float32)
    inputs = (inputs - inputs.mean(0)) / inputs.std(0)
    inputs, targets, test, truths = halves_of(inputs, means + 0.1 * means * torch.randn(2400))
    model = layers(4, 64, 64, 2)

    def score(rows: Tensor, wanted: Tensor) -> Tensor:
        mean, scale = (100 * model(rows)).unbind(-1)
        scale = F.softplus(scale) + 1.0
        off = (wanted - mean) / scale
        below, density = torch.special.ndtr(off), (-off.square() / 2).exp() / math.sqrt(2 * math.pi)
        scores: Tensor = scale * (off * (2 * below - 1) + 2 * density - 1 / math.sqrt(math.pi))
        return scores.mean()

    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 1200)
    steps = keeper.around(model, optimizer, scheduler=schedule)
    for rows in steps.batches(epochs(len(inputs), 32, 1200)):
        loss = score(inputs[rows], targets[rows])
        loss.backward()
        steps.step(loss)
    with torch.no_grad():
        return float(score(test, truths))


@training(
    kind="tabular",
    metric="R2 of the log mean",
    about="zero-inflated Poisson: seven rows in ten are 0, the others up to hundreds; AdamW, batch 12, clip 10",
)
def mostly_none(seed: int, keeper: Keeper) -> float:
    """A row with a large count that was held to be nobody's is dear."""
    torch.manual_seed(seed)
    inputs = torch.randn(8000, 6)
    is_there = torch.rand(8000) < torch.sigmoid(2 * inputs[:, 0] - 1.4)
    log_mean = 2 + inputs[:, 1] - 0.6 * inputs[:, 2].abs() + 0.5 * inputs[:, 3]
    counts = torch.poisson(log_mean.exp()) * is_there
    model = layers(6, 48, 48, 2)
    steps = keeper.around(model, torch.optim.AdamW(model.parameters(), lr=2e-3), clip=10.0)
    for rows in steps.batches(epochs(7000, 12, 1400)):
        said, there = model(inputs[rows]).unbind(-1)
        of_count = F.logsigmoid(there) + counts[rows] * said - said.exp() - torch.lgamma(counts[rows] + 1)
        of_none = torch.logaddexp(F.logsigmoid(-there), F.logsigmoid(there) - said.exp())
        loss = -torch.where(counts[rows] == 0, of_none, of_count).mean()
        loss.backward()
        steps.step(loss)
    with torch.no_grad():
        return r_squared(model(inputs[7000:])[:, 0], log_mean[7000:])


@training(
    kind="ranking",
    metric="share of pairs in order",
    about="one query a step, 2 to 60 documents, sum of the logistic loss over all pairs: 1 to 1,770 of them; Adagrad",
)
def lists_of_any_length(seed: int, keeper: Keeper) -> float:
    """The loss is as large as the list is long, squared."""
    torch.manual_seed(seed)

    def query() -> tuple[Tensor, Tensor]:
        count = round(2 * 30 ** float(torch.rand(())))
        documents = torch.randn(count, 8)
        relevance = documents[:, 0] * documents[:, 1] + documents[:, 2] + documents[:, 3].abs()
        return documents, relevance + 0.2 * torch.randn(count)

    def pairs(queried: tuple[Tensor, Tensor]) -> Tensor:
        documents, relevance = queried
        scores: Tensor = model(documents)[:, 0]
        first, second = torch.combinations(torch.arange(len(scores))).unbind(-1)
        return (scores[first] - scores[second]) * torch.sign(relevance[first] - relevance[second])

    model = layers(8, 64, 64, 1)
    steps = keeper.around(model, torch.optim.Adagrad(model.parameters(), lr=0.02))
    for queried in steps.batches([query() for _ in range(1200)]):
        loss = F.softplus(-pairs(queried)).sum()
        loss.backward()
        steps.step(loss)
    with torch.no_grad():
        return float((torch.cat([pairs(query()) for _ in range(200)]) > 0).float().mean())


@training(
    kind="tabular",
    metric="test log likelihood",
    about="gaussian likelihood with a learned deviation, 0.02 to 2 in truth: who is sure and wrong pays; Adam, cosine",
)
def learned_doubt(seed: int, keeper: Keeper) -> float:
    """The loss falls below zero, and now and then it is far above."""
    torch.manual_seed(seed)
    inputs = torch.rand(4000, 2) * 2 - 1
    deviation = 0.2 * 10 ** inputs[:, 1]
    targets = torch.sin(4 * inputs[:, 0]) + deviation * torch.randn(4000)
    model = layers(2, 48, 48, 2, between=nn.SiLU)

    def cost(rows: Tensor) -> Tensor:
        mean, log_variance = model(inputs[rows]).unbind(-1)
        costs: Tensor = log_variance + (targets[rows] - mean).square() * (-log_variance).exp()
        return costs.mean() / 2

    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    steps = keeper.around(model, optimizer, scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1400))
    for rows in steps.batches(epochs(3000, 12, 1400)):
        loss = cost(rows)
        loss.backward()
        steps.step(loss)
    with torch.no_grad():
        return -float(cost(torch.arange(3000, 4000)))


@training(
    kind="bandit",
    metric="accuracy of the policy",
    about="learning from logged choices, rewards over the chance of each: weights to 50; AdamW, batch 48, clip 5",
)
def logged_choices(seed: int, keeper: Keeper) -> float:
    """The loss is minus a reward, of either sign, and mostly the share of a few rows (Joachims et al. 2018)."""
    torch.manual_seed(seed)
    pictures, labels, test, truth = digits()
    logger = nn.Linear(64, 10)
    optimizer = torch.optim.Adam(logger.parameters(), lr=1e-2)
    for rows in epochs(100, 25, 40):
        F.cross_entropy(logger(pictures[rows]), labels[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        chances = 0.8 * logger(pictures).softmax(-1) + 0.02
    chosen = torch.multinomial(chances, 8, replacement=True)
    logged_with = chances.gather(-1, chosen)
    rewards = (chosen == labels[:, None]).float()
    model = layers(64, 64, 10)
    steps = keeper.around(model, torch.optim.AdamW(model.parameters(), lr=1e-3), clip=5.0)
    for rows in steps.batches(epochs(len(pictures), 48, 1000)):
        policy = model(pictures[rows]).softmax(-1).gather(-1, chosen[rows])
        loss = -((rewards[rows] - 0.1) * policy / logged_with[rows]).mean()
        loss.backward()
        steps.step(loss)
    return accuracy(model, test, truth)


class Multiplier(nn.Module):
    """The price of a constraint."""

    def __init__(self) -> None:
        super().__init__()
        self.price: Tensor
        self.register_buffer("price", torch.zeros(()))


@training(
    kind="fairness",
    metric="accuracy less the gap",
    about="two groups shall be granted equally often, the price of a gap goes up from step 300 on; Adam",
)
def equal_rates(seed: int, keeper: Keeper) -> float:
    """Dual ascent: the price, and the loss with it, rises until the constraint is kept."""
    torch.manual_seed(seed)
    group = (torch.rand(6000) < 0.4).float()
    skill = torch.randn(6000, 5)
    inputs = torch.cat([skill, (group + 0.3 * torch.randn(6000))[:, None]], -1)
    granted = (2 * skill[:, 0] * skill[:, 1] + 2 * skill[:, 2] + 1.5 * group + 0.3 * torch.randn(6000) > 0.6).float()
    model, dual = layers(6, 48, 48, 1), Multiplier()
    steps = keeper.around(model, torch.optim.Adam(model.parameters(), lr=2e-3), also={"dual": dual})
    for number, rows in steps.batches(numbered(epochs(5000, 64, 1200))):
        logits, is_in = model(inputs[rows])[:, 0], group[rows].bool()
        gap = (logits[is_in].sigmoid().mean() - logits[~is_in].sigmoid().mean()).abs()
        loss = F.binary_cross_entropy_with_logits(logits, granted[rows]) + dual.price * gap
        loss.backward()
        steps.step(loss)
        if number >= 300 and not steps.is_probe:
            dual.price.add_(0.1 * (gap.detach() - 0.03)).clamp_(0, 20)
    with torch.no_grad():
        said, is_in = (model(inputs[5000:])[:, 0] > 0).float(), group[5000:].bool()
        gap = (said[is_in].mean() - said[~is_in].mean()).abs()
        return float((said == granted[5000:]).float().mean() - gap)


@training(
    kind="physics",
    metric="relative error",
    about="Deep Ritz for Poisson's equation: an energy below zero, the price of the border tenfold twice; Adam",
    is_better_higher=False,
)
def membranes(seed: int, keeper: Keeper) -> float:
    """An integral by fresh points, so never the same twice (E and Yu 2018)."""
    torch.manual_seed(seed)
    model = layers(2, 40, 40, 1, between=nn.Tanh)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [850, 1000], 0.3)
    steps = keeper.around(model, optimizer, scheduler=schedule)

    def truth(places: Tensor) -> Tensor:
        return torch.sin(math.pi * places).prod(-1)

    for number in steps.batches(range(1100)):
        places = torch.rand(192, 2, requires_grad=True)
        height = model(places)[:, 0]
        (slope,) = torch.autograd.grad(height.sum(), places, create_graph=True)
        force = 2 * math.pi**2 * truth(places.detach())
        border = torch.rand(64, 2)
        border[torch.arange(64), torch.randint(2, (64,))] = torch.randint(2, (64,)).float()
        off = 5 * 10.0 ** min(number // 300, 2) * model(border).square().mean()
        loss = (slope.square().sum(-1) / 2 - force * height).mean() + off
        loss.backward()
        steps.step(loss)
    places = torch.rand(4000, 2)
    with torch.no_grad():
        return float((model(places)[:, 0] - truth(places)).norm() / truth(places).norm())


@training(
    kind="generative",
    metric="R2 of the score",
    about="implicit score matching: half its square plus its divergence, down to -6; AdamW, batch 64, clip 20",
)
def score_of_a_density(seed: int, keeper: Keeper) -> float:
    """No target anywhere, and a bound below that nobody knows (Hyvarinen 2005)."""
    torch.manual_seed(seed)
    angles = torch.arange(5) * 2 * math.pi / 5
    centres, wide = 2 * torch.stack([angles.cos(), angles.sin()], -1), 0.45

    def drawn(count: int) -> Tensor:
        return centres[torch.randint(5, (count,))] + wide * torch.randn(count, 2)

    model = layers(2, 64, 64, 2, between=nn.SiLU)
    steps = keeper.around(model, torch.optim.AdamW(model.parameters(), lr=3e-3), clip=20.0)
    for batch in steps.batches([drawn(64) for _ in range(900)]):
        places = batch.clone().requires_grad_()
        score = model(places)
        along = [torch.autograd.grad(score[:, axis].sum(), places, create_graph=True)[0][:, axis] for axis in (0, 1)]
        loss = (score.square().sum(-1) / 2 + along[0] + along[1]).mean()
        loss.backward()
        steps.step(loss)
    places = drawn(2000).requires_grad_()
    log_density = torch.logsumexp(-torch.cdist(places, centres).square() / (2 * wide**2), -1)
    (truth,) = torch.autograd.grad(log_density.sum(), places)
    with torch.no_grad():
        return r_squared(model(places), truth)


@training(
    kind="image",
    metric="mean recall",
    about="digits, 50 to 1 by frequency; from step 700 on classes are weighted by how rare they are; SGD with momentum",
)
def weights_that_come_late(seed: int, keeper: Keeper) -> float:
    """Deferred re-weighting: the few that were given up are suddenly what counts (Cao et al. 2019)."""
    torch.manual_seed(seed)
    pictures, labels, test, truth = digits()
    kept = [torch.nonzero(labels == digit)[:, 0][: max(2, round(100 * 50 ** (-digit / 9)))] for digit in range(10)]
    rare = torch.tensor([1 / len(rows) for rows in kept])
    pictures, labels = pictures[torch.cat(kept)], labels[torch.cat(kept)]
    model = layers(64, 96, 10)
    steps = keeper.around(model, torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-3))
    for number, rows in steps.batches(numbered(epochs(len(labels), 16, 1100))):
        weights = 10 * rare / rare.sum() if number >= 700 else torch.ones(10)
        losses = F.cross_entropy(model(pictures[rows] + 0.2 * torch.randn(16, 64)), labels[rows], reduction="none")
        loss = (losses * weights[labels[rows]]).mean()
        loss.backward()
        steps.step(loss)
    with torch.no_grad():
        is_right = (model(test).argmax(-1) == truth).float()
    return float(torch.stack([is_right[truth == digit].mean() for digit in range(10)]).mean())


@training(
    kind="image",
    metric="accuracy",
    about="online hard examples: of 64 rows all count, from step 150 on the worst 16, then the worst 4; RAdam, clip 5",
)
def worst_of_a_batch(seed: int, keeper: Keeper) -> float:
    """The mean of the worst is higher, and so is its gradient (Shrivastava et al. 2016)."""
    torch.manual_seed(seed)
    pictures, labels, test, truth = digits()
    model = layers(64, 96, 64, 10)
    steps = keeper.around(model, torch.optim.RAdam(model.parameters(), lr=1e-3), clip=5.0)
    for number, rows in steps.batches(numbered(epochs(len(pictures), 64, 750))):
        losses = F.cross_entropy(model(pictures[rows] + 0.1 * torch.randn(64, 64)), labels[rows], reduction="none")
        loss = losses.topk((64, 16, 16, 4, 4)[number // 150]).values.mean()
        loss.backward()
        steps.step(loss)
    return accuracy(model, test, truth)
