"""What it costs to be able to go back, and how long it takes to: on one GPU with the 49M-parameter x1, else with nano.

    python bench/recovery.py [--pairs 5] [--out FILE.json]

Blocks of 250 steps with the guard alone, and with a playbook (two snapshots in memory, one taken every 50 steps; a
checkpoint written by a thread in every block, twice as often as every 500 steps), one after the other on one model; the
median of the ratios of neighbours, and its 95 % interval. Then rollbacks, from the call to the end of the first step
after it. Needs torch and numpy alone.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.overhead import X1, Subject, interval, make, wait

import sealegs
from sealegs.guard_options import Checkpointing
from sealegs.lab.settings import SIZES
from sealegs.record.schema import EVENTS

STEPS = 250
"""In a block."""
ROLLBACKS = 5


class Numbers(Sequence[int]):
    """Data that can be gone back in; the batch itself stays the same."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, number: Any) -> Any:
        return number


class Loop:
    """A guarded loop that can be run for some steps at a time."""

    def __init__(self, subject: Subject, folder: Path, **options: Any) -> None:
        self.guard = sealegs.Guard(subject.model, subject.optimizers, run=folder, clip=1.0, **options)
        self._subject = subject
        self._batches: Iterator[int] = self.guard.batches(Numbers())

    def run(self, steps: int) -> None:
        """Take so many steps."""
        for _ in range(steps):
            next(self._batches)
            self.guard.step(self._subject.backward())


def main() -> None:
    """Measure what this machine can."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    subject = make(X1 if device == "cuda" else SIZES["nano"].model, 32 if device == "cuda" else 8, device)
    with tempfile.TemporaryDirectory() as scratch:
        plain = Loop(subject, Path(scratch) / "plain")
        able = Loop(
            subject,
            Path(scratch) / "able",
            playbook=sealegs.Playbook.standard(),
            checkpoint_every=Checkpointing(every=arguments.steps, snapshot_every=50),
        )
        for loop in (plain, able):
            loop.run(arguments.steps)  # compiles, allocates, captures
        seconds: dict[str, list[float]] = {"plain": [], "able": []}
        for pair in range(arguments.pairs):
            for name, loop in (("plain", plain), ("able", able)) if pair % 2 else (("able", able), ("plain", plain)):
                wait(device)
                began = time.perf_counter()
                loop.run(arguments.steps)
                wait(device)
                seconds[name].append((time.perf_counter() - began) / arguments.steps)
            print(f"pair {pair + 1} of {arguments.pairs}", file=sys.stderr, flush=True)
        ratios = sorted(100 * (a / b - 1) for a, b in zip(seconds["able"], seconds["plain"], strict=True))
        backs = [rolled_back(able, device) for _ in range(ROLLBACKS)]
        lines = (Path(scratch) / "able" / EVENTS).read_text().splitlines()
        events = [json.loads(line) for line in lines]
        results = {
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            "parameters": subject.model.parameter_count(),
            "ms": {name: 1000 * statistics.median(values) for name, values in seconds.items()},
            "percent": statistics.median(ratios),
            "interval": interval(ratios),
            "snapshots": [event["text"] for event in events if event["kind"] == "snapshots"],
            "checkpoints_s": [event["seconds"] for event in events if event["kind"] == "checkpoint"],
            "rollback_s": backs,
            "rollback_inside_s": [event["seconds"] for event in events if event["kind"] == "intervention"],
            "skipped": able.guard.watch.skips,
        }
        for loop in (plain, able):
            loop.guard.close()
    print(json.dumps(results, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1))


def rolled_back(loop: Loop, device: str) -> float:
    """Seconds from the wish to the end of the first step after it, with 70 steps in between two of them."""
    loop.run(70)
    wait(device)
    assert loop.guard.loop.recovery is not None
    began = time.perf_counter()
    number = loop.guard.number
    loop.guard.ask("rollback")
    assert loop.guard.number < number, "it went back"
    loop.run(1)
    wait(device)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
