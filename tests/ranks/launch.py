"""A program in, a process of it on each rank out: torchrun in small, with no launcher that has to import torch."""

import os
import runpy
import sys
import time
import warnings
from pathlib import Path

from tests.forked import start

PATIENCE_S = 240.0


def launch(program: Path, world: int, *words: str) -> None:
    """Run it on each rank, until all have ended well; if one has not, no other is waited for."""
    ranks = [start(_on_rank, rank, world, str(program), *words) for rank in range(world)]
    deadline = time.monotonic() + PATIENCE_S
    try:
        while (codes := [process.exitcode for process in ranks]) != [0] * world:
            assert not any(codes), f"exit codes {codes}"
            assert time.monotonic() < deadline, f"exit codes {codes} after {PATIENCE_S:.0f} s"
            time.sleep(0.05)
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _on_rank(rank: int, world: int, *words: str) -> None:
    warnings.simplefilter("ignore")
    os.environ |= {"WORLD_SIZE": str(world), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    sys.argv = list(words)
    runpy.run_path(words[0], run_name="__main__")
