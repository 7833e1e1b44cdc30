"""A loop of one's own with a guard and a playbook in it, which survives a gradient that becomes NaN.

    python examples/raw_loop.py [--steps N] [--run FOLDER]

The fault strikes at step 20. The step is skipped, the run goes on, and `sealegs check FOLDER` tells of it.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader

import sealegs

words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
words.add_argument("--steps", type=int, default=200)
words.add_argument("--run", default="experiments/raw-loop")
chosen = words.parse_args()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, chosen.steps)
inputs = torch.randn(chosen.steps * 16, 8)
loader = DataLoader(torch.utils.data.TensorDataset(inputs, inputs[:, :4].sin()), batch_size=16, shuffle=True)

playbook = sealegs.Playbook.standard()
with (
    sealegs.Guard(model, optimizer, run=chosen.run, scheduler=scheduler, clip=1.0, playbook=playbook) as guard,
    sealegs.inject(["nan-gradient@20"], model, clock=lambda: guard.number),  # what the guard is for
):
    for batch, wanted in guard.batches(loader):
        loss = nn.functional.mse_loss(model(batch), wanted)
        loss.backward()
        verdict = guard.step(loss)  # norms, verdict, clipping, optimizer, scheduler, zeroed gradients
        if not verdict.go:
            print(verdict)
print(f"loss {loss.item():.4f} after {guard.number} steps, recorded in {chosen.run}")
