"""What is thrown: files by their paths, some of them no files at all; and a case, which is a sample and a command."""

import base64
import json
import os
import socket
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self


class Special(NamedTuple):
    """Something that is not a regular file of a sane size."""

    kind: str
    """``fifo``, ``folder``, ``link``, ``socket`` or ``sparse``."""
    to: str = ""
    """Where a link leads: ``{outside}`` is a folder beside the sandbox."""

    def make(self, path: Path, outside: Path) -> None:
        """Put it there."""
        match self.kind:
            case "fifo":
                os.mkfifo(path)
            case "folder":
                path.mkdir()
            case "link":
                path.symlink_to(self.to.replace("{outside}", str(outside)))
            case "socket":
                with socket.socket(socket.AF_UNIX) as server:
                    here = Path.cwd()
                    os.chdir(path.parent)  # the name of a socket is short
                    try:
                        server.bind(path.name[:100])
                    finally:
                        os.chdir(here)
            case "sparse":
                with path.open("wb") as file:
                    file.truncate(1 << 42)
            case _:
                raise ValueError(self.kind)


Content = bytes | Special

SPECIALS = (
    Special("fifo"),
    Special("folder"),
    Special("socket"),
    Special("sparse"),
    Special("link", "{outside}/secret"),
    Special("link", "/dev/zero"),
    Special("link", "."),
    Special("link", "nowhere"),
    Special("link", "loop"),
)


@dataclass(frozen=True)
class Sample:
    """Files by their paths, ``""`` where it is a single one."""

    seed: str
    """The name of the sample that it was made of."""
    files: dict[str, Content]

    def write(self, path: Path, outside: Path) -> None:
        """Put it there, as a file or a folder."""
        for name, content in self.files.items():
            place = path / name if name else path
            try:
                place.parent.mkdir(parents=True, exist_ok=True)
                if isinstance(content, bytes):
                    place.write_bytes(content)
                else:
                    content.make(place, outside)
            except (OSError, ValueError):  # it lies in what is no folder any more, or no file can have that name
                continue

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(len(content) for content in self.files.values() if isinstance(content, bytes))

    def changes(self, seed: "Sample") -> dict[str, Content | None]:
        """What is other than in the seed; None is what is missing."""
        names = {**seed.files, **self.files}
        return {name: self.files.get(name) for name in names if self.files.get(name) != seed.files.get(name)}


def sample_of(name: str, path: Path) -> Sample:
    """A file or a folder as a sample."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return Sample(name, {"" if file == path else str(file.relative_to(path)): file.read_bytes() for file in files})


@dataclass(frozen=True)
class Case:
    """A sample, and what is done with it."""

    target: str
    sample: Sample
    command: tuple[str, ...]
    """The words of a command, ``{}`` for the sample."""
    seen: str = ""
    """The place in the code where it broke, once."""
    extra: dict[str, Any] = field(default_factory=dict)

    def to_json(self, seed: Sample) -> str:
        """The case in a file, as what it changes of its seed."""
        changes = {name: _packed(content) for name, content in self.sample.changes(seed).items()}
        about = {"target": self.target, "seed": seed.seed, "command": list(self.command), "seen": self.seen}
        return json.dumps({**about, "changes": changes}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, seeds: dict[str, Sample]) -> Self:
        """The inverse of ``to_json``."""
        about = json.loads(text)
        seed = seeds[about["seed"]]
        files: dict[str, Content] = dict(seed.files)
        for name, packed in about["changes"].items():
            content = _unpacked(packed)
            if content is None:
                files.pop(name, None)
            else:
                files[name] = content
        return cls(about["target"], Sample(seed.seed, files), tuple(about["command"]), about["seen"])


def _packed(content: Content | None) -> Any:
    if content is None:
        return None
    if isinstance(content, Special):
        return list(content)
    try:
        text = content.decode()
        if len(text) < 4000 and "\0" not in text:
            return text
    except UnicodeDecodeError:
        pass
    return {"zlib": base64.b64encode(zlib.compress(content, 9)).decode()}


def _unpacked(packed: Any) -> Content | None:
    match packed:
        case None:
            return None
        case str():
            return packed.encode()
        case [kind, to]:
            return Special(kind, to)
        case {"zlib": text}:
            return zlib.decompress(base64.b64decode(text))
    raise ValueError(packed)
