"""The same training on each rank twice, without a guard and with one that is closed on the way: see test_ranks.py."""

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import sealegs

GUARDED, STEPS = 30, 32
"""After the guarded ones the guard is closed."""


KINDS = ("dense", "in views", "sparse", "clipped")
CLIP = 1e-4


def network(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Embedding(50, 16, sparse=True) if kind == "sparse" else nn.Linear(8, 16)
    more = (nn.Linear(16, 16) for _ in range(8 if kind == "clipped" else 0))  # of few norms most sums are the same
    return nn.Sequential(first, nn.GELU(), *more, nn.Linear(16, 4))


def rows(kind: str) -> Tensor:
    return torch.randint(0, 50, (16,)) if kind == "sparse" else torch.randn(16, 8)


def trained(rank: int, kind: str, *, has_guard: bool) -> list[str]:
    """Digests of weights and moments after each step, with a guard for the first of them or without."""
    model = nn.parallel.DistributedDataParallel(network(kind), gradient_as_bucket_view=kind == "in views")
    optimizer = SGD(model.parameters(), lr=1e-2) if kind == "sparse" else AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(100 + rank)
    seen = []
    clip = CLIP if kind == "clipped" else None
    guard = sealegs.Guard(model, optimizer, run=None, clip=clip) if has_guard else None
    for step in range(STEPS):
        with model.no_sync() if guard is None else guard.accumulate() if step < GUARDED else model.no_sync():
            (model(rows(kind)).square().mean() / 2).backward()
        loss = model(rows(kind)).square().mean() / 2
        loss.backward()
        if guard is not None and step < GUARDED:
            guard.step(loss)
        else:
            if clip is not None:
                assert nn.utils.clip_grad_norm_(model.parameters(), clip) > clip, "else this tests nothing"
            optimizer.step()
            optimizer.zero_grad()
        if guard is not None and step == GUARDED - 1:
            guard.close()
        moments = [moment for state in optimizer.state.values() for moment in state.values()]
        whole = torch.cat([tensor.detach().flatten() for tensor in (*model.parameters(), *moments)])
        seen.append(hashlib.blake2b(whole.numpy().tobytes()).hexdigest())
    if guard is not None:
        assert guard.loop._meter.norms_before is not None
        assert guard.loop._meter.norms_before.collect() is None, "a guard that is closed keeps nothing"
    return seen


def main(out: Path) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=world)
    saw = [[trained(rank, kind, has_guard=has_guard) for has_guard in (False, True)] for kind in KINDS]
    (out / f"{rank}.json").write_text(json.dumps(saw))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
