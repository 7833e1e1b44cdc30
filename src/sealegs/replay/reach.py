"""A run and one of its steps in; the capsule and the state out from which that step can be run again."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from sealegs.capsule.read import Capsule, describe, numbered, open_capsule, sound_state
from sealegs.capsule.write import Description, single_steps
from sealegs.detectors.nonfinite import broken
from sealegs.errors import SourceError
from sealegs.record.reading import is_number
from sealegs.record.schema import CAPSULE, CHECKPOINTS, INCIDENTS, SINGLE, STATE
from sealegs.state.checkpoints import StoredState

MOST_NAMED = 8
"""Ranges of steps that a sentence names."""


class Way(NamedTuple):
    """How a step can be reached."""

    capsule: Capsule
    state: StoredState
    steps: range
    """From the step of the state to the last that the capsule has."""
    place: Path
    """Where the state lies."""


class _Start(NamedTuple):
    step: int
    incident: Path
    place: Path


def way_to(run: Path, step: int) -> Way:
    """The nearest state from which a step that was not finite can be run again, with the batches that are kept."""
    described, reasons = _described(run)
    opened = cache(open_capsule)
    for start in sorted(_starts(run, described, step), key=lambda start: start.step, reverse=True):
        try:
            capsule = opened(start.incident)
            steps = capsule.steps(start.step)
            if step not in steps:
                continue
            if not any(int(row["step"]) == step and broken(row) for row in capsule.rows):
                reasons.append(f"{start.incident} is of another attempt, in which it was finite")
                continue
            return Way(capsule, sound_state(start.place, start.step), steps, start.place)
        except SourceError as error:
            reasons.append(str(error))
    why = "; ".join(dict.fromkeys(reasons)) or "no state from before it is kept together with the batches since"
    raise SourceError(f"{run}@{step}: it cannot be run again ({why}); {_reachable(described)}")


def _described(run: Path) -> tuple[dict[Path, Description], list[str]]:
    """The capsules of a run, and what is wrong with those that cannot be read."""
    folder = run / INCIDENTS
    names = [*map(str, numbered(run)), *(SINGLE.format(step=step) for step in single_steps(folder))]
    found, reasons = {}, []
    for name in names:
        try:
            found[folder / name] = describe(folder / name)
        except SourceError as error:
            reasons.append(str(error))
    return found, reasons


def _starts(run: Path, described: dict[Path, Description], step: int) -> Iterator[_Start]:
    """States at a step or before it, each with a capsule that may have the batches since."""
    folder = run / CHECKPOINTS
    saved = [int(entry.name) for entry in folder.iterdir() if is_number(entry.name)] if folder.is_dir() else []
    for incident, description in described.items():
        if step > _last(description):
            continue
        if description.state is not None and description.state <= step:
            yield _Start(description.state, incident, incident / CAPSULE / STATE)
        yield from (_Start(each, incident, folder / str(each)) for each in saved if each <= step)


def _last(description: Description) -> int:
    return description.opened if description.last is None else description.last


def _reachable(described: dict[Path, Description]) -> str:
    """The steps that capsules reach by their own states, in words."""
    found = sorted((each.state, _last(each)) for each in described.values() if each.state is not None)
    if not found:
        return "there is no step that can be"
    named = [f"{first} to {last}" for first, last in dict.fromkeys(found)]
    more = f", and {len(named) - MOST_NAMED} more ranges before" if len(named) > MOST_NAMED else ""
    return f"these can be: {', '.join(named[-MOST_NAMED:])}{more}"
