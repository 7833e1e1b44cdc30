"""What each reason to skip buys, and what it costs: recoveries and healthy trainings with that reason taken away.

    python bench/reasons.py [--reasons NAME ...] [--seeds 501 502 503] [--healthy 2] [--keep FOLDER]

A reason is taken away by not letting it spoil an update; everything else stays as it is. *Buys*: how many of the faulty
runs of ``bench/survival.py`` (nano, standard playbook) still end within twice of what healthy runs differ by. *Costs*:
what is skipped in the healthy trainings of ``bench/harm.py``, the open half, under a guard as it comes. Prints Markdown.
"""

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.rescue.cases import CLEAN, CONTROLS, FAULTS, MOVED, PLACEBOS, Plan
from bench.rescue.loop import begin, branch
from bench.rescue.report import Results
from bench.rescue.rules import PLAIN, SEALEGS

from sealegs.detectors.spike import Spike, State
from sealegs.vocabulary import Row


def _without_coarse_rule() -> None:
    Spike._coarse_limit = lambda self, state: math.inf  # type: ignore[method-assign]


def _without_statistic(signal: str) -> None:
    p_of = Spike.p

    def p(self: Spike, state: State, now: Row, value: float, *, coarse: bool | None = None) -> float:
        found = p_of(self, state, now, value, coarse=coarse)
        return 1.0 if self.signal == signal and found > 0.0 else found

    Spike.p = p  # type: ignore[method-assign]


def _without_twice_in_a_row() -> None:
    Spike._comes_again = lambda self, state, p: False  # type: ignore[method-assign]


def _without_many_high() -> None:
    Spike._are_many = lambda self, state, p: False  # type: ignore[method-assign]


REASONS: dict[str, Callable[[], None]] = {
    "all of them": lambda: None,
    "without the coarse rule": _without_coarse_rule,
    "without the statistic of the loss": partial(_without_statistic, "loss"),
    "without the statistic of the norm": partial(_without_statistic, "grad_norm"),
    "without the second in a row": _without_twice_in_a_row,
    "without many high ones": _without_many_high,
}


def take_away(reason: str) -> None:
    """In this process, for good."""
    REASONS[reason]()


def recoveries(seeds: Sequence[int], reasons: Sequence[str], place: Path, jobs: int) -> None:
    """Print how the faulty runs end."""
    plan = Plan()
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        list(pool.map(partial(begin, plan, place=place), seeds))
        shared = [(seed, case.name, PLAIN) for seed in seeds for case in (CLEAN, *PLACEBOS, *MOVED)]
        twins = list(pool.map(partial(_branch, plan, place), shared))
    print("| rules | within twice at the end | lost | skips | rollbacks | skips, rollbacks in healthy changes |")
    print("|---|---|---|---|---|---|")
    for reason in reasons:
        with ProcessPoolExecutor(jobs, get_context("spawn"), take_away, (reason,)) as pool:
            cells = [(seed, case.name, SEALEGS) for seed in seeds for case in (*FAULTS, *CONTROLS)]
            done = list(pool.map(partial(_branch, plan, place), cells))
        results = Results([*twins, *done], plan.after)
        within, count = results.within(SEALEGS, results.unit(plan.after))
        faulty = [each for each in done if each["case"] in {case.name for case in FAULTS}]
        benign = [each for each in done if each not in faulty]
        gaps = [
            f"{case.name} {statistics.median(gap / results.unit(plan.after) for gap in results.gaps([case.name], SEALEGS, plan.after)):+.1f}"
            for case in FAULTS
        ]
        print(
            f"| {reason} | {within} of {count} | {sum(each['lost'] for each in faulty)} | {total(faulty, 'skips')} | "
            f"{total(faulty, 'rollbacks')} | {total(benign, 'skips')}, {total(benign, 'rollbacks')} | {gaps}",
            flush=True,
        )


def total(cells: Sequence[dict[str, Any]], name: str) -> int:
    """Over all of them."""
    return sum(each[name] for each in cells)


def _branch(plan: Plan, place: Path, cell: tuple[int, str, str]) -> dict[str, Any]:
    return branch(plan, *cell, place)


def main() -> None:
    """Run, and print."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--reasons", nargs="+", default=list(REASONS), choices=list(REASONS))
    words.add_argument("--seeds", type=int, nargs="+", default=[501, 502, 503])
    words.add_argument("--jobs", type=int, default=2)
    words.add_argument("--keep", type=Path)
    chosen = words.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        recoveries(chosen.seeds, chosen.reasons, chosen.keep or Path(scratch), chosen.jobs)


if __name__ == "__main__":
    main()
