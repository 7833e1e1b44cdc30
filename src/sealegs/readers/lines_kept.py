"""Keeps a bounded choice of the lines that are no rows: warnings, errors, words about checkpoints.

Programs print the same line a million times with other numbers in it. So lines are told apart by their wording without
digits, the first of each wording is kept, and lines that tell of trouble have room of their own.
"""

import re
from dataclasses import dataclass

LONGEST = 400
"""Characters of a line that are kept."""
MOST_ORDINARY, MOST_TELLING, LAST = 100, 300, 20
"""The most lines kept: of any wording, of wordings that tell of something, and the last ones whatever they say."""
_MOST_WORDINGS = 5000
_NO_DIGITS = str.maketrans("", "", "0123456789")
_TELLING = re.compile(
    r"warn|error|exception|traceback|fatal|fail|nan\b|\binf\b|overflow|underflow|skip|checkpoint|resum|restor|reload|"
    r"rollback|rewind|restart|launch|out of memory|oom\b|killed|signal|segmentation|abort|timeout|timed out|"
    r"\bxid\b|\becc\b|nccl|cuda|exhaust|stopiteration|mismatch|missing|unexpected|not used|ignored|deprecat|"
    r"promot|dtype|precision|ignore_index|label|mask|scheduler|detected|diverg|spike|unstable|clip|loss scale|"
    r"cancel|preempt|no space|corrupt|hang|stuck|straggler|slow",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class KeptLine:
    """A line, and where it stands among the rows."""

    row: int
    """The number of rows before it."""
    text: str
    count: int


@dataclass(slots=True)
class _Kept:
    at: int
    row: int
    text: str
    count: int = 1


class LinesKept:
    """Chooses among the lines of a log as they come."""

    def __init__(self) -> None:
        self._seen = 0
        self._kept: dict[str, _Kept | None] = {}
        self._ordinary = self._telling = 0
        self._last: list[_Kept] = []

    def see(self, line: str, row: int) -> None:
        """Take a line that is no row, ``row`` rows having come before it."""
        self._seen += 1
        wording = line.translate(_NO_DIGITS)
        known = self._kept.get(wording)
        if known is not None:
            known.count += 1
            return
        if wording in self._kept or not wording.strip():
            return
        text = line.strip()
        one = _Kept(self._seen, row, text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}...")
        is_telling = _TELLING.search(line, 0, 2000) is not None
        has_room = self._telling < MOST_TELLING if is_telling else self._ordinary < MOST_ORDINARY
        self._telling += is_telling and has_room
        self._ordinary += not is_telling and has_room
        if has_room:
            self._kept[wording] = one
            return
        if len(self._kept) < _MOST_WORDINGS:
            self._kept[wording] = None
        self._last.append(one)
        if len(self._last) > 2 * LAST:
            del self._last[:-LAST]

    def lines(self) -> tuple[KeptLine, ...]:
        """The lines that were kept, in their order."""
        kept = [*(one for one in self._kept.values() if one is not None), *self._last[-LAST:]]
        return tuple(KeptLine(one.row, one.text, one.count) for one in sorted(kept, key=lambda one: one.at))
