"""A fine-tune is run again from a capsule that has its adapters: on the same base to the last bit, on no other."""

import math
from pathlib import Path
from typing import Any

import pytest
from tests.state.adapters import adapted, loss_of, texts, trained_bytes
from torch.optim import AdamW

from sealegs import Guard, Playbook, Subject
from sealegs.capsule.read import open_capsule
from sealegs.errors import SourceError
from sealegs.guard_options import Checkpointing, Telemetry
from sealegs.replay.rerun import Rerun
from sealegs.state import checkpoint_files

BAD = 76


def subject(seed: int = 0) -> Subject:
    model = adapted("LoRA", seed)
    optimizer = AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
    return Subject(model=model, optimizers=[optimizer], loss=lambda batch: loss_of(model, batch))


@pytest.fixture(scope="module")
def incident(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That of a step that is not finite, 26 steps after a snapshot."""
    folder: Path = tmp_path_factory.mktemp("fine-tune") / "a"
    trained: Any = subject()
    with Guard(
        trained.model,
        trained.optimizers,
        run=folder,
        playbook=Playbook.standard(),
        checkpoint_every=Checkpointing(),
        telemetry=Telemetry(sample_every=0),
    ) as guard:
        for batch in guard.batches(texts()):
            loss = loss_of(trained.model, batch) * (math.nan if guard.number == BAD else 1.0)
            loss.backward()
            guard.step(loss)
            if guard.number > BAD + 20:
                break
    return folder / "incidents" / f"step-{BAD}"


def test_steps_are_run_again_bit_for_bit(incident: Path) -> None:
    capsule = open_capsule(incident)
    state = capsule.state()
    assert "inside.base.weight" in state.plain["frozen"]
    held = checkpoint_files.tensors_in(capsule.folder / "state").items()
    size = sum(each.size.numel() * each.properties.dtype.itemsize for name, each in held if not name.startswith("rng/"))
    assert size < 1.1 * trained_bytes(adapted("LoRA")) + 1024, "with the statistics of the norm"
    steps = range(50, BAD)
    assert set(steps) <= set(capsule.steps())
    rerun = Rerun(capsule, subject(), state, capsule.steps())
    for _ in range(2):  # as often as is needed
        rerun.go_to(BAD)
        assert [rerun.seen[step].loss for step in steps] == [rerun.rows[step]["loss"] for step in steps]
        rerun.hold(BAD - 3)
    assert "model/inside.base.weight" not in rerun.loop.capture().tensors


def test_on_another_base_nothing_is_run_again(incident: Path) -> None:
    capsule = open_capsule(incident)
    with pytest.raises(SourceError, match=r"base model is another: table\.weight"):
        Rerun(capsule, subject(seed=3), capsule.state(), capsule.steps()).go_to(BAD)
