"""Makes rows such that what is written can be read again: names that can be shown, numbers that a float holds.

Standard library only, because a watch uses it live.
"""

import zlib
from dataclasses import dataclass, field
from typing import Any

from sealegs.record.reading import parse_json
from sealegs.record.schema import SIGNALS, TEXT_SIGNALS, unspell
from sealegs.vocabulary import Number, Row

LONGEST_NAME = 256
HIGHEST_STEP = 2**53
"""Floats represent every integer up to this one."""
COUNTS = "token_loss_histogram"
"""The signal whose text is a list of counts."""
_MOST_NOTICES, _MOST_NAMED = 10, 12


@dataclass(frozen=True, slots=True)
class RowNotice:
    """What had to be changed about the signals of a row: to be told once."""

    renamed: dict[str, str] = field(default_factory=dict)
    """The new names of signals, by the old ones."""
    left_out: dict[str, str] = field(default_factory=dict)
    """The type of signals that are neither numbers nor text, by their names."""
    is_last: bool = False
    """Whether no more is told, because there is no end to it."""

    def plain(self) -> dict[str, Any]:
        """The notice as the details of an event, with a few names for many."""
        parts = ("renamed", self.renamed), ("left_out", self.left_out)
        few = {what: dict(list(names.items())[:_MOST_NAMED]) for what, names in parts if names}
        more = sum(max(0, len(names) - _MOST_NAMED) for _, names in parts)
        return {**few, **({"more": more} if more else {}), **({"is_last": True} if self.is_last else {})}


class SoundRows:
    """Makes every row readable, and remembers what it has told."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._left_out: set[str] = set()
        self._notices = 0

    def sound(self, row: Row) -> tuple[Row, RowNotice | None]:
        """The row as it can be written, and a notice where something new had to be changed."""
        names = self._names
        for name, value in row.items():
            if names.get(name) != name or not (type(value) is float or _is_sound(value)):
                return self._mend(row)
        return row, None

    def _mend(self, row: Row) -> tuple[Row, RowNotice | None]:
        mended: dict[str, Number | str] = {}
        renamed, left_out = {}, {}
        for name, value in row.items():
            if name not in self._names:
                self._names[name] = sound_name(name)
                if self._names[name] != name:
                    renamed[spelt(name)] = self._names[name]
            found = value if _is_sound(value) else _spelt_counts(value) if name == COUNTS else _sound_value(value)
            if found is not None:
                mended[self._names[name]] = found
            elif name not in self._left_out:
                self._left_out.add(name)
                left_out[self._names[name]] = type(value).__name__
        if not (renamed or left_out) or self._notices == _MOST_NOTICES:
            return mended, None
        self._notices += 1
        return mended, RowNotice(renamed, left_out, is_last=self._notices == _MOST_NOTICES)


def read_row(line: bytes | str) -> Row | None:
    """The row of a line, if it is one: a step, and what else is a number or text.

    >>> read_row(b'{"step": 3, "loss": "NaN", "culprit": "w", "lr": [1]}')
    {'step': 3, 'loss': nan, 'culprit': 'w'}
    """
    try:
        values = parse_json(line)
    except ValueError:
        return None
    step = values.get("step") if isinstance(values, dict) else None
    if not isinstance(step, int | float) or isinstance(step, bool) or not abs(step) <= HIGHEST_STEP:
        return None
    row: dict[str, Number | str] = {"step": int(step)}
    for name, spelt in values.items():
        value = unspell(spelt)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if name != "step" and (is_number or (isinstance(value, str) and not is_numeric(name))):
            row[sound_name(name)] = value
    return row


def is_numeric(name: str) -> bool:
    """Whether a signal of this name is always a number, as ours are but for a few; a user's own may be text."""
    family = name.partition("/")[0]
    return (family in SIGNALS and family not in TEXT_SIGNALS) or name in ("time", "applied")


def is_sound_name(name: str) -> bool:
    """Whether a signal may have the name: a page can show it, and a row that has it can be read again."""
    return name.isprintable() and '"' not in name and "\\" not in name and len(name) <= LONGEST_NAME


def sound_name(name: str) -> str:
    """A name that a signal may have: itself, or one that is made of it, always the same.

    >>> sound_name("grad_norm/blocks.3"), sound_name('grad_norm/a"b')
    ('grad_norm/blocks.3', 'grad_norm/a_b-7aa52f22')
    """
    if is_sound_name(name):
        return name
    shown = "".join(letter if is_sound_name(letter) else "_" for letter in name[: LONGEST_NAME - 9])
    return f"{shown}-{zlib.crc32(name.encode(errors='surrogatepass')):08x}"


def spelt(name: str) -> str:
    """Any name in letters that can be shown.

    >>> spelt("a\\nb")
    'a\\\\nb'
    """
    return ascii(name)[1:-1][:LONGEST_NAME]


def _is_sound(value: Any) -> bool:
    return isinstance(value, float | str) or (isinstance(value, int) and -HIGHEST_STEP <= value <= HIGHEST_STEP)


def _sound_value(value: Any) -> float | None:
    """The number in a value that is written differently; None if there is none."""
    if not isinstance(value, int):
        return None
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def _spelt_counts(value: Any) -> str | None:
    """The text of a list of counts; None if it is something else.

    >>> _spelt_counts([0, 3, 1]), _spelt_counts([-1])
    ('0 3 1', None)
    """
    is_counts = isinstance(value, list | tuple) and all(type(each) is int and each >= 0 for each in value)
    return " ".join(map(str, value)) if value and is_counts else None
