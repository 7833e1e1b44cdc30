"""The textbook rules do what the textbooks say, with all that is wrong with it."""

import math
from typing import Any

import numpy as np
import pytest

from sealegs.detectors.contract import Detector
from sealegs.detectors.textbook import MonotonicRise, ThreeSigma, textbook
from sealegs.errors import ConfigError
from sealegs.vocabulary import Finding, Severity


def run(detector: Detector[Any], values: Any, every: int = 1) -> dict[int, Finding]:
    state, out = detector.init(), {}
    for i, value in enumerate(values):
        row = {"step": i * every, "loss": float(value)}
        if finding := detector.look(state, row):
            out[i * every] = finding
        state = detector.learn(state, row)
    return out


def noise(steps: int, seed: int = 0) -> Any:
    return 2.5 * np.exp(0.01 * np.random.default_rng(seed).standard_t(5, steps))


def test_three_sigma_is_mean_and_deviation_of_the_last_hundred() -> None:
    window = noise(100)
    limit = window.mean() + 3 * window.std()
    assert run(ThreeSigma(), [99.0, *window, limit - 1e-4]) == {}
    found = run(ThreeSigma(), [99.0, *window, limit + 1e-4])
    assert found.keys() == {101}
    assert found[101].limit == pytest.approx(limit)
    assert (found[101].severity, found[101].spoils_update) == (Severity.ALARM, True)
    assert found[101].note == "loss above 3 sigma of the last 100"


def test_its_window_hides_a_burst() -> None:
    """At most ceil(100 / (9 + 1)) of a burst can be above three sigma of a window that they are in."""
    values = noise(300)
    values[200:230] = 9.0
    assert [step for step in run(ThreeSigma(), values) if step >= 200] == [*range(200, 210)]


def test_its_window_hides_a_spike_after_a_larger_one() -> None:
    values = noise(300)
    values[200], values[240] = 2500.0, 50.0
    assert 240 not in run(ThreeSigma(), values)


def test_a_nan_does_not_enter_the_window() -> None:
    values = noise(300)
    values[[150, 199]] = math.nan, math.inf
    values[200] = 9.0
    assert 200 in run(ThreeSigma(), values)
    assert not {150, 199} & run(ThreeSigma(), values).keys()


def test_a_rise_of_every_logged_value_over_200_steps_is_found() -> None:
    ramp = 2.5 + 0.001 * np.arange(250)
    found = run(MonotonicRise(), ramp)
    assert list(found) == [*range(200, 250)]
    assert (found[200].severity, found[200].spoils_update) == (Severity.ALARM, False)
    assert found[200].note == "loss rising for 200 steps without a break"
    broken = ramp.copy()
    broken[100] = broken[99]
    assert run(MonotonicRise(), broken) == {}
    missing = ramp.copy()
    missing[100] = math.nan
    assert 200 in run(MonotonicRise(), missing)


def test_noise_breaks_a_monotonic_rise() -> None:
    values = noise(2000) * 2.0 ** (np.arange(2000) / 200)  # doubles every 200 steps, a thousand times in all
    assert run(MonotonicRise(), values) == {}


def test_sparse_logs_make_a_monotonic_rise_of_noise() -> None:
    """Three values a hundred steps apart rise one time in six: known, and why it is not in the standard set."""
    found = run(MonotonicRise(), noise(1000), every=100)
    assert 100 < len(found) < 250


def test_the_rule_set_has_the_four_sections_of_the_tree() -> None:
    names = [detector.name for detector in textbook()]
    assert names == ["nonfinite", "three-sigma/loss", "overflow", "monotonic-rise/loss", "proportion"]


def test_of_proportions_the_textbook_asks_for_weights_alone() -> None:
    proportion = textbook()[-1]
    state = proportion.init()
    healthy = {
        "grad_norm": 1.0,
        "grad_norm/a": 0.1,
        "update_ratio/a": 1e-3,
        "attention_logit_max/0": 9.0,
        "param_norm": 10.0,
    }
    for step in range(0, 1000, 10):
        state = proportion.learn(state, healthy | {"step": step})
    odd = healthy | {"step": 1000, "grad_norm/a": 1.0, "update_ratio/a": 1.0, "attention_logit_max/0": 1e5}
    assert proportion.look(state, odd) is None
    assert proportion.look(state, odd | {"param_norm": 21.0}) is not None


@pytest.mark.parametrize("options", [{"window": 1}, {"sigmas": 0.0}, {"sigmas": math.nan}], ids=str)
def test_impossible_sigmas_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        ThreeSigma(**options)


def test_impossible_rises_are_refused() -> None:
    with pytest.raises(ConfigError, match="steps=0"):
        MonotonicRise(steps=0)
