"""A program in, a process of it on each rank out: torchrun in small, with no launcher that has to import torch."""

import os
import subprocess
import sys
import time
from pathlib import Path

PATIENCE_S = 240.0


def launch(program: Path, world: int, *words: str) -> None:
    """Run it on each rank, until all have ended well; if one has not, no other is waited for."""
    of_all = os.environ | {"WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program), *words], env=of_all | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        )
        for rank in range(world)
    ]
    deadline = time.monotonic() + PATIENCE_S
    try:
        while (codes := [process.poll() for process in ranks]) != [0] * world:
            assert not any(codes), f"exit codes {codes}"
            assert time.monotonic() < deadline, f"exit codes {codes} after {PATIENCE_S:.0f} s"
            time.sleep(0.05)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
