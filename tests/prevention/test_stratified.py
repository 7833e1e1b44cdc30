"""Rare tokens are spread over batches."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealegs.prevention.stratified import spread

ROWS = st.lists(st.lists(st.integers(0, 30), max_size=3), min_size=1, max_size=60)


@given(ROWS, st.integers(1, 9))
def test_every_row_comes_once(rows: list[list[int]], batch: int) -> None:
    order = spread([np.array(row, np.int64) for row in rows], batch)
    assert sorted(order.tolist()) == list(range(len(rows)))


@pytest.mark.parametrize("seed", range(5))
def test_no_batch_has_a_rare_token_twice(seed: int) -> None:
    """Nine occurrences of each, which is as often as a rare token comes, all in a row."""
    random = np.random.default_rng(seed)
    rows = [np.array([token]) for token in range(20) for _ in range(9)] + [np.array([], np.int64)] * 76
    if seed:
        rows = [rows[place] for place in random.permutation(len(rows))]
    for rows_per_batch in (4, 8, 16):
        order = spread(rows, rows_per_batch)
        for first in range(0, len(rows), rows_per_batch):
            tokens = np.concatenate([rows[row] for row in order[first : first + rows_per_batch]])
            assert len(tokens) == len(set(tokens.tolist()))


def test_what_has_none_stays() -> None:
    assert spread([np.array([], np.int64)] * 10, 4).tolist() == list(range(10))
