"""An incident in, the loop that trains its runs out: those of the drills, from their first step on."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TypeAlias

from sealegs.drills.catalogue import Drill
from sealegs.drills.loops import LabLoop, OwnLoop, PolicyLoop
from sealegs.drills.multi_rank import RankedLoop
from sealegs.drills.rank_processes import Crew
from sealegs.gallery.definitions import Incident
from sealegs.gallery.gan import GanLoop


@dataclass(frozen=True, slots=True)
class ProgramLoop:
    """A program with a mistake, and the same without."""

    broken: OwnLoop
    healthy: OwnLoop

    def __str__(self) -> str:
        return str(self.broken)

    def ending(self, folder: Path, drill: Drill | None, *, guarded: bool) -> float:
        """The final loss, of each program on rows of its own kind; NaN if the run was halted."""
        return (self.healthy if drill is None else self.broken).ending(folder, drill, guarded=guarded)


Loop: TypeAlias = LabLoop | RankedLoop | PolicyLoop | GanLoop | ProgramLoop


@contextmanager
def loop_of(incident: Incident, place: Path) -> Iterator[Loop]:
    """What trains the runs of an incident into folders of ``place``."""
    seed, at, last = incident.seed, incident.at, incident.last
    where = incident.practice.where if incident.drill else incident.runs
    lab = LabLoop(place=place, size="nano", seed=seed, at=at, last=last, device="cpu", whole=True)
    if where == "ranks":
        with Crew() as crew:
            loop = RankedLoop(lab=lab, crew=crew)
            loop.prepare()
            yield loop
    elif where == "policy gradient":
        yield PolicyLoop(seed=seed, at=at, last=last)
    elif where == "gan":
        yield GanLoop(seed=seed, at=at, last=last)
    elif where == "program":
        broken, healthy = (
            OwnLoop(place=place_of(function), seed=seed, at=at, last=last)
            for function in (incident.program, incident.healthy)
        )
        yield ProgramLoop(broken, healthy)
    else:
        yield lab


def place_of(function: str) -> str:
    """Where a program's function is, as ``--build`` takes it."""
    return str(resources.files("sealegs.gallery.programs") / function)
