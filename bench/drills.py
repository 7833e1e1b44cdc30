"""How often a replay names the cause that was put in: a Markdown table, a row for each drill.

    python bench/drills.py [--seeds 501 502 ...] [--only WORD ...] [--jobs 2] [--keep FOLDER]

In a drill one thing is wrong with a run, nothing is done about it, and the first incident is run again from its
capsule. `nano` and `toy` are runs of the lab: a fault strikes at step 230 a branch of one run for each seed, or the
settings take a margin away until it breaks by itself. `other` is a loop that is not the lab's (bench/other_loop.py).
Right is the cause that was put in; "not known" and "no incident" are counted apart from wrong causes, which are what
must not be. With ``--keep`` finished drills are kept in a folder, and not done again.
"""

import argparse
import json
import math
import platform
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench import other_loop
from sealegs.cli.replay import builder
from sealegs.errors import SealegsError
from sealegs.faults.practice import disturbed
from sealegs.faults.spec import parse
from sealegs.lab.branches import begin, branch
from sealegs.lab.settings import SIZES, Settings
from sealegs.lab.sources import open_data
from sealegs.lab.train import resolved, train
from sealegs.record.schema import INCIDENTS
from sealegs.replay.capsule import open_capsule
from sealegs.replay.experiment import Experiment
from sealegs.replay.subject import Subject
from sealegs.replay.tested import put_to_the_test

FORK, AT, STEPS = 200, 230, 300
SEEDS = tuple(range(501, 511))
NOT_KNOWN, NO_INCIDENT = "not known", "no incident"


class Answer(NamedTuple):
    """What came of a drill."""

    cause: str
    steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    """One thing that is wrong."""

    where: str
    """A size of the lab, or ``other``."""
    what: str
    """A fault, or the settings that take a margin away, or what is done to the other loop."""
    cause: str
    """The right answer; empty where nothing is wrong."""
    kind: str = ""
    """Of the incident to look at, if not the first of any: what takes a margin away may do harm before that is used."""
    settings: tuple[tuple[str, Any], ...] = ()
    """Dotted names and values, for a whole run without a fault."""

    def __str__(self) -> str:
        return f"{self.where}: {self.what or 'nothing'}"


def natural(what: str, cause: str, kind: str = "", **settings: Any) -> Drill:
    """A run of the lab that breaks by itself."""
    dotted = tuple((name.replace("__", "."), value) for name, value in settings.items())
    return Drill(where="nano", what=what, cause=cause, kind=kind, settings=dotted)


DRILLS = (
    *(
        Drill(where=where, what=fault, cause=cause)
        for where, fault, cause in (
            ("nano", "random-shard:batches=12", "bad-data-batch"),
            ("nano", "shifted-labels:batches=14", "bad-data-batch"),
            ("nano", "rare-tokens:batches=6", "long-tail-token"),
            ("nano", "duplicate-batch:batches=50", "duplicate-batch"),
            ("nano", "lr-spike:factor=45,steps=6", "unlogged-step-size"),
            ("nano", "lr-spike:factor=40,steps=12,log=shows", "lr-discontinuity"),
            ("nano", "nan-gradient:tensor=blocks.1", "corrupt-gradient"),
            ("nano", "gradient-scale:factor=400", "corrupt-gradient"),
            ("nano", "bit-flip:in=weight,seed=9", "corrupt-weight"),
            ("nano", "weight-scale:factor=14,tensor=*.query_key_value,rows=2/3", "corrupt-weight"),
            ("nano", "", ""),
            ("toy", "random-shard:batches=12", "bad-data-batch"),
            ("toy", "rare-tokens:batches=6", "long-tail-token"),
            ("toy", "duplicate-batch:batches=50", "duplicate-batch"),
            ("toy", "lr-spike:factor=70,steps=6", "unlogged-step-size"),
            ("toy", "weight-scale:factor=14,tensor=*.query_key_value,rows=2/3", "corrupt-weight"),
        )
    ),
    natural(
        "no clipping, LR up to 3 in 300 steps",
        "lr-too-high",
        optimizer__lr=4.0,
        optimizer__warmup_steps=400,
        optimizer__clip=0.0,
    ),
    natural(
        "naive softmax, no clipping, LR up to 0.15",
        "softmax-overflow",
        "nonfinite",
        model__naive_softmax=True,
        optimizer__lr=0.2,
        optimizer__warmup_steps=400,
        optimizer__clip=0.0,
    ),
    *(Drill(where="other", what=cause, cause=cause) for cause in other_loop.CAUSES),
)


def settings_of(drill: Drill, seed: int) -> Settings:
    """A run that is watched, and that nobody helps."""
    base = SIZES[drill.where]
    cadence = replace(base.cadence, evaluate_steps=0, checkpoint_steps=0, evaluate_batches=1)
    settings = replace(base, steps=STEPS, seed=seed, threads=1, shadow=True, dtype="fp32", cadence=cadence)
    for name, value in drill.settings:
        part, _, field = name.partition(".")
        settings = replace(settings, **{part: replace(getattr(settings, part), **{field: value})})
    return resolved(settings)


def done(drill: Drill, seed: int, place: Path) -> Answer:
    """Break a run, and have its first incident explained."""
    warnings.simplefilter("ignore")  # of torch, about schedulers: said once in every process
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=place) as scratch:
        run = Path(scratch) / "run"
        build = of_other_loop(drill, seed, run) if drill.where == "other" else of_the_lab(drill, seed, run, place)
        met = sorted((run / INCIDENTS).glob("[0-9]*"), key=lambda folder: int(folder.name))
        try:
            for capsule in map(open_capsule, met):
                if drill.kind in ("", capsule.incident.kind):
                    tested = put_to_the_test(Experiment(capsule, build(capsule.folder)))
                    return Answer(tested.cause or NOT_KNOWN, tested.steps)
        except SealegsError as error:
            return Answer(f"refused: {error}".replace(str(run), "run"))
        return Answer(NO_INCIDENT)


def of_the_lab(drill: Drill, seed: int, run: Path, place: Path) -> Callable[[Path], Subject]:
    """Train a branch with a fault, or a whole run without a margin."""
    settings = settings_of(drill, seed)
    if drill.settings:
        train(settings, open_data(settings), run)
    else:
        beginning = place / f"{drill.where}-{seed}"
        faults = [parse(f"{drill.what}@{AT}")] if drill.what else []
        strike = partial(disturbed, faults, settings.model.vocabulary)
        branch(settings, open_data(settings), beginning, run, disturb=strike)
    return lambda capsule: builder(capsule, None)()


def of_other_loop(drill: Drill, seed: int, run: Path) -> Callable[[Path], Subject]:
    """Train the loop that is not the lab's."""
    other_loop.train(drill.cause, seed, run)
    return lambda capsule: other_loop.build(drill.cause, seed)


def prepare(where: str, seed: int, place: Path) -> None:
    """The beginning that all branches of a seed share."""
    folder = place / f"{where}-{seed}"
    if not folder.exists():
        settings = settings_of(Drill(where=where, what="", cause=""), seed)
        aside = folder.with_suffix(".partial")
        shutil.rmtree(aside, ignore_errors=True)
        begin(settings, open_data(settings), aside, steps=FORK)
        aside.rename(folder)


def all_done(drills: list[Drill], seeds: list[int], place: Path, jobs: int) -> Iterator[tuple[Drill, int, Answer]]:
    """Answers, as they come."""
    kept = place / "answers.jsonl"
    known = (
        {(d, s): Answer(*answer) for d, s, answer in map(json.loads, kept.read_text().splitlines())}
        if kept.exists()
        else {}
    )
    open_ = [(drill, seed) for seed, drill in product(seeds, drills) if (str(drill), seed) not in known]
    yield from (
        (drill, seed, known[str(drill), seed]) for seed, drill in product(seeds, drills) if (str(drill), seed) in known
    )
    branched = {(drill.where, seed) for drill, seed in open_ if drill.where != "other" and not drill.settings}
    with ProcessPoolExecutor(jobs) as pool, kept.open("a") as file:
        list(pool.map(prepare, *zip(*sorted(branched), strict=True), [place] * len(branched))) if branched else []
        waiting = {pool.submit(done, drill, seed, place): (drill, seed) for drill, seed in open_}
        for future in as_completed(waiting):
            drill, seed = waiting[future]
            answer = future.result()
            file.write(json.dumps([str(drill), seed, answer]) + "\n")
            file.flush()
            yield drill, seed, answer


def wilson(hits: int, of: int) -> tuple[float, float]:
    """95 % interval of a share.

    >>> [round(bound, 3) for bound in wilson(0, 50)]
    [0.0, 0.071]
    """
    z, share = 1.96, hits / of
    middle = (share + z * z / (2 * of)) / (1 + z * z / of)
    half = z * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of)) / (1 + z * z / of)
    return max(middle - half, 0.0), min(middle + half, 1.0)


def table(answers: dict[Drill, list[Answer]]) -> str:
    """Markdown."""
    lines = [
        "| drill | right | not known | no incident | wrong | answers | most steps |",
        "|---|---|---|---|---|---|---|",
    ]
    wrong = asked = right_of_all = incidents = 0
    for drill, given in answers.items():
        counted = Counter(answer.cause for answer in given)
        none = counted[NO_INCIDENT]
        right = counted[drill.cause] if drill.cause else none
        bad = len(given) - right - counted[NOT_KNOWN] - (none if drill.cause else 0)
        wrong, asked, right_of_all = wrong + bad, asked + len(given), right_of_all + right
        incidents += len(given) - none
        told = ", ".join(f"{name} {count}" for name, count in counted.most_common())
        most = max(answer.steps for answer in given)
        shown = none if drill.cause else 0
        lines.append(f"| {drill} | {right} | {counted[NOT_KNOWN]} | {shown} | {bad} | {told} | {most} |")
    low, high = wilson(wrong, asked)
    share = f"wrong {wrong} of {asked} (95 %: {low:.1%} to {high:.1%})"
    lines.append(f"\nRight {right_of_all} of {asked}, {incidents} of them with an incident; {share}.")
    return "\n".join(lines)


def main() -> None:
    """Drill, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--only", nargs="+", default=[""], help="words in the names of drills")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    drills = [drill for drill in DRILLS if any(word in str(drill) for word in options.only)]
    began = time.perf_counter()
    answers: dict[Drill, list[Answer]] = {drill: [] for drill in drills}
    with tempfile.TemporaryDirectory() as scratch:
        place = options.keep or Path(scratch)
        place.mkdir(parents=True, exist_ok=True)
        total = len(drills) * len(options.seeds)
        for number, (drill, seed, answer) in enumerate(all_done(drills, options.seeds, place, options.jobs), 1):
            answers[drill].append(answer)
            mark = "" if answer.cause in (drill.cause, NO_INCIDENT if not drill.cause else None) else "   <-"
            told = f"{number}/{total}  {time.perf_counter() - began:.0f} s  seed {seed}  {drill}: {answer.cause}{mark}"
            print(told, file=sys.stderr, flush=True)
    print(
        f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}; seeds {options.seeds}\n"
    )
    print(table(answers))
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
