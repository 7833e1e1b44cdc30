"""Opens the files of a corpus: on this machine, or at an address that fsspec knows (s3://, gs://, hf://)."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote

from sealegs.errors import MissingExtra, SourceError

_HERE = "file://"


def is_address(name: str) -> bool:
    """Whether a name is an address and no path."""
    return "://" in name


def settled(name: str) -> str:
    """The path of a ``file://`` address; any other name as it is.

    >>> settled("file:///data/a%20b.txt"), settled("s3://data/a.txt")
    ('/data/a b.txt', 's3://data/a.txt')
    """
    return unquote(name.removeprefix(_HERE)) if name.startswith(_HERE) else name


def file_system(address: str) -> tuple[Any, str]:
    """The file system of an address, and the path in it."""
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise MissingExtra(address, "fsspec", "cluster") from error
    try:
        found: tuple[Any, str] = url_to_fs(address)
    except (ImportError, ValueError) as error:  # the library of that file system, or no such one
        raise SourceError(f"{address}: {str(error).rstrip('.')}") from error
    return found


@contextmanager
def reading(address: str) -> Iterator[None]:
    """Turn what the libraries of file systems raise into one sentence; few of them raise an ``OSError``."""
    try:
        yield
    except (OSError, SourceError, MissingExtra, AssertionError):
        raise
    except Exception as error:
        raise SourceError(f"{address}: cannot be read ({error})") from error


def opened(name: str | Path) -> BinaryIO:
    """A file to read."""
    name = str(name)
    if not is_address(name):
        return Path(name).open("rb")
    with reading(name):
        system, path = file_system(name)
        file: BinaryIO = system.open(path, "rb")
    return file


def size_of(name: str | Path) -> int:
    """Bytes of a file."""
    name = str(name)
    if not is_address(name):
        return Path(name).stat().st_size
    with reading(name):
        system, path = file_system(name)
        return int(system.size(path) or 0)


def stamp_of(name: str) -> str:
    """What changes when a file is changed."""
    if not is_address(name):
        told = Path(name).stat()
        return f"{told.st_size} {told.st_mtime_ns}"
    with reading(name):
        system, path = file_system(name)
        return str(system.ukey(path))


def is_folder(name: str) -> bool | None:
    """Whether it is a folder; None if there is no such thing."""
    if not is_address(name):
        path = Path(name)
        return path.is_dir() if path.exists() else None
    with reading(name):
        system, path_there = file_system(name)
        return bool(system.isdir(path_there)) if system.exists(path_there) else None


def folders_below(name: str) -> Iterator[tuple[str, list[str]]]:
    """Each folder below one, itself included, and the names of its files."""
    if not is_address(name):
        for place, folders, names in os.walk(name):
            folders[:] = [each for each in folders if not _is_hidden(each)]
            yield place, names
        return
    with reading(name):
        system, root = file_system(name)
        for place, _, names in system.walk(root):
            below = place.removeprefix(root).strip("/")
            if not any(_is_hidden(each) for each in below.split("/") if each):
                yield f"{name.rstrip('/')}/{below}".rstrip("/"), list(names)


_PASSED_OVER = frozenset({"__pycache__", "node_modules"})


def _is_hidden(folder: str) -> bool:
    return folder in _PASSED_OVER or folder.startswith(".")
