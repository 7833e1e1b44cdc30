"""Counts token ids, also in a memory map, and finds the rows that hold rare ones."""

from collections.abc import Iterator
from itertools import islice
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sealegs.batching.stratified import Ints, RareRows, rare_tokens
from sealegs.errors import ConfigError, SourceError

_PIECE = 1 << 20
_ROWS_AT_ONCE = 1 << 12
HIGHEST_ID = 1 << 26
"""Largest possible id: no vocabulary is larger, and the table of an id beyond it would fill the memory."""


def token_counts(tokens: NDArray[Any], *, at_least: int = 0) -> Ints:
    """How often each id occurs, in a table of at least ``at_least`` ids.

    >>> token_counts(np.array([3, 1, 3]))
    array([0, 1, 0, 2])
    """
    counts = np.zeros(at_least, np.int64)
    for _, piece in _pieces(tokens):
        lowest, highest = int(piece.min()), int(piece.max())
        if lowest < 0 or highest >= HIGHEST_ID:
            raise SourceError(
                f"token id {min(lowest, 0) or highest}: ids are from 0 to {HIGHEST_ID - 1}; give the right dtype"
            )
        found = np.bincount(piece, minlength=len(counts))
        found[: len(counts)] += counts
        counts = found
    return counts


def rows_of(tokens: NDArray[Any], starts: Ints, counts: Ints) -> RareRows:
    """The rows that hold rare tokens. Each row ends where the next one starts; ``counts`` is over all data.

    >>> rows_of(np.array([5, 0, 0, 5, 5, 1]), np.array([0, 2, 4]), np.array([10, 10, 0, 0, 0, 3]))
    RareRows(count=3, rows=array([0, 1, 2]), tokens=array([5, 5, 5]))
    """
    is_rare = rare_tokens(counts)
    places = [first + np.flatnonzero(is_rare[piece]) for first, piece in _pieces(tokens)]
    found = np.concatenate([np.empty(0, np.int64), *places])
    rows = np.searchsorted(starts, found, side="right") - 1
    return RareRows(len(starts), rows, tokens[found].astype(np.int64))


class _Rows(Protocol):
    """A list of rows, or a dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Any: ...


def rare_rows(rows: NDArray[Any] | _Rows) -> RareRows:
    """The rows that hold tokens that are rare in all of them.

    ``rows`` is a table of ids with one row per line, which may be a memory map, or a sequence of rows of any length,
    which is iterated twice.

    >>> rare_rows([[1, 2], [2] * 10, [1]])
    RareRows(count=3, rows=array([0, 2]), tokens=array([1, 1]))
    """
    if isinstance(rows, np.ndarray) and rows.ndim == 2:
        flat = rows.reshape(-1)
        return rows_of(flat, np.arange(0, rows.size, rows.shape[1]), token_counts(flat))
    counts = np.zeros(0, np.int64)
    for _, ids, _ in _portions(rows):
        found = token_counts(ids, at_least=len(counts))
        found[: len(counts)] += counts
        counts = found
    parts = [(first, rows_of(ids, starts, counts)) for first, ids, starts in _portions(rows)]
    return RareRows(
        len(rows),
        np.concatenate([np.empty(0, np.int64), *(first + part.rows for first, part in parts)]),
        np.concatenate([np.empty(0, np.int64), *(part.tokens for _, part in parts)]),
    )


def _portions(rows: NDArray[Any] | _Rows) -> Iterator[tuple[int, NDArray[Any], Ints]]:
    """Some thousand rows at a time, end to end: the number of the first, the ids, and where each row starts."""
    each = (_ids(rows[number], number) for number in range(len(rows)))
    first = 0
    while portion := list(islice(each, _ROWS_AT_ONCE)):
        lengths = np.array([len(row) for row in portion])
        yield first, np.concatenate(portion), np.cumsum(lengths) - lengths
        first += len(portion)


def _ids(row: Any, number: int) -> Ints:
    ids = np.asarray(row).reshape(-1)
    if len(ids) and ids.dtype.kind not in "iu":
        raise ConfigError(f"row {number}: {type(row).__name__}, not token ids; give rows of whole numbers")
    return ids.astype(np.int64)


def _pieces(tokens: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
    for first in range(0, len(tokens), _PIECE):
        yield first, tokens[first : first + _PIECE]
