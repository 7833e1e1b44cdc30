"""Are healthy trainings worse off under the guard? Every training under every keeper, seed by seed, as Markdown.

    python bench/harm.py [--half open|frozen|held|late|all] [--seeds N] [--keepers NAME ...] [--only NAME ...]
                         [--jobs 2] [--keep FOLDER] [--out PREFIX]

The trainings are those of bench/healthy/open, which rules may be tuned on, bench/healthy/frozen, which nobody who tuned
them had seen until 2026-11-17, bench/healthy/held, which were written after that by somebody who did not know the
rules, and bench/healthy/late, written on 2026-11-17 after all rules, by somebody who did not know them;
bench/healthy/contract.py says what one is. Nothing is wrong with any of them: whatever is skipped was skipped by
mistake. Differences are paired by seed, and their unit, the *spread*, is the standard deviation of the unguarded seeds
(of at least a thousandth of their mean). A training is *worse* under a keeper where one of these holds:

- a seed was halted or failed, or ended with a quality that is no number;
- the mean difference is negative, by more than half a spread and more than two standard errors of the differences:
  what is smaller nobody would see, what is less certain may be the chaos that follows any change;
- a seed is more than three spreads below itself unguarded, and more than one spread below the worst unguarded seed:
  a mean over five seeds does not show that one of them was lost.

Where a keeper did nothing, the quality must be that of the plain run, to the last bit: pairs of which that is not true
are counted, and each is a finding. (An accuracy is coarse: the same one does not say that the weights are the same.)
What a ``GradScaler`` skips by itself is not counted.

FOLDER keeps finished cells in cells.jsonl, each with a digest of the code that it depends on: the guard's and the
training's own, or only the latter for keepers that are not ours. PREFIX.json gets everything.
"""

import argparse
import hashlib
import importlib
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from bench.healthy.contract import Training
from bench.healthy.keepers import GUARDS, KEEPERS, PLAIN, one_thread
from bench.healthy.table import report

from sealegs.errors import RunHalted

ROOT = Path(__file__).resolve().parents[1]
HALVES = ("open", "frozen", "held", "late")
GUARD_CODE = ("detectors", "stats", "signals", "step", "state", "data", "capsule", "recovery", "record", "diagnosis")
"""Folders of src/sealegs that a guarded cell depends on, beside the modules that are in none."""
SHARED_CODE = ("healthy/contract.py", "healthy/keepers.py", "peers.py", "rescue/rules.py")
"""Of bench: what every cell depends on."""


class Cell(NamedTuple):
    """One training with one seed under one keeper."""

    module: str
    """That the training is found in again by another process."""
    training: str
    seed: int
    keeper: str


def trainings_of(module: str) -> list[Training]:
    """The values of a module that are trainings."""
    return [value for value in vars(importlib.import_module(module)).values() if isinstance(value, Training)]


def modules_of(half: str) -> list[str]:
    """By the name that they are imported by."""
    return [f"bench.healthy.{half}.{file.stem}" for file in sorted((ROOT / "bench/healthy" / half).glob("*.py"))]


@cache
def digest(files: tuple[Path, ...]) -> str:
    """Of what is in them."""
    seen = hashlib.blake2b(torch.__version__.encode(), digest_size=8)
    for file in files:
        seen.update(file.name.encode() + file.read_bytes())
    return seen.hexdigest()


@cache
def code_of(module: str, is_guarded: bool) -> str:
    """A digest of all code that the cells of a module depend on; a module without trainings helps the others."""
    half = module.split(".")[-2]
    modules = [each for each in modules_of(half) if each == module or not trainings_of(each)]
    files = [ROOT / f"{each.replace('.', '/')}.py" for each in modules]
    files += [ROOT / "bench" / name for name in SHARED_CODE]
    if is_guarded:
        source = ROOT / "src/sealegs"
        files += [file for name in GUARD_CODE for file in sorted((source / name).rglob("*.py"))]
        files += sorted(source.glob("*.py"))
    return digest(tuple(files))


def run(cell: Cell, code: str) -> dict[str, Any]:
    """Train once. Whatever goes wrong is a result."""
    one_thread()
    training = next(each for each in trainings_of(cell.module) if each.name == cell.training)
    began, quality, error = time.process_time(), None, None
    with tempfile.TemporaryDirectory() as folder:
        keeper = KEEPERS[cell.keeper](Path(folder))
        failure: Exception | None = None
        try:
            quality = training.train(cell.seed, keeper)
        except RunHalted as halt:
            failure, error = halt, f"RunHalted: {halt}"
        except Exception as other:
            failure, error = other, traceback.format_exc()
        seconds = time.process_time() - began
        counts = keeper.finish(failure)
    if quality is not None and not math.isfinite(quality):
        quality, error = None, error or f"ValueError: the quality is {quality}"
    about = {name: getattr(training, name) for name in ("kind", "metric", "about", "is_better_higher")}
    done = {"quality": quality, "error": error, "counts": counts.plain(), "seconds": round(seconds, 2)}
    return {**cell._asdict(), **about, **done, "code": code}


def known(file: Path, wanted: dict[Cell, str]) -> dict[Cell, dict[str, Any]]:
    """The cells that have been done by the code that there is now."""
    if not file.exists():
        return {}
    lines = map(json.loads, filter(lambda line: line.endswith("}"), file.read_text().splitlines()))
    cells = {Cell(*(done[name] for name in Cell._fields)): done for done in lines}
    return {cell: done for cell, done in cells.items() if wanted.get(cell) == done["code"]}


def all_done(wanted: dict[Cell, str], keep: Path, jobs: int) -> Iterator[dict[str, Any]]:
    """Every cell, those of earlier calls among them, in the order that they are wanted in."""
    file = keep / "cells.jsonl"
    results = known(file, wanted)
    missing = [cell for cell in wanted if cell not in results]
    began, total = time.monotonic(), len(missing)
    os.environ["OMP_NUM_THREADS"] = "1"  # before the workers import torch
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool, file.open("a") as kept:
        running: set[Future[dict[str, Any]]] = {pool.submit(run, cell, wanted[cell]) for cell in missing}
        while running:
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                done = future.result()
                results[Cell(*(done[name] for name in Cell._fields))] = done
                kept.write(json.dumps(done) + "\n")
                kept.flush()
                count, spent = total - len(running), time.monotonic() - began
                left = spent / count * (total - count)
                end = "lost" if done["quality"] is None else f"{done['quality']:.4g}"
                told = f"{count}/{total}  {spent:.0f} s, {left:.0f} s left  seed {done['seed']}"
                print(f"{told}  {done['training']}, {done['keeper']}: {end}", file=sys.stderr, flush=True)
    yield from (results[cell] for cell in wanted)


def commit() -> str:
    """Of the guard's source, and whether it has been changed since."""
    say = [["git", "rev-parse", "--short", "HEAD"], ["git", "status", "--porcelain", "--", "src"]]
    head, changed = (subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout.strip() for words in say)
    return head + (" and changes in src" if changed else "")


def changed_since(wanted: dict[Cell, str]) -> bool:
    """Whether the code is not what it was when the cells were begun: others may work in the same checkout."""
    digest.cache_clear()
    code_of.cache_clear()
    return any(code_of(cell.module, cell.keeper in GUARDS) != code for cell, code in wanted.items())


def arguments() -> argparse.Namespace:
    """The words of the command."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--half", default="open", choices=[*HALVES, "all"])
    words.add_argument("--seeds", type=int, default=5, help="so many, from 0 on")
    words.add_argument("--keepers", nargs="+", default=list(KEEPERS), choices=list(KEEPERS))
    words.add_argument("--only", nargs="+", metavar="NAME", help="trainings whose names begin with one of these")
    words.add_argument("--jobs", type=int, default=2)
    words.add_argument("--keep", type=Path, help="where finished cells are, and are looked for")
    words.add_argument("--out", type=Path, metavar="PREFIX")
    return words.parse_args()


def cells_of(halves: Sequence[str], seeds: int, keepers: Sequence[str], only: Sequence[str] | None) -> dict[Cell, str]:
    """What is to be run, each with the digest of its code; training by training, first what all are compared with."""
    found = [(module, each.name) for half in halves for module in modules_of(half) for each in trainings_of(module)]
    chosen = [(module, name) for module, name in found if only is None or name.startswith(tuple(only))]
    ordered = [PLAIN, *(keeper for keeper in keepers if keeper != PLAIN)]
    return {
        Cell(module, name, seed, keeper): code_of(module, keeper in GUARDS)
        for module, name in chosen
        for keeper in ordered
        for seed in range(seeds)
    }


def main() -> None:
    """Run what is missing, and print."""
    chosen = arguments()
    began, source = time.monotonic(), commit()
    halves = HALVES if chosen.half == "all" else (chosen.half,)
    wanted = cells_of(halves, chosen.seeds, chosen.keepers, chosen.only)
    with tempfile.TemporaryDirectory() as scratch:
        keep = chosen.keep or Path(scratch)
        keep.mkdir(parents=True, exist_ok=True)
        cells = list(all_done(wanted, keep, chosen.jobs))
    about = {
        "commit": source,
        "changed_meanwhile": changed_since(wanted),
        "machine": f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}",
        "command": " ".join(["python", *sys.argv]),
        "seconds": round(time.monotonic() - began),
    }
    if chosen.out:
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        lines = ",\n".join(map(json.dumps, cells))
        chosen.out.with_suffix(".json").write_text(f'{{"about": {json.dumps(about)},\n"cells": [\n{lines}\n]}}\n')
    print(f"{about['machine']}; {about['commit']}\n")
    if about["changed_meanwhile"]:
        print("**The code was changed while this ran: what was imported late may be newer than the rest.**\n")
    print(report(cells))
    print(f"\n{about['seconds']} s; all cells together: {sum(cell['seconds'] for cell in cells):.0f} s of CPU time")


if __name__ == "__main__":
    main()
