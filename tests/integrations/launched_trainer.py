"""Trainings of a program that knows of no guard, but for one: run by test_launch.py below `sealegs run`.

Prints the weights and moments that each ended with; before them what the example of LoRA does, where PEFT is installed.
"""

import json
import runpy
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.integrations import small
from torch.utils.data import IterableDataset


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from ({"input_ids": row, "labels": row} for row in small.rows())


def end_of(trainer: Any, checkpoint: str | None = None, faults: tuple[str, ...] = ()) -> str:
    with small.broken(trainer.model, lambda: trainer.state.global_step, faults):
        trainer.train(resume_from_checkpoint=checkpoint)
    return small.digest(trainer.model, trainer.optimizer.optimizer)


def main(out: Path) -> None:
    found = {
        "healthy": end_of(small.trainer(out / "healthy")),
        "struck": end_of(small.trainer(out / "struck"), faults=(f"nan-gradient@{small.NAN}",)),
    }
    own = small.trainer(out / "own", max_steps=5)
    small.attached(own, out / "own-run")
    found["own"] = end_of(own)
    found["refused"] = end_of(small.trainer(out / "refused", max_steps=5, auto_find_batch_size=True))
    saving = {"save_strategy": "steps", "save_steps": 10, "max_steps": 20}
    found["saved"] = end_of(small.trainer(out / "saved", **saving))
    resumed = small.trainer(out / "saved", **saving)
    found["resumed"] = end_of(resumed, str(out / "saved" / "checkpoint-10"))
    (out / "saved" / "checkpoint-10" / "sealegs.json").write_text("{")
    found["damaged"] = end_of(small.trainer(out / "saved", **saving), str(out / "saved" / "checkpoint-10"))
    found["stream"] = end_of(small.trainer(out / "stream", data=Stream(), max_steps=5))
    found["left"] = str(sorted(name for name in vars(resumed) if "sealegs" in name))
    if find_spec("peft") is not None:
        sys.argv = ["lora.py", "--steps", "30"]
        runpy.run_path(str(Path(__file__).parents[2] / "examples" / "lora.py"), run_name="__main__")
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
