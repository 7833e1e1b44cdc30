"""The way of a decision by the device, on the CPU: its gate is torch's own, and reads the same numbers."""

import math
import time
from pathlib import Path
from typing import Literal, cast

import numpy as np
import pytest
import torch
from torch import Tensor

import sealegs
from sealegs.detectors.spike import WIDENED_STEPS
from sealegs.step.decision import UpdateDecision
from sealegs.step.skip_way import BEGIN, BLOCK, BLOCKS

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
    monkeypatch.setattr(UpdateDecision, "_can_gate_decide", lambda *_: True)
    by_device = guarded(tmp_path / "device", range(STEPS))
    for run in (by_host, by_device):
        assert run.steps[run.logged("announced")].tolist() == [ANNOUNCED]
    assert spikes_in(by_host) == spikes_in(by_device)
    assert [text.split()[1] for text in spikes_in(by_host)] == [str(step) for step in (HIGH[0], HIGH[2])]


def test_a_resume_goes_on_with_the_statistic_of_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UpdateDecision, "_can_gate_decide", lambda *_: True)
    end, again = HIGH[0] + 5, HIGH[0] - 10
    whole = guarded(tmp_path / "whole", range(end))
    cut = guarded(tmp_path / "cut", range(again), range(again, end))
    assert whole.column("loss_p")[HIGH[0]] < 1e-6, "decided by a statistic that knows its run"
    for decided in ("loss_p", "grad_norm_p", "gate_closed"):
        np.testing.assert_array_equal(cut.column(decided), whole.column(decided))


def muon_run(run: Path | None, way: Literal["auto", "device", "host"], steps: int) -> tuple[list[Tensor], set[int]]:
    """Weights at the end of a run whose eleventh and last but fourth gradients are not finite, and what was skipped."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim != 2]
    optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(vectors, lr=0.01, fused=True)]
    bad, skipped = {11, steps - 4}, set()
    with sealegs.Guard(model, optimizers, run=run, clip=1.0, act=sealegs.Skipping(way=way)) as guard:
        for step in range(steps):
            torch.default_generator.manual_seed(step)
            loss = model(torch.randn(8, 4)).square().mean()
            (loss * (math.nan if step in bad else 1.0)).backward()
            verdict = guard.step(loss)
            skipped |= set() if verdict.go else {verdict.step}
    assert skipped == bad
    return [p.detach().clone() for p in model.parameters()], skipped


def test_muon_is_kept_from_bad_updates_the_same_whichever_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = BEGIN + BLOCKS * BLOCK + 10
    by_host, _ = muon_run(None, "host", steps)
    monkeypatch.setattr(UpdateDecision, "_can_gate_decide", lambda *_: True)
    monkeypatch.setattr("sealegs.step.skip_way._on_the_device", Moment)
    asked: tuple[Literal["auto", "device", "host"], ...] = ("auto", "device", "host")
    for way in asked:
        weights, _ = muon_run(tmp_path / way, way, steps)
        assert all(map(torch.equal, weights, by_host)), way
        (said,) = (event for event in sealegs.open_run(tmp_path / way).events if event.kind == "skip-way")
        if way == "auto":
            assert said.step == BEGIN + BLOCKS * BLOCK
            assert {"device_ms", "host_ms"} <= said.detail.keys()
        else:
            assert (said.step, said.detail["way"]) == (0, way)


class Moment:
    """A moment on a device that has a clock."""

    def __init__(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        """It is over already."""

    def elapsed_time(self, later: "Moment") -> float:
        return 1000 * (later.at - self.at)
