"""A guarded loop that ends before the ranks compare their weights again, with one that is changed on the way: run by
test_ranks.py on each of them."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

import sealegs

STEPS, DAMAGED = 14, 9
"""The first comparison is at step 0, the next one would be at step 100."""


def main(out: Path, damaged: int) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)))
    optimizer = AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(100 + rank)
    with sealegs.Guard(model, optimizer, run=out / "run", clip=1.0) as guard:
        for step in range(STEPS):
            loss = model(torch.randn(16, 8)).square().mean()
            loss.backward()
            if step == damaged and rank == 1:
                with torch.no_grad():
                    next(model.parameters()).view(-1)[0].mul_(1 + 1e-6)
            guard.step(loss)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
