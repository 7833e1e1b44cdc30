"""Runs that are killed in the middle of what must be whole: the resumed run ends well."""

import os
import signal
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from tests.forked import start

from sealegs.faults.practice import disturbed
from sealegs.faults.spec import parse
from sealegs.lab.settings import SIZES
from sealegs.lab.sources import open_data
from sealegs.lab.train import resolved, train
from sealegs.record.run import open_run

pytestmark = pytest.mark.xdist_group("jobs")  # the process that others are forked from is made once

NANO = SIZES["nano"]
CADENCE = replace(NANO.cadence, evaluate_steps=0, checkpoint_steps=20, snapshot_steps=20, evaluate_batches=16)
SETTINGS = resolved(
    replace(NANO, steps=60, threads=1, playbook="standard", cadence=CADENCE, model=replace(NANO.model, layers=1))
)


def train_and_be_killed(folder: Path, inside: str) -> None:
    """In a process of its own, which ends inside of a function as long as ``armed`` is there."""
    module_name, _, name = inside.rpartition(".")
    module = import_module(module_name)
    before = getattr(module, name)

    def killed(*args: Any, **how: Any) -> Any:
        if (folder / "armed").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return before(*args, **how)

    setattr(module, name, killed)
    disturb = partial(disturbed, [parse("bit-flip:in=weight@30")], SETTINGS.model.vocabulary)
    train(SETTINGS, open_data(SETTINGS), folder / "a", disturb=disturb, resume=(folder / "a").exists())


@pytest.mark.parametrize("inside", ["sealegs.state.memory.copy_all", "sealegs.state.checkpoint_files.write_tensors"])
def test_a_kill_in_the_middle_loses_nothing(inside: str, tmp_path: Path) -> None:
    """SIGKILL while a snapshot is restored, and while a checkpoint is written: the resumed run ends well."""
    (tmp_path / "armed").touch()

    def run() -> int | None:
        process = start(train_and_be_killed, tmp_path, inside)
        process.join()
        return process.exitcode

    assert run() == -9
    (tmp_path / "armed").unlink()
    assert run() == 0
    assert open_run(tmp_path / "a").steps.tolist()[-1] == 60
