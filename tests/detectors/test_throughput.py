"""Steps that take longer than they did."""

import math
from typing import Any

import numpy as np
import pytest

from sealegs.detectors.throughput import FIRST_JUDGED, HISTORY, WINDOW, Throughput
from sealegs.errors import ConfigError
from sealegs.vocabulary import Finding, Severity


def run(seconds: Any, detector: Throughput | None = None) -> dict[int, Finding]:
    detector = detector or Throughput()
    state, out = detector.init(), {}
    for step, value in enumerate(seconds):
        row = {"step": step, "step_s": float(value)}
        if finding := detector.look(state, row):
            out[step] = finding
        state = detector.learn(state, row)
    return out


def paces(steps: int, seed: int = 0) -> Any:
    return 0.1 * np.exp(0.05 * np.random.default_rng(seed).standard_t(3, steps))


def test_a_slow_stretch_is_worth_one_look_and_says_how_slow() -> None:
    seconds = paces(1000)
    seconds[500:600] *= 2
    ((step, finding),) = run(seconds).items()
    assert 500 + WINDOW // 2 <= step <= 500 + WINDOW
    assert (finding.severity, finding.spoils_update, finding.signal) == (Severity.WATCH, False, "step_s")
    assert finding.value > finding.limit == pytest.approx(0.1 / 0.7, rel=0.1)
    share = int(finding.note.removeprefix("throughput at ").split("%")[0])
    assert 45 <= share < 70


def test_each_episode_is_told() -> None:
    seconds = paces(1500)
    seconds[500:600] *= 2
    seconds[900:1000] *= 2
    assert [step // 100 for step in run(seconds)] == [5, 9]


def test_long_steps_now_and_then_are_none() -> None:
    """An evaluation every tenth step, a checkpoint every hundredth, eight in a row once: ten of twenty."""
    seconds = paces(2000)
    seconds[::10] *= 30
    seconds[::100] *= 300
    seconds[1201:1209] *= 50
    assert run(seconds) == {}


def test_seventy_percent_is_the_limit() -> None:
    for factor, count in ((1 / 0.75, 0), (1 / 0.65, 1)):
        seconds = np.full(600, 0.1)
        seconds[400:] *= factor
        assert len(run(seconds)) == count


def test_a_pace_that_lasts_is_the_new_measure_within_bounds() -> None:
    seconds = np.full(3000, 0.1)
    seconds[1000:] *= 2
    accepted = 1000 + (HISTORY // 2 + 2) * WINDOW
    seconds[accepted:] *= 2
    assert [step - 1000 for step in run(seconds)] == [10, accepted - 1000 + 10]


def test_a_pace_right_at_the_limit_is_told_once() -> None:
    random = np.random.default_rng(0)
    seconds = np.full(700, 0.1)
    seconds[500:] = 0.1 / 0.7 * np.exp(0.1 * random.standard_normal(200))
    assert len(run(seconds)) == 1


def test_a_slow_start_is_no_measure() -> None:
    seconds = np.full(400, 0.1)
    seconds[:8] = 60.0  # compilation
    assert run(seconds) == {}
    slow = np.full(FIRST_JUDGED * WINDOW, 0.1)
    slow[40:] = 0.3
    assert run(slow) == {}


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_time_is_left_out(value: float) -> None:
    detector = Throughput()
    assert detector.learn(detector.init(), {"step": 0, "step_s": value}) == detector.init()


@pytest.mark.parametrize("share", [0.0, 1.0, math.nan])
def test_impossible_options_are_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="share"):
        Throughput(share=share)
