"""State in, folders on disk out, and back: checkpoints that are whole or not there, and are checked before use.

Tensors go through ``torch.distributed.checkpoint``, in one process as in many; everything else is JSON. A checkpoint is
written aside, synced, given the digests of its files and then renamed: no moment at which a kill leaves a folder
that looks like a checkpoint and is not one. Nothing in it is unpickled but torch's own table of contents, and that
only into the types such a table is made of.
"""

import hashlib
import json
import pickle
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from sealegs.errors import SourceError
from sealegs.record.files import folder_aside, whole_file, writing

_DIGESTS = "digests.json"
_PLAIN = "plain.json"


@dataclass(frozen=True, slots=True)
class State:
    """Everything needed to go on from a step, in the two kinds that are stored differently."""

    tensors: Mapping[str, Tensor]
    plain: Mapping[str, Any]
    """JSON values."""


@dataclass(frozen=True, slots=True)
class Damage:
    """A checkpoint that cannot be used, and why."""

    step: int
    reason: str


class Checkpoints:
    """The checkpoints of one run, by the step that they make ready to run."""

    def __init__(self, folder: Path, *, keep: int = 3) -> None:
        self._folder = folder
        self._keep = keep

    def steps(self) -> list[int]:
        """The steps for which there is a checkpoint, rising."""
        if not self._folder.is_dir():
            return []
        return sorted(int(entry.name) for entry in self._folder.iterdir() if entry.name.isdecimal())

    def save(self, step: int, state: State) -> Path:
        """Write a checkpoint, then remove those that are no longer kept."""
        target = self._folder / str(step)
        with writing(target):
            self._folder.mkdir(parents=True, exist_ok=True)
            with folder_aside(target, replace=True) as aside:
                with whole_file(aside / _PLAIN) as file:
                    file.write(json.dumps(state.plain).encode())
                with _speaking_plainly():
                    save_tensors(dict(state.tensors), storage_writer=FileSystemWriter(aside))
                digests = {file.name: _digest(file) for file in sorted(aside.iterdir())}
                with whole_file(aside / _DIGESTS) as file:
                    file.write(json.dumps(digests, indent=1).encode())
        self._rotate()
        return target

    def newest_intact(self) -> tuple[int | None, list[Damage]]:
        """The newest checkpoint that passes its check, and the newer ones that do not."""
        passed_over: list[Damage] = []
        for step in reversed(self.steps()):
            damage = self.check(step)
            if damage is None:
                return step, passed_over
            passed_over.append(damage)
        return None, passed_over

    def check(self, step: int) -> Damage | None:
        """Read a checkpoint whole and compare it with its digests."""
        folder = self._folder / str(step)
        try:
            digests = json.loads((folder / _DIGESTS).read_bytes())
            for name, digest in digests.items():
                if _digest(folder / name) != digest:
                    return Damage(step, f"{name} is not what was written")
        except FileNotFoundError as error:
            return Damage(step, f"{Path(error.filename).name} is missing")
        except (OSError, ValueError, AttributeError) as error:
            return Damage(step, f"{_DIGESTS} cannot be read ({error})")
        if not {_PLAIN, ".metadata"} <= digests.keys():
            return Damage(step, f"{_DIGESTS} does not list its files")
        return None

    def load(self, step: int) -> State:
        """Read a checkpoint that has been checked."""
        folder = self._folder / str(step)
        # only tensors are asked for: torch would unpickle anything else
        tensors = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in _table_of_contents(folder).state_dict_metadata.items()
            if isinstance(entry, metadata.TensorStorageMetadata)
        }
        with _speaking_plainly():
            load_tensors(tensors, storage_reader=FileSystemReader(folder))
        return State(tensors, json.loads((folder / _PLAIN).read_bytes()))

    def _rotate(self) -> None:
        """Keep the newest so many; but let nothing go while none of those passes its check."""
        for left_by_a_kill in self._folder.glob(".*.partial"):
            shutil.rmtree(left_by_a_kill, ignore_errors=True)
        steps = self.steps()
        kept, old = steps[-self._keep :], steps[: -self._keep]
        if old and any(self.check(step) is None for step in reversed(kept)):
            for step in old:
                # first the name, then the files: a kill in between must not leave a checkpoint with half its files
                aside = (self._folder / str(step)).rename(self._folder / f".{step}.partial")
                shutil.rmtree(aside, ignore_errors=True)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _speaking_plainly() -> Iterator[None]:
    """torch wraps a full disk into exceptions of its own, and warns where there is no process group: we mean that."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as wrapper:  # not even an Exception
        for error, _ in wrapper.failures.values():
            raise _first_cause(error) from wrapper
        raise


def _first_cause(error: BaseException) -> BaseException:
    """What the system said, where an error came of that: it is further down the chain."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OSError):
            return link
        link = link.__cause__ or link.__context__
    return error


class _TableOfContents(pickle.Unpickler):
    """Reads torch's ``.metadata``, a pickle, and refuses one that names anything else than a table is made of."""

    _TABLE = frozenset({
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        *(("torch.distributed.checkpoint.metadata", name) for name in (*metadata.__all__, "_MEM_FORMAT_ENCODING")),
        *((module, "PosixPath") for module in ("pathlib", "pathlib._local")),
    })  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) in self._TABLE or is_dtype:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _table_of_contents(folder: Path) -> metadata.Metadata:
    try:
        with (folder / ".metadata").open("rb") as file:
            table: metadata.Metadata = _TableOfContents(file).load()
    except (OSError, pickle.UnpicklingError) as error:
        raise SourceError(f"{folder}: not a checkpoint that Sealegs wrote ({error}); use another one") from error
    return table
