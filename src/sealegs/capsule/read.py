"""Reads a capsule: the folder of an incident in, everything that is needed to run it again out."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sealegs.capsule.write import VERSION, Description, single_steps
from sealegs.errors import SourceError
from sealegs.incidents import Incident
from sealegs.record.reading import is_number, most_bytes, parse_json, read_bytes, read_object, reading
from sealegs.record.rows import read_row
from sealegs.record.schema import BATCHES, CAPSULE, INCIDENT, INCIDENTS, METRICS, STATE
from sealegs.record.typed import fits, typed
from sealegs.state import checkpoint_files
from sealegs.state.checkpoints import StoredState, read_state
from sealegs.state.serialization import Room, live
from sealegs.vocabulary import Row

NEEDED = frozenset(("loss", "lr", "applied"))
"""Signals that a row must have if its step is to be run again."""
MOST_RANKS = 1 << 20
_NUMBER = int | None


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
        return sound_state(self.folder / STATE, self.description.state)

    def steps(self, first: int | None = None) -> range:
        """The steps that can be run again from its state, or one of step ``first``: each has its row and its
        batches."""
        first = self.description.state if first is None else first
        if first is None:
            return range(0)
        rows = {int(row["step"]) for row in self.rows}
        handed = {each.step for each in self.batches} - {each.step for each in self.batches if each.batch is None}
        last = first
        while last in rows and last in handed:
            last += 1
        return range(first, last)


def sound_state(folder: Path, step: int) -> StoredState:
    """The state in the folder of a capsule or a checkpoint, checked against its digests."""
    if fault := checkpoint_files.fault_in(folder):
        raise SourceError(f"{folder}: it is damaged ({fault}); restore it from a copy")
    checkpoint_files.expect_to_be_alone()
    return read_state(folder, step)


def describe(incident: Path) -> Description:
    """What the capsule of an incident has, without its batches."""
    folder = incident / CAPSULE
    try:
        with reading(folder):
            described = read_object(folder / f"{CAPSULE}.json", incident)
            if described.get("version") != VERSION:
                raise ValueError(f"it is of version {described.get('version')!a:.20}, this Sealegs reads {VERSION}")
            description = typed(Description, described)
            if not 1 <= description.ranks <= MOST_RANKS:
                raise ValueError(f"it is of {description.ranks} ranks")
            return description
    except FileNotFoundError as error:
        raise _no_capsule(incident, error) from error


def open_capsule(incident: Path, *, rank: int | None = None) -> Capsule:
    """Read the capsule of an incident, with the batches of all ranks or of one.

    All of them make one step again: DDP and FSDP2 average gradients, and so does a step of several batches.
    """
    folder = incident / CAPSULE
    description = describe(incident)
    try:
        with reading(folder):
            found = typed(Incident, read_object(incident / INCIDENT, incident))
            lines = read_bytes(folder / METRICS, incident).splitlines()
            rows = [row for line in lines if (row := read_row(line)) is not None and row.keys() >= NEEDED]
            ranks = range(description.ranks) if rank is None else (rank,)
            of_ranks = [_batches_of(folder / BATCHES.format(rank=each), incident) for each in ranks]
            everywhere = set.intersection(*({each.step for each in of_rank} for of_rank in of_ranks))
            batches = [each for of_rank in of_ranks for each in of_rank if each.step in everywhere]
    except FileNotFoundError as error:
        raise _no_capsule(incident, error) from error
    newest = {int(row["step"]): row for row in rows}
    return Capsule(
        folder=folder,
        incident=found,
        description=description,
        rows=tuple(newest[step] for step in sorted(newest)),
        batches=tuple(batches),
    )


def _no_capsule(incident: Path, error: FileNotFoundError) -> SourceError:
    return SourceError(f"{error.filename}: missing, so {incident} is no incident with a capsule")


def incident_folder(run: Path, number: int | None) -> Path:
    """The folder of an incident of a run; without a number, that of the last."""
    folder, there = run / INCIDENTS, numbered(run)
    if not there and (steps := single_steps(folder)):
        raise SourceError(
            f"{run}: it has no incidents, but a step that was not finite: sealegs locate {run}@{steps[-1]}"
        )
    if not there:
        raise SourceError(
            f"{run}: it has no incidents with a capsule; a guard with a playbook keeps one of each incident, and with "
            "Playbook.observe() does so without rolling anything back"
        )
    if number is not None and number not in there:
        raise SourceError(f"{run}#{number}: no such incident; there are {', '.join(map(str, there))}")
    return folder / str(there[-1] if number is None else number)


def numbered(run: Path) -> list[int]:
    """The numbers of a run's incidents that have a folder, rising."""
    if not run.is_dir():
        raise SourceError(f"{run}: no such run; give the folder of one, or its name in experiments/")
    folder = run / INCIDENTS
    return sorted(int(entry.name) for entry in folder.iterdir() if is_number(entry.name)) if folder.is_dir() else []


def _batches_of(file: Path, incident: Path) -> list[Recorded]:
    found = []
    room = Room(most_bytes())
    for line in read_bytes(file, incident).splitlines():
        values = parse_json(line)
        if not isinstance(values, dict) or not fits(values.get("step"), int) or not fits(values.get("index"), _NUMBER):
            raise ValueError(f"{file.name}: a line of it has no step and index")
        found.append(Recorded(values["step"], values.get("index"), live(values.get("batch"), room)))
    return found
