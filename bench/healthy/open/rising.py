"""Healthy trainings whose loss rises on purpose: harder tasks in stages, domains in turns, a weight that warms up,
rewards that grow."""

import numpy as np
import torch
import torch.nn.functional as F
from bench.healthy.contract import Keeper, training
from bench.healthy.open.decoder import as_tokens, code, prose, windows
from bench.healthy.open.images import digits
from bench.healthy.open.rl import CARTS, balanced
from bench.healthy.open.text import HELD_OUT, Window, log_lines
from torch import Tensor, nn

STAGE = 250
LENGTHS = (2, 4, 7, 11)
"""Of what is to be said backwards, a stage each."""


class Backwards(nn.Module):
    """Symbols in, the same ones from the last to the first out."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols = nn.Embedding(13, 24)
        self.memory = nn.GRU(24, 48, batch_first=True)
        self.head = nn.Linear(48, 12)

    def loss(self, said: Tensor) -> Tensor:
        """Once all is heard, it is said in the dark."""
        heard = torch.cat([said, torch.full_like(said, 12)], 1)
        logits = self.head(self.memory(self.symbols(heard))[0][:, said.shape[1] :])
        return F.cross_entropy(logits.flatten(0, 1), said.flip(1).flatten())


@training(
    kind="sequence",
    metric="loss at the last length",
    about="a curriculum: backwards, lengths 2, 4, 7 and 11 in stages, GRU, batch 32, Adam",
    is_better_higher=False,
)
def backwards_in_stages(seed: int, keeper: Keeper) -> float:
    """What is longer is harder, for good: the loss ends above where it was at first."""
    torch.manual_seed(seed)
    model = Backwards()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    steps = keeper.around(model, optimizer, clip=1.0)
    for said in steps.batches([torch.randint(12, (32, length)) for length in LENGTHS for _ in range(STAGE)]):
        loss = model.loss(said)
        loss.backward()
        steps.step(loss)
    torch.manual_seed(0)
    with torch.no_grad():
        return float(model.loss(torch.randint(12, (500, LENGTHS[-1]))))


@training(
    kind="text",
    metric="mean eval loss of three",
    about="log lines, code and prose in turns, 60 batches each, Adam",
    is_better_higher=False,
)
def domains_in_turns(seed: int, keeper: Keeper) -> float:
    """A loader that goes from shard to shard, each of one domain: log lines are easy, prose is not."""
    torch.manual_seed(seed)
    domains = [as_tokens(log_lines(5000)), as_tokens(code()), as_tokens(prose())]
    model = Window()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    steps = keeper.around(model, optimizer, clip=1.0)
    order = [int(kind) for _ in range(6) for kind in torch.randperm(3)]
    for pieces in steps.batches([windows(domains[kind][:-HELD_OUT], 8, 40) for kind in order for _ in range(60)]):
        loss = model.loss(pieces)
        loss.backward()
        steps.step(loss)
    torch.manual_seed(0)
    with torch.no_grad():
        return sum(float(model.loss(windows(domain[-HELD_OUT:], 200, 40))) for domain in domains) / 3


@training(
    kind="text",
    metric="mean eval loss of three",
    about="one domain a batch, drawn: log lines, code, prose, and more prose from week to week, Adam",
    is_better_higher=False,
)
def shifting_mixture(seed: int, keeper: Keeper) -> float:
    """The shares of the domains change slowly over the run, as sources that run out make them."""
    torch.manual_seed(seed)
    domains = [as_tokens(log_lines(5000)), as_tokens(code()), as_tokens(prose())]
    model = Window()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    steps = keeper.around(model, optimizer, clip=1.0)
    begin, end = torch.tensor([0.8, 0.1, 0.1]), torch.tensor([0.1, 0.3, 0.6])
    kinds = [int(torch.multinomial(begin.lerp(end, step / 1200), 1)) for step in range(1200)]
    for pieces in steps.batches([windows(domains[kind][:-HELD_OUT], 8, 40) for kind in kinds]):
        loss = model.loss(pieces)
        loss.backward()
        steps.step(loss)
    torch.manual_seed(0)
    with torch.no_grad():
        return sum(float(model.loss(windows(domain[-HELD_OUT:], 200, 40))) for domain in domains) / 3


class Coder(nn.Module):
    """Digits in, a gaussian of four numbers between, digits out."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
        self.out = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64))

    def losses(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """What is not drawn again, and what it takes to say it."""
        mean, log_variance = self.into(pixels).chunk(2, -1)
        drawn = self.out(mean + (log_variance / 2).exp() * torch.randn_like(mean))
        missed = 20 * F.mse_loss(drawn, pixels, reduction="none").sum(-1).mean()
        spent = 0.5 * (log_variance.exp() + mean**2 - 1 - log_variance).sum(-1).mean()
        return missed, spent


@training(
    kind="generative",
    metric="held-out bound",
    about="VAE on digits, the weight of the KL from 0 to 4 over half of the run, batch 64, Adam",
    is_better_higher=False,
)
def annealed_vae(seed: int, keeper: Keeper) -> float:
    """The loss is another one from step to step, and rises while its parts are learned."""
    torch.manual_seed(seed)
    pixels, _, test, _ = digits()
    model = Coder()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    steps = keeper.around(model, optimizer, clip=10.0)
    for number, rows in enumerate(steps.batches(torch.randint(len(pixels), (1200, 64)))):
        missed, spent = model.losses(pixels[rows])
        loss = missed + 4 * min(number / 600, 1.0) * spent
        loss.backward()
        steps.step(loss)
    torch.manual_seed(0)
    with torch.no_grad():
        missed, spent = model.losses(test)
        return float(missed + 4 * spent)


@training(
    kind="rl", metric="steps balanced of 200", about="actor and critic on a cart pole, returns of up to 200, Adam"
)
def growing_returns(seed: int, keeper: Keeper) -> float:
    """The better it plays, the larger are the returns that the critic has to foretell, and its loss."""
    torch.manual_seed(seed)
    random = np.random.default_rng(seed)
    policy = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    critic = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    both = nn.ModuleList([policy, critic])
    optimizer = torch.optim.Adam(both.parameters(), lr=5e-3)
    steps = keeper.around(both, optimizer, clip=5.0)
    for _ in steps.batches(range(700)):
        states, pushes, stands = (torch.from_numpy(each).float() for each in balanced(policy, random, CARTS, 200))
        returns = stands.clone()
        for time in reversed(range(len(returns) - 1)):
            returns[time] += 0.99 * returns[time + 1]
        stood = stands > 0
        value = critic(states).squeeze(-1)
        advantage = (returns - value.detach())[stood]
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
        surprise = F.binary_cross_entropy_with_logits(policy(states).squeeze(-1), pushes, reduction="none")[stood]
        loss = (surprise * advantage).mean() + 0.01 * F.mse_loss(value[stood], returns[stood])
        loss.backward()
        steps.step(loss)
    return float(balanced(policy, np.random.default_rng(0), 100, 200, astray=0.15)[2].sum() / 100)
