"""The way of a decision by the device, on the CPU: its gate is torch's own, and reads the same numbers."""

import math
from pathlib import Path
from typing import cast

import numpy as np
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


def guarded(run: Path, *legs: range) -> sealegs.Run:
    """A run that is only looked at, in as many processes' lives as there are legs."""
    for steps in legs:
        model = torch.nn.Linear(4, 1, bias=False)
        with torch.no_grad():
            model.weight.fill_(0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with sealegs.Guard(model, optimizer, run=run, act=False, checkpoint_every=STEPS, resume="auto") as guard:
            for step in steps:
                if step == ANNOUNCED:
                    guard.announce("another mixture")
                loss = loss_of(step, model.weight)
                loss.backward()
                guard.step(loss)
            guard.checkpoint(wait=True)
    return sealegs.open_run(run)


def spikes_in(run: sealegs.Run) -> list[str]:
    texts = [str(event.detail["text"]) for event in run.events if "findings" in event.detail]
    return [text for text in texts if " spike:" in text]


def test_an_announced_change_is_one_step_wherever_it_is_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert HIGH[2] - ANNOUNCED > WIDENED_STEPS
    by_host = guarded(tmp_path / "host", range(STEPS))
    monkeypatch.setattr(UpdateDecision, "_can_be_decided_on_device", lambda *_: True)
    by_device = guarded(tmp_path / "device", range(STEPS))
    for run in (by_host, by_device):
        assert run.steps[run.logged("announced")].tolist() == [ANNOUNCED]
    assert spikes_in(by_host) == spikes_in(by_device)
    assert [text.split()[1] for text in spikes_in(by_host)] == [str(step) for step in (HIGH[0], HIGH[2])]


def test_a_resume_goes_on_with_the_statistic_of_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UpdateDecision, "_can_be_decided_on_device", lambda *_: True)
    end, again = HIGH[0] + 5, HIGH[0] - 10
    whole = guarded(tmp_path / "whole", range(end))
    cut = guarded(tmp_path / "cut", range(again), range(again, end))
    assert whole.column("loss_p")[HIGH[0]] < 1e-6, "decided by a statistic that knows its run"
    for decided in ("loss_p", "grad_norm_p", "gate_closed"):
        np.testing.assert_array_equal(cut.column(decided), whole.column(decided))
