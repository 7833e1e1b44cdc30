"""What recording costs a training step: the same loop with and without it, step by step in turn.

    python bench/recording.py [--size toy] [--steps 400]

Prints the medians, their ratio, and the time spent inside the recording calls alone, which is the steadier figure.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LambdaLR

import sealegs
from sealegs.lab.data import Batch
from sealegs.lab.model import Transformer
from sealegs.lab.settings import SIZES, Settings
from sealegs.lab.sources import open_data
from sealegs.lab.train import build_optimizer, lr_share, resolved, update
from sealegs.recovery.state import Trainee
from sealegs.signals.collect import Signal


def record(watch: sealegs.Watch, step: int, signals: dict[str, Signal], batch: Batch) -> None:
    """What the trainer does each step besides training (sealegs/lab/train.py, run_steps)."""
    signals |= {"batch_index": batch.index, "batch_hash": batch.hash, "sources": batch.sources}
    if step % 10 == 0:
        signals |= {"tokens_per_s": 1.0, "token_entropy": batch.token_entropy}
    watch.see(step, **signals)


def measure(settings: Settings, steps: int, folder: Path) -> None:
    """Train, recording every other step, and print what that cost."""
    torch.set_num_threads(settings.threads)
    data = open_data(settings)
    model = Transformer(settings.model).to(settings.device)
    optimizer = build_optimizer(model, settings.optimizer)
    trainee = Trainee(
        model=model,
        optimizer=optimizer,
        scheduler=LambdaLR(optimizer, partial(lr_share, settings.optimizer, steps)),
        scaler=GradScaler(settings.device, enabled=False),
        data=data.training,
    )
    bare: list[float] = []
    recorded: list[float] = []
    inside: list[float] = []
    with sealegs.Watch(folder / "run") as watch:
        for step in range(steps + 20):
            batch = data.training.next()
            began = time.perf_counter()
            signals = update(trainee, model.losses, batch, settings)
            trained = time.perf_counter()
            if step % 2:
                record(watch, step, signals, batch)
            ended = time.perf_counter()
            if step >= 20:  # warm-up
                (recorded if step % 2 else bare).append(ended - began)
                if step % 2:
                    inside.append(ended - trained)
    without, with_it = statistics.median(bare), statistics.median(recorded)
    share = statistics.mean(inside) / without
    print(f"{settings.device}, {torch.get_num_threads()} threads, torch {torch.__version__}, {steps} steps")
    print(f"step without recording   {without * 1e3:8.2f} ms (median of {len(bare)})")
    print(f"step with recording      {with_it * 1e3:8.2f} ms (median of {len(recorded)}): {with_it / without - 1:+.2%}")
    print(f"inside the recording     {statistics.mean(inside) * 1e6:8.0f} us (mean): {share:.2%} of a step")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="toy", choices=SIZES)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        measure(resolved(replace(SIZES[options.size], steps=options.steps)), options.steps, Path(scratch))
