"""Writes the rows and events of a run into its folder: append-only, and safe against ``kill -9``."""

import errno
import fcntl
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, Self

from sealegs.errors import RunBusy, RunExists, StorageError
from sealegs.record import manifest as manifests
from sealegs.record.files import folder_aside, is_taken, writing
from sealegs.record.manifest import Manifest
from sealegs.record.schema import EVENTS, MANIFEST, METRICS, to_line
from sealegs.vocabulary import Event, Row


class RunWriter:
    """The one writer of a run folder. ``create`` makes the folder, ``reopen`` goes on with it."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        with writing(folder):
            self._metrics = _Lines(folder / METRICS)
            self._events = _Lines(folder / EVENTS)

    @classmethod
    def create(cls, folder: Path, manifest: Manifest) -> "RunWriter":
        """Make the folder of a new run. It appears whole, with its manifest, or not at all."""
        with writing(folder):
            try:
                refuse_taken(folder)
                with folder_aside(folder) as aside:
                    manifests.save(manifest, aside)
            except OSError as error:
                if is_taken(error):  # another process has just made it
                    refuse_taken(folder)
                raise
        return cls(folder, manifest)

    @classmethod
    def reopen(cls, folder: Path) -> "RunWriter":
        """Go on with a run that stopped or was killed."""
        return cls(folder, manifests.load(folder))

    def row(self, row: Row) -> None:
        """Append the row of one step. On return it survives the death of this process."""
        self._metrics.append({**row, "time": round(time.time(), 3)})

    def event(self, kind: str, step: int, /, **detail: Any) -> Event:
        """Append an event, and return it as it was written."""
        event = Event(kind=kind, step=step, time=round(time.time(), 3), detail=detail)
        head = {"time": event.time, "step": step, "kind": kind}
        self._events.append({**head, **detail, **head})  # first in the line, and not to be overwritten
        return event

    def amend(self, **changes: Any) -> None:
        """Change the fields of the manifest that differ."""
        amended = replace(self.manifest, **changes)
        if manifests.to_json(amended) != manifests.to_json(self.manifest):
            self.manifest = amended
            with writing(self.folder):
                manifests.save(self.manifest, self.folder)

    def sync(self) -> None:
        """Make everything appended so far survive a power cut, too. Costs milliseconds."""
        self._metrics.sync()
        self._events.sync()

    def close(self) -> None:
        """Release the folder. Closing twice is no error."""
        self._metrics.close()
        self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def refuse_taken(folder: Path) -> None:
    """Raise an error if there is something in the folder: a name is given once."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / MANIFEST).exists():
        raise RunExists(f"{folder}: there is something else in it, and no run; give another name")
    raise RunExists(
        f"{folder}: there is a run of that name; resume it (--resume, or resume=True), or give another name"
    )


class _Lines:
    """A file of JSON lines that one process appends to, one system call per line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._owner = os.getpid()
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._handle)
            raise RunBusy(f"{path.parent}: another process is writing this run; stop it first") from None
        self._end_torn_line()

    def append(self, values: Mapping[str, Any]) -> None:
        if self._handle < 0:
            raise StorageError(f"{self._path}: the run is closed; open it again with resume=True")
        line = to_line(values)
        try:
            written = os.write(self._handle, line)
        except OSError as error:
            self._refuse(error)
        if written != len(line):  # the disk took only a part: the rest would not fit either
            os.ftruncate(self._handle, os.fstat(self._handle).st_size - written)
            self._refuse(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

    def _refuse(self, error: OSError) -> NoReturn:
        with writing(self._path):
            raise error

    def sync(self) -> None:
        with writing(self._path):
            os.fsync(self._handle)

    def close(self) -> None:
        handle, self._handle = self._handle, -1  # another file may soon get this number
        if handle >= 0:
            if os.getpid() == self._owner:  # else workers forked since then would keep the lock
                with suppress(OSError):
                    fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)

    def _end_torn_line(self) -> None:
        """End a line that a killed writer left open, so that the next line is its own. Readers drop the torn one."""
        size = os.fstat(self._handle).st_size
        if size and os.pread(self._handle, 1, size - 1) != b"\n":
            os.write(self._handle, b"\n")
