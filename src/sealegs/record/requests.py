"""Requests of a person to a run that is under way: files in its folder, taken by the process that trains.

    RUN/requests/<id>.json        {"id": ..., "by": "ana@login3", "words": ["lr", "0.5"]}

Files appear whole. The training process takes the oldest, carries it out, writes an event with its id, and removes it.
The name in that event is that of the file's owner: anybody can write a name into a file. What is no request is moved to
``requests/refused``, with an event that says why; nothing in this folder may stop or hold up a run.
"""

import fcntl
import getpass
import json
import os
import platform
import pwd
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from sealegs.errors import SourceError
from sealegs.record.files import whole_file, writing
from sealegs.record.reading import open_file, parse_json, refuse_special
from sealegs.record.schema import METRICS

FOLDER = "requests"
REFUSED = "refused"
"""Where files go that are no requests, inside ``FOLDER``."""
MOST_BYTES = 4096
"""The largest file that is looked at: a request is two words."""
MOST_FILES = 1000
"""Files that are looked at in one go: sorting a million names would hold up a step."""
_ENDING = ".json"
_ID = re.compile(r"[\w.-]{1,80}", re.ASCII)
_MOST_WORDS, _LONGEST_WORD = 8, 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request, and who made it."""

    id: str
    by: str
    words: tuple[str, ...]


class RefusedRequest(NamedTuple):
    """A file that is no request."""

    id: str
    by: str
    reason: str


def leave(run: Path, words: tuple[str, ...]) -> Request:
    """Put a request into the folder of a run."""
    request = Request(id=f"{time.time_ns()}-{os.getpid()}", by=f"{_user()}@{platform.node()}", words=words)
    folder = run / FOLDER
    with writing(folder):
        folder.mkdir(exist_ok=True)
        with whole_file(folder / f"{request.id}{_ENDING}") as file:
            file.write(json.dumps(asdict(request)).encode())
    return request


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container may have a user without a name
        return str(os.getuid())


class Inbox:
    """The requests in the folder of a run, as the process that trains takes them."""

    def __init__(self, run: Path) -> None:
        self._folder = run / FOLDER
        self._left: set[str] = set()
        """Names of files that are no requests and could not be moved away: they are not looked at again."""
        self._said: set[str] = set()
        """Names of requests that could not be taken out of the folder: they are tried again, and that is said once."""

    def take(self) -> tuple[Request | None, list[RefusedRequest]]:
        """Take the oldest request out of the folder, and whatever came before it and is none."""
        refused: list[RefusedRequest] = []
        try:
            with _folder(self._folder) as folder:
                for name in self._names(folder):
                    found = self._take(folder, name)
                    if isinstance(found, Request):
                        return found, refused
                    if found is not None:
                        refused.append(found)
        except FileNotFoundError:
            pass
        except OSError as error:  # a link, a file, or not to be read: said once
            if "" not in self._said:
                self._said.add("")
                refused.append(RefusedRequest(FOLDER, "", f"{self._folder}: {error.strerror or error}"))
        return None, refused

    def _names(self, folder: int) -> list[str]:
        with os.scandir(folder) as entries:
            names = (entry.name for entry in entries if entry.name.endswith(_ENDING) and entry.name not in self._left)
            return sorted(islice(names, MOST_FILES))

    def _take(self, folder: int, name: str) -> Request | RefusedRequest | None:
        """Take one file out of the folder; None if another process has done so."""
        by = ""
        try:
            there = os.stat(name, dir_fd=folder, follow_symlinks=False)
            by = _owner(there.st_uid)
            refuse_special(Path(name), there.st_mode)
            words = _words(folder, name)
            os.unlink(name, dir_fd=folder)  # before it is carried out: what cannot be removed would be done for ever
            return Request(id=name.removesuffix(_ENDING), by=by, words=words)
        except FileNotFoundError:
            return None
        except OSError as error:  # the disk may come back, and the folder may be given back
            if name in self._said:
                return None
            self._said.add(name)
            return RefusedRequest(_id(name), by, f"not yet: {error.strerror or error}")
        except (ValueError, SourceError) as error:
            self._move_aside(folder, name)
            return RefusedRequest(_id(name), by, str(error))

    def _move_aside(self, folder: int, name: str) -> None:
        try:
            with suppress(FileExistsError):
                os.mkdir(REFUSED, dir_fd=folder)
            with _folder(REFUSED, folder) as refused:
                os.replace(name, name, src_dir_fd=folder, dst_dir_fd=refused)
        except OSError:
            self._left.add(name)


def _id(name: str) -> str:
    """The id of a file in letters that can be shown."""
    return ascii(name.removesuffix(_ENDING))[1:-1][:80]


@contextmanager
def _folder(path: Path | str, inside: int | None = None) -> Iterator[int]:
    """The folder itself: a link would lead the training process to somebody else's files."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=inside)
    try:
        yield handle
    finally:
        os.close(handle)


def _words(folder: int, name: str) -> tuple[str, ...]:
    """The words of a request, or an error that says why the file is none."""
    if not _ID.fullmatch(name.removesuffix(_ENDING)):
        raise ValueError("its name is no id: letters, digits, dots and dashes, up to 80")
    handle = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    with os.fdopen(handle, "rb") as file:
        refuse_special(Path(name), os.fstat(handle).st_mode)
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"more than {MOST_BYTES} bytes")
    values = parse_json(content)
    words = values.get("words") if isinstance(values, dict) else None
    if not isinstance(words, list) or not all(isinstance(word, str) and len(word) <= _LONGEST_WORD for word in words):
        raise ValueError('no request: it says no {"words": ["lr", "0.5"]}')
    if len(words) > _MOST_WORDS:
        raise ValueError(f"more than {_MOST_WORDS} words")
    return tuple(words)


def _owner(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def remove(run: Path, request: Request) -> None:
    """Remove a request that nobody waits for any more."""
    (run / FOLDER / f"{request.id}{_ENDING}").unlink(missing_ok=True)


def is_under_way(run: Path) -> bool:
    """Whether a process holds the run open for writing."""
    try:
        with open_file(run / METRICS, run) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
