"""Damages one file of a run's newest checkpoint, as a failing disk or a broken copy does.

This fault cannot be written as text. It strikes no step of a loop, but files, at a moment that a test or a drill
chooses, such as between a kill and the resume.
"""

from pathlib import Path
from typing import Literal

from sealegs.errors import ConfigError, SourceError
from sealegs.faults.targets import draw
from sealegs.record.schema import CHECKPOINTS


def corrupt_checkpoint(folder: Path, how: Literal["flip", "truncate", "remove"] = "flip", seed: int = 0) -> Path:
    """Damage the newest checkpoint of a run at a byte that the seed chooses among all its files; gives the file.

    ``flip`` flips one bit there, ``truncate`` ends the file before it, ``remove`` deletes the whole file.
    """
    if how not in ("flip", "truncate", "remove"):
        raise ConfigError(f"how={how!r}: one of flip, truncate, remove")
    steps = [int(entry.name) for entry in (folder / CHECKPOINTS).glob("*") if entry.name.isdecimal()]
    if not steps:
        raise SourceError(f"{folder}: has no checkpoint to damage; let the run save one first")
    newest = folder / CHECKPOINTS / str(max(steps))
    files = sorted(entry for entry in newest.rglob("*") if entry.is_file())
    place = draw(sum(file.stat().st_size for file in files), seed, "byte")
    for file in files:
        if place < file.stat().st_size:
            break
        place -= file.stat().st_size
    if how == "remove":
        file.unlink()
    elif how == "truncate":
        with file.open("r+b") as opened:
            opened.truncate(place)
    else:
        damaged = bytearray(file.read_bytes())
        damaged[place] ^= 1 << draw(8, seed, "bit")
        file.write_bytes(damaged)
    return file
