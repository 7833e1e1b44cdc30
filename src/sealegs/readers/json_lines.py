"""Reads JSON lines with any nesting."""

from collections.abc import Iterator
from typing import Any

import msgspec

from sealegs.errors import SourceError
from sealegs.readers.place import Place
from sealegs.readers.table import Gathered, Table
from sealegs.record.reading import parse_json

FORMAT = "jsonl"
_decode = msgspec.json.Decoder().decode


def recognises(place: Place) -> bool:
    """Whether the first line is a JSON object by itself, and not the only thing in the file."""
    if not place.is_text:
        return False
    first, _, rest = place.head_text.lstrip().partition("\n")
    return first.startswith("{") and bool(rest.strip()) and isinstance(_object(first), dict)


def read(place: Place) -> Table:
    """Read one row per line. Lines that are not objects are left out and counted."""
    gathered = Gathered()
    damaged = 0
    is_row = True
    for line in _lines(place):
        row = _object(line)
        is_row = isinstance(row, dict)
        if is_row:
            gathered.add(row)
        damaged += not is_row
    if not gathered.names:
        raise SourceError(f"{place.source}: JSON lines without a number in them; not a training log")
    remarks = list(place.remarks)
    if not is_row:
        remarks.append("last line torn: left out")
    if damaged > (not is_row):
        remarks.append(f"{damaged - (not is_row)} lines are no JSON objects: left out")
    return Table(FORMAT, gathered.columns(damaged), tuple(remarks), known=gathered.settings)


def _lines(place: Place) -> Iterator[str]:
    for piece in place.lines():
        for line in piece.split("\n"):
            if line := line.strip():
                yield line


def _object(line: str) -> Any:
    """The value of a line, or None. Bare NaN and Infinity are not JSON, but Python writes them."""
    try:
        return _decode(line)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        try:
            return parse_json(line)
        except ValueError:
            return None
