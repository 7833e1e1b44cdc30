"""A run in which nothing is learned is not healthy, however short its log; one that learns is."""

from typing import Any

import numpy as np
import pytest
from tests.diagnosis.test_findings import Floats, falling, noise, run

from sealegs.diagnosis.findings import look
from sealegs.diagnosis.rank import diagnose

GUESS = float(np.log(50_257))


def action(losses: Floats, **more: Any) -> str:
    return diagnose(look(run(losses, **more)), source="log", format="log").first_action


@pytest.mark.parametrize("rows", [24, 40, 60])
@pytest.mark.parametrize("level", [GUESS, 7.3, 0.7, 0.02])
@pytest.mark.parametrize("size", [0.002, 0.03, 0.1])
def test_a_short_log_that_does_not_fall_is_not_healthy(rows: int, level: float, size: float) -> None:
    said = [look(run(level * np.exp(size * noise("normal", rows, seed)))).verdict for seed in range(8)]
    assert said.count("healthy") <= 1, "one in twenty falls by chance"
    assert "act" not in said, "it may be near its lowest"
    assert (said.count("watch") >= 7) == (level == GUESS and size < 0.01)


@pytest.mark.parametrize("size", [0.01, 0.05, 0.2])
def test_a_short_log_that_falls_is_healthy(size: float) -> None:
    for rows in (24, 40, 60):
        shapes = (falling(rows, size=size), falling(2000, size=size / 5)[:rows])
        assert [look(run(losses)).verdict for losses in shapes] == ["healthy"] * 2
    fell_at_once = np.concatenate([[9.0, 5.0, 3.0], np.full(57, 2.0)]) * np.exp(size * noise("normal", 60, 1))
    assert look(run(fell_at_once)).verdict == "healthy"


def test_a_log_that_goes_on_from_an_earlier_one_and_a_policy_may_be_level() -> None:
    level = 2 + 0.05 * noise("normal", 60, 0)
    assert look(run(level, steps=np.arange(90_000.0, 90_060.0))).verdict == "healthy"
    rewards = np.linspace(0, 1, 60) + 0.05 * noise("normal", 60, 1)
    of_policy: dict[str, Any] = {"reward": rewards, "policy_entropy": np.ones(60) + 0.01 * noise("normal", 60, 2)}
    assert "not fallen" not in look(run(0.05 * noise("normal", 60, 0), **of_policy)).because


@pytest.mark.parametrize("rows", [60, 200])
def test_what_to_look_at_first_is_said_by_what_was_logged(rows: int) -> None:
    losses, rates = GUESS + 0.005 * noise("normal", rows, 0), np.full(rows, 1e-4)
    assert "learning rate (0, " in action(losses)
    assert "learning rate (it is 0.0001)" in action(losses, lr=rates)
    assert "learning rate is 0 on all" in action(losses, lr=np.zeros(rows))
    assert "gradient norm is 0 on all" in action(losses, lr=rates, grad_norm=np.zeros(rows))
    rising = np.linspace(0, 1e-5, rows)
    assert "warm-up is over" in action(losses, lr=rising)
    assert look(run(losses, lr=rising)).verdict == "watch", "to wait is no act"


@pytest.mark.parametrize("warm_up", [1, 3, 20, 100])
def test_a_rate_that_stands_after_its_warm_up_is_no_warm_up(warm_up: int) -> None:
    losses, rows = np.log(10) + 0.005 * noise("normal", 400, 0), np.arange(400)
    for rates in (np.minimum((rows + 1) / warm_up, 1) * 1e-3, np.where(rows < warm_up, 1e-5, 1e-3)):
        rates[0] = min(rates[0], 5e-4)
        assert "warm-up is over" not in action(losses, lr=rates)
        assert look(run(losses, lr=rates)).verdict == "act"
        assert look(run(losses, lr=rates)).because == look(run(losses)).because


@pytest.mark.parametrize("digits", [3, 4, 5, 9])
def test_a_rate_that_rises_to_the_end_is_a_warm_up_in_any_digits(digits: int) -> None:
    losses, rows = np.log(10) + 0.005 * noise("normal", 400, 0), np.arange(400)
    share = rows / 400
    shapes = [share] if digits == 3 else [share, (1 - np.cos(np.pi * share)) / 2, share**2]
    for rates in [3e-3 * shape for shape in shapes]:
        found = look(run(losses, lr=np.round(rates, digits)))
        assert (found.verdict, "still rises" in found.because) == ("watch", True), digits


def test_a_loss_that_has_come_down_to_a_guess_has_an_accuracy_of_one() -> None:
    losses = np.log(2) + 0.3 * np.exp(-np.arange(60) / 8) + 0.005 * noise("normal", 60, 0)
    found = look(run(losses, accuracy=0.5 + 0.02 * noise("normal", 60, 1)))
    assert (found.verdict, "guess among 2" in found.because) == ("watch", True)
    assert look(run(losses, accuracy=0.5 + np.linspace(0, 0.3, 60))).verdict == "healthy"


def test_a_loss_that_is_the_very_same_to_the_end_calls_for_action() -> None:
    """Of full precision: what was rounded, or stands for a few rows, may move below the last digit."""
    for seed in range(5):
        losses = falling(60 + 20 * seed, seed=seed)
        stuck = losses.copy()
        converged = np.append(losses[: len(losses) // 2], np.full(len(losses) // 2, 0.99 * losses.min()))
        assert look(run(converged)).verdict != "act"
        stuck[len(losses) // 2 :] = 1.03 * losses[: len(losses) // 2].min()
        found = look(run(stuck))
        assert (found.verdict, found.because.startswith("loss exactly")) == ("act", True)
        assert look(run(np.round(stuck, 4))).verdict != "act"
        spent = np.where(np.arange(len(losses)) < len(losses) // 2, 1e-3, 0.0)
        assert look(run(stuck, lr=spent)).verdict != "act"
        short = losses.copy()
        short[-8:] = losses[-8]
        assert look(run(short)).verdict == "healthy"
