"""``sealegs drill``: injects faults, and prints a score card: would this run survive them?"""

import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import tyro

from sealegs.cli import postmortem
from sealegs.cli.check import check
from sealegs.cli.output import show, show_json, tell
from sealegs.cli.replay import builder, keep, told
from sealegs.diagnosis.cause_cards import causes
from sealegs.drills.catalogue import DRILLS, Drill, chosen
from sealegs.errors import ConfigError, MissingExtra, SealegsError
from sealegs.record.schema import CAPSULE, INCIDENTS
from sealegs.report.commands.contracts import contract
from sealegs.report.commands.drill import GOOD, Drilled, DrillShown, OfPolicy, OnRanks, listed, page
from sealegs.report.postmortem.causes import title_of
from sealegs.report.postmortem.markdown import FILE

if TYPE_CHECKING:
    from sealegs.drills.loops import LabLoop, Loop, PolicyLoop
    from sealegs.drills.multi_rank import RankedLoop
    from sealegs.drills.score import Score
    from sealegs.replay.subject import Subject

DESCRIPTION = """\
Break a run on purpose, in every way of a list, and see whether it survives: each fault strikes one run that is only
watched and one that is guarded, and both are compared with a clean twin. Of what the watched one shows, the cause is
tested by a replay, as after a real incident. The lab's smallest model needs some seconds for each; with --build it is
your own model, optimizer and batches, in a plain guarded loop and one process. What can only go wrong between ranks is
done to the lab's model under DDP, in two processes on the CPU.

DRILL is a name or a family of `sealegs drill --list`, or a fault as `sealegs train --inject` takes it.

exit code: 0 nothing was lost, damaged, stopped or disturbed; 1 something was; 2 it cannot be run.

examples:
  sealegs drill                                     all that the lab can be broken with (some minutes)
  sealegs drill lr-x30 nan-gradient                 two of them
  sealegs drill hardware benign                     two families
  sealegs drill lr-spike:factor=100,steps=3         a fault of your own
  sealegs drill --build train.py:build hardware     your own loop: build() gives a sealegs.Subject with batches=
"""
T = TypeVar("T")
R = TypeVar("R")
APART = ("policy gradient", "ranks")
"""What needs a loop of its own."""
LEFT_OUT = (1, 5, 10, 20, 40, 80)
"""Healthy batches that the placebo twins leave out: they show what leaving out batches costs without any harm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line can say."""

    drills: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="DRILL")] = ()
    """Which; all that fit, if none is named."""
    list: bool = False
    """Print what there is, and do nothing."""
    build: Annotated[str | None, tyro.conf.arg(metavar="FILE.py:FUNCTION")] = None
    """What builds your own model, optimizer, loss and batches."""
    size: Literal["nano", "toy"] = "nano"
    """Of the lab's model."""
    seed: int = 0
    """Of weights and data."""
    at: Annotated[int | None, tyro.conf.arg(metavar="STEP")] = None
    """The step that faults strike: 230 in the lab, 80 in its policy-gradient loop, 200 in a loop of your own."""
    after: Annotated[int | None, tyro.conf.arg(metavar="STEPS")] = None
    """So many steps later runs are compared: 200 in the lab, 120 in its policy-gradient loop, 100 in a loop of your
    own."""
    diagnose: bool = True
    """Replay the incident of each drill, and see whether the cause is found."""
    jobs: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """Drills at a time; 0: as many as there are cores in the lab, one in a loop of your own."""
    keep: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Keep the run folders here, to look at."""
    json: bool = False
    """Print one JSON object, and nothing else."""


def main(arguments: Sequence[str]) -> int:
    """Run the drills, and print the score card."""
    options = tyro.cli(Options, args=list(arguments), prog="sealegs drill", description=DESCRIPTION)
    if options.list:
        show(listed, [(each.family, each.name, each.what, _how(each)) for each in DRILLS.values()])
        return 0
    wanted = chosen(options.drills, is_lab=options.build is None)
    _refuse(options)
    try:
        import sealegs.drills.loops  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "tokenizers"):
            raise
        raise MissingExtra("sealegs drill", "PyTorch", "lab") from None
    with _place(options.keep) as place:
        found = _drilled(options, wanted, place)
    show_json(contract(found)) if options.json else show(page, found)
    return 0 if found.survived else 1


def _refuse(options: Options) -> None:
    for name, least in (("at", 40), ("after", 20), ("jobs", 0)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise ConfigError(f"--{name} {value}: at least {least}")
    if options.keep is not None and options.keep.exists() and any(options.keep.iterdir()):
        raise ConfigError(f"--keep {options.keep}: there is something in it; name a new folder")


@contextmanager
def _place(keep_in: Path | None) -> Iterator[Path]:
    """The folder of the runs."""
    if keep_in is not None:
        keep_in.mkdir(parents=True, exist_ok=True)
        yield keep_in
        return
    with tempfile.TemporaryDirectory(prefix="sealegs-drill-") as scratch:
        yield Path(scratch)


def _loop(options: Options, place: Path) -> "Loop":
    from sealegs.drills.loops import OwnLoop

    if options.build is None:
        return _lab(options, place)
    at, last = _span(options)
    return OwnLoop(place=options.build, at=at, last=last, seed=options.seed)


def _lab(options: Options, place: Path, device: Literal["auto", "cpu"] = "auto") -> "LabLoop":
    from sealegs.drills.loops import LabLoop

    at, last = _span(options)
    return LabLoop(place=place, size=options.size, at=at, last=last, seed=options.seed, device=device)


def _policy(options: Options) -> "PolicyLoop":
    from sealegs.drills.loops import PolicyLoop

    at = options.at or 80
    return PolicyLoop(at=at, last=at + (options.after or 120), seed=options.seed)


def _span(options: Options) -> tuple[int, int]:
    """The step at which faults strike, and the one at which runs are compared."""
    at = options.at or (230 if options.build is None else 200)
    return at, at + (options.after or (200 if options.build is None else 100))


@dataclass(frozen=True, slots=True, kw_only=True)
class Practised:
    """The results of the drills of one loop."""

    loop: "Loop | RankedLoop"
    clean: float
    """The loss of the clean twin."""
    spread: float
    shown: dict[str, DrillShown]


def _drilled(options: Options, wanted: Sequence[Drill], place: Path) -> Drilled:
    """The drills in one process, then those on several ranks; each result as a line on stderr."""
    from sealegs.drills.multi_rank import RankedLoop
    from sealegs.drills.rank_processes import Crew
    from sealegs.drills.score import CLOSE

    began = time.monotonic()
    alone, of_policy, together = (
        [drill for drill in wanted if (drill.where if drill.where in APART else "") == where] for where in ("", *APART)
    )
    total = sum(1 + len(LEFT_OUT) + len(drills) for drills in (alone, of_policy, together) if drills)
    number = 0

    def report(text: str) -> None:
        nonlocal number
        number += 1
        tell(f"{number}/{total}  {time.monotonic() - began:4.0f} s  {text}")

    jobs = options.jobs or (len(os.sched_getaffinity(0)) if options.build is None else 1)
    found: dict[str, Practised] = {}
    if alone:
        found["alone"] = _practised(options, _loop(options, place), alone, place, jobs, report)
    if of_policy:
        found["of policy"] = _practised(options, _policy(options), of_policy, place, jobs, report)
    if together:
        with Crew() as crew:  # it takes a core per rank, so only one run goes at a time
            loop = RankedLoop(lab=_lab(options, place, "cpu"), crew=crew)
            found["together"] = _practised(options, loop, together, place, 1, report)
    first = next(iter(found.values()))
    shown = {name: each for part in found.values() for name, each in part.shown.items()}
    return Drilled(
        loop=str(first.loop),
        at=first.loop.at,
        last=first.loop.last,
        clean_loss=first.clean,
        spread=first.spread,
        placebos=list(LEFT_OUT),
        close=CLOSE,
        drills=[shown[drill.name] for drill in wanted],
        survived=all(each.verdict in GOOD for each in shown.values()),
        on_ranks=None
        if (part := found.get("together")) is None
        else OnRanks(ranks=part.loop.ranks, clean_loss=part.clean, spread=part.spread),
        of_policy=None
        if (part := found.get("of policy")) is None
        else OfPolicy(at=part.loop.at, last=part.loop.last, clean_loss=part.clean, spread=part.spread),
    )


def _practised(
    options: Options,
    loop: "Loop | RankedLoop",
    drills: Sequence[Drill],
    place: Path,
    jobs: int,
    tell: Callable[[str], None],
) -> Practised:
    """The twins first, then every drill."""
    loop.prepare()
    losses: dict[int, float] = {}
    for count, loss in _results(jobs, partial(_twin, loop, place), (0, *LEFT_OUT)):
        losses[count] = loss
        what = f"a clean twin{f' on {loop.ranks} ranks' if loop.ranks > 1 else ''}"
        tell(f"{what}{f' without {count} of its batches' if count else ''}: loss {loss:.4f}")
    spread = max(math.sqrt(statistics.fmean((losses[count] - losses[0]) ** 2 for count in LEFT_OUT)), 1e-12)
    shown: dict[str, DrillShown] = {}
    for drill, scored in _results(jobs, partial(_done, loop, place, losses[0], spread, options), drills):
        shown[drill.name] = _shown(scored, loop)
        tell(f"{drill.name}: {scored.verdict}")
    return Practised(loop=loop, clean=losses[0], spread=spread, shown=shown)


def _results(jobs: int, function: Callable[[T], R], items: Iterable[T]) -> Iterator[tuple[T, R]]:
    """The result of each item as they come; one at a time in this process, since a device may have memory for one."""
    if jobs == 1:
        yield from ((item, function(item)) for item in items)
        return
    pool = ProcessPoolExecutor(jobs, get_context("spawn"))
    try:
        pending = {pool.submit(function, item): item for item in items}
        yield from ((pending[future], future.result()) for future in as_completed(pending))
    finally:
        pool.shutdown(cancel_futures=True)


def _twin(loop: "Loop | RankedLoop", place: Path, left_out: int) -> float:
    """The loss of a healthy run without ``left_out`` batches."""
    name = f"twin-{left_out}{'-on-ranks' if loop.ranks > 1 else ''}"
    return loop.ending(place / name, None, guarded=True, without=left_out)


def _done(
    loop: "Loop | RankedLoop", place: Path, clean: float, spread: float, options: Options, drill: Drill
) -> "Score":
    """The score of a drill, from both of its runs."""
    from sealegs.drills.score import score

    folder = place / "".join(letter if letter.isalnum() or letter in "-.=" else "_" for letter in drill.name)
    watched = loop.ending(folder / "unguarded", drill, guarded=False)
    guarded = loop.ending(folder / "guarded", drill, guarded=True)
    if drill.settings and drill.faults:  # compared with a run of the same settings: the drill is about the fault
        clean = loop.ending(folder / "clean", replace(drill, faults=()), guarded=True)
    gaps = ((watched - clean) / spread, (guarded - clean) / spread)
    explain: Callable[[Path], tuple[str | None, str]] | None = None
    if options.diagnose and not drill.is_benign:
        explain = _cause_shown if drill.shown else partial(_cause_of, options.build)
    return score(drill, loop.at, folder / "unguarded", folder / "guarded", gaps, explain)


def _cause_of(build: str | None, run: Path) -> tuple[str | None, str]:
    """The tested cause of the first incident of a run, and what the replay says."""
    for folder in sorted((run / INCIDENTS).glob("[0-9]*"), key=lambda folder: int(folder.name)):
        try:
            cause, because, _ = explained(folder, builder(folder / CAPSULE, build)())
        except SealegsError as error:
            return None, str(error)
        return cause, because
    return None, ""


def _cause_shown(run: Path) -> tuple[str | None, str]:
    """The first cause that `sealegs check` finds in a record and does more than guess at, and what it says."""
    diagnosis = check(str(run), metrics={}, pattern=None, rules="calibrated")
    named = next((each.cause for each in diagnosis.hypotheses if each.grade != "hypothesis"), None)
    return named, diagnosis.first_action


def explained(folder: Path, subject: "Subject") -> tuple[str | None, str, int]:
    """The root cause of an incident as ``sealegs replay`` and ``sealegs postmortem`` find it, what the replay says, and
    the steps that it ran."""
    from sealegs.capsule.read import open_capsule
    from sealegs.replay.experiment import Experiment
    from sealegs.replay.tested_causes import judge_causes

    capsule = open_capsule(folder)
    experiment = Experiment(capsule, subject)
    tested = judge_causes(experiment)
    keep(told(folder.parent.parent.name, capsule.incident, tested, experiment.usual), folder)
    [(case, _)] = postmortem.cases_of(str(folder))
    postmortem.write(case, folder / FILE)
    _, _, after = (folder / FILE).read_text("utf-8").partition("## Root cause\n")
    sentence = after.strip().splitlines()[0]
    named = next((name for name in causes() if sentence.startswith(f"{title_of(name)}, tested")), None)
    return named, tested.because, tested.steps


def _how(drill: Drill) -> str:
    ranks = ("(two ranks)",) if drill.where == "ranks" else ()
    return " ".join((*drill.faults, *(f"--{change}" for change in drill.settings), *ranks))


def _shown(each: "Score", loop: "Loop | RankedLoop") -> DrillShown:
    return DrillShown(
        name=each.drill.name,
        family=each.drill.family,
        what=each.drill.what,
        faults=[str(fault) for fault in each.drill.struck(loop.at)],
        settings=list(each.drill.settings),
        verdict=each.verdict,
        unguarded=each.watched,
        guarded=each.guarded,
        prevented=each.prevented,
        seen=each.seen,
        latency=each.latency,
        skipped=each.skipped,
        done_again=each.done_again,
        done=list(each.done),
        cause=each.cause,
        is_right=each.is_right,
        because=each.why,
        ranks=loop.ranks,
        rank=each.rank if loop.ranks > 1 else None,
    )
