"""What the guard costs within a step of Lightning's own, side by side with Lightning without it.

    python bench/lightning_step.py [--blocks N] [--out FILE.json]

Every variant is a ``Trainer.fit`` of its own, on a model of its own, in a thread of its own; one of them trains at a
time, a block of steps, then the next, so that all meet the same machine. Each block is compared with the block of plain
Lightning in the same round; printed is the median of those ratios, the interval that it lies in with 95 % confidence,
and the quartiles. A second plain Lightning is the control: what it differs by is what cannot be told apart.
"""

import argparse
import json
import logging
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks.spike import SpikeDetection
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.overhead import interval

import sealegs
from sealegs.integrations.lightning import Guarded
from sealegs.lab.model import Transformer
from sealegs.lab.settings import SIZES, Settings
from sealegs.lab.train import build_optimizer

WARM_UP, STEPS, BLOCKS, ROWS = 25, 10, 60, 8
SIZE: Settings = SIZES["toy"]


class Pretraining(L.LightningModule):  # type: ignore[misc]
    """The lab's model on random tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Transformer(SIZE.model)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The mean loss of a batch."""
        (tokens,) = batch
        targets = tokens.roll(-1, 1)
        return self.model.losses(tokens, targets).total / targets.numel()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """So slow that nothing is learned by heart."""
        return build_optimizer(self.model, replace(SIZE.optimizer, lr=1e-7))


class Turns(L.Callback):  # type: ignore[misc]
    """Trains for a block when it is its turn, and says how long a step took."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.is_mine, self.is_done = threading.Semaphore(0), threading.Semaphore(0)
        self.steps = WARM_UP
        self.has_ended = False
        self._began = 0.0
        self._count = 0

    def on_train_start(self, *_: Any) -> None:
        """Wait for the first turn."""
        self.is_mine.acquire()
        self._began = time.perf_counter()

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """Between the steps: everything that the last one has caused is done."""
        if self._count == self.steps:
            self.seconds.append((time.perf_counter() - self._began) / self.steps)
            self._count = 0
            self.is_done.release()
            self.is_mine.acquire()
            if self.has_ended:
                trainer.should_stop = True
            self._began = time.perf_counter()
        self._count += 1


def variants(scratch: Path) -> dict[str, Callable[[], list[Any]]]:
    """What is compared with the first of them."""
    return {
        "Lightning, gradient_clip_val=1": list,
        "with Guarded": lambda: [Guarded(run=scratch / "guarded")],
        "with Guarded, playbook standard": lambda: [
            Guarded(run=scratch / "playbook", playbook=sealegs.Playbook.standard())
        ],
        "with Lightning's SpikeDetection": lambda: [SpikeDetection()],
        "Lightning again (control)": list,
    }


def measure(blocks: int, scratch: Path) -> dict[str, dict[str, Any]]:
    """By variant: milliseconds a step, percent more than the first, with interval and quartiles."""
    turns: dict[str, Turns] = {}
    threads = []
    for name, callbacks in variants(scratch).items():
        turns[name] = turn = Turns()
        threads.append(threading.Thread(target=_fit, args=(turn, callbacks(), scratch), name=name, daemon=True))
        threads[-1].start()
        _let(turn, WARM_UP)
        turn.seconds.clear()
    for block in range(blocks):
        order = list(turns)
        for name in order[block % len(order) :] + order[: block % len(order)]:  # nobody has a place of their own
            _let(turns[name], STEPS)
    for turn, thread in zip(turns.values(), threads, strict=True):
        turn.has_ended = True
        turn.is_mine.release()
        thread.join()
    base, *_ = (turn.seconds for turn in turns.values())
    return {name: _compared(turn.seconds, base) for name, turn in turns.items()}


def _let(turn: Turns, steps: int) -> None:
    turn.steps = steps
    turn.is_mine.release()
    turn.is_done.acquire()


def _fit(turn: Turns, callbacks: list[Any], scratch: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(SIZE.model.vocabulary, (4096, SIZE.model.context), generator=generator)
    trainer = L.Trainer(
        max_steps=10**9,
        accelerator="cpu",
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=scratch,
        callbacks=[turn, *callbacks],
    )
    trainer.fit(Pretraining(), DataLoader(TensorDataset(tokens), ROWS))


def _compared(measured: list[float], base: list[float]) -> dict[str, Any]:
    ratios = sorted(100 * (a / b - 1) for a, b in zip(measured, base, strict=True))
    quarter = len(ratios) // 4
    return {
        "ms": 1000 * statistics.median(measured),
        "percent": statistics.median(ratios),
        "interval": interval(ratios),
        "quartiles": [ratios[quarter], ratios[-quarter - 1]],
    }


def printed(table: dict[str, dict[str, Any]]) -> str:
    """As Markdown."""
    lines = ["| | ms a step | against the first | 95 % interval | quartiles |", "|---|---|---|---|---|"]
    for name, row in table.items():
        spans = " | ".join("{:+.2f} to {:+.2f} %".format(*row[span]) for span in ("interval", "quartiles"))
        lines.append(f"| {name} | {row['ms']:.2f} | {row['percent']:+.2f} % | {spans} |")
    return "\n".join(lines)


def main() -> None:
    """Measure on this machine's CPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as scratch:
        table = measure(arguments.blocks, Path(scratch))
    print(
        f"lightning {L.__version__}, torch {torch.__version__}, toy, {ROWS} rows, {torch.get_num_threads()} threads\n"
    )
    print(printed(table))
    if arguments.out:
        arguments.out.write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
