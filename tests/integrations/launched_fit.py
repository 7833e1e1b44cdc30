"""Fits of a program that knows of no guard: run by test_launch.py below `sealegs run`.

Prints the weights and moments that each ended with; the last ones are those of the bare command.
"""

import json
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from tests.integrations import lightning_small as small
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        for row in torch.randn(small.ROWS, 8, generator=torch.Generator().manual_seed(2)):
            yield row, row.sum()


def end_of(out: Path, broken: dict[int, float] | None = None, *, data: Any = None, by_hand: bool = False) -> str:
    home = "lightning.pytorch"
    module = (small.manual_class if by_hand else small.module_class)(home)(broken)
    trainer = pl.Trainer(
        max_steps=small.STEPS,
        default_root_dir=out,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(1)
    trainer.fit(module, small.loader() if data is None else data)
    return small.digest(module.net, *trainer.optimizers)


def all_of(out: Path) -> dict[str, str]:
    stream: DataLoader[Any] = DataLoader(Stream(), small.BATCH)
    return {
        "healthy": end_of(out),
        "struck": end_of(out, {small.NAN: float("nan")}),
        "stream": end_of(out, data=stream),
        "by hand": end_of(out, by_hand=True),
    }


def main(out: Path) -> None:
    found = all_of(out)
    bare: Any = pl.Trainer
    bare.fit = bare.fit.__wrapped__
    print(json.dumps(found | {f"bare {name}": end for name, end in all_of(out).items()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
