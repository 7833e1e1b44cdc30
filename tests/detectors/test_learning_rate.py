"""A learning rate that leaps, and the healthy schedules that do not."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from sealegs.detectors.learning_rate import Rate, RateState
from sealegs.errors import ConfigError
from sealegs.vocabulary import Finding, Severity


def run(rates: Sequence[Any], detector: Rate | None = None, first: int = 0) -> dict[int, Finding]:
    detector = detector or Rate()
    state, out = detector.init(), {}
    for step, rate in enumerate(rates, first):
        row: dict[str, Any] = {"step": step, "loss": 2.0, "lr": rate}
        if finding := detector.look(state, row):
            out[step] = finding
        state = detector.learn(state, row)
    return out


def test_a_leap_is_a_remark_before_its_update_and_is_named_for_a_while() -> None:
    found = run([3e-4] * 412 + [1.5e-2] * 500)
    assert list(found) == list(range(412, 713))
    first = found[412]
    assert (first.severity, first.spoils_update, first.signal, first.lasts) == (Severity.WATCH, False, "lr", 1)
    assert str(first) == "the learning rate leapt from 3e-4 to 1.5e-2: 0.015, expected below 0.0015"
    assert found[413].note.endswith("to 1.5e-2 at step 412, 1 step before")
    assert found[415].note == "the learning rate leapt from 3e-4 to 1.5e-2 at step 412, 3 steps before"
    assert found[415].lasts == 4


def test_a_leap_of_one_step_is_named_as_well() -> None:
    found = run([3e-4] * 50 + [1.5e-2] + [3e-4] * 50)
    assert found[60].note == "the learning rate leapt from 3e-4 to 1.5e-2 at step 50, 10 steps before"


def test_five_times_the_largest_is_the_limit() -> None:
    wave = [3e-4 * (0.1 + 0.9 * (i % 50) / 49) for i in range(200)]
    assert run([*wave, 4.9 * 3e-4]) == {}
    assert list(run([*wave, 5.1 * 3e-4])) == [200]


def linear(warmup: int, start: float = 0.0) -> list[float]:
    return [start + (3e-4 - start) * min(i / warmup, 1.0) for i in range(600)]


SCHEDULES: dict[str, Callable[[], list[float]]] = {
    "warm-up from 0": lambda: linear(100),
    "warm-up from 0 in ten steps": lambda: linear(10),
    "warm-up from 1e-8": lambda: [1e-8 * (i + 1) for i in range(600)],
    "warm-up from 1e-7 in 20 steps": lambda: linear(20, 1e-7),
    "tiny first value, then the base": lambda: [1e-8] * 2 + [3e-4] * 600,
    "nothing for a hundred steps": lambda: [0.0] * 100 + [3e-4] * 500,
    "warm-up by epochs": lambda: [max(1e-6, 2e-4 * (i // 100)) for i in range(600)],
    "warm restarts": lambda: [1e-6 + 3e-4 * (0.5 + 0.5 * math.cos(i % 200 * math.pi / 200)) for i in range(1000)],
    "one cycle": lambda: [4e-5 + 1e-3 * math.sin(i * math.pi / 600) for i in range(600)],
    "decay to 0, then warmed up again": lambda: [*np.linspace(3e-4, 0, 300), *np.linspace(0, 3e-4, 30)],
    "warmed up again higher": lambda: [3e-4] * 300 + [6e-4] * 300,
    "fall": lambda: [3e-4] * 300 + [3e-6] * 300 + [3e-4] * 300,
    "exponential warm-up": lambda: [min(1e-7 * 1.2**i, 3e-4) for i in range(600)],
    "constant": lambda: [0.1] * 600,
    "none at all": lambda: [0.0] * 600,
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_healthy_schedules_are_no_news(name: str) -> None:
    assert run(SCHEDULES[name]()) == {}


@pytest.mark.parametrize(("rate", "word"), [(math.nan, "finite"), (math.inf, "finite"), (-3e-4, "negative")])
def test_a_rate_that_is_none_is_a_remark(rate: float, word: str) -> None:
    found = run([3e-4] * 20 + [rate] + [3e-4] * 20)
    assert list(found) == [20]
    assert (found[20].severity, found[20].spoils_update, found[20].lasts) == (Severity.WATCH, False, 1)
    assert word in found[20].note


@pytest.mark.parametrize("rate", [None, "3e-4 1e-3"])
def test_a_run_without_a_rate_is_left_alone(rate: Any) -> None:
    assert run([rate] * 50) == {}


def test_a_run_that_goes_back_forgets_the_leap() -> None:
    detector = Rate()
    state = RateState(
        seen=5, last=1.5e-2, largest=1.5e-2, is_constant=False, before=3e-4, after=1.5e-2, above=3e-4, at=40
    )
    assert detector.look(state, {"step": 41, "lr": 1.5e-2}) is not None
    assert detector.look(state, {"step": 30, "lr": 3e-4}) is None


@pytest.mark.parametrize("option", [{"factor": 1.0}, {"factor": math.nan}, {"remembered": -1}])
def test_impossible_options_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="Rate"):
        Rate(**option)
