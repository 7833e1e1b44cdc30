"""A run folder in, one damaged file of its newest checkpoint out."""

from pathlib import Path
from typing import Any

import pytest
import torch

from sealegs.errors import ConfigError, SourceError
from sealegs.faults.checkpoint import corrupt_checkpoint
from sealegs.record.schema import CHECKPOINTS
from sealegs.state.checkpoints import Checkpoints, StoredState


def saved(folder: Path) -> Checkpoints:
    checkpoints = Checkpoints(folder / CHECKPOINTS)
    for step in (90, 100):
        checkpoints.save(step, StoredState({"weight": torch.full((50, 10), float(step))}, {"step": step}))
    return checkpoints


def contents(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("how", ["flip", "truncate", "remove"])
def test_damages_one_file_of_the_newest_checkpoint_and_a_check_sees_it(tmp_path: Path, how: Any, seed: int) -> None:
    checkpoints = saved(tmp_path)
    assert checkpoints.newest_intact() == (100, [])
    before = contents(tmp_path)
    file = corrupt_checkpoint(tmp_path, how, seed)
    after = contents(tmp_path)
    assert {path for path in before if before[path] != after.get(path)} == {file}
    assert file.is_relative_to(tmp_path / CHECKPOINTS / "100")
    if how == "flip":
        bits = [(old ^ new).bit_count() for old, new in zip(before[file], after[file], strict=True)]
        assert sum(bits) == 1
    elif how == "truncate":
        assert before[file].startswith(after[file])
    else:
        assert file not in after
    newest, [damage] = checkpoints.newest_intact()
    assert (newest, damage.step) == (90, 100)


def test_the_seed_chooses_and_repeats(tmp_path: Path) -> None:
    damaged = []
    for number, seed in enumerate([0, 1, 2, 0]):
        saved(tmp_path / str(number))
        clean = contents(tmp_path / str(number))
        file = corrupt_checkpoint(tmp_path / str(number), seed=seed)
        place = next(i for i, (a, b) in enumerate(zip(clean[file], file.read_bytes(), strict=True)) if a != b)
        damaged.append((file.name, place))
    assert damaged[3] == damaged[0]
    assert len(set(damaged)) == 3


def test_what_is_not_there_cannot_be_damaged(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="has no checkpoint to damage; let the run save one first"):
        corrupt_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="how='melt': one of flip, truncate, remove"):
        corrupt_checkpoint(tmp_path, "melt")  # type: ignore[arg-type]
