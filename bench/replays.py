"""How often a replay names the cause that was put in: a Markdown table, a row for each fault.

    python bench/replays.py [--seeds 101 102 103] [--only NAME ...] [--size nano]

For each seed one run is trained up to step 200. Each fault strikes a branch of it at step 230 with nothing done about
it, and the first incident of that branch is run again from its capsule. Right is the cause that was put in; "not known"
and "no incident" are counted apart from wrong causes, which are what must not be. The seeds and severities here are
others than those in the tests.
"""

import argparse
import math
import platform
import tempfile
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from sealegs.cli.replay import builder
from sealegs.errors import SealegsError
from sealegs.faults.practice import disturbed
from sealegs.faults.spec import parse
from sealegs.lab.branches import begin, branch
from sealegs.lab.settings import SIZES, Settings
from sealegs.lab.sources import open_data
from sealegs.lab.train import resolved
from sealegs.record.schema import INCIDENTS
from sealegs.replay.capsule import open_capsule
from sealegs.replay.experiment import Experiment
from sealegs.replay.tested import put_to_the_test

FORK, AT, STEPS = 200, 230, 262
FAULTS: dict[str, tuple[str, ...]] = {
    "random-shard:batches=15": ("bad-data-batch",),
    "shifted-labels:batches=6": ("bad-data-batch",),
    "rare-tokens:batches=4": ("long-tail-token",),
    "duplicate-batch:batches=24": ("duplicate-batch",),
    "lr-spike:factor=20,steps=8": ("unlogged-step-size",),
    "lr-spike:factor=80,steps=4": ("unlogged-step-size",),
    "moments-reset": ("optimizer-reset",),
    "nan-gradient": ("corrupt-gradient",),
    "gradient-scale:factor=300": ("corrupt-gradient",),
    "bit-flip:in=weight,seed=5": ("corrupt-weight",),
    "weight-scale:factor=12,tensor=*.query_key_value,rows=2/3": ("corrupt-weight",),
    "": (),
}
"""What is put in, and the causes that are right; nothing at all, where no cause is."""
NOT_KNOWN, NO_INCIDENT = "not known", "no incident"


def settings_of(size: str, seed: int) -> Settings:
    """A run that is watched, and that nobody helps."""
    base = SIZES[size]
    cadence = replace(base.cadence, evaluate_steps=0, checkpoint_steps=0, evaluate_batches=1)
    return resolved(replace(base, steps=STEPS, seed=seed, threads=1, shadow=True, cadence=cadence))


def answer(settings: Settings, beginning: Path, here: Path, fault: str) -> tuple[str, int]:
    """The cause that the replay of the first incident names, and the steps that it took."""
    faults = [parse(f"{fault}@{AT}")] if fault else []
    branch(
        settings, open_data(settings), beginning, here, disturb=partial(disturbed, faults, settings.model.vocabulary)
    )
    if not (here / INCIDENTS).exists():
        return NO_INCIDENT, 0
    try:
        capsule = open_capsule(min((here / INCIDENTS).iterdir(), key=lambda folder: int(folder.name)))
        tested = put_to_the_test(Experiment(capsule, builder(capsule.folder, None)()))
    except SealegsError as error:
        return f"refused: {error}", 0
    return tested.cause or NOT_KNOWN, tested.steps


def wilson(hits: int, of: int) -> tuple[float, float]:
    """95 % interval of a share.

    >>> [round(bound, 3) for bound in wilson(0, 50)]
    [0.0, 0.071]
    """
    z, share = 1.96, hits / of
    middle = (share + z * z / (2 * of)) / (1 + z * z / of)
    half = z * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of)) / (1 + z * z / of)
    return max(middle - half, 0.0), min(middle + half, 1.0)


def main() -> None:
    """Measure, and print."""
    say = partial(print, flush=True)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[101, 102, 103, 104, 105])
    parser.add_argument("--size", default="nano")
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    began = time.perf_counter()
    say(f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}, {options.size}, ")
    say(f"seeds {options.seeds}\n")
    say("| fault | right | not known | no incident | wrong | answers | most steps |\n|---|---|---|---|---|---|---|")
    wrong = asked = right_of_all = 0
    with tempfile.TemporaryDirectory() as place:
        for fault, causes in FAULTS.items():
            if options.only and not any(fault.startswith(name) for name in options.only):
                continue
            answers: Counter[str] = Counter()
            most = 0
            for seed in options.seeds:
                settings, beginning = settings_of(options.size, seed), Path(place) / f"{seed}"
                if not beginning.exists():
                    begin(settings, open_data(settings), beginning, steps=FORK)
                here = Path(tempfile.mkdtemp(dir=place)) / "run"
                named, steps = answer(settings, beginning, here, fault)
                answers[named] += 1
                most = max(most, steps)
            right = sum(answers[cause] for cause in causes) if causes else answers[NO_INCIDENT]
            unsure = answers[NOT_KNOWN]
            none = answers[NO_INCIDENT] if causes else 0
            bad = sum(answers.values()) - right - unsure - none
            wrong, asked, right_of_all = wrong + bad, asked + sum(answers.values()), right_of_all + right
            told = ", ".join(f"{name} {count}" for name, count in answers.most_common())
            say(f"| {fault or 'nothing'} | {right} | {unsure} | {none} | {bad} | {told} | {most} |")
    low, high = wilson(wrong, asked)
    say(f"\nRight {right_of_all} of {asked}; wrong causes {wrong} of {asked} (95 %: {low:.1%} to {high:.1%}).")
    say(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
