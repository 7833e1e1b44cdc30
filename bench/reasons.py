"""What each reason to skip buys, and what it costs: recoveries and healthy trainings under other rules.

    python bench/reasons.py [--rules NAME ...] [--seeds 501 502 503] [--healthy 2] [--jobs 2]

*Buys*: how many of the faulty runs of ``bench/survival.py`` (nano) end within twice of what healthy runs differ by,
under a guard as it comes and under the standard playbook. *Costs*: what is skipped in the healthy trainings of
``bench/harm.py``, its open half, under a guard as it comes, and how many of them are worse off. Prints Markdown: how
many faulty runs recovered and were lost; skips / rollbacks in the healthy changes of the same runs.

The rules are those of the guard with one of its reasons taken away; and with one that it does not have: to skip
whatever surprises, as guards do.
"""

import argparse
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.healthy import table
from bench.rescue import loop
from bench.rescue.cases import CLEAN, CONTROLS, FAULTS, MOVED, PLACEBOS, Plan
from bench.rescue.report import Results
from bench.rescue.rules import PLAIN, SEALEGS

from bench import harm
from sealegs import Playbook, judge
from sealegs.detectors import nonfinite
from sealegs.detectors.spike import Spike, SpikeState
from sealegs.vocabulary import Finding, Row

AS_IT_IS = "as it is"


def _skip_surprises(*signals: str) -> None:
    own = Spike.spoils_update

    def spoils_update(self: Spike, state: SpikeState, value: float, p: float, *, clip: float = math.inf) -> bool:
        return own(self, state, value, p, clip=clip) or (self.signal in signals and self._rejects(state, p))

    Spike.spoils_update = spoils_update  # type: ignore[method-assign]


def _skip_what_is_clipped() -> None:
    own = Spike.spoils_update

    def spoils_update(self: Spike, state: SpikeState, value: float, p: float, *, clip: float = math.inf) -> bool:
        return own(self, state, value, p)

    Spike.spoils_update = spoils_update  # type: ignore[method-assign]


def _let_be(name: str) -> None:
    setattr(judge, name, float("inf"))


def _apply_what_is_not_finite() -> None:
    look = nonfinite.NonFinite.look

    def looked(self: nonfinite.NonFinite, state: Any, now: Row) -> Finding | None:
        found = look(self, state, now)
        return None if found is not None and found.signal != "params_finite" else found

    nonfinite.NonFinite.look = looked  # type: ignore[method-assign]


def _forget_the_rate() -> None:
    judge.while_the_rate_is_up = lambda now, findings: findings


RULES: dict[str, Callable[[], None]] = {
    AS_IT_IS: lambda: None,
    "not finite is applied, too": _apply_what_is_not_finite,
    "gross gradients are applied, too": partial(_let_be, "GROSS"),
    "gross gradients are skipped, clipped or not": _skip_what_is_clipped,
    "exploding gradients are applied, too": partial(_let_be, "GROWTH"),
    "a loss that runs away from its rate is applied, too": _forget_the_rate,
    "a surprising norm is skipped, too": partial(_skip_surprises, "grad_norm"),
    "a surprising loss is skipped, too": partial(_skip_surprises, "loss"),
    "whatever surprises is skipped": partial(_skip_surprises, "loss", "grad_norm"),
}


def go_by(rules: str, *, playbook: bool = True) -> None:
    """In this process, for good."""
    RULES[rules]()
    if not playbook:
        names = vars(loop)
        standard = names["Guard"]

        def guard(*arguments: Any, **options: Any) -> Any:
            return standard(*arguments, **options | {"playbook": Playbook.observe()})

        names["Guard"] = guard


def recovered(plan: Plan, seeds: Sequence[int], twins: list[Any], rules: str, place: Path, jobs: int) -> list[str]:
    """How the faulty runs end, and what was done to healthy changes: without a playbook, and with the standard one."""
    told = []
    for playbook in (False, True):
        begun = partial(go_by, rules, playbook=playbook)
        with ProcessPoolExecutor(jobs, get_context("spawn"), begun) as pool:
            cells = [(seed, case.name, SEALEGS) for seed in seeds for case in (*FAULTS, *CONTROLS)]
            done = list(pool.map(partial(_branch, plan, place), cells))
        results = Results([*twins, *done], plan.after)
        within, count = results.within(SEALEGS, results.unit(plan.after))
        faulty = {case.name for case in FAULTS}
        lost = sum(each["lost"] for each in done if each["case"] in faulty)
        skips, rollbacks = (
            sum(each[name] for each in done if each["case"] not in faulty) for name in ("skips", "rollbacks")
        )
        told.append(f"{within} of {count}, {lost} lost; {skips} / {rollbacks}")
    return told


def harmed(rules: str, seeds: int, jobs: int) -> str:
    """What is skipped in healthy trainings, and how many are worse off."""
    wanted = harm.cells_of(["open"], seeds, ["plain", "guard"], None)
    with ProcessPoolExecutor(jobs, get_context("spawn"), partial(go_by, rules)) as pool:
        cells = list(pool.map(harm.run, wanted, wanted.values()))
    names = list(dict.fromkeys(cell["training"] for cell in cells))
    compared = table.all_of(cells, names, "guard")
    skips = sum(sum(table.skips_of([cell]).values()) for cell in cells if cell["keeper"] == "guard")
    steps = sum(cell["counts"]["steps"] for cell in cells if cell["keeper"] == "guard")
    return f"{table.often(skips, steps)} | {sum(of.is_worse for of in compared)} of {len(compared)}"


def _branch(plan: Plan, place: Path, cell: tuple[int, str, str]) -> dict[str, Any]:
    return loop.branch(plan, *cell, place)


def main() -> None:
    """Run, and print."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--rules", nargs="+", default=list(RULES), choices=list(RULES))
    words.add_argument("--seeds", type=int, nargs="+", default=[501, 502, 503])
    words.add_argument("--healthy", type=int, default=2, help="seeds of each healthy training")
    words.add_argument("--jobs", type=int, default=2)
    chosen = words.parse_args()
    plan = Plan()
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        with ProcessPoolExecutor(chosen.jobs, get_context("spawn")) as pool:
            list(pool.map(partial(loop.begin, plan, place=place), chosen.seeds))
            shared = [(seed, case.name, PLAIN) for seed in chosen.seeds for case in (CLEAN, *PLACEBOS, *MOVED)]
            twins = list(pool.map(partial(_branch, plan, place), shared))
        print("| rules | guard as it comes | standard playbook | skipped in healthy trainings | worse off |")
        print("|---|---|---|---|---|")
        for rules in chosen.rules:
            both = " | ".join(recovered(plan, chosen.seeds, twins, rules, place, chosen.jobs))
            print(f"| {rules} | {both} | {harmed(rules, chosen.healthy, chosen.jobs)} |", flush=True)


if __name__ == "__main__":
    main()
