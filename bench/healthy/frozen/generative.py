"""A seed and a keeper in, held-out quality out: models that draw what they were shown."""

import math

import torch
import torch.nn.functional as F
from bench.healthy.contract import Keeper, training
from bench.healthy.frozen.sources import digits, index_batches
from torch import Tensor, nn


def ring_of_modes(count: int) -> Tensor:
    """Points around eight centres on a circle."""
    angle = torch.randint(0, 8, (count,)) * (2 * math.pi / 8)
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(count, 2)


def energy_distance(drawn: Tensor, real: Tensor) -> float:
    """0 where the two samples come from one distribution."""
    between = 2 * torch.cdist(drawn, real).mean()
    return (between - torch.cdist(drawn, drawn).mean() - torch.cdist(real, real).mean()).item()


def gradient_penalty(critic: nn.Module, real: Tensor, drawn: Tensor) -> Tensor:
    """How far the critic's slope between the two samples is from one."""
    mix = torch.rand(len(real), 1)
    between = (mix * real + (1 - mix) * drawn).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    penalty: Tensor = ((slope.norm(dim=1) - 1) ** 2).mean()
    return penalty


@training(
    kind="generative",
    metric="energy distance",
    about="WGAN with gradient penalty, 3 critic steps for 1 of the generator, Adam (0.5, 0.9), losses of both signs",
    is_better_higher=False,
)
def wasserstein_gan(seed: int, keeper: Keeper) -> float:
    """Two players on eight modes; both have their own optimizer."""
    torch.manual_seed(seed)
    generator = nn.Sequential(nn.Linear(4, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2))
    critic = nn.Sequential(nn.Linear(2, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1))
    critic_steps = keeper.around(critic, torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9)))
    generator_steps = keeper.around(
        generator, torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9)), reads_data=False
    )
    points = ring_of_modes(20_000)
    for number, rows in enumerate(critic_steps.batches(index_batches(len(points), 64, 1050))):
        drawn = generator(torch.randn(64, 4)).detach()
        loss = critic(drawn).mean() - critic(points[rows]).mean()
        loss = loss + gradient_penalty(critic, points[rows], drawn)
        loss.backward()
        critic_steps.step(loss)
        if number % 3 == 2 and not critic_steps.is_probe:
            generator_loss = -critic(generator(torch.randn(64, 4))).mean()
            generator_loss.backward()
            # The generator's gradient went through the critic, which is not to keep its share of it.
            critic.zero_grad()
            generator_steps.step(generator_loss)
    with torch.no_grad():
        return energy_distance(generator(torch.randn(2000, 4)), ring_of_modes(2000))


class Coupling(nn.Module):
    """One coordinate is scaled and shifted by what the other says (Dinh et al. 2017)."""

    def __init__(self, kept: int) -> None:
        super().__init__()
        self.kept = kept
        self.says = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Points nearer to the normal, and the logarithm of the change in volume."""
        kept, moved = points[:, self.kept], points[:, 1 - self.kept]
        log_scale, shift = self.says(kept[:, None]).unbind(1)
        log_scale = 3.0 * torch.tanh(log_scale / 3.0)
        moved = moved * log_scale.exp() + shift
        pair = (kept, moved) if self.kept == 0 else (moved, kept)
        return torch.stack(pair, 1), log_scale


def flow_nll(layers: nn.ModuleList, points: Tensor) -> Tensor:
    """Mean negative log-likelihood of the points, in nats."""
    volume = torch.zeros(len(points))
    for layer in layers:
        points, log_scale = layer(points)
        volume = volume + log_scale
    return (0.5 * (points**2).sum(1) + math.log(2 * math.pi) - volume).mean()


def moons(count: int) -> Tensor:
    """Two thin half circles that hold each other."""
    angle = math.pi * torch.rand(count)
    upper = torch.stack([angle.cos(), angle.sin()], 1)
    lower = torch.stack([1 - angle.cos(), 0.5 - angle.sin()], 1)
    return torch.where(torch.rand(count, 1) < 0.5, upper, lower) * 0.3 + 0.03 * torch.randn(count, 2)


@training(
    kind="generative",
    metric="negative log-likelihood",
    about="RealNVP with four couplings on two thin moons; the loss crosses zero, batch 64, Adam, clip 5.0",
    is_better_higher=False,
)
def real_nvp(seed: int, keeper: Keeper) -> float:
    """A density that is narrow somewhere has outliers everywhere else."""
    torch.manual_seed(seed)
    layers = nn.ModuleList(Coupling(kept=number % 2) for number in range(4))
    points = moons(6000)
    steps = keeper.around(layers, torch.optim.Adam(layers.parameters(), lr=3e-3), clip=5.0)
    for rows in steps.batches(index_batches(len(points), 64, 750)):
        loss = flow_nll(layers, points[rows])
        loss.backward()
        steps.step(loss)
    with torch.no_grad():
        return flow_nll(layers, moons(5000)).item()


class DigitVae(nn.Module):
    """64 pixels through six latent numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 12))
        self.decode = nn.Sequential(nn.Linear(6, 96), nn.ReLU(), nn.Linear(96, 64))

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Reconstruction and divergence in nats an image."""
        mean, log_variance = self.encode(pixels).chunk(2, 1)
        latent = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        seen = F.binary_cross_entropy_with_logits(self.decode(latent), pixels, reduction="none").sum(1)
        divergence = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).sum(1)
        return seen.mean(), divergence.mean()


@training(
    kind="generative",
    metric="negative ELBO",
    about="VAE on digits, weight of the divergence up from 0 to 1 over half of the run, batch 64, Adam",
    is_better_higher=False,
)
def vae_with_warm_up(seed: int, keeper: Keeper) -> float:
    """The total rises while its second term is let in."""
    torch.manual_seed(seed)
    images, _, test_images, _ = digits()
    model = DigitVae()
    steps = keeper.around(model, torch.optim.Adam(model.parameters(), lr=2e-3))
    for number, rows in enumerate(steps.batches(index_batches(len(images), 64, 1000))):
        seen, divergence = model(images[rows])
        loss = seen + min(1.0, number / 500) * divergence
        loss.backward()
        steps.step(loss)
    with torch.no_grad():
        seen, divergence = model(test_images)
        return float(seen + divergence)
