"""What it costs to have batches computed again on the neighbouring rank, and how often a rank is named that is sound.

    python bench/recompute.py [--checks N]
    python bench/recompute.py --cost [--device cuda] [--width N]

The first simulates checks of 8 ranks whose answers are the same but for the order of additions: each answer is the
right one and noise. Runs have 2,000 checks each, a million steps with the default, and begin without a bound. Prints
Markdown: false names, and the share of faults that are found by their size in usual noise.

The second trains a small transformer on two processes with gloo, and times steps that are checked beside steps that are
not: what a check costs in steps, and so as a share of 500 of them.
"""

import argparse
import os
import sys
import tempfile
import time
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.multiprocessing.spawn import spawn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import sealegs
from sealegs.guard_options import Telemetry
from sealegs.recovery.corruption import Answer, Bound, Wrong, disputed, ranks_of, who_is_wrong
from sealegs.recovery.recomputation import EVERY
from sealegs.signals.gradient_digest import PARTS

WORLD, CHECKS_OF_A_RUN = 8, 2000
USUAL = 1e-5
"""The noise of an answer, as a share of the gradient."""
KINDS = ("normal", "heavy tails", "of another size at each check")
FAULTS = (10, 30, 100, 300, 1000)
"""In usual noise."""
Floats = NDArray[np.float64]


def noise_of(kind: str, checks: int, draw: np.random.Generator) -> Floats:
    """What answers are off by: by check, rank, pass of the step and part of the gradient."""
    noise = draw.standard_normal((checks, WORLD, 4, PARTS))
    if kind == "heavy tails":  # of the whole answer, at each computation
        noise *= np.abs(draw.standard_t(3, (checks, WORLD, 4, 1)))
    if kind == "of another size at each check":
        noise *= np.exp(draw.standard_normal((checks, 1, 1, 1)))
    return USUAL * noise


PASSES: dict[Answer, int] = {"own": 0, "next": 1, "third": 2, "again": 3}


def judged(noise: Floats, bound: Bound) -> tuple[Wrong | None, Bound]:
    """One check, as the guard makes it."""
    neighbours = np.roll(noise[:, PASSES["next"]], -1, axis=0)
    distances = np.abs(noise[:, PASSES["own"]] - neighbours).max(1).tolist()
    owners = disputed(distances, bound)
    if not owners:
        return None, bound.with_measured(distances)
    apart: dict[int, dict[tuple[Answer, Answer], float]] = {}
    for owner in owners:
        answers = {name: noise[rank, PASSES[name]] for name, rank in ranks_of(owner, WORLD).items()}
        apart[owner] = {
            (one, other): float(np.abs(answers[one] - answers[other]).max()) for one, other in combinations(answers, 2)
        }
    wrong = who_is_wrong(owners, WORLD, apart, bound, bound.usual(distances))
    return wrong, bound if wrong is not None else bound.with_measured(distances)


def simulate(checks: int) -> None:
    """Print the table of false names and faults that are found."""
    draw = np.random.default_rng(0)
    print("| noise | checks | false names | " + " | ".join(f"found, {size} times the noise" for size in FAULTS) + " |")
    print("|---|---|---|" + "---|" * len(FAULTS))
    for kind in KINDS:
        false, bound = 0, Bound(is_exact=False)
        found, tries = dict.fromkeys(FAULTS, 0), 0
        for first in range(0, checks, CHECKS_OF_A_RUN):
            bound = Bound(is_exact=False, smallest=float(np.finfo(np.float32).eps))
            for noise in noise_of(kind, min(CHECKS_OF_A_RUN, checks - first), draw):
                wrong, bound = judged(noise, bound)
                false += wrong is not None
            for noise in noise_of(kind, 20, draw):
                tries += 1
                for size in FAULTS:
                    struck = noise.copy()
                    struck[3, PASSES["own"], 0] += size * USUAL
                    found[size] += judged(struck, bound)[0] == Wrong((3,))
        shares = " | ".join(f"{count / tries:.0%}" for count in found.values())
        print(f"| {kind} | {checks:,} | {false} | {shares} |", flush=True)


def train(rank: int, folder: str, device: str, width: int, steps: int) -> None:
    """Train on one of two ranks; rank 0 prints what a check costs."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout=0.1, batch_first=True, device=device)
    inner = nn.Sequential(nn.TransformerEncoder(layer, 8), nn.Linear(width, 512, device=device))
    model = nn.parallel.DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
    every = 5
    options = Telemetry(recompute=every, sample_every=0)
    took: dict[bool, list[float]] = {True: [], False: []}
    with sealegs.Guard(model, optimizer, run=Path(folder) / "run", telemetry=options) as guard:
        began, is_checked = time.perf_counter(), False
        for batch in guard.batches([torch.randn(8, 128, width) for _ in range(steps)]):
            is_checked |= guard.is_probe
            number = guard.number
            loss = model(batch.to(device)).square().mean()
            loss.backward()
            guard.step(loss)
            if guard.number == number:
                continue
            if device == "cuda":
                torch.cuda.synchronize()
            now = time.perf_counter()
            if number > every:
                took[is_checked].append(now - began)
            began, is_checked = now, False
    if rank == 0:
        checked, plain = median(took[True]), median(took[False])
        size = sum(parameter.numel() for parameter in model.parameters())
        extra = checked / plain - 1
        print(
            f"{size / 1e6:.0f}M numbers on two ranks ({device}): a step {1e3 * plain:.1f} ms, one that is checked ",
            end="",
        )
        print(f"{1e3 * checked:.1f} ms; a check is {extra:.2f} steps, {extra / EVERY:.3%} of {EVERY}")
    dist.destroy_process_group()


def main() -> None:
    """See the docstring of the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checks", type=int, default=100_000)
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--steps", type=int, default=61)
    arguments = parser.parse_args()
    if not arguments.cost:
        simulate(arguments.checks)
        return
    with tempfile.TemporaryDirectory() as folder:
        given: Any = (folder, arguments.device, arguments.width, arguments.steps)
        spawn(train, given, nprocs=2)


if __name__ == "__main__":
    main()
