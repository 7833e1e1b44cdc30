"""Which batches will hold many rare tokens."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from sealegs.batching.stratified import RareRows
from sealegs.scan import forecast as subject
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


@pytest.mark.parametrize("piece", [1, 3, 1000])
def test_an_order_in_a_file_is_read_in_pieces(piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "_PIECE", piece)
    draw = np.random.default_rng(piece)
    order = draw.permutation(90)[:77]
    rare = RareRows(90, draw.integers(0, 90, 60), draw.integers(0, 9, 60))
    at = {int(row): place for place, row in enumerate(order)}
    pairs = {
        (at[row] // 8, token, row)
        for row, token in zip(rare.rows.tolist(), rare.tokens.tolist(), strict=True)
        if row in at
    }
    met = Counter((batch, token) for batch, token, _ in pairs)
    np.save(tmp_path / "order.npy", np.append(order, [-1, -1, -1]))  # the last batch has no more
    told = [ahead(each, rare, batch=8) for each in (np.load(tmp_path / "order.npy", mmap_mode="r"), order)]
    for found in told:
        assert (found.batches, found.meeting) == (10, len({batch for (batch, _), times in met.items() if times > 1}))
        assert found.worst[0].tokens.tolist() == told[0].worst[0].tokens.tolist()
    mapped = np.load(tmp_path / "order.npy", mmap_mode="r")
    assert repr(ahead(mapped[8:], rare, batch=8)) == repr(ahead(np.array(mapped[8:]), rare, batch=8))
    as_it_lies = [ahead(each, rare, batch=8) for each in (range(70), np.arange(70))]
    assert repr(as_it_lies[0]) == repr(as_it_lies[1])
    assert (subject._places(range(70), rare.rows) >= 0).sum() == (rare.rows < 70).sum()


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
