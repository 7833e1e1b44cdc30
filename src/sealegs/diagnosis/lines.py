"""Lines of a log that are no numbers in, what the known ones among them mean out.

The table is ``lines.toml``. A phrase is a chain of substrings, looked for one after the other, so that a line costs its
length times the number of phrases, whoever wrote it.
"""

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal

import msgspec

from sealegs.record.log_lines import LogLine
from sealegs.record.run import Run

LONGEST = 500
"""Characters of a line that are looked at: a longer one is data."""
SHOWN, BEFORE = 90, 20
"""Characters of a line that are shown, and how many of them before what it is known by."""
CODE = (
    "raise ",
    "print(",
    "#",
    "def ",
    "assert ",
    "warnings.warn",
    "logger.",
    "logging.",
    "log.",
    "if ",
    "elif ",
    'f"',
    '"',
)
"""What a line of code begins with: some programs print their own source, and it says nothing of the run."""
GAP = "..."
"""Stands in a phrase for anything between two of its words."""


class Known(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"speaks_for": "for"}):
    """A kind of line whose meaning is known."""

    name: str
    says: tuple[str, ...]
    means: str
    at: Literal["onset", "before", "end", "any"]
    unless: tuple[str, ...] = ()
    speaks_for: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    weight: Literal["decides", "strong", "fits"] = "fits"
    is_end: bool = False

    def place_in(self, line: str) -> int | None:
        """Where a line in small letters begins to be of this kind; None if it is not."""
        place = min((at for phrase in self.says if (at := _place(line, phrase)) is not None), default=None)
        return None if place is None or any(word in line for word in self.unless) else place


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    line: tuple[Known, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownLine:
    """All lines of one kind in a log."""

    known: Known
    steps: tuple[int, ...]
    """The steps at which they stand, that of the last row before each; -1 before the first row. Of lines of one wording
    the first is known."""
    count: int
    text: str
    """The first of them, as far as it is shown."""
    is_last: bool
    """Whether one of them stands after the last row."""

    @property
    def is_the_end(self) -> bool:
        """Whether the log ends in such a line, and a run dies of it."""
        return self.is_last and self.known.is_end

    def told(self, last: int) -> str:
        """The lines in one sentence; ``last`` is the last step of the log."""
        first = self.steps[0]
        where = "before the first row" if first < 0 else f"at step {first}"
        if self.is_last and len(self.steps) == 1:
            where = f"after the last row, step {last}"
        often = f", the first of {self.count:,}" if self.count > 1 else ""
        return f'{self.known.means} ({where}{often}: "{self.text}")'


@cache
def known_kinds() -> tuple[Known, ...]:
    """Every kind of line that is known."""
    text = (resources.files("sealegs.diagnosis") / "lines.toml").read_text("utf-8")
    return msgspec.convert(tomllib.loads(text), _Table).line


def known_lines(run: Run) -> tuple[KnownLine, ...]:
    """The known lines of a run, by their kind, in the order of the first of each."""
    return kinds_of(run.lines, int(run.steps[-1]) if len(run.steps) else 0)


def kinds_of(lines: Iterable[LogLine], last: int) -> tuple[KnownLine, ...]:
    """The same of lines; ``last`` is the last step of the log."""
    found: dict[str, tuple[Known, str, list[LogLine]]] = {}
    for line in lines:
        lowered = line.text[:LONGEST].lower()
        if lowered.lstrip().startswith(CODE):
            continue
        for known in known_kinds():
            if (place := known.place_in(lowered)) is not None:
                found.setdefault(known.name, (known, _excerpt(line.text, place), []))[2].append(line)
                break
    return tuple(
        KnownLine(
            known=known,
            steps=tuple(-1 if one.step is None else one.step for one in alike),
            count=sum(one.count for one in alike),
            text=text,
            is_last=any(one.step is not None and one.step >= last for one in alike),
        )
        for known, text, alike in found.values()
    )


def _excerpt(text: str, place: int) -> str:
    """The part of a line that it is known by."""
    begin = 0 if len(text) <= SHOWN or place <= BEFORE else text.rfind(" ", 0, place - BEFORE // 2) + 1
    part = text[begin : begin + SHOWN].strip()
    return f"{'...' if begin else ''}{part}{'...' if begin + SHOWN < len(text) else ''}"


def _place(line: str, phrase: str) -> int | None:
    first, at = -1, 0
    for part in phrase.split(GAP):
        word = part.strip()
        place = line.find(word, at)
        if place < 0:
            return None
        first, at = place if first < 0 else first, place + len(word)
    return first
