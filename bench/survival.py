"""SpikeBench, recovery: what becomes of a run with each fault, under nothing, under the rules of others, under Sealegs.

    python bench/survival.py [--keep FOLDER] [--out PREFIX] [--runs FILE.jsonl]
    python bench/survival.py --device cuda --size x1 --tokens TOKENS.npy --fork 300 --after 1000 --seeds 501 ...
    python bench/survival.py --optimizer muon --rules Sealegs --cases LR random shifted NaN bit q,

One run a seed is trained to the fork; every cell (seed, case, rule) is a branch of it: same model, seed and data order.
The gap is the evaluation loss at the same step number less that of the branch that has no fault and is only clipped;
its unit is what healthy branches differ by. FOLDER keeps the beginnings, and finished cells in cells.jsonl: a run that
was interrupted goes on from there, with the cells that share its beginnings. Prints Markdown;
PREFIX.json has everything, PREFIX.svg the gaps. FILE.jsonl gets loss and norm of every step of the unguarded runs.
Needs torch and numpy alone, but for the text (tokenizers) and the figure (matplotlib).
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.rescue.cases import CLEAN, CONTROLS, FAULTS, MOVED, PLACEBOS, Plan
from bench.rescue.loop import begin, branch, digest_of
from bench.rescue.report import figure, report
from bench.rescue.rules import PLAIN, RULES, SEALEGS

SEEDS = (501, 502, 503)
ALL_RULES = (*RULES, SEALEGS)
ALL_PLACEBOS = (*PLACEBOS, *MOVED)
NEVER_ACT = ("nothing", PLAIN, "PyTorch NaN skip", "PaLM restart and skip")
"""Where everything is finite, and a person sees that it is healthy; PLAIN is run all the same, to compare with."""


class Cell(NamedTuple):
    """One branch."""

    seed: int
    case: str
    rule: str


def cells_of(
    seeds: Sequence[int], rules: Sequence[str], words: Sequence[str] = ("",), placebos: int = len(ALL_PLACEBOS)
) -> Iterator[Cell]:
    """What is to be run, of the cases that have one of the words in their names: seed by seed, first what all are
    compared with, then rule by rule, so that a table that time has cut short has whole rows."""
    faults, controls = (
        [case for case in each if any(word in case.name for word in words)] for each in (FAULTS, CONTROLS)
    )
    for seed in seeds:
        yield from (Cell(seed, case.name, PLAIN) for case in (CLEAN, *ALL_PLACEBOS[:placebos]))
        yield from (Cell(seed, case.name, PLAIN) for case in controls if not case.is_announced)
        for rule in rules:
            yield from (Cell(seed, case.name, rule) for case in faults)
            if rule not in NEVER_ACT:
                told = [case for case in controls if rule == SEALEGS or not case.is_announced]
                yield from (Cell(seed, case.name, rule) for case in told)


def known(file: Path, plan: Plan) -> dict[Cell, dict[str, Any]]:
    """The cells of this plan that have been done; of each seed, those that go on from its newest beginning."""
    if not file.exists():
        return {}
    lines = map(json.loads, filter(lambda line: line.endswith("}"), file.read_text().splitlines()))
    cells = [done for done in lines if done["plan"] == plan.key()]
    newest = {done["seed"]: done.get("beginning") for done in cells}
    return {
        Cell(done["seed"], done["case"], done["rule"]): done
        for done in cells
        if done.get("beginning") == newest[done["seed"]]
    }


@contextmanager
def appended(file: Path) -> Iterator[TextIO]:
    """A file to add lines to, whose last line may have been cut short."""
    was_cut = file.exists() and not file.read_bytes().endswith(b"\n")
    with file.open("a") as lines:
        lines.write("\n" * was_cut)
        yield lines


def all_done(
    plan: Plan, cells: Sequence[Cell], keep: Path, scratch: Path, jobs: int, limit_s: float
) -> dict[Cell, dict[str, Any]]:
    """Every cell that could be done before the limit, those of earlier calls that share the beginning among them."""
    file = keep / "cells.jsonl"
    results = known(file, plan)
    began = time.monotonic()
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool, appended(file) as kept:
        seeds = sorted({cell.seed for cell in cells if cell not in results}) if limit_s > 0 else []
        for seed, begun in [(seed, pool.submit(begin, plan, seed, scratch)) for seed in seeds]:
            digest = digest_of(begun.result())
            for cell in [cell for cell in results if cell.seed == seed and results[cell].get("beginning") != digest]:
                del results[cell]
        missing = [cell for cell in cells if cell not in results]
        before = len(cells) - len(missing)
        running: dict[Future[dict[str, Any]], Cell] = {}
        while missing or running:
            while missing and len(running) < jobs and time.monotonic() - began < limit_s:
                cell = missing.pop(0)
                running[pool.submit(branch, plan, *cell, scratch)] = cell
            if not running:
                print(f"{len(missing)} cells are left: the limit of {limit_s:.0f} s is over", file=sys.stderr)
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                cell = running.pop(future)
                results[cell] = future.result()
                kept.write(json.dumps(results[cell]) + "\n")
                kept.flush()
                done = len(cells) - len(missing) - len(running)
                spent = time.monotonic() - began
                left = spent / (done - before) * (len(cells) - done)
                end = "lost" if results[cell]["lost"] else f"{results[cell]['final']:.4f}"
                told = f"{done}/{len(cells)}  {spent:.0f} s, {left:.0f} s left  seed {cell.seed}"
                print(f"{told}  {cell.case}, {cell.rule}: {end}", file=sys.stderr, flush=True)
    return {cell: results[cell] for cell in cells if cell in results}


def write_runs(results: dict[Cell, dict[str, Any]], plan: Plan, file: Path) -> None:
    """The unguarded runs, faulty and clean, for whoever tests detectors."""
    cases = {case.name: case for case in (CLEAN, *FAULTS)}
    with file.open("w") as out:
        for cell, done in results.items():
            if cell.rule == PLAIN and cell.case in cases:
                fault = cases[cell.case].fault.format(at=plan.at, seed=cell.seed) or None
                line: dict[str, Any] = {"name": f"{plan.size}, {cell.case}, seed {cell.seed}", "fault": fault}
                line |= {"at": plan.at if fault else None, "healthy": fault is None}
                out.write(json.dumps(line | {name: done[name] for name in ("loss", "grad_norm")}) + "\n")


def arguments() -> argparse.Namespace:
    """The words of the command."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--size", default=Plan.size)
    words.add_argument("--device", default=Plan.device, choices=["cpu", "cuda"])
    words.add_argument("--tokens", help="a .npy of token ids; needed where there is no tokenizers library")
    words.add_argument("--batch", type=int, default=Plan.batch)
    words.add_argument("--fork", type=int, default=Plan.fork)
    words.add_argument("--after", type=int, default=Plan.after)
    words.add_argument("--compile", action="store_true")
    words.add_argument("--optimizer", default=Plan.optimizer, choices=["adamw", "muon"])
    words.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    words.add_argument("--rules", nargs="+", default=list(ALL_RULES), choices=ALL_RULES)
    words.add_argument("--cases", nargs="+", default=[""], help="words in the names of faults and controls")
    words.add_argument("--placebos", type=int, default=len(ALL_PLACEBOS), help="healthy runs a seed that make the unit")
    words.add_argument("--jobs", type=int, default=2)
    words.add_argument("--limit-seconds", type=float, default=1e9, help="after which no cell is begun")
    words.add_argument("--keep", type=Path, help="where finished cells are, and are looked for")
    words.add_argument("--scratch", type=Path, help="where the beginnings are; large for large models")
    words.add_argument("--out", type=Path)
    words.add_argument("--runs", type=Path)
    return words.parse_args()


def main() -> None:
    """Run what is missing, and print."""
    chosen = arguments()
    names = ("size", "device", "tokens", "batch", "fork", "after", "compile", "optimizer")
    plan = Plan(**{name: getattr(chosen, name) for name in names})
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        keep = chosen.keep or Path(scratch)
        keep.mkdir(parents=True, exist_ok=True)
        cells = list(cells_of(chosen.seeds, chosen.rules, chosen.cases, chosen.placebos))
        place = chosen.scratch or keep / "beginnings"
        results = all_done(plan, cells, keep, place, chosen.jobs, chosen.limit_seconds)
    about: dict[str, Any] = {
        "plan": json.loads(plan.key()),
        "seeds": chosen.seeds,
        "machines": sorted({done["machine"] for done in results.values()}),
        "cell_seconds": round(sum(done["seconds"] for done in results.values())),
        "command": " ".join(["python", *sys.argv]),
        "seconds": round(time.monotonic() - began),
    }
    if chosen.runs:
        write_runs(results, plan, chosen.runs)
    finished = list(results.values())
    if chosen.out:
        columns = ("loss", "grad_norm", "plan", "machine")
        plain = [{name: value for name, value in done.items() if name not in columns} for done in finished]
        lines = ",\n".join(map(json.dumps, plain))
        chosen.out.with_suffix(".json").write_text(f'{{"about": {json.dumps(about)},\n"cells": [\n{lines}\n]}}\n')
    print("; ".join(about["machines"]) + "\n")
    print(report(finished, plan.after))
    if chosen.out and find_spec("matplotlib"):
        figure(finished, plan.after, chosen.out.with_suffix(".svg"))
    print(f"\n{about['seconds']} s; all cells together: {about['cell_seconds']} s of one process's CPU time")


if __name__ == "__main__":
    main()
