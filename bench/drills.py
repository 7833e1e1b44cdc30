"""How often a post-mortem names the cause that was put in: a Markdown table, a row for each drill.

    python bench/drills.py [--seeds 731 732 ...] [--only WORD ...] [--jobs 2] [--keep FOLDER]

In a drill one thing is wrong with a run, nothing is done about it, the first incident is run again from its capsule,
and its post-mortem is written. `nano` and `toy` are runs of the lab: a fault strikes at step 230 a branch of one run
for each seed, or the settings take a margin away until it breaks by itself. `other` is a loop that is not the lab's
(bench/other_loop.py). How severe it is, the seed draws from a range: ``batches=9..30``. Right is the cause that was
put in, under "Root cause" in the document; "not known" and "no incident" are counted apart from wrong causes, which
are what must not be. With ``--keep`` finished drills are kept in a folder, and not done again.
"""

import argparse
import json
import math
import platform
import random
import re
import shutil
import statistics
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
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench import other_loop
from sealegs.capsule.read import open_capsule
from sealegs.cli.drill import explained
from sealegs.cli.replay import builder
from sealegs.drills.loops import changed
from sealegs.errors import SealegsError
from sealegs.faults.practice import disturbed
from sealegs.faults.spec import parse
from sealegs.lab.branches import begin, branch
from sealegs.lab.settings import SIZES, Settings
from sealegs.lab.sources import open_data
from sealegs.lab.train import resolved, train
from sealegs.record.schema import INCIDENTS
from sealegs.replay.subject import Subject

FORK, AT, STEPS = 200, 230, 300
SEEDS = tuple(range(731, 741))
NOT_KNOWN, NO_INCIDENT = "not known", "no incident"
RANGE = re.compile(r"(\d+(?:\.\d+)?)\.\.(\d+(?:\.\d+)?)|([\w.]+(?:\|[\w.]+)+)")
"""What a seed draws: a number (``9..30``, ``0.21..0.4``), or one of some words (``head|blocks.0``)."""


class Answer(NamedTuple):
    """What came of a drill."""

    cause: str
    steps: int = 0
    drawn: str = ""
    """The drill as it was, with what the seed had drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    """One thing that is wrong."""

    where: str
    """A size of the lab, or ``other``."""
    what: str
    """A fault, or settings (``optimizer.clip=0``) that take margins away, or what is done to the other loop."""
    cause: str
    """The right answer; empty where nothing is wrong."""
    kind: str = ""
    """Of the incident to look at, if not the first of any: what takes a margin away may do harm before that is used."""

    def __str__(self) -> str:
        return f"{self.where}: {self.what or 'nothing'}"

    def drawn(self, seed: int) -> str:
        """With a severity in the place of each range."""
        chance = random.Random(f"{self} {seed}")  # noqa: S311 - of severities, not of secrets

        def draw(match: re.Match[str]) -> str:
            low, high, words = map(str, match.groups(default=""))
            if words:
                return chance.choice(words.split("|"))
            digits = len(low.partition(".")[2])
            return f"{chance.uniform(float(low), float(high)):.{digits}f}"

        return RANGE.sub(draw, self.what)

    @property
    def is_natural(self) -> bool:
        """Whether it is a run of the lab that breaks by itself."""
        return "." in self.what.partition("=")[0]


DRILLS = (
    *(
        Drill(where=where, what=fault, cause=cause)
        for where, fault, cause in (
            ("nano", "random-shard:batches=8..35", "bad-data-batch"),
            ("nano", "shifted-labels:batches=10..35", "bad-data-batch"),
            ("nano", "rare-tokens:batches=4..16", "long-tail-token"),
            ("nano", "duplicate-batch:batches=45..60", "duplicate-batch"),
            ("nano", "lr-spike:factor=35..90,steps=4..10", "unlogged-step-size"),
            ("nano", "lr-spike:factor=32..70,steps=8..20,log=shows", "lr-discontinuity"),
            ("nano", "nan-gradient:tensor=blocks.0|blocks.1.mlp|embedding", "corrupt-gradient"),
            ("nano", "gradient-scale:factor=100..3000", "corrupt-gradient"),
            ("nano", "bit-flip:in=weight,seed=20..99", "corrupt-weight"),
            ("nano", "weight-scale:factor=10..30,tensor=*.query_key_value,rows=2/3", "corrupt-weight"),
            ("nano", "", ""),
            ("toy", "random-shard:batches=8..35", "bad-data-batch"),
            ("toy", "rare-tokens:batches=4..16", "long-tail-token"),
            ("toy", "duplicate-batch:batches=45..60", "duplicate-batch"),
            ("toy", "lr-spike:factor=55..120,steps=4..10", "unlogged-step-size"),
            ("toy", "weight-scale:factor=10..30,tensor=*.query_key_value,rows=2/3", "corrupt-weight"),
        )
    ),
    *(
        Drill(
            where="nano",
            what=f"optimizer.lr={rates},optimizer.warmup_steps={steps},optimizer.clip=0",
            cause="lr-too-high",
        )
        for rates, steps in (("3.1..7.9", 400), ("6.5..11.0", 1600))
    ),
    Drill(
        where="nano",
        what="optimizer.lr=0.16..0.40,optimizer.warmup_steps=400,optimizer.clip=0,model.naive_softmax=True",
        cause="softmax-overflow",
        kind="nonfinite",
    ),
    *(
        Drill(where="other", what=what, cause=what.partition(":")[0])
        for what in (
            "bad-data-batch:strength=3.1..8.0,steps=5..12",
            "hard-batch:strength=1.9..2.3,steps=5..9",
            "corrupt-weight:strength=8..40",
            "corrupt-gradient:strength=300..3000",
            "lr-discontinuity:strength=45..120,steps=8..14",
            "optimizer-reset:strength=0.045..0.090",
            "stale-beta2:strength=4.2..8.0,steps=6..12",
            "zero-variance-norm:strength=1..8",
            "fp16-overflow:strength=400..900,steps=3..6",
            "log-of-zero:strength=400..1500,steps=1..6",
            "",
        )
    ),
)


def settings_of(where: str, seed: int, changes: str = "") -> Settings:
    """A run that is watched, and that nobody helps; with some settings changed: ``optimizer.clip=0,...``."""
    base = SIZES[where]
    cadence = replace(base.cadence, evaluate_steps=0, checkpoint_steps=0, evaluate_batches=1)
    settings = replace(base, steps=STEPS, seed=seed, threads=1, shadow=True, dtype="fp32", cadence=cadence)
    return resolved(changed(settings, list(filter(None, changes.split(",")))))


def done(drill: Drill, seed: int, place: Path) -> Answer:
    """Break a run, and read in the post-mortem of its first incident why it broke."""
    warnings.simplefilter("ignore")  # of torch, about schedulers: said once in every process
    torch.set_num_threads(1)
    drawn = drill.drawn(seed)
    with tempfile.TemporaryDirectory(dir=place) as scratch:
        run = Path(scratch) / "run"
        build = of_other_loop(drawn, seed, run) if drill.where == "other" else of_the_lab(drill, seed, run, place)
        for folder in sorted((run / INCIDENTS).glob("[0-9]*"), key=lambda folder: int(folder.name)):
            capsule = open_capsule(folder)
            if drill.kind in ("", capsule.incident.kind):
                try:
                    cause, _, steps = explained(folder, build(capsule.folder))
                except SealegsError as error:
                    return Answer(f"refused: {error}".replace(str(run), "run"), drawn=drawn)
                return Answer(cause or NOT_KNOWN, steps, drawn)
        return Answer(NO_INCIDENT, drawn=drawn)


def of_the_lab(drill: Drill, seed: int, run: Path, place: Path) -> Callable[[Path], Subject]:
    """Train a branch with a fault, or a whole run without a margin."""
    drawn = drill.drawn(seed)
    settings = settings_of(drill.where, seed, drawn if drill.is_natural else "")
    if drill.is_natural:
        train(settings, open_data(settings), run)
    else:
        faults = [parse(f"{drawn}@{AT}")] if drawn else []
        strike = partial(disturbed, faults, settings.model.vocabulary)
        branch(settings, open_data(settings), place / f"{drill.where}-{seed}", run, disturb=strike)
    return lambda capsule: builder(capsule, None)()


def of_other_loop(drawn: str, seed: int, run: Path) -> Callable[[Path], Subject]:
    """Train the loop that is not the lab's."""
    wrong = other_loop.parsed(drawn)
    other_loop.train(wrong, seed, run)
    return lambda capsule: other_loop.build(wrong, seed)


def prepare(where: str, seed: int, place: Path) -> None:
    """The beginning that all branches of a seed share."""
    folder = place / f"{where}-{seed}"
    if not folder.exists():
        settings = settings_of(where, seed)
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
    branched = {(drill.where, seed) for drill, seed in open_ if drill.where != "other" and not drill.is_natural}
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
    lines.append(f"\nMacro-F1 over {len(scores := f1(answers))} causes: {statistics.fmean(scores.values()):.3f}.")
    share = f"wrong {wrong} of {asked} (95 %: {low:.1%} to {high:.1%})"
    lines.append(f"\nRight {right_of_all} of {asked}, {incidents} of them with an incident; {share}.")
    return "\n".join(lines)


def f1(answers: dict[Drill, list[Answer]]) -> dict[str, float]:
    """Of every cause that was put in, how well the answers meet it: "not known" counts against what it missed, and
    against nothing else.

    >>> drills = [Drill(where="nano", what=word, cause=word) for word in ("a", "b")]
    >>> f1({drills[0]: [Answer("a"), Answer("not known")], drills[1]: [Answer("b"), Answer("a")]})
    {'a': 0.5, 'b': 0.6666666666666666}
    """
    pairs = [(drill.cause, answer.cause) for drill, given in answers.items() for answer in given]
    scores = {}
    for cause in sorted({put_in for put_in, _ in pairs if put_in}):
        both = sum(put_in == said == cause for put_in, said in pairs)
        either = sum(put_in == cause for put_in, _ in pairs) + sum(said == cause for _, said in pairs)
        scores[cause] = 2 * both / either
    return scores


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
            name = f"{drill.where}: {answer.drawn or 'nothing'}"
            took = f"{number}/{total}  {time.perf_counter() - began:.0f} s"
            print(f"{took}  seed {seed}  {name}: {answer.cause}{mark}", file=sys.stderr, flush=True)
    print(
        f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}; seeds {options.seeds}\n"
    )
    print(table(answers))
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
