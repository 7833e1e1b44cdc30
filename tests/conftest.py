"""What the tests share: an own cache, the installed command, trained runs."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import hypothesis
import numpy as np
import pytest

# No example is timed: machines are noisy, and a slow one is not wrong.
hypothesis.settings.register_profile("sealegs", deadline=None)
hypothesis.settings.load_profile("sealegs")

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """No test reads or writes the user's cache. The workers of one test run share theirs."""
    shared = tmp_path_factory.getbasetemp().parent if os.environ.get("PYTEST_XDIST_WORKER") else None
    folder = (shared or tmp_path_factory.mktemp("cache")) / "sealegs-cache"
    os.environ["SEALEGS_CACHE"] = str(folder)
    return folder


@pytest.fixture(scope="session")
def sealegs(own_cache: Path) -> Command:
    """The installed command, in a process of its own."""
    program = Path(sys.executable).with_name("sealegs")

    def run(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [program, *words], cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=120
        )

    return run


@pytest.fixture(scope="session")
def tokens_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token ids that a model can learn something of in a few steps, without a tokenizer: a noisy counter."""
    path = tmp_path_factory.mktemp("tokens") / "counter.npy"
    random = np.random.default_rng(0)
    noise = random.random(20_000) < 0.1
    ids = np.where(noise, random.integers(0, 64, 20_000), np.arange(20_000) % 64)
    np.save(path, ids.astype(np.uint16))
    return path
