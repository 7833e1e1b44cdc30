"""``sealegs locate``: finds the first operation of an incident that makes a number that is not finite."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import tyro

from sealegs.cli.output import say, show, show_json
from sealegs.cli.replay import builder, incident_of
from sealegs.errors import ConfigError, MissingExtra

DESCRIPTION = """\
Run the step of an incident again from its capsule, look at every operation of the forward and the backward pass, and
name the first that makes NaN or infinity of finite numbers: in which module, with which numbers. Fused attention is
taken apart for it.

exit code: 0 one was found, 1 all are finite when they are run again, 2 it cannot be run again.

examples:
  sealegs locate night                                     the last incident of experiments/night
  sealegs locate night#2 --step 4711 --json                another step of its capsule, as one JSON object
  sealegs locate /runs/a7#1 --build train.py:build         of your own loop: build() gives a sealegs.Subject
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line can say."""

    incident: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN[#N]")]
    """A run, and which of its incidents; the last, if none is named."""
    step: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Which step; the first from the onset on that is not finite, if none is given."""
    build: Annotated[str | None, tyro.conf.arg(metavar="FILE.py:FUNCTION")] = None
    """What builds the model, its optimizer and its loss. Runs of `sealegs train` need none."""
    json: bool = False
    """Print one JSON object, and nothing else."""


def main(arguments: Sequence[str]) -> int:
    """Run the step again, and print the operation."""
    options = tyro.cli(Options, args=list(arguments), prog="sealegs locate", description=DESCRIPTION)
    try:
        from sealegs.capsule.read import open_capsule
        from sealegs.replay.experiment import Experiment
        from sealegs.replay.locate import locate, locate_first
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtra("sealegs locate", "PyTorch", "torch") from None
    capsule = open_capsule(incident_of(options.incident))
    there = capsule.steps()
    if options.step is not None and options.step not in there:
        raise ConfigError(
            f"--step {options.step}: not in the capsule, which has steps {there.start} to {there.stop - 1}"
        )
    experiment = Experiment(capsule, builder(capsule.folder, options.build)())
    found = locate_first(experiment) if options.step is None else locate(experiment, options.step)
    if options.json:
        show_json({"found": None if found is None else asdict(found)})
    elif found is not None:
        show(str, found)
    else:
        say(f"all operations are finite from step {experiment.first} to {experiment.window.stop - 1}")
    return int(found is None)
