"""Two processes, started once for all tests that look at what they did."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.faults.two_ranks import RANKS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw, in every run of two_ranks.py. Mark its tests ``xdist_group("two ranks")``."""
    folder = tmp_path_factory.mktemp("two-ranks")
    command = [sys.executable, "-m", "tests.faults.two_ranks"]
    both = [subprocess.Popen([*command, str(rank), str(folder)], cwd=ROOT, env=os.environ) for rank in range(RANKS)]
    try:
        assert [process.wait(timeout=600) for process in both] == [0, 0]
    finally:
        for process in both:
            process.kill()
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]
