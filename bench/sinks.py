"""What a tracker costs a training step: a recorded row of 15 scalars, with each tracker and without, side by side.

    python bench/sinks.py [--steps 200] [--step-ms 5] [--rounds 3]

Every variant is a process of its own: a Watch that sees one row a step, after a stretch of numpy work that stands for
the step. "Handed over" is what the training thread works to hand over its row, recording and judging it included. "CPU"
is all that the process works in a step, the queue's thread and delivering what is left at the end included: what is
more than without a sink is the most that the sink can take from the training, and on a free core it takes less. These
two hold on a busy machine, the step by the clock does not. Beside each sink: the tracker's own call in the training
thread, as people write it. Variants take turns; ratios are taken round by round. W&B's second process is not counted.
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
from typing import Any

SIGNALS = ("loss", "grad_norm", "lr", *(f"grad_norm/blocks.{number}" for number in range(12)))
VARIANTS = ("none", "mlflow", "wandb", "tensorboard", "trackio", "all four", "notify")
DIRECT = ("mlflow", "wandb", "tensorboard", "trackio")


def main() -> None:
    """Run the rounds, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", help="a variant: run it once in this process, its times into times.json")
    options = parser.parse_args()
    if options.one:
        Path("times.json").write_text(json.dumps(measured(options.one, options.steps, options.step_ms)))
        return
    times: dict[str, list[dict[str, float]]] = {}
    for _ in range(options.rounds):
        for variant in (*VARIANTS, *(f"own call: {name}" for name in DIRECT)):
            times.setdefault(variant, []).append(in_a_process(variant, options.steps, options.step_ms))
        load = os.getloadavg()[0]
        print(f"{len(times['none'])} rounds of {options.steps} steps, load {load:.1f}", file=sys.stderr, flush=True)
    print(f"{options.steps} steps of {options.step_ms:g} ms, {len(SIGNALS)} scalars, {options.rounds} rounds\n")
    print(table(times))


def in_a_process(variant: str, steps: int, step_ms: float) -> dict[str, float]:
    """One run of a variant, alone in its process."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"WANDB_MODE": "offline", "TRACKIO_DIR": folder, "OMP_NUM_THREADS": "1"}
        environment.pop("MLFLOW_TRACKING_URI", None)
        words = [sys.executable, __file__, "--one", variant, "--steps", str(steps), "--step-ms", str(step_ms)]
        subprocess.run(words, cwd=folder, env=environment, stdout=subprocess.DEVNULL, check=True)
        times: dict[str, float] = json.loads((Path(folder) / "times.json").read_text())
    return times


def measured(variant: str, steps: int, step_ms: float) -> dict[str, float]:
    """Milliseconds a step, of three kinds; seconds of CPU to start, imports included."""
    import sealegs
    import sealegs.watch  # torch: not what is measured

    names = DIRECT if variant == "all four" else (variant,) if variant in DIRECT else ()
    notify = "cat" if variant == "notify" else None
    began = time.process_time()
    own = direct(variant.removeprefix("own call: ")) if variant.startswith("own call: ") else None
    watch = sealegs.Watch(Path("a"), sinks=[sealegs.tracker(name) for name in names], notify=notify)
    started_s = time.process_time() - began
    work = Work(step_ms)
    taken, handed_over = [], 0.0
    began = time.process_time()
    for step in range(steps):
        clock = time.perf_counter()
        work.do()
        worked = time.thread_time()
        row = dict.fromkeys(SIGNALS, 2.5 + step / 1000)
        watch.see(step, **row)
        if own is not None:
            own(step, row)
        handed_over += time.thread_time() - worked
        taken.append(time.perf_counter() - clock)
    watch.close()
    cpu = time.process_time() - began
    failed = [event for event in sealegs.open_run("a").events if event.kind == "sink-failed"]
    assert not failed, failed
    return {
        "handed over": 1e3 * handed_over / steps,
        "cpu": 1e3 * cpu / steps,
        "clock": 1e3 * statistics.median(taken),
        "start": started_s,
    }


class Work:
    """A stretch of arithmetic that takes so long: numpy lets go of the interpreter in it, as a forward pass does."""

    def __init__(self, step_ms: float) -> None:
        import numpy as np

        self._matrix = np.random.default_rng(0).standard_normal((96, 96)).astype(np.float32)
        began = time.thread_time()
        for _ in range(500):
            self._matrix @ self._matrix
        self._times = max(1, round(step_ms / 1000 / ((time.thread_time() - began) / 500)))

    def do(self) -> None:
        """Once."""
        for _ in range(self._times):
            self._matrix @ self._matrix


def direct(name: str) -> Any:
    """What people write themselves: the tracker's own call for each step, in the training thread."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    if name == "mlflow":
        import mlflow

        mlflow.set_tracking_uri("sqlite:///mlflow.db")
        mlflow.start_run()
        return lambda step, row: mlflow.log_metrics(row, step=step)
    if name == "wandb":
        import wandb

        run = wandb.init(mode="offline", settings=wandb.Settings(console="off", silent=True))
        return lambda step, row: run.log(row, step=step)
    if name == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter("tensorboard")

        def scalars(step: int, row: dict[str, float]) -> None:
            for signal, value in row.items():
                writer.add_scalar(signal, value, step)

        return scalars
    import trackio

    tracked = trackio.init(project="direct", auto_log_cpu=False, auto_log_gpu=False, embed=False)
    return lambda step, row: tracked.log(row, step=step)


def table(times: dict[str, list[dict[str, float]]]) -> str:
    """Medians over the rounds, and their range."""
    heads = ["sink", "handed over, ms", "CPU a step, ms", "to no sink", "by the clock, to no sink", "start, s of CPU"]
    lines = [heads, ["---"] * len(heads)]
    for variant, rounds in times.items():
        cells = [variant, median(rounds, "handed over", 2), median(rounds, "cpu", 2)]
        for name in ("cpu", "clock"):
            ratios = sorted(one[name] / other[name] for one, other in zip(rounds, times["none"], strict=True))
            cells.append(f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
        lines.append([*cells, median(rounds, "start", 1)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def median(rounds: list[dict[str, float]], name: str, digits: int) -> str:
    """Of one number over the rounds."""
    return f"{statistics.median(one[name] for one in rounds):.{digits}f}"


if __name__ == "__main__":
    main()
