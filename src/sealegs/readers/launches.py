"""Finds where a text log tells that the run was launched anew or went back to a checkpoint.

A line that speaks of loading a checkpoint does not yet tell that: programs load weights to start from, or the best
checkpoint to test it. It counts where the steps go back, where settings are printed anew, or where it names the step
that the rows go on from.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sealegs.readers.lines_kept import LONGEST
from sealegs.readers.setting_lines import Header, merged
from sealegs.record.attempts import Launch
from sealegs.record.manifest import dotted

MOST = 1000
"""The most lines that are remembered."""
_NEAR = 3
"""Rows after a line in which steps may go back because of what it tells."""
_ANEW = "settings are printed anew"
_HINTS = ("oad", "esum", "estor", "ontinu", "olling back", "olled back", "ewind", "estart")
_TELLS = re.compile(
    r"\bload(?:ed|ing)?\b.{0,60}\b(?:checkpoints?|ckpt|states?)\b|\b(?:resum|restor)(?:e|ed|es|ing)\b"
    r"|\b(?:checkpoint|ckpt|state)s?\b.{0,80}\b(?:loaded|restored)\b|\bcontinu(?:e|ed|ing) (?:training|from)\b"
    r"|\b(?:rolling|rolled) back\b|\brewind(?:ing)?\b|\brestart(?:ed|ing)? (?:training|from|the run|run)\b",
    re.IGNORECASE,
)
_TELLS_NOT = re.compile(
    r"\bsav(?:ed?|ing)\b|\bno checkpoint|not (?:found|load|resum|restor)|could ?n[o']t|cannot|unable|failed|\bbest\b"
    r"|evaluat|\bpre-?trained\b|shards|tokenizer|from scratch|\bif\b|\bwill not\b"
    r"|\bresume(?:_\w+)?\s*[=:.]|\bfalse\b|\bnone\b",
    re.IGNORECASE,
)
_WHOLE = re.compile(r"(?<![\d.])\d{1,15}(?![\d.]*\d)")


class LaunchLines:
    """Remembers the lines that may tell of a launch, as they come."""

    def __init__(self) -> None:
        self.found: list[Launch] = []

    def see(self, line: str, row: int) -> None:
        """Look at a line that is no row, ``row`` rows having come before it."""
        if not any(hint in line for hint in _HINTS) or len(self.found) >= MOST:
            return
        line = line[: 2 * LONGEST]
        if _TELLS.search(line) and not _TELLS_NOT.search(line):
            self.found.append(Launch(row, line.strip()[:LONGEST]))


def launches_of(
    lines: Sequence[Launch],
    headers: Sequence[Header],
    files: Iterable[tuple[int, str]],
    known: Mapping[str, Any],
    steps: NDArray[np.int64],
) -> tuple[Launch, ...]:
    """The launches of a log whose rows have these steps; the settings in force at its beginning are one at row 0."""
    back = set((np.flatnonzero(np.diff(steps) < 0) + 1).tolist())
    rows = len(steps)
    told: dict[int, str] = {}
    for line in lines:
        if not 0 < line.row < rows:
            continue
        row = next((row for row in range(line.row, line.row + _NEAR + 1) if row in back), line.row)
        if row in back or _names_step(line.told_by, int(steps[row - 1]), int(steps[row])):
            told.setdefault(row, line.told_by)
    for row, name in files:
        if 0 < row < rows:
            told.setdefault(row, next((line.told_by for line in lines if line.row == row), f"{name} begins"))
    settings: dict[int, dict[str, Any]] = {}
    for header in headers:
        row = next((row for row in range(header.row, header.row + _NEAR + 1) if row in back), header.row)
        begins = 0 if row <= _NEAR and row not in back else row
        if begins < rows:
            settings[begins] = merged(settings.get(begins, {}), header.settings)
    found: list[Launch] = []
    so_far: dict[str, Any] = dict(known)
    for row in sorted({0, *told, *settings}):
        if row in settings:
            so_far = merged(so_far, settings[row])
        text = told.get(row, next((line.told_by for line in lines if line.row == row), _ANEW))
        found.append(Launch(row, text if row else "", dict(dotted(so_far)) if row in settings or not row else None))
    return tuple(found)


def _names_step(text: str, before: int, after: int) -> bool:
    """Whether a text names the step before a row, that row's, or one between them."""
    return any(before <= int(word) <= after for word in _WHOLE.findall(text))
