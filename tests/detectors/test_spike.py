"""Sudden rises of one signal."""

import json
import math
from typing import Any

import numpy as np
import pytest

from sealegs.detectors.spike import GROWN, MANY, Spike, SpikeState
from sealegs.errors import ConfigError
from sealegs.judge import thaw
from sealegs.stats import streaming
from sealegs.stats.calibration import CalibrationAudit
from sealegs.vocabulary import Finding, Severity


def run(values: Any, detector: Spike | None = None, **known: Any) -> tuple[list[Finding | None], SpikeState]:
    """``known`` of every step."""
    detector = detector or Spike()
    state, findings = detector.init(), []
    for step, value in enumerate(values):
        row = {"step": step, detector.signal: float(value), **known}
        findings.append(detector.look(state, row))
        state = detector.learn(state, row)
    return findings, state


def steep(steps: int, seed: int = 0) -> Any:
    """A loss that falls from 11 to 5 in its first 100 steps, as real ones do."""
    random = np.random.default_rng(seed)
    return (2.5 + 8.5 * np.exp(-np.arange(steps) / 60)) * np.exp(0.01 * random.standard_t(5, steps))


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


@pytest.mark.parametrize(
    "options",
    [
        {"alarm": 0.0},
        {"alarm": 1e-3},
        {"gate": 0.5},
        {"alarm": math.nan},
        {"smallest": 0.5},
        {"gross": 1.0},
        {"growth": math.nan},
    ],
    ids=str,
)
def test_impossible_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        Spike(**options)  # type: ignore[arg-type]


def test_an_announced_change_is_not_condemned_and_what_is_beyond_all_measure_still_is() -> None:
    values = steep(2500) * 1.0
    values[1500:] *= 1.4
    detector, state, gated = Spike(gross=10.0), SpikeState(), []
    values[1650] = 60.0
    for step, value in enumerate(values):
        row: dict[str, Any] = {"step": step, "loss": float(value)}
        if step == 1500:
            row["announced"] = "data mixture"
        if detector.look(state, row):
            gated.append(step)
        state = detector.learn(state, row)
    assert 1650 in gated
    assert len(gated) <= 2
    # 500 steps later the statistic judges again, and finds more
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
        trusting = detector.learn(trusting, row)._replace(audit=CalibrationAudit())
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


@pytest.mark.parametrize("seed", range(4))
def test_a_loss_that_has_fallen_steeply_and_is_flat_does_not_stay_high(seed: int) -> None:
    """The level follows a steep fall late, and overshoots: at 1.0 here, while the loss is 1.15."""
    noise = 0.005 * np.random.default_rng(seed).standard_normal(500)
    falling = 1.15 + 3.2 * np.exp(-((np.arange(500) / 50) ** 2))
    findings, _ = run(falling * np.exp(noise))
    assert [found for found in findings if found is not None and found.severity >= Severity.ALARM] == []

    risen, _ = run(np.append(falling[:300], np.full(30, 1.4)) * np.exp(noise[:330]))
    first = next(found for found in risen if found is not None and found.severity >= Severity.ALARM)
    assert 300 <= first.step < 316, "above what it was before, it does"


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
    assert last.lasts == MANY


def test_a_high_value_some_way_before_is_no_part_of_the_stretch() -> None:
    """One in fifty values is high by chance: that one is not the onset."""
    detector = Spike()
    state = detector.init()
    random = np.random.default_rng(1)
    for step, noise in enumerate((0.03 * random.standard_normal(400)).tolist()):
        state = detector.learn(state, {"step": step, "loss": 3.0 * math.exp(noise)})
    high, usual = math.exp(streaming.limit(state.stream, 5e-4)), math.exp(state.stream.level)
    found = None
    for step, loss in enumerate([high, *[usual] * 7, *[high] * 7], 400):
        found = detector.look(state, row := {"step": step, "loss": loss})
        state = detector.learn(state, row)
    assert found is not None
    assert str(found.note) == "loss stays high, 8 times in 15 steps"
    assert found.lasts == 7


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


NORM = Spike(signal="grad_norm", smallest=1.5, must_fall=False, gross=10.0, growth=2.0)


def skipped(values: Any, **known: Any) -> list[int]:
    findings, _ = run(values, NORM, **known)
    return [step for step, found in enumerate(findings) if found is not None and found.spoils_update]


def norms(steps: int, seed: int = 0, tail: float = 0.2) -> Any:
    return 0.5 * np.exp(tail * np.random.default_rng(seed).standard_t(5, steps))


def test_a_high_loss_is_news_and_no_reason_to_throw_the_batch_away() -> None:
    values = steep(1500)
    values[1200:1240] = 40.0
    findings, _ = run(values)
    assert all(finding is not None and not finding.spoils_update for finding in findings[1200:1240])


@pytest.mark.parametrize("at", [8, 60, 400, 1400])
def test_a_gradient_beyond_anything_spoils_its_update_at_any_age(at: int) -> None:
    values = norms(1500)
    largest = values[:at].max()
    values[at] = 11 * largest
    assert skipped(values) == [at]
    values[at] = 9 * largest * 0.5 ** (at / 1000)  # the largest may have been long ago
    assert skipped(values) == []


def test_what_is_clipped_to_a_size_that_is_known_is_applied_unless_nothing_new_could_be_so_large() -> None:
    """The first row of a new class is 10 to 20 times the largest gradient before it; it is clipped, and teaches."""
    values = norms(600)
    largest = values[:400].max()
    for factor, clip, skips in [(30, largest, []), (300, largest, [400]), (30, 11 * largest, [400])]:
        values[400] = factor * largest
        assert skipped(values, clip_norm=clip) == skips
        found = run(values, NORM, clip_norm=clip)[0][400]
        assert found is not None
        assert found.severity >= Severity.GATE, "it is a surprise all the same"


def test_what_is_divided_by_its_own_size_is_bounded_too() -> None:
    values = norms(600)
    largest = values[:400].max()
    for factor, skips in [(30, []), (300, [400])]:
        values[400] = factor * largest
        assert skipped(values, normalised=1.0) == skips
        assert skipped(values) == [400]


@pytest.mark.parametrize("clip", ["auto", math.nan, math.inf])
def test_a_clipping_that_nobody_knows_bounds_nothing(clip: Any) -> None:
    assert skipped([1.0] * 50 + [11.0] + [1.0] * 9, clip_norm=clip) == [50]


def test_the_first_eight_say_nothing_of_what_is_beyond_them() -> None:
    assert skipped([0.5] * 7 + [1e6] + [0.5] * 100) == []


def test_what_is_rare_is_skipped_once_and_known_from_then_on() -> None:
    """A class that comes every 2,000 steps with a gradient twelve times as large as any other."""
    values = norms(20_000)
    values[500::2000] = 12 * values.max()
    assert skipped(values) == [500]


def test_a_size_that_stays_is_accepted_within_a_few_steps() -> None:
    values = norms(600)
    values[300:] *= 1e6
    assert 1 <= len(skipped(values)) <= 7


def test_gradients_that_explode_are_stopped_before_they_are_gross() -> None:
    """BLOOM-176B, steps 31214 to 31222: the norm grows for four steps before the loss peaks."""
    values = 0.25 * np.exp(0.1 * np.random.default_rng(0).standard_t(5, 1500))
    values[1200:1209] = [0.242, 0.947, 2.39, 15.9, 145.0, 960.0, 353.0, 379.0, 650.0]
    assert skipped(values)[:4] == [1202, 1203, 1204, 1205]


def test_what_gradients_have_come_to_before_is_no_explosion() -> None:
    """One row at a time, of which few are not learned yet: next to nothing, and now and then two of them in a row."""
    random = np.random.default_rng(0)
    values = 0.06 * np.exp(0.02 * random.standard_normal(3000))
    rare = np.append(5, np.flatnonzero(random.random(3000) < 0.01))
    values[rare] = random.uniform(2, 6, len(rare))
    values[800::200], values[801::200] = 2.2, 5.0
    assert skipped(values) == []


def test_a_new_level_of_gradients_is_reached_once_and_applied() -> None:
    """Parameters that thaw, another task, a change of the mixture: no explosion."""
    for factor in (3.0, 5.0, 8.0):
        values = norms(1500, tail=0.05)
        values[700:] *= factor
        findings, _ = run(values, NORM)
        assert findings[700] is not None
        assert skipped(values) == []


@pytest.mark.parametrize("tail", [0.2, 0.5, 1.0])
def test_tails_are_left_alone(tail: float) -> None:
    """Log-normal ones, by up to a factor of 25 in a thousand; real gradients have no heavier ones."""
    for seed in range(20):
        assert skipped(0.5 * np.exp(tail * np.random.default_rng(seed).standard_normal(1000))) == []


@pytest.mark.parametrize("value", [0.0, -0.0, math.nan, math.inf, -math.inf])
def test_what_has_no_logarithm_is_left_to_others(value: float) -> None:
    values = [2.5] * 300
    expected = run(values)[1]
    findings, state = run([*values, value])
    assert findings[-1] is None
    assert state == expected


def hovering(steps: int, seed: int = 0, size: float = 1e-3) -> Any:
    """A loss about zero, as that of a policy gradient."""
    return size * np.random.default_rng(seed).standard_t(5, steps)


@pytest.mark.parametrize("size", [1e-9, 1.0, 1e6])
def test_a_signal_of_both_signs_is_judged_on_a_scale_for_both(size: float) -> None:
    values = hovering(2000, size=size)
    values[1500] = 50 * size
    findings, state = run(values)
    first = findings[int(np.argmax(values < 0))]
    assert first is not None
    assert (first.severity, first.spoils_update) == (Severity.WATCH, False)
    assert "loss takes both signs: it is judged on a scale for both, after 150 steps" in str(first)
    found = findings[1500]
    assert found is not None
    assert (found.severity, found.value, found.spoils_update) == (Severity.ALARM, 50 * size, False)
    assert 3 * size < found.limit < 30 * size
    assert sum(finding is not None for finding in findings) <= 4
    assert state.is_signed
    detector, limit = Spike(), found.limit
    before = run(values[:1500])[1]
    assert detector.look(before, {"step": 1500, "loss": limit * 0.9999}) is None
    assert detector.look(before, {"step": 1500, "loss": limit * 1.0001}) is not None


def test_a_loss_that_falls_through_zero_begins_anew_there_and_no_zero_makes_it() -> None:
    """As a log-density does. A zero among positive losses, of a batch without targets, changes nothing."""
    values = 3.0 - 4.0 * (1 - np.exp(-np.arange(4000) / 800)) + 0.01 * np.random.default_rng(0).standard_normal(4000)
    values[500] = 0.0
    crossing = int(np.argmax(values < 0))
    assert 1000 < crossing < 1200
    values[3000] = values[2999] + 0.5
    findings, state = run(values)
    _, before = run(values[:crossing])
    assert not before.is_signed
    assert before.seen == crossing - 1
    assert state.seen == 4000 - crossing
    assert [at for at, found in enumerate(findings) if found and found.severity == Severity.ALARM] == [3000]


def test_a_signal_of_both_signs_may_stay_high_and_is_never_gross() -> None:
    """A policy changes, a critic is fooled less and less; and its largest value says nothing about its size."""
    values = hovering(3000)
    values[2000:] += 8e-3
    eager = Spike(gross=2.0, growth=1.1)
    values[2500] = 1.0
    findings, _ = run(values, eager)
    told = [found for found in findings if found is not None]
    assert not any(found.spoils_update or "stays high" in found.note for found in told)
    assert findings[2500] is not None


def test_a_state_in_which_nothing_was_judged_any_more_goes_on_judging() -> None:
    """As older checkpoints have them: a negative value had ended it all, with logarithms in the stream."""
    _, positive = run(steep(1500))
    saved = json.loads(json.dumps(positive._replace(is_signed=True)))
    saved[0] = saved[0][:12]  # which had no unit
    old = thaw(Spike().init(), saved)
    assert old.stream.unit == 0.0
    detector, state = Spike(), old
    for step, value in enumerate(hovering(400)):
        row = {"step": step, "loss": float(value)}
        detector.look(state, row)
        state = detector.learn(state, row)
    assert detector.look(state, {"step": 400, "loss": 1.0}) is not None
    assert state.seen == 400
