"""Rare tokens are spread over batches."""

from itertools import combinations
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sealegs.batching.stratified import Ints, RareRows, meetings, spread

ROWS = st.lists(st.lists(st.integers(0, 30), max_size=3), min_size=1, max_size=60)


def of(rows: list[list[int]]) -> RareRows:
    return RareRows.of([np.array(row, np.int64) for row in rows])


def as_they_come(rows: list[list[int]]) -> Ints:
    return np.arange(len(rows))


@given(ROWS, st.integers(1, 9), st.integers(0, 8), st.integers(0, 3))
def test_every_row_comes_once(rows: list[list[int]], batch: int, first: int, seed: int) -> None:
    order = spread(as_they_come(rows), of(rows), batch, seed=seed, first=first % batch)
    assert sorted(order.tolist()) == list(range(len(rows)))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("first", [0, 3])
def test_no_batch_has_a_rare_token_twice(seed: int, first: int) -> None:
    """Nine occurrences of each, which is as often as a rare token comes, all in a row."""
    random = np.random.default_rng(seed)
    rows = [[token] for token in range(20) for _ in range(9)] + [[]] * 76
    if seed:
        rows = [rows[place] for place in random.permutation(len(rows))]
    for rows_per_batch in (4, 8, 16):
        order = spread(as_they_come(rows), of(rows), rows_per_batch, first=first)
        for end in range(rows_per_batch - first, len(rows) + rows_per_batch, rows_per_batch):
            tokens = [token for row in order[max(0, end - rows_per_batch) : end] for token in rows[row]]
            assert len(tokens) == len(set(tokens))


@given(ROWS, st.integers(1, 9))
def test_meetings_are_what_a_count_by_hand_finds(rows: list[list[int]], batch: int) -> None:
    found = meetings(as_they_come(rows), of(rows), batch)
    by_hand: dict[tuple[int, int], int] = {}
    for number in range(0, len(rows), batch):
        held = [token for row in rows[number : number + batch] for token in set(row)]
        by_hand |= {(number // batch, token): held.count(token) for token in held if held.count(token) > 1}
    assert {
        (b, t): n for b, t, n in zip(*map(np.ndarray.tolist, (found.batches, found.tokens, found.rows)), strict=True)
    } == by_hand


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(0, 2), max_size=2, unique=True), min_size=6, max_size=6))
def test_all_that_can_be_parted_are_and_else_hardly_more_meet_than_must(rows: list[list[int]]) -> None:
    """Three batches of two rows: all 15 ways are tried."""
    pairs = list(combinations(range(6), 2))
    ways = [way for way in combinations(pairs, 3) if len(set(sum(way, ()))) == 6]
    assert len(ways) == 15
    fewest = min(sum(len(set(rows[a]) & set(rows[b])) for a, b in way) for way in ways)
    found = meetings(spread(as_they_come(rows), of(rows), 2), of(rows), 2)
    meet = sum(comb(int(times), 2) for times in found.rows)
    assert meet == fewest if fewest <= 1 else fewest <= meet <= fewest + 3  # it takes one exchange at a time


def test_a_token_of_more_rows_than_batches_is_in_all_of_them_alike() -> None:
    rows = [[7]] * 9 + [[]] * 11
    found = meetings(spread(as_they_come(rows), of(rows), 5), of(rows), 5)
    assert sorted(found.rows.tolist()) == [2, 2, 2, 3]


def test_a_token_twice_in_a_row_meets_nobody() -> None:
    rows = [[7, 7], [7], [], []]
    assert len(meetings(spread(as_they_come(rows), of(rows), 2), of(rows), 2).rows) == 0


@given(ROWS, st.integers(1, 9))
def test_what_meets_nobody_stays(rows: list[list[int]], batch: int) -> None:
    mended = spread(as_they_come(rows), of(rows), batch)
    moved = [rows[row] for row in mended]
    if not len(meetings(as_they_come(rows), of(moved), batch).rows):
        assert spread(as_they_come(rows), of(moved), batch).tolist() == list(range(len(rows)))


def test_most_rows_stay_where_they_were() -> None:
    """Two rows change places for each one that has to go."""
    rows = [[token] for token in range(5) for _ in range(4)] + [[]] * 980
    order = spread(as_they_come(rows), of(rows), 10)
    assert np.count_nonzero(order != np.arange(1000)) <= 2 * 20


def test_a_seed_chooses() -> None:
    rows = [[1]] * 9 + [[]] * 91
    one, again, other = (spread(as_they_come(rows), of(rows), 4, seed=seed).tolist() for seed in (1, 1, 2))
    assert one == again != other
