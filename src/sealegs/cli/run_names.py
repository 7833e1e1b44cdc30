"""Where a run is that a command names."""

from pathlib import Path

from sealegs.record.schema import MANIFEST

RUNS = Path("experiments")


def named_folder(run: str) -> Path:
    """Where a run of that name begins: a bare name is a folder in ``experiments``; anything with a slash is a path."""
    return Path(run) if "/" in run else RUNS / run


def place_of(source: str) -> str:
    """Where a run or a log is that is there: in the folder that one is in, or for a bare name in ``experiments``.

    A folder here that is no run gives way to a run of that name.
    """
    here, named = Path(source), RUNS / source
    is_here = here.exists() and not (here.is_dir() and not (here / MANIFEST).exists() and (named / MANIFEST).exists())
    return str(named) if "/" not in source and not is_here and named.is_dir() else source


def folder_of(run: str) -> Path:
    """The folder of a run that a command needs; where there is none, the one that it would have by its name."""
    place = Path(place_of(run))
    return place if place.is_dir() else named_folder(run)
