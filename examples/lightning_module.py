"""A LightningModule whose data hold one broken row, trained by Lightning with a guard in its loop.

    python examples/lightning_module.py [RUN FOLDER]

The three lines that are Sealegs' are marked. With ``pytorch_lightning`` they are the same.
"""

import logging
import sys
import warnings

import lightning.pytorch as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sealegs  # Sealegs
from sealegs.integrations import lightning  # Sealegs


class Regression(L.LightningModule):
    """Learns a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """As it was."""
        rows, targets = batch
        return nn.functional.mse_loss(self.network(rows).squeeze(-1), targets)

    def configure_optimizers(self) -> dict[str, object]:
        """As it was, too."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3, betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.02, total_iters=50)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main(run: str) -> None:
    """Train for 200 steps."""
    L.seed_everything(0, verbose=False)
    rows = torch.randn(1600, 16)
    targets = rows.sum(1) + 0.5 * torch.randn(1600)
    rows[960] = float("inf")  # somebody divided by zero
    loader = DataLoader(TensorDataset(rows, targets), batch_size=16, shuffle=True)
    model = Regression()
    trainer = L.Trainer(
        max_steps=200,
        gradient_clip_val=1.0,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    lightning.attach(trainer, run=run, playbook=sealegs.Playbook.standard())  # Sealegs
    trainer.fit(model, loader)
    recorded = sealegs.open_run(run)
    for event in recorded.events:
        if event.kind == "skip":
            print(event.detail["text"])
    print(f"loss of step {recorded.steps[-1]}: {recorded.column('loss')[-1]:.4f}; see: sealegs check {run}")


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*does not have many workers")  # an example needs none
    main(sys.argv[1] if len(sys.argv) > 1 else "experiments/lightning")
