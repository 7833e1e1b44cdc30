"""Reads a file with one JSON value that has the history of a run somewhere in it."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sealegs.errors import SourceError
from sealegs.readers import json_lines, trainer_state
from sealegs.readers.place import Place
from sealegs.readers.table import Gathered, Table
from sealegs.record.reading import parse_json

FORMAT = "json"
_BEGINS = re.compile(r'\s*(?:\[\s*[\[{]|\{\s*["}])')
_DEEPEST = 6


def recognises(place: Place) -> bool:
    """Whether the file begins with a JSON value that goes on after its first line."""
    return (
        place.is_text
        and _BEGINS.match(place.head_text) is not None
        and not json_lines.recognises(place)
        and not trainer_state.recognises(place)
    )


def read(place: Place) -> Table:
    """Read the longest history in the value: a list of rows, or a column of numbers under each name."""
    try:
        value = parse_json(place.whole())
    except ValueError as error:
        raise SourceError(f"{place.source}: not whole as JSON ({str(error)[:80]}); give a sound copy") from error
    histories = list(_histories(value, 0))
    if not histories:
        raise SourceError(f"{place.source}: JSON without a list of rows or columns of numbers; not a training log")
    gathered = Gathered()
    for row in max(histories, key=len):
        gathered.add(row)
    return Table(FORMAT, gathered.columns(), tuple(place.remarks), known=gathered.settings)


def _histories(value: Any, depth: int) -> Iterator[Sequence[Mapping[str, Any]]]:
    """Candidates for the history of a run: rows as objects, or lists of numbers side by side."""
    inner: list[Any] = []
    if isinstance(value, list):
        rows = [row for row in value if isinstance(row, dict)]
        if rows:
            yield rows
        inner = value[:8]  # a history lies near the surface, and a list may be long
    elif isinstance(value, dict):
        lists = {name: cells for name, cells in value.items() if _is_column(cells)}
        if lists:
            longest = max(map(len, lists.values()))
            yield [{name: cells[i] for name, cells in lists.items() if i < len(cells)} for i in range(longest)]
        inner = list(value.values())
    for item in inner if depth < _DEEPEST else []:
        yield from _histories(item, depth + 1)


def _is_column(cells: Any) -> bool:
    return isinstance(cells, list) and bool(cells) and all(isinstance(x, int | float | str | None) for x in cells[:64])
