"""The streams are what they say: noise of mean 0 and variance 1, and trouble exactly where the truth has it."""

import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench.streams import Injection, Stream

from bench import streams

PLACE = 1500
INJECTIONS: dict[str, Injection] = {
    **streams.FAULTS,
    **streams.BURSTS,
    "NaN": streams.NAN_THEN,
    "shift": streams.SHIFT,
    "drift": streams.DRIFT,
}


@pytest.fixture(scope="module")
def base() -> Stream:
    return streams.healthy("t5", "power law", 5000, np.random.default_rng(0), with_norm=True)


@pytest.mark.parametrize("name", streams.NOISES)
def test_noise_has_mean_0_and_variance_1(name: str) -> None:
    noise = streams.NOISES[name](np.random.default_rng(1), 400_000)
    assert noise.mean() == pytest.approx(0, abs=0.01)
    assert noise.var() == pytest.approx(1, rel=0.15 if name == "t3" else 0.03)


def test_the_noises_differ_as_they_say() -> None:
    drawn = {name: noise(np.random.default_rng(2), 400_000) for name, noise in streams.NOISES.items()}
    beyond = {name: float((noise > 5).mean()) for name, noise in drawn.items()}
    assert beyond["Gaussian"] < 1e-5 < beyond["t5"] < beyond["t3"]
    assert np.mean(drawn["gamma"] ** 3) == pytest.approx(2, rel=0.1)
    assert np.mean(drawn["log-normal"] ** 3) == pytest.approx(2, rel=0.1)
    assert np.corrcoef(drawn["AR(0.5)"][1:], drawn["AR(0.5)"][:-1])[0, 1] == pytest.approx(0.5, abs=0.01)
    assert abs(np.corrcoef(drawn["t5"][1:], drawn["t5"][:-1])[0, 1]) < 0.01


def test_healthy_runs_fall_as_their_trend_says() -> None:
    flat = streams.healthy("Gaussian", "flat", 5000, np.random.default_rng(3))
    falling = streams.healthy("Gaussian", "power law", 5000, np.random.default_rng(3), with_norm=True)
    assert flat.bad == falling.bad == ()
    assert flat.grad_norm is None
    assert falling.grad_norm is not None
    assert flat.loss[:500].mean() == pytest.approx(flat.loss[-500:].mean(), rel=0.01)
    assert falling.loss[0] == pytest.approx(11, rel=0.05)
    assert falling.loss[-500:].mean() < 0.4 * falling.loss[0]


@pytest.mark.parametrize("name", INJECTIONS)
def test_an_injection_changes_the_steps_that_it_calls_bad_and_no_other(name: str, base: Stream) -> None:
    event = INJECTIONS[name](base, PLACE)
    before = base.part(PLACE, PLACE + len(event))
    assert event.grad_norm is not None
    assert before.grad_norm is not None
    changed = (event.loss != before.loss) | (event.grad_norm != before.grad_norm)
    # the published traces begin at the level before
    assert np.flatnonzero(changed).tolist() == ([0] if name in streams.TRACES else []) + list(event.bad)
    assert event.onset in event.bad


@pytest.mark.parametrize("name", streams.EVENTS)
def test_a_fault_can_be_found_for_200_steps(name: str, base: Stream) -> None:
    event = streams.EVENTS[name](base, PLACE)
    assert len(event) - event.onset > 200
    assert (event.peak is not None) == (name in streams.TRACES)


def test_of_two_shocks_the_second_is_to_be_found(base: Stream) -> None:
    event = streams.FAULTS["norm x20, 40 after x1000"](base, PLACE)
    assert event.bad == (0, 40)
    assert event.onset == 40


def test_the_control_is_the_run_itself_and_a_copy(base: Stream) -> None:
    event = streams.nothing(base, PLACE, reach=100)
    assert event.bad == ()
    assert (event.loss == base.loss[PLACE : PLACE + 100]).all()
    event.loss[:] = 0
    assert base.loss[PLACE] > 0


def test_bursts_go_where_they_say(base: Stream) -> None:
    level = streams.level_at(base, PLACE)
    assert np.median(streams.BURSTS["100 steps to 9.0"](base, PLACE).loss) == pytest.approx(9.0, rel=0.01)
    assert np.median(streams.BURSTS["30 steps of +40 %"](base, PLACE).loss) == pytest.approx(1.4 * level, rel=0.01)
    assert len(streams.BURSTS) == 6


def test_a_drift_arrives_at_its_factor(base: Stream) -> None:
    event = streams.DRIFT(base, PLACE)
    ratio = event.loss / base.loss[PLACE : PLACE + len(event)]
    assert (np.diff(ratio) > 0).all()
    assert ratio[-1] == pytest.approx(1.4)


def test_only_the_first_step_of_a_nan_stream_is_nan(base: Stream) -> None:
    event = streams.NAN_THEN(base, PLACE)
    assert event.grad_norm is not None
    assert np.flatnonzero(np.isnan(event.loss)).tolist() == np.flatnonzero(np.isnan(event.grad_norm)).tolist() == [0]


def test_the_traces_are_the_published_ones_on_the_level_of_the_run(base: Stream) -> None:
    bloom = streams.FAULTS["BLOOM-176B"](base, PLACE)
    assert bloom.grad_norm is not None
    assert (bloom.onset, bloom.peak) == (1, 5)
    assert (bloom.loss[9:] == base.loss[PLACE + 9 : PLACE + len(bloom)]).all()
    assert bloom.loss[5] / bloom.loss[0] == pytest.approx(5.098 / 2.199)
    assert bloom.grad_norm[4] / bloom.grad_norm[0] == pytest.approx(145 / 0.242)
    assert bloom.loss[0] == pytest.approx(streams.level_at(base, PLACE))
    assert streams.FAULTS["BigScience 104B"](base, PLACE).peak == 2


def test_the_worked_example_has_its_published_figures() -> None:
    for seed in range(5):
        spiked, calm = streams.worked_example(seed), streams.worked_example(seed, spiked=False)
        step = streams.WORKED_STEP
        assert spiked.grad_norm is not None
        assert calm.grad_norm is not None
        assert len(spiked) == 500
        assert (spiked.loss[step], spiked.grad_norm[step]) == (5.84, 47.2)
        assert (spiked.loss[:step] == calm.loss[:step]).all()
        assert calm.loss[step - 25 : step + 25].mean() == pytest.approx(2.31, rel=0.02)
        assert np.median(calm.grad_norm) == pytest.approx(0.6, rel=0.05)
        assert spiked.loss[355:366].mean() == pytest.approx(3.40, rel=0.04)
        assert spiked.bad == tuple(range(step, 500))


def test_the_same_seed_is_the_same_stream() -> None:
    make = partial(streams.healthy, "t3", "flat", 100)
    assert (make(np.random.default_rng(4)).loss == make(np.random.default_rng(4)).loss).all()
    assert not (make(np.random.default_rng(4)).loss == make(np.random.default_rng(5)).loss).any()


def test_what_lasts_differs_from_what_does_not_once_it_has_lasted() -> None:
    ten = ("loss +10 %, 1 step", "loss +10 %, 30 steps", "loss +10 % for good")
    counts = [streams.different(ten, delay) for delay in (0, 1, 8, 32, 200)]
    assert counts == [1, 2, 2, 3, 3]
    assert [streams.different(streams.FAULTS, delay) for delay in (0, 200)] == [len(streams.FAULTS) - 2, 15]
