"""A warm-up that begins again in the middle of a run is told, and is the cause of what follows it."""

import numpy as np
import pytest
from tests.diagnosis.test_findings import Floats, falling, noise, run

from sealegs.diagnosis.contract import Diagnosis
from sealegs.diagnosis.findings import look
from sealegs.diagnosis.rank import diagnose

ROWS, AT = 2000, 1000
STEPS = np.arange(ROWS)


def rates(warmup: int = 100, again: int = AT) -> Floats:
    """Linear warm-up and cosine, made anew at a row."""
    steps = np.where(again > STEPS, STEPS, STEPS - again)
    return np.asarray(3e-4 * np.minimum((steps + 1) / warmup, 1) * (0.55 + 0.45 * np.cos(np.pi * steps / 4000)))


def told(losses: Floats, lr: Floats, every: int = 1) -> Diagnosis:
    norms = 0.7 * np.exp(0.1 * noise("normal", len(losses), 1))
    return diagnose(look(run(losses, every=every, lr=lr, grad_norm=norms)), source="log", format="log")


@pytest.mark.parametrize("warmup", [10, 100, 600])
@pytest.mark.parametrize("every", [1, 10])
def test_it_is_told_of_a_run_that_did_not_mind(warmup: int, every: int) -> None:
    said = told(falling(ROWS), rates(warmup), every)
    assert said.findings.verdict == "watch"
    assert f"the warm-up began again at step {every * AT}" in said.findings.because
    assert said.hypotheses[0].cause == "misaligned-restart"
    assert "cheduler" in said.first_action


@pytest.mark.parametrize("height", [1.3, 2.0])
def test_a_leap_that_follows_is_put_down_to_it_and_one_before_is_not(height: float) -> None:
    after = falling(ROWS)
    after[AT + 60 :] *= height
    said = told(after, rates())
    assert (said.findings.verdict, said.hypotheses[0].cause) == ("act", "misaligned-restart")
    before = falling(ROWS)
    before[500:540] *= height
    said = told(before, rates())
    assert said.hypotheses[0].cause != "misaligned-restart"
    assert any("the warm-up began again at step 1000" in text for text in said.remarks)


def test_what_is_planned_is_not_told() -> None:
    cosine = 3e-4 * (0.5 + 0.5 * np.cos(2 * np.pi * (STEPS % 500) / 1000)) + 1e-7
    warmed = np.where(STEPS % 500 < 20, (STEPS % 500 + 1) / 20 * 3e-4, cosine)
    decayed = rates() * np.where(STEPS < AT, np.clip((AT - STEPS) / 300, 1e-3, 1), 1)
    for planned in (rates(again=ROWS), cosine, warmed, decayed, 3e-4 * 0.1 ** (STEPS // 700)):
        said = told(falling(ROWS), np.asarray(planned))
        assert said.findings.verdict == "healthy", said.findings.because
        assert not any("warm-up began again" in text for text in said.remarks)
