"""Spans that are repeated on end."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sealegs.scan.repeats import LONGEST_SPAN, TIMES, repeats


def by_hand(tokens: list[int]) -> tuple[int, int, int] | None:
    """First place, span and times of the first long run of the shortest span."""
    for span in range(1, LONGEST_SPAN + 1):
        run = 0
        for place in range(span, len(tokens) + 1):
            if place < len(tokens) and tokens[place] == tokens[place - span]:
                run += 1
                continue
            if run >= (TIMES - 1) * span:
                return place - run - span, span, run // span + 1
            run = 0
    return None


@st.composite
def documents(draw: st.DrawFn) -> list[int]:
    tokens = draw(st.lists(st.integers(0, 3), max_size=30))
    for _ in range(draw(st.integers(0, 2))):
        span = draw(st.lists(st.integers(0, 3), min_size=1, max_size=14))
        tokens += span * draw(st.integers(29, 34)) + draw(st.lists(st.integers(0, 3), max_size=20))
    return tokens


@settings(max_examples=80)
@given(st.lists(documents(), min_size=1, max_size=4))
def test_they_are_those_that_a_search_by_hand_finds(each: list[list[int]]) -> None:
    lengths = np.array([len(tokens) for tokens in each])
    starts = np.cumsum(lengths) - lengths
    tokens = np.array([token for document in each for token in document], np.uint16)
    found = {
        repeat.document: (repeat.start - int(starts[repeat.document]), repeat.span, repeat.times)
        for repeat in repeats(tokens, starts)
    }
    assert found == {number: hand for number, document in enumerate(each) if (hand := by_hand(document))}


@pytest.mark.parametrize("span", [1, 7, 13])
def test_one_less_is_none(span: int) -> None:
    once = list(range(100, 100 + span))
    assert len(list(repeats(np.array([1, 2, *once * TIMES, 3]), np.array([0])))) == 1
    assert not list(repeats(np.array([1, 2, *once * (TIMES - 1), 3]), np.array([0])))


def test_a_longer_span_is_none() -> None:
    assert not list(repeats(np.array(list(range(14)) * 40), np.array([0])))


def test_two_documents_do_not_add_up() -> None:
    tokens = np.array([7] * 20 + [7] * 20)
    assert not list(repeats(tokens, np.array([0, 20])))
    assert len(list(repeats(tokens, np.array([0])))) == 1


def test_nothing_is_in_nothing() -> None:
    assert not list(repeats(np.array([], np.int64), np.array([], np.int64)))
    assert not list(repeats(np.array([], np.int64), np.array([0, 0])))
