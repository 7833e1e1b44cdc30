"""Writes files and folders so that they are whole or absent: every way in which Sealegs writes to disk."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
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
    try:
        with aside.open("wb") as file:
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
    """Give back their names to folders that were being replaced when the process before was killed."""
    for old in parent.glob(f".*{REPLACED}"):
        name = old.name.removesuffix(REPLACED).rpartition(".")[0].removeprefix(".")
        if name and not (parent / name).exists():
            old.rename(parent / name)


def remove_partial(parent: Path, *, files: bool = True) -> None:
    """Remove what a killed process has left half-written in a folder, or the folders of it alone.

    Only the one writer of a folder may do so; of its own files, another thread may be writing one.
    """
    for left in parent.glob(f".*{PARTIAL}"):
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left, ignore_errors=True)
        elif files:
            left.unlink(missing_ok=True)


def is_taken(error: OSError) -> bool:
    """Whether a folder could not take its name because another one has it."""
    return error.errno in (errno.ENOTEMPTY, errno.EEXIST)
