"""Lightning's own ``SpikeDetection`` and the guard on the same run, which goes wrong in one of four ways, or in none.

    python bench/lightning_spikes.py

A small regression with a held-out batch, 300 steps in epochs of 100. At step 150 one thing happens. Printed: what was
done about it and at which step, whether the bad update was applied, and the loss on the held-out batch at the end, or
where the training ended. Then: whether a checkpoint can be resumed from.
"""

import logging
import math
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.fabric.utilities.spike import TrainingSpikeException
from lightning.pytorch.callbacks.spike import SpikeDetection
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sealegs
from sealegs.integrations.lightning import Guarded

STRUCK, STEPS, ROWS = 150, 300, 800
WAYS = ("nothing", "NaN in the loss", "NaN in the gradient", "gradient x10,000", "labels x100")


class Regression(L.LightningModule):  # type: ignore[misc]
    """Learns a sum, and is struck once."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
        self.way = way
        self.before: Tensor | None = None
        self.was_applied = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Struck in its data or in its loss."""
        rows, targets = batch
        if self._is_struck("labels x100"):
            targets = targets * 100
        loss = nn.functional.mse_loss(self.network(rows).squeeze(-1), targets)
        return loss * math.nan if self._is_struck("NaN in the loss") else loss

    def on_after_backward(self) -> None:
        """Or in its gradients."""
        for way, factor in (("NaN in the gradient", math.nan), ("gradient x10,000", 1e4)):
            if self._is_struck(way):
                for parameter in self.parameters():
                    assert parameter.grad is not None
                    parameter.grad.mul_(factor)
        if self.trainer.global_step == STRUCK:
            self.before = nn.utils.parameters_to_vector(self.parameters()).clone()

    def on_before_zero_grad(self, optimizer: Any) -> None:
        """The next step: has the last one changed anything?"""
        if self.trainer.global_step == STRUCK + 1 and self.before is not None:
            self.see()

    def see(self) -> None:
        """Whether the update of the struck step was applied."""
        if self.before is not None:
            self.was_applied = not torch.equal(nn.utils.parameters_to_vector(self.parameters()), self.before)
            self.before = None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """As most are."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)

    def _is_struck(self, way: str) -> bool:
        return self.way == way and self.trainer.global_step == STRUCK


def data(seed: int) -> TensorDataset:
    """A sum of sixteen numbers, with noise."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(ROWS, 16, generator=generator)
    return TensorDataset(rows, rows.sum(1) + 0.5 * torch.randn(ROWS, generator=generator))


def trained(way: str, callbacks: list[Any], folder: Path) -> str:
    """One run, in a line of the table."""
    torch.manual_seed(1)
    module = Regression(way)
    trainer = quiet(folder, callbacks)
    ended = ""
    try:
        trainer.fit(module, DataLoader(data(0), 8, shuffle=True))
    except TrainingSpikeException as error:
        kept = (folder / "skip_batches.json").read_text().split()
        ended = f"ended at step {trainer.global_step - 1}: {error}; wrote {''.join(kept)}"
        module.see()
    rows, targets = data(1).tensors
    with torch.no_grad():
        loss = float(nn.functional.mse_loss(module.network(rows).squeeze(-1), targets))
    done = ended or "; ".join(_skips(callbacks)) or "nothing"
    is_struck = way != WAYS[0]
    return f"{done} | {('yes' if module.was_applied else 'no') if is_struck else ''} | {loss:.3f}"


def quiet(folder: Path, callbacks: list[Any], **options: Any) -> Any:
    """A trainer that prints nothing."""
    return L.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=callbacks,
        **({"enable_checkpointing": False} | options),
    )


def _skips(callbacks: list[Any]) -> list[str]:
    runs: list[Any] = [each._run for each in callbacks if isinstance(each, Guarded)]
    events = [event for run in runs for event in sealegs.open_run(run).events if event.kind in ("skip", "alarm")]
    return [f"skipped step {event.step}" for event in events]


def resumed(make: Callable[[Path], list[Any]], folder: Path) -> str:
    """Whether what it keeps in a checkpoint can be read again."""
    module, trainer = Regression(WAYS[0]), quiet(folder, make(folder))
    trainer.fit_loop.epoch_loop.max_steps = 20
    try:
        trainer.fit(module, DataLoader(data(0), 8))
    except TrainingSpikeException as error:
        return f"there is none: {error}, where nothing is wrong"
    trainer.save_checkpoint(folder / "kept.ckpt")
    try:
        quiet(folder, make(folder)).fit(Regression(WAYS[0]), DataLoader(data(0), 8), ckpt_path=folder / "kept.ckpt")
    except Exception as error:
        return f"no: {type(error).__name__}: {error}"
    return "yes"


PEERS: dict[str, Callable[[Path], list[Any]]] = {
    "no callback": lambda folder: [],
    "SpikeDetection()": lambda folder: [SpikeDetection()],
    "SpikeDetection(warmup=40)": lambda folder: [SpikeDetection(warmup=40)],
    "Guarded(run=...)": lambda folder: [Guarded(run=folder / "run")],
}


def main() -> None:
    """Print both tables."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    print(f"lightning {L.__version__}, struck at step {STRUCK} of {STEPS}\n")
    print("| at step 150 | callback | what was done | bad update applied | loss at the end |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        for way in WAYS:
            for place, (name, make) in enumerate(PEERS.items()):
                folder = Path(scratch) / f"{WAYS.index(way)}-{place}"
                folder.mkdir()
                print(f"| {way} | {name} | {trained(way, make(folder), folder)} |", flush=True)
        print("\n| callback | a checkpoint can be resumed from |\n|---|---|")
        for place, (name, make) in enumerate(PEERS.items()):
            (folder := Path(scratch) / f"resumed-{place}").mkdir()
            print(f"| {name} | {resumed(make, folder)} |", flush=True)


if __name__ == "__main__":
    main()
