"""A training whose number of ranks changes: run under torchrun, or alone. Says of each step which samples it reads.

Each life writes a line a step to OUT/steps/<life>-<rank>.jsonl, before the update; the last one writes OUT/end.json.
"""

import json
import os
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import sealegs
from sealegs.guard_options import Checkpointing

SAMPLES, GLOBAL_BATCH = 203, 16
"""An odd number, so that two ranks cannot share an epoch evenly; samples of a step, however many ranks there are."""


def data() -> TensorDataset:
    """Numbers of the samples, rows, and what is to be learned of them."""
    draw = torch.Generator().manual_seed(5)
    rows = torch.randn(SAMPLES, 8, generator=draw)
    wanted = torch.sin(rows @ torch.randn(8, 2, generator=draw)) + 0.1 * torch.randn(SAMPLES, 2, generator=draw)
    return TensorDataset(torch.arange(SAMPLES), rows, wanted)


def loss_of(model: nn.Module, rows: Tensor, wanted: Tensor) -> Tensor:
    """The mean over rows and columns."""
    loss: Tensor = (model(rows) - wanted).square().mean()
    return loss


@contextmanager
def process_group() -> Iterator[tuple[int, int]]:
    """Rank and number of ranks; alone without torchrun."""
    if "RANK" not in os.environ:
        yield 0, 1
        return
    dist.init_process_group("gloo")
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


def wrapped(network: nn.Sequential, wrapper: str) -> nn.Module:
    """On several ranks."""
    if wrapper == "ddp":
        return nn.parallel.DistributedDataParallel(network)
    fully_shard(network[0])
    fully_shard(network)
    return network


def main(out: Path, epochs: int, seed: int, pause_s: float, wrapper: str) -> None:
    """Train to the end of the last epoch, or until somebody kills this."""
    torch.set_num_threads(1)
    with process_group() as (rank, ranks):
        life = [f"{time.time_ns()}-{uuid.uuid4().hex[:6]}"]
        if ranks > 1:
            dist.broadcast_object_list(life)
        torch.manual_seed(seed)
        network = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2))
        model = wrapped(network, wrapper) if ranks > 1 else network
        optimizer = AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
        samples = data()
        sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(
            samples, num_replicas=ranks, rank=rank, seed=seed
        )
        loader = DataLoader(samples, batch_size=GLOBAL_BATCH // ranks, sampler=sampler)
        steps = out / "steps" / f"{life[0]}-{rank}.jsonl"
        steps.parent.mkdir(parents=True, exist_ok=True)
        with (
            sealegs.Guard(
                model,
                optimizer,
                run=out / "run",
                clip=1.0,
                playbook=sealegs.Playbook.standard(),
                checkpoint_every=Checkpointing(every=4),
                resume=sealegs.Elastic(),
            ) as guard,
            steps.open("w", buffering=1) as log,
        ):
            about = {"ranks": ranks, "rank": rank, "begins": guard.number}
            log.write(json.dumps(about) + "\n")
            while guard.epoch < epochs:
                sampler.set_epoch(guard.epoch)
                for numbers, rows, wanted in guard.batches(loader):
                    epoch = guard.loop.data.epoch
                    log.write(json.dumps({"step": guard.number, "epoch": epoch, "samples": numbers.tolist()}) + "\n")
                    loss = loss_of(model, rows, wanted)
                    loss.backward()
                    guard.step(loss)
                    time.sleep(pause_s)
        with torch.no_grad():
            end = {"loss": float(loss_of(model, *samples.tensors[1:])), "steps": guard.number}
        if rank == 0:
            (out / "end.json").write_text(json.dumps(end))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), sys.argv[5])
