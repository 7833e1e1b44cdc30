"""Reads torch's table of contents of a checkpoint, a pickle, and believes nothing in it that the files do not bear out.

Only what such tables are made of is unpickled. Names lead to files of the checkpoint's own folder, places lie within
them, and tensors are no larger than what is stored.
"""

import io
import math
import pickle
import zipfile
from pathlib import Path
from pickletools import genops
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from sealegs.errors import SourceError
from sealegs.record.reading import confined, open_file, read_bytes, refuse_special

TABLE = ".metadata"


def read_table(folder: Path) -> tuple[Metadata, dict[str, TensorStorageMetadata]]:
    """The table of a checkpoint, checked against its files, with the tensors alone; and these, by name."""
    try:
        table = TableUnpickler(io.BytesIO(read_bytes(folder / TABLE, folder))).load()
        _refuse_unsound(table, folder)
    except SourceError:
        raise
    except Exception as error:  # a stranger's pickle may raise anything
        is_told = isinstance(error, ValueError | OSError | pickle.UnpicklingError)
        reason = str(error) if is_told else f"{type(error).__name__}: {error}"
        raise SourceError(f"{folder}: not a checkpoint that Sealegs wrote ({reason:.200}); use another one") from error
    tensors = {
        name: entry for name, entry in table.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)
    }
    return Metadata({**tensors}, table.planner_data, table.storage_data, None), tensors


class TableUnpickler(pickle._Unpickler):
    """Refuses any class that a table does not need, and changes no class.

    It is Python's own implementation: that in C sets aside as much memory as a few bytes of a pickle ask for.
    """

    _PARTS = frozenset({
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        *(("torch.distributed.checkpoint.metadata", name) for name in (*metadata.__all__, "_MEM_FORMAT_ENCODING")),
        *((module, "PosixPath") for module in ("pathlib", "pathlib._local")),
    })  # fmt: skip

    stack: list[Any]

    def find_class(self, module: str, name: str) -> Any:
        """The class or function of that name, if a table needs it."""
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) in self._PARTS or is_dtype:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def _build(self) -> None:
        if isinstance(self.stack[-2], type):
            raise pickle.UnpicklingError("it would change a class")
        super().load_build()  # type: ignore[misc] # the stubs leave it out

    dispatch = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: _build}  # type: ignore[dict-item] # noqa: RUF012


def _refuse_unsound(table: Any, folder: Path) -> None:
    _demand(isinstance(table, Metadata), "its table is none")
    _demand(isinstance(table.state_dict_metadata, dict), "its table has no tensors")
    _demand(isinstance(table.storage_data, dict), "its table has no places")
    sizes: dict[str, int] = {}
    for index, place in table.storage_data.items():
        _demand(isinstance(index, MetadataIndex) and isinstance(place, _StorageInfo), "a place in it is none")
        name, offset, length = place.relative_path, place.offset, place.length
        _demand(isinstance(name, str) and bool(name) and not place.transform_descriptors, f"{name!a:.80} is no file")
        if name not in sizes:
            file = confined(folder / name, folder)
            refuse_special(folder / name, file.stat().st_mode)
            sizes[name] = file.stat().st_size
        is_within = _is_whole(offset) and _is_whole(length) and offset + length <= sizes[name]
        _demand(is_within, f"{index.fqn!a:.80} does not lie within {name}")
    stored = 0
    for name, entry in table.state_dict_metadata.items():
        _demand(isinstance(name, str), "a name in it is no text")
        if isinstance(entry, TensorStorageMetadata):
            _refuse_unsound_tensor(name, entry, table.storage_data)
            stored += math.prod(entry.size) * entry.properties.dtype.itemsize
    _demand(stored <= sum(sizes.values()), "its tensors are larger than its files")


def _refuse_unsound_tensor(name: str, entry: TensorStorageMetadata, places: dict[MetadataIndex, Any]) -> None:
    properties, size = entry.properties, entry.size
    is_one = isinstance(properties, TensorProperties) and isinstance(properties.dtype, torch.dtype)
    _demand(is_one and properties.layout == torch.strided, f"{name!a:.80} is no dense tensor")
    _demand(_is_size(size) and isinstance(entry.chunks, list), f"{name!a:.80} has no size")
    for chunk in entry.chunks:
        is_chunk = isinstance(chunk, ChunkStorageMetadata) and _is_size(chunk.sizes) and _is_size(chunk.offsets)
        _demand(
            is_chunk and len(chunk.sizes) == len(chunk.offsets) == len(size), f"{name!a:.80} has a part that is none"
        )
        ends = (offset + length for offset, length in zip(chunk.offsets, chunk.sizes, strict=True))
        _demand(all(end <= whole for end, whole in zip(ends, size, strict=True)), f"{name!a:.80} has a part outside it")
        _demand(MetadataIndex(name, chunk.offsets) in places, f"{name!a:.80} has a part that is nowhere")


def refuse_packed(folder: Path, table: Metadata) -> None:
    """Refuse tensors that are compressed or no archives: torch saves each as an archive of what it holds, no larger."""
    open_files: dict[str, BinaryIO] = {}
    try:
        for index, place in table.storage_data.items():
            if place.relative_path not in open_files:
                open_files[place.relative_path] = open_file(folder / place.relative_path, folder)
            file = open_files[place.relative_path]
            if fault := fault_in_archive(_PartOfFile(file, place.offset, place.length)):
                raise SourceError(f"{folder / place.relative_path}: {index.fqn!a:.80} {fault}; use another checkpoint")
    finally:
        for file in open_files.values():
            file.close()


class _PartOfFile(io.RawIOBase):
    """Some bytes of a file, as a file."""

    def __init__(self, file: BinaryIO, begin: int, length: int) -> None:
        self._file = file
        self._begin = begin
        self._length = length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(0, origin + offset)
        return self._at

    def readinto(self, room: Any) -> int:
        self._file.seek(self._begin + self._at)
        found = self._file.read(max(0, min(len(room), self._length - self._at)))
        room[: len(found)] = found
        self._at += len(found)
        return len(found)


def fault_in_archive(file: Any) -> str | None:
    """What is wrong with an archive of torch.save, if anything."""
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            if any(member.compress_type != zipfile.ZIP_STORED for member in members):
                return "is compressed, which torch never does"
            pickles = (member for member in members if member.filename.endswith(".pkl"))
            return next(filter(None, (fault_in_pickles(archive.open(member)) for member in pickles)), None)
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError, EOFError, RuntimeError):
        return "is no archive as torch saves it"


_PICKLES = 5
"""What a file of torch.save that is no archive begins with; tensors follow."""
_LONGEST_NAME = 1000


def fault_in_pickles(file: Any) -> str | None:
    """What is wrong with the names in pickles, if anything: torch would take hours to report one of a few megabytes."""
    try:
        for _ in range(_PICKLES):
            if any(each.name == "GLOBAL" and len(str(name)) > _LONGEST_NAME for each, name, _ in genops(file)):
                return "names something in more letters than any name has"
    except UnicodeDecodeError:
        return "names something in letters that no name has"
    except MemoryError:
        return "says that a value in it is larger than any memory"
    except ValueError:  # there is no other pickle, or it breaks off: torch will say so
        pass
    return None


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62


def _is_size(value: Any) -> bool:
    return isinstance(value, torch.Size) and all(_is_whole(length) for length in value)


def _demand(sound: bool, fault: str) -> None:
    if not sound:
        raise ValueError(fault)
