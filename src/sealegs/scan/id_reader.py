"""Reads files of token ids into blocks of documents, through memory maps that load only what is needed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sealegs.batching.stratified import Ints
from sealegs.errors import ConfigError, SourceError
from sealegs.record.arrays import open_array, open_numbers
from sealegs.scan.blocks import ROW, End, Ids, Part, Read, Ways

_PART_TOKENS = 1 << 23
_BLOCK_TOKENS = 1 << 20


def open_ids(path: Path, dtype: str) -> tuple[NDArray[Any], int | None]:
    """The token ids of a file, end to end, and the tokens per row if it is a table."""
    try:
        if path.suffix == ".bin":
            kind = _whole_numbers(dtype)
            size = path.stat().st_size
            if size % kind.itemsize:
                raise SourceError(f"{path}: {size} bytes, not a whole number of {dtype} token ids; give --dtype")
            tokens = open_numbers(path, kind)
        else:
            tokens = open_array(path)
    except OSError as error:
        raise SourceError(f"{path}: cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise SourceError(f"{path}: not a numpy array file ({error})") from error
    if tokens.dtype.kind not in "iu" or tokens.ndim not in (1, 2):
        raise SourceError(f"{path}: {tokens.ndim}-dimensional {tokens.dtype}; token ids are whole numbers in 1 or 2")
    return tokens.reshape(-1), tokens.shape[1] if tokens.ndim == 2 else None


def row_width(path: Path, width: int | None, row: int | None) -> int:
    """The tokens of a row: those of a table's line, or as many as are asked for."""
    if width is not None and row not in (None, width):
        raise ConfigError(f"--row {row}: {path} has {width} tokens a row; leave --row out")
    return row or width or ROW


def _whole_numbers(dtype: str) -> np.dtype[Any]:
    try:
        kind = np.dtype(dtype)
    except TypeError:
        kind = np.dtype(bool)
    if kind.kind not in "iu":
        raise ConfigError(f"--dtype {dtype}: give uint8, uint16, int32, uint32 or int64")
    return kind


def ranges(path: Path, ways: Ways) -> list[tuple[int, int]]:
    """Pieces of a file that begin and end with a document."""
    tokens, row = open_ids(path, ways.dtype)
    if not len(tokens):
        raise SourceError(f"{path}: empty; give a file with token ids")
    cuts = [0]
    while len(tokens) - cuts[-1] > _PART_TOKENS:
        cuts.append(_next_start(tokens, cuts[-1] + _PART_TOKENS, path, row, ways))
    return list(zip(cuts, [*cuts[1:], len(tokens)], strict=True))


def read_ids(part: Part, ways: Ways) -> Read:
    """Read documents by the file of their starts, by the token that ends them, or by rows."""
    path = Path(part.path or part.file)
    tokens, row = open_ids(path, ways.dtype)
    number, place = 0, part.start
    while place < part.end:
        end = part.end
        if end - place > _BLOCK_TOKENS:
            end = min(end, _next_start(tokens, place + _BLOCK_TOKENS, path, row, ways))
        ids = np.asarray(tokens[place:end])
        starts = _starts(ids, place, path, row, ways)
        yield Ids(ids, starts, np.arange(number, number + len(starts)), part.source, place - part.start)
        number, place = number + len(starts), end
    yield End(number)


def _starts(ids: NDArray[Any], place: int, path: Path, row: int | None, ways: Ways) -> Ints:
    """Where documents begin, in tokens that begin with one."""
    if ways.end is not None:
        ends = np.flatnonzero(ids[:-1] == ways.end)
        return np.append(0, ends + 1)
    if (starts := document_starts(path)) is not None:
        first, end = np.searchsorted(starts, (place, place + len(ids)))
        return starts[first:end].astype(np.int64) - place
    return np.arange(0, len(ids), row or ways.row)


def _next_start(tokens: NDArray[Any], place: int, path: Path, row: int | None, ways: Ways) -> int:
    """The first document that begins at a position or after it."""
    if ways.end is not None:
        for first, piece in _from(tokens, place - 1):
            ends = np.flatnonzero(piece == ways.end)
            if len(ends):
                return first + int(ends[0]) + 1
        return len(tokens)
    if (starts := document_starts(path)) is not None:
        later = int(np.searchsorted(starts, place))
        return int(starts[later]) if later < len(starts) else len(tokens)
    size = row or ways.row
    return min(-(-place // size) * size, len(tokens))


def _from(tokens: NDArray[Any], place: int) -> Iterator[tuple[int, NDArray[Any]]]:
    for first in range(place, len(tokens), _BLOCK_TOKENS):
        yield first, tokens[first : first + _BLOCK_TOKENS]


def document_starts(path: Path) -> NDArray[Any] | None:
    """Where documents start, as ``sealegs train`` reads it: beside the tokens, in NAME.starts.npy."""
    beside = path.with_suffix(".starts.npy")
    if not beside.exists():
        return None
    try:
        starts = open_array(beside)
        rises = starts.ndim == 1 and starts.dtype.kind in "iu" and len(starts) > 0 and starts[0] == 0
    except (OSError, ValueError) as error:
        raise SourceError(f"{beside}: cannot be read ({error}); remove it, or save document starts in it") from error
    if not rises:
        raise SourceError(f"{beside}: not the starts of documents: whole numbers that rise from 0")
    return starts
