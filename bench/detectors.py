"""What the streaming statistic finds: on healthy loss curves nothing, on injected trouble everything.

    python bench/detectors.py FOLDER

FOLDER holds healthy runs as CSV files with the columns step, loss and, in at least one of them, grad_norm.
"""

import argparse
import csv
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sealegs.stats.streaming import scan

Column = NDArray[np.float64]
GATE, ALARM, YOUNG_ALARM = 1e-4, 1e-5, 1e-6
SETTLED, GROWN = 150, 1000

# Two public traces, relative to their own level before: BLOOM-176B from step 31214 on, BigScience 104B from 11446 on.
TRACES = {
    "BLOOM-176B": (
        np.array([2.199, 2.220, 2.595, 2.242, 2.345, 5.098, 3.492, 3.213, 2.805]) / 2.199,
        np.array([0.242, 0.947, 2.390, 15.9, 145, 960, 353, 379, 650]) / 0.242,
    ),
    # its published norms begin in the middle of the rise: the first one is taken as twice the level
    "BigScience 104B": (np.array([3.063, 3.114, 7.712]) / 3.063, np.array([12953, 262623, 254699]) / 12953 * 2),
}


def read(folder: Path) -> dict[str, dict[str, Column]]:
    """Every CSV file with a loss column, by name."""
    logs = {}
    for path in sorted(folder.glob("*.csv")):
        with path.open() as file:
            rows = list(csv.DictReader(file))
        if rows and "loss" in rows[0]:
            logs[path.stem] = {key: np.array([float(row[key] or "nan") for row in rows]) for key in rows[0]}
    return logs


def healthy(logs: dict[str, dict[str, Column]]) -> None:
    """False gates and alarms, and whether p means what it says."""
    steps = gates = alarms = hundredths = thousandths = 0
    began = time.perf_counter()
    for log in logs.values():
        p, _ = scan(np.log(log["loss"]), gate=GATE)
        late = p[SETTLED:]
        steps += len(late)
        gates += int((late < GATE).sum())
        alarms += int((p[SETTLED:GROWN] < YOUNG_ALARM).sum() + (p[GROWN:] < ALARM).sum())
        hundredths += int((late < 0.01).sum())
        thousandths += int((late < 0.001).sum())
    speed = sum(len(log["loss"]) for log in logs.values()) / (time.perf_counter() - began)
    print(f"{len(logs)} healthy loss curves, {steps:,} steps from step {SETTLED} on; {speed:,.0f} values a second")
    print(f"gates {gates / steps * 1e5:.1f} per 100k (nominal 10), alarms {alarms} (nominal {steps * ALARM:.1f})")
    print(
        f"p < 0.01: {hundredths / steps / 0.01:.2f} of nominal; p < 0.001: {thousandths / steps / 0.001:.2f} of nominal"
    )


def places(random: np.random.Generator, log: dict[str, Column], count: int) -> list[int]:
    """Where to inject: anywhere in the grown part of a run that leaves room behind."""
    return [int(place) for place in random.integers(GROWN + 200, len(log["loss"]) - 800, count)]


def traces(log: dict[str, Column], random: np.random.Generator) -> None:
    """Both traces at 150 places: gated before the loss peaks, and an alarm? Each signal has half the chance."""
    for name, (loss, norm) in TRACES.items():
        peak = int(loss.argmax())
        gated = alarmed = 0
        for place in places(random, log, 150):
            found = []
            for signal, trace in (("loss", loss), ("grad_norm", norm)):
                values = log[signal][: place + len(trace)].copy()
                values[place:] = trace * np.median(values[place - 50 : place])
                found.append(scan(np.log(values), gate=GATE / 2)[0][place:])
            gated += bool((np.minimum(*found)[:peak] < GATE / 2).any())
            alarmed += bool((np.minimum(*found) < ALARM / 2).any())
        print(f"{name}: gate before the peak {gated / 150:.0%}, alarm {alarmed / 150:.0%} (150 places)")


def bursts(log: dict[str, Column], random: np.random.Generator) -> None:
    """Share of the steps of a burst that are gated."""
    kinds: dict[str, Callable[[float], float]] = {"to 9.0": lambda _: 9.0, "of +40 %": lambda level: 1.4 * level}
    for name, target in kinds.items():
        for length in (30, 60, 100):
            caught = []
            for place in places(random, log, 40):
                values = log["loss"][: place + length].copy()
                level = float(np.median(values[place - 50 : place]))
                values[place:] *= target(level) / level
                caught.append((scan(np.log(values), gate=GATE)[0][place:] < GATE).mean())
            print(f"burst {name}, {length} steps: {np.mean(caught):.1%} of its steps gated (40 places)")


def shifts(log: dict[str, Column], random: np.random.Generator) -> None:
    """How long a lasting +40 % is gated."""
    accepted = []
    for place in places(random, log, 40):
        values = np.log(log["loss"][: place + 700])
        values[place:] += math.log(1.4)
        gated = np.flatnonzero(scan(values, gate=GATE)[0][place:] < GATE)
        accepted.append(int(gated.max()) + 1 if len(gated) else 0)
    print(f"a lasting +40 % is accepted after {np.mean(accepted):.0f} steps, {max(accepted)} at most (40 places)")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    found = read(parser.parse_args().folder)
    healthy(found)
    longest = max((log for log in found.values() if "grad_norm" in log), key=lambda log: len(log["loss"]))
    generator = np.random.default_rng(0)
    traces(longest, generator)
    bursts(longest, generator)
    shifts(longest, generator)
