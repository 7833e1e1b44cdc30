"""Healthy trainings of what draws or redraws: codes, a machine of energies, two players with a hinge, a sound."""

import math

import torch
import torch.nn.functional as F
from bench.healthy.contract import Keeper, training
from bench.healthy.held.sources import digits, energy_distance, epochs, layers, numbered
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm


class Codes(nn.Module):
    """64 pixels as eight of 32 words, each of four numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = layers(64, 96, 32), layers(32, 96, 64)
        self.words = nn.Parameter(torch.randn(32, 4))
        self.uses: Tensor
        self.register_buffer("uses", torch.zeros(32))

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The pixels from the nearest words, by how much words and code differ, and the codes."""
        pixels = pictures.flatten(1)
        codes = self.encode(pixels).view(-1, 4)
        nearest = torch.cdist(codes, self.words).argmin(-1)
        if self.training:
            self.uses += torch.bincount(nearest, minlength=32)
        words = self.words[nearest]
        differ = (words - codes.detach()).square().mean() + 0.25 * (words.detach() - codes).square().mean()
        through = codes + (words - codes).detach()
        return F.mse_loss(self.decode(through.view(-1, 32)), pixels), differ, codes.detach()

    @torch.no_grad()
    def revive(self, codes: Tensor) -> None:
        """Words that nobody used since the last time become codes that there are."""
        is_dead = self.uses == 0
        self.words[is_dead] = codes[torch.randint(len(codes), (int(is_dead.sum()),))]
        self.uses.zero_()


@training(
    kind="generative",
    metric="test MSE",
    about="VQ-VAE, straight-through, words that are not used are put elsewhere every 100 steps; batch 32, Adam",
    is_better_higher=False,
)
def words_for_pictures(seed: int, keeper: Keeper) -> float:
    """Which word is nearest changes at once, and with it what the decoder is given."""
    torch.manual_seed(seed)
    pictures, _, test, _ = digits()
    model = Codes()
    steps = keeper.around(model, torch.optim.Adam(model.parameters(), lr=2e-3))
    for number, rows in steps.batches(numbered(epochs(len(pictures), 32, 1500))):
        off, differ, codes = model(pictures[rows])
        loss = off + differ
        loss.backward()
        steps.step(loss)
        if number % 100 == 99 and number < 1000 and not steps.is_probe:
            model.revive(codes)
    model.eval()
    with torch.no_grad():
        return float(model(test)[0])


class Machine(nn.Module):
    """A restricted Boltzmann machine of 64 pixels and 64 hidden units, and chains that never end."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.01 * torch.randn(64, 64))
        self.of_pixels, self.of_hidden = nn.Parameter(torch.zeros(64)), nn.Parameter(torch.zeros(64))
        self.chains: Tensor
        self.register_buffer("chains", torch.bernoulli(torch.full((64, 64), 0.5)))

    def free_energy(self, pixels: Tensor) -> Tensor:
        """Low for pictures that are likely."""
        return -pixels @ self.of_pixels - F.softplus(pixels @ self.weight.T + self.of_hidden).sum(-1)

    @torch.no_grad()
    def again(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """There and back: the chance of each pixel, and pixels drawn from it."""
        hidden = torch.bernoulli((pixels @ self.weight.T + self.of_hidden).sigmoid())
        chance = (hidden @ self.weight + self.of_pixels).sigmoid()
        return chance, torch.bernoulli(chance)


@training(
    kind="generative",
    metric="nats a picture to redraw",
    about="persistent contrastive divergence: free energy of pictures less that of chains, any sign, no minimum; SGD",
    is_better_higher=False,
)
def boltzmann_machine(seed: int, keeper: Keeper) -> float:
    """The loss says nothing of how good the machine is (Tieleman 2008)."""
    torch.manual_seed(seed)
    pictures, _, test, _ = digits()
    seen, asked = ((each.flatten(1) > 0.5).float() for each in (pictures, test))
    model = Machine()
    steps = keeper.around(model, torch.optim.SGD(model.parameters(), lr=0.05))
    for rows in steps.batches(epochs(len(seen), 32, 1500)):
        drawn = model.chains
        for _ in range(2):
            _, drawn = model.again(drawn)
        loss = model.free_energy(seen[rows]).mean() - model.free_energy(drawn).mean()
        loss.backward()
        steps.step(loss)
        if not steps.is_probe:
            model.chains.copy_(drawn)
    chance, _ = model.again(asked)
    return float(F.binary_cross_entropy(chance, asked, reduction="none").sum(-1).mean())


def spiral(count: int) -> Tensor:
    """An arm of one and a half turns."""
    angle = 3 * math.pi * torch.rand(count, 1).sqrt()
    return angle / 6 * torch.cat([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(count, 2)


@training(
    kind="generative",
    metric="energy distance",
    about="hinge GAN with spectral norm, critic four times as fast as the generator, whose loss has either sign; Adam",
    is_better_higher=False,
)
def hinge_players(seed: int, keeper: Keeper) -> float:
    """Where the critic is sure its loss is exactly what the margin leaves."""
    torch.manual_seed(seed)
    generator = layers(8, 64, 64, 2)
    critic = nn.Sequential(
        *(spectral_norm(nn.Linear(2, 64)), nn.LeakyReLU(0.2), spectral_norm(nn.Linear(64, 64)), nn.LeakyReLU(0.2)),
        nn.Linear(64, 1),
    )
    making = torch.optim.Adam(generator.parameters(), lr=5e-4, betas=(0.0, 0.9))
    judging = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.0, 0.9))
    of_critic = keeper.around(critic, judging, also={"generator": generator, "making": making})
    of_generator = keeper.around(generator, making, reads_data=False)
    for _ in of_critic.batches(range(800)):
        made = generator(torch.randn(64, 8))
        loss = F.relu(1 - critic(spiral(64))).mean() + F.relu(1 + critic(made.detach())).mean()
        loss.backward()
        of_critic.step(loss)
        if of_critic.is_probe:
            continue
        loss = -critic(made).mean()
        loss.backward()
        of_generator.step(loss)
        judging.zero_grad()  # what came through the critic is not for it
    torch.manual_seed(0)
    with torch.no_grad():
        return energy_distance(generator(torch.randn(1500, 8)), spiral(1500))


class Sines(nn.Module):
    """Layers whose activation is a sine, with the first of a high frequency (Sitzmann et al. 2020)."""

    def __init__(self, wide: int = 48) -> None:
        super().__init__()
        self.inside = nn.ModuleList([nn.Linear(1, wide), nn.Linear(wide, wide), nn.Linear(wide, wide)])
        self.out = nn.Linear(wide, 1)
        nn.init.uniform_(self.inside[0].weight, -1.0, 1.0)  # type: ignore[arg-type]
        for layer in (*self.inside[1:], self.out):
            bound = math.sqrt(6 / wide) / 30
            nn.init.uniform_(layer.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """Times in, amplitudes out."""
        for layer in self.inside:
            x = torch.sin(30 * layer(x))
        out: Tensor = self.out(x)
        return out


@training(
    kind="signal",
    metric="decibels over the error",
    about="SIREN for one second of a chirp, 128 moments a batch, the loss falls over four decades and jitters; Adam",
)
def chirp(seed: int, keeper: Keeper) -> float:
    """One signal is all there is: what is asked for is to fit it."""
    torch.manual_seed(seed)
    moments = torch.linspace(-1, 1, 2000)[:, None]
    sound = torch.sin(40 * (moments + 1.2).square()) * torch.exp(-moments.square())
    model = Sines()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-4)
    steps = keeper.around(model, optimizer)
    for rows in steps.batches(epochs(2000, 128, 1500)):
        loss = F.mse_loss(model(moments[rows]), sound[rows])
        loss.backward()
        steps.step(loss)
    with torch.no_grad():
        return float(10 * torch.log10(sound.square().mean() / F.mse_loss(model(moments), sound)))
