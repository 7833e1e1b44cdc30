"""A guarded run that is saved by some ranks and gone on with by others: run by test_elastic.py on each of them.

Writes what each rank saw to OUT/<wrapper>-<ranks>-<rank>.json.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from torch.utils.data import DataLoader, DistributedSampler

import sealegs
from sealegs.state import checkpoints
from sealegs.state.training_state import TrainingState

SAMPLES, GLOBAL_BATCH, SAVED = 101, 12, 13
"""The last is a step in the second epoch, which has 9 of them."""
ROWS: Any = [(number, row) for number, row in enumerate(torch.randn(SAMPLES, 6, generator=torch.Generator()))]


def network(wrapper: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6))
    if wrapper == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if wrapper == "fsdp2":
        fully_shard(model[0])
        fully_shard(model)
    return model


def whole(model: nn.Module, optimizer: AdamW) -> dict[str, list[float]]:
    """Weights and moments, wherever their shards are."""
    state = TrainingState(model=model, optimizers=[optimizer]).capture()
    tensors = {name: tensor for name, tensor in state.tensors.items() if not name.startswith("rng/")}
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).flatten().tolist()
        for name, tensor in sorted(tensors.items())
    }


def train(wrapper: str, out: Path, rank: int, ranks: int, until: int | None) -> dict[str, Any]:
    """Up to a step, which is saved, or from there to the end of the epoch."""
    model = network(wrapper)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    sampler: DistributedSampler[Any] = DistributedSampler(ROWS, num_replicas=ranks, rank=rank, seed=4)
    loader = DataLoader(ROWS, batch_size=GLOBAL_BATCH // ranks, sampler=sampler)
    run = out / wrapper
    with sealegs.Guard(model, optimizer, run=run, clip=1.0, checkpoint_every=1000, resume="auto") as guard:
        saw: dict[str, Any] = {"begins": guard.number, "epoch": guard.epoch, "samples": []}
        saw["state"], saw["watch"] = whole(model, optimizer), guard.state_dict()["watch"]
        last = guard.epoch + 1
        while guard.epoch < (last if until is None else 10):
            sampler.set_epoch(guard.epoch)
            for numbers, rows in guard.batches(loader):
                loss = (model(rows) - rows.flip(1)).square().mean()
                loss.backward()
                guard.step(loss)
                saw["samples"].append([guard.loop.data.epoch, numbers.tolist()])
                if guard.number == until:
                    break
            if guard.number == until:
                break
        if until is not None:
            guard.checkpoint(wait=True)
            saw["state"], saw["watch"] = whole(model, optimizer), guard.state_dict()["watch"]
    return saw


def train_on_a_list(out: Path) -> None:
    """A loader that does not say how ranks share it."""
    model = network("none")
    optimizer = AdamW(model.parameters())
    with sealegs.Guard(model, optimizer, run=out / "list", checkpoint_every=1000, resume="auto") as guard:
        for rows in guard.batches([torch.ones(2, 6)] * 5):
            loss = model(rows).square().mean()
            loss.backward()
            guard.step(loss)
            if guard.number == 2:
                guard.checkpoint(wait=True)
                break


def refused_without_shared_storage(out: Path, rank: int) -> str:
    """The last rank is on a machine of its own."""
    model = network("ddp")
    run = out / ("disk-of-another" if rank == dist.get_world_size() - 1 else "disk") / "run"
    checkpoints.SEEN_WITHIN_S = 0.3
    try:
        sealegs.Guard(model, AdamW(model.parameters()), run=run, checkpoint_every=5)
    except sealegs.ConfigError as error:
        return str(error)
    return ""


def main(out: Path) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{out}/store-{ranks}", rank=rank, world_size=ranks)
    for wrapper in ("ddp", "fsdp2"):
        saw = train(wrapper, out, rank, ranks, SAVED if ranks == 2 else None)
        (out / f"{wrapper}-{ranks}-{rank}.json").write_text(json.dumps(saw))
    if ranks == 2:
        train_on_a_list(out)
    else:
        (out / f"unshared-{rank}.json").write_text(json.dumps(refused_without_shared_storage(out, rank)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
