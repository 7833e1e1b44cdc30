"""Sudden rises of one signal."""

import math
from typing import Any

import numpy as np
import pytest

from sealegs.detectors.spike import GROWN, MANY, YOUNG, Spike, State
from sealegs.errors import ConfigError
from sealegs.stats import streaming
from sealegs.stats.audit import Audit
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


def test_a_quiet_signal_may_move_a_little() -> None:
    """A loss that hardly changes at all makes any change surprising; below five percent none is a spike."""
    quiet = 2.5 + 1e-6 * np.arange(1500) % 3e-6
    _, state = run(quiet)
    detector = Spike()
    assert detector.look(state, {"step": 1500, "loss": 2.5 * 1.04}) is None
    assert detector.look(state, {"step": 1500, "loss": 2.5 * 1.06}) is not None


@pytest.mark.parametrize("noise", [1e-6, 1e-3, 0.05])
def test_a_new_level_is_accepted_after_a_hundred_steps_however_quiet_it_is(noise: float) -> None:
    values = 2.5 * np.exp(noise * np.random.default_rng(0).standard_normal(2000))
    values[1200:] *= 3
    findings, _ = run(values)
    assert all(findings[1200:1300])
    assert findings[1299] is not None
    assert "its new level after 100 steps" in str(findings[1299])
    assert sum(finding is not None for finding in findings[1300:]) <= 1


def test_it_judges_from_the_ninth_value_on() -> None:
    assert YOUNG == 150
    assert run([2.5] * 8 + [99.0])[0][-1] is not None
    assert run([2.5] * 7 + [99.0])[0][-1] is None


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, -math.inf])
def test_what_has_no_logarithm_is_left_to_others(value: float) -> None:
    values = [2.5] * 300
    expected = run(values)[1]
    findings, state = run([*values, value])
    assert findings[-1] is None or "not judged" in findings[-1].note
    assert state._replace(is_told=False) == expected


def test_a_signal_that_is_not_positive_is_said_to_be_unguarded_once() -> None:
    findings, _ = run([-3.0, -2.0, 0.0, 4.0])
    assert [finding is not None for finding in findings] == [True, False, False, False]
    assert findings[0] is not None
    assert "loss is not positive, so its spikes are not judged" in str(findings[0])
    assert findings[0].severity == Severity.WATCH


def test_a_young_doubling_is_accepted_in_the_end() -> None:
    for at in (200, 300, 600):
        values = steep(1200)
        values[at:] *= 2.2
        findings, _ = run(values)
        assert all(findings[at : at + 10])
        assert not any(findings[at + 100 :])


@pytest.mark.parametrize("seed", range(4))
def test_forty_batches_of_noise_teach_a_young_run_nothing(seed: int) -> None:
    random = np.random.default_rng(seed)
    values = steep(900) * np.exp(0.1 * random.standard_normal(900))
    values[500:540] = 2.3 * np.median(values[400:500]) * np.exp(0.01 * random.standard_normal(40))
    findings, _ = run(values)
    assert all(findings[500:540])
    as_before, _ = run(values, Spike(must_fall=False))
    assert not all(as_before[500:540]), "a signal that may stay up is believed sooner"


def test_a_young_run_begins_anew_at_a_level_that_it_accepts() -> None:
    values = steep(900) * np.exp(0.1 * np.random.default_rng(0).standard_normal(900))
    values[500:] *= 3
    findings, state = run(values)
    assert findings[599] is not None
    assert "its new level after 100 steps" in str(findings[599])
    assert not any(findings[600:])
    assert min(state.recent) > 4, "and what it compares with is of that level"


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


def test_an_announced_change_is_not_condemned_and_a_real_spike_still_is() -> None:
    values = steep(2500) * 1.0
    values[1500:] *= 1.4
    detector, state, gated = Spike(), State(), []
    values[1650] = 30.0
    for step, value in enumerate(values):
        row: dict[str, Any] = {"step": step, "loss": float(value)}
        if step == 1500:
            row["announced"] = "data mixture"
        if detector.look(state, row):
            gated.append(step)
        state = detector.learn(state, row)
    assert 1650 in gated
    assert len(gated) <= 2
    # 500 steps later the statistic judges again, and finds what the coarse rule does not
    assert detector.look(state, {"step": 2500, "loss": 1.4 * 1.4 * 2.5}) is not None
    assert detector.look(state._replace(coarse_left=1), {"step": 2500, "loss": 1.4 * 1.4 * 2.5}) is None


def test_what_the_device_found_is_not_judged_again() -> None:
    _, state = run(steep(1500))
    row: dict[str, Any] = {"step": 1500, "loss": 9.0}
    detector = Spike()
    assert detector.look(state, row | {"loss_p": 0.5}) is None
    assert detector.learn(state, row | {"loss_p": 0.5}).stream.burst == 0
    found = detector.look(state, {"step": 1500, "loss": 2.5, "loss_p": 3e-5})
    assert found is not None
    assert (found.severity, found.p) == (Severity.GATE, 3e-5)


def test_a_stream_with_tails_it_does_not_know_makes_it_careful() -> None:
    """Skewed far beyond any loss curve: p is small more often than it says, and the gate is tightened for that."""
    values = 2.5 * np.exp(0.005 * np.exp(1.5 * np.random.default_rng(0).standard_normal(20_000)))
    audited, state = run(values)
    assert state.audit.correction > 2
    detector = Spike()
    trusting, gates = detector.init(), 0
    for step, value in enumerate(values):
        row = {"step": step, "loss": float(value)}
        gates += detector.look(trusting, row) is not None
        trusting = detector.learn(trusting, row)._replace(audit=Audit())
    assert sum(finding is not None for finding in audited) < 0.8 * gates


def test_a_rise_that_no_single_value_proves_is_an_alarm_when_it_lasts() -> None:
    """A young run, and a learning rate 60 times too high from step 200 on: the loss of a real run (nano)."""
    random = np.random.default_rng(0)
    falling = (3.2 + 2.8 * np.exp(-np.arange(200) / 70)) * np.exp(0.03 * random.standard_normal(200))
    climbing = np.linspace(1.03, 1.25, 6)
    after = (
        np.concatenate((climbing, np.full(54, 1.25))) * falling[-20:].mean() * np.exp(0.03 * random.standard_normal(60))
    )
    detector, findings = Spike(), []
    state = detector.init()
    for step, loss in enumerate(np.concatenate((falling, after)).tolist()):
        row = {"step": step, "loss": loss}
        found = detector.look(state, row)
        findings += [found] if found else []
        state = detector.learn(state, row)
    alarms = [found for found in findings if found.severity is Severity.ALARM]
    assert alarms
    assert alarms[0].step < 220
    assert state.stream.burst > 40, "it stays one event, and teaches neither scale nor tail"
    assert state.audit.correction < 5


def test_a_few_high_values_in_a_row_are_no_alarm() -> None:
    detector = Spike()
    state = detector.init()
    random = np.random.default_rng(1)
    for step, noise in enumerate((0.03 * random.standard_normal(400)).tolist()):
        state = detector.learn(state, {"step": step, "loss": 3.0 * math.exp(noise)})
    high = math.exp(streaming.limit(state.stream, 5e-4))
    for step in range(400, 400 + MANY - 1):
        row = {"step": step, "loss": high}
        found = detector.look(state, row)
        assert found is None or found.severity < Severity.ALARM
        state = detector.learn(state, row)
    last = detector.look(state, {"step": 400 + MANY, "loss": high})
    assert last is not None
    assert (last.severity, last.spoils_update) == (Severity.ALARM, False)
    assert str(last.note) == "loss stays high, 8 times in 8 steps"


@pytest.mark.parametrize(
    ("detector", "steps", "chances", "is_alarm"),
    [
        (Spike(), GROWN, (9e-4, 2e-4, 2e-4), True),
        (Spike(), GROWN, (5e-3, 2e-4, 5e-4), False),
        (Spike(), GROWN, (2e-4, 5e-4, 5e-4), False),
        (Spike(), GROWN - 100, (9e-4, 2e-4, 2e-4), False),
        (Spike(must_fall=False), GROWN, (9e-4, 2e-4, 2e-4), False),
    ],
    ids=["grown", "first too small", "second too small", "young", "may rise"],
)
def test_a_surprise_right_after_another_is_an_alarm_in_a_grown_run(
    detector: Spike, steps: int, chances: tuple[float, float, float], is_alarm: bool
) -> None:
    random = np.random.default_rng(1)
    state = detector.init()
    for step, noise in enumerate((0.03 * random.standard_normal(steps)).tolist()):
        state = detector.learn(state, {"step": step, "loss": 3.0 * math.exp(noise)})
    found: list[Finding | None] = []
    for chance in chances:
        row = {"step": state.seen, "loss": math.exp(streaming.limit(state.stream, chance))}
        found.append(detector.look(state, row))
        state = detector.learn(state, row)
    first, second, third = found
    assert first is None
    assert third is None, "it is said once"
    assert (second is not None) == is_alarm
    if second is not None:
        assert (second.severity, second.spoils_update, second.p) == (Severity.ALARM, False, None)
        assert second.note == "loss spike, the second in a row"
        assert second.value > second.limit


def test_a_stream_over_hundreds_of_decades_has_a_limit() -> None:
    """Of what is grossly high the limit is asked for, and the tail of such a stream ends beyond the largest float."""
    detector = Spike()
    state = detector.init()
    random = np.random.default_rng(0)
    exponents = [*(random.random(300) * 600 - 300).tolist(), *[-200.0] * 40]
    for step, exponent in enumerate(exponents):
        state = detector.learn(state, {"step": step, "loss": 10.0**exponent})
    found = detector.look(state, {"step": 340, "loss": 1e-100})
    assert found is not None
    assert found.limit < 1e-100
