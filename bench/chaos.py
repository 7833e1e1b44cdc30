"""Kills a training again and again, wherever it happens to be, and looks at what is left each time.

    python bench/chaos.py --kills 1000 --jobs 16 [--seed 1] [--out FILE.json] [--keep FOLDER]

A chain is one run folder: a process trains in it, is killed (SIGKILL, SIGTERM, SIGINT) while it trains, saves, goes
back, resumes or closes, and is started again; at last one comes to the end. A moment is a time after a phase has begun,
or the n-th system call for files in it. Half of the signals that can be handled are, as by a job that saves before it
stops. Under `observe` and `standard`, without a fault, with a batch that is skipped, with three in a row and with
damaged weights that are gone back from; on one rank and on two, one of which is killed, or both.

After each kill: no row of a step that had ended is lost, nor anything that was in the record before; the folder opens
(`sealegs.open_run` and `sealegs check`, where msgspec, tyro and rich are installed); what has a checkpoint's name is
whole; none that was proven is less than that, unless the run went back behind it. The next process begins at the newest
proven one, never at 0 while there is one, and where none is proven it says why it begins where it does. A chain whose
run nothing was done to but skips ends bit for bit as a run that nobody killed: rows, weights, moments, schedule, what
the loop keeps of its own.

The same seed draws the same chains; what a kill meets is up to the clock. FOLDER keeps the chains that went wrong.
Needs torch and numpy alone, on Linux. Ends with 1 where anything was found.
"""

import argparse
import json
import os
import platform
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
from bench.kills.chain import Chain, Untouched, run_chain
from bench.kills.inspection import READERS
from bench.kills.processes import FORKED, IMPORTED
from bench.kills.report import found_in, kills_of, report
from bench.kills.training import KINDS, Kind

KILLS_A_CHAIN = 8


class Campaign:
    """Chains of several kinds in a folder, until as many kills have been made as are asked for."""

    def __init__(self, kinds: Sequence[Kind], seed: int, place: Path) -> None:
        self.chains: list[Chain] = []
        self._kinds = kinds
        self._seed = seed
        self._place = place
        self._began = time.monotonic()
        self._untouched: dict[Kind, Untouched] = {}
        self._locks = {kind: threading.Lock() for kind in kinds}

    def run(self, kills: int, jobs: int) -> None:
        """Make so many kills, or a few more, in so many chains at a time."""
        with ThreadPoolExecutor(jobs) as pool:
            while (missing := kills - kills_of(self.chains).total()) > 0:
                begun = len(self.chains)
                count = -(-missing // KILLS_A_CHAIN)
                quotas = [min(KILLS_A_CHAIN, missing - KILLS_A_CHAIN * place) for place in range(count)]
                for chain in pool.map(self._chain, range(begun, begun + count), quotas):
                    self.chains.append(chain)
                    self._tell(chain, kills)

    def _chain(self, number: int, quota: int) -> Chain:
        kind, folder = self._kinds[number % len(self._kinds)], self._place / f"chain-{number}"
        with self._locks[kind]:
            if kind not in self._untouched:
                name = f"untouched-{self._kinds.index(kind)}"
                self._untouched[kind] = Untouched(kind, self._place / name)
        chance = random.Random(f"{self._seed}/{number}")  # noqa: S311
        chain = run_chain(number, kind, chance, quota, folder, self._untouched[kind])
        if not chain.problems:
            shutil.rmtree(folder)
        return chain

    def _tell(self, chain: Chain, kills: int) -> None:
        made, seconds = kills_of(self.chains).total(), time.monotonic() - self._began
        starts = " ".join("-" if start is None else str(start) for start in chain.starts)
        text = f"{made}/{kills} kills  {seconds:.0f} s  chain {chain.number}, {chain.kind}: {starts}, {chain.end}"
        print(
            text, *(f"  {where}: {problem}" for where, problem in chain.problems), sep="\n", file=sys.stderr, flush=True
        )


def main(words: Sequence[str] | None = None) -> int:
    """Kill, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--runs", nargs="+", default=[""], help="words in what is trained: 'standard, none, 1 rank'")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--keep", type=Path, help="where chains stay in which something was found")
    chosen = parser.parse_args(words)
    kinds = [kind for kind in KINDS if any(word in str(kind) for word in chosen.runs)]
    began = time.monotonic()
    FORKED.set_forkserver_preload(IMPORTED)
    with tempfile.TemporaryDirectory() as scratch:
        campaign = Campaign(kinds, chosen.seed, chosen.keep or Path(scratch))
        campaign.run(chosen.kills, chosen.jobs)
    chains = campaign.chains
    about: dict[str, Any] = {
        "kills": kills_of(chains).total(),
        "found": found_in(chains),
        "seed": chosen.seed,
        "seconds": round(time.monotonic() - began),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "command": " ".join(["python", "bench/chaos.py", *(sys.argv[1:] if words is None else words)]),
        "not_read_for_want_of": list(READERS),
    }
    if chosen.out:
        lines = ",\n".join(json.dumps(chain.plain()) for chain in chains)
        chosen.out.write_text(f'{{"about": {json.dumps(about)},\n"chains": [\n{lines}\n]}}\n')
    print(report(chains))
    unread = f"; not read by `open_run` and `check`, for want of {', '.join(READERS)}" if READERS else ""
    print(f"\n{about['kills']} kills, seed {chosen.seed}, {about['seconds']} s, {about['machine']}{unread}")
    return int(any(chain.problems for chain in chains))


if __name__ == "__main__":
    sys.exit(main())
