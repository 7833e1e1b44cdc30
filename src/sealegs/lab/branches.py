"""Branches of a run: several runs that continue from one beginning."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from sealegs.lab.settings import Settings
from sealegs.lab.sources import TokenSources
from sealegs.lab.train import Disturb, Ranges, Result, train, undisturbed
from sealegs.record import manifest as manifests
from sealegs.vocabulary import Sink


def begin(settings: Settings, data: TokenSources, folder: Path, *, steps: int, sinks: Sequence[Sink] = ()) -> Result:
    """Train the first steps of a run, and leave a checkpoint to go on from."""
    return train(settings, data, folder, sinks=sinks, should_stop=stop_after(steps))


def branch(
    settings: Settings,
    data: TokenSources,
    beginning: Path,
    folder: Path,
    *,
    disturb: Disturb = undisturbed,
    skip: Ranges = (),
    sinks: Sequence[Sink] = (),
    should_stop: Callable[[], str | None] = lambda: None,
) -> Result:
    """Continue a stopped run in a folder of its own; the original stays as it is."""
    fork(beginning, folder)
    return train(settings, data, folder, resume=True, disturb=disturb, skip=skip, sinks=sinks, should_stop=should_stop)


def fork(beginning: Path, folder: Path) -> None:
    """Copy a stopped run as a run of its own, under a new name, which post-mortems and lessons use, and of now: until
    now nothing was down, it only waited for its turn."""
    shutil.copytree(beginning, folder)
    manifest = replace(manifests.load(folder), run_id=manifests.new_id(folder.name), created=manifests.now())
    manifests.save(manifest, folder)


def stop_after(steps: int) -> Callable[[], str | None]:
    """A reason to stop after ``steps`` steps; the loop calls it before the first step, and after each."""
    asked = iter(range(steps))
    return lambda: None if next(asked, None) is not None else f"to go on from after {steps} steps"
