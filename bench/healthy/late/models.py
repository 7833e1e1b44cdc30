"""Healthy trainings by what is trained: features that are brought back to life, clusters that are made anew, a queue of
strangers, rare words, a choice that hardens, a filter."""

import copy

import torch
import torch.nn.functional as F
from bench.healthy.contract import Keeper, training
from bench.healthy.late.sources import accuracy, digits, epochs, layers, neighbour_accuracy, numbered, shifted
from torch import Tensor, nn


class Dictionary(nn.Module):
    """A sparse autoencoder: 20 numbers as few of 80 features."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(20, 80)
        self.features = nn.Parameter(torch.randn(80, 20))
        self.uses: Tensor
        self.register_buffer("uses", torch.zeros(80))

    def forward(self, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """What is made again, and how strong each feature is in it."""
        strength = F.relu(self.encode(mixed))
        return strength @ F.normalize(self.features, dim=-1), strength

    @torch.no_grad()
    def resample(self, worst: Tensor) -> None:
        """Features that nobody used since the last time become what is worst made again."""
        dead = torch.nonzero(self.uses == 0)[:, 0]
        chosen = worst[torch.randint(len(worst), (len(dead),))]
        self.features[dead] = chosen
        self.encode.weight[dead] = F.normalize(chosen, dim=-1)
        self.encode.bias[dead] = 0.0
        self.uses.zero_()


@training(
    kind="interpretability",
    metric="likeness of found and true features",
    about="sparse autoencoder, sum of squares and L1 that comes up, dead features resampled every 150 steps; Adam",
)
def dead_features(seed: int, keeper: Keeper) -> float:
    """Each resampling costs a few steps of loss, as a new feature is in the way at first."""
    torch.manual_seed(seed)
    true = F.normalize(torch.randn(40, 20), dim=-1)

    def mixed(count: int) -> Tensor:
        return (torch.rand(count, 40) * (torch.rand(count, 40) < 0.05) * 3) @ true

    model = Dictionary()
    steps = keeper.around(model, torch.optim.Adam(model.parameters(), lr=1e-2))
    for number, batch in steps.batches(numbered([mixed(64) for _ in range(1400)])):
        again, strength = model(batch)
        off = (again - batch).square().sum(-1)
        loss = off.mean() + min(number / 400, 1.0) * 0.3 * strength.sum(-1).mean()
        loss.backward()
        steps.step(loss)
        if not steps.is_probe:
            model.uses += (strength > 0).sum(0)
            if number % 150 == 149 and number < 1000:
                model.resample(batch[off.topk(16).indices])
    with torch.no_grad():
        return float((true @ F.normalize(model.features, dim=-1).T).amax(-1).mean())


CLUSTERS = 50


class Clusters(nn.Module):
    """Which cluster each picture is in at present."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.of: Tensor
        self.register_buffer("of", torch.zeros(count, dtype=torch.long))

    @torch.no_grad()
    def make(self, features: Tensor) -> None:
        """By k-means, from other centres every time."""
        features = F.normalize(features, dim=-1)
        centres = features[torch.randperm(len(features))[:CLUSTERS]]
        for _ in range(10):
            self.of.copy_(torch.cdist(features, centres).argmin(-1))
            is_in = F.one_hot(self.of, CLUSTERS).float()
            centres = is_in.T @ features / is_in.sum(0).clamp_min(1)[:, None]


class Clustered(nn.Module):
    """An encoder, and a head that lives as long as the clusters do."""

    def __init__(self) -> None:
        super().__init__()
        first, second = (nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU()), (nn.Linear(256, 48), nn.BatchNorm1d(48))
        self.encode, self.head = nn.Sequential(*first, *second), nn.Linear(48, CLUSTERS)


@training(
    kind="self-supervised",
    metric="nearest-neighbour accuracy, shifted",
    about="DeepCluster: every 100 steps new clusters and a new head, the loss is back at log 50; SGD, batch 32",
)
def clusters_anew(seed: int, keeper: Keeper) -> float:
    """What a picture is called has nothing to do with what it was called before (Caron et al. 2018)."""
    torch.manual_seed(seed)
    pictures, labels, test, truth = digits()
    model, clusters = Clustered(), Clusters(len(pictures))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    steps = keeper.around(model, optimizer, also={"clusters": clusters})
    for number, rows in steps.batches(numbered(epochs(len(pictures), 32, 1000))):
        if number % 100 == 0 and not steps.is_probe:
            with torch.no_grad():
                clusters.make(model.encode(pictures))
            model.head.reset_parameters()
        loss = F.cross_entropy(model.head(F.relu(model.encode(shifted(pictures[rows])))), clusters.of[rows])
        loss.backward()
        steps.step(loss)
    return neighbour_accuracy(model.encode, (pictures, labels), (shifted(test), truth))


class Strangers(nn.Module):
    """The encoder that lags behind, and what it made of the pictures before."""

    def __init__(self, encode: nn.Module) -> None:
        super().__init__()
        self.encode = copy.deepcopy(encode).requires_grad_(False)
        self.queue: Tensor
        self.register_buffer("queue", F.normalize(torch.randn(640, 32), dim=-1))

    @torch.no_grad()
    def follow(self, encode: nn.Module, made: Tensor) -> None:
        """A little of the new weights; the newest in the queue for the oldest."""
        torch._foreach_lerp_(list(self.encode.parameters()), list(encode.parameters()), 0.02)
        self.queue.copy_(torch.cat([self.queue, made])[len(made) :])


@training(
    kind="self-supervised",
    metric="nearest-neighbour accuracy, shifted",
    about="MoCo: 640 strangers in a queue that is noise at first, by an encoder that lags; SGD with momentum, cosine",
)
def queue_of_strangers(seed: int, keeper: Keeper) -> float:
    """Strangers are another kind every few steps, and the loss is never small (He et al. 2020)."""
    torch.manual_seed(seed)
    pictures, labels, test, truth = digits()
    inner = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU())
    model = nn.Sequential(inner, nn.Linear(256, 32), nn.BatchNorm1d(32, affine=False))
    strangers = Strangers(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    steps = keeper.around(model, optimizer, scheduler=schedule, also={"strangers": strangers})
    for rows in steps.batches(epochs(len(pictures), 32, 1000)):
        ours = F.normalize(model(shifted(pictures[rows])), dim=-1)
        with torch.no_grad():
            theirs = F.normalize(strangers.encode(shifted(pictures[rows])), dim=-1)
        alike = torch.cat([(ours * theirs).sum(-1, keepdim=True), ours @ strangers.queue.T], -1)
        loss = F.cross_entropy(alike / 0.15, torch.zeros(len(rows), dtype=torch.long))
        loss.backward()
        steps.step(loss)
        if not steps.is_probe:
            strangers.follow(model, theirs)
    return neighbour_accuracy(model, (pictures, labels), (shifted(test), truth))


@training(
    kind="text",
    metric="accuracy",
    about="12 topics, 6,000 words by Zipf, 3 to 60 of them a text, most of them hardly ever seen; Adagrad, batch 8",
)
def rare_words(seed: int, keeper: Keeper) -> float:
    """Most rows of the embedding have no gradient in most steps, and a first one at any time."""
    torch.manual_seed(seed)
    frequency = 1 / torch.arange(1, 6001.0)
    bias = torch.where(torch.rand(12, 6000) < 0.15, 15.0, 1.0)

    def text() -> tuple[Tensor, int]:
        topic = int(torch.randint(12, ()))
        count = round(3 * 20 ** float(torch.rand(())))
        return torch.multinomial(frequency * bias[topic], count, replacement=True), topic

    def batch(texts: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor, Tensor]:
        ends = torch.tensor([len(words) for words, _ in texts]).cumsum(0)
        starts = torch.cat([torch.zeros(1, dtype=torch.long), ends[:-1]])
        return torch.cat([words for words, _ in texts]), starts, torch.tensor([topic for _, topic in texts])

    embed, out = nn.EmbeddingBag(6000, 16), nn.Linear(16, 12)
    model = nn.ModuleList([embed, out])
    steps = keeper.around(model, torch.optim.Adagrad(model.parameters(), lr=0.15))
    for words, starts, topics in steps.batches([batch([text() for _ in range(8)]) for _ in range(1000)]):
        loss = F.cross_entropy(out(embed(words, starts)), topics)
        loss.backward()
        steps.step(loss)
    words, starts, topics = batch([text() for _ in range(600)])
    with torch.no_grad():
        return float((out(embed(words, starts)).argmax(-1) == topics).float().mean())


class Chooser(nn.Module):
    """Twelve of 64 pixels, and a digit from these alone."""

    def __init__(self) -> None:
        super().__init__()
        self.choice, self.read = nn.Parameter(0.01 * torch.randn(12, 64)), layers(12, 64, 10)

    def forward(self, pixels: Tensor, heat: float = 0.0) -> Tensor:
        """Logits; while there is heat, each choice is a mixture, and another for every row."""
        if heat == 0:
            chosen: Tensor = self.read(pixels[:, self.choice.argmax(-1)])
            return chosen
        mixture = F.gumbel_softmax(self.choice.expand(len(pixels), -1, -1), heat)
        logits: Tensor = self.read((mixture @ pixels[:, :, None])[..., 0])
        return logits


@training(
    kind="feature selection",
    metric="accuracy with 12 pixels",
    about="concrete selection: gumbel softmax from heat 10 to 0.1, gradients get 100 times as steep; Adam, batch 32",
)
def choice_that_hardens(seed: int, keeper: Keeper) -> float:
    """A blur at first, a draw from the most likely pixels at last (Balin et al. 2019)."""
    torch.manual_seed(seed)
    pictures, labels, test, truth = digits()
    model = Chooser()
    rates = [{"params": [model.choice], "lr": 3e-2}, {"params": list(model.read.parameters()), "lr": 3e-3}]
    steps = keeper.around(model, torch.optim.Adam(rates))
    for number, rows in steps.batches(numbered(epochs(len(pictures), 32, 1200))):
        loss = F.cross_entropy(model(pictures[rows], 10 * 0.01 ** min(number / 900, 1.0)), labels[rows])
        loss.backward()
        steps.step(loss)
    return accuracy(model, test, truth)


class Filter(nn.Module):
    """A level that wanders back to its mean, seen through noise: four numbers to be learned."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.stays = nn.Parameter(torch.tensor(0.0)), nn.Parameter(torch.tensor(0.0))
        self.log_drift, self.log_noise = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(1.0))

    def forward(self, seen: Tensor) -> Tensor:
        """Minus the log likelihood of series of one length, summed over its moments, as a Kalman filter has it."""
        stays, drift, noise = self.stays.sigmoid(), self.log_drift.exp(), self.log_noise.exp()
        level, doubt, total = self.mean.expand(len(seen)), drift / (1 - stays.square()), torch.zeros(())
        for value in unbound(seen):
            off, variance = value - level, doubt + noise
            total = total + 0.5 * (variance.log() + off.square() / variance)
            gain = doubt / variance
            level = self.mean + stays * (level + gain * off - self.mean)
            doubt = stays.square() * (1 - gain) * doubt + drift
        return total


def unbound(seen: Tensor) -> tuple[Tensor, ...]:
    """Moment by moment."""
    moments: tuple[Tensor, ...] = seen.unbind(1)
    return moments


@training(
    kind="state space",
    metric="test log likelihood by moment",
    about="Kalman filter with learned noises, series of 2 to 40 moments, sums not means, four weights in all; RMSprop",
)
def wandering_levels(seed: int, keeper: Keeper) -> float:
    """The longer the series, the larger the loss, of either sign."""
    torch.manual_seed(seed)

    def series(count: int, moments: int) -> Tensor:
        level, seen = 0.33 * torch.randn(count), []
        for _ in range(moments):
            seen.append(2.0 + level + 0.2 * torch.randn(count))
            level = 0.95 * level + 0.1 * torch.randn(count)
        return torch.stack(seen, 1)

    batches = [series(4, round(2 * 20 ** float(torch.rand(())))) for _ in range(700)]
    model = Filter()
    steps = keeper.around(model, torch.optim.RMSprop(model.parameters(), lr=0.02))
    for seen in steps.batches(batches):
        loss = model(seen).mean()
        loss.backward()
        steps.step(loss)
    with torch.no_grad():
        return -float(model(series(1000, 40)).mean()) / 40
