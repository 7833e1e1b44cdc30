"""A seed and a keeper in, quality out: recommendation, several tasks at once, graphs, a stream that drifts."""

import torch
import torch.nn.functional as F
from bench.healthy.contract import Keeper, training
from bench.healthy.frozen.sources import accuracy, index_batches, r_squared, split
from torch import Tensor, nn


class Towers(nn.Module):
    """A vector of length one for every user and every item."""

    def __init__(self, users: int, items: int) -> None:
        super().__init__()
        self.user = nn.Sequential(nn.Embedding(users, 16), nn.Linear(16, 16))
        self.item = nn.Sequential(nn.Embedding(items, 16), nn.Linear(16, 16))

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Similarity of all the users with all the items, over the temperature."""
        return F.normalize(self.user(users), dim=1) @ F.normalize(self.item(items), dim=1).T / 0.1


@training(
    kind="recommendation",
    metric="recall at 20",
    about="two towers, softmax over the batch of 96, items by popularity, repeats count as wrong; Adam",
)
def two_towers(seed: int, keeper: Keeper) -> float:
    """Users choose items near their taste; the popular are chosen by everybody."""
    torch.manual_seed(seed)
    users, items = 300, 250
    taste, style = F.normalize(torch.randn(users, 6), dim=1), F.normalize(torch.randn(items, 6), dim=1)
    popularity = torch.log(1 / torch.arange(1, items + 1).float())[torch.randperm(items)]
    chances = F.softmax(9 * taste @ style.T + 0.6 * popularity, 1)
    chosen = torch.multinomial(chances, 31)
    pairs = torch.stack([torch.arange(users)[:, None].expand(-1, 30), chosen[:, :30]], -1).reshape(-1, 2)
    model = Towers(users, items)
    steps = keeper.around(model, torch.optim.Adam(model.parameters(), lr=1e-2))
    for rows in steps.batches(index_batches(len(pairs), 96, 1000)):
        of_users, of_items = pairs[rows].unbind(1)
        loss = F.cross_entropy(model(of_users, of_items), torch.arange(len(rows)))
        loss.backward()
        steps.step(loss)
    with torch.no_grad():
        scores = model(torch.arange(users), torch.arange(items)).scatter(1, chosen[:, :30], -torch.inf)
    return float((scores.topk(20, 1).indices == chosen[:, 30:]).any(1).float().mean())


class ThreeTasks(nn.Module):
    """A shared trunk, three heads, and how uncertain each of them is (Kendall et al. 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 48), nn.ReLU())
        self.heads = nn.ModuleList([nn.Linear(48, 1), nn.Linear(48, 1), nn.Linear(48, 4)])
        self.log_variance = nn.Parameter(torch.zeros(3))

    def forward(self, inputs: Tensor) -> list[Tensor]:
        """What each head says."""
        shared = self.trunk(inputs)
        return [head(shared) for head in self.heads]


@training(
    kind="multi-task",
    metric="mean of two R2 and an accuracy",
    about="two regressions of different scale and a class, learnt uncertainties: the total goes below zero; AdamW",
)
def uncertain_tasks(seed: int, keeper: Keeper) -> float:
    """The weights of the terms are learnt with them."""
    torch.manual_seed(seed)
    columns = torch.randn(9000, 12)
    small = 0.3 * torch.tanh(columns[:, 0] + columns[:, 1] * columns[:, 2]) + 0.03 * torch.randn(9000)
    large = 2 * columns[:, 3] * columns[:, 4] + 3 * columns[:, 5] + torch.randn(9000)
    group = 2 * (columns[:, 6] + columns[:, 0] > 0).long() + (columns[:, 7] ** 2 > 0.7).long()
    wanted = torch.stack([small, large, group.float()], 1)
    inputs, targets, test_inputs, test_targets = split(columns, wanted, 0.3)
    model = ThreeTasks()
    steps = keeper.around(model, torch.optim.AdamW(model.parameters(), lr=3e-3), clip=5.0)
    for rows in steps.batches(index_batches(len(inputs), 64, 1100)):
        of_small, of_large, of_group = model(inputs[rows])
        terms = [
            0.5 * F.mse_loss(of_small[:, 0], targets[rows, 0]),
            0.5 * F.mse_loss(of_large[:, 0], targets[rows, 1]),
            F.cross_entropy(of_group, targets[rows, 2].long()),
        ]
        loss = (torch.stack(terms) * torch.exp(-model.log_variance) + 0.5 * model.log_variance).sum()
        loss.backward()
        steps.step(loss)
    with torch.no_grad():
        of_small, of_large, of_group = model(test_inputs)
    explained = r_squared(of_small[:, 0], test_targets[:, 0]) + r_squared(of_large[:, 0], test_targets[:, 1])
    return (explained + accuracy(of_group, test_targets[:, 2].long())) / 3


Graph = tuple[Tensor, int]


def some_graph() -> Graph:
    """8 to 24 nodes with neighbours by chance (0), or in two camps with little between them (1)."""
    label, nodes = int(torch.randint(2, ())), int(torch.randint(8, 25, ()))
    camp = torch.arange(nodes) < nodes // 2
    is_same = camp[:, None] == camp[None, :]
    chance = torch.where(is_same, 0.75, 0.06) if label else torch.full((nodes, nodes), 0.4)
    upper = (torch.rand(nodes, nodes) < chance).float().triu(1)
    return upper + upper.T, label


class GraphNet(nn.Module):
    """Counts at every node, two rounds of messages, then the mean and the largest over the nodes."""

    def __init__(self, wide: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(3, wide)
        self.rounds = nn.ModuleList(nn.Linear(2 * wide, wide) for _ in range(2))
        self.out = nn.Linear(2 * wide, 2)

    def forward(self, edges: Tensor) -> Tensor:
        """Logits of one graph."""
        degree = edges.sum(1)
        two_steps = edges @ edges
        triangles = (two_steps * edges).sum(1) / degree.clamp_min(1)
        seen = torch.relu(self.first(torch.stack([degree / 8, triangles / 4, two_steps.std(1) / 2], 1)))
        for mix in self.rounds:
            heard = edges @ seen / degree.clamp_min(1)[:, None]
            seen = torch.relu(mix(torch.cat([seen, heard], 1)))
        logits: Tensor = self.out(torch.cat([seen.mean(0), seen.amax(0)]))
        return logits


@training(kind="graph", metric="accuracy", about="graphs of 8 to 24 nodes, two at a time, message passing, Adam")
def graphs_by_twos(seed: int, keeper: Keeper) -> float:
    """Each batch is two graphs of different sizes."""
    torch.manual_seed(seed)
    train, test = [some_graph() for _ in range(800)], [some_graph() for _ in range(400)]
    model = GraphNet()
    steps = keeper.around(model, torch.optim.Adam(model.parameters(), lr=5e-3))
    for rows in steps.batches(index_batches(len(train), 2, 1300)):
        graphs = [train[row] for row in rows.tolist()]
        logits = torch.stack([model(edges) for edges, _ in graphs])
        loss = F.cross_entropy(logits, torch.tensor([label for _, label in graphs]))
        loss.backward()
        steps.step(loss)
    with torch.no_grad():
        logits = torch.stack([model(edges) for edges, _ in test])
    return accuracy(logits, torch.tensor([label for _, label in test]))


@training(
    kind="online",
    metric="prequential accuracy",
    about="one row at a time, the boundary turns slowly and jumps once, each row is first predicted, then learnt; SGD",
)
def drifting_stream(seed: int, keeper: Keeper) -> float:
    """What counts is how often the prediction before learning was right, after the first 300 rows."""
    torch.manual_seed(seed)
    rows = torch.randn(2200, 8)
    start, other, jumped = torch.randn(3, 8)
    turn = torch.linspace(0, 1.5, 2200)[:, None]
    boundary = torch.cos(turn) * start + torch.sin(turn) * other
    boundary[1300:] += 1.5 * jumped
    labels = ((rows * boundary).sum(1) + 0.3 * torch.randn(2200) > 0).float()
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    steps = keeper.around(model, torch.optim.SGD(model.parameters(), lr=0.1))
    was_right = torch.zeros(2200)
    for number in steps.batches(range(2200)):
        logit = model(rows[number])[0]
        loss = F.binary_cross_entropy_with_logits(logit, labels[number])
        if not steps.is_probe:
            was_right[number] = float((logit > 0) == (labels[number] > 0))
        loss.backward()
        steps.step(loss)
    return was_right[300:].mean().item()


@training(
    kind="tabular", metric="R2", about="Friedman's function, one cycle of SGD up to a rate of 0.4, batch norm, batch 64"
)
def one_cycle(seed: int, keeper: Keeper) -> float:
    """The rate goes up over 30 % of the run, and down to nothing."""
    torch.manual_seed(seed)
    columns = torch.rand(8000, 10)
    wave = 10 * torch.sin(torch.pi * columns[:, 0] * columns[:, 1])
    exact = wave + 20 * (columns[:, 2] - 0.5) ** 2 + 10 * columns[:, 3] + 5 * columns[:, 4]
    wanted = (exact - 14.4 + torch.randn(8000)) / 5
    inputs, targets, test_inputs, test_targets = split(columns, wanted, 0.4)
    model = nn.Sequential(
        nn.Linear(10, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(),
        nn.Linear(64, 1),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.4, total_steps=1000)
    steps = keeper.around(model, optimizer, scheduler=schedule)
    for rows in steps.batches(index_batches(len(inputs), 64, 999)):
        loss = F.mse_loss(model(inputs[rows])[:, 0], targets[rows])
        loss.backward()
        steps.step(loss)
    model.eval()
    with torch.no_grad():
        return r_squared(model(test_inputs)[:, 0], test_targets)
