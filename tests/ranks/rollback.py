"""A run on several ranks whose weights are damaged, under DDP and under FSDP2: run by test_rollback.py.

Writes what each rank saw to OUT/<rank>.json.
"""

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW

import sealegs
from sealegs.guard_options import Checkpointing

DAMAGED, LAST = 100, 140
"""The step before which the weights are damaged, and the last."""


def wrapped(wrapper: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    if wrapper == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    return model


def digest(model: nn.Module, optimizer: AdamW) -> str:
    """Weights and moments of this rank."""
    parts = []
    for parameter in model.parameters():
        state = optimizer.state.get(parameter, {})
        for tensor in (parameter, *(state[key] for key in sorted(state))):
            held = tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()
            parts.append(held.double().flatten())
    return hashlib.sha256(torch.cat(parts).numpy().tobytes()).hexdigest()


def damage(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            local: Any = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            local.mul_(30.0)


def run(wrapper: str, out: Path, rank: int) -> dict[str, Any]:
    model = wrapped(wrapper)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(100 + rank)
    data = list(torch.randn(400, 16, 8, generator=generator))
    saw: dict[str, Any] = {"digests": [], "numbers": [], "batches": []}
    is_damaged = False
    with sealegs.Guard(
        model,
        optimizer,
        run=out / wrapper,
        clip=1.0,
        playbook=sealegs.Playbook.standard(),
        checkpoint_every=Checkpointing(every=50, snapshot_every=20),
    ) as guard:
        for batch in guard.batches(data):
            if guard.number == DAMAGED and not is_damaged:
                is_damaged = True
                damage(model)
            loss = (model(batch) - batch[:, :4]).square().mean()
            loss.backward()
            guard.step(loss)
            assert guard.loop.checkpoints is not None
            # as on a disk that is faster than the training: the state is there at the end
            guard.loop.checkpoints.wait()
            saw["digests"].append(digest(model, optimizer))
            saw["numbers"].append(guard.number)
            if guard.number >= LAST:
                break
        saw["skipped"] = guard.loop._batches.skipped
        assert guard.loop.checkpoints is not None
        saw["tags"] = guard.loop.checkpoints.tags()
    return saw


class Mixture(Sequence[tuple[torch.Tensor, torch.Tensor, str]]):
    """Rows of two sources; the second is noise from some batch on. Rank 1 has none of it, so it suspects nothing."""

    def __init__(self, rank: int) -> None:
        generator = torch.Generator().manual_seed(200 + rank)
        self.rows = torch.randn(400, 16, 8, generator=generator)
        self.noise = torch.randint(0, 9, (400,), generator=generator) * (rank == 0)
        self.weights = {"good": 1.0, "noise": 1.0}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        noise = int(self.noise[index]) if self.weights["noise"] else 0
        targets = self.rows[index, :, :4].clone()
        if index >= DAMAGED:
            targets[:noise] *= 30.0
        return self.rows[index], targets, f"good={16 - noise} noise={noise}"

    def reweight(self, source: str, weight: float) -> None:
        self.weights[source] = weight


def poisoned(out: Path, rank: int) -> dict[str, Any]:
    """What each rank does about bad data whose source one of them alone can name."""
    model = wrapped("ddp")
    optimizer = AdamW(model.parameters(), lr=1e-3)
    mixture = Mixture(rank)
    playbook = sealegs.Playbook.standard()
    with sealegs.Guard(
        model,
        optimizer,
        run=out / "poisoned",
        clip=1.0,
        playbook=playbook,
        checkpoint_every=Checkpointing(snapshot_every=20),
    ) as guard:
        for batch, targets, sources in guard.batches(mixture):
            loss = (model(batch) - targets).square().mean()
            loss.backward()
            guard.step(loss, sources=sources)
            if guard.number >= LAST + 40:
                break
    return {"weights": mixture.weights, "digest": digest(model, optimizer)}


def main(out: Path) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=world)
    saw = {wrapper: run(wrapper, out, rank) for wrapper in ("ddp", "fsdp2")}
    saw["poisoned"] = poisoned(out, rank)
    (out / f"{rank}.json").write_text(json.dumps(saw))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
