"""Other text for the rows of a batch, as a fault wants it."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sealegs.faults.data import EncodingJunk, RepeatedNgram
from sealegs.faults.targets import draw
from sealegs.faults.text import BatchText, Ints


def raw_numbers(count: int, *key: object) -> NDArray[np.uint64]:
    """64-bit numbers that depend on the key alone. The first of many are the same as the few."""
    # the raw output of a generator is the same in every version of numpy
    return np.random.PCG64(draw(2**64, *key)).random_raw(count)


def repeated(text: BatchText, fault: RepeatedNgram, number: int) -> Ints:
    """A repeated span of each row, for every position of a batch and one more at the end of each row."""
    *shape, length = text.tokens.shape
    is_text = text.tokens >= 0
    if text.labels is not None and text.labels.shape == text.tokens.shape:
        is_text &= text.labels >= 0  # the rest may be padding
    rows = np.empty((*shape, length + 1), np.int64)
    for row, place in enumerate(np.ndindex(*shape)):
        tokens = text.tokens[place]
        own = tokens[is_text[place]] if is_text[place].any() else tokens
        size = min(fault.length, len(own))
        start = draw(len(own) - size + 1, fault.seed, fault.name, number, row)
        rows[place] = np.resize(own[start : start + size], length + 1)  # numpy's resize repeats what is too short
    return rows


def wrongly_decoded(text: BatchText, fault: EncodingJunk, rare: Ints) -> Ints:
    """Two rare tokens for each token, for every position of a batch and one more at the end of each row."""
    *shape, length = text.tokens.shape
    tokens = np.maximum(text.tokens, 0)  # padding is not an id
    raw = raw_numbers(2 * (int(tokens.max(initial=0)) + 1), fault.seed, fault.name)
    pairs = np.take(rare, raw % np.uint64(len(rare))).reshape(-1, 2)
    return pairs[tokens].reshape(*shape, 2 * length)[..., : length + 1]


def permuted(text: BatchText, other: Ints) -> Any:
    """A copy of a batch with each id replaced by another. Labels are ids, too, unless they belong to whole rows.

    Negative ids (padding, positions without a target) and those beyond the vocabulary stay.
    """

    def exchanged(ids: Ints) -> Ints:
        is_known = (ids >= 0) & (ids < len(other))
        return np.where(is_known, other[np.where(is_known, ids, 0)], ids)

    labels = text.labels
    if labels is not None and labels.shape == text.tokens.shape:
        labels = exchanged(labels)
    return text.put(exchanged(text.tokens), labels)


def one_cycle(count: int, *key: object) -> Ints:
    """A permutation of ``count`` ids that leaves none as it is: each becomes the next one of a shuffled ring.

    >>> one_cycle(6, "any key")
    array([4, 3, 1, 0, 5, 2])
    """
    ring = np.argsort(raw_numbers(count, *key), kind="stable")
    other = np.empty_like(ring)
    other[ring] = np.roll(ring, -1)
    return other
