"""Reads the file of a W&B offline run, through W&B's own reader."""

import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from sealegs.errors import MissingExtra, SourceError
from sealegs.readers.place import Place, torn
from sealegs.readers.table import Gathered, Table
from sealegs.record.reading import is_inside, parse_json

FORMAT = "wandb"
_MARK = b":W&B"


def recognises(place: Place) -> bool:
    """Whether it is a ``.wandb`` file, or the folder of a run that has one."""
    return _file(place) is not None if place.is_folder else place.head.startswith(_MARK)


def read(place: Place) -> Table:
    """Read one row for each call of ``log``, and the config."""
    if place.is_gzip:
        raise SourceError(f"{place.source}: a compressed W&B run; unzip it first: gunzip {place.path.name}")
    file = _file(place) or place.path
    gathered = Gathered()
    remarks: list[str] = []
    config: dict[str, Any] = {}
    for record in _records(file, remarks):
        if record.HasField("history"):
            items = _items(record.history.item)  # W&B's own step last: a step that the user logs comes first
            gathered.add({name: items[name] for name in sorted(items, key=lambda name: name.startswith("_"))})
        elif record.HasField("run"):
            config.update(_items(record.run.config.update))
        elif record.HasField("config"):
            config.update(_items(record.config.update))
    if not gathered.names:
        raise SourceError(
            f"{place.source}: {'; '.join([*remarks, 'no number is logged in this W&B run'])}; give another"
        )
    config.pop("_wandb", None)
    return Table(FORMAT, gathered.columns(), tuple(remarks), config)


def _file(place: Place) -> Path | None:
    if not place.is_folder:
        return None
    inside = [path for path in sorted(place.path.glob("*.wandb")) if is_inside(path, place.path) and path.is_file()]
    files = [path for path in inside if Place(str(path), path, inside=place.path).head.startswith(_MARK)]
    return files[0] if len(files) == 1 else None


def _records(file: Path, remarks: list[str]) -> Iterator[Any]:
    try:
        from google.protobuf.message import DecodeError
        from wandb.proto.wandb_internal_pb2 import Record
        from wandb.sdk.internal.datastore import DataStore
    except ImportError as error:
        raise MissingExtra(f"reading {file.name}", "wandb", "wandb") from error
    store = DataStore()
    try:
        store.open_for_scan(str(file))
    except OSError as error:  # W&B opens the file for writing
        raise SourceError(f"{file}: {error.strerror}; copy it to where you may write, W&B's reader insists") from error
    except Exception as error:  # W&B's reader has no error type of its own
        store.close()
        raise SourceError(f"{file}: a W&B file whose head is damaged ({error}); restore it from a copy") from error
    begins = store.get_offset()
    try:
        while (data := store.scan_data()) is not None:
            yield Record.FromString(data)
            begins = store.get_offset()
        is_whole = store.get_offset() == begins  # W&B is silent where a long record has no end
    except (AssertionError, DecodeError, IndexError, struct.error):  # W&B raises these for a record that is not whole
        is_whole = False
    finally:
        store.close()
    if not is_whole:
        remarks.append(torn(file, begins))


def _items(items: Iterable[Any]) -> dict[str, Any]:
    """Keys and values. W&B writes NaN as Python does."""
    found = {}
    for item in items:
        try:
            value = parse_json(item.value_json)
        except ValueError:
            continue
        found[item.key or "/".join(item.nested_key)] = value
    return found
