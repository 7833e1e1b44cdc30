"""Lasting rises that single steps hide."""

import math
from itertools import permutations, product
from typing import Any

import numpy as np
import pytest

from sealegs.detectors.drift import (
    BLOCK,
    FIRST_JUDGED,
    QUIET,
    TREND,
    Drift,
    DriftState,
    chance_of_pairs,
    rising,
    winsorised,
)
from sealegs.errors import ConfigError
from sealegs.stats import streaming
from sealegs.vocabulary import Finding, Severity

YOUNG = FIRST_JUDGED * BLOCK


def losses(steps: int, seed: int = 0, noise: float = 0.01) -> Any:
    random = np.random.default_rng(seed)
    return (2.0 + 8.0 * (1 + np.arange(steps) / 20) ** -0.6) * np.exp(noise * random.standard_t(5, steps))


def run(values: Any, detector: Drift | None = None, announced: int = -1) -> list[Finding]:
    detector = detector or Drift()
    state, findings = detector.init(), []
    for step, value in enumerate(values):
        row: dict[str, float | str] = {"step": step, detector.signal: float(value)}
        if step == announced:
            row["announced"] = "new data"
        if finding := detector.look(state, row):
            findings.append(finding)
        state = detector.learn(state, row)
    return findings


@pytest.mark.parametrize("factor", [1.1, 1.4, 4.0])
def test_a_new_level_is_an_alarm_at_once_and_then_accepted(factor: float) -> None:
    for seed in range(5):
        values = losses(3000, seed)
        values[1510:] *= factor
        (alarm,) = run(values)
        assert alarm.severity == Severity.ALARM
        assert 1510 < alarm.step < 1510 + BLOCK
        assert alarm.step - alarm.lasts < 1510
        assert not alarm.spoils_update
        assert alarm.note == "loss level shift"
        assert alarm.value > alarm.limit
        assert alarm.p is not None
        assert 0 < alarm.p < 1e-4


def test_what_no_sum_shows_is_watched_by_blocks_then_an_alarm_and_then_accepted() -> None:
    """Half of the time two scales up: a sum comes to nothing again and again, a block is eight of its own scales up."""
    for seed in range(5):
        values = losses(3000, seed, noise=0.0)
        random = np.random.default_rng(seed)
        noise = np.where(np.arange(3000) % 2, 1.0, -1.0) * 0.03 + 0.002 * random.standard_normal(3000)
        values *= np.exp(noise)
        values[1510:] *= 1.03
        watch, alarm = run(values)
        assert (watch.severity, alarm.severity) == (Severity.WATCH, Severity.ALARM)
        assert alarm.step - watch.step == BLOCK
        assert 1510 < watch.step < 1510 + 3 * BLOCK
        assert alarm.note == "loss level shift"
        assert alarm.value > alarm.limit


def test_a_rise_within_a_few_dozen_steps_is_found_before_two_blocks_are_full() -> None:
    for seed in range(5):
        values = losses(2000, seed)
        values[1500:1700] *= np.linspace(1.0, 1.4, 200)
        values[1700:] *= 1.4
        alarms = [f for f in run(values) if f.severity == Severity.ALARM]
        assert 1500 < alarms[0].step <= 1532, seed
        assert alarms[0].step - alarms[0].lasts <= 1500


@pytest.mark.parametrize("correlation", [0.5, 0.8])
def test_neighbours_that_agree_are_no_rise(correlation: float) -> None:
    """The blocks measure by how much sums vary more: 24k healthy steps, and a sum without that would be an alarm."""
    alarms = sums = 0
    for seed in range(4):
        random = np.random.default_rng(seed)
        noise, last = np.empty(6000), 0.0
        for i, shock in enumerate((random.standard_normal(6000) * math.sqrt(1 - correlation**2)).tolist()):
            noise[i] = last = correlation * last + shock
        values = 3.0 * np.exp(0.03 * noise)
        alarms += sum(f.severity == Severity.ALARM for f in run(values, Drift(chance=0.5e-4)))
        state, detector = DriftState(), Drift(chance=1e-300)
        for step, value in enumerate(values.tolist()):
            state = detector.learn(state, {"step": step, "loss": value})
            sums += state.above > -math.log(0.5e-4) / 2
    assert alarms == 0
    assert sums > 0


def test_a_slow_rise_is_found_that_no_step_shows() -> None:
    """A tenth in 200 steps: a twentieth of the noise a step."""
    for seed in range(5):
        values = losses(2400, seed, noise=0.02)
        values[1500:] *= 1.1 ** (np.arange(900) / 200)
        alarms = [f for f in run(values) if f.severity == Severity.ALARM]
        assert alarms, seed
        assert 1500 < alarms[0].step < 1900
        assert len(alarms) <= 2


def test_a_drift_says_that_it_is_one() -> None:
    values = losses(2000, noise=0.02)
    values[1500:] *= 1.05 ** (np.arange(500) / 200)
    alarm = run(values)[-1]
    assert (alarm.note, alarm.severity) == ("loss drifting up", Severity.ALARM)
    assert alarm.limit < alarm.value < 1.1 * alarm.limit
    assert alarm.p is not None
    assert 0 < alarm.p < 1e-4


def test_a_hard_batch_or_three_are_no_drift() -> None:
    for length in (1, 3):
        values = losses(2000)
        values[1500 : 1500 + length] *= 20
        assert run(values) == []


def test_an_episode_is_over_after_quiet_blocks_and_the_next_is_reported() -> None:
    values = losses(4000)
    values[1504:] *= 1.3
    values[1904:] /= 1.3
    values[2704:] *= 1.3
    assert [f.severity for f in run(values)] == [Severity.ALARM] * 2
    too_soon = losses(4000)
    too_soon[1504:] *= 1.3
    too_soon[1504 + 5 * BLOCK :] *= 1.3
    assert [f.severity for f in run(too_soon)] == [Severity.ALARM]
    assert QUIET > 5


def test_a_fall_is_no_finding_and_hides_no_rise() -> None:
    values = losses(3000)
    values[1504:] *= 0.5
    assert run(values) == []
    values[2304:] *= 1.3
    assert [f.severity for f in run(values)] == [Severity.ALARM]


def test_an_announced_change_is_no_news() -> None:
    values = losses(3000)
    values[1504:] *= 1.3
    assert len(run(values)) == 1
    assert run(values, announced=1504) == []
    values[2504:] *= 1.3
    assert len(run(values, announced=1504)) == 1


def test_a_signal_that_may_rise_is_only_watched() -> None:
    values = losses(3000)
    values[1504:] *= 1.3
    assert [f.severity for f in run(values, Drift(gravest=Severity.WATCH))] == [Severity.WATCH]


def test_nothing_is_judged_before_there_is_something_to_compare_with() -> None:
    early, late = losses(1500), losses(1500)
    early[YOUNG - 2 * BLOCK :] *= 1.12
    assert run(early[:YOUNG]) == []
    late[YOUNG:] *= 3
    assert 1024 == YOUNG < run(late)[0].step < YOUNG + BLOCK


def test_a_young_run_that_leaves_what_it_had_come_down_to_is_an_alarm() -> None:
    """Growing spikes, each of which teaches the statistic of single steps that such things happen."""
    values = losses(400)
    values[200:] *= 1 + np.abs(np.sin(np.arange(200))) * np.arange(200) / 50
    watch, alarm = run(values)
    assert (watch.severity, alarm.severity) == (Severity.WATCH, Severity.ALARM)
    assert (alarm.note, alarm.lasts, alarm.p) == ("loss up from its lowest", 2 * BLOCK, None)
    assert 200 < watch.step < alarm.step < 300
    assert run(values, Drift(young_factor=math.inf)) == []
    alone = losses(400)
    alone[200:207] *= 20
    assert run(alone) == []


def test_p_means_what_it_says() -> None:
    """20 runs of 5000 healthy steps at one level: found at a chance of one in a hundred, and never above it."""
    noise = (np.random.default_rng(seed).standard_t(5, 5000) for seed in range(20))
    found = [f for each in noise for f in run(2.0 * np.exp(0.01 * each), Drift(chance=0.01))]
    blocks = 20 * (5000 - YOUNG) / BLOCK
    assert 0.0005 < len(found) / blocks < 0.01


def test_a_fall_that_slows_is_no_new_level() -> None:
    """Each block is nearer to those before it than the last was, and above none of them: 72,000 steps."""
    for seed, (time, share) in enumerate(product((250, 400, 600, 1000), (0.003, 0.01, 0.03))):
        steps, random = np.arange(3000), np.random.default_rng(seed)
        for start, end in ((5.0, 2.0), (3.0, 1.0)):
            assert run(end + start * np.exp(-steps / time) + share * end * random.standard_normal(3000)) == []


def test_a_new_level_within_a_fall_is_found_once_it_is_above_what_was() -> None:
    for seed in range(5):
        random = np.random.default_rng(seed)
        values = (2.0 + 5.0 * np.exp(-np.arange(3000) / 400)) * np.exp(0.01 * random.standard_normal(3000))
        values[1200:] *= 1.2
        alarm = run(values)[-1]
        assert alarm.severity == Severity.ALARM
        assert 1200 < alarm.step < 1200 + 3 * BLOCK


def test_the_chance_of_rising_pairs_is_that_of_counting_orders() -> None:
    orders = list(permutations(range(6)))
    counts = [sum(a < b for i, a in enumerate(order) for b in order[i:]) for order in orders]
    expected = [sum(count >= k for count in counts) / len(orders) for k in range(16)]
    assert chance_of_pairs(6) == pytest.approx(tuple(expected))


def test_coming_back_from_a_dip_is_no_rise() -> None:
    ramp = tuple(0.01 * i for i in range(TREND))
    assert rising((0.0,) * TREND + ramp)[0] == pytest.approx(1 / math.factorial(TREND))
    assert rising((0.2,) * TREND + ramp)[0] == 1.0


def test_a_value_counts_for_three_scales_at_most() -> None:
    fast = streaming.StreamState(early=(0.0,) * streaming.START, level=1.0, scale=0.1)
    assert [winsorised(fast, x) for x in (0.0, 1.2, 9.0)] == pytest.approx([0.7, 1.2, 1.3])
    assert winsorised(streaming.StreamState(), 9.0) == 9.0


@pytest.mark.parametrize("value", [0.0, -math.inf, math.nan, math.inf])
def test_what_has_no_logarithm_is_left_out(value: float) -> None:
    assert Drift().learn(DriftState(), {"step": 0, "loss": value}) == DriftState()


def test_a_signal_of_both_signs_may_rise_and_is_only_watched() -> None:
    """As the loss of a critic that is fooled less and less."""
    noise = np.random.default_rng(0).standard_t(5, 4000)
    assert run(-3.0 + 0.1 * noise) == []
    risen = -3.0 + 0.1 * noise
    risen[2500:] += 0.5
    found = run(1e-6 * risen)
    assert found
    assert {one.severity for one in found} == {Severity.WATCH}
    assert 2500 <= found[0].step <= 2540
    assert -3e-6 < found[0].limit < found[0].value < -2e-6
    falls = 2.0 - 4.0 * (1 - np.exp(-np.arange(4000) / 800)) + 0.02 * noise
    falls[3500:] += 0.1
    assert [one.step // 100 for one in run(falls)][:1] == [35], "positive first: it begins anew at zero"


@pytest.mark.parametrize(
    "options",
    [{"chance": 0.0}, {"chance": 0.5}, {"chance": math.nan}, {"gravest": Severity.HALT}, {"young_factor": 1.0}],
    ids=str,
)
def test_impossible_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        Drift(**options)
