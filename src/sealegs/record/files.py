"""Writes files and folders so that they are whole or absent: every way in which Sealegs writes to disk."""

import errno
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from sealegs.errors import StorageError

_CURES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some of your quota",
    errno.EFBIG: "raise the file size limit (ulimit -f)",
    errno.EROFS: "choose a folder that can be written",
    errno.EACCES: "choose a folder that you may write",
    errno.EPERM: "choose a folder that you may write",
}

PARTIAL = ".partial"
"""How the names of files and folders end that are being written; they begin with a dot."""
REPLACED = f".replaced{PARTIAL}"
"""How the name of a folder ends that another one is about to replace."""
UNTOUCHED_S = 600.0
"""Seconds without a change after which nobody is writing any more, on whatever machine."""


@contextmanager
def writing(what: str | Path) -> Iterator[None]:
    """Turn an ``OSError`` during writing into one sentence that says what to do."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        cure = _CURES.get(error.errno or 0, "see to the disk")
        raise StorageError(f"{what}: cannot be written ({reason}): {cure} and try again") from error


def sync_folder(folder: Path) -> None:
    """Make renames and new names in a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def whole_file(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """Open a file to fill. Readers see the old file or the new one, never a part.

    With ``durable=False`` a power cut may tear it: for files that carry their own check.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    aside.unlink(missing_ok=True)  # of an earlier process with this number, or a link that somebody has put there
    try:
        with aside.open("xb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


@contextmanager
def folder_aside(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """A folder to fill. It takes its name only when everything in it is on disk; otherwise it is removed.

    Without ``replace`` an existing folder of that name is an error (``is_taken``), even if another process made it
    meanwhile. A process that is killed in between leaves a folder whose name starts with a dot and ends in
    ``.partial``. Of a folder that was being replaced, ``put_back_replaced`` then brings the old one back.
    """
    aside = target.with_name(f".{target.name}.{os.getpid()}{PARTIAL}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        sync_folder(aside)
        if replace and target.exists():
            _replace_folder(target, aside)
        else:
            aside.rename(target)
        sync_folder(target.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _replace_folder(target: Path, new: Path) -> None:
    """Give a folder the name of another, which is removed. No system call does both, so a kill may come in between."""
    old = target.with_name(f".{target.name}.{os.getpid()}{REPLACED}")
    target.rename(old)
    try:
        new.rename(target)
    except BaseException:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def put_back_replaced(parent: Path) -> None:
    """Give back their names to folders that were being replaced when the process before was killed, unless the new one
    has it."""
    for old in parent.glob(f".*{REPLACED}"):
        name = old.name.removesuffix(REPLACED).rpartition(".")[0].removeprefix(".")
        if name and not (parent / name).exists():
            old.rename(parent / name)
        else:
            _remove(old)


def remove_leftovers(folder: Path, names: str = "*", *, has_lock: bool = False) -> None:
    """Remove what processes that died were writing in a folder, under names that match.

    Whoever has the lock of a run knows that its writers are gone. What others write too, may be under way: it is left
    alone while the process in its name is alive, or, since that may be one of another machine, it was touched lately. A
    folder that was being replaced is no leftover: it may be the only one that is whole.
    """
    with suppress(OSError):  # what cannot be cleared away does no harm
        for path in folder.glob(f".{names}{PARTIAL}"):
            if path.name.endswith(REPLACED):
                continue
            if has_lock or (not _is_alive(path) and time.time() - _touched(path) > UNTOUCHED_S):
                _remove(path)


def _is_alive(path: Path) -> bool:
    """Whether a process of this machine has the number in the name."""
    numbers = [int(part) for part in path.name.split(".") if part.isdecimal()]
    if not numbers or numbers[-1] == os.getpid():  # an earlier process had the same, as is usual in containers
        return False
    try:
        os.kill(numbers[-1], 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True


def _touched(path: Path) -> float:
    """When a file, or the newest in a folder, was changed last."""
    return max(each.lstat().st_mtime for each in (path, *path.rglob("*")))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def files_in(folder: Path) -> list[Path]:
    """All files in a folder and in the folders in it. Unlike ``rglob``, it fails where one of them cannot be listed."""

    def fail(error: OSError) -> None:
        raise error

    return sorted(Path(place, name) for place, _, names in os.walk(folder, onerror=fail) for name in names)


def is_taken(error: OSError) -> bool:
    """Whether a folder could not take its name because another one has it."""
    return error.errno in (errno.ENOTEMPTY, errno.EEXIST)
