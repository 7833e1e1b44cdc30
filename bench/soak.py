"""Whether memory, pages and checks stay small, however much there is: rows, incidents, runs, layers.

    python bench/soak.py [--only rows incidents runs layers] [--rows 5000000] [--incidents 3000] [--runs 200]
                         [--layers 10000] [--keep FOLDER]

*Rows*: one process, one guard with the playbook that observes, as many steps as are asked for; the loop has a loss and
a norm of its own and no model to speak of, so that nearly all the work is the guard's. *Incidents*: the same with four
steps that are not finite in every 160. *Runs*: folders of a thousand rows and twelve layers each, in one page.
*Layers*: a model of many small layers, its steps bare and guarded in turns. Memory is the resident set at twenty marks;
its slope is fitted to those after the first tenth. What commands take is measured in processes of their own: seconds
of CPU, since those hold on a busy machine, and seconds by the clock.
"""

import argparse
import json
import math
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import sealegs
from sealegs.record import manifest
from sealegs.record.schema import EVENTS, METRICS, to_line
from sealegs.record.writer import RunWriter

MARKS = 20
GAP = 160
"""Steps from incident to incident: more than the judge's, after which another alarm is another incident."""


def resident_bytes() -> int:
    """What this process holds in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Batches(Sequence[Tensor]):
    """A loader of any length that holds a hundred batches."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._batches = list(torch.randn(100, 16, 4))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < self._count:
            raise IndexError(number)
        return self._batches[number % 100]


def guarded(folder: Path, steps: int, is_bad: Callable[[int], bool]) -> dict[str, Any]:
    """Run so many steps through a guard: rows a second, and memory at every mark."""
    model = nn.Linear(4, 1)
    numbers = random.Random(0)  # noqa: S311
    held: list[tuple[int, int]] = []
    options: dict[str, Any] = {
        "playbook": sealegs.Playbook.observe(),
        "checkpoint_every": 500,
        "detection": sealegs.Detection(budget=sealegs.Budget(total=steps, share=1.0)),
    }
    began, clock = time.process_time(), time.perf_counter()
    with sealegs.Guard(model, torch.optim.SGD(model.parameters(), lr=1e-3), run=folder, **options) as guard:
        for step, _ in enumerate(guard.batches(Batches(steps))):
            loss = math.nan if is_bad(step) else 2.0 + 0.1 * numbers.random()
            guard.step(torch.tensor(loss), grad_norm=1.0 + 0.1 * numbers.random())
            if step % max(steps // MARKS, 1) == 0:
                held.append((step, resident_bytes()))
                print(f"{step:>12,} rows  {held[-1][1] / 1e6:8.1f} MB", file=sys.stderr, flush=True)
    seconds = time.process_time() - began
    later = [mark for mark in held if mark[0] >= steps / 10]
    slope = float(np.polyfit([at for at, _ in later], [size for _, size in later], 1)[0])
    return {
        "rows": steps,
        "rows_a_second_of_cpu": round(steps / seconds),
        "seconds_by_the_clock": round(time.perf_counter() - clock),
        "resident_mb": [round(size / 1e6, 1) for _, size in held],
        "slope_bytes_a_row": round(slope, 2),
        "metrics_mb": round((folder / METRICS).stat().st_size / 1e6, 1),
        "events_mb": round((folder / EVENTS).stat().st_size / 1e6, 1),
    }


def command(*words: str) -> dict[str, float]:
    """A command of Sealegs in a process of its own: what it took."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    program = Path(sys.executable).with_name("sealegs")
    process = subprocess.Popen([program, *words], stdout=subprocess.DEVNULL)
    peak_kb = 0
    while process.poll() is None:
        with suppress(OSError, IndexError):  # it may have ended meanwhile
            status = Path(f"/proc/{process.pid}/status").read_text()
            peak_kb = max(peak_kb, int(status.split("VmHWM:")[1].split()[0]))
        time.sleep(0.05)
    assert process.returncode in (0, 1), f"{words}: exit code {process.returncode}"
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    clock_s = time.perf_counter() - began
    return {"cpu_s": round(cpu_s, 1), "clock_s": round(clock_s, 1), "peak_mb": round(peak_kb / 1024)}


def looked_at(folder: Path) -> dict[str, Any]:
    """The check of a run, the first time and from the column cache, and its page."""
    took = {"check_first": command("check", str(folder)), "check_again": command("check", str(folder))}
    return took | {"page": command("dashboard", str(folder)), "page_mb": megabytes(folder / "dashboard.html")}


def megabytes(path: Path) -> float:
    """The size of a file, or of all files in a folder."""
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return round(sum(each.stat().st_size for each in files) / 1e6, 2)


def rows(scratch: Path, count: int) -> dict[str, Any]:
    """Many rows in one process."""
    folder = scratch / "rows"
    return guarded(folder, count, lambda step: step % 50_000 == 49_999) | looked_at(folder)


def incidents(scratch: Path, count: int) -> dict[str, Any]:
    """Many incidents in one run."""
    folder = scratch / "incidents-run"
    told = guarded(folder, GAP * count + 250, lambda step: step >= 250 and (step - 250) % GAP < 4)
    closed = sum(event.kind == "incident-closed" for event in sealegs.open_run(folder).events)
    return {"incidents": closed, "incidents_mb": megabytes(folder / "incidents")} | told | looked_at(folder)


def runs(scratch: Path, count: int, length: int = 1000, layers: int = 12) -> dict[str, Any]:
    """Many runs in one page."""
    folders = [scratch / f"run-{number:03d}" for number in range(count)]
    for number, folder in enumerate(folders):
        RunWriter.create(folder, manifest.describe(folder.name)).close()
        with (folder / METRICS).open("wb") as file:
            file.writelines(map(to_line, logged(number, length, layers)))
        with (folder / EVENTS).open("ab") as file:
            saved = range(0, length, 100)
            file.writelines(
                to_line({"time": 1.7e9, "step": at, "kind": "checkpoint", "checkpoint": at}) for at in saved
            )
    page = scratch / "runs.html"
    took = command("dashboard", *map(str, folders), "-o", str(page))
    return {"runs": count, "rows_each": length, "layers_each": layers, "page": took, "page_mb": megabytes(page)}


def logged(seed: int, length: int, layers: int) -> Iterator[dict[str, Any]]:
    """The rows of a run with a spike in its middle."""
    noise = np.exp(0.02 * np.random.default_rng(seed).standard_normal(length)).tolist()
    for step in range(length):
        loss = (2.0 + 6.0 * (1 + step) ** -0.3) * noise[step] * (3.0 if step == length // 2 else 1.0)
        row = {"step": step, "loss": loss, "grad_norm": noise[step], "lr": 3e-4, "step_s": 0.1 * noise[step]}
        if step % 10 == 0:
            for signal in ("param_norm", "grad_norm", "update_ratio", "activation_norm"):
                row |= {f"{signal}/blocks.{layer}": noise[step] * (layer + 1) for layer in range(layers)}
            row |= {"param_norm": 60.0, "moment1_norm": 0.2, "moment2_norm": 1e-3, "tokens_per_s": 2e5}
        yield row


class Layers(nn.Module):
    """Many small layers."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """Each adds a little."""
        for layer in self.layers:
            x = x + 0.01 * layer(x)
        return x


def layers(scratch: Path, count: int) -> dict[str, Any]:
    """Many layers in one model: a step as people write it, one that is guarded, and one that is sampled too."""
    model = Layers(count)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randn(4, 8)
    took: dict[str, list[float]] = {"bare": [], "guarded": [], "sampled": []}
    telemetry = sealegs.Telemetry(sample_every=2)
    with sealegs.Guard(model, optimizer, run=scratch / "layers", clip=1.0, telemetry=telemetry) as guard:
        for step in range(12):
            began = time.process_time()
            model(x).square().mean().backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            took["bare"].append(time.process_time() - began)
            began = time.process_time()
            loss = model(x).square().mean()
            loss.backward()
            guard.step(loss)
            # a sampled step also prepares what the next one reports
            took["guarded" if step % 2 else "sampled"].append(time.process_time() - began)
    lines = (scratch / "layers" / METRICS).read_bytes().splitlines()
    began = time.process_time()
    signals = len(sealegs.open_run(scratch / "layers").signals)
    return {
        "layers": count,
        **{f"{name}_step_s": round(statistics.median(times[1:]), 2) for name, times in took.items()},
        "first_step_s": round(took["sampled"][0], 2),
        "largest_row_kb": round(max(map(len, lines)) / 1e3, 1),
        "signals": signals,
        "opened_s": round(time.process_time() - began, 2),
    }


PARTS: dict[str, Callable[[Path, int], dict[str, Any]]] = {
    "rows": rows,
    "incidents": incidents,
    "runs": runs,
    "layers": layers,
}


def main() -> None:
    """Measure the parts, and print each as it is done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    for name, count in {"rows": 5_000_000, "incidents": 3000, "runs": 200, "layers": 10_000}.items():
        parser.add_argument(f"--{name}", type=int, default=count)
    parser.add_argument("--keep", type=Path, help="a folder for what is written; else it is removed")
    options = parser.parse_args()
    torch.manual_seed(0)
    about = {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()}
    print(json.dumps(about | {"machine": platform.machine()}), flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        scratch = options.keep or Path(temporary)
        scratch.mkdir(parents=True, exist_ok=True)
        for name in options.only:
            told = PARTS[name](scratch, getattr(options, name))
            print(json.dumps({name: told | {"load": round(os.getloadavg()[0], 1)}}, indent=1), flush=True)


if __name__ == "__main__":
    main()
