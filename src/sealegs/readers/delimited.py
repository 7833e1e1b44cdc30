"""Reads CSV and TSV files: Lightning's ``metrics.csv``, W&B's export, anybody's."""

import csv
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain

import numpy as np

from sealegs.errors import SourceError
from sealegs.readers.names import EPOCH, STEP, role
from sealegs.readers.place import Place
from sealegs.readers.table import MOST_NAMES, SETTINGS, Table, number
from sealegs.record.columns import Column, Columns, Mask

FORMAT = "csv"
_BAR = re.compile(r"%\||[\u2588-\u258f]|\bit/s|s/it\b")
"""A progress bar, which is no table of cells."""
_SENTENCE = re.compile(r"(?:debug|info|warning|error|critical)\b\s*:|(?:\S+\s+){7}\S", re.IGNORECASE)
"""A line of a program's log, or a sentence: no name of a column."""
_DELIMITERS = ",\t;|"
_WITH_COMMA = re.compile(r"[+-]?\d+,\d+(?:[eE][+-]?\d+)?")
_WITH_POINT = re.compile(r"[+-]?[\d,]*\.\d+(?:[eE][+-]?\d+)?")
_ABOUT = re.compile(r"\A#\{.*\n")
"""The first line of the tables that Stable-Baselines3's and Gym's monitors write: about the environment."""
_EPISODES: dict[tuple[str, ...], list[str]] = {("r", "l", "t"): ["episode_reward", "episode_length", "time"]}
"""The names in such a table, and what they mean."""
_LOOKED_AT = 20
"""Lines in which a table is recognised."""
_DENSE, _DENSE_ROWS = 0.95, 5
"""Share of the rows of a kind that must have a value if the others are NaN, and rows with one before a divergence."""
_FEW = 0.1
"""Share of the rows below which a column may be of rows of another kind, even if some of them have a value."""
_MISSING = frozenset(("", "None", "none", "null", "NULL", "NA", "N/A", "n/a", "<NA>", "-", "--"))


def recognises(place: Place) -> bool:
    """Whether the first lines have the same number of cells, with numbers below the names."""
    return place.is_text and _shape(place) is not None


def read(place: Place) -> Table:
    """Read one column per name. Empty cells are missing; cells that are not numbers are missing and counted."""
    shape = _shape(place)
    assert shape is not None, "only what was recognised is read"
    delimiter, header, names, has_commas = shape
    header_line = re.compile(rf"^{re.escape(header)}(?:\n|\Z)", re.MULTILINE)
    columns = [_Cells(name) for name in names]
    ragged = headers = 0
    ended = True
    for text in place.lines():
        ended = text.endswith("\n")
        text = _ABOUT.sub("", text)
        if header and header in text:
            text, found = header_line.subn("", text)
            headers += found
        text = text.replace(",", ".") if has_commas else text
        by_column, left_out = _split(text, delimiter, len(names))
        ragged += left_out
        for column, cells in zip(columns, by_column, strict=True):
            column.add(cells)
    remarks = list(place.remarks)
    torn = ragged > 0 and not ended
    if torn:
        remarks.append("last line torn: left out")
    if ragged > torn:
        remarks.append(f"{ragged - torn} lines have too many or too few cells: left out")
    if headers > 1:
        remarks.append(f"the header comes {headers} times")
    remarks += [f"{c.not_numbers} cells of {c.name} are no numbers: taken as missing" for c in columns if c.is_mixed]
    kept = [column for column in columns if column.is_any]
    if not kept:
        raise SourceError(f"{place.source}: a table without a row of numbers; not a training log yet")
    values, logged = {c.name: c.values() for c in kept}, {c.name: c.logged() for c in kept}
    known = {c.name: c.first_word for c in columns if c.name in SETTINGS and c.first_word}
    return Table(FORMAT, Columns(values, logged, len(values[kept[0].name]), ragged), tuple(remarks), known=known)


def nan_cells(columns: Columns, name: str) -> Mask:
    """Which empty cells of a column were NaN, which pandas writes as nothing.

    Rows are of the same kind if they log only what rows with a value log. If nearly all rows of that kind have a value,
    the others had NaN. The same holds for a diverged run: every row has a value up to one, and hardly any after it.
    """
    value = columns.logged[name]
    nothing = np.zeros(columns.rows, np.bool_)
    others = {other: mask for other, mask in columns.logged.items() if other != name}
    apart = (mask for mask in others.values() if _is_apart(mask, value))
    same_kind = ~np.logical_or.reduce([nothing, *apart])
    # the usual companions of a value must be there, except those that become NaN together with it
    company = [
        m for other, m in others.items() if not _is_loss_or_norm(other) and (m & value).sum() >= _DENSE * value.sum()
    ]
    same_kind &= (2 * np.sum([nothing, *company], axis=0) > len(company)) | (not company)
    # and those that are never NaN must be, all of them: without a rate, nothing was trained in a row
    steady = (m for other, m in others.items() if _is_never_nan(other) and (m & value).sum() >= _DENSE * value.sum())
    same_kind &= np.logical_and.reduce([~nothing, *steady])
    with_value = value[same_kind]
    if with_value.all() or not with_value.any():
        return nothing
    first_empty = int(np.argmin(with_value))
    diverged = first_empty >= _DENSE_ROWS and with_value[first_empty:].mean() < 1 - _DENSE
    was_nan: Mask = same_kind & ~value & bool(with_value.mean() >= _DENSE or diverged)
    return was_nan


def _is_never_nan(name: str) -> bool:
    found = role(name)
    return found is not None and found.signal in ("lr", STEP, EPOCH)


def _is_apart(mask: Mask, value: Mask) -> bool:
    """Whether a column is of rows of another kind: none has the value, or few of a few, as where a row of an evaluation
    is written apart from the others."""
    both, own = int((mask & value).sum()), int(mask.sum())
    return not both or (2 * both < own and own < _FEW * len(mask))


def _is_loss_or_norm(name: str) -> bool:
    found = role(name)
    return found is not None and found.signal in ("loss", "eval_loss", "grad_norm")


class _Cells:
    """One column while it is being read."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.not_numbers = 0
        self.first_word = ""
        self.is_any = False
        self._is_text = False
        self._values: list[Column] = []
        self._logged: list[Mask] = []

    @property
    def is_mixed(self) -> bool:
        return self.is_any and self.not_numbers > 0

    def values(self) -> Column:
        return np.concatenate(self._values)

    def logged(self) -> Mask:
        return np.concatenate(self._logged)

    def add(self, cells: Column | list[str]) -> None:
        if isinstance(cells, np.ndarray):
            values, logged = cells, np.ones(len(cells), np.bool_)
        elif self._is_text:
            values, logged = np.full(len(cells), np.nan), np.zeros(len(cells), np.bool_)
        else:
            values, logged = self._read(cells)
        self.is_any = self.is_any or bool(logged.any())
        # after a thousand words the column is text: parsing each cell would be slow
        self._is_text = not self.is_any and self.not_numbers > 1000
        self._values.append(values)
        self._logged.append(logged)

    def _read(self, cells: Sequence[str]) -> tuple[Column, Mask]:
        try:
            return np.array(cells, np.float64), np.ones(len(cells), np.bool_)
        except ValueError:
            logged = np.array([cell.strip() not in _MISSING for cell in cells], np.bool_)
        try:
            there = np.array(
                [cell for cell, is_there in zip(cells, logged.tolist(), strict=True) if is_there], np.float64
            )
        except ValueError:
            read = [number(cell) if is_there else None for cell, is_there in zip(cells, logged.tolist(), strict=True)]
            understood = np.array([value is not None for value in read], np.bool_)
            self.not_numbers += int(logged.sum() - understood.sum())
            words = logged & ~understood
            self.first_word = self.first_word or (cells[int(np.argmax(words))].strip() if words.any() else "")
            logged = understood
            there = np.array([value for value in read if value is not None], np.float64)
        values = np.full(len(cells), np.nan)
        values[logged] = there
        return values, logged


def _shape(place: Place) -> tuple[str, str, list[str], bool] | None:
    """The delimiter, the line with the names (empty if there is none), the names, and whether 2,5 is two and a half."""
    head = _ABOUT.sub("", place.head_text)
    lines = [line for line in head.split("\n", _LOOKED_AT)[:_LOOKED_AT] if line.strip()]
    if len(lines) > 2 and not place.head_text.endswith("\n"):
        lines = lines[:-1]  # the last line may be torn
    if not lines or lines[0].lstrip()[:1] in "{[":
        return None
    for delimiter in _DELIMITERS:
        if delimiter == "|" and any(map(_BAR.search, lines)):
            continue
        try:
            first, *below = ([cell.strip() for cell in row] for row in csv.reader(lines, delimiter=delimiter))
        except (csv.Error, ValueError):
            continue
        named = not any(map(_is_number, first))
        if (len(first) < 2 and not (below and all(map(_is_number, chain(*below))))) or len(first) > MOST_NAMES:
            continue
        if named and any(map(_SENTENCE.search, first)):
            continue
        if not named and "\x1b" in lines[0]:  # the numbers of colours have semicolons between them
            continue
        rows = below if named else [first, *below]
        if has_commas := delimiter != "," and _has_decimal_commas(chain(*rows)):
            rows = [[cell.replace(",", ".") for cell in row] for row in rows]
        least = 1 if named else -(-len(first) // 2)  # "tok/sec: 1,234,567" is no table
        fitting = sum(len(row) == len(first) and sum(map(_is_number, row)) >= least for row in rows)
        if not rows or fitting < 0.8 * len(rows):
            continue
        header, names = (lines[0], _names(first)) if named else ("", _names([""] * len(first)))
        return delimiter, header, names, has_commas
    return None


def _has_decimal_commas(cells: Iterable[str]) -> bool:
    """Whether numbers are written as many languages write them: 2,5 and no 2.5. Of 1,234 alone nobody knows."""
    told = [cell for cell in cells if _WITH_COMMA.fullmatch(cell) or _WITH_POINT.fullmatch(cell)]
    is_sure = any(len(cell.partition(",")[2]) != 3 for cell in told)
    return bool(told) and is_sure and all(map(_WITH_COMMA.fullmatch, told))


def _is_number(cell: str) -> bool:
    return number(cell) is not None


def _names(cells: Sequence[str]) -> list[str]:
    names: list[str] = []
    taken: set[str] = set()  # searching the list is too slow for a hundred thousand names
    for place, cell in enumerate(cells, 1):
        name = cell.lstrip("#").strip() or f"column {place}"
        names.append(f"{name} ({place})" if name in taken else name)
        taken.add(names[-1])
    return _EPISODES.get(tuple(names), names)


def _split(text: str, delimiter: str, width: int) -> tuple[Sequence[Column | list[str]], int]:
    """The cells of each column, and the number of lines left out. Three ways, the fastest first."""
    if not text.strip():
        return [[] for _ in range(width)], 0
    with suppress(ValueError):  # an empty cell, a word, a line that is too long or too short
        numbers = np.loadtxt(text.split("\n"), delimiter=delimiter, comments=None, quotechar='"', ndmin=2)
        if numbers.shape[1] == width:
            return list(numbers.T), 0
    if '"' not in text and "\n\n" not in f"\n{text}":
        cells = text.removesuffix("\n").replace("\n", f"{delimiter}\n").split(delimiter)
        lines = len(cells) // width
        # a line end before the first cell of each line but the first, and nowhere else
        if len(cells) == lines * width and "".join(cells[::width]).count("\n") == text[:-1].count("\n") == lines - 1:
            return [cells[nth::width] for nth in range(width)], 0
    return _parsed(text, delimiter, width)


def _parsed(text: str, delimiter: str, width: int) -> tuple[list[list[str]], int]:
    rows = []
    left_out = 0
    reader = csv.reader((line for line in text.split("\n") if line.strip()), delimiter=delimiter)
    while True:
        try:
            row = next(reader)
        except StopIteration:
            break
        except csv.Error:
            left_out += 1
            continue
        if len(row) == width:
            rows.append(row)
        else:
            left_out += 1
    return [list(cells) for cells in zip(*rows, strict=True)] or [[] for _ in range(width)], left_out
