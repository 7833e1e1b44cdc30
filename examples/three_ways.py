"""One run, three endings: undisturbed, with a fault that nobody treats, and with the same fault and a playbook.

    python examples/three_ways.py [--size nano|toy] [--steps N] [--fault FAULT@STEP] [--folder FOLDER]

At step 200 a bug in the schedule multiplies the learning rate by 30 for ten steps. The three endings share everything
up to step 180, data order and random state included, so what they differ by is the fault and what was done about it.
Then the incident is run again until its cause is a tested one, and written up; a page shows the three runs together.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TextIO

import numpy as np

import sealegs
from sealegs.cli import dashboard, postmortem, replay
from sealegs.errors import RunHalted, SealegsError
from sealegs.faults.practice import disturbed
from sealegs.faults.spec import parse
from sealegs.lab.branches import begin, branch
from sealegs.lab.settings import SIZES
from sealegs.lab.sources import open_data
from sealegs.lab.train import resolved
from sealegs.report.commands.interventions import interventions
from sealegs.report.postmortem.build import folders_of
from sealegs.report.progress import progress

FORK = 180
ENDINGS = ("clean", "unguarded", "guarded")
BARS = "▁▂▃▄▅▆▇█"
tell = partial(print, file=sys.stderr, flush=True)


def main() -> None:
    """Train the beginning once, each ending from there, compare, explain."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--size", choices=("nano", "toy"), default="toy")
    words.add_argument("--steps", type=int, default=400)
    words.add_argument("--fault", default="lr-spike:factor=30,steps=10@200")
    words.add_argument("--folder", type=Path, default=Path(f"experiments/demo-{time.strftime('%Y%m%d-%H%M%S')}"))
    chosen = words.parse_args()
    try:
        compare(chosen.size, chosen.steps, chosen.fault, chosen.folder)
        explain(chosen.folder)
    except SealegsError as error:
        tell(f"{Path(__file__).name}: {error}")
        sys.exit(2)
    except KeyboardInterrupt:
        tell(f"\n{Path(__file__).name}: interrupted; what there is, is in {chosen.folder}")
        sys.exit(130)


def compare(size: str, steps: int, fault: str, folder: Path) -> None:
    """Four run folders, and a table that compares them."""
    cadence = replace(SIZES[size].cadence, evaluate_steps=0)
    settings = resolved(replace(SIZES[size], steps=steps, playbook="standard", cadence=cadence))
    trouble = parse(fault)
    data = open_data(settings, say=tell)
    tell(f"the first {FORK} steps, which all three share")
    begin(settings, data, folder / "beginning", steps=FORK, sinks=[progress(steps)])
    shadowed = replace(settings, shadow=True)  # looks, never acts
    lines = []
    clean = math.nan
    for name, how, faults in zip(ENDINGS, (settings, shadowed, settings), ([], [trouble], [trouble]), strict=True):
        tell(f"{name}, from step {FORK} on")
        disturb = partial(disturbed, faults, settings.model.vocabulary)
        try:
            result = branch(how, data, folder / "beginning", folder / name, disturb=disturb, sinks=[progress(steps)])
            loss = math.nan if result.eval_loss is None else result.eval_loss
        except RunHalted as halt:
            tell(halt)
            loss = math.nan
        clean = loss if name == "clean" else clean
        lines.append(row(name, loss, clean, sealegs.open_run(folder / name)))
    print(f"\n{fault}; {steps} steps of {size}; runs in {folder}\n")
    print(f"{'':<11}{'evaluation loss':>15}{'gap to clean':>14}{'worst loss':>12}   loss from step {FORK} on")
    print("\n".join(lines))
    print("\nWhat was done about it in the guarded run (sealegs interventions):\n")
    for done in interventions(sealegs.open_run(folder / "guarded").events):
        print(done)


def explain(folder: Path) -> None:
    """The first incident run again and written up, the three runs in one page, and where all of that is."""
    written = []
    for name in ("guarded", "unguarded"):  # what was treated has an outcome to tell; a fault can be too mild for it
        numbers = sorted(folders_of(sealegs.open_run(folder / name)))
        if numbers:
            incident = f"{folder / name}#{numbers[0]}"
            print(f"\nWhy it happened (sealegs replay {incident}):\n", flush=True)
            attempt(replay.main, incident)
            attempt(postmortem.main, incident, says=sys.stderr)
            document = folder / name / "incidents" / str(numbers[0]) / "postmortem.md"
            written.append(
                (document.with_suffix(".html"), "the incident: symptoms, the cause and its tests, cost, what to change")
            )
            written.append((document, "the same as Markdown"))
            break
    else:
        print("\nNo incident was opened, so there is nothing to run again.")
    page = folder / "dashboard.html"
    attempt(dashboard.main, *(str(folder / name) for name in ENDINGS), "-o", str(page), says=sys.stderr)
    written.append((page, "the three runs in one page, with everything that happened in them"))
    there = [(path, what) for path, what in written if path.is_file()]
    width = max((len(str(path)) for path, _ in there), default=0)
    print("\nWhat to open, offline:\n")
    for path, what in there:
        print(f"  {path!s:<{width}}  {what}")


def attempt(command: Callable[[Sequence[str]], int], *words: str, says: TextIO = sys.stdout) -> None:
    """Run a command of Sealegs; what keeps it from its work is told, and keeps no other from its own."""
    tell(f"sealegs {command.__module__.rpartition('.')[2]} {' '.join(words)}")
    try:
        with redirect_stdout(says):
            command(words)
    except SealegsError as error:
        tell(error)


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
