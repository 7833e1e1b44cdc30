"""Reads ``metrics.jsonl`` into numpy columns, through a cache that is never trusted over the file.

The cache is an uncompressed ``.npz`` beside the file, with many columns in one member. Its zip directory reveals a torn
cache, the digests of its members a damaged one. The cache names the bytes of the file that it was made from. If the
file has changed, those bytes are checked in full before the cache is used, and only the appended rest is parsed.
"""

import io
import json
import math
import os
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from sealegs.record.files import whole_file
from sealegs.record.schema import COLUMN_CACHE, TEXT_SIGNALS

Column: TypeAlias = NDArray[Any]
Mask: TypeAlias = NDArray[np.bool_]

CACHE_FROM_BYTES = 1 << 20
"""Smallest file that gets a cache: a smaller one is parsed fast enough."""

HIGHEST_STEP = 2**53
"""Floats represent every integer up to this one."""
Step: TypeAlias = Annotated[float, msgspec.Meta(ge=-HIGHEST_STEP, le=HIGHEST_STEP)]

WIDE = 256
"""Signals from which on most rows lack most of them: then only what is there is looked at."""

_FIRST_BYTES = 16 << 10  # whose rows are decoded one by one, since their signals are not known yet
_CHUNK_BYTES = 256 << 10  # the decoded rows of one chunk fit into a core's cache: a tenth faster than 4 MiB
_WIDE_CHUNK_BYTES = 16 << 20  # what a chunk costs grows with its signals, of which there are many here
_SAMPLE_BYTES = 64 << 10
_BLOCK_BYTES = 16 << 20
_CACHE_FORMAT = 2


@dataclass(frozen=True, slots=True)
class Columns:
    """All rows of a metrics file in the order they were written, one column per signal."""

    values: dict[str, Column]
    """Floats with NaN where a row has no such signal, or fixed-width byte strings."""
    logged: dict[str, Mask]
    """Where a row has the signal: tells a measured NaN from a missing value."""
    rows: int = 0
    damaged_lines: int = 0
    """Lines that are not JSON objects with a step, mostly torn by a kill. They are left out."""
    covered_bytes: int = 0
    """The bytes of the file that the columns cover: up to its last newline."""


def read_columns(path: Path) -> Columns:
    """The columns of a metrics file, from the cache beside it if that is sound."""
    cache = path.with_name(COLUMN_CACHE)
    with path.open("rb") as file:
        cached = _load_cache(cache, file)
        columns = _parse_from(file, cached.covered_bytes if cached else 0)
        appended = columns.covered_bytes - (cached.covered_bytes if cached else 0)
        if cached:
            columns = _joined([cached, columns]) if appended else cached
        if appended > CACHE_FROM_BYTES:
            _save_cache(cache, columns, file)
    return columns


def _parse_from(file: BinaryIO, start: int) -> Columns:
    """Parse whole lines from a byte on. A last line without its newline is still being written, and is left."""
    file.seek(start)
    keys: tuple[str, ...] = ("step",)
    parts: list[Columns] = []
    covered = start
    while chunk := file.read(_chunk_bytes(len(keys))):
        chunk += file.readline()
        if not chunk.endswith(b"\n"):
            chunk = chunk[: chunk.rfind(b"\n") + 1]
        if not chunk:
            break
        part, keys = _decode(chunk, keys)
        covered += len(chunk)
        parts.append(part)
    return replace(_joined(parts), covered_bytes=covered)


def _chunk_bytes(signals: int) -> int:
    if signals == 1:
        return min(_FIRST_BYTES, _CHUNK_BYTES)
    return _WIDE_CHUNK_BYTES if signals > WIDE else _CHUNK_BYTES


@lru_cache
def _decoder(keys: tuple[str, ...]) -> msgspec.json.Decoder[Any]:
    """A decoder of rows with these keys, of which the first is required, into structs: faster than into dicts.

    What a row does not have is NaN, which no JSON number is: numpy takes five times as long for None.
    """
    step, *others = keys
    columns: list[Any] = [("c0", Step, msgspec.field(name=step))]
    columns += [
        (f"c{i}", float | str | None, msgspec.field(name=key, default=math.nan)) for i, key in enumerate(others, 1)
    ]
    return msgspec.json.Decoder(msgspec.defstruct("Row", columns, forbid_unknown_fields=True, gc=False))


def _decode(chunk: bytes, keys: tuple[str, ...]) -> tuple[Columns, tuple[str, ...]]:
    """The columns of a chunk, and all keys so far: there may be new ones."""
    if len(keys) <= WIDE:
        with suppress(msgspec.DecodeError, UnicodeDecodeError):  # a new signal or a torn line
            return _transposed(_decoder(keys).decode_lines(chunk), keys), keys
    sound = []
    lines = [line for line in chunk.split(b"\n") if line.strip()]
    seen = dict.fromkeys(keys)
    plain = msgspec.json.Decoder(dict[str, float | str | None])
    for line in lines:
        try:
            row = plain.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        if _is_step(row.get("step")) and all(map(_is_name, row.keys() - seen.keys())):
            seen.update(dict.fromkeys(row))
            sound.append(row)
    keys = tuple(seen)
    return replace(_gathered(sound, keys), damaged_lines=len(lines) - len(sound)), keys


def _is_step(value: Any) -> bool:
    return isinstance(value, float) and abs(value) <= HIGHEST_STEP


def _is_name(key: str) -> bool:
    """Whether msgspec accepts the key as a field name, and a page can show it."""
    return key.isprintable() and not {'"', "\\"}.intersection(key)


def _transposed(rows: list[Any], keys: Sequence[str]) -> Columns:
    values, logged = {}, {}
    for key, cells in zip(keys, zip(*map(msgspec.structs.astuple, rows), strict=True), strict=False):
        column = _as_array(key, cells)
        if column.dtype.kind != "S":
            present = ~np.isnan(column)
        if column.dtype.kind == "S" or (not present.all() and str in map(type, cells)):  # looking at each cell is slow
            present = np.array([not _is_missing(cell) for cell in cells])
        if present.any():
            values[key], logged[key] = column, present
    return Columns(values, logged, rows=len(rows))


def _gathered(rows: list[dict[str, Any]], keys: Sequence[str]) -> Columns:
    """The same, from rows that have some of the keys each."""
    cells: dict[str, tuple[list[int], list[Any]]] = {}
    for place, row in enumerate(rows):
        for key, cell in row.items():
            if cell is not None:
                places, found = cells.setdefault(key, ([], []))
                places.append(place)
                found.append(cell)
    values, logged = {}, {}
    for key in (key for key in keys if key in cells):
        places, found = cells[key]
        values[key], logged[key] = _spread(len(rows), [(places, _as_array(key, found), True)])
    return Columns(values, logged, rows=len(rows))


def _is_missing(cell: Any) -> bool:
    return cell is None or cell != cell  # as NaN does


def _as_array(key: str, cells: Sequence[Any]) -> Column:
    if key not in TEXT_SIGNALS:
        with suppress(ValueError):
            return np.array(cells, dtype=np.float64)  # "NaN" and "Infinity" become numbers, None becomes NaN
    try:
        return np.array(["" if _is_missing(cell) else cell for cell in cells], dtype=np.bytes_)
    except UnicodeEncodeError:
        return np.array(["" if _is_missing(cell) else str(cell).encode() for cell in cells], dtype=np.bytes_)


def _joined(parts: Sequence[Columns]) -> Columns:
    pieces: dict[str, list[tuple[slice, Column, Mask]]] = {}
    rows = 0
    for part in parts:
        place = slice(rows, rows + part.rows)
        for key, column in part.values.items():
            pieces.setdefault(key, []).append((place, column, part.logged[key]))
        rows = place.stop
    columns = {key: _spread(rows, found) for key, found in pieces.items()}
    return Columns(
        {key: column for key, (column, _) in columns.items()},
        {key: mask for key, (_, mask) in columns.items()},
        rows=rows,
        damaged_lines=sum(part.damaged_lines for part in parts),
        covered_bytes=max((part.covered_bytes for part in parts), default=0),
    )


def _spread(rows: int, pieces: Sequence[tuple[slice | list[int], Column, Mask | bool]]) -> tuple[Column, Mask]:
    """A column of so many rows with each piece in its place, and where it has a value."""
    is_text = any(piece.dtype.kind == "S" for _, piece, _ in pieces)
    found = [_as_text(piece) if is_text else piece for _, piece, _ in pieces]
    column: Column = np.zeros(rows, np.result_type(*found)) if is_text else np.full(rows, np.nan)
    logged: Mask = np.zeros(rows, np.bool_)
    for (place, _, mask), piece in zip(pieces, found, strict=True):
        column[place], logged[place] = piece, mask
    return column, logged


def _as_text(piece: Column) -> Column:
    """A piece of a text column that had been read as numbers, as text."""
    if piece.dtype.kind == "S":
        return piece
    return np.array([b"" if np.isnan(cell) else repr(float(cell)).encode() for cell in piece])


# The cache


def _load_cache(path: Path, file: BinaryIO) -> Columns | None:
    """The cache, if it was made from the first bytes of this file; otherwise None, and it is made anew."""
    try:
        with zipfile.ZipFile(path) as stored:
            about = json.loads(_member(stored, "about").tobytes())
            if about["format"] != _CACHE_FORMAT or not _same_bytes(file, about):
                return None
            rows, keys, texts = about["rows"], about["keys"], frozenset(about["texts"])
            values: dict[str, Column] = dict.fromkeys(keys, np.empty(0))  # in this order
            logged: dict[str, Mask] = {}
            for place, block in enumerate(_blocks([key for key in keys if key not in texts], rows)):
                numbers = _member(stored, f"numbers/{place}", (len(block), rows))
                values.update(zip(block, numbers, strict=True))
            for place, key in enumerate(about["texts"]):
                values[key] = _member(stored, f"texts/{place}", (rows,))
            for place, block in enumerate(_blocks(keys, rows)):
                bits = _member(stored, f"logged/{place}", (len(block), -(-rows // 8)))
                logged.update(zip(block, np.unpackbits(bits, axis=1, count=rows).view(np.bool_), strict=True))
    except Exception:  # whatever is wrong with it: the cache only saves time
        return None
    return Columns(values, logged, rows, about["damaged_lines"], about["covered_bytes"])


def _member(stored: zipfile.ZipFile, name: str, shape: tuple[int, ...] | None = None) -> Column:
    """One array, read whole, since zip checks the digest only at the end of a member. Never a pickle."""
    array: Column = np.lib.format.read_array(io.BytesIO(stored.read(f"{name}.npy")), allow_pickle=False)
    if shape is not None and array.shape != shape:
        raise ValueError(f"{name} is of shape {array.shape}")
    return array


def _blocks(keys: Sequence[str], rows: int) -> list[Sequence[str]]:
    """Keys of columns that are stored together: a member for each of thousands would take longer than their values."""
    width = max(1, _BLOCK_BYTES // (8 * max(rows, 1)))
    return [keys[first : first + width] for first in range(0, len(keys), width)]


def _save_cache(path: Path, columns: Columns, file: BinaryIO) -> None:
    about = {
        "format": _CACHE_FORMAT,
        "keys": list(columns.values),
        "texts": [key for key, column in columns.values.items() if column.dtype.kind == "S"],
        "rows": columns.rows,
        "damaged_lines": columns.damaged_lines,
        "covered_bytes": columns.covered_bytes,
        "stat": _stat(file),
        "sample": _sample(file, columns.covered_bytes),
        "crc": _crc(file, columns.covered_bytes),
    }
    # the folder may be read-only, or the disk full: the cache only saves time
    with suppress(OSError), whole_file(path, durable=False) as cache, zipfile.ZipFile(cache, "w") as stored:
        for name, array in _members(columns, about):
            with stored.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def _members(columns: Columns, about: dict[str, Any]) -> Iterator[tuple[str, Column]]:
    """What the cache holds, one array at a time."""
    texts = frozenset(about["texts"])
    numbers = [key for key in columns.values if key not in texts]
    yield "about", np.frombuffer(json.dumps(about).encode(), np.uint8)
    for place, block in enumerate(_blocks(numbers, columns.rows)):
        yield f"numbers/{place}", np.stack([columns.values[key] for key in block])
    for place, key in enumerate(about["texts"]):
        yield f"texts/{place}", columns.values[key]
    for place, block in enumerate(_blocks(about["keys"], columns.rows)):
        yield f"logged/{place}", np.packbits(np.stack([columns.logged[key] for key in block]), axis=1)


def _same_bytes(file: BinaryIO, about: dict[str, Any]) -> bool:
    covered = about["covered_bytes"]
    if os.fstat(file.fileno()).st_size < covered or _sample(file, covered) != about["sample"]:
        return False
    return bool(_stat(file) == about["stat"] or _crc(file, covered) == about["crc"])


def _stat(file: BinaryIO) -> list[int]:
    now = os.fstat(file.fileno())
    return [now.st_size, now.st_mtime_ns, now.st_ino]


def _sample(file: BinaryIO, covered: int) -> int:
    """A digest of the first and last bytes that the cache covers."""
    file.seek(0)
    head = file.read(min(_SAMPLE_BYTES, covered))
    file.seek(max(0, covered - _SAMPLE_BYTES))
    return zlib.crc32(file.read(min(_SAMPLE_BYTES, covered)), zlib.crc32(head))


def _crc(file: BinaryIO, covered: int) -> int:
    file.seek(0)
    crc = 0
    while covered and (chunk := file.read(min(1 << 20, covered))):
        crc = zlib.crc32(chunk, crc)
        covered -= len(chunk)
    return crc
