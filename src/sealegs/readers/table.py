"""Collects rows or series of numbers into columns, which every reader returns."""

import math
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sealegs.readers.lines_kept import KeptLine
from sealegs.readers.setting_lines import Header
from sealegs.record.attempts import Launch, attempts_of
from sealegs.record.columns import Column, Columns, Mask
from sealegs.record.manifest import Manifest

MOST_NAMES = 20_000
"""The most columns. A run that logs each layer of a large model has a tenth of that."""
MOST_CELLS = 60_000_000
"""The most cells of all columns together, empty ones included: 540 MB. Beyond that, rare columns are left out."""
LONGEST_TEXT = 256
"""Bytes of a text that are kept; digests are shorter, and so are most lists of sources."""
_DEEPEST = 8
"""Slashes in the name of a nested value beyond which it is not a metric."""
TEXTS = ("batch_hash", "sources")
"""Columns whose cells are words, not numbers: a digest (of digits alone, even), ``web=6 books=2``."""
SETTINGS = ("dtype", "precision", "mixed_precision", "torch_dtype")
"""Columns whose words are a setting of the run: ``bf16`` in each row."""
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d*)?")


@dataclass(frozen=True)
class Table:
    """What a log holds, under its own names."""

    format: str
    columns: Columns
    remarks: tuple[str, ...] = ()
    known: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the run that the log holds besides, by their own names."""
    manifest: Manifest | None = None
    events: Path | None = None
    """The events file. Only our own run folders have a manifest and events."""
    lines: tuple[KeptLine, ...] = ()
    """A choice of the lines that are no rows."""
    headers: tuple[Header, ...] = ()
    """Settings that were printed, each where it stands among the rows; of the same names the last is in force."""
    launches: tuple[Launch, ...] = ()
    """Lines that may tell of a launch."""
    files: tuple[tuple[int, str], ...] = ()
    """Of a log in several files: the row at which each begins, and its name. Each is a launch."""


def number(text: str) -> float | None:
    """The number in a cell, or None.

    >>> number("1,234.5"), number(" nan "), number("-Infinity"), number("12%"), number("n/a")
    (1234.5, nan, -inf, 12.0, None)
    """
    try:
        return float(text)
    except ValueError:
        text = text.strip().removesuffix("%")
    try:
        return float(text.replace(",", "") if _THOUSANDS.fullmatch(text) else text)
    except ValueError:
        return None


def some_rows(columns: Columns, kept: Mask) -> Columns:
    """Some of the rows, and the columns that have a cell in them."""
    logged = {name: mask[kept] for name, mask in columns.logged.items() if mask[kept].any()}
    values = {name: columns.values[name][kept] for name in logged}
    return replace(columns, values=values, logged=logged, rows=int(kept.sum()))


class Gathered:
    """Collects rows. A cell costs 12 bytes and a missing one nothing, so rows may differ in what they have."""

    def __init__(self) -> None:
        self.rows = 0
        self._cells: dict[str, tuple[array[int], array[float]]] = {}
        self._texts: dict[str, dict[int, bytes]] = {}
        self.settings: dict[str, str] = {}
        """What the first row with such a word says of the run."""

    @property
    def names(self) -> list[str]:
        """The names of the columns of numbers so far."""
        return list(self._cells)

    def add(self, row: Mapping[str, Any]) -> None:
        """Add one row. Nested values get names with a slash; values that are not numbers are left out."""
        self._add_cells(row, "")
        self.rows += 1

    def add_many(self, rows: int, columns: Mapping[str, Sequence[str]]) -> None:
        """Add rows that all have the same cells, each a number as text."""
        for name, cells in columns.items():
            places, values = self._cells.setdefault(name, (array("I"), array("d")))
            places.extend(range(self.rows, self.rows + rows))
            values.extend(map(float, cells))
        self.rows += rows

    def _add_cells(self, row: Mapping[str, Any], prefix: str) -> None:
        cells, rows = self._cells, self.rows
        for key, value in row.items():
            name = prefix + key
            if type(value) is float and name in cells:  # nearly always
                places, values = cells[name]
                places.append(rows)
                values.append(value)
            elif isinstance(value, (float, int)):
                self._add_cell(name, value)
            elif name in TEXTS and isinstance(value, str):
                self._texts.setdefault(name, {})[rows] = value.encode(errors="replace")[:LONGEST_TEXT]
            elif isinstance(value, str):
                if (read := number(value)) is not None:
                    self._add_cell(name, read)
                elif name in SETTINGS:
                    self.settings.setdefault(name, value)
            elif isinstance(value, Mapping) and prefix.count("/") < _DEEPEST:
                self._add_cells(value, f"{name}/")

    def _add_cell(self, name: str, value: float) -> None:
        try:
            places, values = self._cells[name]
        except KeyError:
            if len(self._cells) >= MOST_NAMES:
                return
            places, values = self._cells[name] = (array("I"), array("d"))
        try:
            values.append(value)
        except OverflowError:  # an integer too large for a float
            values.append(math.inf if value > 0 else -math.inf)
        places.append(self.rows)

    def columns(self, damaged_lines: int = 0) -> Columns:
        """The columns, once. Where they would be too much to hold, those with the fewest cells are left out."""
        kept = _fullest({name: len(places) for name, (places, _) in self._cells.items()}, self.rows)
        values: dict[str, Column] = {}
        logged: dict[str, Mask] = {}
        for name in self.names:
            places, cells = self._cells.pop(name)  # one at a time: both copies of a long log would fill the memory
            if name in kept:
                at = np.frombuffer(places, np.uintc)
                values[name] = np.full(self.rows, np.nan)
                values[name][at] = np.frombuffer(cells, np.float64)
                logged[name] = np.zeros(self.rows, np.bool_)
                logged[name][at] = True
        for name in self._texts.keys() - values.keys():
            texts = self._texts[name]
            values[name] = np.array([texts.get(row, b"") for row in range(self.rows)], np.bytes_)
            logged[name] = np.array([row in texts for row in range(self.rows)], np.bool_)
        return Columns(values, logged, rows=self.rows, damaged_lines=damaged_lines)


class SeriesCollector:
    """Collects values one signal at a time: name, step and value, in the order they were written."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._cells: tuple[array[int], array[int], array[float]] = (array("q"), array("q"), array("d"))
        self._begun: list[tuple[int, str]] = []
        self.files: tuple[tuple[int, str], ...] = ()
        """The row at which each file begins that goes on with the most frequent signal; after ``columns``."""

    def __len__(self) -> int:
        return len(self._cells[0])

    def add(self, name: str, step: int, value: float) -> None:
        """Add one value."""
        names, steps, values = self._cells
        names.append(self._names.setdefault(name, len(self._names)))
        steps.append(step)
        values.append(value)

    def begin(self, file: str) -> None:
        """What is added from here on is of another file."""
        self._begun.append((len(self), file))

    def columns(self) -> Columns:
        """One row per step. A resume is where the most frequently logged signal goes back, or comes twice.

        Signals may come one after the other or interleaved: only a signal that goes back to itself shows a resume.
        """
        names = np.frombuffer(self._cells[0], np.int64)
        steps = np.frombuffer(self._cells[1], np.int64)
        if not len(names):
            return Columns({}, {})
        counts = np.bincount(names)
        most = names == np.argmax(counts)
        back = np.zeros(len(names), np.int64)
        back[most] = np.diff(attempts_of(steps[most], {"": most[most]}).of_rows, prepend=0)
        begun = {int(at): name for at, name in self._begun_with(most)}
        back[list(begun)] = np.maximum(back[list(begun)], 1)
        segments = np.cumsum(back)
        order = np.lexsort((np.arange(len(names)), steps, segments))
        new_row = np.ones(len(names), np.bool_)
        new_row[1:] = (np.diff(steps[order]) != 0) | (np.diff(segments[order]) != 0)
        row_of: NDArray[np.int64] = np.cumsum(new_row) - 1
        rows = int(row_of[-1]) + 1
        self.files = tuple((int(row_of[np.flatnonzero(order == at)[0]]), name) for at, name in begun.items())
        values: dict[str, Column] = {"step": steps[order][new_row].astype(np.float64)}
        logged: dict[str, Mask] = {"step": np.ones(rows, np.bool_)}
        cells = np.frombuffer(self._cells[2], np.float64)[order]
        kept = _fullest(dict(zip(self._names, counts.tolist(), strict=True)), rows)
        by_name = np.split(np.argsort(names[order], kind="stable"), np.cumsum(counts)[:-1])
        for name, mine in zip(self._names, by_name, strict=True):
            if name in kept:
                values[name] = np.full(rows, np.nan)
                logged[name] = np.zeros(rows, np.bool_)
                values[name][row_of[mine]] = cells[mine]
                logged[name][row_of[mine]] = True
        return Columns(values, logged, rows=rows)

    def _begun_with(self, most: Mask) -> Iterator[tuple[int, str]]:
        """Where each file begins to go on with a signal that an earlier file had, as a place among all values."""
        own = np.flatnonzero(most)
        ends = [*(at for at, _ in self._begun[1:]), len(self)]
        for (begin, name), end in list(zip(self._begun, ends, strict=False))[1:]:
            place = int(np.searchsorted(own, begin))
            if 0 < place < len(own) and own[place] < end:
                yield int(own[place]), name


def _fullest(cells: Mapping[str, int], rows: int) -> set[str]:
    """The columns with the most cells, as many as memory allows."""
    return set(sorted(cells, key=lambda name: -cells[name])[: max(1, MOST_CELLS // max(1, rows))])
