"""What is known of the checkpoints of a run: ``checkpoints/tags.json``, in plain JSON that a launcher can read, too."""

import hashlib
import json
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from sealegs.errors import SourceError
from sealegs.record.files import whole_file, writing
from sealegs.record.reading import parse_json, read_bytes

DIGESTS = "digests.json"
"""The file that a checkpoint is whole with: digests of all others."""

TAGS = "tags.json"

HEALTHY_AFTER = 16
"""Healthy steps after which a checkpoint is healthy itself."""

Tag: TypeAlias = Literal["candidate", "healthy", "suspect"]
"""What is known of the weights in a checkpoint. A new one is a candidate: nothing is known yet."""


class Tags:
    """The tags of a folder's checkpoints. A tag belongs to one checkpoint; a step that is saved again loses it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / TAGS
        self._lock = threading.Lock()  # one thread trains, another one writes
        self._expected: int | None = None
        self._held: tuple[Tag, str] | None = None

    def of(self, steps: Iterable[int]) -> dict[int, tuple[Tag, str]]:
        """Tag and reason of each of these steps."""
        entries = self._read()
        known: dict[int, tuple[Tag, str]] = {}
        for step in steps:
            entry = entries.get(str(step))
            is_of_this = entry is not None and entry["of"] == self._identity(step)
            known[step] = (entry["tag"], entry["why"]) if entry is not None and is_of_this else ("candidate", "")
        return known

    def give(self, step: int, tag: Tag, why: str) -> None:
        """Tag a checkpoint: at once, or on arrival if it is being written. A missing checkpoint is ignored."""
        with self._lock:
            if step == self._expected:
                self._held = tag, why
            else:
                self._write(step, tag, why)

    def expect(self, step: int | None) -> None:
        """Announce a checkpoint that is being written, so that its tag waits until it ``arrived``. None: there is
        none."""
        with self._lock:
            self._expected, self._held = step, None

    def arrived(self, step: int) -> None:
        """Write the waiting tag: the checkpoint has its final name."""
        with self._lock:
            if step == self._expected and self._held is not None:
                self._write(step, *self._held)
            self._expected = self._held = None

    @property
    def expected(self) -> int | None:
        """The step whose checkpoint is being written."""
        return self._expected

    def _write(self, step: int, tag: Tag, why: str) -> None:
        identity = self._identity(step)
        if identity is None:
            return
        entries = self._read() | {str(step): {"tag": tag, "why": why, "of": identity}}
        gone = [name for name in entries if not (self._folder / name).exists()]
        for name in gone:
            del entries[name]
        with writing(self._file), whole_file(self._file) as file:
            file.write(json.dumps(entries, indent=1).encode())

    def _read(self) -> dict[str, Any]:
        try:
            entries = parse_json(read_bytes(self._file, self._folder))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, SourceError) as error:
            raise SourceError(
                f"{self._file}: cannot be read ({error}); delete it, and nothing is known of any checkpoint"
            ) from error
        return {step: entry for step, entry in _items(entries) if _is_entry(entry)}

    def _identity(self, step: int) -> str | None:
        """A digest that tells a checkpoint from another one of the same step."""
        try:
            folder = self._folder / str(step)
            return hashlib.sha256(read_bytes(folder / DIGESTS, folder)).hexdigest()
        except (OSError, SourceError):
            return None


def _items(entries: Any) -> Iterable[tuple[str, Any]]:
    return entries.items() if isinstance(entries, dict) else ()


def _is_entry(entry: Any) -> bool:
    """Whether it is what ``_write`` writes; of another one nothing is known."""
    is_whole = isinstance(entry, dict) and all(isinstance(entry.get(name), str) for name in ("tag", "why", "of"))
    return is_whole and entry["tag"] in get_args(Tag)
