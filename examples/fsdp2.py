"""A guard on every rank of a run that is sharded by FSDP2.

    torchrun --nproc-per-node 2 examples/fsdp2.py [--steps N] [--run FOLDER]

Make the guard after ``fully_shard``. Norms are those of the whole model, snapshots and checkpoints hold each rank's
shard. At step 20 the gradients of rank 1 are a thousand times too large.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import sealegs

words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
words.add_argument("--steps", type=int, default=200)
words.add_argument("--run", default="experiments/fsdp2")
chosen = words.parse_args()

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank = dist.get_rank()
device = torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4)).to(device)
for layer in (model[0], model[2]):
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
rows = torch.randn(chosen.steps, 16, 8, generator=torch.Generator().manual_seed(1 + rank))  # each rank has its own

fault = "gradient-scale:factor=1000,rank=1@20"
with (
    sealegs.Guard(model, optimizer, run=chosen.run, clip=1.0, playbook=sealegs.Playbook.standard()) as guard,
    sealegs.inject([fault], model, clock=lambda: guard.number, rank=rank),  # what the guard is for
):
    for batch in guard.batches(rows.to(device)):
        loss = nn.functional.mse_loss(model(batch), batch[:, :4].sin())
        loss.backward()
        verdict = guard.step(loss)
        if rank == 0 and not verdict.go:
            print(verdict)
if rank == 0:
    print(f"loss {loss.item():.4f} after {guard.number} steps, recorded in {chosen.run}")
dist.destroy_process_group()
