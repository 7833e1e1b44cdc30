"""Reads a capsule: the folder of an incident in, everything that is needed to run it again out."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from sealegs.capsule.write import VERSION, Description
from sealegs.errors import SourceError
from sealegs.incidents import Incident
from sealegs.record.schema import BATCHES, CAPSULE, INCIDENT, INCIDENTS, METRICS, STATE, unspell
from sealegs.state import checkpoint_files
from sealegs.state.checkpoints import StoredState, read_state
from sealegs.state.serialization import live
from sealegs.vocabulary import Row


class Recorded(NamedTuple):
    """A batch that was trained on."""

    step: int
    number: int | None
    """Number of the batch in the data."""
    batch: Any
    """None if the loop had changed the batch before it was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capsule:
    """An incident with everything that was kept of it."""

    folder: Path
    incident: Incident
    description: Description
    rows: tuple[Row, ...]
    """The last rows before the incident was found, by step; ``applied`` tells whether the update was."""
    batches: tuple[Recorded, ...]

    def state(self) -> StoredState:
        """The state from before the onset, checked against its digests."""
        if self.description.state is None:
            raise SourceError(f"{self.folder}: it cannot be run again ({self.description.without_state})")
        if fault := checkpoint_files.fault_in(self.folder / STATE):
            raise SourceError(f"{self.folder / STATE}: it is damaged ({fault}); restore it from a copy")
        checkpoint_files.expect_to_be_alone()
        return read_state(self.folder / STATE, self.description.state)

    def steps(self) -> range:
        """The steps that can be run again: each has its row and its batches."""
        first = self.description.state
        if first is None:
            return range(0)
        rows = {int(row["step"]) for row in self.rows}
        handed = {each.step for each in self.batches} - {each.step for each in self.batches if each.batch is None}
        last = first
        while last in rows and last in handed:
            last += 1
        return range(first, last)


def open_capsule(incident: Path, *, rank: int | None = None) -> Capsule:
    """Read the capsule of an incident, with the batches of all ranks or of one.

    All of them make one step again: DDP and FSDP2 average gradients, and so does a step of several batches.
    """
    folder = incident / CAPSULE
    try:
        described = _json(folder / f"{CAPSULE}.json")
        if described.get("version") != VERSION:
            raise SourceError(f"{folder}: of version {described.get('version')}, this Sealegs reads {VERSION}")
        description = Description(**{field.name: described[field.name] for field in fields(Description)})
        known = {name: unspell(value) for name, value in _json(incident / INCIDENT).items()}
        found = Incident(**{field.name: known[field.name] for field in fields(Incident)})
        rows = [_row(json.loads(line)) for line in (folder / METRICS).read_text().splitlines()]
        ranks = range(description.ranks) if rank is None else (rank,)
        of_ranks = [_batches_of(folder / BATCHES.format(rank=each)) for each in ranks]
        everywhere = set.intersection(*({each.step for each in of_rank} for of_rank in of_ranks))
        batches = [each for of_rank in of_ranks for each in of_rank if each.step in everywhere]
    except FileNotFoundError as error:
        raise SourceError(f"{error.filename}: missing, so {incident} is no incident with a capsule") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SourceError(f"{folder}: cannot be read ({type(error).__name__}: {error})") from error
    newest = {int(row["step"]): row for row in rows}
    return Capsule(
        folder=folder,
        incident=found,
        description=description,
        rows=tuple(newest[step] for step in sorted(newest)),
        batches=tuple(batches),
    )


def incident_folder(run: Path, number: int | None) -> Path:
    """The folder of an incident of a run; without a number, that of the last."""
    if not run.is_dir():
        raise SourceError(f"{run}: no such run; give the folder of one, or its name in experiments/")
    folder = run / INCIDENTS
    there = sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdecimal()) if folder.is_dir() else []
    if not there:
        raise SourceError(f"{run}: it has no incidents with a capsule; give the guard a playbook, observe() for none")
    if number is not None and number not in there:
        raise SourceError(f"{run}#{number}: no such incident; there are {', '.join(map(str, there))}")
    return folder / str(there[-1] if number is None else number)


def _json(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text())
    return value


def _batches_of(file: Path) -> list[Recorded]:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [Recorded(line["step"], line["index"], live(line["batch"])) for line in lines]


def _row(line: Mapping[str, Any]) -> Row:
    return {name: unspell(value) for name, value in line.items()}
