"""``sealegs locate``: finds the first operation of a step that makes a number that is not finite."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from sealegs.cli.output import say, show, show_json, tell
from sealegs.cli.replay import builder, incident_of
from sealegs.cli.run_names import folder_of
from sealegs.errors import ConfigError, MissingExtra, SourceError
from sealegs.record.reading import is_number
from sealegs.record.run import Run, open_run
from sealegs.record.schema import CAPSULE
from sealegs.vocabulary import Row

if TYPE_CHECKING:
    from sealegs.replay.fidelity import Departure
    from sealegs.replay.locate import Location
    from sealegs.replay.rerun import Rerun

DESCRIPTION = """\
Run a step again from a capsule or a checkpoint, look at every operation of the forward and the backward pass, and name
the first that makes NaN or infinity of finite numbers: in which module, with which numbers. Fused attention is taken
apart for it.

RUN and RUN#N look for the first such step of an incident. RUN@STEP is any step that was not finite and can still be
reached, one that was skipped by itself too.

exit code: 0 one was found, 1 all are finite when they are run again, or the step was, 2 it cannot be run again.

examples:
  sealegs locate night                                     the last incident of experiments/night
  sealegs locate night@4711                                a step of it, whether or not it belongs to an incident
  sealegs locate night#2 --step 4711 --json                another step of its capsule, as one JSON object
  sealegs locate /runs/a7#1 --build train.py:build         of your own loop: build() gives a sealegs.Subject
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line can say."""

    incident: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN[#N|@STEP]")]
    """A run, and which of its incidents or steps; the last incident, if none is named."""
    step: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Which step of the incident; the first from the onset on that is not finite, if none is given."""
    build: Annotated[str | None, tyro.conf.arg(metavar="FILE.py:FUNCTION")] = None
    """What builds the model, its optimizer and its loss. Runs of `sealegs train` need none."""
    json: bool = False
    """Print one JSON object, and nothing else."""


def main(arguments: Sequence[str]) -> int:
    """Run the step again, and print the operation."""
    options = tyro.cli(Options, args=list(arguments), prog="sealegs locate", description=DESCRIPTION)
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError:
        raise MissingExtra("sealegs locate", "PyTorch", "torch") from None
    run, step = _run_and_step(options.incident)
    if step is None:
        return _in_incident(incident_of(options.incident), options.step, options)
    if options.step is not None:
        raise ConfigError(f"--step {options.step}: {options.incident} names a step already; leave one of them out")
    if (run / CAPSULE).is_dir():  # an incident that was copied elsewhere
        return _in_incident(run, step, options)
    return _in_run(run, step, options)


_TOLD = ("loss", "grad_norm", "grads_finite", "params_finite")
"""Signals that say whether a step was finite."""


def _run_and_step(words: str) -> tuple[Path, int | None]:
    """The run of ``RUN@STEP`` and its step; None where no step is named. A folder may have an @ in its name."""
    run, (name, mark, number) = words.partition("#")[0], words.rpartition("@")
    if not mark or "/" in number or ("@" in run and folder_of(run).is_dir()):
        return folder_of(run), None
    if not is_number(number):
        raise ConfigError(f"{words}: after the @ comes the number of a step: {name}@4711")
    if "#" in name:
        raise ConfigError(f"{words}: an incident or a step: {name} --step {number}, or {run}@{number}")
    return folder_of(name), int(number)


def _in_incident(folder: Path, step: int | None, options: Options) -> int:
    """Look in a step of an incident, or in the first from the onset on that is not finite."""
    from sealegs.capsule.read import open_capsule
    from sealegs.replay.experiment import LEAD
    from sealegs.replay.locate import locate_at, locate_first
    from sealegs.replay.rerun import Rerun

    capsule = open_capsule(folder)
    state, there = capsule.state(), capsule.steps()
    onset = capsule.incident.start
    if step is not None and step not in there:
        raise ConfigError(f"--step {step}: not in the capsule, which has steps {there.start} to {there.stop - 1}")
    if step is None and onset not in there:
        raise SourceError(
            f"{capsule.folder}: it cannot be run again from step {there.start} to the onset at {onset} "
            f"({capsule.description.without_batches or 'batches or rows in between are missing'})"
        )
    rerun = Rerun(capsule, builder(capsule.folder, options.build)(), state, there)
    if step is not None:
        return _tell(locate_at(rerun, step), rerun, range(step, step + 1), options)
    steps = range(max(there.start, onset - LEAD), there.stop)
    return _tell(locate_first(rerun, steps), rerun, steps, options)


def _in_run(folder: Path, step: int, options: Options) -> int:
    """Look in a step of a run, from the nearest state that it can be reached from."""
    from sealegs.detectors.nonfinite import broken
    from sealegs.replay.locate import locate_at
    from sealegs.replay.reach import way_to
    from sealegs.replay.rerun import Rerun

    run = open_run(folder)
    rows = _rows_of(run, step)
    if not rows:
        there = f"it has steps {run.steps[0]} to {run.steps[-1]}" if len(run.steps) else "it has none"
        raise ConfigError(f"{options.incident}: no such step was logged; {there}")
    if not any(map(broken, rows)):
        told = {"loss": "loss", "grad_norm": "gradient norm"}
        numbers = ", ".join(f"{word} {float(rows[-1][name]):.4g}" for name, word in told.items() if name in rows[-1])
        reason = f"step {step} was finite: {numbers}"
        show_json({"found": None, "step": step, "reason": reason}) if options.json else say(reason)
        return 1
    way = way_to(folder, step)
    tell(f"run again from the state of step {way.steps.start} in {way.place}")
    rerun = Rerun(way.capsule, builder(way.capsule.folder, options.build)(), way.state, way.steps)
    return _tell(locate_at(rerun, step), rerun, range(step, step + 1), options)


def _rows_of(run: Run, step: int) -> list[Row]:
    """What was written of a step, a row for each time that the run came to it."""
    found: dict[int, dict[str, float]] = {}
    for signal in _TOLD:
        if signal not in run.signals or not run.has_numbers(signal):
            continue
        written = run.written(signal)
        at = written.steps == step
        for attempt, value in zip(written.segments[at].tolist(), written.values[at].tolist(), strict=True):
            found.setdefault(attempt, {"step": step})[signal] = value
    return list(found.values())


def _tell(found: "Location | None", rerun: "Rerun", steps: range, options: Options) -> int:
    """Print what was found, or that it was not there any more, and whether the rerun was what it should be."""
    from sealegs.replay.fidelity import departure

    left = departure(rerun, 0.0)
    if found is not None:
        tell(f"step {found.step}:" if left is None else f"step {found.step}, though run again, {left}:")
    reason = None if found is not None else _not_found(rerun, steps, left)
    if options.json:
        step = steps.start if found is None else found.step
        show_json({"found": None if found is None else asdict(found), "step": step, "reason": reason})
    elif found is not None:
        show(str, found)
    else:
        say(str(reason))
    return int(found is None)


def _not_found(rerun: "Rerun", steps: range, left: "Departure | None") -> str:
    """That all is finite now, and what follows from it: nothing, where the rerun is not what the run was."""
    from sealegs.detectors.nonfinite import broken

    text = f"all operations are finite from step {steps.start} to {steps.stop - 1}"
    if len(steps) == 1:
        text = f"all operations of step {steps.start} are finite"
    if left is not None and math.isfinite(left.was):
        return f"{text} when they are run again; but {left}, so that nothing follows from it"
    recorded = next((rerun.rows[step] for step in steps if broken(rerun.rows[step])), None)
    if recorded is None:
        return text
    culprit = f", in {recorded['culprit']}" if "culprit" in recorded else ""
    return (
        f"{text} when they are run again, though {broken(recorded)} was not at step {recorded['step']}{culprit}: it "
        "came from outside of the model and its batches, such as a kernel, a link, memory, a hook or an injected fault"
    )
