"""What becomes of a run with each fault, guarded and not, beside what healthy runs differ by: a Markdown table.

    python bench/guarded.py [--only NAME ...]

One nano run is trained up to step 200; each row is two branches of it that go on to step 330 with a fault at step 230:
one that a playbook treats, and one in shadow mode, which looks and never acts. Both are compared with the branch that
has no fault. What a gap has to be compared with: branches that leave out one healthy batch, and other seeds.
"""

import argparse
import math
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sealegs.errors import RunHalted
from sealegs.faults.practice import disturbed
from sealegs.faults.spec import parse
from sealegs.lab.branches import begin, branch
from sealegs.lab.settings import SIZES, Settings
from sealegs.lab.sources import open_data
from sealegs.lab.train import resolved, train
from sealegs.record.run import open_run
from sealegs.report.commands.interventions import interventions

FORK, AT, STEPS, PLACEBOS, SEEDS = 200, 230, 330, 5, 5
NANO = SIZES["nano"]
KINDS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "clip off, beta2 0.999": {"optimizer": replace(NANO.optimizer, clip=0.0, betas=(0.9, 0.999))},
    "two sources": {"data": replace(NANO.data, sources={"grammar": 0.7, "stdlib": 0.3})},
}
FAULTS = {
    "as it is": (
        f"lr-spike:factor=30,steps=10@{AT}",
        f"lr-spike:factor=60,steps=10@{AT}",
        f"random-shard:batches=40@{AT}",
        f"bit-flip:in=weight@{AT}",
        f"bit-flip:in=weight,seed=1@{AT}",
        f"weight-scale:factor=16,tensor=*.query_key_value,rows=2/3@{AT}",
        f"nan-gradient@{AT}",
        f"nan-gradient:every=50@{AT}",
        f"moments-reset@{AT}",
        f"shifted-labels:batches=10@{AT}",
        f"duplicate-batch:batches=20@{AT}",
    ),
    "clip off, beta2 0.999": (f"rare-tokens:batches=10@{AT}", f"lr-spike:factor=30,steps=10@{AT}"),
    "two sources": (f"poisoned-source:source=stdlib@{AT}",),
}


def settings_of(**changes: Any) -> Settings:
    """Nano, with a playbook."""
    cadence = replace(NANO.cadence, evaluate_steps=0, checkpoint_steps=0, evaluate_batches=16)
    return resolved(replace(replace(NANO, steps=STEPS, threads=1, playbook="standard", cadence=cadence), **changes))


def ending(folder: Path, kind: str, fault: str = "", *, shadow: bool = False, **how: Any) -> tuple[float, str]:
    """The final evaluation loss of a branch, NaN where it was halted; and what was done about the fault."""
    beginning = folder / "beginning"
    if not beginning.exists():
        settings = settings_of(**KINDS[kind])
        begin(settings, open_data(settings), beginning, steps=FORK)
    settings = settings_of(**KINDS[kind], shadow=shadow)
    here = Path(tempfile.mkdtemp(dir=folder)) / "run"
    how.setdefault("disturb", partial(disturbed, [parse(fault)] if fault else [], settings.model.vocabulary))
    try:
        loss = branch(settings, open_data(settings), beginning, here, **how).eval_loss
    except RunHalted:
        loss = math.nan
    assert loss is not None
    return loss, deeds(here)


def deeds(folder: Path) -> str:
    """What was done, in a few words."""
    events = open_run(folder).events
    skips = sum(event.kind in ("skip", "alarm") and event.detail["text"].split("  ")[1] != "GO" for event in events)
    words = [f"{skips} skipped"] if skips else []
    words += [f"{event.detail['steps']} counted back" for event in events if event.kind == "counted-back"]
    words += [done.decided.detail["changed"].rpartition("; ")[2] for done in interventions(events)]
    return "; ".join(words) or "nothing"


@contextmanager
def without(source: str, model: Any, _: object, stream: Any, clock: Any, __: object) -> Iterator[Any]:
    """A source taken out at the step of the faults."""
    losses = model.losses

    def reweighting(*batch: Any) -> Any:
        if clock() == AT:
            stream.reweight(source, 0.0)
        return losses(*batch)

    model.losses = reweighting
    yield stream


def table(kind: str) -> Iterator[str]:
    """The rows of one kind of run, as they become known."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        clean, _ = ending(folder, kind)
        twin = clean
        yield f"\n### {kind}: clean evaluation loss {clean:.4f}\n"
        if kind == "two sources":
            twin, _ = ending(folder, kind, disturb=partial(without, "stdlib"))
            yield f"Compared with the twin that loses the source stdlib at step {AT}, healthy: {twin:.4f}.\n"
        yield "| fault | unguarded, gap | guarded, gap | what was done |\n|---|---|---|---|"
        for fault in FAULTS[kind]:
            unguarded, _ = ending(folder, kind, fault, shadow=True)
            guarded, done = ending(folder, kind, fault)
            yield f"| `{fault}` | {unguarded - twin:+.4f} | {guarded - twin:+.4f} | {done} |".replace("+nan", "NaN")
        dropped = [FORK + number * (STEPS - FORK) // PLACEBOS for number in range(PLACEBOS)]
        placebos = [ending(folder, kind, skip=[(number, number + 1)])[0] for number in dropped]
        yield f"\nClean spread, one healthy batch left out ({', '.join(map(str, dropped))}): gaps"
        yield f"{', '.join(f'{loss - clean:+.4f}' for loss in placebos)}, deviation {statistics.stdev(placebos):.4f}."
        seeds = []
        for seed in range(SEEDS):
            settings = settings_of(**KINDS[kind], seed=seed)
            loss = train(settings, open_data(settings), folder / f"seed-{seed}").eval_loss
            assert loss is not None
            seeds.append(loss)
        yield f"\nClean spread, seeds 0 to {SEEDS - 1}: evaluation losses"
        yield f"{', '.join(f'{loss:.4f}' for loss in seeds)}, standard deviation {statistics.stdev(seeds):.4f}."


def main() -> None:
    """Print all tables."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    chosen = words.parse_args()
    began = time.perf_counter()
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}, one thread")
    for kind in chosen.only:
        for line in table(kind):
            print(line, flush=True)
    print(f"\n{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
