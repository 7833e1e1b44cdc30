"""A loop of Accelerate's with a guard in it: its own backward, accumulation and clipping stay.

    accelerate launch examples/accelerate_loop.py [--steps N] [--run FOLDER]

One process or several, with whatever precision `accelerate config` says. At step 20 a gradient becomes NaN.
"""

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sealegs
from sealegs.integrations import accelerate

words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
words.add_argument("--steps", type=int, default=200)
words.add_argument("--run", default="experiments/accelerate")
chosen = words.parse_args()

accelerator = Accelerator(gradient_accumulation_steps=2)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, chosen.steps)
inputs = torch.randn(chosen.steps * 2 * 16 * accelerator.num_processes, 8)
loader = DataLoader(TensorDataset(inputs, inputs[:, :4].sin()), batch_size=16, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

playbook = sealegs.Playbook.standard()
with (
    accelerate.attach(accelerator, model, optimizer, scheduler=scheduler, run=chosen.run, playbook=playbook) as guard,
    sealegs.inject(["nan-gradient@20"], model, clock=lambda: guard.number),  # what the guard is for
):
    for batch, wanted in guard.batches(loader):
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(batch), wanted)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            verdict = guard.step(loss)  # optimizer, scheduler and zeroed gradients, when the step is complete
        if accelerator.sync_gradients and not verdict.go:
            accelerator.print(verdict)
accelerator.print(f"loss {loss.item():.4f} after {guard.number} steps, recorded in {chosen.run}")
