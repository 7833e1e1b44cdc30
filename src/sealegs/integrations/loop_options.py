"""The guard of somebody else's loop: which options it has, where it records, what it knows of a run that goes on."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sealegs.errors import ConfigError, RunExists
from sealegs.guard import Guard
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


def watch_of(
    run: str | Path | Watch | None, options: Mapping[str, Any], *, goes_on: bool, settings: dict[str, Any]
) -> tuple[Watch, dict[str, Any]]:
    """The watch of a run, and the options that are left for the guard: the watch that was given, or one of a folder,
    which a run that goes on may have already."""
    if isinstance(run, Watch):
        return run, dict(options)
    told = {name: options[name] for name in ("sinks", "notify") if name in options}
    resume = goes_on and run is not None and has_begun(run)
    try:
        watch = Watch(run, resume=resume, settings=settings, **told)
    except RunExists:
        raise RunExists(
            f"run={run}: there is a run in it, and this one does not go on from a checkpoint; give another name, "
            "or move the folder away"
        ) from None
    return watch, {name: value for name, value in options.items() if name not in told}


def forget_checkpoints(guard: Guard, why: str) -> None:
    """Those of the guard's own from after the step that the framework went back to."""
    if guard.checkpoints is not None:
        guard.checkpoints.discard_after(guard.number, why)
