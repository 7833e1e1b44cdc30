"""Reads ``metrics.jsonl`` into numpy columns, through a cache that is never trusted over the file.

The cache is an uncompressed ``.npz`` beside the file, with many columns in one member. Its zip directory reveals a torn
cache, the digests of its members a damaged one. The cache names the bytes of the file that it was made from. If the
file has changed, those bytes are checked in full before the cache is used, and only the appended rest is parsed.
"""

import json
import math
import os
import struct
import sys
import threading
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from sealegs.record.files import whole_file
from sealegs.record.reading import most_bytes, open_file, parse_json
from sealegs.record.rows import HIGHEST_STEP, is_numeric, is_sound_name, sound_name
from sealegs.record.schema import COLUMN_CACHE, SIGNALS, TEXT_SIGNALS
from sealegs.record.second_process import called_beside, may_call_beside
from sealegs.record.typed import fits

Column: TypeAlias = NDArray[Any]
Mask: TypeAlias = NDArray[np.bool_]

CACHE_FROM_BYTES = 1 << 20
"""Smallest file that gets a cache: a smaller one is parsed fast enough."""

Step: TypeAlias = Annotated[float, msgspec.Meta(ge=-HIGHEST_STEP, le=HIGHEST_STEP)]

WIDE = 256
"""Signals from which on most rows lack most of them: then only what is there is looked at."""

_FIRST_BYTES = 16 << 10  # whose rows are decoded one by one, since their signals are not known yet
_CHUNK_BYTES = 256 << 10  # the decoded rows of one chunk fit into a core's cache: a tenth faster than 4 MiB
_WIDE_CHUNK_BYTES = 16 << 20  # what a chunk costs grows with its signals, of which there are many here
_LARGE_BYTES = 64 << 20
"""Bytes to parse from which on a second process is worth its start, and nobody waits for the cache."""
_LONGEST_LINE = 64 << 20
"""Bytes without a line end after which a file is no metrics file."""
_MOST_NAMES = 20_000
"""The most columns: ten times what a run that names each layer of a large model logs."""
_CELL_BYTES = 9  # a float and whether it is there
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
    left_out: int = 0
    """Values of rows that are neither numbers nor text, or more than may be held."""


def read_columns(path: Path) -> Columns:
    """The columns of a metrics file, from the cache beside it if that is sound."""
    cache = path.with_name(COLUMN_CACHE)
    with open_file(path, path.parent) as file:
        cached = _load_cache(cache, file)
        columns = _parse_from(path, file, cached.covered_bytes if cached else 0)
        appended = columns.covered_bytes - (cached.covered_bytes if cached else 0)
        if cached:
            columns = _joined([cached, columns]) if appended else cached
        if appended > CACHE_FROM_BYTES:
            (_save_meanwhile if appended > _LARGE_BYTES else _save_cache)(cache, columns, file)
    return columns


def _parse_from(path: Path, file: BinaryIO, start: int) -> Columns:
    """Parse whole lines from a byte on, of a large file half of them in another process.

    A last line without its newline is still being written, and is left.
    """
    parts, keys, covered = _parse_range(file, start, start + 1, ("step",))
    size = os.fstat(file.fileno()).st_size
    if size - covered >= _LARGE_BYTES and 1 < len(keys) <= WIDE and may_call_beside():
        middle = _chunk_end(file, covered, (covered + size) // 2)
        with called_beside(_parse_range_of, path, _identity(file), middle, size, keys) as second_half:
            more, keys, covered = _parse_range(file, covered, middle, keys)
            parts += more
            if len(keys) <= WIDE and (found := second_half()) and len(found[1]) <= WIDE:
                keys = tuple(dict.fromkeys((*keys, *found[1])))
                parts += [_in_order(part, keys) for part in found[0]]
                covered = found[2]
    parts += (rest := _parse_range(file, covered, sys.maxsize, keys))[0]
    return replace(_joined(parts), covered_bytes=rest[2])


Parsed: TypeAlias = tuple[list[Columns], tuple[str, ...], int]
"""Chunks, all signals so far, and where the last chunk ends."""


def _parse_range(file: BinaryIO, start: int, stop: int, keys: tuple[str, ...]) -> Parsed:
    """Parse chunks of whole lines from a byte on, until one reaches ``stop``."""
    file.seek(start)
    parts: list[Columns] = []
    covered = start
    while covered < stop and (chunk := file.read(_chunk_bytes(len(keys)))):
        chunk += file.readline(_LONGEST_LINE)
        if len(chunk) >= _LONGEST_LINE and not chunk.endswith(b"\n"):
            raise ValueError(f"{_LONGEST_LINE >> 20} MiB of it have no line end")
        if not chunk.endswith(b"\n"):
            chunk = chunk[: chunk.rfind(b"\n") + 1]
        if not chunk:
            break
        part, keys = _decode(chunk, keys)
        covered += len(chunk)
        parts.append(part)
    return parts, keys, covered


def _parse_range_of(path: Path, identity: list[int], start: int, stop: int, keys: tuple[str, ...]) -> Parsed:
    """The same in another process, of the very file that the first process has open."""
    with open_file(path, path.parent) as file:
        if _identity(file) != identity:
            raise OSError("another file has its name")
        parts, keys, covered = _parse_range(file, start, stop, keys)
    rows = sum(part.rows for part in parts)
    if _CELL_BYTES * rows * len(keys) <= most_bytes():  # else what can be held is chosen from all
        parts = [_joined(parts)]  # which takes less time to hand over
    return parts, keys, covered


def _chunk_end(file: BinaryIO, start: int, place: int) -> int:
    """Where the first chunk ends that reaches a place: what is read must not depend on who reads it."""
    while start < place:
        file.seek(start + _CHUNK_BYTES)
        start += _CHUNK_BYTES + len(file.readline(_LONGEST_LINE))
    return start


def _in_order(part: Columns, keys: Iterable[str]) -> Columns:
    return replace(part, values={key: part.values[key] for key in keys if key in part.values})


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
        with suppress(*_UNREADABLE):  # a new signal, a torn line, or a value that is no number
            return _transposed(_decoder(keys).decode_lines(chunk), keys), keys
    sound = []
    lines = [line for line in chunk.split(b"\n") if line.strip()]
    seen = dict.fromkeys(keys)
    left_out = 0
    for line in lines:
        if (read := _read_row(line)) is None:
            continue
        row, lost = read
        for key in row.keys() - seen.keys() if len(seen) + len(row) > _MOST_NAMES else ():
            if len(seen) == _MOST_NAMES:
                del row[key]
                lost += 1
            else:
                seen[key] = None
        seen.update(dict.fromkeys(row))
        sound.append(row)
        left_out += lost
    keys = tuple(seen)
    return replace(_gathered(sound, keys), damaged_lines=len(lines) - len(sound), left_out=left_out), keys


_UNREADABLE = msgspec.DecodeError, UnicodeDecodeError, RecursionError
_ROW = msgspec.json.Decoder(dict[str, float | str | None])
_PARTS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_CELL = msgspec.json.Decoder(float | str | None)


def _read_row(line: bytes) -> tuple[dict[str, Any], int] | None:
    """The row of a line and how many of its values were left out, if it is a row: of a value that cannot be read, the
    value is lost, and not the row. A name that no column may have is spelt otherwise."""
    lost = 0
    row: dict[str, Any]
    try:
        row = _ROW.decode(line)
    except _UNREADABLE:
        row = {}
        try:
            parts = _PARTS.decode(line)
        except _UNREADABLE:
            return None
        for name, part in parts.items():
            try:
                row[name] = _CELL.decode(part)
            except _UNREADABLE:
                lost += 1
    step = row.get("step")
    if not isinstance(step, float) or not abs(step) <= HIGHEST_STEP:
        return None
    for name in [name for name in row if not is_sound_name(name)]:
        row[sound_name(name)] = row.pop(name)
    for name in [name for name, cell in row.items() if isinstance(cell, str) and is_numeric(name)]:
        try:
            float(str(row[name]))
        except ValueError:
            del row[name]
            lost += 1
    return row, lost


def _transposed(rows: list[Any], keys: Sequence[str]) -> Columns:
    """The columns of rows that have all of the keys; a ``DecodeError`` where text is in the place of a number."""
    texts: dict[str, tuple[Any, ...]] = {}
    values, logged = {}, {}
    for key, cells in zip(keys, zip(*map(msgspec.structs.astuple, rows), strict=True), strict=False):
        if key not in TEXT_SIGNALS and (column := _packed(cells)) is not None:
            present = ~np.isnan(column)
        elif (column := _as_numbers(key, cells)) is not None:
            present = _present(cells)
        else:
            texts[key] = cells
            values[key] = np.empty(0)  # in this order
            continue
        if present.any():
            values[key], logged[key] = column, present
    for key, column in _as_texts(texts, len(rows)).items():
        logged[key] = _present(texts[key])
        if logged[key].any():
            values[key] = column
        else:
            del values[key], logged[key]
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
    columns: dict[str, Column] = {}
    for key in (key for key in keys if key in cells):
        numbers = _as_numbers(key, cells[key][1])
        columns[key] = np.empty(0) if numbers is None else numbers  # in this order
    columns |= _as_texts({key: cells[key][1] for key, column in columns.items() if not len(column)}, len(rows))
    spread = {key: _spread(len(rows), [(cells[key][0], column, True)]) for key, column in columns.items()}
    return Columns({key: c for key, (c, _) in spread.items()}, {key: m for key, (_, m) in spread.items()}, len(rows))


def _present(cells: Sequence[Any]) -> Mask:
    if _are_texts(cells):
        return np.ones(len(cells), np.bool_)
    return np.array([not _is_missing(cell) for cell in cells])


def _are_texts(cells: Sequence[Any]) -> bool:
    """Whether none is missing: a question for all together, since one for each takes many times as long."""
    try:
        "".join(cells)
    except TypeError:
        return False
    return True


def _is_missing(cell: Any) -> bool:
    return cell is None or cell != cell  # as NaN does


def _packed(cells: Sequence[Any]) -> Column | None:
    """A column of floats; None if there is anything else. Numpy alone takes four times as long."""
    try:
        return np.frombuffer(struct.pack(f"{len(cells)}d", *cells))
    except struct.error:
        return None


def _as_numbers(key: str, cells: Sequence[Any]) -> Column | None:
    """A column of numbers; None if it is one of text."""
    if key in TEXT_SIGNALS:
        return None
    try:
        return np.array(cells, dtype=np.float64)  # "NaN" and "Infinity" become numbers, None becomes NaN
    except ValueError:
        if is_numeric(key):
            raise msgspec.DecodeError(f"{key} is no number") from None
        return None


def _as_texts(columns: Mapping[str, Sequence[Any]], rows: int) -> dict[str, Column]:
    """Columns of text, every cell as long as the longest: cut, where that would be more than may be held."""
    texts = {key: _texts(cells) for key, cells in columns.items()}
    widths = {key: max(map(len, cells), default=0) for key, cells in texts.items()}
    cut = _widest(widths.values(), rows)
    found: dict[str, Column] = {}
    for key, cells in texts.items():
        short = cells if widths[key] <= cut else [cell[:cut] for cell in cells]
        if (column := _as_digests(short)) is not None:
            found[key] = column
            continue
        try:
            found[key] = np.array(short, dtype=np.bytes_)
        except UnicodeEncodeError:
            found[key] = np.array([cell.encode() for cell in short], dtype=np.bytes_)
    return found


def _as_digests(cells: Sequence[str]) -> Column | None:
    """A column of plain text that is as long in every cell, as digests are; None if it is not. Numpy alone takes many
    times as long."""
    width, together = max(map(len, cells), default=0), "".join(cells)
    if not width or len(together) < width * len(cells) or not together.isascii() or "\0" in together:
        return None
    return np.frombuffer(together.encode(), f"S{width}")


def _texts(cells: Sequence[Any]) -> Sequence[str]:
    if _are_texts(cells):
        return cells
    texts = ["" if _is_missing(cell) else cell for cell in cells]
    return texts if _are_texts(texts) else list(map(str, texts))


def _widest(widths: Iterable[int], rows: int) -> int:
    """The most that a cell of text may have, so that all columns of these widths can be held."""
    left = most_bytes() // max(rows, 1)
    narrow_first = sorted(widths)
    for place, width in enumerate(narrow_first):
        share = left // (len(narrow_first) - place)
        if width > share:
            return share
        left -= width
    return max(narrow_first, default=0)


def _joined(parts: Sequence[Columns]) -> Columns:
    pieces: dict[str, list[tuple[slice, Column, Mask]]] = {}
    rows = 0
    for part in parts:
        place = slice(rows, rows + part.rows)
        for key, column in part.values.items():
            pieces.setdefault(key, []).append((place, column, part.logged[key]))
        rows = place.stop
    kept = _fullest(pieces, rows)
    cut = _widest((max(piece.dtype.itemsize for _, piece, _ in pieces[key]) for key in kept), rows)
    columns = {key: _spread(rows, _narrowed(pieces[key], cut)) for key in kept}
    lost = sum(int(mask.sum()) for key in pieces.keys() - set(kept) for _, _, mask in pieces[key])
    return Columns(
        {key: column for key, (column, _) in columns.items()},
        {key: mask for key, (_, mask) in columns.items()},
        rows=rows,
        damaged_lines=sum(part.damaged_lines for part in parts),
        covered_bytes=max((part.covered_bytes for part in parts), default=0),
        left_out=lost + sum(part.left_out for part in parts),
    )


def _fullest(pieces: Mapping[str, list[tuple[slice, Column, Mask]]], rows: int) -> list[str]:
    """The columns that can be held, in their order: all of them, or our own signals and those with the most values."""
    most = max(1, most_bytes() // (_CELL_BYTES * max(rows, 1)))
    if len(pieces) <= most:
        return list(pieces)
    counts = {key: sum(int(mask.sum()) for _, _, mask in found) for key, found in pieces.items()}
    best = sorted(pieces, key=lambda key: (key != "step", key not in SIGNALS, -counts[key]))[:most]
    return [key for key in pieces if key in set(best)]


def _narrowed(pieces: list[tuple[slice, Column, Mask]], width: int) -> list[tuple[slice, Column, Mask]]:
    """The pieces of a column, their text cut to so many bytes."""
    if all(piece.dtype.kind != "S" or piece.dtype.itemsize <= width for _, piece, _ in pieces):
        return pieces
    kind = f"S{max(1, width)}"
    return [(place, piece.astype(kind) if piece.dtype.kind == "S" else piece, mask) for place, piece, mask in pieces]


def _spread(rows: int, pieces: Sequence[tuple[slice | list[int], Column, Mask | bool]]) -> tuple[Column, Mask]:
    """A column of so many rows with each piece in its place, and where it has a value."""
    is_text = any(piece.dtype.kind == "S" for _, piece, _ in pieces)
    found = [_as_text(piece) if is_text else piece for _, piece, _ in pieces]
    if is_text:
        column: Column = np.zeros(rows, np.result_type(*found))
    else:
        column = np.empty(rows) if sum(map(len, found)) == rows else np.full(rows, np.nan)
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
        with open_file(path, path.parent) as cache, zipfile.ZipFile(cache) as stored:
            _refuse_packed(stored, cache)
            about = parse_json(_member(stored, "about").tobytes())
            if about["format"] != _CACHE_FORMAT or not _is_sound(about) or not _same_bytes(file, about):
                return None
            rows, keys, texts = about["rows"], about["keys"], frozenset(about["texts"])
            values: dict[str, Column] = dict.fromkeys(keys, np.empty(0))  # in this order
            logged: dict[str, Mask] = {}
            for place, block in enumerate(_blocks([key for key in keys if key not in texts], rows)):
                numbers = _member(stored, f"numbers/{place}", (len(block), rows), "f8")
                values.update(zip(block, numbers, strict=True))
            for place, key in enumerate(about["texts"]):
                values[key] = _member(stored, f"texts/{place}", (rows,), "S")
            for place, block in enumerate(_blocks(keys, rows)):
                bits = _member(stored, f"logged/{place}", (len(block), -(-rows // 8)), "u1")
                logged.update(zip(block, np.unpackbits(bits, axis=1, count=rows).view(np.bool_), strict=True))
        if not logged["step"].all() or not (np.abs(values["step"]) <= HIGHEST_STEP).all():
            return None
    except Exception:  # whatever is wrong with it: the cache only saves time
        return None
    return Columns(values, logged, rows, about["damaged_lines"], about["covered_bytes"], about["left_out"])


def _refuse_packed(stored: zipfile.ZipFile, cache: BinaryIO) -> None:
    """Refuse a cache that unpacks to more than it is: ours is not compressed, and no larger than what it is made of."""
    members = stored.infolist()
    size = os.fstat(cache.fileno()).st_size
    if any(member.compress_type != zipfile.ZIP_STORED or member.file_size > size for member in members):
        raise ValueError("it is compressed")
    if size > 2 * most_bytes():
        raise ValueError("it is larger than what may be held")


def _is_sound(about: dict[str, Any]) -> bool:
    """Whether counts are counts and names are names; the rest is compared with the arrays and with the file."""
    counts = [about[name] for name in ("rows", "damaged_lines", "covered_bytes", "left_out")]
    names, texts = about["keys"], about["texts"]
    return (
        all(fits(count, int) and count >= 0 for count in counts)
        and all(isinstance(name, str) and is_sound_name(name) for name in names)
        and len(set(names)) == len(names)
        and len(set(texts)) == len(texts)
        and set(texts) <= set(names) - {"step"}
        and not any(map(is_numeric, texts))
    )


def _member(stored: zipfile.ZipFile, name: str, shape: tuple[int, ...] | None = None, kind: str = "u1") -> Column:
    """One array, and the digest of its member, which zip checks at the end of what it reads. Never a pickle."""
    with stored.open(f"{name}.npy") as member:  # in small parts: all bytes at once would be as much memory again
        array: Column = np.lib.format.read_array(member, allow_pickle=False)
        if member.read(1):
            raise ValueError(f"{name} goes on after its array")
    if (shape is not None and array.shape != shape) or not array.dtype.str[1:].startswith(kind):
        raise ValueError(f"{name} is of shape {array.shape} and type {array.dtype}")
    return array


def _blocks(keys: Sequence[str], rows: int) -> list[Sequence[str]]:
    """Keys of columns that are stored together: a member for each of thousands would take longer than their values."""
    width = max(1, _BLOCK_BYTES // (8 * max(rows, 1)))
    return [keys[first : first + width] for first in range(0, len(keys), width)]


_saving = threading.Lock()


def _save_meanwhile(path: Path, columns: Columns, file: BinaryIO) -> None:
    """Save the cache while the columns are used; as the process ends, it waits for that."""
    same_file = os.fdopen(os.dup(file.fileno()), "rb")  # by its name it might be another by now

    def save() -> None:
        with same_file, suppress(MemoryError):
            _save_cache(path, columns, same_file)

    try:
        threading.Thread(target=save, name="column cache").start()
    except RuntimeError:  # no thread is to be had
        save()


def _save_cache(path: Path, columns: Columns, file: BinaryIO) -> None:
    about = {
        "format": _CACHE_FORMAT,
        "keys": list(columns.values),
        "texts": [key for key, column in columns.values.items() if column.dtype.kind == "S"],
        "rows": columns.rows,
        "damaged_lines": columns.damaged_lines,
        "covered_bytes": columns.covered_bytes,
        "left_out": columns.left_out,
        "stat": _stat(file),
        "sample": _sample(file, columns.covered_bytes),
        "crc": _crc(file, columns.covered_bytes),
    }
    # the folder may be read-only, or the disk full: the cache only saves time
    with suppress(OSError), _saving, whole_file(path, durable=False) as cache, zipfile.ZipFile(cache, "w") as stored:
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


def _identity(file: BinaryIO) -> list[int]:
    now = os.fstat(file.fileno())
    return [now.st_dev, now.st_ino]


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
