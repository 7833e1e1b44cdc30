"""Which rows hold rare tokens."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.format import open_memmap

from sealegs.batching import tokens as subject
from sealegs.batching.stratified import RareRows
from sealegs.batching.tokens import rare_rows, rows_of, token_counts
from sealegs.errors import ConfigError, SourceError


def pairs(rare: RareRows) -> list[tuple[int, int]]:
    return sorted(zip(rare.rows.tolist(), rare.tokens.tolist(), strict=True))


@given(st.lists(st.lists(st.integers(0, 12), max_size=6), min_size=1, max_size=40))
def test_rare_rows_are_those_that_a_count_by_hand_finds(rows: list[list[int]]) -> None:
    flat = [token for row in rows for token in row]
    by_hand = sorted((number, token) for number, row in enumerate(rows) for token in row if flat.count(token) < 10)
    found = rare_rows(rows)
    assert pairs(found) == by_hand
    assert found.count == len(rows)


def test_a_table_and_a_memory_map_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "_PIECE", 7)
    monkeypatch.setattr(subject, "_ROWS_AT_ONCE", 3)
    table = (np.random.default_rng(0).random((50, 5)) ** 3 * 60).astype(np.uint16)
    on_disk = open_memmap(tmp_path / "a.npy", "w+", table.dtype, table.shape)
    on_disk[:] = table
    expected = pairs(rare_rows(table.tolist()))
    assert pairs(rare_rows(table)) == pairs(rare_rows(open_memmap(tmp_path / "a.npy", "r"))) == expected
    assert expected


def test_empty_rows_hold_nothing() -> None:
    found = rows_of(np.array([3, 4]), np.array([0, 1, 1, 2]), np.array([0, 0, 0, 1, 1]))
    assert pairs(found) == [(0, 3), (2, 4)]


def test_no_rows_at_all() -> None:
    assert rare_rows([]).count == 0
    assert token_counts(np.array([], np.uint16)).tolist() == []


@pytest.mark.parametrize("token", [-1, 2**40])
def test_what_is_no_token_id_is_refused(token: int) -> None:
    with pytest.raises(SourceError, match=f"token id {token}: ids are from 0"):
        token_counts(np.array([0, token]))


def test_rows_that_are_no_ids_are_refused() -> None:
    with pytest.raises(ConfigError, match="row 1: dict, not token ids"):
        rare_rows([[1], {"input_ids": [1]}])
