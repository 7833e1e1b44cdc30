"""The guard of somebody else's loop: which options it has, where it records, what it knows of a run that goes on."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sealegs.errors import ConfigError
from sealegs.guard import Guard
from sealegs.recovery.books import read_books
from sealegs.recovery.options import has_begun
from sealegs.watch import Watch


def refuse_options(options: Mapping[str, Any], own: Mapping[str, str]) -> None:
    """Options that no guard has, and those that are the framework's own: ``own`` says how to set them there."""
    for name, cure in own.items():
        if name in options:
            raise ConfigError(f"{name}={options[name]!r}: {cure}")
    known = inspect.signature(Guard.__init__).parameters
    if strange := sorted(options.keys() - known.keys()):
        raise ConfigError(f"{strange[0]}: a guard has no such option; see docs/guard.md")


def watch_of(run: str | Path | Watch | None, *, goes_on: bool, settings: dict[str, Any]) -> Watch:
    """The watch of a run: the one that was given, or one of a folder, which a run that goes on may have already."""
    if isinstance(run, Watch):
        return run
    return Watch(run, resume=goes_on and run is not None and has_begun(run), settings=settings)


def take_over_books(guard: Guard) -> None:
    """What was done to the run before, where its folder tells: no rung of the playbook twice."""
    if guard.recovery is not None and guard.watch.folder is not None:
        books = read_books(guard.watch.folder)
        if books is not None:
            guard.recovery.take_over(books)


def forget_checkpoints(guard: Guard, why: str) -> None:
    """Those of the guard's own from after the step that the framework went back to."""
    if guard.checkpoints is not None:
        guard.checkpoints.discard_after(guard.number, why)
