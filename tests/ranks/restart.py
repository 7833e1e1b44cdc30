"""A run on several ranks that is killed and halted, and started again each time: run by test_restart.py under torchrun.

Writes what each rank found when it began to OUT/<attempt>-<rank>.json.
"""

import json
import math
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

import sealegs
from sealegs.guard_options import Checkpointing

DAMAGED, KILLED, HALTED, LAST = 60, 85, 100, 130
"""Steps at which the first attempt damages the weights, and is killed; at which the second halts; the last."""


def main(out: Path) -> None:
    dist.init_process_group("gloo")
    rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)))
    optimizer = AdamW(model.parameters(), lr=1e-3)
    data = list(torch.randn(600, 16, 8, generator=torch.Generator().manual_seed(100 + rank)))
    with sealegs.Guard(
        model,
        optimizer,
        run=out / "run",
        resume="auto",
        clip=1.0,
        playbook=sealegs.Playbook.standard(),
        checkpoint_every=Checkpointing(every=20, snapshot_every=20),
    ) as guard:
        assert guard.loop.recovery is not None
        ledger = guard.loop.recovery.bookkeeping()
        (out / f"{attempt}-{rank}.json").write_text(json.dumps({"number": guard.number, "books": ledger}))
        is_damaged = False
        for batch in guard.batches(data):
            if attempt == 0 and guard.number == DAMAGED and not is_damaged:
                is_damaged = True
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(math.inf)
            if attempt == 0 and guard.number == KILLED and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            loss = (model(batch) - batch[:, :4]).square().mean()
            if attempt == 1 and guard.number >= HALTED:
                loss = loss * math.nan
            loss.backward()
            guard.step(loss)
            assert guard.loop.checkpoints is not None
            # as on a disk that is faster than the training: which ones there are is known
            guard.loop.checkpoints.wait()
            if guard.number >= LAST:
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
