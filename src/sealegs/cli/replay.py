"""``sealegs replay``: runs an incident again, and prints its tested cause."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from sealegs.cli.output import show, show_json, tell
from sealegs.cli.run_names import folder_of
from sealegs.errors import ConfigError, MissingExtra, SourceError
from sealegs.incidents import Incident
from sealegs.record import manifest as manifests
from sealegs.record.files import whole_file, writing
from sealegs.record.reading import is_number
from sealegs.record.schema import CAPSULE, REPLAY, TOKENIZER
from sealegs.report.commands.contracts import contract
from sealegs.report.commands.replay import ArmShown, Replayed, RowShown, TokenShown, UsualShown, page

if TYPE_CHECKING:
    from sealegs.lab.settings import Settings
    from sealegs.replay.experiment import LossBefore
    from sealegs.replay.subject import Subject
    from sealegs.replay.tested_causes import Tested

DESCRIPTION = """\
Run an incident again from its capsule, exactly and with one thing changed at a time, and say which cause is necessary
or sufficient for it. The run itself is not touched; what was found is kept beside the incident as replay.json.

exit code: 0 a cause was established, 1 none was, 2 it cannot be run again.

examples:
  sealegs replay night                                     the last incident of experiments/night
  sealegs replay night#2 --json                            the second, as one JSON object
  sealegs replay night --arms lr-too-high --arms "other batches"   and what if? only these, and the placebos
  sealegs replay /runs/a7#1 --build train.py:build         of your own loop: build() gives a sealegs.Subject
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line can say."""

    incident: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN[#N]")]
    """A run, and which of its incidents; the last, if none is named."""
    build: Annotated[str | None, tyro.conf.arg(metavar="FILE.py:FUNCTION")] = None
    """What builds the model, its optimizer and its loss. Runs of `sealegs train` need none."""
    arms: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME"), tyro.conf.UseAppendAction] = ()
    """A rerun to do, or the cause that it asks for; without it, those that are needed; `all` for every one. May be
    given several times."""
    minutes: Annotated[float, tyro.conf.arg(metavar="M")] = 10.0
    """No more arms are begun after so long."""
    json: bool = False
    """Print one JSON object, and nothing else."""


def main(arguments: Sequence[str]) -> int:
    """Run the incident again, and print the report."""
    options = tyro.cli(Options, args=list(arguments), prog="sealegs replay", description=DESCRIPTION)
    try:
        from sealegs.capsule.read import open_capsule
        from sealegs.replay.experiment import Experiment
        from sealegs.replay.tested_causes import judge_causes
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtra("sealegs replay", "PyTorch", "torch") from None
    folder = incident_of(options.incident)
    capsule = open_capsule(folder)
    experiment = Experiment(capsule, builder(capsule.folder, options.build)())
    tested = judge_causes(
        experiment,
        tell=tell,
        seconds=60 * options.minutes,
        only=options.arms,
    )
    found = told(options.incident.partition("#")[0], capsule.incident, tested, experiment.usual)
    keep(found, folder)
    show_json(contract(found)) if options.json else show(page, found)
    return 0 if found.cause else 1


def keep(found: Replayed, folder: Path) -> None:
    """Write the result beside the incident."""
    with writing(folder / REPLAY), whole_file(folder / REPLAY) as file:
        file.write(json.dumps(contract(found), indent=1).encode() + b"\n")


def told(source: str, incident: Incident, tested: "Tested", usual: "LossBefore") -> Replayed:
    """The result as plain values."""
    lit = tested.spotlight
    return Replayed(
        source=source,
        incident=incident.number,
        kind=incident.kind,
        onset=tested.onset,
        steps=tested.steps,
        apart=tested.apart,
        usual=UsualShown(**asdict(usual)),
        departure=None if tested.departure is None else str(tested.departure),
        height=tested.again.height,
        damage=tested.again.damage,
        arms=[
            ArmShown(
                name=each.arm.name,
                kind=each.arm.kind,
                cause=each.arm.cause,
                does=each.arm.does,
                left=each.left,
                shows="gone" if each.is_gone else "there" if each.is_there else "partly",
                height=each.outcome.height,
                damage=each.outcome.damage,
            )
            for each in tested.tried
        ],
        causes=dict(tested.standings),
        unasked=list(tested.unasked),
        rows=[] if lit is None else [RowShown(**asdict(row)) for row in lit.rows],
        tokens=[] if lit is None else [TokenShown(**asdict(token)) for token in lit.tokens],
        histogram=[] if lit is None else list(lit.histogram),
        histogram_before=[] if lit is None else list(lit.histogram_before),
        location=None if tested.location is None else str(tested.location),
        cause=tested.cause,
        because=tested.because,
    )


def incident_of(words: str) -> Path:
    """The incident folder for ``RUN``, ``RUN#N``, or a path to a folder that was copied elsewhere."""
    from sealegs.capsule.read import incident_folder

    name, mark, number = words.partition("#")
    if mark and not is_number(number):
        raise ConfigError(f"{words}: after the # comes the number of an incident: {name}#1")
    run = folder_of(name)
    return run if (run / CAPSULE).is_dir() else incident_folder(run, int(number) if mark else None)


def builder(capsule: Path, build: str | None) -> "Callable[[], Subject]":
    """A function that builds the subject of a capsule: the user's, or the lab's for its own runs."""
    from sealegs.replay.subject import load_builder

    if build is not None:
        return load_builder(build)
    from sealegs.lab.subject import subject_of

    settings = lab_settings(capsule)
    return lambda: subject_of(settings, capsule / TOKENIZER)


def lab_settings(capsule: Path) -> "Settings":
    """The lab's settings of the run that a capsule is from, if `sealegs train` trained it."""
    from sealegs.lab import config
    from sealegs.lab.train import resolved

    try:
        if not manifests.load(capsule).settings:  # a guard in a user's own loop: the defaults would be wrong
            raise SourceError("its manifest has no settings")
        return resolved(config.of_run(capsule))
    except (ConfigError, SourceError) as error:
        raise ConfigError(f"{capsule}: not of `sealegs train` ({error}); say --build FILE.py:FUNCTION") from error
