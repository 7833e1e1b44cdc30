"""How long a metrics file takes to open: the first time, from the column cache, and after it has grown.

    python bench/reading.py [--rows 1000000]

15 signals a row, random numbers with all their digits: the worst case for a parser.
"""

import argparse
import random
import tempfile
import time
from pathlib import Path

import sealegs
from sealegs.record import manifest
from sealegs.record.schema import COLUMN_CACHE, METRICS, to_line
from sealegs.record.writer import RunWriter

NUMBERS = (
    *("loss", "grad_norm", "lr", "tokens_per_s", "token_entropy", "param_norm", "moment1_norm", "moment2_norm"),
    *(f"activation_norm/{layer}" for layer in range(4)),
)


def row(step: int) -> bytes:
    """A line as the trainer writes it: 12 numbers, batch index, hash and sources; step and time besides."""
    numbers = {name: random.random() for name in NUMBERS}  # noqa: S311
    batch = {"batch_index": step, "batch_hash": f"{random.getrandbits(64):016x}", "sources": "grammar=8"}
    return to_line({"step": step, **numbers, **batch, "time": 1.7e9 + step})


def timed(what: str, folder: Path) -> None:
    """Open the run and print how long it took."""
    began = time.perf_counter()
    run = sealegs.open_run(folder)
    run.column("loss")
    print(f"{what:<42} {time.perf_counter() - began:6.2f} s  ({len(run.steps):,} rows, {len(run.signals)} signals)")


def measure(rows: int, folder: Path) -> None:
    """Write the file, then open it in each situation."""
    RunWriter.create(folder, manifest.describe("bench")).close()
    with (folder / METRICS).open("wb") as file:
        for step in range(rows):
            file.write(row(step))
    size = (folder / METRICS).stat().st_size
    print(f"{METRICS}: {size / 1e6:.0f} MB, {size / rows:.0f} bytes a row")
    timed("first time", folder)
    timed("from the column cache", folder)
    with (folder / METRICS).open("ab") as file:
        file.write(row(rows))
    timed("cache, one row appended (file checked whole)", folder)
    (folder / COLUMN_CACHE).unlink()
    timed("first time again", folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    options = parser.parse_args()
    sealegs.open_run  # noqa: B018 - import before the clock starts
    with tempfile.TemporaryDirectory() as scratch:
        measure(options.rows, Path(scratch) / "run")
