"""The way of a decision by the device, on the CPU: its gate is torch's own, and reads the same numbers."""

import math
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

import sealegs
from sealegs.detectors.spike import WIDENED_STEPS
from sealegs.step.decision import UpdateDecision

ANNOUNCED, STEPS = 200, 800
HIGH = (180, 220, 760)
"""Of these losses the second comes while nothing but the coarse rules judge."""


def loss_of(step: int, weight: Tensor) -> Tensor:
    """A loss with a gradient of its own size, and another level after the announced change."""
    level = (2.0 if step < ANNOUNCED else 3.0) * (1 + 0.02 * math.sin(1.7 * step) * math.cos(0.3 * step))
    return cast(Tensor, torch.linalg.vector_norm(weight)) * (level * (1.8 if step in HIGH else 1.0))


def guarded(run: Path) -> tuple[list[str], dict[int, str]]:
    """The sentences about the spikes of a run, and what its rows say was announced."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with sealegs.Guard(model, optimizer, run=run, act=False) as guard:
        for step in range(STEPS):
            if step == ANNOUNCED:
                guard.announce("another mixture")
            loss = loss_of(step, model.weight)
            loss.backward()
            guard.step(loss)
    found = sealegs.open_run(run)
    rows = [(int(row["step"]), str(row["announced"])) for row in found.rows() if "announced" in row]
    texts = [str(event.detail["text"]) for event in found.events if "findings" in event.detail]
    return [text for text in texts if " spike:" in text], dict(rows)


def test_an_announced_change_is_one_step_wherever_it_is_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert HIGH[2] - ANNOUNCED > WIDENED_STEPS
    by_host = guarded(tmp_path / "host")
    monkeypatch.setattr(UpdateDecision, "_can_be_decided_on_device", lambda *_: True)
    by_device = guarded(tmp_path / "device")
    assert by_host[1] == by_device[1] == {ANNOUNCED: "another mixture"}
    assert by_host[0] == by_device[0]
    assert [text.split()[1] for text in by_host[0]] == [str(step) for step in (HIGH[0], HIGH[2])]
