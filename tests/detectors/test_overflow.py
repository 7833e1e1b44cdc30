"""The scaler of an fp16 run, as it should be and as it should not."""

import math
from typing import Any

import pytest

from sealegs.detectors.nonfinite import NonFinite
from sealegs.detectors.overflow import Overflow
from sealegs.errors import ConfigError
from sealegs.vocabulary import Finding, Severity

WATCH, GATE, ALARM = Severity.WATCH, Severity.GATE, Severity.ALARM
OVERFLOW = {"grad_norm": math.inf, "grads_finite": 0.0}


def run(rows: list[dict[str, float]], **options: Any) -> dict[int, Finding]:
    detector = Overflow(**options)
    state, out = detector.init(), {}
    for step, row in enumerate(rows):
        now = {"step": step, "loss": 2.0, "grad_norm": 0.5, "grads_finite": 1.0} | row
        if finding := detector.look(state, now):
            out[step] = finding
        state = detector.learn(state, now)
    return out


def severities(rows: list[dict[str, float]], **options: Any) -> dict[int, Severity]:
    return {step: finding.severity for step, finding in run(rows, **options).items()}


def search(*, start: float, holds: float, steps: int) -> list[dict[str, float]]:
    """GradScaler: overflows and halves until the gradients fit."""
    rows, scale = [], start
    for _ in range(steps):
        spoilt = scale > holds
        rows.append({"loss_scale": scale} | (OVERFLOW if spoilt else {}))
        scale /= 2 if spoilt else 1
    return rows


def test_a_scaler_that_looks_for_its_scale_is_gated_and_no_alarm() -> None:
    rows = search(start=2.0**24, holds=2.0**18, steps=20)
    found = run(rows)
    assert {step: f.severity for step, f in found.items()} == dict.fromkeys(range(6), GATE)
    assert found[0].note == "gradients overflow at loss scale 16777216"
    assert found[0].spoils_update
    assert str(found[5]) == "gradients overflow at loss scale 524288: inf"


def test_the_search_is_no_matter_of_the_non_finite_detector() -> None:
    detector = NonFinite()
    state = detector.init()
    for step, row in enumerate(search(start=2.0**24, holds=2.0**18, steps=20)):
        now = {"step": step, "loss": 2.0} | row
        assert detector.look(state, now) is None
        state = detector.learn(state, now)
    assert state == ()


def test_without_a_loss_scale_nothing_is_asked() -> None:
    assert run([OVERFLOW, {"underflow_share": 1.0}] * 100) == {}


def test_a_loss_that_is_not_finite_is_not_the_scalers() -> None:
    assert run([{"loss_scale": 1024.0, "loss": math.nan, "grads_finite": 0.0}]) == {}


@pytest.mark.parametrize("scale", [0.5, 0.0, -1.0, math.nan, math.inf])
def test_a_collapsed_scale_is_an_alarm(scale: float) -> None:
    found = run([{"loss_scale": 1.0}, {"loss_scale": scale}])
    assert {step: f.severity for step, f in found.items()} == {1: ALARM}
    assert (found[1].note, found[1].spoils_update) == ("loss scale collapsed", False)
    wanted = "loss scale collapsed: 0.5, expected 1 or more" if scale == 0.5 else f"loss scale collapsed: {scale:.4g}"
    assert str(found[1]).startswith(wanted)
    assert "below" not in str(found[1])


def test_a_collapsed_scale_is_said_once_for_each_halving() -> None:
    assert severities([{"loss_scale": scale} for scale in (1.0, 0.5, 0.5, 0.5, 0.25, 0.25)]) == {1: ALARM, 4: ALARM}


def test_a_scale_that_is_not_lowered_is_an_alarm() -> None:
    same = {"loss_scale": 1024.0}
    found = run([same, same | OVERFLOW, same, same, same])
    assert {step: f.severity for step, f in found.items()} == {1: GATE, 3: ALARM}
    assert found[3].note == "loss scale 1024 not lowered after an overflow"
    assert not found[3].spoils_update
    halved = {"loss_scale": 512.0}
    assert severities([same, halved | OVERFLOW, *[halved] * 5]) == {1: GATE}, "a log may have the scale after the step"
    assert severities([same, same | OVERFLOW, {"loss_scale": 512.0}, {"loss_scale": 512.0}, same]) == {1: GATE}
    again = run([same | OVERFLOW] * 4)
    assert {step: f.severity for step, f in again.items()} == {0: GATE, 1: GATE, 2: ALARM, 3: ALARM}
    assert again[3].spoils_update


def test_overflows_in_more_than_a_twentieth_of_the_steps_are_an_alarm() -> None:
    def every(period: int, steps: int = 1000) -> list[dict[str, float]]:
        scale, rows = 1024.0, []
        for step in range(steps):
            spoilt = step % period == 0
            rows.append({"loss_scale": scale} | (OVERFLOW if spoilt else {}))
            scale = scale / 2 if spoilt else 1024.0
        return rows

    assert set(severities(every(21)).values()) == {GATE}
    often = run(every(19))
    assert min(step for step, f in often.items() if f.severity == ALARM) == 25 * 19
    assert often[26 * 19].note == "gradients overflow at loss scale 1024, 27 times in 500 steps"


def test_a_scale_that_does_not_grow_is_worth_a_look_once() -> None:
    same = {"loss_scale": 1024.0}
    assert severities([same] * 3001) == {}
    found = run([same] * 7000)
    assert {step: f.severity for step, f in found.items()} == {3001: WATCH}
    assert found[3001].note == "loss scale constant at 1024 for 3001 clean steps"
    growing = [{"loss_scale": 1024.0 * 2 ** (step // 2000)} for step in range(9000)]
    assert run(growing) == {}
    overflowing = ([same] * 2000 + [same | OVERFLOW, {"loss_scale": 512.0}]) * 3
    assert severities(overflowing) == dict.fromkeys((2000, 4002, 6004), GATE)
    stuck = [same] * 2900 + [same | OVERFLOW] + [same] * 2900
    assert severities(stuck) == {2900: GATE, 2902: ALARM}


def test_gradients_that_underflow_are_worth_a_look_when_they_go_on() -> None:
    def shares(*values: float) -> list[dict[str, float]]:
        between = {"loss_scale": 1024.0}
        return [row for value in values for row in (between | {"underflow_share": value}, between)]

    assert severities(shares(0.6, 0.6, 0.4, 0.6, 0.6)) == {}
    found = run(shares(0.6, 0.6, 0.7, 0.8, 0.8, 0.1, 0.6, math.nan, 0.6))
    assert {step: f.severity for step, f in found.items()} == {4: WATCH, 16: WATCH}
    assert str(found[4]) == "gradients underflow: 0.7, expected below 0.5"


@pytest.mark.parametrize(
    "options",
    [
        {"window": 0},
        {"patience": 0},
        {"growth_interval": 0},
        {"underflow_samples": 0},
        {"share": math.nan},
        {"share": 1.0},
        {"underflow": 0.0},
    ],
    ids=str,
)
def test_impossible_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        Overflow(**options)
