"""Writes the rows and events of a run into its folder: append-only, and safe against ``kill -9``."""

import errno
import fcntl
import math
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from sealegs.errors import RunBusy, RunExists, SourceError, StorageError
from sealegs.record import manifest as manifests
from sealegs.record import requests
from sealegs.record.events import LATEST
from sealegs.record.files import folder_aside, is_taken, remove_leftovers, writing
from sealegs.record.manifest import Manifest
from sealegs.record.reading import confined, open_file, parse_json, refuse_special
from sealegs.record.schema import (
    CAPSULE,
    CHECKPOINTS,
    EVENTS,
    INCIDENT,
    INCIDENTS,
    MANIFEST,
    METRICS,
    RECOVERY,
    TOKENIZER,
    to_line,
)
from sealegs.record.typed import fits
from sealegs.vocabulary import Event, Row

INCOMPLETE = "the run folder is not complete"
"""How a sentence about what is missing begins."""
_TAIL_BYTES = 1 << 16
"""What is read of a file to find its last line."""
LOOK_EVERY_S = 1.0
"""How often, in seconds, a writer looks whether its folder is still where it was."""


class RunWriter:
    """The one writer of a run folder. ``create`` makes the folder, ``reopen`` goes on with it."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self.left_off_at: float | None = None
        """When the process before this one wrote its last line, in seconds since 1970."""
        self.had_finished = False
        """Whether that line says that the run was over, as planned."""
        self._clock = _Clock()
        self.lost = ""
        """What became of the folder, where its name does not lead to it any more; as of the last look."""
        self._place = folder.absolute()
        self._looked_at = time.monotonic()
        self._refused: set[int] = set()
        """Steps whose rows could not be written."""
        with writing(folder), ExitStack() as on_failure:
            self._metrics = _Lines(folder / METRICS)
            on_failure.callback(self._metrics.close)
            self._events = _Lines(folder / EVENTS)
            on_failure.pop_all()

    @classmethod
    def create(cls, folder: Path, manifest: Manifest) -> "RunWriter":
        """Make the folder of a new run. It appears whole, with its manifest, or not at all."""
        with writing(folder):
            try:
                refuse_taken(folder)
                remove_leftovers(folder.parent, f"{folder.name}.*")
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
        rows, events = (_last_lines(folder / name) for name in (METRICS, EVENTS))
        left_off_at = max((float(lines[0]["time"]) for lines in (rows, events) if lines), default=None)
        manifest = manifests.load(folder)
        writer = cls(folder, manifest)
        if left_off_at is not None and not _is_after(manifest.created, left_off_at):
            writer.left_off_at = left_off_at
            told = next((line for line in events if line.get("kind") in ("end", "resume")), {})
            is_last = not rows or (bool(told) and told["time"] >= rows[0]["time"])
            writer.had_finished = is_last and (told.get("kind"), told.get("reason")) == ("end", "finished")
        _clear_away(folder)
        return writer

    def row(self, row: Row) -> None:
        """Append the row of one step. On return it survives the death of this process."""
        try:
            self._metrics.append({**row, "time": self._clock.now()})
        except StorageError:
            self._refused.add(int(row["step"]))
            raise
        if self._refused:
            self._refused.discard(int(row["step"]))
        if time.monotonic() - self._looked_at > LOOK_EVERY_S:
            self.look()

    def event(self, kind: str, step: int, /, **detail: Any) -> Event:
        """Append an event, and return it as it was written."""
        event = Event(kind=kind, step=step, time=self._clock.now(), detail=detail)
        head = {"time": event.time, "step": step, "kind": kind}
        self._events.append({**head, **detail, **head})  # first in the line, and not to be overwritten
        return event

    def amend(self, **changes: Any) -> None:
        """Change the fields of the manifest that differ."""
        amended = replace(self.manifest, **changes)
        if manifests.to_json(amended) != manifests.to_json(self.manifest):
            self.manifest = amended
            self.refuse_lost()
            with writing(self.folder):
                manifests.save(self.manifest, self.folder)

    def sync(self) -> None:
        """Make everything appended so far survive a power cut, too. Costs milliseconds."""
        self._metrics.sync()
        self._events.sync()

    def look(self) -> str:
        """Look whether the folder is still where it was; ``lost`` says if it is not."""
        self._looked_at = time.monotonic()
        self.lost = self._what_became_of_it()
        return self.lost

    def refuse_lost(self) -> None:
        """Raise an error if the folder is not where it was: another one may have its name."""
        if lost := self.look():
            raise StorageError(lost)

    @property
    def missing(self) -> tuple[str, ...]:
        """What this process should have written and the folder does not have, in sentences."""
        rows = ""
        if self._refused:
            count = "a row" if len(self._refused) == 1 else f"{len(self._refused)} rows"
            rows = f"{count}, from step {min(self._refused)} on, could not be written"
        return tuple(filter(None, (self.lost, rows)))

    def _what_became_of_it(self) -> str:
        """Compare the open file with what its name leads to: a deleted or moved file can still be written."""
        try:
            here = self._metrics.stat()
        except OSError as error:
            return f"{self.folder}: cannot be reached any more ({error.strerror})"
        try:
            there = (self.folder / METRICS).stat()
        except (FileNotFoundError, NotADirectoryError):
            there = None
        except OSError as error:
            return f"{self.folder}: cannot be reached any more ({error.strerror})"
        # some network file systems give a file another number now and then: then size and time tell
        if there is not None and (os.path.samestat(here, there) or _written(here) == _written(there)):
            return ""
        if self.folder.absolute() != self._place:
            return f"{self.folder}: leads elsewhere since the working folder was changed: give an absolute path"
        other = "" if there is None else ", and something else has its name"
        if not here.st_nlink:
            return f"{self.folder}: deleted while the run was writing to it{other}: nothing more can be saved there"
        return (
            f"{self.folder}: moved away{self._metrics.where()} while the run was writing to it{other}: "
            "until it is back, its rows go along and nothing else is saved"
        )

    def close(self) -> None:
        """Release the folder. Closing twice is no error."""
        try:
            self._metrics.close()
        finally:
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


def _written(file: os.stat_result) -> tuple[int, int]:
    return file.st_size, file.st_mtime_ns


def _clear_away(folder: Path) -> None:
    """Remove what processes that died were writing. The lock of the run is held: none of its own is still alive."""
    incidents = _folders_in(folder / INCIDENTS)
    inside = [each for incident in incidents for each in _folders_in(incident)]
    for place in (folder / CHECKPOINTS, *(each for each in inside if each.name == CAPSULE)):
        remove_leftovers(place, has_lock=True)
    for name in (MANIFEST, RECOVERY, TOKENIZER):
        remove_leftovers(folder, f"{name}.*", has_lock=True)
    for incident in incidents:
        remove_leftovers(incident, f"{INCIDENT}.*", has_lock=True)
    for place in (folder, folder / requests.FOLDER, *incidents, *inside):
        remove_leftovers(place)  # commands write here, too


def _folders_in(folder: Path) -> list[Path]:
    """The folders in a folder, without links to others."""
    try:
        return [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.is_symlink()]
    except OSError:
        return []


def _is_after(created: str, seconds: float) -> bool:
    """Whether a run was made after that time: then it is a branch of another, which has not begun yet."""
    try:
        return datetime.fromisoformat(created).timestamp() > seconds
    except (ValueError, OverflowError):
        return False


def _last_lines(path: Path) -> list[dict[str, Any]]:
    """The last lines of a file that say when they were written, the newest first."""
    try:
        with open_file(path, path.parent) as file:
            file.seek(max(os.fstat(file.fileno()).st_size - _TAIL_BYTES, 0))
            lines = file.read(_TAIL_BYTES).splitlines()
    except (OSError, SourceError):
        return []
    found = []
    for line in reversed(lines):
        try:
            values = parse_json(line)
            at = values["time"]
        except (ValueError, TypeError, KeyError):  # torn by a kill, or by the beginning of the tail
            continue
        if not fits(at, float) or not 0 <= at < LATEST:
            break
        found.append(values)
    return found


class _Clock:
    """The time of day as long as it goes forward. Where the machine's clock is set back, it goes on from where it was:
    what comes later has a later time, and the seconds between two times have passed."""

    def __init__(self) -> None:
        self._ahead_s = 0.0
        self._last = -math.inf
        self._ticks = time.monotonic()

    def now(self) -> float:
        """Seconds since 1970, to the millisecond."""
        told, ticks = time.time(), time.monotonic()
        if told + self._ahead_s < self._last:
            self._ahead_s = self._last + (ticks - self._ticks) - told
        self._last, self._ticks = told + self._ahead_s, ticks
        return round(self._last, 3)


class _Lines:
    """A file of JSON lines that one process appends to, one system call per line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._owner = os.getpid()
        self._may_be_torn = True
        """Whether the last line may have no end, of a writer that was killed or of a write that failed."""
        place = confined(path, path.parent)  # as it is read: a stranger's link is not written through
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        self._handle = os.open(place, flags, 0o666)
        try:
            refuse_special(path, os.fstat(self._handle).st_mode)
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._end_torn_line()
        except BlockingIOError:
            os.close(self._handle)
            raise RunBusy(f"{path.parent}: another process is writing this run; stop it first") from None
        except BaseException:
            os.close(self._handle)
            raise

    def append(self, values: Mapping[str, Any]) -> None:
        if self._handle < 0:
            raise StorageError(f"{self._path}: the run is closed; open it again with resume=True")
        line = to_line(values)
        try:
            if self._may_be_torn:
                self._end_torn_line()
            self._may_be_torn = True
            written = os.write(self._handle, line)
            if written != len(line):  # the disk took only a part: the rest would not fit either
                with suppress(OSError):
                    os.ftruncate(self._handle, os.fstat(self._handle).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._may_be_torn = False
        except OSError:
            with writing(self._path):
                raise

    def stat(self) -> os.stat_result:
        """What the system knows of the open file, wherever its name leads."""
        return os.fstat(self._handle)

    def where(self) -> str:
        """Where the open file is now, in words; empty on systems that do not say."""
        try:
            return f" to {Path(f'/proc/self/fd/{self._handle}').readlink().parent}"
        except OSError:
            return ""

    def sync(self) -> None:
        with writing(self._path):
            os.fsync(self._handle)

    def close(self) -> None:
        handle, self._handle = self._handle, -1  # another file may soon get this number
        if handle >= 0:
            if os.getpid() == self._owner:  # else workers forked since then would keep the lock
                with suppress(OSError):
                    fcntl.flock(handle, fcntl.LOCK_UN)
            with writing(self._path):  # a network file system may say only now that it could not
                os.close(handle)

    def _end_torn_line(self) -> None:
        """End a line that was left open, so that the next line is its own. Readers drop the torn one."""
        size = os.fstat(self._handle).st_size
        if size and os.pread(self._handle, 1, size - 1) != b"\n":
            os.write(self._handle, b"\n")
        self._may_be_torn = False
