"""Healthy trainings of what acts: a pilot by evolution, a driver by imitation, values with an ever longer sight."""

import math

import torch
import torch.nn.functional as F
from bench.healthy.contract import Keeper, training
from bench.healthy.late.sources import layers, numbered, r_squared
from torch import Tensor, nn

MOMENTS = 30


def flown(weights: Tensor, starts: Tensor) -> Tensor:
    """Cost of each pilot on the way to a place, in wind: 8 hidden units for a thrust along two axes."""
    place, speed, cost = starts, torch.zeros_like(starts), torch.zeros(len(starts))
    inner, outer = weights[:, :40].view(-1, 8, 5), weights[:, 40:].view(-1, 2, 8)
    ones = torch.ones(len(starts), 1)
    for moment in range(MOMENTS):
        seen = torch.cat([place, speed, ones], -1)
        thrust = (outer @ torch.tanh(inner @ seen[..., None]))[..., 0].clamp(-2, 2)
        wind = torch.tensor([0.5, 0.3 * math.sin(moment / 3)])
        speed = 0.9 * speed + 0.2 * (thrust + wind)
        place = place + 0.2 * speed
        cost = cost + place.square().sum(-1) + 0.05 * thrust.square().sum(-1)
    return cost / MOMENTS


@training(
    kind="rl",
    metric="cost of a flight",
    about="evolution strategy: the gradient is 32 mirrored perturbations by rank, no backward pass; Adam, rate decays",
    is_better_higher=False,
)
def evolved_pilots(seed: int, keeper: Keeper) -> float:
    """A gradient that is as long at the end as at the beginning (Salimans et al. 2017)."""
    torch.manual_seed(seed)
    model = nn.ParameterList([0.3 * torch.randn(56)])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 600)
    steps = keeper.around(model, optimizer, scheduler=schedule)
    for starts in steps.batches([2 * torch.randn(32, 2) for _ in range(600)]):
        away = 0.1 * torch.randn(32, 56)
        with torch.no_grad():
            costs = flown(model[0] + torch.cat([away, -away]), starts.repeat(2, 1))
        ranks = costs.argsort().argsort() / 63 - 0.5
        model[0].grad = ((ranks[:32] - ranks[32:])[:, None] * away).mean(0) / 0.01
        steps.step(costs.mean())
    with torch.no_grad():
        return float(flown(model[0].expand(1000, -1), 2 * torch.randn(1000, 2)).mean())


ROUNDS, DRIVES, LONG = 10, 16, 40


class Journal(nn.Module):
    """What was seen on all drives so far, and what the teacher would have done there."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Tensor
        self.wanted: Tensor
        self.filled: Tensor
        self.register_buffer("seen", torch.zeros(ROUNDS * DRIVES * LONG, 4))
        self.register_buffer("wanted", torch.zeros(ROUNDS * DRIVES * LONG, 1))
        self.register_buffer("filled", torch.tensor(0))

    def add(self, seen: Tensor) -> None:
        """Another few drives."""
        first = min(int(self.filled), len(self.seen) - len(seen))
        self.seen[first : first + len(seen)] = seen
        self.wanted[first : first + len(seen)] = teacher(seen)
        self.filled.fill_(first + len(seen))


def teacher(seen: Tensor) -> Tensor:
    """Steers hard, and harder the farther off: offset, heading, bend of the road and speed in, an angle out."""
    offset, heading, bend, speed = seen.unbind(-1)
    return (torch.tanh(-3 * offset - 4 * torch.sin(heading)) + 2 * bend / speed)[:, None]


@torch.no_grad()
def driven(driver: nn.Module | None, count: int) -> tuple[Tensor, Tensor]:
    """What is seen on so many drives, by the teacher or by somebody else, and how far off the middle."""
    offset, heading, speed = 0.2 * torch.randn(count), 0.2 * torch.randn(count), 1 + torch.rand(count)
    bend, everything, off = torch.zeros(count), [], []
    for _ in range(LONG):
        bend = 0.9 * bend + 0.2 * torch.randn(count)
        seen = torch.stack([offset, heading, bend, speed], -1)
        angle = (teacher(seen) if driver is None else driver(seen))[:, 0]
        heading = heading + 0.3 * speed * angle - 0.6 * bend + 0.05 * torch.randn(count)
        offset = (offset + 0.3 * speed * torch.sin(heading)).clamp(-10, 10)
        everything.append(seen)
        off.append(offset.abs())
    return torch.cat(everything), torch.stack(off)


@training(
    kind="imitation",
    metric="distance from the middle",
    about="DAgger: every 100 steps 16 drives of the pupil's own join what is learned from; Adam, clip 1",
    is_better_higher=False,
)
def own_drives(seed: int, keeper: Keeper) -> float:
    """First drives end in a ditch, where the teacher was never seen (Ross et al. 2011)."""
    torch.manual_seed(seed)
    model, journal = layers(4, 48, 48, 1), Journal()
    steps = keeper.around(model, torch.optim.Adam(model.parameters(), lr=2e-3), clip=1.0, also={"journal": journal})
    for number in steps.batches(range(100 * ROUNDS)):
        if number % 100 == 0 and not steps.is_probe:
            journal.add(driven(model if number else None, DRIVES)[0])
        rows = torch.randint(int(journal.filled), (24,))
        loss = F.mse_loss(model(journal.seen[rows]), journal.wanted[rows])
        loss.backward()
        steps.step(loss)
    return float(driven(model, 300)[1].mean())


STATES = 24


class Ring(nn.Module):
    """The values of places on a ring, and the values of a while ago that they are learned from."""

    def __init__(self) -> None:
        super().__init__()
        self.now = layers(STATES, 64, 1)
        self.before = layers(STATES, 64, 1).requires_grad_(False)
        self.copy()

    def copy(self) -> None:
        """What is known now is what is learned from next."""
        self.before.load_state_dict(self.now.state_dict())


@training(
    kind="rl",
    metric="R2 of the values",
    about="TD learning, discount 0, 0.5, 0.8, 0.9 in stages: values and errors grow; target copied every 10; Adam",
)
def longer_sight(seed: int, keeper: Keeper) -> float:
    """The farther it looks, the larger is all that it has to say."""
    torch.manual_seed(seed)
    places = torch.eye(STATES)
    rewards = torch.zeros(STATES)
    rewards[:8] = 1.0 + torch.rand(8)
    moves = 0.6 * places.roll(1, 1) + 0.1 * places.roll(-1, 1) + 0.3 * places
    truth = torch.linalg.solve(places - 0.9 * moves, rewards)
    model = Ring()
    steps = keeper.around(model, torch.optim.Adam(model.now.parameters(), lr=5e-3))
    for number, here in steps.batches(numbered([torch.randint(STATES, (32,)) for _ in range(1400)])):
        if number % 10 == 0 and not steps.is_probe:
            model.copy()
        discount = (0.0, 0.5, 0.8, 0.9, 0.9, 0.9, 0.9)[number // 200]
        there = torch.multinomial(moves[here], 1)[:, 0]
        with torch.no_grad():
            wanted = rewards[here] + discount * model.before(places[there])[:, 0]
        loss = F.mse_loss(model.now(places[here])[:, 0], wanted)
        loss.backward()
        steps.step(loss)
    with torch.no_grad():
        return r_squared(model.now(places)[:, 0], truth)
