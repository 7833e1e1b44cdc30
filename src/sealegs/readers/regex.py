"""Reads text lines with the user's own regular expression: one named group per signal."""

import re

from sealegs.errors import SourceError
from sealegs.readers.place import Place
from sealegs.readers.table import Gathered, Table

FORMAT = "pattern"


def read(place: Place, pattern: str) -> Table:
    """Read one row from each line that matches the pattern."""
    try:
        regex = re.compile(pattern)
    except re.error as error:
        raise SourceError(f"--pattern {pattern!r}: not a regular expression ({error})") from error
    if not regex.groupindex:
        raise SourceError(f"--pattern {pattern!r}: name the groups after signals, as in (?P<loss>[\\d.]+)")
    gathered = Gathered()
    for piece in place.lines():
        for line in piece.split("\n"):
            if found := regex.search(line):
                gathered.add(found.groupdict())
    if not gathered.names:
        raise SourceError(
            f"{place.source}: no line has what --pattern {pattern!r} looks for; try it on one of its lines"
        )
    return Table(FORMAT, gathered.columns(), tuple(place.remarks))
