"""Healthy trainings of generators: two players on a ring, and noise taken back step by step."""

import torch
import torch.nn.functional as F
from bench.healthy.contract import Keeper, training
from torch import Tensor, nn


def ring(count: int) -> Tensor:
    """Eight narrow gaussians on a circle."""
    angle = torch.randint(8, (count,)) * (torch.pi / 4)
    return torch.stack([angle.cos(), angle.sin()], -1) * 2 + 0.1 * torch.randn(count, 2)


def energy_distance(ours: Tensor, theirs: Tensor) -> float:
    """How far two clouds of points are apart; near 0 for clouds of one kind."""
    across = torch.cdist(ours, theirs).mean()
    return float(2 * across - torch.cdist(ours, ours).mean() - torch.cdist(theirs, theirs).mean())


@training(
    kind="generative",
    metric="energy distance",
    about="GAN on a ring of gaussians, two optimizers in two loops",
    is_better_higher=False,
)
def adversaries(seed: int, keeper: Keeper) -> float:
    """Neither loss has to fall: each player's depends on the other."""
    torch.manual_seed(seed)
    generator = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    critic = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    making = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.99))
    judging = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.99))
    of_critic = keeper.around(critic, judging, also={"generator": generator, "making": making})
    of_generator = keeper.around(generator, making, reads_data=False)
    for _ in of_critic.batches(range(1000)):
        made = generator(torch.randn(64, 8))
        loss = F.softplus(-critic(ring(64))).mean() + F.softplus(critic(made.detach())).mean()
        loss.backward()
        of_critic.step(loss)
        if of_critic.is_probe:
            continue
        loss = F.softplus(-critic(made)).mean()
        loss.backward()
        of_generator.step(loss)
        judging.zero_grad()  # what came through the critic is not for it
    torch.manual_seed(0)
    with torch.no_grad():
        return energy_distance(generator(torch.randn(1500, 8)), ring(1500))


def moons(count: int) -> Tensor:
    """Two half circles in each other."""
    side = torch.randint(2, (count,)) * 2 - 1.0
    angle = torch.rand(count) * torch.pi
    points = torch.stack([angle.cos() - 0.5 * side, angle.sin() * side - 0.25 * side], -1)
    return points + 0.05 * torch.randn(count, 2)


class Denoiser(nn.Module):
    """Points and times in, the noise in them out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2 + 16, 96), nn.SiLU(), nn.Linear(96, 96), nn.SiLU(), nn.Linear(96, 2))

    def forward(self, points: Tensor, times: Tensor) -> Tensor:
        """Times are between 0 and 1."""
        waves = times[:, None] * 2.0 ** torch.arange(8)
        noise: Tensor = self.layers(torch.cat([points, waves.sin(), waves.cos()], -1))
        return noise


@training(
    kind="generative",
    metric="energy distance",
    about="DDPM on two moons, 50 noise levels, batch 64, EMA, Adam",
    is_better_higher=False,
)
def diffusion(seed: int, keeper: Keeper) -> float:
    """The loss is that of a noise level drawn at random; what is sampled from is an average of the weights."""
    torch.manual_seed(seed)
    kept = (1 - torch.linspace(1e-3, 0.2, 50)).cumprod(0)
    model, averaged = Denoiser(), Denoiser()
    averaged.load_state_dict(model.state_dict())
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    steps = keeper.around(model, optimizer, also={"averaged": averaged})
    for _ in steps.batches(range(1200)):
        time, noise = torch.randint(50, (64,)), torch.randn(64, 2)
        share = kept[time, None]
        loss = F.mse_loss(model(share.sqrt() * moons(64) + (1 - share).sqrt() * noise, time / 50), noise)
        loss.backward()
        steps.step(loss)
        if not steps.is_probe:
            with torch.no_grad():
                torch._foreach_lerp_(list(averaged.parameters()), list(model.parameters()), 0.01)
    torch.manual_seed(0)
    return energy_distance(sampled(averaged, kept), moons(1500))


@torch.no_grad()
def sampled(model: nn.Module, kept: Tensor) -> Tensor:
    """1500 points out of noise."""
    points = torch.randn(1500, 2)
    alphas = kept / torch.cat([torch.ones(1), kept[:-1]])
    for time in reversed(range(len(kept))):
        noise = model(points, torch.full((1500,), time / len(kept)))
        points = (points - (1 - alphas[time]) / (1 - kept[time]).sqrt() * noise) / alphas[time].sqrt()
        if time:
            points = points + (1 - alphas[time]).sqrt() * torch.randn_like(points)
    return points
