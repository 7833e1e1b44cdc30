"""Counts of parts are merged in any grouping, and are those of the whole."""

from functools import reduce
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sealegs.scan import counts as subject
from sealegs.scan.blocks import Ids, joined
from sealegs.scan.counts import Counts, SourceSizes, document_key, merge, merged, part_and_document
from sealegs.scan.ids import look_at_ids
from sealegs.scan.text import look_at_text

ALPHABET = "ab \né\ufffdÃ©\x00."
TEXTS = st.lists(st.text(ALPHABET, max_size=12) | st.sampled_from(["go " * 40, "ab", "same"]), max_size=4)
PARTS = st.lists(TEXTS, min_size=3, max_size=6)


def of_text(part: int, texts: list[str]) -> Counts:
    block = joined([text.encode() for text in texts], range(len(texts)), f"source {part % 2}")
    return merge(look_at_text(block, part, longest=20), Counts(parts={part: len(texts)}))


def plain(counts: Counts) -> dict[str, Any]:
    """Every number in it."""
    return {
        name: value.tolist()
        if isinstance(value, np.ndarray)
        else [each.tolist() for each in (value.tokens, value.documents, value.offsets)]
        if name == "places"
        else value
        for name in Counts.__slots__
        for value in [getattr(counts, name)]
    }


@settings(max_examples=60)
@given(PARTS)
def test_any_grouping_comes_to_the_same(parts: list[list[str]]) -> None:
    each = [of_text(number, texts) for number, texts in enumerate(parts)]
    one, two, three = each[:3]
    assert plain(merge(merge(one, two), three)) == plain(merge(one, merge(two, three)))
    assert plain(merge(Counts(), one)) == plain(merge(one, Counts())) == plain(one)
    from_the_left = reduce(merge, each, Counts())
    from_the_right = reduce(lambda later, earlier: merge(earlier, later), reversed(each), Counts())
    assert plain(from_the_left) == plain(from_the_right) == plain(merged(each))


@settings(max_examples=60)
@given(st.lists(st.lists(st.lists(st.integers(0, 6), max_size=9), max_size=4), min_size=1, max_size=5))
def test_rare_tokens_are_known_with_all_their_places(parts: list[list[list[int]]]) -> None:
    counts = []
    for number, documents in enumerate(parts):
        lengths = np.array([len(each) for each in documents], np.int64)
        ids = np.array([token for each in documents for token in each], np.uint16)
        block = Ids(ids, np.cumsum(lengths) - lengths, np.arange(len(documents)), "a", 0)
        counts.append(look_at_ids(block, number, longest=100, end=None))
    found = merged(counts)
    everything = [token for documents in parts for each in documents for token in each]
    assert [int(found.tokens[t]) if t < len(found.tokens) else 0 for t in range(7)] == [
        everything.count(t) for t in range(7)
    ]
    expected = sorted(
        (token, part, document)
        for part, documents in enumerate(parts)
        for document, each in enumerate(documents)
        for token in each
        if everything.count(token) < 10
    )
    where = [part_and_document(key) for key in found.places.documents.tolist()]
    assert sorted((t, *place) for t, place in zip(found.places.tokens.tolist(), where, strict=True)) == expected


def test_of_too_many_findings_the_first_are_kept_and_all_are_counted(monkeypatch: Any) -> None:
    monkeypatch.setattr(subject, "LISTED", 3)
    found = merged(of_text(number, ["", "", "text"]) for number in range(4))
    assert [(each.part, each.document) for each in found.findings] == [(0, 0), (0, 1), (1, 0)]
    assert found.found == {("source 0", "empty"): 4, ("source 1", "empty"): 4}


def test_a_key_is_a_part_and_a_document() -> None:
    assert [part_and_document(int(document_key(part, 5))) for part in (0, 3, 1 << 20)] == [(0, 5), (3, 5), (1 << 20, 5)]


def test_lengths_are_told_by_powers_of_two() -> None:
    tally = SourceSizes.of(np.array([0, 1, 2, 3, 4, 1000]), 77)
    assert tally.lengths[:4] == (1, 1, 2, 1)
    assert tally.lengths[10] == 1
    assert (tally.documents, tally.bytes, tally.tokens, tally.longest) == (6, 77, 1010, 1000)


@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=9))
def test_the_median_is_within_a_factor_of_two_and_that_of_one_document_exact(lengths: list[int]) -> None:
    found, true = SourceSizes.of(np.array(lengths), 0).median, sorted(lengths)[(len(lengths) - 1) // 2]
    assert true / 2 < found < 2 * true or found == true
    assert found <= max(lengths)
    assert found == true or len(lengths) > 1
