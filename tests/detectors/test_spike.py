"""Sudden rises of one signal."""

import math
from typing import Any

import numpy as np
import pytest

from sealegs.detectors.spike import YOUNG, Spike, State
from sealegs.errors import ConfigError
from sealegs.vocabulary import Finding, Severity


def run(values: Any, detector: Spike | None = None) -> tuple[list[Finding | None], State]:
    detector = detector or Spike()
    state, findings = detector.init(), []
    for step, value in enumerate(values):
        row = {"step": step, detector.signal: float(value)}
        findings.append(detector.look(state, row))
        state = detector.learn(state, row)
    return findings, state


def steep(steps: int, seed: int = 0) -> Any:
    """A loss that falls from 11 to 5 in its first 100 steps, as real ones do."""
    random = np.random.default_rng(seed)
    return (2.5 + 8.5 * np.exp(-np.arange(steps) / 60)) * np.exp(0.01 * random.standard_t(5, steps))


def test_a_young_burst_is_found_to_its_end() -> None:
    """Half a window long; condemned values that entered it as they are would hide the end of the burst."""
    values = steep(140)
    values[60:76] = 60.0
    findings, _ = run(values)
    assert all(findings[60:76])
    assert not any(findings[:60])


def test_a_steep_start_does_not_blind_it() -> None:
    for seed in range(10):
        values = steep(700, seed)
        values[600] *= 1.4
        findings, state = run(values)
        assert findings[600] is not None, seed
        assert state.stream.q98 < 5
        assert sum(finding is not None for finding in findings) <= 2


def test_the_finding_says_what_was_expected() -> None:
    values = steep(1500)
    values[1200] = 6.93
    found = run(values)[0][1200]
    assert found is not None
    assert (found.severity, found.value, found.signal, found.step) == (Severity.ALARM, 6.93, "loss", 1200)
    assert 2.5 < found.limit < 3.2
    assert found.p is not None
    assert found.p < 1e-5
    assert str(found).startswith("loss spike: 6.93, expected below ")


def test_the_limit_is_where_the_gate_is() -> None:
    detector = Spike()
    _, state = run(steep(1500))
    values = steep(1500)
    values[-1] = 9.0
    found = run(values)[0][-1]
    assert found is not None
    _, before = run(steep(1499))
    assert detector.look(before, {"step": 1499, "loss": found.limit * 0.9999}) is None
    assert detector.look(before, {"step": 1499, "loss": found.limit * 1.0001}) is not None
    assert state.seen == 1500


def test_it_judges_from_the_ninth_value_on() -> None:
    assert YOUNG == 150
    assert run([2.5] * 8 + [99.0])[0][-1] is not None
    assert run([2.5] * 7 + [99.0])[0][-1] is None


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, -math.inf])
def test_what_has_no_logarithm_is_left_to_others(value: float) -> None:
    values = [2.5] * 300
    expected = run(values)[1]
    findings, state = run([*values, value])
    assert findings[-1] is None
    assert state == expected


@pytest.mark.parametrize(
    "options",
    [
        {"alarm": 0.0},
        {"alarm": 1e-3},
        {"gate": 0.5},
        {"alarm": math.nan},
        {"young_factor": 1.0},
        {"young_deviations": -1},
    ],
    ids=str,
)
def test_impossible_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        Spike(**options)  # type: ignore[arg-type]
