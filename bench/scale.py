"""What a step of many ranks costs the guard: rows of up to 4,096 ranks are simulated in one process.

    python bench/scale.py [--ranks N ...] [--steps STEPS] [--wire]

Prints Markdown. The first table has the size of a row and what one rank does with the rows of all: to merge them and to
judge the result, as CPU time, with the memory that they take. The second has what a run folder grows by in a step. The
third has the roll call of ranks of which one is missing: how often the store is asked, by all and by the one that asks
most. `--wire` measures one all-gather of such rows among real processes over gloo on this machine, for the constants of
docs/scale.md. Times are of this machine; sizes and counts are not.
"""

import argparse
import math
import multiprocessing
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import sealegs
from sealegs import judge
from sealegs.guard_options import Telemetry
from sealegs.signals.collective import absent
from sealegs.signals.ranks import FIELDS, MERGED, Ranks, Standing, contribution, merge

WIDTHS = {"a model of 10 groups": 150, "a model of 256 groups": 2000}
"""Numbers in a row: of a small model, and of one that is measured in as many groups as there may be."""
FAR_APART = 3
"""Parts of a thousand by which the rows of simulated ranks differ."""


def rows_of(world: int, width: int, step: int) -> Tensor:
    """The rows of a step, as that of each rank would be."""
    generator = torch.Generator().manual_seed(step)
    noise = 1 + FAR_APART / 1000 * torch.randn(world, generator=generator, dtype=torch.float64)
    one = contribution(
        torch.tensor(2.5), torch.tensor(1.0 / world), torch.tensor(0.5), torch.tensor(3.0), torch.tensor(1.0), step,
        torch.tensor([3, 4]),
    )  # fmt: skip
    rows = one.repeat(world, 1)
    for name in ("loss", "square", "worst_norm", "norm_before"):
        rows[:, FIELDS.index(name)] *= noise
    return torch.cat((rows, torch.ones(world, width, dtype=torch.float64)), 1)


def cpu_ms(do: Callable[[], object], times: int = 20) -> float:
    """The median CPU time of a call."""
    do()
    spent = []
    for _ in range(times):
        began = time.process_time()
        do()
        spent.append(time.process_time() - began)
    return median(spent) * 1000


def verdicts(worlds: list[int]) -> None:
    """What one rank does with the rows of all."""
    print("| ranks | row | rows of all | merged, ranks alike | in 64 groups | sums of the rest | judged |")
    print("|---|---|---|---|---|---|---|")
    detectors = judge.standard()
    begun = judge.begin(detectors)
    for world in worlds:
        for model, width in WIDTHS.items():
            rows = rows_of(world, width, 7)
            head, rest = rows.split([len(FIELDS), width], 1)
            groups = [rank // max(world // 64, 1) * max(world // 64, 1) for rank in range(world)]
            standing = Standing.of(groups, groups, rows.device)
            found = dict(zip(MERGED, merge(head).tolist(), strict=True))
            row = {"step": 7.0, "loss": found["loss"], "grad_norm": found["grad_norm"]}
            told = (
                f"{cpu_ms(partial(merge, head)):.2f} ms",
                f"{cpu_ms(partial(merge, head, standing)):.2f} ms",
                f"{cpu_ms(partial(rest.sum, 0)):.2f} ms",
                f"{cpu_ms(partial(judge.fold, detectors, begun, row)):.2f} ms",
            )
            size, all_of_it = rows.shape[1] * 8, rows.numel() * 8
            print(f"| {world:,} | {size / 1000:.1f} kB ({model}) | {all_of_it / 1e6:.2f} MB | {' | '.join(told)} |")


class Crowd(Ranks):
    """This rank, and others whose rows are much like its own."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self.world = world

    def gather(self, mine: Tensor, step: int) -> Tensor:
        """Rows like this one; one of them has a NaN at one step."""
        noise = torch.Generator().manual_seed(step)
        rows = mine.repeat(self.world, 1)
        rows[:, FIELDS.index("square")] *= 1 + FAR_APART / 1000 * torch.rand(
            self.world, generator=noise, dtype=torch.float64
        )
        if step == STRUCK:
            rows[self.world // 2, FIELDS.index("loss")] = math.nan
        return rows


STRUCK = 20
"""The step at which one of the ranks has a NaN."""


def folder_of(world: int, steps: int, folder: Path) -> Counter[str]:
    """The bytes of each file in the run folder of so many ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with sealegs.Guard(model, optimizer, run=folder, clip=1.0, telemetry=Telemetry(ranks=Crowd(world))) as guard:
        for _ in range(steps):
            loss = model(torch.randn(16, 8)).square().mean()
            loss.backward()
            guard.step(loss)
    return Counter({str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()})


def folders(worlds: list[int], steps: int) -> None:
    """What a run folder grows by."""
    print(f"\n| ranks | files | bytes of rows a step | bytes of events, {steps} steps |\n|---|---|---|---|")
    for world in worlds:
        with tempfile.TemporaryDirectory() as folder:
            sizes = folder_of(world, steps, Path(folder) / "run")
        rows = sum(size for name, size in sizes.items() if name.startswith("metrics"))
        print(f"| {world:,} | {len(sizes)} | {rows / steps:.0f} | {sizes['events.jsonl']:,} |")


class CountedStore:
    """A store in this process that counts what each thread asks of it."""

    def __init__(self) -> None:
        torch_own: Any = dist
        self._store = torch_own.HashStore()
        self.by_rank = Counter[int]()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def call(*arguments: Any) -> Any:
            self.by_rank[threading.get_ident()] += 1
            return method(*arguments)

        return call


def roll_calls(worlds: list[int]) -> None:
    """How often the store is asked."""
    print("\n| ranks, one missing | requests | a rank, median | the one that asks most |\n|---|---|---|---|")
    for world in worlds:
        store, deadline = CountedStore(), time.monotonic() + 2.0
        threads = [
            threading.Thread(target=absent, args=(store, "step-7", rank, world, deadline)) for rank in range(world - 1)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        asked = sorted(store.by_rank.values())
        print(f"| {world:,} | {sum(asked):,} | {median(asked):.0f} | {asked[-1]} |")


def wire(rank: int, world: int, store: str) -> None:
    """One all-gather among real processes."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    torch.set_num_threads(1)
    for width in (len(FIELDS), *WIDTHS.values()):
        mine, spent = torch.ones(width, dtype=torch.float64), []
        out = torch.empty(world * width, dtype=torch.float64)
        for _ in range(300):
            dist.barrier()
            began = time.perf_counter()
            dist.all_gather_into_tensor(out, mine)
            spent.append(time.perf_counter() - began)
        if rank == 0:
            print(f"| {world} | {width * 8 / 1000:.1f} kB | {median(spent) * 1e6:.0f} us |", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """See the docstring of the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--wire", action="store_true", help="measure one all-gather among 2 and 4 real processes")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.wire:
        print("| processes | row | all-gather |\n|---|---|---|", flush=True)
        for world in (2, 4):
            with tempfile.TemporaryDirectory() as folder:
                context = multiprocessing.get_context("spawn")
                ranks = [context.Process(target=wire, args=(rank, world, f"{folder}/store")) for rank in range(world)]
                for process in ranks:
                    process.start()
                for process in ranks:
                    process.join()
        return
    verdicts(arguments.ranks)
    folders(arguments.ranks, arguments.steps)
    roll_calls([world for world in arguments.ranks if world <= 1024])


if __name__ == "__main__":
    main()
