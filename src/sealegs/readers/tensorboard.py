"""Reads TensorBoard event files, streamed through TensorBoard's own reader."""

import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from sealegs.errors import MissingExtra, SourceError
from sealegs.readers.place import Place, torn
from sealegs.readers.table import SeriesCollector, Table
from sealegs.record.reading import is_inside, open_file

FORMAT = "tensorboard"
_BEGINS = b"\x09"
"""The first byte of an event: its first field is the time, a double."""
_LONGEST_RECORD = 1 << 31
_RECORD_FRAME_BYTES = 16  # length and checksums around each event
_SPLITS = frozenset(("train", "training", "validation", "val", "eval", "test"))
"""Folders of event files that together are one run, as Keras writes them."""


def recognises(place: Place) -> bool:
    """Whether it is an event file, or a folder that has some, itself or by split."""
    if place.is_folder:
        return next(_files(place.path), None) is not None
    return is_event_file(place.head[: _RECORD_FRAME_BYTES + 1])


def is_event_file(head: bytes) -> bool:
    """Whether a file that begins so is one, whatever its name: a record's length, the checksum of it, and an event.

    >>> is_event_file(bytes.fromhex("1800000000000000a37f4b220969388357")), is_event_file(b"step,loss\\n0,3.2\\n1,3.1")
    (True, False)
    """
    if len(head) < 13 or int.from_bytes(head[:8], "little") > _LONGEST_RECORD or head[12:13] != _BEGINS:
        return False
    return _masked_crc(head[:8]) == int.from_bytes(head[8:12], "little")


def _masked_crc(content: bytes) -> int:
    """The checksum that stands after a length: CRC-32C, turned and shifted."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def read(place: Place) -> Table:
    """Read every scalar of every file, in the order of the file names, which have the time in them."""
    if place.is_gzip:
        raise SourceError(f"{place.source}: a compressed event file; unzip it first: gunzip {place.path.name}")
    series = SeriesCollector()
    remarks: list[str] = []
    files = list(_files(place.path)) if place.is_folder else [place.path]
    for file in files:
        if file.parent == place.path:  # another file of one writer, or of another launch: a split's files are neither
            series.begin(file.name)
        prefix = "" if file.parent == place.path or not place.is_folder else f"{file.parent.name}/"
        read_bytes = 0
        for size, scalars in _events(file):
            read_bytes += size + _RECORD_FRAME_BYTES
            for name, step, value in scalars:
                series.add(prefix + name, step, value)
        if read_bytes != file.stat().st_size:
            remarks.append(torn(file, read_bytes))
    if not len(series):
        found = "; ".join([*remarks, "no scalar is in its event files"])
        raise SourceError(f"{place.source}: {found}; log some with add_scalar, or give another run")
    if len(files) > 1:
        remarks.append(f"{len(files)} event files read as one run")
    return Table(FORMAT, series.columns(), tuple(remarks), files=series.files)


def _files(folder: Path) -> Iterator[Path]:
    inner = (path for path in sorted(folder.iterdir()) if path.is_dir() and path.name.lower() in _SPLITS)
    for place in (folder, *inner):
        for path in sorted(place.iterdir()):
            if path.is_file() and is_inside(path, folder) and is_event_file(_first_bytes(path, folder)):
                yield path


def _first_bytes(path: Path, folder: Path) -> bytes:
    """The first bytes of a file in a folder; none of one that cannot be read. A folder may hold thousands of files."""
    with suppress(OSError, SourceError), open_file(path, folder) as opened:
        return opened.read(_RECORD_FRAME_BYTES)
    return b""


def _whole_records(file: Path) -> int:
    """How many records are whole, by the length that each begins with: TensorBoard would set aside what it says."""
    count = at = 0
    with open_file(file) as opened:
        size = os.fstat(opened.fileno()).st_size
        while at + _RECORD_FRAME_BYTES <= size:
            opened.seek(at)
            at += int.from_bytes(opened.read(8), "little") + _RECORD_FRAME_BYTES
            count += at <= size
    return count


def _events(file: Path) -> Iterator[tuple[int, list[tuple[str, int, float]]]]:
    """The size and the scalars of each event."""
    try:
        from google.protobuf.message import DecodeError
        from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError as error:
        raise MissingExtra(f"reading {file.name}", "tensorboard", "tensorboard") from error
    for record in islice(RawEventFileLoader(str(file)).Load(), _whole_records(file)):
        try:
            event = Event.FromString(record)
        except DecodeError:
            return
        scalars = []
        for value in event.summary.value:
            if value.HasField("simple_value"):
                scalars.append((value.tag, event.step, value.simple_value))
            elif value.HasField("tensor") and value.metadata.plugin_data.plugin_name in ("scalars", ""):
                if any(dim.size != 1 for dim in value.tensor.tensor_shape.dim):
                    continue
                with suppress(TypeError, ValueError):  # an unknown type, or too few bytes
                    tensor = make_ndarray(value.tensor)
                    if tensor.dtype.kind in "fiub":
                        scalars.append((value.tag, event.step, float(tensor.item())))
        yield len(record), scalars
