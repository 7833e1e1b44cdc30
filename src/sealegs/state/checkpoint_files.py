"""Writes and reads the files of one checkpoint, tensors and JSON, with digests; nothing from a stranger is
unpickled."""

import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from sealegs.errors import SourceError
from sealegs.record.checkpoint_tags import DIGESTS
from sealegs.record.files import whole_file
from sealegs.record.reading import open_file, read_json, read_object
from sealegs.state.checkpoint_table import TABLE, read_table, refuse_packed

_PLAIN = "plain.json"
_LONGEST_NAME = 100


def write_plain(folder: Path, rank: int, plain: bytes, own: bytes) -> None:
    """Write the JSON of a rank; rank 0 also writes the JSON that all ranks share."""
    (folder / _own(rank)).parent.mkdir(exist_ok=True)
    with whole_file(folder / _own(rank)) as file:
        file.write(own)
    if rank == 0:
        with whole_file(folder / _PLAIN) as file:
            file.write(plain)


def read_plain(folder: Path, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The JSON that all ranks share, and that of one rank; empty where there was no such rank."""
    try:
        plain = _object(folder / _PLAIN, folder)
    except FileNotFoundError:
        raise SourceError(f"{folder / _PLAIN}: missing; use another checkpoint") from None
    try:
        return plain, _object(folder / _own(rank), folder)
    except FileNotFoundError:
        return plain, {}


def _object(path: Path, folder: Path) -> dict[str, Any]:
    values = read_json(path, folder, exact_integers=True)  # a generator's state has integers of 128 bits
    if not isinstance(values, dict):
        raise SourceError(f"{path}: no JSON object; use another checkpoint")
    return values


def expect_to_be_alone() -> None:
    """Silence torch's warning that one process writes or reads alone, which is meant here.

    It stays silenced: filters belong to the whole process, and a thread that resets them undoes what others have set.
    """
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], group: Any) -> None:
    """Write this rank's part of the tensors, and wait for the other ranks. Rank 0 writes what all ranks hold."""
    # with copy-ahead, torch would copy from a device on the training's stream
    writer = FileSystemWriter(folder, per_thread_copy_ahead=0)
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    with _speaking_plainly():
        save(dict(tensors), storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)


def read_tensors(folder: Path, rooms: Mapping[str, Tensor], group: Any) -> None:
    """Fill the tensors of this rank, whole or its shards, however they were sharded when they were written."""
    reader = _Reader(folder, read_table(folder)[0])
    try:
        with _speaking_plainly():
            load(dict(rooms), storage_reader=reader, process_group=group, no_dist=group is None)
    except (OSError, SourceError):
        raise
    except Exception as error:  # what torch raises depends on what the file says
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise SourceError(f"{folder}: its tensors cannot be read ({reason:.200}); use another checkpoint") from error


def tensors_in(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Sizes and types of the tensors in a folder, by name. Only tensors: torch would unpickle anything else."""
    table, tensors = read_table(folder)
    refuse_packed(folder, table)
    return tensors


def digests_of(folder: Path, rank: int) -> dict[str, str]:
    """SHA-256 of each file that a rank wrote."""
    names = [_own(rank), *sorted(file.name for file in folder.iterdir() if file.name.startswith(f"__{rank}_"))]
    if rank == 0:
        names += [_PLAIN, TABLE]
    return {name: _digest(folder, name) for name in names}


def write_digests(folder: Path, of_ranks: list[dict[str, str]]) -> None:
    """Write the digests of all files beside them."""
    of_all = {name: digest for of_rank in of_ranks for name, digest in of_rank.items()}
    with whole_file(folder / DIGESTS) as file:
        file.write(json.dumps(of_all, indent=1).encode())


def fault_in(folder: Path) -> str | None:
    """What is wrong with the files, if anything: reads all of them and compares digests."""
    name = DIGESTS
    try:
        digests = read_object(folder / DIGESTS, folder)
        for name, digest in digests.items():
            if not name.isprintable() or len(name) > _LONGEST_NAME:
                return f"{DIGESTS} names {name!a:.40}, which is none of its files"
            if _digest(folder, name) != digest:
                return f"{name} is not what was written"
    except FileNotFoundError:
        return f"{name} is missing"
    except SourceError as error:
        return str(error)
    except OSError as error:
        return f"{name} cannot be read ({error.strerror or error})"
    return None if {_PLAIN, TABLE} <= digests.keys() else f"{DIGESTS} does not list its files"


def _own(rank: int) -> str:
    return f"plain/{rank}.json"


def _digest(folder: Path, name: str) -> str:
    with open_file(folder / name, folder) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _speaking_plainly() -> Iterator[None]:
    """Raise the system's error, such as a full disk, instead of torch's wrapper."""
    try:
        yield
    except CheckpointException as wrapper:  # not even an Exception
        for error, _ in wrapper.failures.values():
            raise _first_cause(error) from wrapper
        raise


def _first_cause(error: BaseException) -> BaseException:
    """The system's error in the chain that led to this one, if there is one."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OSError):
            return link
        link = link.__cause__ or link.__context__
    return error


class _Reader(FileSystemReader):
    """torch's reader, with a table that our own unpickler has read: torch would log a failure and go on."""

    def __init__(self, folder: Path, table: Metadata) -> None:
        super().__init__(folder)
        self._table = table

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._table
