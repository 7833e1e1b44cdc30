"""A loop over what Lightning's Fabric has set up: the guard gets what is inside Fabric's wrappers."""

import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.small import FAULTS, NAN, SPIKE, STEPS, broken, digest
from torch import nn

import sealegs
from sealegs.guard_options import Checkpointing

pytestmark = [
    pytest.mark.xdist_group("lightning"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .*dataloader.* does not have many workers"),
]
FABRIC = pytest.mark.integration("Fabric")


def made() -> tuple[Any, Any, Any, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from lightning.fabric import Fabric
    fabric = Fabric(accelerator="cpu", devices=1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    inputs: Any = torch.randn(64, 8, generator=torch.Generator().manual_seed(5))
    return fabric, model, optimizer, torch.utils.data.DataLoader(inputs, batch_size=4, shuffle=True)


def endless(batches: Any) -> Iterator[Any]:
    while True:
        yield from batches()


def losses(model: Any, batch: Any) -> Any:
    return (model(batch) - batch[:, :4]).square().mean()


def plain() -> tuple[str, list[str]]:
    fabric, model, optimizer, loader = made()
    found = []
    for batch in islice(endless(lambda: loader), STEPS):
        found.append(digest(model.module, optimizer.optimizer))
        fabric.backward(losses(model, batch))
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
    return digest(model.module, optimizer.optimizer), found


def guarded(
    folder: Path, *, faults: tuple[str, ...] = (), steps: int = STEPS, damaged: int = -1, **options: Any
) -> tuple[str, list[str], list[int]]:
    fabric, model, optimizer, loader = made()
    found, numbers = [], []
    to_damage = [damaged]
    with (
        sealegs.Guard(model.module, optimizer.optimizer, run=folder, clip=1.0, **options) as guard,
        broken(model.module, lambda: guard.number, faults) if faults else nullcontext(),
    ):
        for batch in endless(lambda: guard.batches(loader)):
            if [guard.number] == to_damage:
                to_damage.clear()
                for parameter in model.parameters():
                    parameter.data.mul_(30.0)
            found.append(digest(model.module, optimizer.optimizer))
            loss = losses(model, batch)
            fabric.backward(loss)
            guard.step(loss)
            numbers.append(guard.number)
            if guard.number == steps:
                break
    return digest(model.module, optimizer.optimizer), found, numbers


@FABRIC
@pytest.mark.conforms("unchanged")
def test_where_nothing_happens_nothing_is_changed(tmp_path: Path) -> None:
    assert guarded(tmp_path / "a")[:2] == plain()


@FABRIC
@pytest.mark.conforms("nan", "spike")
def test_a_skip_changes_no_bit(tmp_path: Path) -> None:
    _, found, _ = guarded(tmp_path / "a", faults=FAULTS)
    assert [step for step, (before, after) in enumerate(pairwise(found)) if before == after] == [NAN, SPIKE]


@FABRIC
@pytest.mark.conforms("rollback")
def test_damage_is_gone_back_behind(tmp_path: Path) -> None:
    standard: dict[str, Any] = {
        "playbook": sealegs.Playbook.standard(),
        "checkpoint_every": Checkpointing(snapshot_every=20),
    }
    *_, numbers = guarded(tmp_path / "a", steps=110, damaged=70, **standard)
    assert any(after < before for before, after in pairwise(numbers))
    (done,) = (event for event in sealegs.open_run(tmp_path / "a").events if event.kind == "intervention")
    assert (done.detail["trigger"], done.detail["acted"]) == ("damaged", True)
