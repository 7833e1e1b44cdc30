"""However few the points: no extreme, no gap and nothing that is not finite is hidden."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealegs.report.dashboard.downsample import MOST_BROKEN, Floats, Reduced, Steps, reduced

numbers = st.one_of(
    st.floats(-1e300, 1e300), st.floats(1.0, 2.0), st.sampled_from([np.nan, np.nan, np.inf, -np.inf, 5e-324])
)


@st.composite
def series(draw: st.DrawFn) -> tuple[Steps, Floats]:
    """Values, NaN in single rows and in stretches; steps with gaps."""
    values = draw(st.lists(st.tuples(numbers, st.integers(1, 30)), max_size=60))
    many = np.repeat([value for value, _ in values], [times for _, times in values]) if values else np.empty(0)
    apart = draw(st.lists(st.sampled_from([1, 1, 1, 1, 7, 1000]), min_size=len(many), max_size=len(many)))
    return np.cumsum(np.array(apart, dtype=np.int64)), many.astype(np.float64)


points = st.integers(2, 64)


def drawn(line: Reduced) -> set[tuple[int, float]]:
    return {
        (step, value) for step, value in zip(line.steps.tolist(), line.values.tolist(), strict=True) if value == value
    }


@given(series(), points)
def test_both_extremes_and_both_ends_are_drawn_where_they_are(given: tuple[Steps, Floats], points: int) -> None:
    steps, values = given
    line = reduced(steps, values, points)
    finite = np.flatnonzero(np.isfinite(values))
    wanted = (
        {finite[values[finite].argmax()], finite[values[finite].argmin()], finite[0], finite[-1]}
        if len(finite)
        else set()
    )
    assert {(int(steps[at]), float(values[at])) for at in wanted} <= drawn(line)


@given(series(), points)
def test_nothing_is_drawn_that_was_not_measured(given: tuple[Steps, Floats], points: int) -> None:
    steps, values = given
    line = reduced(steps, values, points)
    assert drawn(line) <= set(zip(steps.tolist(), values.tolist(), strict=True))
    assert (np.diff(line.steps) >= 0).all()
    assert len(drawn(line)) <= points + 4
    assert not np.isinf(line.values).any()


@given(series(), points)
def test_every_row_that_is_not_finite_is_in_a_mark(given: tuple[Steps, Floats], points: int) -> None:
    steps, values = given
    line = reduced(steps, values, points)
    lost = set(steps[~np.isfinite(values)].tolist())
    covered = {step for step in lost for mark in line.broken if mark.first <= step <= mark.last}
    assert covered == lost
    assert sum(mark.rows for mark in line.broken) == len(lost)
    assert {end for mark in line.broken for end in (mark.first, mark.last)} <= lost
    assert len(line.broken) <= MOST_BROKEN + 1
    if len(values) <= MOST_BROKEN:  # room for each stretch by itself
        begins = ~np.isfinite(values) & np.concatenate([[True], np.isfinite(values)])[:-1]
        assert [mark.first for mark in line.broken] == steps[begins].tolist()


@given(series(), points)
def test_a_line_is_broken_wherever_something_is_not_finite(given: tuple[Steps, Floats], points: int) -> None:
    steps, values = given
    line = reduced(steps, values, points)
    lost = steps[~np.isfinite(values)]
    for left, right in zip(range(len(line.values) - 1), range(1, len(line.values)), strict=True):
        if not np.isnan(line.values[[left, right]]).any():
            assert not ((lost > line.steps[left]) & (lost < line.steps[right])).any()


@given(st.integers(0, 9999), st.integers(2, 200), st.booleans())
def test_a_single_spike_among_many_rows_stays(at: int, points: int, is_low: bool) -> None:
    values = np.sin(np.arange(10_000.0))
    values[at] = -3.0 if is_low else 3.0
    assert (at, values[at]) in drawn(reduced(np.arange(10_000), values, points))


def test_the_extremes_of_every_stretch_stay() -> None:
    values = np.random.default_rng(0).standard_normal(100_000)
    line = reduced(np.arange(100_000), values, 2000)
    for begin in range(0, 100_000, 100):
        stretch = values[begin : begin + 100]
        inside = line.values[(line.steps >= begin) & (line.steps < begin + 100)]
        assert (inside.max(), inside.min()) == (stretch.max(), stretch.min())


def test_rows_around_an_incident_are_all_there() -> None:
    values = np.random.default_rng(0).standard_normal(50_000)
    line = reduced(np.arange(50_000), values, 100, [(20_000, 20_200)])
    assert set(range(20_000, 20_201)) <= set(line.steps.tolist())


@pytest.mark.parametrize("steps", [[0, 1, 2, 3, 50, 51, 52], [0, 10, 20, 30, 900, 910, 920], [5, 6, 7, 8, 2, 3, 4]])
def test_missing_rows_and_steps_that_go_back_break_the_line(steps: list[int]) -> None:
    line = reduced(np.array(steps), np.ones(7), 100)
    assert np.flatnonzero(np.isnan(line.values)).tolist() == [4]


@pytest.mark.parametrize("steps", [[0, 1, 2, 3, 13, 23, 33], [0, 100, 200, 250, 300], [0, 500], [3]])
def test_another_interval_is_no_gap(steps: list[int]) -> None:
    assert not np.isnan(reduced(np.array(steps), np.ones(len(steps)), 100).values).any()


def test_a_point_between_breaks_is_not_lost() -> None:
    line = reduced(np.arange(5), np.array([1.0, np.nan, 2.0, np.nan, 3.0]), 100)
    assert line.steps[line.lone].tolist() == [0, 2, 4]


def test_the_smoothed_line_is_the_mean_of_what_is_finite() -> None:
    line = reduced(np.arange(20), np.array([1.0, 2, 3, 4, np.inf, *[10.0] * 4, np.nan, *[7.0] * 10]), 100)
    assert line.averaged == 5
    assert line.mean_values[~np.isnan(line.mean_values)].tolist() == [2.5, 10.0, 7.0, 7.0]
    few = reduced(np.arange(3), np.array([1.0, np.inf, 2.0]), 100)
    assert (few.averaged, few.mean_values[~np.isnan(few.mean_values)].tolist()) == (1, [1.0, 2.0])


def test_two_kinds_of_not_finite_are_both_named() -> None:
    (mark,) = reduced(np.arange(4), np.array([1.0, np.nan, -np.inf, 2.0]), 10).broken
    assert mark.what == "NaN and -Infinity"
