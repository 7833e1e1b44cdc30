"""A guarded loop on several ranks, with a fault after the other: run by test_ranks.py on each of them.

Writes what each rank saw to OUT/<rank>.json.
"""

import argparse
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW

import sealegs
from sealegs.errors import RankMissing
from sealegs.faults.injector import inject
from sealegs.faults.spec import parse
from sealegs.guard_options import Telemetry
from sealegs.signals.meter import CHECKSUM_STEPS
from sealegs.signals.ranks import Ranks

FAULTS = {
    12: "nan-gradient:rank=1,tensor=2.weight@12",
    16: "gradient-scale:factor=1000,rank=1@16",
    20: "bit-flip:rank=1,tensor=4.weight@20",
}
NAN_LOSS = 24
"""On rank 0."""
DAMAGED = 30
"""A weight of rank 1 is changed behind everyone's back."""
MISSING = CHECKSUM_STEPS + 3
"""Rank 1 does not come to this step."""
SLOW_RANK, SLOW_S = 2, 0.03
"""A rank that is slow from the damage on, where there are so many, and by how many seconds a step."""
TIMEOUT_S = 3.0


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))


def wrapped(wrapper: str) -> nn.Module:
    model = network()
    if wrapper == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer)
    fully_shard(model)
    return model


def digest(model: nn.Module, optimizer: AdamW) -> str:
    """Weights, moments and step counts of this rank."""
    parts = []
    for parameter in model.parameters():
        state = optimizer.state.get(parameter, {})
        for tensor in (parameter, *(state[key] for key in sorted(state))):
            held = tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()
            parts.append(held.double().flatten())
    return hashlib.sha256(torch.cat(parts).numpy().tobytes()).hexdigest()


def main(wrapper: str, out: Path) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=world)
    model = wrapped(wrapper)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    saw: dict[str, Any] = {"verdicts": [], "before": {}, "after": {}, "error": None, "waited_s": None}
    guard = sealegs.Guard(
        model,
        optimizer,
        run=out / "run",
        clip=1.0,
        telemetry=Telemetry(sample_every=5, ranks=Ranks(timeout_s=TIMEOUT_S)),
    )
    faults = [parse(text) for text in FAULTS.values()]
    with inject(faults, model, clock=lambda: guard.number, rank=rank) as injector:
        torch.manual_seed(100 + rank)
        for step in range(MISSING + 1):
            for _ in range(2 if step <= DAMAGED else 0):  # the first micro-batch is not exchanged
                with guard.accumulate():
                    (model(torch.randn(16, 8)).square().mean() / 3).backward()
            if step > DAMAGED and rank == SLOW_RANK:
                time.sleep(SLOW_S)
            loss = model(torch.randn(16, 8)).square().mean() / 3
            loss.backward()
            if step == NAN_LOSS and rank == 0:
                loss = loss * float("nan")
            if step == DAMAGED and rank == 1 and wrapper == "ddp":
                with torch.no_grad():
                    next(model.parameters()).view(-1)[0].mul_(1 + 1e-6)
            if step == MISSING and rank == 1:
                while not all((out / f"{other}.json").exists() for other in range(world) if other != rank):
                    time.sleep(0.1)  # alive, and elsewhere, until all others have gone
                break
            saw["before"][step] = digest(model, optimizer)
            began = time.monotonic()
            try:
                verdict = guard.step(loss)
            except RankMissing as error:
                saw["error"], saw["waited_s"] = str(error), time.monotonic() - began
                break
            saw["after"][step] = digest(model, optimizer)
            saw["verdicts"].append([str(verdict), verdict.go, verdict.culprit])
        saw["strikes"] = [str(strike) for strike in injector.strikes]
    guard.close()
    (out / f"{rank}.json").write_text(json.dumps(saw))
    print(f"rank {rank} of {world} is done", file=sys.stderr, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wrapper", choices=["ddp", "fsdp2"])
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    main(arguments.wrapper, arguments.out)
