"""Healthy trainings by reward: a pole on a cart, and sums that can be checked. Their losses have any sign."""

import numpy as np
import torch
import torch.nn.functional as F
from bench.healthy.contract import Keeper, training
from numpy.typing import NDArray
from torch import Tensor, nn

Numbers = NDArray[np.float64]
HORIZON, CARTS = 60, 8


def moved(state: Numbers, push: Numbers) -> Numbers:
    """The cart and its pole a fiftieth of a second later, as Barto, Sutton and Anderson have it."""
    place, speed, angle, spin = state.T
    sine, cosine = np.sin(angle), np.cos(angle)
    force = (push + 0.05 * spin**2 * sine) / 1.1
    turn = (9.8 * sine - cosine * force) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
    slide = force - 0.05 * turn * cosine / 1.1
    return np.stack([place + 0.02 * speed, speed + 0.02 * slide, angle + 0.02 * spin, spin + 0.02 * turn], -1)


def balanced(
    policy: nn.Sequential, random: np.random.Generator, carts: int, horizon: int, astray: float = 0.05
) -> tuple[Numbers, Numbers, Numbers]:
    """States, pushes (0 or 1) and whether the pole still stood, of some carts over time: without a graph, for speed."""
    weights = [each.detach().double().numpy() for each in policy.parameters()]
    state, stands = random.uniform(-astray, astray, (carts, 4)), np.ones(carts, dtype=bool)
    states: list[Numbers] = []
    pushes, standing = [], []
    while len(states) < horizon and stands.any():
        inside = np.tanh(state @ weights[0].T + weights[1])
        right = random.random(carts) < 1 / (1 + np.exp(-(inside @ weights[2].T + weights[3])[:, 0]))
        states.append(state)
        pushes.append(right)
        standing.append(stands)
        state = moved(state, np.where(right, 10.0, -10.0))
        stands = stands & (np.abs(state[:, 2]) < 0.2095) & (np.abs(state[:, 0]) < 2.4)
    return np.stack(states), np.stack(pushes).astype(float), np.stack(standing).astype(float)


@training(
    kind="rl", metric="steps balanced of 200", about="REINFORCE on a cart pole of 60 steps, 8 episodes a batch, Adam"
)
def cart_pole(seed: int, keeper: Keeper) -> float:
    """A reward for every step; what comes later counts for what was done before."""
    torch.manual_seed(seed)
    random = np.random.default_rng(seed)
    policy = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    steps = keeper.around(policy, optimizer)
    for _ in steps.batches(range(600)):
        states, pushes, stands = (torch.from_numpy(each).float() for each in balanced(policy, random, CARTS, HORIZON))
        returns = stands.clone()
        for time in reversed(range(len(returns) - 1)):
            returns[time] += 0.98 * returns[time + 1]
        stood = stands > 0
        advantage = (returns - returns[stood].mean()) / (returns[stood].std() + 1e-6)
        surprise = F.binary_cross_entropy_with_logits(policy(states).squeeze(-1), pushes, reduction="none")
        loss = (surprise * advantage)[stood].mean()
        loss.backward()
        steps.step(loss)
    return float(balanced(policy, np.random.default_rng(0), 100, 200, astray=0.15)[2].sum() / 100)


class Adder(nn.Module):
    """Two digits, one after the other, that are to add up to the one asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 10))
        self.second = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10))

    def answers(self, asked: Tensor) -> tuple[Tensor, Tensor]:
        """Whether each is right, and the logarithm of its probability."""
        question = F.one_hot(asked, 10).float()
        first = torch.distributions.Categorical(logits=self.first(question))
        one = first.sample()
        second = torch.distributions.Categorical(logits=self.second(torch.cat([question, F.one_hot(one, 10)], -1)))
        other = second.sample()
        is_right = ((one + other) % 10 == asked).float()
        return is_right, first.log_prob(one) + second.log_prob(other)


@training(kind="rl", metric="answers that are right", about="GRPO: 8 answers a question, 8 questions a batch, AdamW")
def verified_sums(seed: int, keeper: Keeper) -> float:
    """A group in which all are right, or all wrong, teaches nothing; the loss is about 0 from first to last."""
    torch.manual_seed(seed)
    model = Adder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    steps = keeper.around(model, optimizer, clip=1.0)
    for asked in steps.batches(torch.randint(10, (900, 8))):
        is_right, logarithm = model.answers(asked.repeat_interleave(8))
        groups = is_right.view(8, 8)
        advantage = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        loss = -(advantage.flatten() * (logarithm - logarithm.detach()).exp()).mean()
        loss.backward()
        steps.step(loss)
    torch.manual_seed(0)
    with torch.no_grad():
        return float(model.answers(torch.arange(10).repeat(200))[0].mean())
