"""The table of slow rises has a control, and counts from the onset."""

from bench.slow_rises import Found, cell, first_alarm


def test_a_steep_rise_is_found_and_none_is_not() -> None:
    assert str(cell(0.02, 7.4, seeds=1)).startswith("1 of 1, after ")
    assert first_alarm(0.1, 1.0, seed=0) is None


def test_a_cell_says_how_many_and_how_late() -> None:
    assert str(Found([40, 60], seeds=3)) == "2 of 3, after 50"
    assert str(Found([], seeds=3)) == "0 of 3"
