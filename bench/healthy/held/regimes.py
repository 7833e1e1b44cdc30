"""Healthy trainings of one task, handwritten digits, by regimes that change while they run: batches, sizes, noise,
what is added to pictures, gradients and weights, what is taken away from them."""

import math
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from bench.healthy.contract import Keeper, training
from bench.healthy.held.sources import accuracy, convolutions, digits, epochs, layers, numbered
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR
from torch.optim.swa_utils import AveragedModel, update_bn


class Lion(torch.optim.Optimizer):
    """Every weight moves by the same, in the direction of a momentum (Chen et al. 2023)."""

    def __init__(self, weights: Iterable[Tensor], lr: float, weight_decay: float) -> None:
        super().__init__(weights, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Betas are those of the paper."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.sub_(group["lr"] * momentum.lerp(weight.grad, 0.1).sign())
                momentum.lerp_(weight.grad, 0.01)


def mixed(pictures: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Each picture with another one: by shares of both, or with a rectangle of it."""
    other, share = torch.randperm(len(pictures)), float(torch.rand(()))
    if torch.rand(()) < 0.5:
        mask = torch.full((8, 8), share)
    else:
        mask, side = torch.ones(8, 8), round(8 * math.sqrt(1 - share))
        top, left = torch.randint(8 - side + 1, (2,)).tolist()
        mask[top : top + side, left : left + side] = 0
    share = float(mask.mean())
    return mask * pictures + (1 - mask) * pictures[other], share * wanted + (1 - share) * wanted[other]


@training(
    kind="image",
    metric="accuracy",
    about="mixup or cutmix and smoothed labels in every batch, none of it in the last fifth; Lion, cosine, batch 32",
)
def mixed_pictures(seed: int, keeper: Keeper) -> float:
    """The loss drops tenfold at once, where the mixing ends."""
    torch.manual_seed(seed)
    pictures, labels, test, truth = digits()
    model = convolutions()
    optimizer = Lion(model.parameters(), lr=1e-3, weight_decay=0.1)
    steps = keeper.around(model, optimizer, scheduler=CosineAnnealingLR(optimizer, T_max=900))
    for number, rows in steps.batches(numbered(epochs(len(pictures), 32, 900))):
        shown, wanted = pictures[rows], F.one_hot(labels[rows], 10).float()
        is_mixed = number < 720
        if is_mixed:
            shown, wanted = mixed(shown, wanted)
        loss = F.cross_entropy(model(shown), wanted, label_smoothing=0.1 * is_mixed)
        loss.backward()
        steps.step(loss)
    return accuracy(model, test, truth)


@training(
    kind="image", metric="accuracy", about="pictures of 4, then 8, then 16 pixels a side, batch 64, 32, 16; NAdam"
)
def growing_pictures(seed: int, keeper: Keeper) -> float:
    """Progressive resizing: every stage begins with features of another scale."""
    torch.manual_seed(seed)
    pictures, labels, test, truth = digits()
    model = convolutions()
    steps = keeper.around(model, torch.optim.NAdam(model.parameters(), lr=2e-3), clip=5.0)
    stages = ((4, 64, 250), (8, 32, 300), (16, 16, 350))
    batches = [(side, rows) for side, batch, count in stages for rows in epochs(len(pictures), batch, count)]
    for side, rows in steps.batches(batches):
        shown = F.interpolate(pictures[rows], size=(side, side), mode="bilinear")
        loss = F.cross_entropy(model(shown), labels[rows])
        loss.backward()
        steps.step(loss)
    return accuracy(model, F.interpolate(test, size=(16, 16), mode="bilinear"), truth)


@training(
    kind="image",
    metric="accuracy",
    about="batches of 8, from one step to the next of 256, then of 8 again; the rate stays; SGD with momentum",
)
def batch_jumps(seed: int, keeper: Keeper) -> float:
    """The noise of loss and gradients is another from one step to the next, down and up."""
    torch.manual_seed(seed)
    pictures, labels, test, truth = digits()
    model = nn.Sequential(nn.Flatten(), layers(64, 96, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    steps = keeper.around(model, optimizer)
    batches = [rows for size, count in ((8, 500), (256, 250), (8, 500)) for rows in epochs(len(pictures), size, count)]
    for rows in steps.batches(batches):
        loss = F.cross_entropy(model(pictures[rows] + 0.4 * torch.randn(len(rows), 1, 8, 8)), labels[rows])
        loss.backward()
        steps.step(loss)
    return accuracy(model, test, truth)


@training(
    kind="image",
    metric="accuracy of the average",
    about="cosine to nothing, then a rate ten times as high as at its end for the tail that SWA averages; batch norm",
)
def averaged_tail(seed: int, keeper: Keeper) -> float:
    """Stochastic weight averaging: the weights that are looked at are not those that are trained."""
    torch.manual_seed(seed)
    pictures, labels, test, truth = digits()
    model = convolutions()
    averaged = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)
    schedule = LambdaLR(
        optimizer, lambda step: 0.5 if step >= 500 else 0.05 + 0.475 * (1 + math.cos(step * 0.002 * math.pi))
    )
    steps = keeper.around(model, optimizer, scheduler=schedule, also={"averaged": averaged})
    for number, rows in steps.batches(numbered(epochs(len(pictures), 32, 900))):
        loss = F.cross_entropy(model(pictures[rows] + 0.2 * torch.randn(len(rows), 1, 8, 8)), labels[rows])
        loss.backward()
        steps.step(loss)
        if number >= 500 and number % 20 == 0 and not steps.is_probe:
            averaged.update_parameters(model)
    update_bn(pictures.split(256), averaged)
    return accuracy(averaged, test, truth)


@torch.no_grad()
def climbed(model: nn.Module, radius: float) -> list[Tensor]:
    """Move the weights up their gradients, which are used up; gives them as they were."""
    weights: list[Tensor] = list(model.parameters())
    before = [weight.clone() for weight in weights]
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    norm = float(nn.utils.get_total_norm(gradients))
    torch._foreach_add_(weights, gradients, alpha=radius / (norm + 1e-12))
    model.zero_grad()
    return before


@training(
    kind="image",
    metric="accuracy",
    about="SAM: the gradient is that of weights 0.1 uphill, two backward passes a step, a fifth of the labels wrong",
)
def sharpness_aware(seed: int, keeper: Keeper) -> float:
    """The loss is that of the worse weights; they are put back, to the last bit, before the step ends."""
    torch.manual_seed(seed)
    pictures, labels, test, truth = digits()
    labels = torch.where(torch.rand(len(labels)) < 0.2, torch.randint(10, labels.shape), labels)
    model = nn.Sequential(nn.Flatten(), layers(64, 96, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    steps = keeper.around(model, optimizer, scheduler=CosineAnnealingLR(optimizer, T_max=1000))
    for rows in steps.batches(epochs(len(pictures), 32, 1000)):
        F.cross_entropy(model(pictures[rows]), labels[rows]).backward()
        before = climbed(model, 0.1)
        loss = F.cross_entropy(model(pictures[rows]), labels[rows])
        loss.backward()
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), before)
        steps.step(loss)
    return accuracy(model, test, truth)


@training(
    kind="image",
    metric="accuracy",
    about="gaussian noise added to every gradient, its deviation 0.1 / (1 + step) ** 0.55; deep tanh, batch 32, Adam",
)
def noisy_gradients(seed: int, keeper: Keeper) -> float:
    """At first there is more noise than gradient (Neelakantan et al. 2015)."""
    torch.manual_seed(seed)
    pictures, labels, test, truth = digits()
    model = nn.Sequential(nn.Flatten(), layers(64, 48, 48, 48, 48, 10, between=nn.Tanh))
    steps = keeper.around(model, torch.optim.Adam(model.parameters(), lr=1e-3))
    for number, rows in steps.batches(numbered(epochs(len(pictures), 32, 1000))):
        loss = F.cross_entropy(model(pictures[rows]), labels[rows])
        loss.backward()
        for weight in model.parameters():
            assert weight.grad is not None
            weight.grad += 0.1 * torch.randn_like(weight) * (1 + number) ** -0.55
        steps.step(loss)
    return accuracy(model, test, truth)


def attacked(model: nn.Module, pictures: Tensor, labels: Tensor, size: float) -> Tensor:
    """Every pixel moved by so much, to where the loss is higher (Goodfellow et al. 2015)."""
    shown = pictures.clone().requires_grad_()
    (slope,) = torch.autograd.grad(F.cross_entropy(model(shown), labels), shown)
    return pictures + size * slope.sign()


@training(
    kind="image",
    metric="accuracy under attack",
    about="adversarial training, the attack grows from 0 to 0.15 a pixel from step 200 to 800: so does the loss; Adam",
)
def growing_attack(seed: int, keeper: Keeper) -> float:
    """A model that gets better at a task that gets harder."""
    torch.manual_seed(seed)
    pictures, labels, test, truth = digits()
    model = nn.Sequential(nn.Flatten(), layers(64, 128, 64, 10))
    steps = keeper.around(model, torch.optim.Adam(model.parameters(), lr=3e-3))
    for number, rows in steps.batches(numbered(epochs(len(pictures), 32, 1000))):
        size = 0.15 * min(max(number - 200, 0) / 600, 1.0)
        loss = F.cross_entropy(model(attacked(model, pictures[rows], labels[rows], size)), labels[rows])
        loss.backward()
        steps.step(loss)
    return accuracy(model, attacked(model, test, truth, 0.15), truth)


class Masked(nn.Linear):
    """Weights of which some are no longer there."""

    def __init__(self, inside: int, out: int) -> None:
        super().__init__(inside, out)
        self.mask: Tensor
        self.register_buffer("mask", torch.ones(out, inside))

    def forward(self, x: Tensor) -> Tensor:
        """Without those."""
        return F.linear(x, self.weight * self.mask, self.bias)

    @torch.no_grad()
    def prune(self, share: float) -> None:
        """Take the smallest away, until so many are gone."""
        size = (self.weight * self.mask).abs()
        self.mask.copy_(size > size.flatten().kthvalue(max(1, round(share * size.numel()))).values)


@training(
    kind="image",
    metric="accuracy",
    about="from step 300 on, every 100 steps a part of the weights is taken away: 96 % at the end; AdamW, batch 32",
)
def pruning(seed: int, keeper: Keeper) -> float:
    """Each cut is a loss that jumps and has to be learned down again."""
    torch.manual_seed(seed)
    pictures, labels, test, truth = digits()
    inside, out = Masked(64, 128), Masked(128, 10)
    model = nn.Sequential(nn.Flatten(), inside, nn.ReLU(), out)
    steps = keeper.around(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    shares = dict(zip(range(300, 1000, 100), (0.5, 0.7, 0.8, 0.86, 0.9, 0.93, 0.96), strict=True))
    for number, rows in steps.batches(numbered(epochs(len(pictures), 32, 1300))):
        if number in shares and not steps.is_probe:
            inside.prune(shares[number])
            out.prune(shares[number])
        loss = F.cross_entropy(model(pictures[rows]), labels[rows])
        loss.backward()
        steps.step(loss)
    return accuracy(model, test, truth)


class Rounded(nn.Linear):
    """Weights that are used as if they had few bits, and learned as if they had not."""

    bits = 32

    def forward(self, x: Tensor) -> Tensor:
        """With straight-through gradients."""
        most = 2 ** (self.bits - 1) - 1
        unit = (2.0 if self.bits < 3 else 3.0) * self.weight.detach().abs().mean() / most
        coarse = (self.weight / unit).round().clamp(-most, most) * unit if self.bits < 32 else self.weight
        return F.linear(x, self.weight + (coarse - self.weight).detach(), self.bias)


@training(
    kind="image",
    metric="accuracy at 2 bits",
    about="quantisation-aware: 32 bits, then 4, 3 and 2 from one step to the next; SGD with momentum, clip 1.0",
)
def fewer_bits(seed: int, keeper: Keeper) -> float:
    """Each time the loss is twice what it was; at two bits a weight is one of three values."""
    torch.manual_seed(seed)
    pictures, labels, test, truth = digits()
    inside, out = Rounded(64, 128), Rounded(128, 10)
    model = nn.Sequential(nn.Flatten(), inside, nn.ReLU(), out)
    steps = keeper.around(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), clip=1.0)
    for number, rows in steps.batches(numbered(epochs(len(pictures), 32, 1200))):
        inside.bits = out.bits = (32, 4, 3, 2)[number // 300]
        loss = F.cross_entropy(model(pictures[rows]), labels[rows])
        loss.backward()
        steps.step(loss)
    return accuracy(model, test, truth)


@training(
    kind="image",
    metric="accuracy in noise",
    about="a curriculum there and back: noise of 0.1, 0.3, 0.6, 1, 0.6, 0.3, 0.1, 150 steps each; RAdam, batch 32",
)
def there_and_back(seed: int, keeper: Keeper) -> float:
    """The loss climbs three steps, and comes down three."""
    torch.manual_seed(seed)
    pictures, labels, test, truth = digits()
    model = convolutions()
    steps = keeper.around(model, torch.optim.RAdam(model.parameters(), lr=3e-3))
    levels = (0.1, 0.3, 0.6, 1.0, 0.6, 0.3, 0.1)
    for number, rows in steps.batches(numbered(epochs(len(pictures), 32, 1050))):
        noise = levels[number // 150] * torch.randn(len(rows), 1, 8, 8)
        loss = F.cross_entropy(model(pictures[rows] + noise), labels[rows])
        loss.backward()
        steps.step(loss)
    return accuracy(model, test + 0.3 * torch.randn(test.shape), truth)
