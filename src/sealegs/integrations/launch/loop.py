"""What a guard in a loop of ``sealegs run`` is asked for, and the folder that it records into."""

from pathlib import Path

from sealegs.integrations.launch.request import Request
from sealegs.integrations.loop_options import LoopOptions, named_options
from sealegs.record.schema import MANIFEST
from sealegs.signals.collective import Collective


def options_of(asked: Request) -> LoopOptions:
    """The options of the guard."""
    return named_options(act=asked.act, playbook=asked.playbook)


def folder_of(asked: Request, *, goes_on: bool) -> Path:
    """The folder of a loop, the same on all ranks.

    A program may train more than once, or be started again under one name: every training that begins anew has a folder
    of its own, NAME, NAME-2 and so on; one that goes on from a checkpoint has the newest.
    """
    return Path(Collective().first(lambda: str(_next(Path(asked.folder), goes_on=goes_on))))


def _next(folder: Path, *, goes_on: bool) -> Path:
    newest, number = folder, 1
    candidate = folder
    while (candidate / MANIFEST).exists():
        newest, number = candidate, number + 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    return newest if goes_on else candidate
