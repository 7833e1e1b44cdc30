"""Live objects in, a ``State`` out, and back."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from sealegs.errors import SourceError
from sealegs.recovery.checkpoints import Checkpoints
from sealegs.recovery.state import Trainee


class Position:
    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.at = state["at"]


OPTIMIZERS: dict[str, Any] = {
    "AdamW fused": lambda groups: AdamW(groups, lr=0.1, betas=(0.9, 0.95), fused=True),
    "AdamW amsgrad": lambda groups: AdamW(groups, lr=0.1, amsgrad=True, foreach=True),
    "SGD momentum": lambda groups: SGD(groups, lr=0.1, momentum=0.9),
}


def trainee(optimizer: str, width: int = 5) -> Trainee:
    model = nn.Sequential(nn.Linear(3, width), nn.Dropout(0.5), nn.Linear(width, 1))
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    built: Optimizer = OPTIMIZERS[optimizer](
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    )
    return Trainee(
        model=model,
        optimizer=built,
        scheduler=LambdaLR(built, lambda step: 1 / (1 + step)),
        scaler=GradScaler("cpu", enabled=True, init_scale=256.0, growth_interval=2),
        data=Position(),
    )


def train(subject: Trainee, steps: int) -> list[float]:
    """Steps that draw from every generator there is."""
    losses = []
    for _ in range(steps):
        batch = torch.randn(8, 3) * random.random() + float(np.random.random())  # noqa: S311
        loss = subject.model(batch).square().mean()
        subject.scaler.scale(loss).backward()
        subject.scaler.step(subject.optimizer)
        subject.scaler.update()
        subject.scheduler.step()
        subject.optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_restored_trainee_goes_on_bit_for_bit(tmp_path: Path, optimizer: str) -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    subject = trainee(optimizer)
    train(subject, 5)
    subject.data.load_state_dict({"at": 5})
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(5, subject.capture())
    scale = subject.scaler.get_scale()
    expected = train(subject, 5)
    assert subject.scaler.get_scale() > scale > 256.0

    other = trainee(optimizer)
    train(other, 2)  # a trainee with a past of its own
    other.restore(checkpoints.load(5))
    assert other.data.state_dict() == {"at": 5}
    assert other.scaler.get_scale() == scale
    assert train(other, 5) == expected
    for mine, theirs in zip(other.model.parameters(), subject.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert other.scaler.get_scale() == subject.scaler.get_scale()
    assert other.scheduler.get_last_lr() == subject.scheduler.get_last_lr()


def test_into_an_optimizer_that_has_not_stepped(tmp_path: Path) -> None:
    subject = trainee("AdamW fused")
    train(subject, 3)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, subject.capture())
    fresh = trainee("AdamW fused")
    fresh.restore(checkpoints.load(3))
    mine, theirs = fresh.optimizer.state_dict(), subject.optimizer.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    for index, entry in theirs["state"].items():
        assert all(torch.equal(mine["state"][index][name], value) for name, value in entry.items())


def test_a_state_of_another_model_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    large = trainee("AdamW fused", width=7)
    train(large, 2)
    Checkpoints(tmp_path).save(2, large.capture())
    subject = trainee("AdamW fused")
    before = [parameter.clone() for parameter in subject.model.parameters()]
    with pytest.raises(SourceError, match=r"another model: 0.bias is \(7,\) there and \(5,\) here"):
        subject.restore(Checkpoints(tmp_path).load(2))
    assert all(torch.equal(a, b) for a, b in zip(before, subject.model.parameters(), strict=True))
