"""Spans that documents share are found from a documented length on, whatever is around them."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sealegs.scan.spans import LONGEST_MISSED, chosen_runs


def chosen(*documents: list[int]) -> list[set[int]]:
    firsts = np.cumsum([0, *map(len, documents[:-1])])
    hashes, of = chosen_runs(np.array([word for each in documents for word in each], np.uint64), firsts)
    return [set(hashes[of == number].tolist()) for number in range(len(documents))]


WORDS = st.lists(st.integers(0, 1 << 40), max_size=70)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(1, 3), st.lists(WORDS, min_size=4, max_size=4), WORDS)
def test_a_span_of_fifty_words_is_found_wherever_it_is(
    seed: int, vocabulary: int, around: list[list[int]], between: list[int]
) -> None:
    """Also where its words repeat, which makes equal hashes."""
    draw = np.random.default_rng(seed)
    span = draw.integers(0, 10**vocabulary, LONGEST_MISSED + 1).tolist()
    one, other = [*around[0], *span, *around[1]], [*around[2], *span, *around[3]]
    found = chosen(one, between, other)
    assert found[0] & found[2]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(1, 31))
def test_fewer_words_than_a_run_are_not_taken_for_one(seed: int, size: int) -> None:
    draw = np.random.default_rng(seed)
    one, other = (draw.integers(0, 1 << 40, 200).tolist() for _ in range(2))
    other[50 : 50 + size] = one[90 : 90 + size]
    found = chosen(one, other)
    assert not found[0] & found[1]
    assert 10 < len(found[0]) < 30  # two in twenty words


def test_the_order_of_words_counts_and_documents_do_not_run_together() -> None:
    words = list(range(60))
    found = chosen(words, words[::-1], words[:30], words[30:])
    assert found[0]
    assert not found[0] & found[1]
    assert not found[2]
    assert not found[3]
