"""What `sealegs check` takes, start to end, in a process of its own: seconds, how many on a CPU, and the most memory.

    python bench/checking.py

The start alone; a million steps as CSV and as a run folder (first time, and through its cache); ten million lines of
text. Where others use the machine, the seconds on a CPU are the ones to compare.
"""

import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import sealegs

STEPS, LINES = 1_000_000, 10_000_000
PROGRAM = """
import atexit, re, sys
from sealegs.cli.main import main

def peak():  # not getrusage, whose maximum begins with that of the process that forked this one
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024

atexit.register(lambda: print(peak(), file=sys.stderr))
main(sys.argv[1:])
"""


def losses(steps: int) -> np.ndarray:
    """A falling loss with heavy tails."""
    noise = 0.01 * np.random.default_rng(0).standard_t(5, steps)
    return (2.4 + 6 * np.exp(-np.arange(steps) / (steps / 12))) * np.exp(noise)


def as_csv(path: Path, steps: int = STEPS) -> None:
    """Step, loss, gradient norm, learning rate."""
    with path.open("w") as file:
        file.write("step,loss,grad_norm,lr\n")
        file.writelines(f"{step},{loss:.6f},{0.5 + loss % 0.1:.4f},3e-4\n" for step, loss in enumerate(losses(steps)))


def as_text(path: Path) -> None:
    """One line in two is a row, as programs print them."""
    with path.open("w") as file:
        for step, loss in enumerate(losses(LINES // 2)):
            file.write(f"iter {step}: loss {loss:.4f}, time 120.00ms, mfu 31.2%\n")
            file.write("saving nothing this time\n")


def as_run(path: Path) -> None:
    """A run folder, written as a run writes it."""
    with sealegs.Watch(path) as watch:
        writer = watch.record
        assert writer is not None
        for step, loss in enumerate(losses(STEPS).tolist()):
            writer.row({"step": step, "loss": loss, "grad_norm": 0.5 + loss % 0.1, "lr": 3e-4})


def row(title: str, *words: str) -> str:
    """Of the table, for one command."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, check=True)
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    verdict = json.loads(done.stdout)["verdict"] if "--json" in words else ""
    return f"| {title} | {seconds:.2f} | {cpu_s:.2f} | {float(done.stderr.split()[-1]):.0f} | {verdict} |"


def main() -> None:
    """Print the table."""
    print(f"Python {platform.python_version()}, numpy {np.__version__}, {platform.machine()}\n")
    print("| | seconds | on a CPU | MiB | verdict |\n|---|---|---|---|---|")
    print(row("`sealegs --version`", "--version"))
    print(row("`sealegs check --help`", "check", "--help"))
    sources: dict[str, tuple[str, Callable[[Path], None]]] = {
        "CSV, 100 steps (the start alone, mostly)": ("small.csv", lambda path: as_csv(path, 100)),
        "CSV, 1M steps": ("a.csv", as_csv),
        "run folder, 1M steps, first time": ("run", as_run),
        "the same again": ("run", lambda path: None),
        "text, 10M lines": ("a.txt", as_text),
    }
    with tempfile.TemporaryDirectory() as folder:
        for title, (name, write) in sources.items():
            write(Path(folder) / name)
            print(row(title, "check", str(Path(folder) / name), "--json"), flush=True)


if __name__ == "__main__":
    main()
