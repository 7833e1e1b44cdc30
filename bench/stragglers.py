"""How often a slow rank is named, and how often one that is not slow: own times of ranks are simulated.

    python bench/stragglers.py [--checks N]

A check looks at the last 50 steps of all ranks, as the guard does every 25 steps. Times have noise of their own at each
rank, beside what makes a step long for all: normal in the logarithm, heavy-tailed (t with 3 degrees), or such that a
long step follows a long one (an autoregression of 0.5, or 0.9). Prints Markdown: false names where no rank is slow, and
the share of checks in which a rank that is 20 % slower is named. The checks are those of all lines of 8 ranks together;
1,000 ranks get a twentieth.
"""

import argparse
import math
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from sealegs.detectors.straggler import SURE
from sealegs.signals.own_time import SLOW, WINDOW, slowest

NOISES = ("follows 0.9", "normal", "heavy tails", "follows 0.5")
STEPS = torch.arange(WINDOW, dtype=torch.float64)
FOLLOWING = {
    kind: torch.where(
        STEPS[:, None] >= STEPS,
        float(kind.split()[1]) ** (STEPS[:, None] - STEPS).clamp(min=0)
        * torch.where(STEPS > 0, math.sqrt(1 - float(kind.split()[1]) ** 2), 1.0),
        0.0,
    )
    for kind in NOISES
    if kind.startswith("follows")
}
"""What makes noise that follows itself of noise that does not."""
SIZES = (0.02, 0.05, 0.1, 0.3)
TAKES = 1.2


def own_times(world: int, kind: str, size: float, generator: torch.Generator) -> Tensor:
    """The times of a window, by step and rank."""
    shocks = torch.randn(WINDOW, world, generator=generator, dtype=torch.float64)
    if kind == "heavy tails":
        squares = torch.randn(3, WINDOW, world, generator=generator, dtype=torch.float64).square().mean(0)
        shocks = shocks / squares.sqrt() / math.sqrt(3)
    elif kind.startswith("follows"):
        shocks = FOLLOWING[kind] @ shocks
    common = (0.2 * torch.randn(WINDOW, 1, generator=generator, dtype=torch.float64)).exp()
    return common * (size * shocks).exp()


def named(window: Tensor) -> int | None:
    """The rank that would be reported."""
    rank, by, surprise = slowest(window, (0,) * window.shape[1]).tolist()
    return int(rank) if by >= SLOW and surprise >= SURE else None


def main() -> None:
    """See the docstring of the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checks", type=int, default=100_000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    print("| noise of a rank | size | ranks | checks | false names | a rank 20 % slower is named |")
    print("|---|---|---|---|---|---|")
    for world in (8, 1000):
        checks = max(arguments.checks // (len(SIZES) * len(NOISES)) // (1 if world == 8 else 20), 1)
        for kind in NOISES:
            for size in SIZES:
                false = sum(named(own_times(world, kind, size, generator)) is not None for _ in range(checks))
                found, tries = 0, max(checks // 30, 20)
                for _ in range(tries):
                    window = own_times(world, kind, size, generator)
                    window[:, 3] *= TAKES
                    found += named(window) == 3
                print(f"| {kind} | {size:.0%} | {world:,} | {checks:,} | {false} | {found / tries:.1%} |", flush=True)


if __name__ == "__main__":
    main()
