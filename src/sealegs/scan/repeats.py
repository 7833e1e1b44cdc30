"""Finds spans in documents that repeat many times in a row, as no natural text does."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]

TIMES = 32
"""Consecutive repeats that make a document degenerate."""
LONGEST_SPAN = 13
"""The longest span, in tokens, whose repeats count (the rule of OLMo 2)."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """A span that repeats in a row."""

    document: int
    start: int
    """Its first token, counted from the first of all documents."""
    span: int
    """Tokens of the span."""
    times: int


def repeats(tokens: NDArray[Any], starts: Ints) -> Iterator[Repeat]:
    """The first span of each document that repeats at least ``TIMES`` times in a row; the shortest span counts.

    ``tokens`` are the documents end to end, as any comparable values; ``starts`` is where each begins.

    >>> list(repeats(np.array([1, 2, 3] + [7, 8] * 40), np.array([0, 1])))
    [Repeat(document=1, start=3, span=2, times=40)]
    """
    ends = np.append(starts[1:], len(tokens))
    known: set[int] = set()
    for span in range(1, LONGEST_SPAN + 1):
        least = (TIMES - 1) * span  # consecutive tokens that equal the one a span before
        suspects = np.unique(np.searchsorted(starts, _suspects(tokens, span, least), side="right") - 1)
        for document in suspects.tolist():
            if document in known:
                continue
            first, end = int(starts[document]), int(ends[document])
            is_same = tokens[first + span : end] == tokens[first : end - span]
            edges = np.flatnonzero(np.diff(is_same, prepend=False, append=False)).reshape(-1, 2)
            long_enough = edges[edges[:, 1] - edges[:, 0] >= least]
            if len(long_enough):
                known.add(document)
                run, run_end = long_enough[0].tolist()
                yield Repeat(document, first + run, span, (run_end - run) // span + 1)


def _suspects(tokens: NDArray[Any], span: int, least: int) -> Ints:
    """Tokens near which a run may be: every run has four grid points in a row that equal the token a span before."""
    grid = np.arange(span, len(tokens), least // 4)
    is_same = tokens[grid] == tokens[grid - span]
    found: Ints = grid[:-3][is_same[:-3] & is_same[1:-2] & is_same[2:-1] & is_same[3:]]
    return found
