"""The lab on one GPU: does it train, resume and scale its losses there? What guarding costs is in bench/overhead.py.

    python bench/lab_on_gpu.py TOKENS.npy [--steps 200] [--out FOLDER] [--size x1] [--device cuda]

TOKENS.npy holds token ids below the size's vocabulary. Needs torch and numpy alone. Writes results.json and the run's
metrics.jsonl to the folder, and prints a table. `--device cpu --size nano` tries the script itself.
"""

import argparse
import json
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sealegs.lab.settings import SIZES, CadenceSettings, DataSettings, Settings
from sealegs.lab.sources import open_data
from sealegs.lab.train import resolved, train
from sealegs.vocabulary import Event, Row


class Printed:
    """A sink for machines without a display library."""

    name = "print"

    def start(self, manifest: Mapping[str, Any]) -> None:
        """Nothing to get ready."""

    def row(self, row: Row) -> None:
        """Every tenth row."""
        if int(row["step"]) % 10 == 0:
            shown = {
                name: row[name] for name in ("step", "loss", "grad_norm", "tokens_per_s", "eval_loss") if name in row
            }
            print(shown, flush=True)

    def event(self, event: Event) -> None:
        """Every event."""
        print(event.kind, dict(event.detail), flush=True)

    def close(self) -> None:
        """Nothing is held."""


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run; its own reader wants msgspec."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def train_size(settings: Settings, scratch: Path, out: Path) -> dict[str, Any]:
    """The run of the issue: so many steps, tokens a second, the loss curve."""
    began = time.perf_counter()
    result = train(settings, open_data(settings), scratch / "run", sinks=[Printed()])
    rows = rows_of(scratch / "run")
    shutil.copy(scratch / "run" / "metrics.jsonl", out / "metrics.jsonl")
    shutil.copy(scratch / "run" / "manifest.json", out / "manifest.json")
    speeds = [row["tokens_per_s"] for row in rows if "tokens_per_s" in row]
    losses = [row["loss"] for row in rows if "loss" in row]
    return {
        "steps": result.steps,
        "wall_s": time.perf_counter() - began,
        "tokens_per_s_median_after_warm_up": statistics.median(speeds[len(speeds) // 4 :]),
        "loss_first": losses[0],
        "loss_last_10_mean": statistics.mean(losses[-10:]),
        "eval_loss": result.eval_loss,
        "unigram_entropy": result.unigram_entropy,
        "all_finite": all(np.isfinite(losses)),
    }


def same_after_resume(settings: Settings, scratch: Path) -> dict[str, Any]:
    """Stop after a third, resume; compare with the uninterrupted run, and that one with its own repetition."""
    short = replace(
        settings, steps=30, cadence=CadenceSettings(evaluate_steps=0, evaluate_batches=2, checkpoint_steps=0)
    )
    for name in ("whole", "again"):
        train(short, open_data(short), scratch / name)
    asked = iter([None] * 10)
    train(short, open_data(short), scratch / "cut", should_stop=lambda: next(asked, "test"))
    train(short, open_data(short), scratch / "cut", resume=True)
    whole, again, cut = (
        np.array([row["loss"] for row in rows_of(scratch / name) if "loss" in row])
        for name in ("whole", "again", "cut")
    )
    return {
        "steps": 30,
        "largest_difference_of_a_resumed_run": float(abs(whole - cut).max()),
        "largest_difference_of_a_repeated_run": float(abs(whole - again).max()),
    }


def main() -> None:
    """Measure everything, write and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokens")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("lab-on-gpu"))
    parser.add_argument("--size", default="x1", choices=SIZES)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    on_gpu = options.device == "cuda"
    size = SIZES[options.size]
    settings = resolved(
        replace(
            size,
            steps=options.steps,
            device=options.device,
            compile=on_gpu,
            data=DataSettings(sources={options.tokens: 1.0}, batch=size.data.batch),
            cadence=CadenceSettings(evaluate_steps=50, evaluate_batches=8, checkpoint_steps=100),
        )
    )
    eager = replace(settings, compile=False)
    fp16 = replace(eager, dtype="fp16", steps=40, cadence=CadenceSettings(evaluate_steps=0, checkpoint_steps=0))
    results: dict[str, Any] = {
        "machine": torch.cuda.get_device_name() if on_gpu else platform.processor(),
        "versions": {"torch": torch.__version__, "python": platform.python_version(), "numpy": np.__version__},
        "size": options.size,
        "dtype": settings.dtype,
        "tokens_a_step": settings.data.batch * settings.model.context,
    }
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        parts: dict[str, Any] = {
            "training": lambda: train_size(settings, scratch, options.out),
            "resume": lambda: same_after_resume(eager, scratch / "r"),
            "fp16 with loss scaling": lambda: train_size(fp16, scratch / "f", (scratch / "fp16")),
        }
        (scratch / "fp16").mkdir()
        for name, part in parts.items():
            results[name] = part()
            print(f"{name}: {json.dumps(results[name])}", flush=True)
            (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
