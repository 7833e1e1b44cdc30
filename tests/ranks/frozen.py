"""A program for each rank: a frozen base with trained adapters, in DDP and sharded by FSDP2, saved and gone on with."""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from sealegs.errors import SourceError
from sealegs.state.checkpoints import Checkpoints
from sealegs.state.frozen import FrozenWeights
from sealegs.state.snapshots import Snapshots
from sealegs.state.training_state import TrainingState

SAVED, LAST = 3, 6
"""Steps."""


class Adapter(nn.Module):
    """A frozen map, of a size that two ranks cannot share evenly, and a trained one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(33, 33).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, 33) / 8)
        self.up = nn.Parameter(torch.randn(33, 2) / 8)

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.base(rows) + rows @ self.down.T @ self.up.T
        return out


def job(wrapper: str, base: int = 0) -> TrainingState:
    """The adapters are the same for every base."""
    torch.manual_seed(5)
    model: nn.Module = nn.Sequential(Adapter(), nn.Tanh(), Adapter(), nn.Linear(33, 1).requires_grad_(False))
    torch.manual_seed(base)
    with torch.no_grad():
        for each in model.parameters():
            if not each.requires_grad:
                each.normal_(std=0.2)
    if wrapper == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    if wrapper == "fsdp2":
        for part in model:  # type: ignore[attr-defined]
            if isinstance(part, Adapter):
                fully_shard(part)
        fully_shard(model)
    optimizers = [AdamW(model.parameters(), lr=0.01)]
    return TrainingState(model=model, optimizers=optimizers, frozen=FrozenWeights(model, optimizers))


def rank_and_world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def steps(subject: TrainingState, first: int, last: int) -> list[float]:
    """The losses of this rank's rows."""
    rank, world = rank_and_world()
    losses = []
    for number in range(first, last):
        rows = torch.randn(8, 33, generator=torch.Generator().manual_seed(number))[rank::world]
        loss = subject.model(rows).square().mean()
        loss.backward()
        assert subject.frozen is not None
        subject.frozen.before_update()
        for optimizer in subject.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def gone_on(checkpoints: Checkpoints, wrapper: str) -> dict[str, Any]:
    """What comes of a checkpoint in a job with the same base, and what is said to one with another."""
    subject = job(wrapper)
    steps(subject, 50, 52)
    remarks = subject.restore(checkpoints.load(SAVED, like=subject.capture(with_frozen=True)))
    state = subject.capture()
    saw: dict[str, Any] = {"remarks": remarks, "left out": state.plain["frozen"], "held": sorted(state.tensors)}
    saw["losses"] = steps(subject, SAVED, LAST)
    other = job(wrapper, base=1)
    try:
        other.restore(checkpoints.load(SAVED, like=other.capture(with_frozen=True)))
    except SourceError as error:
        saw["other base"] = str(error)
    return saw


def on_ranks(wrapper: str, out: Path) -> dict[str, Any]:
    """What several ranks do."""
    checkpoints = Checkpoints(out / wrapper)
    subject = job(wrapper)
    steps(subject, 0, SAVED)
    state = subject.capture()
    saw: dict[str, Any] = {"left out": state.plain["frozen"], "held": sorted(state.tensors)}
    checkpoints.save(SAVED, state)
    assert subject.frozen is not None
    snapshots = Snapshots(subject.model, subject.optimizers, frozen=subject.frozen, promote_after=1)
    snapshots.take(SAVED, {})
    snapshots.healthy(SAVED)
    saw["snapshot"] = sum(part.nbytes for part in snapshots._buffers[0].parts.values())
    saw["losses"] = steps(subject, SAVED, LAST)
    snapshot = snapshots.newest(SAVED)
    assert snapshot is not None
    snapshots.restore_tensors(snapshot)
    saw["after a rollback"] = steps(subject, SAVED, LAST)

    weight = dict(subject.model.named_parameters())[f"{'module.' if wrapper == 'ddp' else ''}2.base.weight"]
    part = weight.to_local() if isinstance(weight, DTensor) else weight
    if dist.get_rank() == 1:
        part.data[0, 0] += 1.0
        with torch.no_grad():
            part[0, 0] += 1.0  # which torch counts
    state = subject.capture()
    saw["written to"] = ["model/2.base.weight" in state.tensors, "2.base.weight" in state.plain["frozen"]]

    saw["gone on with"] = gone_on(checkpoints, wrapper)
    saw["from one process"] = gone_on(Checkpoints(out / "none"), wrapper)
    return saw


def alone(folder: Path) -> dict[str, Any]:
    """What one process does."""
    subject = job("none")
    steps(subject, 0, SAVED)
    state = subject.capture()
    Checkpoints(folder).save(SAVED, state)
    return {"left out": state.plain["frozen"], "held": sorted(state.tensors), "losses": steps(subject, SAVED, LAST)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    number, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{arguments.out}/store", rank=number, world_size=ranks)
    for each in ("ddp", "fsdp2"):
        (arguments.out / f"{each}-{number}.json").write_text(json.dumps(on_ranks(each, arguments.out)))
    dist.destroy_process_group()
