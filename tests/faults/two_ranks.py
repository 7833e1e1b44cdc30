"""One rank of two, in runs with and without faults. Started by the fixture in conftest.py."""

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from tests.faults.loops import loss_of, net
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from sealegs.errors import ConfigError
from sealegs.faults.injector import inject
from sealegs.faults.spec import parse

RANKS = 2
STEPS = 6
MICRO_BATCHES = 2
SKIPPED = "skipped-all-reduce:steps=2,rank=1@2"
UNCLEARED = "missing-zero-grad:steps=2@2"
RUNS: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "ddp": ("ddp", [], {}),
    "ddp skipped": ("ddp", [SKIPPED], {}),
    "ddp skipped placebo": ("ddp", ["skipped-all-reduce:steps=2,rank=1,placebo=yes@2"], {}),
    "ddp skipped views": ("ddp", [SKIPPED], {"gradient_as_bucket_view": True}),
    "ddp skipped reduced twice": ("ddp", [SKIPPED], {"reduces_each": True}),
    "ddp reduced twice": ("ddp", [], {"reduces_each": True}),
    "ddp uncleared": ("ddp", [UNCLEARED], {}),
    "ddp uncleared by hand": ("ddp", [], {"uncleared": (1, 2)}),
    "fsdp": ("fsdp", [], {}),
    "fsdp uncleared": ("fsdp", [UNCLEARED], {}),
    "fsdp uncleared by hand": ("fsdp", [], {"uncleared": (1, 2)}),
    "fsdp precision": (
        "fsdp",
        ["bf16-weights:steps=3@2", "scaler-off:steps=3@2", "fp16-overflow:factor=1e6,rank=1@5"],
        {},
    ),
    "fsdp outputs": ("fsdp", ["activation-scale:factor=8,module=0,rank=1@5"], {}),
    "fsdp moments": ("fsdp", ["frozen-moment2:steps=9@2", "wrong-betas:beta1=0.5@2"], {}),
}
"""Of each: how it is wrapped, its faults, and what else is special."""


def seed_of(step: int, micro_batch: int, rank: int) -> int:
    """Of the data."""
    return step + 100 * micro_batch + 1000 * rank


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def wrapped(how: str, **options: Any) -> nn.Module:
    model = net()
    if how == "ddp":
        return DistributedDataParallel(model, **options)
    fully_shard(model[0])
    return cast(nn.Module, fully_shard(model))


def run(
    rank: int,
    how: str,
    faults: list[str],
    *,
    uncleared: tuple[int, ...] = (),
    reduces_each: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Weights before each step, gradients after its backward passes, second moments at the end."""
    model = wrapped(how, **options)
    optimizer = AdamW(model.parameters(), lr=0.01)
    weights, gradients, step = [], [], 0
    with inject(map(parse, faults), model, optimizers=optimizer, clock=lambda: step) as injector:
        while step < STEPS:
            weights.append([whole(weight) for weight in optimizer.param_groups[0]["params"]])
            for micro_batch in range(MICRO_BATCHES):
                is_last = reduces_each or micro_batch == MICRO_BATCHES - 1
                if isinstance(model, FSDPModule):
                    model.set_requires_gradient_sync(is_last)
                alone = isinstance(model, DistributedDataParallel) and not is_last
                with cast(DistributedDataParallel, model).no_sync() if alone else nullcontext():
                    loss_of(model, seed_of(step, micro_batch, rank)).backward()
            gradients.append([whole(weight.grad) for weight in optimizer.param_groups[0]["params"]])
            optimizer.step()
            if step not in uncleared:
                optimizer.zero_grad()
            step += 1
    weights.append([whole(weight) for weight in optimizer.param_groups[0]["params"]])
    moments = [whole(state["exp_avg_sq"]) for state in optimizer.state.values()]
    lines = [str(strike) for strike in injector.strikes]
    return {"weights": weights, "gradients": gradients, "moments": moments, "strikes": lines}


def refusal_of_sharded() -> str:
    model = wrapped("fsdp")
    try:
        inject([parse(SKIPPED)], model, optimizers=AdamW(model.parameters()), clock=lambda: 0)
    except ConfigError as error:
        return str(error)
    return ""


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    results: dict[str, Any] = {name: run(rank, how, faults, **rest) for name, (how, faults, rest) in RUNS.items()}
    torch.save(results | {"refusal": refusal_of_sharded()}, folder / f"{rank}.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(os.environ["RANK"]), Path(sys.argv[1]))
