"""A GAN that learns four heaps of points on a plane in more dimensions, until its discriminator is made to win."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim import Adam

from sealegs.drills.catalogue import Drill
from sealegs.drills.loops import Unseen
from sealegs.errors import RunHalted
from sealegs.guard import Guard
from sealegs.guard_options import Telemetry

BATCH, NOISE, WIDTH, POINT = 64, 4, 48, 16
LR = 1e-3
BLUR = 1.0
"""Noise on what the discriminator sees: without it, what is real and what is made lie on surfaces that never meet."""
STRONG, WEAK = 5e-3, 1e-5
"""The learning rates of discriminator and generator where the discriminator wins."""


def real(count: int, draws: torch.Generator) -> Tensor:
    """Points of four heaps, which lie on one plane."""
    plane = torch.randn(2, POINT, generator=torch.Generator().manual_seed(7))
    angle = torch.randint(4, (count,), generator=draws) * torch.pi / 2
    spread = 0.1 * torch.randn(count, 2, generator=draws)
    return (2 * torch.stack([angle.cos(), angle.sin()], 1) + spread) @ plane / 1.5


def _network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(inputs, WIDTH), nn.LeakyReLU(0.2)),
        *(nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(0.2)),
        nn.Linear(WIDTH, outputs),
    )


def losses(made: Tensor, discriminator: nn.Module, sample: Tensor) -> tuple[Tensor, Tensor]:
    """The losses of the discriminator and of the generator; each has gradients of its own network alone."""
    ones, zeros = torch.ones(len(sample), 1), torch.zeros(len(sample), 1)
    judged = binary_cross_entropy_with_logits(discriminator(sample), ones)
    judged = judged + binary_cross_entropy_with_logits(discriminator(made.detach()), zeros)
    held = {name: weight.detach() for name, weight in discriminator.named_parameters()}
    return judged, binary_cross_entropy_with_logits(functional_call(discriminator, held, (made,)), ones)


@dataclass(frozen=True, slots=True, kw_only=True)
class GanLoop:
    """The GAN, trained from step 0; broken where there is a drill."""

    seed: int
    at: int
    last: int
    ranks: ClassVar[int] = 1

    def __str__(self) -> str:
        return f"a GAN of four heaps, seed {self.seed}"

    def prepare(self) -> None:
        """Its runs share nothing."""

    def ending(self, folder: Path, drill: Drill | None, *, guarded: bool, without: int = 0) -> float:
        """How far its points are from the real ones at the end; NaN if the run was halted."""
        torch.manual_seed(self.seed)
        draws = torch.Generator().manual_seed(self.seed + without)
        generator, discriminator = _network(NOISE, POINT), _network(POINT, 1)
        model = nn.ModuleDict({"generator": generator, "discriminator": discriminator})
        optimizers = [
            Adam(generator.parameters(), lr=LR, betas=(0.5, 0.9)),
            Adam(discriminator.parameters(), lr=LR, betas=(0.5, 0.9)),
        ]
        try:
            with Guard(model, optimizers, run=folder, act=guarded, telemetry=Telemetry(sinks=[Unseen()])) as guard:
                blur = BLUR
                while guard.number < self.last:
                    if drill is not None and guard.number == self.at:
                        blur = 0.0
                        for optimizer, rate in zip(optimizers, (WEAK, STRONG), strict=True):
                            optimizer.param_groups[0]["lr"] = rate
                        guard.watch.note("fault", text=f"rates {WEAK} and {STRONG} instead of {LR}, and no noise")
                    made = generator(torch.randn(BATCH, NOISE, generator=draws))
                    seen, sample = (
                        points + blur * torch.randn(BATCH, POINT, generator=draws)
                        for points in (made, real(BATCH, draws))
                    )
                    judged, fooled = losses(seen, discriminator, sample)
                    (judged + fooled).backward()
                    guard.step(
                        (judged + fooled).detach(),
                        discriminator_loss=judged.detach(),
                        generator_loss=fooled.detach(),
                    )
                guard.loop.finish()
                guard.watch.note("end", reason="finished")  # where it is broken on purpose, the distance says how well
        except RunHalted:
            return float("nan")
        return self._distance(generator)

    @torch.no_grad()
    def _distance(self, generator: nn.Module) -> float:
        """The energy distance between points of the generator and real ones: 0 where they are alike."""
        draws = torch.Generator().manual_seed(self.seed + 1)
        made, sample = generator(torch.randn(1000, NOISE, generator=draws)), real(1000, draws)
        between, of_made, of_real = (
            torch.cdist(one, other).mean() for one, other in ((made, sample), (made, made), (sample, sample))
        )
        return float(2 * between - of_made - of_real)
