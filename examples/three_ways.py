"""One run, three endings: undisturbed, with a fault that nobody treats, and with the same fault and a playbook.

    python examples/three_ways.py [--size nano|toy] [--steps N] [--fault FAULT@STEP] [--folder FOLDER]

At step 200 a bug in the schedule multiplies the learning rate by 30 for ten steps. The three endings share everything
up to step 180, data order and random state included, so what they differ by is the fault and what was done about it.
"""

import argparse
import math
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

import sealegs
from sealegs.errors import RunHalted, SealegsError
from sealegs.faults.practice import disturbed
from sealegs.faults.spec import parse
from sealegs.lab.branches import begin, branch
from sealegs.lab.settings import SIZES
from sealegs.lab.sources import open_data
from sealegs.lab.train import resolved
from sealegs.report.interventions import interventions
from sealegs.report.progress import progress

FORK = 180
BARS = "▁▂▃▄▅▆▇█"


def main() -> None:
    """Train the beginning once, each ending from there, and compare."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--size", choices=("nano", "toy"), default="toy")
    words.add_argument("--steps", type=int, default=400)
    words.add_argument("--fault", default="lr-spike:factor=30,steps=10@200")
    words.add_argument("--folder", type=Path, default=Path(f"experiments/demo-{time.strftime('%Y%m%d-%H%M%S')}"))
    chosen = words.parse_args()
    try:
        compare(chosen.size, chosen.steps, chosen.fault, chosen.folder)
    except SealegsError as error:
        print(f"{Path(__file__).name}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(f"\n{Path(__file__).name}: interrupted; what there is, is in {chosen.folder}", file=sys.stderr)
        sys.exit(130)


def compare(size: str, steps: int, fault: str, folder: Path) -> None:
    """Four run folders, and a page that compares them."""
    cadence = replace(SIZES[size].cadence, evaluate_steps=0)
    settings = resolved(replace(SIZES[size], steps=steps, playbook="standard", cadence=cadence))
    trouble = parse(fault)
    data = open_data(settings, say=partial(print, file=sys.stderr))
    print(f"the first {FORK} steps, which all three share", file=sys.stderr)
    begin(settings, data, folder / "beginning", steps=FORK, sinks=[progress(steps)])
    endings = {
        "clean": (settings, []),
        "unguarded": (replace(settings, shadow=True), [trouble]),  # looks, never acts
        "guarded": (settings, [trouble]),
    }
    lines = []
    clean = math.nan
    for name, (how, faults) in endings.items():
        print(f"{name}, from step {FORK} on", file=sys.stderr)
        disturb = partial(disturbed, faults, settings.model.vocabulary)
        try:
            result = branch(how, data, folder / "beginning", folder / name, disturb=disturb, sinks=[progress(steps)])
            loss = math.nan if result.eval_loss is None else result.eval_loss
        except RunHalted as halt:
            print(halt, file=sys.stderr)
            loss = math.nan
        clean = loss if name == "clean" else clean
        lines.append(row(name, loss, clean, sealegs.open_run(folder / name)))
    print(f"\n{fault}; {steps} steps of {size}; runs in {folder}\n")
    print(f"{'':<11}{'evaluation loss':>15}{'gap to clean':>14}{'worst loss':>12}   loss from step {FORK} on")
    print("\n".join(lines))
    print("\nWhat was done about it in the guarded run (sealegs interventions):\n")
    for done in interventions(sealegs.open_run(folder / "guarded").events):
        print(done)


def row(name: str, loss: float, clean: float, run: sealegs.Run) -> str:
    """One ending as a line of the table."""
    losses = run.column("loss")[(run.steps >= FORK) & run.logged("loss")]
    gap = "" if name == "clean" else f"{loss - clean:+.3f}"
    return f"{name:<11}{loss:>15.3f}{gap:>14}{np.max(losses):>12.3f}   {sparkline(losses)}"


def sparkline(values: Iterable[float], width: int = 40) -> str:
    """The highest value of each stretch, as a bar."""
    highest = [np.max(part) for part in np.array_split(np.asarray(list(values)), width) if len(part)]
    low, high = np.log(1.5), np.log(8)  # nats a token: the same scale for all
    places = [
        len(BARS) - 1 if not math.isfinite(value) else int((np.log(value) - low) / (high - low) * (len(BARS) - 1))
        for value in highest
    ]
    return "".join(BARS[min(max(place, 0), len(BARS) - 1)] for place in places)


if __name__ == "__main__":
    main()
