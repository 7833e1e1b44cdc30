"""A guard on every rank of a DDP run.

    torchrun --nproc-per-node 2 examples/torchrun_ddp.py [--steps N] [--run FOLDER]

At step 20 a gradient of rank 1 becomes NaN, and with it everybody's: all ranks skip the step, and the record names the
rank. With ``resume="auto"`` a job that `torchrun --max-restarts` starts again goes on where it was.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import sealegs

words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
words.add_argument("--steps", type=int, default=200)
words.add_argument("--run", default="experiments/ddp")
chosen = words.parse_args()

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank = dist.get_rank()
device = torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")
torch.manual_seed(0)
inputs = torch.randn(chosen.steps * 16 * dist.get_world_size(), 8)
data = TensorDataset(inputs, inputs[:, :4].sin())
loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data))
model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4)).to(device)
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

with (
    sealegs.Guard(
        model,
        optimizer,
        run=chosen.run,
        clip=1.0,
        playbook=sealegs.Playbook.standard(),
        checkpoint_every=50,
        resume="auto",
    ) as guard,
    sealegs.inject(["nan-gradient:rank=1@20"], model, clock=lambda: guard.number, rank=rank),  # what the guard is for
):
    for batch, wanted in guard.batches(loader):
        loss = nn.functional.mse_loss(model(batch.to(device)), wanted.to(device))
        loss.backward()
        verdict = guard.step(loss)
        if rank == 0 and not verdict.go:
            print(verdict)
if rank == 0:
    print(f"loss {loss.item():.4f} after {guard.number} steps, recorded in {chosen.run}")
dist.destroy_process_group()
