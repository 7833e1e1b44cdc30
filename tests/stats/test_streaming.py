"""A stream of numbers in, how surprising each one is out."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from sealegs.stats.streaming import (
    NOTHING_YET,
    PATIENCE,
    POSITIVE,
    SIGNED,
    START,
    StreamState,
    height,
    learn,
    look,
    scan,
    value_at,
)

Stream = NDArray[np.float64]
GATE = 1e-4


def descent(steps: int) -> Stream:
    """The log of a loss that falls as a power law, as losses do."""
    return np.log(2.0 + 8.0 * (1 + np.arange(steps) / 20) ** -0.6)


def autoregressive(random: np.random.Generator, steps: int) -> Stream:
    noise, kept = random.standard_normal(steps), 0.0
    out = np.empty(steps)
    for i, shock in enumerate(noise):
        kept = out[i] = 0.5 * kept + shock
    return out * math.sqrt(0.75)


NOISES: dict[str, Callable[[np.random.Generator, int], Stream]] = {
    "normal": lambda random, steps: random.standard_normal(steps),
    "t5": lambda random, steps: random.standard_t(5, steps),
    "t3": lambda random, steps: random.standard_t(3, steps),
    "skewed": lambda random, steps: random.gamma(4.0, 0.5, steps) - 2.0,
    "autoregressive": autoregressive,
}


def healthy(noise: str, steps: int, seed: int = 0, scale: float = 0.01) -> Stream:
    return descent(steps) + scale * NOISES[noise](np.random.default_rng(seed), steps)


def fold(values: Stream, state: StreamState) -> tuple[Stream, StreamState]:
    """Look first, learn after, value by value."""
    p_of = []
    for value in values.tolist():
        if not math.isfinite(value):
            p_of.append(0.0)
            continue
        x = value if state.unit == POSITIVE else height(state, value)  # of positive ones, heights are given
        reading = look(state, x)
        p_of.append(reading.p)
        state = learn(state, x, suspicious=reading.p < GATE)
    return np.array(p_of), state


@pytest.mark.parametrize("noise", NOISES)
def test_the_loop_equals_the_fold(noise: str) -> None:
    values = healthy(noise, 1500)
    values[[40, 700]] = math.nan
    values[900:1050] += 2.0
    values[300] += 5.0
    for first, given_values in ((StreamState(), values), (SIGNED, 1e-6 * (values - 1.0))):
        p_fold, state_fold = fold(given_values, first)
        p_scan, state_scan = scan(given_values, limit=GATE, is_signed=first is SIGNED)
        assert p_fold.tobytes() == p_scan.tobytes()
        assert state_fold == state_scan
        assert (state_scan.unit > 0) == (first is SIGNED)


@settings(max_examples=60)
@given(
    st.lists(st.floats(-1e3, 1e3) | st.sampled_from([math.nan, math.inf, -math.inf]), max_size=300),
    st.sampled_from([None, 1.0, 1e-150, 1e-12, 1e150]),
)
def test_no_stream_breaks_it(values: list[float], size: float | None) -> None:
    p_of, state = scan(np.array(values, np.float64) * (size or 1.0), limit=GATE, is_signed=size is not None)
    assert ((p_of >= 0) & (p_of <= 1)).all()
    assert all(math.isfinite(part) for part in state if not isinstance(part, tuple))
    assert state.scale > 0
    assert 0 < state.q80 < state.q90 < state.q98


@pytest.mark.parametrize("noise", NOISES)
def test_p_means_what_it_says(noise: str) -> None:
    """Of healthy values, about one in a hundred has p < 0.01, and hardly more than nominal have p < 1e-4."""
    p_of = np.concatenate([scan(healthy(noise, 20_000, seed), limit=GATE)[0][150:] for seed in range(3)])
    assert (p_of < 0.1).mean() == pytest.approx(0.1, rel=0.35)
    assert (p_of < 0.01).mean() < 0.016
    assert (p_of < GATE).mean() < 4 * GATE


def test_a_spike_is_seen_the_first_time_and_the_second() -> None:
    values = healthy("t5", 3000)
    values[2000] += math.log(1000)
    values[2040] += math.log(20)
    p_of, _ = scan(values, limit=GATE)
    assert p_of[2000] < 1e-6
    assert p_of[2040] < 1e-6


def test_a_nan_disables_nothing() -> None:
    values = healthy("t5", 3000)
    values[1000:1010] = math.nan
    values[1010] += 1.0
    p_of, _ = scan(values, limit=GATE)
    assert (p_of[1000:1010] == 0).all()
    assert p_of[1010] < 1e-6
    clean, _ = scan(np.delete(values, slice(1000, 1010)), limit=GATE)
    assert np.delete(p_of, slice(1000, 1010)).tobytes() == clean.tobytes()


@pytest.mark.parametrize("steps", [30, 60, PATIENCE])
def test_a_burst_is_condemned_to_its_end(steps: int) -> None:
    values = healthy("t5", 3000)
    values[2000 : 2000 + steps] += math.log(1.4)
    p_of, _ = scan(values, limit=GATE)
    assert (p_of[2000 : 2000 + steps] < GATE).mean() >= 0.95
    assert (p_of[2000 + steps + 50 :] < GATE).mean() < 0.01


@pytest.mark.parametrize(("factor", "within"), [(1.4, 250), (3.6, 600)])
def test_a_new_level_is_accepted_in_the_end(factor: float, within: int) -> None:
    values = healthy("t5", 5000)
    values[2000:] += math.log(factor)
    p_of, state = scan(values, limit=GATE)
    assert (p_of[2000 + within :] < GATE).sum() <= 2
    assert state.level == pytest.approx(values[-200:].mean(), abs=0.02)


def test_nothing_is_judged_before_there_is_something_to_compare_with() -> None:
    state = StreamState()
    for x in healthy("normal", START)[:-1].tolist():
        state = learn(state, x)
        assert look(state, 1e9) == NOTHING_YET
    assert look(learn(state, 1.0), 1e9).p < GATE


def test_a_constant_stream_is_not_surprising_and_a_change_of_it_is() -> None:
    p_of, _ = scan(np.full(2000, 3.0), limit=GATE)
    assert (p_of > GATE).all()
    p_of, _ = scan(np.append(np.full(2000, 3.0), 3.1), limit=GATE)
    assert p_of[-1] < GATE


SIGNED_NOISES = NOISES | {
    "spread that changes": lambda random, steps: (
        random.standard_t(5, steps) * np.exp(1.5 * np.sin(np.arange(steps) / 3000 + random.uniform(0, 6)))
    ),
    "ratios": lambda random, steps: random.standard_normal(steps) * np.exp(0.5 * random.standard_normal(steps)),
}


@pytest.mark.parametrize("noise", SIGNED_NOISES)
def test_p_means_what_it_says_of_both_signs(noise: str) -> None:
    """About zero, whatever it is measured in. ``bench/signed.py`` has the rates over two million values."""
    streams = [SIGNED_NOISES[noise](np.random.default_rng(seed), 20_000) for seed in range(2)]
    p_of = np.concatenate([scan(1e-7 * stream, limit=GATE, is_signed=True)[0][150:] for stream in streams])
    assert (p_of < 0.1).mean() == pytest.approx(0.1, rel=0.35)
    assert (p_of < 0.01).mean() < 0.014
    assert (p_of < GATE).mean() < 4 * GATE


@pytest.mark.parametrize("size", [1e-9, 1.0, 1e6])
@pytest.mark.parametrize("level", [0.0, -3.0, -1e4])
def test_what_is_found_does_not_depend_on_the_unit_of_measure(size: float, level: float) -> None:
    values = level + NOISES["t5"](np.random.default_rng(0), 3000) * max(0.01 * abs(level), 1.0)
    values[2000] += 50 * max(0.01 * abs(level), 1.0)
    p_of, state = scan(values * size, limit=GATE, is_signed=True)
    assert p_of[2000] < 1e-6
    assert value_at(state, height(state, values[0] * size)) == pytest.approx(values[0] * size)


def test_a_start_full_of_outliers_is_survived() -> None:
    values = healthy("normal", 1000)
    values[3:20:4] += 3.0
    p_of, state = scan(values, limit=GATE)
    assert (p_of[150:] < GATE).sum() <= 1
    assert state.scale == pytest.approx(0.01, rel=0.4)
