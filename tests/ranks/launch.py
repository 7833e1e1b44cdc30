"""A program in, a process of it on each rank out: torchrun in small, with no launcher that has to import torch."""

import gc
import multiprocessing
import os
import runpy
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.forked import start

PATIENCE_S = float(os.environ.get("SEALEGS_TEST_PATIENCE_S", "240"))
"""After which ranks are taken for stuck; a machine with much else to do may need more."""


def launch(program: Path, world: int, *words: str, framework: str | None = None) -> None:
    """Run it on each rank, until all have ended well; if one has not, no other is waited for.

    A framework that the program needs is imported once for all ranks: it takes longer than what they do with it.
    """
    if framework is None:
        _wait([start(_on_rank, rank, world, str(program), *words) for rank in range(world)])
    else:
        parent = start(_with_framework, framework, world, str(program), *words, has_children=True)
        _wait([parent], BaseProcess.terminate)


def _with_framework(framework: str, world: int, *words: str) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # no rank is left behind
    warnings.simplefilter("ignore")
    import_module(framework)
    gc.freeze()  # it is no garbage, whoever looks for some
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=_on_rank, args=(rank, world, *words), daemon=True) for rank in range(world)]
    for process in ranks:
        process.start()
    _wait(ranks)


def _wait(processes: Sequence[BaseProcess], stop: Callable[[BaseProcess], None] = BaseProcess.kill) -> None:
    deadline = time.monotonic() + PATIENCE_S
    try:
        while (codes := [process.exitcode for process in processes]) != [0] * len(processes):
            assert not any(codes), f"exit codes {codes}"
            assert time.monotonic() < deadline, f"exit codes {codes} after {PATIENCE_S:.0f} s"
            time.sleep(0.05)
    finally:
        for process in processes:
            stop(process)
            process.join()


def _on_rank(rank: int, world: int, *words: str) -> None:
    warnings.simplefilter("ignore")
    os.environ |= {"WORLD_SIZE": str(world), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    sys.argv = list(words)
    runpy.run_path(words[0], run_name="__main__")
