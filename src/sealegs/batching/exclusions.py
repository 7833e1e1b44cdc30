"""The list of documents to drop or to read last: ``sealegs scan`` writes it, a person may edit it, a trainer reads it.

It has one JSON object per line. The first says how many documents each file has: a list for other data is refused. The
others name a document by its file and its number in it, from 0, and say what to do with it.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sealegs.errors import SourceError

Ints: TypeAlias = NDArray[np.int64]

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class LeftOut:
    """The documents of a file to drop, and those to read last."""

    documents: int
    """Number of documents in the file."""
    dropped: Ints
    deferred: Ints


def write_list(file: BinaryIO, sizes: Mapping[str, int], listed: Iterable[Mapping[str, Any]]) -> None:
    """Write the list into an open file. Each of ``listed`` has file, document, action, and whatever helps a reader."""
    for line in ({"schema": SCHEMA, "files": dict(sizes)}, *listed):
        file.write(json.dumps(line, ensure_ascii=False).encode(errors="replace") + b"\n")


def read_list(path: Path) -> dict[str, LeftOut]:
    """Read the list, by file."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{path}: cannot be read ({error}); give the documents.jsonl of a scan") from error
    found: dict[str, dict[str, set[int]]] = {}
    sizes: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        try:
            said = json.loads(line)
            if number == 1:
                if said["schema"] > SCHEMA:
                    raise SourceError(f"{path}: schema {said['schema']}, this Sealegs reads up to {SCHEMA}")
                sizes = {str(name): int(size) for name, size in said["files"].items()}
                found = {name: {"drop": set(), "defer": set()} for name in sizes}
            else:
                if not 0 <= said["document"] < sizes[said["file"]]:
                    raise ValueError("there is no such document")
                found[said["file"]][said["action"]].add(int(said["document"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SourceError(
                f"{path}: line {number} is not one of a list of documents ({error!r}); make it anew with sealegs scan"
            ) from error
    return {name: LeftOut(sizes[name], _array(each["drop"]), _array(each["defer"])) for name, each in found.items()}


def _array(numbers: set[int]) -> Ints:
    return np.array(sorted(numbers), np.int64)
