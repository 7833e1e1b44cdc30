"""A model whose attention logits are too large, on several ranks: run by test_qk_clip.py on each of them.

Trains it with a limit and with one that is far away, and writes what came of it to OUT/<rank>.json.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW

import sealegs
from sealegs.guard_options import Clipping, Telemetry
from sealegs.lab.model import Transformer
from sealegs.lab.settings import ModelSettings
from sealegs.signals.attention import HeadLogits

LIMIT, EVERY, STEPS = 3.0, 4, 5
NAME = "blocks.1.attention.query_key_value.weight"


def wrapped(wrapper: str) -> nn.Module:
    torch.manual_seed(0)
    model = Transformer(ModelSettings(width=32, layers=2, heads=4, hidden=48, context=12, vocabulary=64))
    with torch.no_grad():
        model.get_parameter(NAME)[:64].mul_(4)
    if wrapper == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def whole(parameter: Any) -> Tensor:
    """The same on every rank."""
    tensor: Tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return tensor.detach()


def trained(wrapper: str, rank: int, limit: float, folder: Path) -> tuple[dict[str, Tensor], list[list[float]]]:
    """The weights, and what this rank found its own largest logits to be."""
    model, own = wrapped(wrapper), []
    collect = HeadLogits.collect

    def noted(heads: HeadLogits) -> Tensor | None:
        if (found := collect(heads)) is not None:
            own.append(found.tolist())
        return found

    heads_of: Any = HeadLogits
    heads_of.collect = noted
    random = torch.Generator().manual_seed(100 + rank)
    telemetry = Telemetry(sample_every=EVERY)
    clip = Clipping(norm=1.0, attention_logit=limit)
    with sealegs.Guard(
        model,
        AdamW(model.parameters(), lr=1e-3),
        run=folder,
        clip=clip,
        telemetry=telemetry,
    ) as guard:
        for _ in range(STEPS):
            batch = torch.randint(64, (4, 13), generator=random)
            logits = model(batch[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            guard.step(loss)
    heads_of.collect = collect
    return {name.removeprefix("module."): whole(p) for name, p in model.named_parameters()}, own


def main(wrapper: str, out: Path) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=world)
    limited, own = trained(wrapper, rank, LIMIT, out / "limited")
    free, _ = trained(wrapper, rank, 1000.0, out / "free")
    ratio = (limited[NAME] / free[NAME])[:64].view(2, 4, -1)
    saw = {
        "own": own,
        "ratio": ratio[:, :, 0].tolist(),
        "spread": float((ratio / ratio[:, :, :1] - 1).abs().max()),
        "sums": {name: float(p.double().sum()) for name, p in limited.items()},
        "changed": [name for name in limited if not torch.equal(limited[name], free[name])],
    }
    (out / f"{rank}.json").write_text(json.dumps(saw))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wrapper", choices=["ddp", "fsdp2"])
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    main(arguments.wrapper, arguments.out)
