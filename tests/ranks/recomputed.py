"""Guarded loops on several ranks, whose micro-batches are computed again on others: run by test_recomputed.py.

Writes what each rank saw of each case to OUT/<rank>.json.
"""

import argparse
import hashlib
import json
import os
import random
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW

import sealegs
from sealegs.errors import ConfigError
from sealegs.faults.injector import inject
from sealegs.guard_options import Telemetry
from sealegs.state.rng import rng_now

EVERY, STEPS = 3, 10


@dataclass(frozen=True)
class Case:
    fault: str = ""
    strikes: str = "own"
    """In which passes of a step: this rank's own, those for others, or all."""
    kind: str = "ddp"
    every: int = EVERY
    micro_batches: int = 1
    has_playbook: bool = False
    """Then there are checkpoints, too."""
    goes_on: str = ""
    """With the run of another case, from its last checkpoint."""


CASES = {
    "without": Case(every=0),
    "with": Case(),
    "without, two micro-batches": Case(every=0, micro_batches=2),
    "with, two micro-batches": Case(micro_batches=2),
    "gradient": Case("bit-flip:rank=1@6"),
    "gradient, with a playbook": Case("bit-flip:rank=1@6", has_playbook=True, micro_batches=2),
    "gone on with": Case(has_playbook=True, micro_batches=2, goes_on="gradient, with a playbook"),
    "activation": Case("bit-flip:in=activation,module=inner,rank=2@6", strikes="others"),
    "lasting": Case("gradient-scale:factor=1.000001,rank=3,steps=4@6", strikes="all"),
    "fsdp2 without": Case(kind="fsdp2", every=0),
    "fsdp2": Case("bit-flip:rank=1,tensor=out.weight@6", kind="fsdp2"),
    "own generator": Case(kind="own generator"),
    "buffers of its own": Case(kind="buffers of its own"),
    "buffers of its own, without": Case(kind="buffers of its own", every=0),
}


class Network(nn.Module):
    """What depends on more than weights and batch: running means, random numbers, a buffer that is counted up."""

    def __init__(self, *, generator: torch.Generator | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 8)
        self.inner = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.out = nn.Linear(8, 4)
        self.register_buffer("count", torch.zeros(()))
        self._generator = generator

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.count, torch.Tensor)
        self.count += 1
        x = self.norm(self.inner(self.embedding(ids).mean(1)))
        noise = 0.01 * random.random() + 0.01 * numpy.random.random()  # noqa: S311 - no secret
        x = nn.functional.dropout(x, 0.2) * (1 + noise)
        if self._generator is not None:
            x = x * torch.rand(x.shape, generator=self._generator)
        out: torch.Tensor = self.out(x * torch.tanh(1 + self.count / 10)).square()
        return out


def digest(model: nn.Module, optimizer: AdamW) -> str:
    """Everything that the next step depends on."""
    held: list[Any] = [*model.parameters(), *model.buffers()]
    held += [state[key] for state in optimizer.state.values() for key in sorted(state)]
    total = hashlib.sha256(repr(rng_now()[1]).encode())
    for tensor in (*held, *rng_now()[0].values()):
        here = tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()
        total.update(here.double().numpy().tobytes())
    return total.hexdigest()


def run(case: Case, name: str, out: Path, rank: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(rank) if case.kind == "own generator" else None
    inner = Network(generator=generator)
    if case.kind == "fsdp2":
        fully_shard(inner.inner)
        fully_shard(inner)
        model: nn.Module = inner
    else:
        keeps = case.kind == "buffers of its own"
        model = nn.parallel.DistributedDataParallel(inner, broadcast_buffers=not keeps)
        if keeps:
            inner.get_buffer("count").add_(rank)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(100 + rank)
    random.seed(rank)
    numpy.random.seed(rank)
    batches = [torch.randint(20, (6, 5)) for _ in range(STEPS * case.micro_batches)]
    guard = sealegs.Guard(
        model,
        optimizer,
        run=out / (case.goes_on or name),
        playbook=sealegs.Playbook.standard() if case.has_playbook else None,
        checkpoint_every=EVERY if case.has_playbook else 0,
        resume=bool(case.goes_on),
        telemetry=Telemetry(recompute=case.every or False, sample_every=2),
    )

    def clock() -> int:
        is_hit = case.strikes == "all" or (case.strikes == "others") == guard.is_probe
        return guard.number if is_hit else -1

    digests: dict[str, str] = {}
    passes = 0
    faults = [case.fault] if case.fault else []
    with guard, inject(faults, model, clock=clock, rank=rank):
        for taken, batch in enumerate(guard.batches(batches), 1):
            is_last = taken % case.micro_batches == 0
            with nullcontext() if is_last else guard.accumulate():
                loss = model(batch).mean() / case.micro_batches
                loss.backward()
            batch.zero_()  # a loop may do what it likes with its batch
            if is_last:
                number = guard.number
                guard.step(loss)
                passes += 1
                if guard.number > number:
                    digests[str(number)] = digest(model, optimizer)
        if case.has_playbook:  # a regular one comes later where the one before is still being written
            guard.checkpoint(wait=True)
    return {"digests": digests, "passes": passes}


def main(out: Path) -> None:
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=world)
    saw: dict[str, Any] = {name: run(case, name, out, rank) for name, case in CASES.items()}
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    model.module[1] = nn.SyncBatchNorm(2)  # on CPUs DDP does not take one
    try:
        sealegs.Guard(model, AdamW(model.parameters()), run=None, telemetry=Telemetry(recompute=True))
    except ConfigError as error:
        saw["refused"] = str(error)
    (out / f"{rank}.json").write_text(json.dumps(saw))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    main(parser.parse_args().out)
