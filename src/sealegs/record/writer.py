"""Rows and events in, a run folder out: append-only, and safe against ``kill -9``."""

import errno
import fcntl
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sealegs.errors import RunBusy, RunExists
from sealegs.record import manifest as manifests
from sealegs.record.files import folder_aside, writing
from sealegs.record.manifest import Manifest
from sealegs.record.schema import EVENTS, METRICS, to_line
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
        if folder.exists():
            raise RunExists(f"{folder}: there is a run of that name; give --resume to go on with it, or another name")
        with writing(folder), folder_aside(folder) as aside:
            manifests.save(manifest, aside)
        return cls(folder, manifest)

    @classmethod
    def reopen(cls, folder: Path) -> "RunWriter":
        """Go on with a run that stopped or was killed."""
        return cls(folder, manifests.load(folder))

    def row(self, row: Row) -> None:
        """Append what is known of one step; on return the row survives the death of this process."""
        self._metrics.append({**row, "time": round(time.time(), 3)})

    def event(self, kind: str, step: int, **detail: Any) -> Event:
        """Append something that happened, and return it as it was written."""
        event = Event(kind=kind, step=step, time=round(time.time(), 3), detail=detail)
        self._events.append({"time": event.time, "step": step, "kind": kind, **detail})
        return event

    def amend(self, **changes: Any) -> None:
        """Write the manifest anew with some fields changed."""
        self.manifest = replace(self.manifest, **changes)
        with writing(self.folder):
            manifests.save(self.manifest, self.folder)

    def sync(self) -> None:
        """Make everything appended so far survive a power cut too; costs milliseconds."""
        self._metrics.sync()
        self._events.sync()

    def close(self) -> None:
        """Release the folder."""
        self._metrics.close()
        self._events.close()


class _Lines:
    """A file of JSON lines that is only ever appended to, one system call a line, by one process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._handle)
            raise RunBusy(f"{path.parent}: another process is writing this run; stop it first") from None
        self._end_torn_line()

    def append(self, values: Mapping[str, Any]) -> None:
        line = to_line(values)
        before = os.fstat(self._handle).st_size
        with writing(self._path):
            try:
                if os.write(self._handle, line) != len(line):  # the disk took a part: the rest would not fit either
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                os.ftruncate(self._handle, before)
                raise

    def sync(self) -> None:
        with writing(self._path):
            os.fsync(self._handle)

    def close(self) -> None:
        os.close(self._handle)

    def _end_torn_line(self) -> None:
        """A writer killed inside a line leaves it open: end it, so that the next line is its own. Readers drop it."""
        size = os.fstat(self._handle).st_size
        if size and os.pread(self._handle, 1, size - 1) != b"\n":
            os.write(self._handle, b"\n")
