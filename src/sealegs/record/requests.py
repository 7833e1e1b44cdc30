"""Requests of a person to a run that is under way: files in its folder, taken by the process that trains.

    RUN/requests/<id>.json        {"id": ..., "by": "ana@login3", "words": ["lr", "0.5"]}

Files appear whole. The training process takes the oldest, carries it out, writes an event with its id, and removes it.
"""

import fcntl
import getpass
import json
import os
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from sealegs.record.files import whole_file, writing
from sealegs.record.schema import METRICS

FOLDER = "requests"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request, and who made it."""

    id: str
    by: str
    words: tuple[str, ...]


def leave(run: Path, words: tuple[str, ...]) -> Request:
    """Put a request into the folder of a run."""
    request = Request(id=f"{time.time_ns()}-{os.getpid()}", by=f"{_user()}@{platform.node()}", words=words)
    folder = run / FOLDER
    with writing(folder):
        folder.mkdir(exist_ok=True)
        with whole_file(folder / f"{request.id}.json") as file:
            file.write(json.dumps(asdict(request)).encode())
    return request


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container may have a user without a name
        return str(os.getuid())


def waiting(run: Path) -> list[Request]:
    """The requests of a run, oldest first. Other files are left alone."""
    found = []
    for path in sorted((run / FOLDER).glob("*.json")):
        try:
            values = json.loads(path.read_bytes())
            found.append(Request(id=path.stem, by=str(values["by"]), words=tuple(map(str, values["words"]))))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found


def remove(run: Path, request: Request) -> None:
    """Remove a request that has been answered, or that nobody waits for any more."""
    (run / FOLDER / f"{request.id}.json").unlink(missing_ok=True)


def is_under_way(run: Path) -> bool:
    """Whether a process holds the run open for writing."""
    try:
        with (run / METRICS).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
