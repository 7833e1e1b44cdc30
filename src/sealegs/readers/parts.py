"""Several files of one run, as launches leave them (slurm-1.out and slurm-2.out, log.txt and log.1.txt), as one."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from sealegs.readers.place import Place
from sealegs.readers.table import Table
from sealegs.record.columns import Column, Columns, Mask

MOST = 200
"""The most files of a run."""
_DIGITS = re.compile(r"[._-]?\d+")
_ROTATED = re.compile(r"\.(\d{1,3})(?:\.gz)?$")
_TIME = re.compile(r"\b(20\d\d)-?([01]\d)-?([0-3]\d)[T _]([0-2]\d):?([0-5]\d):?([0-5]\d)\b")
_LAUNCHED = re.compile(
    r"(?:slurm|logs?|train(?:ing|er)?|out(?:put)?|stdout|stderr|console|nohup|job|attempt|restart|resumed?|part|launch|"
    r"metrics|main|err)+",
    re.IGNORECASE,
)
"""Names that launches give to their files; names of other words are of other runs."""


def are_parts(paths: Sequence[Path]) -> bool:
    """Whether files in a folder have names that differ in their numbers alone, and that launches give.

    >>> are_parts([Path("a/slurm-11.out"), Path("a/slurm-12.out")]), are_parts([Path("log.txt"), Path("log.1.txt")])
    (True, True)
    >>> are_parts([Path("seed1.log"), Path("seed2.log")]), are_parts([Path("a/log.txt"), Path("b/log.txt")])
    (False, False)
    """
    if not 1 < len(paths) <= MOST or len({path.parent for path in paths}) > 1:
        return False
    names = {_DIGITS.sub("", path.name) for path in paths}
    return len(names) == 1 and _LAUNCHED.fullmatch(re.sub(r"[\W_]", "", next(iter(names)).split(".")[0])) is not None


def in_order(places: Sequence[Place]) -> list[Place]:
    """The files in the order they were written: by the first time in each, else by the numbers in their names.

    A log that is set aside when it is full gets a number at its end; the one without is the newest, and then .1.
    """
    times = [_TIME.search(place.head_text) for place in places]
    if all(times):
        keyed = zip((found.groups() for found in times if found), places, strict=True)
        return [place for _, place in sorted(keyed, key=lambda pair: pair[0])]
    if any(_ROTATED.search(place.path.name) for place in places):
        return sorted(places, key=lambda place: -int(found[1]) if (found := _ROTATED.search(place.path.name)) else 0)
    return sorted(places, key=lambda place: [int(word) for word in re.findall(r"\d+", place.path.name)])


def joined(tables: Sequence[tuple[str, Table]]) -> Table:
    """One table of several, by the names of their files, with a launch where each begins."""
    names = dict.fromkeys(name for _, table in tables for name in table.columns.values)
    kept = {name: _joined(name, [table.columns for _, table in tables]) for name in names}
    rows = [table.columns.rows for _, table in tables]
    begins = [0, *np.cumsum(rows).tolist()]
    shifted = list(zip(begins, tables, strict=False))
    return replace(
        tables[0][1],
        columns=Columns(
            {name: values for name, (values, _) in kept.items()},
            {name: logged for name, (_, logged) in kept.items()},
            rows=sum(rows),
            damaged_lines=sum(table.columns.damaged_lines for _, table in tables),
        ),
        remarks=tuple(f"{name}: {remark}" for name, table in tables for remark in table.remarks),
        lines=tuple(replace(one, row=one.row + at) for at, (_, table) in shifted for one in table.lines),
        headers=tuple(one._replace(row=one.row + at) for at, (_, table) in shifted for one in table.headers),
        launches=tuple(replace(one, row=one.row + at) for at, (_, table) in shifted for one in table.launches),
        files=tuple((at, name) for at, (name, _) in shifted),
    )


def _joined(name: str, columns: Sequence[Columns]) -> tuple[Column, Mask]:
    """A column of several tables, with nothing where a table does not have it."""
    is_text = any(each.values[name].dtype.kind == "S" for each in columns if name in each.values)
    nothing = b"" if is_text else np.nan
    values = [each.values.get(name, np.full(each.rows, nothing)) for each in columns]
    logged = [each.logged.get(name, np.zeros(each.rows, np.bool_)) for each in columns]
    return np.concatenate(values), np.concatenate(logged)
