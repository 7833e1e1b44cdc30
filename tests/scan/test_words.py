"""Text is cut into words that can be compared."""

import re

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from sealegs.scan.words import keys, words

TEXT = st.text("ab_1 \n.,-é\x01", max_size=30)
PATTERN = re.compile(rb"[A-Za-z0-9_\x80-\xff]+|[^\sA-Za-z0-9_\x80-\xff\x01]+|\x01+")


@given(st.lists(TEXT, min_size=1, max_size=5))
def test_they_are_those_of_a_pattern(texts: list[str]) -> None:
    documents = [text.encode() for text in texts]
    data = b"".join(documents)
    lengths = np.array([len(each) for each in documents])
    found = words(data, np.cumsum(lengths) - lengths)
    cut = [data[a:b] for a, b in zip(found.starts.tolist(), found.ends.tolist(), strict=True)]
    expected = [PATTERN.findall(document) for document in documents]
    assert cut == [word for each in expected for word in each]
    assert np.diff(found.firsts).tolist() == [len(each) for each in expected]


@example(["a" * 9, "a" * 10])
@given(st.lists(st.text("abc01", min_size=1, max_size=16), min_size=1, max_size=30))
def test_the_same_number_is_the_same_word(each: list[str]) -> None:
    data = " ".join(each).encode()
    numbers = keys(data, words(data, np.array([0]))).tolist()
    assert len(numbers) == len(each)
    assert [numbers.index(number) for number in numbers] == [each.index(word) for word in each]
