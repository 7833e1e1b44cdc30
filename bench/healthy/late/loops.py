"""Healthy trainings whose loops are out of the ordinary: rates that go round, clients that take turns, weights that are
rewound, shrunk or added, gradients with noise for privacy, tasks that alternate, hours in their order, more
and more micro-batches."""

import math

import torch
import torch.nn.functional as F
from bench.healthy.contract import Keeper, training
from bench.healthy.late.sources import accuracy, digits, epochs, layers, numbered, r_squared
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.utils import parameters_to_vector


@training(
    kind="image",
    metric="accuracy",
    about="triangular rate, 0.01 to 0.25 and back every 150 steps: each top unsettles it; SGD with momentum, batch 32",
)
def triangular_rates(seed: int, keeper: Keeper) -> float:
    """Cyclical learning rates (Smith 2017): each top is too much for long, and is not kept for long."""
    torch.manual_seed(seed)
    pictures, labels, test, truth = digits()
    model = layers(64, 96, 64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.25, step_size_up=75, cycle_momentum=False)
    steps = keeper.around(model, optimizer, scheduler=schedule)
    for rows in steps.batches(epochs(len(pictures), 32, 1050)):
        loss = F.cross_entropy(model(pictures[rows]), labels[rows])
        loss.backward()
        steps.step(loss)
    return accuracy(model, test, truth)


CLIENTS, LOCAL_STEPS = 5, 10


class Server(nn.Module):
    """The weights that all clients begin with, and the sum of what they came back with."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.weights: Tensor
        self.total: Tensor
        self.came: Tensor
        self.register_buffer("weights", parameters_to_vector(model.parameters()).detach().clone())
        self.register_buffer("total", torch.zeros_like(self.weights))
        self.register_buffer("came", torch.zeros(()))

    @torch.no_grad()
    def hand_out(self, model: nn.Module) -> None:
        """The weights of the server, to one client."""
        sizes = [weight.numel() for weight in model.parameters()]
        for weight, part in zip(model.parameters(), self.weights.split(sizes), strict=True):
            weight.copy_(part.view_as(weight))

    @torch.no_grad()
    def take_back(self, model: nn.Module) -> None:
        """What a client has made of them."""
        self.total += parameters_to_vector(model.parameters())
        self.came += 1

    def average(self) -> None:
        """End a round."""
        self.weights.copy_(self.total / self.came)
        self.total.zero_()
        self.came.zero_()


@training(
    kind="federated",
    metric="accuracy of the average",
    about="FedAvg in one loop: five clients with two digits and a few others, ten steps each, then the average; SGD",
)
def federated_rounds(seed: int, keeper: Keeper) -> float:
    """Every tenth step is another client's first: weights and data are others at once (McMahan et al. 2017)."""
    torch.manual_seed(seed)
    pictures, labels, test, truth = digits()
    everyones = torch.arange(50)
    owned = [torch.cat([torch.nonzero(labels // 2 == client)[:, 0], everyones]) for client in range(CLIENTS)]
    model = layers(64, 64, 10)
    server = Server(model)
    steps = keeper.around(model, torch.optim.SGD(model.parameters(), lr=0.25), also={"server": server})
    clients = [number // LOCAL_STEPS % CLIENTS for number in range(1500)]
    batches = [owned[client][torch.randint(len(owned[client]), (16,))] for client in clients]
    for number, rows in steps.batches(numbered(batches)):
        if number % LOCAL_STEPS == 0 and not steps.is_probe:
            if clients[number] == 0 and server.came:
                server.average()
            server.hand_out(model)
        loss = F.cross_entropy(model(pictures[rows]), labels[rows])
        loss.backward()
        steps.step(loss)
        if number % LOCAL_STEPS == LOCAL_STEPS - 1 and not steps.is_probe:
            server.take_back(model)
    server.average()
    server.hand_out(model)
    return accuracy(model, test, truth)


class Ticket(nn.Module):
    """Layers with masks, and their weights of an early step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(64, 128), nn.Linear(128, 64), nn.Linear(64, 10)
        for name in ("first", "second"):
            weight = getattr(self, name).weight.detach()
            self.register_buffer(f"{name}_mask", torch.ones_like(weight))
            self.register_buffer(f"{name}_early", weight.clone())

    def masked(self, name: str, x: Tensor) -> Tensor:
        """What a layer lets through."""
        layer = getattr(self, name)
        return F.linear(x, layer.weight * getattr(self, f"{name}_mask"), layer.bias)

    def forward(self, pixels: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.out(F.relu(self.masked("second", F.relu(self.masked("first", pixels)))))
        return logits

    @torch.no_grad()
    def remember(self) -> None:
        """The weights to go back to."""
        for name in ("first", "second"):
            getattr(self, f"{name}_early").copy_(getattr(self, name).weight)

    @torch.no_grad()
    def rewind(self, share: float) -> None:
        """Take away a share of the weights that are left, the smallest; the others are what they were early."""
        for name in ("first", "second"):
            weight, mask = getattr(self, name).weight, getattr(self, f"{name}_mask")
            mask *= weight.abs() > weight[mask.bool()].abs().quantile(share)
            weight.copy_(getattr(self, f"{name}_early"))
        self.out.reset_parameters()


@training(
    kind="image",
    metric="accuracy",
    about="lottery ticket: every 300 steps 60 % of the weights go, the others go back to step 30; SGD with momentum",
)
def rewound_tickets(seed: int, keeper: Keeper) -> float:
    """The loss is that of a beginner again, three times (Frankle et al. 2020)."""
    torch.manual_seed(seed)
    pictures, labels, test, truth = digits()
    model = Ticket()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    steps = keeper.around(model, optimizer)
    for number, rows in steps.batches(numbered(epochs(len(pictures), 24, 1200))):
        if number and number % 300 == 0 and not steps.is_probe:
            model.rewind(0.6)
            optimizer.state.clear()
        loss = F.cross_entropy(model(pictures[rows]), labels[rows])
        loss.backward()
        steps.step(loss)
        if number == 30 and not steps.is_probe:
            model.remember()
    return accuracy(model, test, truth)


class Growing(nn.Module):
    """One head of two classes for every task that there has been."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(layers(64, 96, 64), nn.ReLU())
        self.heads = nn.ModuleList([nn.Linear(64, 2)])

    def forward(self, pixels: Tensor) -> Tensor:
        """Logits of all classes so far."""
        seen = self.body(pixels)
        return torch.cat([head(seen) for head in self.heads], -1)


@training(
    kind="continual",
    metric="accuracy on all ten",
    about="two more digits every 240 steps, a new head each time, replay of 20 pictures of each old one; Adam, clip 2",
)
def more_classes(seed: int, keeper: Keeper) -> float:
    """Class-incremental: parameters come while it runs, and with them a loss of a few nats."""
    torch.manual_seed(seed)
    pictures, labels, test, truth = digits()
    model = Growing()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    steps = keeper.around(model, optimizer, clip=2.0)
    of_digit = [torch.nonzero(labels == digit)[:, 0] for digit in range(10)]
    batches = []
    for task in range(5):
        new = torch.cat(of_digit[2 * task : 2 * task + 2])
        old = torch.cat([new, *(rows[:20] for rows in of_digit[: 2 * task])])
        for _ in range(240):
            batches.append((task, torch.cat([rows[torch.randint(len(rows), (16,))] for rows in (new, old)])))
    for task, rows in steps.batches(batches):
        while len(model.heads) <= task:
            head = nn.Linear(64, 2)
            model.heads.append(head)
            optimizer.add_param_group({"params": list(head.parameters())})
        loss = F.cross_entropy(model(pictures[rows]), labels[rows])
        loss.backward()
        steps.step(loss)
    return accuracy(model, test, truth)


@training(
    kind="image",
    metric="accuracy",
    about="data come in five lots; at each all weights are halved and get noise, then are trained on; AMSGrad",
)
def shrunk_and_perturbed(seed: int, keeper: Keeper) -> float:
    """A warm start that forgets a little on purpose (Ash and Adams 2020)."""
    torch.manual_seed(seed)
    pictures, labels, test, truth = digits()
    model = layers(64, 128, 64, 10)
    steps = keeper.around(model, torch.optim.Adam(model.parameters(), lr=2e-3, amsgrad=True))
    batches = [rows for lot in range(1, 6) for rows in epochs(len(pictures) * lot // 5, 16, 240)]
    for number, rows in steps.batches(numbered(batches)):
        if number and number % 240 == 0 and not steps.is_probe:
            with torch.no_grad():
                for weight in model.parameters():
                    weight.mul_(0.5).add_(0.02 * torch.randn_like(weight))
        loss = F.cross_entropy(model(pictures[rows]), labels[rows])
        loss.backward()
        steps.step(loss)
    return accuracy(model, test, truth)


@training(
    kind="private",
    metric="accuracy",
    about="DP-SGD: each row's gradient cut to 1, then noise that is as long as their sum; SGD at rate 0.5, batch 64",
)
def private_rows(seed: int, keeper: Keeper) -> float:
    """The gradient never gets small: most of it is noise (Abadi et al. 2016)."""
    torch.manual_seed(seed)
    pictures, labels, test, truth = digits()
    model = layers(64, 32, 10, between=nn.Tanh)
    steps = keeper.around(model, torch.optim.SGD(model.parameters(), lr=0.5))

    def of_row(weights: dict[str, Tensor], pixels: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, weights, (pixels,)), label)

    by_row = vmap(grad_and_value(of_row), in_dims=(None, 0, 0))
    for rows in steps.batches(epochs(len(pictures), 64, 700)):
        weights = {name: weight.detach() for name, weight in model.named_parameters()}
        gradients, losses = by_row(weights, pictures[rows], labels[rows])
        norms = sum(each.flatten(1).square().sum(-1) for each in gradients.values()).sqrt()
        share = (1 / norms).clamp(max=1.0)
        for name, weight in model.named_parameters():
            total = torch.tensordot(share, gradients[name], 1)
            weight.grad = (total + torch.randn_like(total)) / len(rows)
        steps.step(losses.mean())
    return accuracy(model, test, truth)


class Deep(nn.Module):
    """Eight blocks, of which any may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(64, 48), nn.Linear(48, 10)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(48), layers(48, 48, 48)) for _ in range(8))

    def forward(self, pixels: Tensor, left_out: float = 0.0) -> Tensor:
        """Logits; each block is left out with this chance, and counts for more where it is not."""
        x = self.first(pixels)
        for block in self.blocks:
            if left_out == 0 or torch.rand(()) >= left_out:
                x = x + block(x) / (1 - left_out)
        logits: Tensor = self.out(x)
        return logits


@training(
    kind="image",
    metric="accuracy",
    about="stochastic depth from step 300 on: each of eight blocks is left out half of the time; AdamW, clip 1",
)
def blocks_left_out(seed: int, keeper: Keeper) -> float:
    """What is nearly learned is blurred from one step to the next, and every step is by another network."""
    torch.manual_seed(seed)
    pictures, labels, test, truth = digits()
    model = Deep()
    steps = keeper.around(model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05), clip=1.0)
    for number, rows in steps.batches(numbered(epochs(len(pictures), 16, 800))):
        loss = F.cross_entropy(model(pictures[rows], 0.5 if number >= 300 else 0.0), labels[rows])
        loss.backward()
        steps.step(loss)
    return accuracy(model, test, truth)


class Shared(nn.Module):
    """What two tasks share, and a head for each."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(layers(64, 96, 64), nn.ReLU())
        self.digit, self.ink = nn.Linear(64, 10), nn.Linear(64, 1)


@training(
    kind="multi-task",
    metric="accuracy of the digit",
    about="two steps of cross entropy, one of squared error in grams of ink, 100 times as high; NAdam, clip 5",
)
def turns_of_tasks(seed: int, keeper: Keeper) -> float:
    """Every third step belongs to another task, whose unit is another."""
    torch.manual_seed(seed)
    pictures, labels, test, truth = digits()
    ink = 2 * pictures.sum(-1)
    model = Shared()
    steps = keeper.around(model, torch.optim.NAdam(model.parameters(), lr=2e-3), clip=5.0)
    for number, rows in steps.batches(numbered(epochs(len(pictures), 24, 1200))):
        seen = model.body(pictures[rows])
        if number % 3 == 2:
            loss = F.mse_loss(model.ink(seen)[:, 0], ink[rows])
        else:
            loss = F.cross_entropy(model.digit(seen), labels[rows])
        loss.backward()
        steps.step(loss)
    return accuracy(nn.Sequential(model.body, model.digit), test, truth)


def hourly(hours: int) -> Tensor:
    """A load with days and weeks; nights are quiet, workdays loud, and so is what cannot be foreseen in them."""
    hour = torch.arange(hours)
    by_day = 1 + torch.sin((hour % 24 - 6) * math.pi / 12)
    is_workday = (hour // 24 % 7 < 5).float()
    level = by_day * (0.3 + is_workday)
    wander = torch.zeros(hours)
    for each in range(1, hours):
        wander[each] = 0.8 * wander[each - 1] + (0.02 + 0.25 * level[each]) * torch.randn(())
    return level + wander


@training(
    kind="sequence",
    metric="R2 of the next hour",
    about="hours in their order, never shuffled: a step is a shift of 8 hours, quiet by night, loud by day; Adam",
)
def hours_in_order(seed: int, keeper: Keeper) -> float:
    """The loss has days and weeks as well."""
    torch.manual_seed(seed)
    load = hourly(24 * 170)
    windows = load.unfold(0, 49, 1)
    asked, answers = windows[:, :48], windows[:, 48]
    train = 24 * 135
    model = layers(48, 64, 32, 1)
    steps = keeper.around(model, torch.optim.Adam(model.parameters(), lr=1e-3))
    for first in steps.batches([first for _ in range(3) for first in range(0, train, 8)]):
        rows = slice(first, first + 8)
        loss = F.mse_loss(model(asked[rows])[:, 0], answers[rows])
        loss.backward()
        steps.step(loss)
    with torch.no_grad():
        return r_squared(model(asked[train:])[:, 0], answers[train:])


@training(
    kind="image",
    metric="accuracy",
    about="one micro-batch of 8 a step, then 2, 4 and 8 of them, from one step to the next; the rate stays; Adadelta",
)
def more_micro_batches(seed: int, keeper: Keeper) -> float:
    """The loss of a step is the mean of more and more, so it jitters less and less."""
    torch.manual_seed(seed)
    pictures, labels, test, truth = digits()
    model = layers(64, 96, 10)
    steps = keeper.around(model, torch.optim.Adadelta(model.parameters(), lr=0.3))
    batches = [rows for count in (1, 2, 4, 8) for rows in epochs(len(pictures), 8 * count, 250)]
    for rows in steps.batches(batches):
        *firsts, last = rows.split(8)
        total = torch.zeros(())
        for few in firsts:
            with steps.accumulate():
                part = F.cross_entropy(model(pictures[few]), labels[few]) / (len(firsts) + 1)
                part.backward()
                total += part.detach()
        part = F.cross_entropy(model(pictures[last]), labels[last]) / (len(firsts) + 1)
        part.backward()
        steps.step(total + part.detach())
    return accuracy(model, test, truth)
