"""Reads Parquet files, Arrow files and datasets saved by Hugging Face's library into blocks of documents."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from sealegs.errors import MissingExtra, SourceError
from sealegs.scan.blocks import PART_BYTES, End, Ids, Part, Read, TextDocuments, Ways
from sealegs.scan.files import is_address, opened

_ROWS = 512


def ranges(path: str, format: str) -> list[tuple[int, int, int]]:  # noqa: A002 - it is one
    """Row groups of a Parquet file or batches of an Arrow file, and their bytes."""
    if format == "parquet":
        with _parquet(path) as file:
            groups = [file.metadata.row_group(number).total_byte_size for number in range(file.num_row_groups)]
        return [(number, number + 1, size) for number, size in enumerate(groups)]
    found: list[tuple[int, int, int]] = []
    first, size, number = 0, 0, 0
    for number, batch in enumerate(_batches(path), start=1):
        size += batch.nbytes
        if size > PART_BYTES:
            found.append((first, number, size))
            first, size = number, 0
    return [*found, (first, number, size)] if number > first else found


def read_arrow(part: Part, ways: Ways) -> Read:
    """Read a column of strings, or of lists of token ids."""
    number = offset = 0
    for batch in _rows_of(part, ways):
        names = batch.schema.names
        if ways.field not in names:
            raise SourceError(f"no column {ways.field!r}; give --field, one of {', '.join(names)}")
        column = batch.column(ways.field)
        for source, rows in _by_source(batch, part.source, ways):
            numbers = number + rows
            block = _block(column.take(_arrow().array(rows)), numbers, source, offset)
            offset += len(block.ids) if isinstance(block, Ids) else 0
            yield block
        number += batch.num_rows
    yield End(number)


def _block(column: Any, numbers: Any, source: str, offset: int) -> TextDocuments | Ids:
    pa = _arrow()
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        column = column.fill_null("").cast(pa.large_string())
        _, offsets, data = column.buffers()
        edges = np.frombuffer(offsets, np.int64, len(column) + 1, column.offset * 8)
        text = bytes(data or b"")[int(edges[0]) : int(edges[-1])]
        return TextDocuments(text, edges[:-1] - edges[0], numbers, source)
    if (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and pa.types.is_integer(kind.value_type):
        lengths = np.array(column.value_lengths().fill_null(0), np.int64)
        ids = np.asarray(column.flatten())
        return Ids(ids, np.cumsum(lengths) - lengths, numbers, source, offset)
    raise SourceError(f"column of {kind}: documents are strings or lists of token ids; give --field")


def _by_source(batch: Any, source: str, ways: Ways) -> Iterator[tuple[str, Any]]:
    """The rows of each source."""
    if ways.source is None:
        yield source, np.arange(batch.num_rows)
        return
    if ways.source not in batch.schema.names:
        raise SourceError(f"no column {ways.source!r}; give --source, one of {', '.join(batch.schema.names)}")
    named = np.array([str(each) for each in batch.column(ways.source).to_pylist()])
    for name in np.unique(named):
        yield str(name), np.flatnonzero(named == name)


def _rows_of(part: Part, ways: Ways) -> Iterator[Any]:
    path = part.file
    if part.format == "parquet":
        with _parquet(path) as file:
            wanted = [name for name in (ways.field, ways.source) if name is not None]
            are_there = set(wanted) <= set(file.schema_arrow.names)
            yield from file.iter_batches(_ROWS, row_groups=[part.start], columns=wanted if are_there else None)
        return
    for number, batch in enumerate(_batches(path)):
        if part.start <= number < part.end:
            yield batch


@contextmanager
def _parquet(path: str) -> Iterator[Any]:
    pa = _arrow()
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(opened(path) if is_address(path) else path) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        raise SourceError(f"{path}: not a Parquet file, or damaged ({error})") from error


def _batches(path: str) -> Iterator[Any]:
    """The batches of an Arrow file: a stream, as ``datasets`` saves it, or a file with a table of contents."""
    pa = _arrow()
    try:
        with pa.PythonFile(opened(path), "r") if is_address(path) else pa.memory_map(path) as mapped:
            try:
                yield from pa.ipc.open_stream(mapped)
            except pa.ArrowInvalid:
                mapped.seek(0)
                contents = pa.ipc.open_file(mapped)
                yield from (contents.get_batch(number) for number in range(contents.num_record_batches))
    except (pa.ArrowException, OSError) as error:
        raise SourceError(f"{path}: not an Arrow file, or damaged ({error})") from error


def _arrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise MissingExtra("Parquet and Arrow files", "pyarrow", "scan") from error
    return pyarrow
