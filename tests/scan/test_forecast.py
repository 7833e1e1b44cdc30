"""Which batches will hold many rare tokens."""

import numpy as np
import pytest

from sealegs.batching.stratified import RareRows
from sealegs.scan.forecast import _limit, ahead


def test_a_batch_with_the_same_token_in_two_rows_is_named_first() -> None:
    rare = RareRows(40, np.array([1, 2, 9, 30, 30]), np.array([7, 7, 8, 9, 9]))
    found = ahead(np.arange(40), rare, batch=4)
    assert (found.batches, found.meeting, found.usual) == (10, 1, 0.5)
    first = found.worst[0]
    assert (first.batch, first.met, first.tokens.tolist(), first.rows.tolist()) == (0, 1, [7, 7], [1, 2])


def test_by_another_order_others_meet() -> None:
    rare = RareRows(8, np.array([0, 7]), np.array([5, 5]))
    assert ahead(np.arange(8), rare, batch=4).meeting == 0
    assert ahead(np.array([0, 7, 1, 2, 3, 4, 5, 6]), rare, batch=4).meeting == 1


def test_rows_that_are_not_read_do_not_count() -> None:
    rare = RareRows(8, np.array([0, 1, 7]), np.array([5, 5, 6]))
    found = ahead(np.array([1, 2, 3, 4]), rare, batch=2)
    assert (found.batches, found.meeting, found.usual) == (2, 0, 0.5)


def test_many_different_ones_in_one_batch_are_more_than_chance() -> None:
    spread_out = np.arange(0, 800, 4)
    crowd = np.arange(400, 408)
    rare = RareRows(800, np.append(spread_out, np.repeat(crowd, 3)), np.arange(224))
    found = ahead(np.arange(800), rare, batch=8)
    assert (found.crowded, found.meeting) == (1, 0)
    assert (found.worst[0].batch, len(found.worst[0].tokens)) == (50, 26)


@pytest.mark.parametrize("usual", [0.01, 2.0, 40.0, 1500.0])
def test_chance_seldom_comes_to_the_limit(usual: float) -> None:
    """Of 300 runs of 200 batches about 3 would have such a batch; 12 are one in 40,000."""
    draws = np.random.default_rng(0).poisson(usual, (300, 200))
    limit = _limit(usual, 200)
    assert (draws.max(axis=1) >= limit).sum() <= 12
    assert limit <= max(3, usual + 6 * usual**0.5 + 4)


def test_without_rare_tokens_there_is_nothing_ahead() -> None:
    none = np.empty(0, np.int64)
    found = ahead(np.arange(8), RareRows(8, none, none), batch=4)
    assert (found.batches, found.crowded, found.meeting, found.worst) == (2, 0, 0, ())
