"""A guard in a DeepSpeed engine: the loop has one line more, and one around its loader.

    pip install 'sealegs[deepspeed]'
    torchrun --nproc-per-node 2 examples/deepspeed_zero.py [--stage N] [--steps N] [--run FOLDER]

At step 20 the loss of rank 1 is 3,000 times too large, and with it everybody's gradients: every rank skips the step by
DeepSpeed's own overflow flag, and the record names the rank.
"""

import argparse
import logging

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import sealegs
from sealegs.integrations import deepspeed as guarded

words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
words.add_argument("--stage", type=int, default=2)
words.add_argument("--steps", type=int, default=60)
words.add_argument("--run", default="experiments/deepspeed")
chosen = words.parse_args()

logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
rank = dist.get_rank()
torch.manual_seed(0)
inputs = torch.randn(chosen.steps * 16 * dist.get_world_size(), 8)
loader = DataLoader(inputs, batch_size=16, sampler=DistributedSampler(inputs))
model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
    config={
        "train_micro_batch_size_per_gpu": 16,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": chosen.stage},
    },
)

with guarded.attach(engine, run=chosen.run, playbook=sealegs.Playbook.standard()) as guard:
    for batch in guard.batches(loader):
        number = guard.number
        batch = batch.to(engine.device, torch.bfloat16)
        loss = nn.functional.mse_loss(engine(batch), batch[:, :4].sin())
        if number == 20 and rank == 1:
            loss = loss * 3000.0  # what the guard is for
        engine.backward(loss)
        engine.step()
        if rank == 0 and not guard.verdict.go:
            print(guard.verdict)
if rank == 0:
    print(f"loss {loss.item():.4f} after {guard.number} steps, recorded in {chosen.run}")
dist.destroy_process_group()
