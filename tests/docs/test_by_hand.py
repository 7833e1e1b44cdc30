"""What docs/loops.md gives those who can use no guard: it skips what is not finite, to the last bit."""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations import small
from tests.pages import blocks
from torch import nn

LOOP, CALLBACK = blocks((Path(__file__).parents[2] / "docs" / "loops.md").read_text("utf-8"), "python")


def test_a_loop_skips_by_hand() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    program = "\n".join(f"    {line}" for line in ["model(inputs).mean().backward()", *LOOP.splitlines()])
    kept: list[list[torch.Tensor]] = []

    def inputs() -> Iterator[torch.Tensor]:
        for step in range(4):
            kept.append([each.detach().clone() for each in model.parameters()])
            yield torch.full((2, 4), float("nan") if step == 2 else 1.0)

    names = {"torch": torch, "dist": torch.distributed, "model": model, "optimizer": optimizer, "batches": inputs()}
    exec(f"for inputs in batches:\n{program}\n    optimizer.zero_grad()", names)  # noqa: S102 - our own docs
    kept.append([each.detach().clone() for each in model.parameters()])
    moved = [not torch.equal(before[0], after[0]) for before, after in pairwise(kept)]
    assert moved == [True, True, False, True]


def _step_of(trainer: Any) -> int:
    return int(trainer.state.global_step)


@pytest.mark.xdist_group("transformers")
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")  # TrainingArguments' default
def test_a_callback_of_a_trainer_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import TrainerCallback

    names: dict[str, Any] = {"torch": torch, "TrainerCallback": TrainerCallback}
    exec(CALLBACK, names)  # noqa: S102 - our own docs
    ends = {}
    for name in ("bare", "by hand"):
        trainer = small.trainer(tmp_path / name)
        if name == "by hand":
            trainer.add_callback(names["SkipNotFinite"]())
        with small.broken(trainer.model, partial(_step_of, trainer), (f"nan-gradient@{small.NAN}",)):
            trainer.train()
        ends[name] = all(each.isfinite().all() for each in trainer.model.parameters())
    assert ends == {"bare": False, "by hand": True}
    assert f"step {small.NAN}: the gradient norm is nan, skipped" in capsys.readouterr().out
