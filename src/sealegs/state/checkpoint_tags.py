"""What is known of checkpoints in, a small file out, and back."""

import hashlib
import json
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, TypeAlias

from sealegs.errors import SourceError
from sealegs.record.files import whole_file, writing
from sealegs.state.checkpoint_files import DIGESTS

Tag: TypeAlias = Literal["candidate", "healthy", "suspect"]
"""What is known of the weights in a checkpoint. Nothing, at first: it is a candidate."""


class Tags:
    """The tags of a folder's checkpoints. One belongs to what it was given to: saved again, a step has none."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / "tags.json"
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
        """Tag a checkpoint: at once, or when it arrives if it is expected; one that is not there is left alone."""
        with self._lock:
            if step == self._expected:
                self._held = tag, why
            else:
                self._write(step, tag, why)

    def expect(self, step: int | None) -> None:
        """A checkpoint of this step is on its way: what it is given is kept until it ``arrived``. None: it is not."""
        with self._lock:
            self._expected, self._held = step, None

    def arrived(self, step: int) -> None:
        """The checkpoint has its name."""
        with self._lock:
            if step == self._expected and self._held is not None:
                self._write(step, *self._held)
            self._expected = self._held = None

    @property
    def expected(self) -> int | None:
        """The step whose checkpoint is on its way."""
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
            entries = json.loads(self._file.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise SourceError(
                f"{self._file}: cannot be read ({error}); delete it, and nothing is known of any checkpoint"
            ) from error
        return dict(entries)

    def _identity(self, step: int) -> str | None:
        """Tells a checkpoint from another one of the same step."""
        try:
            return hashlib.sha256((self._folder / str(step) / DIGESTS).read_bytes()).hexdigest()
        except OSError:
            return None
