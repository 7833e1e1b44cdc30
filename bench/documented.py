"""Whether the right cause is found in documented failures, rebuilt as what their teams could see.

    python bench/documented.py --half tune|report|both [--seeds 3] [--first 1] [--each]

For each failure of `bench/failures/` and each seed it writes the log, and the settings where the team had them, and
asks `sealegs check`. Two points: the right cause is named first with a verdict that fits (or, where no card is right,
the verdict fits, the page names the column and nothing wrong is said with confidence). One point: the right cause is
in the list, or the verdict fits and the answer is an honest unknown. A wrong cause that is called established or
supported is counted besides. The half `report` was written before the rules were touched, and is never tuned to.

The second table is about grades: of the causes that are called established or supported, wherever they stand in the
list, and of the first ones that are hypotheses, how many are right, how many are neighbours of the right one, and how
many are wrong, with the largest share of wrong ones that so few would be no surprise of (95 %, one-sided, exact).
"""

import argparse
import inspect
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.failures.building import Failure, Half

from sealegs.cli.check import check
from sealegs.errors import SealegsError

if TYPE_CHECKING:
    from sealegs.diagnosis.contract import Diagnosis

HALVES, PARTS = ("tune", "report"), ("training", "systems")
SURE = ("established", "supported")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """What was said of one failure, and what it is worth."""

    failure: Failure
    seed: int
    points: int
    is_confidently_wrong: bool
    verdict: str
    said: str
    graded: tuple[tuple[str, str], ...] = ()
    """Grade and outcome (right, near, wrong) of each cause that is called sure, and of the first if it is not."""


def half_named(name: str) -> list[Failure]:
    """The failures of a half."""
    halves_named = [half for half in HALVES if name in (half, "both")]
    modules = [import_module(f"bench.failures.{half}_{part}") for half in halves_named for part in PARTS]
    halves: list[Half] = [module.HALF for module in modules]
    return [failure for half in halves for failure in half.failures]


def asked(failure: Failure, seed: int, place: Path) -> Scored:
    """Write the evidence of one failure, and score the answer."""
    evidence = failure.make(np.random.default_rng([seed, sum(failure.name.encode())]))
    for name, text in evidence.files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    more: dict[str, Any] = {}
    if evidence.settings is not None and "settings" in inspect.signature(check).parameters:
        more["settings"] = (place / evidence.settings,)
    try:
        diagnosis = check(str(place / evidence.main), metrics={}, pattern=None, rules="calibrated", **more)
    except SealegsError as error:
        return Scored(
            failure=failure, seed=seed, points=0, is_confidently_wrong=False, verdict="refused", said=str(error)
        )
    return scored(failure, seed, diagnosis)


def scored(failure: Failure, seed: int, diagnosis: "Diagnosis") -> Scored:
    """The points of an answer."""
    ranked = [each for each in diagnosis.hypotheses if each.grade != "ruled out"]
    first = ranked[0].cause if ranked else "unknown"
    grade = ranked[0].grade if ranked else "hypothesis"
    findings = diagnosis.findings
    fits = findings.verdict in failure.verdicts
    is_wrong = first != "unknown" and first not in (*failure.right, *failure.near)
    if not failure.right:
        is_wrong = first in failure.wrong
    sure_and_wrong = is_wrong and grade in SURE
    if failure.right:
        in_list = any(each.cause in failure.right for each in ranked)
        points = 2 if fits and first in failure.right else int(in_list or (fits and first == "unknown"))
    else:
        points = 0 if not fits else 1 + int(not is_wrong and _names_the_column(failure, diagnosis))
    if sure_and_wrong:
        points = min(points, 1)
    sure = [each for each in ranked if each.grade in SURE] or ranked[:1]
    return Scored(
        failure=failure,
        seed=seed,
        points=points,
        is_confidently_wrong=sure_and_wrong,
        verdict=findings.verdict,
        said=f"{first} ({grade}): {findings.because}",
        graded=tuple((each.grade, outcome(failure, each.cause)) for each in sure if each.cause != "unknown"),
    )


def outcome(failure: Failure, cause: str) -> str:
    """Whether a cause that is named is right, a neighbour of it, or wrong."""
    if cause in failure.right:
        return "right"
    is_wrong = cause not in failure.near if failure.right else cause in failure.wrong
    return "wrong" if is_wrong else "near"


def _names_the_column(failure: Failure, diagnosis: "Diagnosis") -> bool:
    """Whether verdict, findings or the evidence of the first cause speak of the column that tells."""
    if not failure.column:
        return True
    findings = diagnosis.findings
    text = [findings.because, diagnosis.first_action, *findings.notices, *(each.text for each in findings.standing)]
    text += [each.text for each in findings.problems]
    text += [line for each in diagnosis.hypotheses[:1] for line in each.evidence_for]
    return any(word.lower() in "\n".join(text).lower() for word in failure.column)


def table(answers: Sequence[Scored]) -> str:
    """The answers as Markdown: a line an area, then the sum."""
    lines = ["| area | cases | points | confidently wrong | verdicts |", "|---|---|---|---|---|"]
    areas = list(dict.fromkeys(each.failure.area for each in answers))
    for area in [*areas, "all"]:
        of = [each for each in answers if area in ("all", each.failure.area)]
        points, wrong = sum(each.points for each in of), sum(each.is_confidently_wrong for each in of)
        verdicts = ", ".join(f"{count} {name}" for name, count in Counter(each.verdict for each in of).most_common())
        share = 100 * points / (2 * len(of))
        lines.append(f"| {area} | {len(of)} | {points} of {2 * len(of)} ({share:.0f} %) | {wrong} | {verdicts} |")
    return "\n".join(lines)


def reliability(answers: Sequence[Scored]) -> str:
    """How often what is said with each grade is right, as Markdown."""
    lines = ["| grade | causes | right | near | wrong | wrong at most |", "|---|---|---|---|---|---|"]
    counts = Counter(pair for each in answers for pair in each.graded)
    for grade in (*SURE, "hypothesis"):
        right, near, wrong = (counts[grade, of] for of in ("right", "near", "wrong"))
        count = right + near + wrong
        share = f"{right} ({100 * right / count:.0f} %)" if count else "0"
        bound = f"{100 * most_wrong(wrong, count):.0f} %" if count else "-"
        lines.append(f"| {grade}{', first' * (grade not in SURE)} | {count} | {share} | {near} | {wrong} | {bound} |")
    return "\n".join(lines)


def most_wrong(wrong: int, of: int) -> float:
    """The largest chance of being wrong at which so few wrong ones come in one of twenty times (Clopper-Pearson).

    >>> [round(most_wrong(*each), 3) for each in ((0, 59), (1, 10), (3, 3))]
    [0.05, 0.394, 1.0]
    """
    low, high = wrong / of, 1.0
    for _ in range(40):
        share = (low + high) / 2
        chance = sum(math.comb(of, k) * share**k * (1 - share) ** (of - k) for k in range(wrong + 1))
        low, high = (share, high) if chance > 0.05 else (low, share)
    return high


def main() -> None:
    """Write, ask, and print."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--half", choices=(*HALVES, "both"), required=True)
    words.add_argument("--seeds", type=int, default=3)
    words.add_argument("--first", type=int, default=1, help="the first seed")
    words.add_argument("--each", action="store_true", help="a line for each case of the half to tune on")
    words.add_argument("--keep", type=Path, default=None, help="keep the files of the half to tune on here")
    chosen = words.parse_args()
    if chosen.half != "tune" and (chosen.each or chosen.keep):
        words.error("--each and --keep: of the half to tune on alone; the other one stays unread")
    answers = []
    with tempfile.TemporaryDirectory() as scratch:
        place = chosen.keep or Path(scratch)
        for failure in half_named(chosen.half):
            for seed in range(chosen.first, chosen.first + chosen.seeds):
                answer = asked(failure, seed, place / f"{failure.name.replace(' ', '-')}-{seed}")
                answers.append(answer)
                if chosen.each:
                    wrong = ", confidently wrong" if answer.is_confidently_wrong else ""
                    print(f"{failure.name}, seed {seed}: {answer.points}{wrong}; {answer.verdict}, {answer.said}")
    print(f"{len(answers)} cases, half `{chosen.half}`, seeds {chosen.first} to {chosen.first + chosen.seeds - 1}\n")
    print(table(answers))
    print()
    print(reliability(answers))


if __name__ == "__main__":
    main()
