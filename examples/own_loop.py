"""A model of one's own, for the commands that train it themselves: drills, replays, verification.

sealegs drill nan-gradient lr-x30 --build examples/own_loop.py:build
"""

import torch
from torch import nn

import sealegs


def build() -> sealegs.Subject:
    """What a training loop is made of; each call begins anew, with the same weights and the same batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
    inputs = torch.randn(400, 16, 8)
    return sealegs.Subject(
        model=model,
        optimizers=[torch.optim.AdamW(model.parameters(), lr=3e-3)],
        loss=lambda batch: nn.functional.mse_loss(model(batch), batch[:, :4].sin()),
        clip=1.0,
        batches=inputs,
    )
