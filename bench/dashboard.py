"""What the page of a long run weighs and how fast it opens: in megabytes, and in seconds until everything is painted.

    python bench/dashboard.py [--steps 1000000] [--layers 12]

A run with every signal that the panels know, NaN and spikes among them, as `sealegs train` logs them: some every step,
most every tenth, histograms every hundredth. Chromium is started as the tests start it.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from playwright.sync_api import sync_playwright

from sealegs.record import manifest
from sealegs.record.schema import EVENTS, METRICS, to_line
from sealegs.record.writer import RunWriter

TIMES = 5
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
NOTE_THE_TIME = """
const timer = setInterval(() => {
  if (window.Bokeh && Bokeh.documents.length > 0 && Bokeh.documents[0].is_idle) {
    window.painted = performance.now()
    clearInterval(timer)
  }
}, 5)
"""


def write(folder: Path, steps: int, layers: int) -> None:
    """The run folder."""
    RunWriter.create(folder, manifest.describe("bench")).close()
    random = np.random.default_rng(0)
    noise = np.exp(0.02 * random.standard_normal(steps)).tolist()
    histogram = " ".join(str(count) for count in [*random.integers(0, 400, 31).tolist(), 3, 0])
    with (folder / METRICS).open("wb") as file:
        for step in range(steps):
            file.write(to_line(row(step, steps, layers, noise[step], histogram)))
    with (folder / EVENTS).open("ab") as file:
        for step in range(0, steps, 500):
            file.write(to_line({"time": float(step), "step": step, "kind": "checkpoint", "checkpoint": step}))


def row(step: int, steps: int, layers: int, noise: float, histogram: str) -> dict[str, float | str]:
    """What one step logs."""
    loss = (2.0 + 6.0 * (1 + step) ** -0.3) * noise
    if step % 97_001 == 50_000:
        loss *= 3
    known: dict[str, float | str] = {
        "step": step,
        "loss": float("nan") if step % 250_007 == 120_000 else loss,
        "grad_norm": noise * (40.0 if step % 97_001 == 50_000 else 0.8),
        "lr": 3e-4 * (1 - step / steps),
        "loss_scale": 65536.0,
        "batch_hash": f"{step * 2654435761 % 2**64:016x}",
        "sources": f"a={6 + step % 2} b={2 - step % 2}",
    }
    if step % 10 == 0:
        for layer in range(layers):
            known[f"activation_norm/blocks.{layer}"] = noise * (layer + 1)
            known[f"param_norm/blocks.{layer}"] = 20.0 + layer + step / steps
        known |= {"param_norm": 60.0 * noise, "moment1_norm": 0.2 * noise, "moment2_norm": 1e-3 * noise}
        known |= {"tokens_per_s": 2e5 * noise, "token_entropy": 4.8 * noise}
    if step % 100 == 0:
        known["token_loss_histogram"] = histogram
    return known


def opened(page: Path) -> list[float]:
    """Seconds from the beginning of the navigation until Bokeh has painted everything, in a fresh page each time."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=FLAGS)
        seconds = []
        for _ in range(TIMES):
            tab = browser.new_page(viewport={"width": 1440, "height": 900})
            tab.add_init_script(NOTE_THE_TIME)
            tab.goto(page.as_uri(), wait_until="commit")
            tab.wait_for_function("window.painted", polling=200)
            seconds.append(float(tab.evaluate("window.painted")) / 1000)
            tab.close()
        browser.close()
    return seconds


def measure(steps: int, layers: int, folder: Path) -> None:
    """Write, draw, open."""
    write(folder, steps, layers)
    program = Path(sys.executable).with_name("sealegs")
    took = []
    for _ in range(2):
        began = time.perf_counter()
        subprocess.run([program, "dashboard", str(folder)], check=True, capture_output=True)
        took.append(time.perf_counter() - began)
    page = folder / "dashboard.html"
    seconds = opened(page)
    told = {
        "steps": steps,
        "page_mb": round(page.stat().st_size / 1e6, 2),
        "drawn_s_first_and_again": [round(each, 1) for each in took],
        "opened_s_median": round(statistics.median(seconds), 2),
        "opened_s": [round(each, 2) for each in seconds],
        "load_of_the_machine": round(os.getloadavg()[0], 1),
        "cores": os.cpu_count(),
    }
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--layers", type=int, default=12)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        measure(options.steps, options.layers, Path(scratch) / "run")
