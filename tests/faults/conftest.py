"""Two processes, started once for all tests that look at what they did."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.faults.two_ranks import RANKS
from tests.ranks.launch import launch


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw, in every run of two_ranks.py. Mark its tests ``xdist_group("ranks")``."""
    folder = tmp_path_factory.mktemp("two-ranks")
    launch(Path(__file__).with_name("two_ranks.py"), RANKS, str(folder))
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]
