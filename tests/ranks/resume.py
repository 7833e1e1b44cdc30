"""Training that is saved, stopped and gone on with, in one process or on several ranks: run by test_resume.py.

On each rank it does, for DDP and for FSDP2, everything that needs several ranks, and writes what each rank saw to
OUT/<wrapper>-<rank>.json.
"""

import argparse
import hashlib
import json
import os
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR, MultiStepLR

from sealegs.state.checkpoints import Checkpoints, StoredState
from sealegs.state.training_state import TrainingState

SAVED, LAST = 3, 6
"""Steps."""


class Network(nn.Module):
    """A bit of everything: sizes that two ranks cannot share evenly, tied and frozen weights, one unused, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(7, 5)
        self.outside = nn.Linear(5, 7, bias=False)
        self.again = nn.Linear(5, 7)
        self.again.weight = self.outside.weight
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, rows: Tensor) -> Tensor:
        self.seen += 1
        hidden = torch.tanh(self.inside(rows))
        output: Tensor = self.outside(hidden) + self.again(hidden) - self.frozen(rows) + 0 * self.unused.sum()
        return output


class Place:
    """Data, as far as a checkpoint knows them."""

    def __init__(self) -> None:
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.next = state["next"]


def world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def job(wrapper: str, start: int = 0) -> TrainingState:
    """A model, wrapped, and what trains it: two optimizers, two schedules."""
    torch.manual_seed(start)
    network = Network()
    model: nn.Module = network
    if wrapper == "ddp":
        model = nn.parallel.DistributedDataParallel(network)
    if wrapper == "fsdp2":
        fully_shard(network.inside)
        fully_shard(network)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2 and parameter.requires_grad]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    optimizers = [AdamW(matrices, lr=0.05, fused=True), SGD(vectors, lr=0.05, momentum=0.9)]
    return TrainingState(
        model=model,
        optimizers=optimizers,
        schedulers=[LambdaLR(optimizers[0], lambda step: 1 / (1 + step)), MultiStepLR(optimizers[1], [2, 4])],
        data=Place(),
    )


def step(subject: TrainingState) -> float:
    """One step on the next batch, of which each rank has its rows; the loss of all of them."""
    rank, ranks = world()
    assert isinstance(subject.data, Place)
    rows = torch.randn(8, 7, generator=torch.Generator().manual_seed(subject.data.next))[rank::ranks]
    subject.data.next += 1
    loss = subject.model(rows).square().mean()
    loss.backward()
    for optimizer in subject.optimizers:
        optimizer.step()
        optimizer.zero_grad()
    for scheduler in subject.schedulers:
        scheduler.step()
    losses = loss.detach().clone()
    if ranks > 1:
        dist.all_reduce(losses)
    return float(losses) / ranks


def steps(subject: TrainingState, count: int) -> list[float]:
    return [step(subject) for _ in range(count)]


def digests(state: StoredState) -> dict[str, str]:
    """Of everything but the random state: whole tensors, wherever their shards are."""
    found = {}
    for name, tensor in sorted(state.tensors.items()):
        if not name.startswith("rng/"):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            found[name] = hashlib.sha256(whole.detach().numpy().tobytes()).hexdigest()
    return found


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)


def draw() -> list[float]:
    """From the generators that are not the data's."""
    return [*torch.rand(3).tolist(), random.random()]  # noqa: S311


def alone(folder: Path) -> dict[str, Any]:
    """What one process does: train, save on the way, go on."""
    subject = job("none")
    seed(50)
    saw: dict[str, Any] = {"losses": steps(subject, SAVED)}
    state = subject.capture()
    Checkpoints(folder).save(SAVED, replace(state, plain={**state.plain, "seed": 5}))
    saw["digests"], saw["draw"] = digests(state), draw()
    saw["losses"] += steps(subject, LAST - SAVED)
    return saw


def resumed(checkpoints: Checkpoints, wrapper: str, past: int = 0) -> dict[str, Any]:
    """What comes of a checkpoint, in a job that has so many steps of something else behind it."""
    found, passed_over = checkpoints.newest_intact()
    assert found == SAVED
    assert not passed_over
    subject = job(wrapper, start=9)
    steps(subject, past)
    remarks = subject.restore(checkpoints.load(SAVED, like=subject.capture()))
    saw: dict[str, Any] = {"remarks": remarks, "digests": digests(subject.capture()), "draw": draw()}
    saw["sharded"] = sorted(name for name, tensor in subject.capture().tensors.items() if isinstance(tensor, DTensor))
    return saw | {"losses": steps(subject, LAST - SAVED)}


def on_ranks(wrapper: str, out: Path) -> dict[str, Any]:
    """What several ranks do."""
    rank, _ = world()
    checkpoints = Checkpoints(out / wrapper)
    subject = job(wrapper)
    seed(100 + rank)
    saw: dict[str, Any] = {"names at first": sorted(subject.capture().tensors), "losses": steps(subject, SAVED)}

    state = subject.capture()
    saw["digests"], saw["names"] = digests(state), sorted(state.tensors)
    saw["accepted"] = checkpoints.save_soon(SAVED, state)
    saw["draw"] = draw()
    checkpoints.before_update()
    saw["losses"] += steps(subject, LAST - SAVED)  # while it is written
    checkpoints.wait()
    saw["trouble"], saw["written"] = checkpoints.failure(), [step for step, _ in checkpoints.written()]

    checkpoints._is_writing = rank == 1
    saw["accepted while one rank writes"] = checkpoints.save_soon(LAST, state)
    checkpoints._is_writing = False
    bad = replace(state, own={"not JSON": object()}) if rank == 1 else state
    checkpoints.save_soon(LAST, bad)
    checkpoints.wait()
    saw["trouble of one"] = checkpoints.failure()
    checkpoints.tag(SAVED, "healthy")
    saw["healthy"] = checkpoints.newest_healthy(before=LAST)[0]
    saw["replaced"] = checkpoints.save(SAVED, subject.capture())
    saw["left"] = sorted(file.name for file in (out / wrapper).iterdir())

    saw["gone on with"] = resumed(checkpoints, wrapper, past=1)
    saw["from one process"] = resumed(Checkpoints(out / "none"), wrapper)
    return saw


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    number, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{arguments.out}/store", rank=number, world_size=ranks)
    for each in ("ddp", "fsdp2"):
        (arguments.out / f"{each}-{number}.json").write_text(json.dumps(on_ranks(each, arguments.out)))
    dist.destroy_process_group()
