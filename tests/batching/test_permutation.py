"""A key chooses an order of any size."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sealegs.batching.permutation import shuffled


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_shuffled_is_a_permutation(size: int, key: int) -> None:
    assert sorted(shuffled(np.arange(size), size, key).tolist()) == list(range(size))


def test_shuffled_mixes() -> None:
    """Over many keys every position goes everywhere about equally often."""
    landed = Counter(int(shuffled(np.array([5]), 16, key)[0]) for key in range(4000))
    assert len(landed) == 16
    assert max(landed.values()) < 1.4 * 250
    assert min(landed.values()) > 0.6 * 250


def test_a_huge_source_is_shuffled_without_a_table() -> None:
    positions = shuffled(np.arange(1000), 10**15, key=1)
    assert len(set(positions.tolist())) == 1000
    assert 0 <= positions.min() < positions.max() < 10**15
