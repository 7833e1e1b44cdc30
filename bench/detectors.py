"""How often Sealegs and the rules that ship today flag healthy steps, and what of injected trouble they find, how soon.

    python bench/detectors.py [FOLDER] [--runs RUNS.jsonl] [--seed 0] [--keep experiments/detectors]
                              [--out docs/benchmarks/2026-11-15-detectors.md] [--json RAW.json]

FOLDER holds healthy runs as CSV files: step, loss and, in at least one of more than 2800 steps, grad_norm. Without it
everything is synthetic. RUNS.jsonl holds recorded runs, one a line: name, fault, at, loss, grad_norm, healthy. Prints
Markdown; ``--out`` writes it below the marker line of a file, leaves what stands above, and draws the figures beside
it; ``--keep`` keeps what is finished, and an interrupted run goes on from there.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.detection import cells, data, figure, tables

MARKER = "<!-- What follows is written by bench/detectors.py. -->"


def processor() -> str:
    """The name of the processor, where the system tells."""
    named = subprocess.run(["/usr/bin/env", "lscpu"], capture_output=True, text=True, check=False).stdout.splitlines()
    return next((line.split(":")[1].strip() for line in named if line.startswith("Model name")), platform.machine())


def main() -> None:
    """Measure, print, write."""
    began = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--runs", type=Path, help="recorded runs, one a line as JSON")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="the folder that finished cells are kept in")
    parser.add_argument("--out", type=Path, help="the file that gets the report below its marker line")
    parser.add_argument("--json", type=Path, help="the file that gets the numbers")
    given = parser.parse_args()

    real = data.read(given.folder) if given.folder else []
    if given.folder and (refusal := data.refusal(real)):
        parser.error(f"{given.folder}: {refusal}")
    looked_at = data.gather(real, list(data.recorded(given.runs)) if given.runs else [], given.seed)
    results = cells.run(looked_at, given.keep, workers=2)
    norms = sum(run.grad_norm is not None for run in looked_at.healthy)
    kind = f"{len(looked_at.healthy)} {'public' if real else 'synthetic (t5 noise, power law)'} healthy runs"
    about = (
        f"{kind}, {sum(map(len, looked_at.healthy)) / 1000:.0f}k steps, {norms} of them with gradient norm; seed "
        f"{given.seed}. {processor()}, two processes on {os.cpu_count()} cores; Python {platform.python_version()}, "
        f"numpy {np.__version__}; {time.perf_counter() - began:.0f} s in all, of which the processes computed "
        f"{sum(os.times()[:4]):.0f} s together; load of the machine {os.getloadavg()[1]:.1f}."
    )
    parts = [about, *tables.report(results, looked_at, kind)]
    if given.out:
        drawn = given.out.with_suffix(".svg")
        figure.write(results, tables.recalls_of(results, looked_at), drawn)
        parts[1:1] = [
            f"![Found against false alarms]({drawn.name})",
            f"[The same for every fault]({drawn.stem}-by-fault.svg)",
        ]
        above = given.out.read_text().split(MARKER)[0] if given.out.exists() else ""
        given.out.write_text(f"{above}{MARKER}\n\n" + "\n\n".join(parts) + "\n")
    if given.json:
        given.json.write_text(json.dumps({"about": about, **tables.raw(results, looked_at)}) + "\n")
    print("\n\n".join(parts))


if __name__ == "__main__":
    main()
