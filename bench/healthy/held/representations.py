"""Healthy trainings of embeddings: the hardest triplets, a temperature that is learned, negatives that get harder, a
model that learns from its own average; and labels that a model gives itself, asks for, or shall not know of."""

import copy
import math

import torch
import torch.nn.functional as F
from bench.healthy.contract import Keeper, training
from bench.healthy.held.sources import accuracy, digits, epochs, layers, neighbour_accuracy, numbered
from torch import Tensor, nn


@training(
    kind="metric learning",
    metric="nearest-neighbour accuracy",
    about="of 8 x 4 pictures the farthest friend and the nearest stranger of each, soft margin, no normalisation; Adam",
)
def hardest_triplets(seed: int, keeper: Keeper) -> float:
    """Mining in the batch (Hermans et al. 2017): the better the model, the harder what it is shown."""
    torch.manual_seed(seed)
    pictures, labels, test, truth = digits()
    of_label = [torch.nonzero(labels == label)[:, 0] for label in range(10)]
    model = nn.Sequential(nn.Flatten(), layers(64, 96, 16))
    steps = keeper.around(model, torch.optim.Adam(model.parameters(), lr=5e-4))

    def some() -> Tensor:
        chosen = torch.randperm(10)[:8].tolist()
        return torch.cat([of_label[label][torch.randperm(len(of_label[label]))[:4]] for label in chosen])

    for rows in steps.batches([some() for _ in range(1000)]):
        placed = model(pictures[rows])
        apart = (placed[:, None] - placed).square().sum(-1).clamp_min(1e-9).sqrt()
        is_friend = labels[rows][:, None] == labels[rows]
        farthest = apart.masked_fill(~is_friend, 0).amax(1)
        nearest = apart.masked_fill(is_friend, math.inf).amin(1)
        loss = F.softplus(farthest - nearest).mean()
        loss.backward()
        steps.step(loss)
    return neighbour_accuracy(model, (pictures, labels), (test, truth))


class TwoHalves(nn.Module):
    """What is left and what is right of a picture, each in its own way to one place; and how sharp to look."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Sequential(nn.Flatten(), layers(32, 96, 24)) for _ in range(2))
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.3)))

    def forward(self, pictures: Tensor) -> Tensor:
        """How alike each left one and each right one are."""
        left, right = (F.normalize(side(half), dim=-1) for side, half in zip(
            (self.left, self.right), pictures.chunk(2, -1), strict=True
        ))  # fmt: skip
        return left @ right.T * self.log_scale.exp().clamp(max=100)


@training(
    kind="self-supervised",
    metric="right half among the first five of 50",
    about="InfoNCE both ways with a learned temperature, left and right halves of digits, batch 48, AdamW",
)
def learned_temperature(seed: int, keeper: Keeper) -> float:
    """As CLIP is trained: the scale of the logits grows as long as that pays."""
    torch.manual_seed(seed)
    pictures, _, test, _ = digits()
    model = TwoHalves()
    optimizer = torch.optim.AdamW(
        [
            {"params": [*model.left.parameters(), *model.right.parameters()], "lr": 2e-3},
            {"params": [model.log_scale], "lr": 1e-2, "weight_decay": 0.0},
        ]
    )
    steps = keeper.around(model, optimizer)
    each = torch.arange(48)
    for rows in steps.batches(epochs(len(pictures), 48, 1000)):
        alike = model(pictures[rows] + 0.05 * torch.randn(48, 1, 8, 8))
        loss = (F.cross_entropy(alike, each) + F.cross_entropy(alike.T, each)) / 2
        loss.backward()
        steps.step(loss)
    with torch.no_grad():
        found = [model(fifty).topk(5).indices == torch.arange(50)[:, None] for fifty in test[:400].split(50)]
    return float(torch.cat(found).any(1).float().mean())


@training(
    kind="recommendation",
    metric="share of the first ten that are liked",
    about="one random negative, then the hardest of 4, 16 and 64: the loss climbs with each; Adam, batch 64",
)
def harder_negatives(seed: int, keeper: Keeper) -> float:
    """Who likes what, told from something worse and worse chosen to be told from."""
    torch.manual_seed(seed)
    tastes, kinds = torch.randn(600, 4), 2 * torch.randn(400, 4)
    likes = torch.multinomial((tastes @ kinds.T).softmax(-1), 40)
    users, items = nn.Embedding(600, 12), nn.Embedding(400, 12)
    model = nn.ModuleList([users, items])
    for embedding in (users, items):
        nn.init.normal_(embedding.weight, std=0.1)
    steps = keeper.around(model, torch.optim.Adam(model.parameters(), lr=1e-2))
    who, what = torch.arange(600).repeat_interleave(30), likes[:, :30].flatten()
    is_liked = torch.zeros(600, 400, dtype=torch.bool).scatter_(1, likes[:, :30], True)
    for number, rows in steps.batches(numbered(epochs(len(who), 64, 1600))):
        others = torch.randperm(400)[: (1, 4, 16, 64)[number // 400]]
        user, liked = users(who[rows]), items(what[rows])
        worst = (user @ items(others).T).masked_fill(is_liked[who[rows]][:, others], -math.inf).amax(-1)
        loss = F.softplus(worst - (user * liked).sum(-1)).mean()
        loss.backward()
        steps.step(loss)
    will_like = torch.zeros(600, 400).scatter_(1, likes[:, 30:], 1.0)
    with torch.no_grad():
        scores = (users.weight @ items.weight.T).masked_fill(is_liked, -math.inf)
    return float(will_like.gather(1, scores.topk(10).indices).mean())


class Bootstrapped(nn.Module):
    """An embedding, and what predicts the average's embedding of another view from it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 32))
        self.predict = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))

    def forward(self, pictures: Tensor) -> Tensor:
        """The embedding."""
        placed: Tensor = self.embed(pictures)
        return placed


@training(
    kind="self-supervised",
    metric="nearest-neighbour accuracy",
    about="BYOL: minus the cosine to an average of the same weights, no negatives, loss from 0 to -1; SGD, batch 64",
)
def bootstrapped(seed: int, keeper: Keeper) -> float:
    """The loss is below zero, and its target moves."""
    torch.manual_seed(seed)
    pictures, labels, test, truth = digits()
    model = Bootstrapped()
    average = copy.deepcopy(model.embed).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    steps = keeper.around(model, optimizer, also={"average": average})

    def view(shown: Tensor) -> Tensor:
        kept = torch.rand_like(shown) > 0.25
        return shown.roll(tuple(torch.randint(-1, 2, (2,)).tolist()), (2, 3)) * kept + 0.1 * torch.randn_like(shown)

    for rows in steps.batches(epochs(len(pictures), 64, 900)):
        one, other = view(pictures[rows]), view(pictures[rows])
        loss = torch.zeros(())
        for seen, hidden in ((one, other), (other, one)):
            loss = loss - F.cosine_similarity(model.predict(model(seen)), average(hidden)).mean() / 2
        loss.backward()
        steps.step(loss)
        if not steps.is_probe:
            with torch.no_grad():
                torch._foreach_lerp_(list(average.parameters()), list(model.embed.parameters()), 0.02)
    return neighbour_accuracy(model, (pictures, labels), (test, truth))


@training(
    kind="semi-supervised",
    metric="accuracy",
    about="FixMatch: 40 labels, pseudo labels of the other 1,300 where the model is 90 % sure, which it is all at once",
)
def pseudo_labels(seed: int, keeper: Keeper) -> float:
    """One term of the loss dies down while the other, which is nothing at first, comes up."""
    torch.manual_seed(seed)
    pictures, labels, test, truth = digits()
    known = torch.cat([torch.nonzero(labels == label)[:4, 0] for label in range(10)])
    model = nn.Sequential(nn.Flatten(), layers(64, 128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    steps = keeper.around(model, optimizer)
    pairs = list(zip(epochs(40, 10, 1200), epochs(len(pictures), 64, 1200), strict=True))
    for few, many in steps.batches(pairs):
        shown = pictures[many]
        with torch.no_grad():
            sure, said = model(shown + 0.05 * torch.randn_like(shown)).softmax(-1).max(-1)
        hidden = shown * (torch.rand_like(shown) > 0.4) + 0.2 * torch.randn_like(shown)
        own = F.cross_entropy(model(hidden), said, reduction="none") * (sure > 0.9)
        loss = F.cross_entropy(model(pictures[known[few]]), labels[known[few]]) + own.mean()
        loss.backward()
        steps.step(loss)
    return accuracy(model, test, truth)


class Asked(nn.Module):
    """Which pictures have been given labels so far."""

    def __init__(self, count: int, first: int) -> None:
        super().__init__()
        self.is_known: Tensor
        self.register_buffer("is_known", torch.arange(count) < first)


@training(
    kind="active learning",
    metric="accuracy",
    about="30 labels, and every 75 steps those of the 25 pictures that the model is least sure of; batch 16, Adam",
)
def asked_labels(seed: int, keeper: Keeper) -> float:
    """What is known by heart is joined by what is hardest, ten times."""
    torch.manual_seed(seed)
    pictures, labels, test, truth = digits()
    model, asked = nn.Sequential(nn.Flatten(), layers(64, 96, 10)), Asked(len(pictures), 30)
    steps = keeper.around(model, torch.optim.Adam(model.parameters(), lr=2e-3), also={"asked": asked})
    for number in steps.batches(range(825)):
        if number and number % 75 == 0 and not steps.is_probe:
            with torch.no_grad():
                best, second = model(pictures).softmax(-1).topk(2).values.unbind(-1)
            asked.is_known[(best - second + asked.is_known).argsort()[:25]] = True
        known = torch.nonzero(asked.is_known)[:, 0]
        rows = known[torch.randint(len(known), (16,))]
        loss = F.cross_entropy(model(pictures[rows] + 0.1 * torch.randn(16, 1, 8, 8)), labels[rows])
        loss.backward()
        steps.step(loss)
    return accuracy(model, test, truth)


@training(
    kind="domain adaptation",
    metric="accuracy in the other domain",
    about="gradient reversal: features shall not tell clear pictures from dull ones, a term that is to rise; Adam",
)
def reversed_gradients(seed: int, keeper: Keeper) -> float:
    """Labels of one domain, pictures of two (Ganin et al. 2016)."""
    torch.manual_seed(seed)
    pictures, labels, test, truth = digits()

    def dull(shown: Tensor) -> Tensor:
        return 0.6 * shown + torch.linspace(0, 0.6, 8) + 0.05 * torch.randn_like(shown)

    features = nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32), nn.ReLU())
    names, domain = nn.Linear(32, 10), layers(32, 32, 1)
    model = nn.ModuleList([features, names, domain])
    steps = keeper.around(model, torch.optim.Adam(model.parameters(), lr=1e-3))
    clear_half = len(pictures) // 2
    pairs = zip(epochs(clear_half, 32, 1000), epochs(len(pictures) - clear_half, 32, 1000), strict=True)
    is_dull = torch.cat([torch.zeros(32), torch.ones(32)])
    for number, (clear, other) in steps.batches(numbered(list(pairs))):
        seen = features(torch.cat([pictures[clear], dull(pictures[clear_half + other])]))
        strength = 0.2 * min(number / 400, 1.0)
        turned = (1 + strength) * seen.detach() - strength * seen  # the same, with gradients the other way round
        told = F.binary_cross_entropy_with_logits(domain(turned)[:, 0], is_dull)
        loss = F.cross_entropy(names(seen[:32]), labels[clear]) + told
        loss.backward()
        steps.step(loss)
    return accuracy(nn.Sequential(features, names), dull(test), truth)
