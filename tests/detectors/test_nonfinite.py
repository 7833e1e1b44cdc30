"""Numbers that are none, and how often."""

import math
from typing import Any

import pytest

from sealegs.detectors.nonfinite import NonFinite
from sealegs.errors import ConfigError
from sealegs.vocabulary import Severity

GATE, ALARM, HALT = Severity.GATE, Severity.ALARM, Severity.HALT


def severities(broken: dict[int, dict[str, float]], steps: int, **options: Any) -> dict[int, Severity]:
    detector = NonFinite(**options)
    state, out = detector.init(), {}
    for step in range(steps):
        row = {"step": step, "loss": 2.0, "grad_norm": 0.5, "grads_finite": 1.0, "params_finite": 1.0}
        row |= broken.get(step, {})
        if finding := detector.look(state, row):
            out[step] = finding.severity
        state = detector.learn(state, row)
    return out


@pytest.mark.parametrize(
    "values",
    [
        {"loss": math.nan},
        {"loss": math.inf},
        {"grad_norm": -math.inf},
        {"grads_finite": 0.0},
        {"grads_finite": math.nan},
    ],
    ids=str,
)
def test_one_spoils_its_step(values: dict[str, float]) -> None:
    assert severities({5: values}, 10) == {5: GATE}


def test_three_in_a_row_are_an_alarm_and_three_apart_are_not() -> None:
    nan = {"loss": math.nan}
    assert severities({5: nan, 6: nan, 7: nan}, 10) == {5: GATE, 6: GATE, 7: ALARM}
    assert severities({5: nan, 7: nan, 9: nan}, 12) == {5: GATE, 7: GATE, 9: GATE}


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ((2, 1), "3 in a row"),
        ((90, 3, 2, 1), "4 in a row"),
        ((400, 300, 200, 100, 50), "6 times in 500 steps"),
    ],
)
def test_an_alarm_says_which_of_its_rules_it_is_by(state: tuple[int, ...], why: str) -> None:
    finding = NonFinite().look(state, {"step": 9, "loss": math.nan})
    assert finding is not None
    assert finding.note == f"loss is not finite, {why}"


def test_one_percent_of_the_last_500_is_an_alarm() -> None:
    every_90 = {step: {"loss": math.nan} for step in range(0, 1000, 90)}
    assert set(severities(every_90, 1000).values()) == {GATE, ALARM}
    every_130 = {step: {"loss": math.nan} for step in range(0, 3000, 130)}
    assert set(severities(every_130, 3000).values()) == {GATE}


def test_a_parameter_halts_at_once() -> None:
    assert severities({5: {"params_finite": 0.0, "loss": math.nan}}, 6) == {5: HALT}


def test_gradients_that_overflow_under_a_loss_scale_are_left_to_the_scaler() -> None:
    overflow = {"grads_finite": 0.0, "grad_norm": math.inf, "loss_scale": 65536.0}
    assert severities(dict.fromkeys(range(6), overflow) | {6: {"loss": math.nan}}, 10) == {6: GATE}
    assert severities({5: overflow | {"loss": math.nan}}, 10) == {5: GATE}
    assert severities({5: overflow | {"params_finite": 0.0}}, 10) == {5: HALT}
    for scale in (0.5, math.nan, math.inf):
        assert severities({5: overflow | {"loss_scale": scale}}, 10) == {5: GATE}


@pytest.mark.parametrize("options", [{"in_a_row": 0}, {"window": 0}, {"share": 0.0}, {"share": math.nan}], ids=str)
def test_impossible_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        NonFinite(**options)
