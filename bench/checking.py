"""What `sealegs check` takes, start to end, in a process of its own: seconds, and the most memory it held.

    python bench/checking.py

A million steps as CSV and as a run folder (first time, and through its cache), and ten million lines of text.
"""

import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import sealegs

STEPS, LINES = 1_000_000, 10_000_000


def losses(steps: int) -> np.ndarray:
    """A falling loss with heavy tails."""
    noise = 0.01 * np.random.default_rng(0).standard_t(5, steps)
    return (2.4 + 6 * np.exp(-np.arange(steps) / (steps / 12))) * np.exp(noise)


def as_csv(path: Path) -> None:
    """Step, loss, gradient norm, learning rate."""
    with path.open("w") as file:
        file.write("step,loss,grad_norm,lr\n")
        file.writelines(f"{step},{loss:.6f},{0.5 + loss % 0.1:.4f},3e-4\n" for step, loss in enumerate(losses(STEPS)))


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


def checked(source: Path) -> tuple[float, float, str]:
    """Seconds, MiB, verdict."""
    program = (
        "import re, sys; from sealegs.cli.main import main; code = main(sys.argv[1:]);"
        # not getrusage, whose maximum begins with that of the process that forked this one
        "print(int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) / 1024, file=sys.stderr)"
    )
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", program, "check", str(source), "--json"], capture_output=True, text=True, check=True
    )
    seconds = time.perf_counter() - began
    return seconds, float(done.stderr.split()[-1]), json.loads(done.stdout)["verdict"]


def main() -> None:
    """Print the table."""
    print(f"Python {platform.python_version()}, numpy {np.__version__}, {platform.machine()}\n")
    print("| source | seconds | MiB | verdict |\n|---|---|---|---|")
    sources: dict[str, tuple[str, Callable[[Path], None]]] = {
        "CSV, 1M steps": ("a.csv", as_csv),
        "run folder, 1M steps, first time": ("run", as_run),
        "the same again": ("run", lambda path: None),
        "text, 10M lines": ("a.txt", as_text),
    }
    with tempfile.TemporaryDirectory() as folder:
        for title, (name, write) in sources.items():
            write(Path(folder) / name)
            seconds, mebibytes, verdict = checked(Path(folder) / name)
            print(f"| {title} | {seconds:.1f} | {mebibytes:.0f} | {verdict} |", flush=True)
        small = Path(folder) / "small.csv"
        small.write_text("step,loss\n" + "".join(f"{step},{loss}\n" for step, loss in enumerate(losses(100))))
        seconds, mebibytes, verdict = checked(small)
        print(f"| CSV, 100 steps (the start alone, mostly) | {seconds:.2f} | {mebibytes:.0f} | {verdict} |")


if __name__ == "__main__":
    main()
