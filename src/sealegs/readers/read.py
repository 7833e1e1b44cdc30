"""Reads any training log into a ``Log``: a ``Run`` with our signal names, and notices about what had to be done."""

import functools
import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from sealegs.errors import SourceError
from sealegs.readers import (
    delimited,
    json_file,
    json_lines,
    mlflow,
    names,
    parts,
    regex,
    run_folder,
    settings_files,
    tensorboard,
    text,
    trackio,
    trainer_state,
    wandb,
)
from sealegs.readers.contract import Reader
from sealegs.readers.kind_names import changed, plain
from sealegs.readers.launches import launches_of
from sealegs.readers.place import Place
from sealegs.readers.setting_lines import merged
from sealegs.readers.steps import Steps, number_rows
from sealegs.readers.table import Table
from sealegs.record import run as runs
from sealegs.record.attempts import Launch
from sealegs.record.columns import Columns
from sealegs.record.log_lines import LogLine
from sealegs.record.manifest import Manifest
from sealegs.record.reading import is_inside
from sealegs.record.run import Run, run_of
from sealegs.record.schema import MANIFEST

READERS: tuple[Reader, ...] = (
    mlflow,  # first, because its source need not be a path
    run_folder,
    trainer_state,
    tensorboard,
    wandb,
    trackio,
    json_lines,
    json_file,
    delimited,
    text,
)
"""Every format. At most one of them recognises a source."""


MOST_FILES_NAMED = 6


@dataclass(frozen=True)
class Log:
    """A training log, read."""

    source: str
    """The source as the user gave it."""
    format: str
    """The format: ``run folder``, ``trainer_state``, ``csv``, ``tensorboard``, ``megatron text``, ..."""
    run: Run
    """The run under our signal names; other columns keep their own names."""
    mapping: Mapping[str, str]
    """The column that each of our signals was taken from."""
    remarks: tuple[str, ...]
    """Notices about the reading, a sentence each: ``3 rows repeat a step: the last of each is taken``."""


@contextmanager
def _uncollected() -> Iterator[None]:
    """Suspend the garbage collector: rows are millions of objects without cycles, and collecting costs a tenth more."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@_uncollected()
def read(
    source: str, *, metrics: Mapping[str, str] | None = None, pattern: str | None = None, needs_loss: bool = True
) -> Log:
    """Read a log of any format: a path, or ``mlflow:`` and a run id.

    ``metrics`` says which column is which signal where the names do not (``{"loss": "objective"}``). ``pattern`` is a
    regular expression with one named group per signal, for text logs in a format of their own. A table without a loss
    is refused, unless ``needs_loss`` is false.
    """
    place = _place(source)
    table = _read(place) if pattern is None else regex.read(place, pattern)
    if not table.columns.rows:
        raise SourceError(f"{source}: no row of numbers in it yet; not a training log so far")
    if table.manifest is None:
        table = _with_settings(place, table)
    return _log(place, table, dict(metrics or {}), needs_loss=needs_loss)


def _with_settings(place: Place, table: Table) -> Table:
    """The table with the settings that lie beside the log."""
    found, remarks = settings_files.beside(place, is_trainer=table.format == trainer_state.FORMAT)
    return replace(table, known={**table.known, **found}, remarks=(*table.remarks, *remarks))


def open_run(source: str | Path) -> Run:
    """The run in a folder, while it is being written or afterwards; or in any log that ``read`` reads."""
    path, name = Path(source), str(source)
    names_one_of_several = name.startswith("mlflow:") or Path(name.rpartition("#")[0] or ".").is_file()
    is_ours = (path / MANIFEST).exists() or not (path.exists() or names_one_of_several)
    return runs.open_run(path) if is_ours else read(name).run


def _log(place: Place, table: Table, said: dict[str, str], *, needs_loss: bool) -> Log:
    columns, remarks = table.columns, list(table.remarks)
    if table.manifest is not None:  # its names and steps are ours
        said = {name: name for name in columns.values} | said
    mapping = names.assign(place.source, columns, said, needs_loss=needs_loss)
    is_found = "loss" in mapping and "loss" not in said and mapping["loss"] != mapping.get("generator_loss")
    if is_found and names.is_held_out(mapping["loss"]):
        remarks.append(f"no training loss is logged: the held-out {mapping['loss']} is judged in its place")
    elif "loss" not in mapping and "reward" not in mapping:
        remarks.insert(0, names.no_loss(columns))
    elif is_found and names.is_named_otherwise(mapping["loss"]):
        remarks.append(
            f"no column is called a loss: {mapping['loss']} is taken for it (--metric loss=NAME says otherwise)"
        )
    step = used = mapping.pop(names.STEP, None)
    steps = None
    if table.manifest is None:
        if table.format == delimited.FORMAT:
            columns, found = _with_nan(columns, [mapping[name] for name in ("loss", "grad_norm") if name in mapping])
            remarks += found
        measure = mapping.get("loss") or mapping.get("reward") or _measure(columns)
        columns, used, handled, steps = number_rows(columns, measure, step)
        remarks += handled
    about = {"log": {"format": table.format, "loss": mapping.get("loss", "")}}
    manifest = table.manifest or Manifest(
        run_id=place.path.name or place.source, settings=_settings(table), recorded=about
    )
    renamed, how = _renamed(columns, mapping)
    remarks += how
    launches = _launches(table, steps)
    run = run_of(place.path, manifest, renamed, events=table.events, launches=launches, lines=_lines(table, steps))
    mapping |= {names.STEP: used} if used else {}
    if times := sum(one.first <= before.last for before, one in pairwise(run.attempts)):
        remarks.append(f"steps go back {times} times: {run.superseded_rows} rows were gone through again")
    return Log(place.source, table.format, run, mapping, tuple(remarks))


def _measure(columns: Columns) -> str:
    """The column with most values that is no counter, where no loss and no reward is logged."""
    counters = {*names.candidates(columns, names.STEP), *names.candidates(columns, names.EPOCH)}
    counts = {name: int(np.count_nonzero(mask)) for name, mask in columns.logged.items() if name not in counters}
    return max(counts or columns.logged, key=lambda name: counts.get(name, 0))


def _settings(table: Table) -> Mapping[str, Any]:
    """The settings in force at the end: what the log holds besides, and what the program printed."""
    return functools.reduce(merged, (header.settings for header in table.headers), table.known)


def _launches(table: Table, steps: Steps | None) -> tuple[Launch, ...]:
    """The launches, by rows of the columns in which the rows of a step are one."""
    if steps is None or not len(steps):
        return ()
    begins = np.append(True, np.diff(steps) != 0)
    row = np.append(np.cumsum(begins) - 1, int(begins.sum()))
    found = [replace(one, row=int(row[one.row])) for one in table.launches]
    headers = [one._replace(row=int(row[one.row])) for one in table.headers]
    files = [(int(row[at]), name) for at, name in table.files]
    return launches_of(found, headers, files, table.known, steps[begins])


def _lines(table: Table, steps: Steps | None) -> tuple[LogLine, ...]:
    """The lines that are no rows, with the step that they stand at."""
    known = [] if steps is None else steps.tolist()
    return tuple(
        LogLine(known[min(line.row, len(known)) - 1] if line.row and known else None, line.text, line.count)
        for line in table.lines
    )


def _with_nan(columns: Columns, wanted: list[str]) -> tuple[Columns, list[str]]:
    """The columns with NaN in the empty cells that were NaN, and notices about that."""
    remarks = []
    for name in wanted:
        cells = delimited.nan_cells(columns, name)
        if cells.any():
            columns = replace(columns, logged={**columns.logged, name: columns.logged[name] | cells})
            remarks.append(
                f"{int(cells.sum())} empty cells of {name} are taken as NaN: rows of their kind have a value"
            )
    return columns, remarks


def _renamed(columns: Columns, mapping: Mapping[str, str]) -> tuple[Columns, list[str]]:
    """The columns under our names, times in seconds, and notices about columns that say a signal in another way.

    Another column that has such a name already is renamed.
    """
    remarks: dict[str, str] = {}
    taken = set(mapping.values())
    own = {name: f"{name} (column)" if name in mapping else name for name in columns.values if name not in taken}
    values = {new: columns.values[name] for name, new in own.items()}
    logged = {new: columns.logged[name] for name, new in own.items()}
    for signal, name in mapping.items():
        in_ms = signal == "step_s" and plain(name).startswith("ms_") | plain(name).endswith("_ms")
        values[signal] = columns.values[name] / 1000 if in_ms else columns.values[name]
        logged[signal] = columns.logged[name]
        if signal != name and (found := changed(signal, name, columns.values)):
            words, change = found
            values[signal] = change(columns.values[name])
            family = signal.partition("/")[0]
            remarks.setdefault(family, f"{family} is {words} {name}")
    return replace(columns, values=values, logged=logged), list(remarks.values())


def _place(source: str) -> Place:
    if source.startswith(mlflow.SCHEME):
        return Place(source, Path(source))
    file, _, choice = source.rpartition("#")
    for name, chosen in ((source, ""), (file, choice)):
        place = Place(source, Path(name).expanduser(), chosen)
        with suppress(OSError, ValueError):  # a name that no file can have
            if name and (place.is_folder or place.path.is_file()):
                return place
            if name and place.path.exists():
                raise SourceError(f"{source}: neither a file nor a folder; write what it gives to a file first")
    raise SourceError(f"{source}: no such file or folder; give a log, a run folder, or mlflow:RUN_ID")


def _read(place: Place) -> Table:
    try:
        reader = next((reader for reader in READERS if reader.recognises(place)), None)
        if reader is None and place.is_folder:
            inner = _only_log(place)
            if not isinstance(inner, Path):
                return _read_parts(place, inner)
            table = _read(Place(place.source, inner, inside=place.path))
            return replace(table, remarks=(f"read from {inner.relative_to(place.path)}", *table.remarks))
        if place.choice and reader is not trackio:
            raise SourceError(f"{place.source}: {place.path.name} is one run; leave out #{place.choice}")
        if reader is not None:
            return reader.read(place)
    except OSError as error:
        raise SourceError(f"{place.source}: cannot be read ({error.strerror or error})") from error
    if not place.head:
        raise SourceError(f"{place.source}: empty; give a log that something has been written to")
    raise SourceError(f"{place.source}: neither text nor a format that is known; it begins with {place.head[:8]!r}")


def _read_parts(folder: Place, files: list[Path]) -> Table:
    """Read several files of one run."""
    places = parts.in_order([Place(folder.source, path, inside=folder.path) for path in files])
    tables = [(place.path.name, _read(place)) for place in places]
    read = ", ".join(name for name, _ in tables[:MOST_FILES_NAMED])
    more = f" and {len(tables) - MOST_FILES_NAMED} more" if len(tables) > MOST_FILES_NAMED else ""
    remark = f"read from {len(tables)} files as launches of one run: {read}{more}; give one of them to judge it alone"
    joined = parts.joined(tables)
    return replace(joined, remarks=(remark, *joined.remarks))


def _only_log(folder: Place) -> Path | list[Path]:
    """The only log in a folder that is not of a known kind itself, or the files in which one lies."""
    found = list(_logs_in(folder.path, folder.path, deepest=3))
    if not found:
        raise SourceError(f"{folder.source}: a folder without a training log in it; give the log itself")
    if parts.are_parts(found):
        return found
    if len(found) > 1:
        inside = names.listed([str(path.relative_to(folder.path)) for path in found])
        raise SourceError(f"{folder.source}: {len(found)} logs or runs in it ({inside}); give one of them")
    return found[0]


def _logs_in(folder: Path, root: Path, deepest: int) -> Iterator[Path]:
    """The logs in a folder; what is neither a file nor a folder, or leads out of ``root``, is passed over."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or not is_inside(path, root):
            continue
        place = Place(str(path), path, inside=root)
        if any(reader.recognises(place) for reader in READERS):
            if not text.recognises(place) or text.is_log(place):
                yield path
        elif place.is_folder and deepest > 1:
            yield from _logs_in(path, root, deepest - 1)
