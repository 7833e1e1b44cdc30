"""``sealegs verify``: runs an incident again with its remedy, and compares the result with what was promised."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from sealegs.cli import postmortem
from sealegs.cli.output import show, show_json, tell
from sealegs.cli.replay import incident_of, lab_settings
from sealegs.cli.verify_reruns import Rerun, Task, from_seed, from_snapshot
from sealegs.errors import ConfigError, MissingExtra
from sealegs.record.files import whole_file, writing
from sealegs.record.schema import VERIFIED
from sealegs.report.commands.contracts import contract
from sealegs.report.commands.verify import FixShown, Verified, page, promises_shown
from sealegs.report.fixes import Fix
from sealegs.report.fixes import parse as parse_fix
from sealegs.report.postmortem.build import Case, postmortem_of
from sealegs.report.postmortem.markdown import FILE
from sealegs.report.postmortem.promises import parse as parse_promise
from sealegs.report.postmortem.values import Measured, Postmortem, Promise

DESCRIPTION = """\
Run an incident again with the remedy that its post-mortem names, and compare what comes of it with the numbers that are
promised there. From the state in the capsule; with --from-seed from the first step, as a run of its own in the folder
of the incident. What was measured is kept beside the incident as verified.json and goes into the post-mortem.

  --fix    what is other than it was, in the place of the remedy: clip=0.5, lr=0.5 (a factor), lr=before, beta2=0.95,
           skip=312:313 (batches), gate=312:313 (updates), rare=spread, rare=masked, repeated=out, dtype=fp32, or a
           setting of `sealegs train`: model.norm_eps=1e-6
  --expect what must come of it, in the place of the promises: [max | mean | meanN] SIGNAL@STEP or SIGNAL[A:B], < or <=,
           a number or baseline+NUMBER; signals are loss, grad_norm, clipped_norm; steps A to B - 1

exit code: 0 all promises are kept, 1 some are broken, 2 it cannot be run again.

examples:
  sealegs verify night#2                                        the remedy and the promises of the post-mortem
  sealegs verify night --fix clip=0.5 --fix rare=spread         another remedy
  sealegs verify night --expect "loss@312<2.5" --expect "max grad_norm[300:401]<3.0" --from-seed
  sealegs verify /runs/a7#1 --build train.py:build --json       of your own loop: build() gives a sealegs.Subject
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line can say."""

    incident: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN[#N]")]
    """A run, and which of its incidents; the last, if none is named."""
    fix: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=VALUE"), tyro.conf.UseAppendAction] = ()
    """What to change; without it, the remedy of the tested cause. May be given several times."""
    expect: Annotated[tuple[str, ...], tyro.conf.arg(metavar="PROMISE"), tyro.conf.UseAppendAction] = ()
    """What to expect; without it, what the post-mortem promises. May be given several times."""
    from_seed: bool = False
    """Begin with the first step, as `sealegs train` did."""
    build: Annotated[str | None, tyro.conf.arg(metavar="FILE.py:FUNCTION")] = None
    """What builds the model, its optimizer and its loss. Runs of `sealegs train` need none."""
    json: bool = False
    """Print one JSON object, and nothing else."""


def main(arguments: Sequence[str]) -> int:
    """Run the incident again, compare, and write the result."""
    options = tyro.cli(Options, args=list(arguments), prog="sealegs verify", description=DESCRIPTION)
    fixes = tuple(parse_fix(text) for text in options.fix)
    try:
        from sealegs.capsule.read import open_capsule
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtra("sealegs verify", "PyTorch", "torch") from None
    folder = incident_of(options.incident)
    capsule = open_capsule(folder)
    case = _case(options.incident, folder)
    settings = None if options.build else lab_settings(capsule.folder)
    document = postmortem_of(replace(case, verified=None))
    fixes = fixes or _remedy(case, document)
    task = Task(
        case=case,
        folder=folder,
        capsule=capsule,
        settings=settings,
        build=options.build,
        fixes=fixes,
        promises=_promises(options.expect, document, fixes),
    )
    if options.from_seed:
        shown = from_seed(task, is_named=bool(options.expect), say=tell)
        if isinstance(shown, int):
            return shown
    else:
        shown = from_snapshot(task, say=tell)
    found = _compared(task, shown, "seed" if options.from_seed else "snapshot")
    with writing(folder / VERIFIED), whole_file(folder / VERIFIED) as file:
        file.write(json.dumps(contract(found), indent=1).encode() + b"\n")
    postmortem.write(replace(case, verified=found), folder / FILE)
    show_json(contract(found)) if options.json else show(page, found)
    return 0 if found.kept else 1


# The request


def _case(words: str, folder: Path) -> Case:
    name = words.partition("#")[0]
    number = "" if (incident_of(name) == folder and not folder.name.isdecimal()) else f"#{folder.name}"
    [(case, _)] = postmortem.cases_of(f"{name}{number}")
    return case


def _remedy(case: Case, document: Postmortem) -> tuple[Fix, ...]:
    """The remedy of the tested cause, which may be to change nothing."""
    replayed = case.replayed
    if replayed is None:
        raise ConfigError(
            f"{case.name}: its cause is not tested yet; run `sealegs replay {case.name}` first, or say what to change: "
            "--fix clip=0.5"
        )
    if replayed.cause is None:
        raise ConfigError(f"{case.name}: its cause is not known ({replayed.because}); say what to change: --fix lr=0.5")
    return document.fixes


def _promises(expected: Sequence[str], document: Postmortem, fixes: Sequence[Fix]) -> tuple[Promise, ...]:
    seen = document.symptoms
    baselines = {"loss": seen.loss_before, "grad_norm": seen.grad_norm_before}
    if expected:
        return tuple(parse_promise(text, baselines) for text in expected)
    if not document.promises:
        raise ConfigError(
            f"{document.run_id}#{document.incident}: too few steps before the onset to promise anything; say what to "
            'expect: --expect "loss@312<2.5"'
        )
    clip = next((fix.number for fix in fixes if fix.name == "clip"), None)
    return tuple(
        replace(promise, below=clip) if promise.signal == "clipped_norm" and clip is not None else promise
        for promise in document.promises
    )


# The result


def _compared(task: Task, shown: Rerun, begun: Literal["seed", "snapshot"]) -> Verified:
    results = []
    for promise in task.promises:
        highest = promise.highest(shown.values[promise.signal])
        value, step = (None, None) if highest is None else highest
        results.append(Measured(promise=promise, value=value, step=step))
    incident, replayed = task.case.incident, task.case.replayed
    return Verified(
        source=task.case.source,
        incident=incident.number,
        kind=incident.kind,
        onset=incident.start,
        cause=None if replayed is None else replayed.cause,
        begun=begun,
        first=shown.first,
        last=max(shown.values["loss"]),
        folder=None if shown.folder is None else str(shown.folder),
        borrowed=shown.borrowed,
        fixes=[FixShown(**{**asdict(fix), "does": fix.words}) for fix in task.fixes],
        promises=promises_shown(results),
        kept=all(result.is_kept for result in results),
    )
