"""datatrove's executor for one machine, whose log goes to the work folder and not to the terminal."""

import sys
from collections.abc import Iterable
from typing import Any

import datatrove.executor.base
import datatrove.utils.logging
from datatrove.executor import LocalPipelineExecutor
from loguru import logger


def _to_file_alone(logging_dir: Any, rank: int, local_rank: int = 0, node_rank: int = -1) -> Any:
    logger.remove()
    file = logging_dir.open(f"logs/task_{rank:05d}.log", "w")
    logger.add(file, level="DEBUG", colorize=False)
    return file


def keep_quiet() -> None:
    """Keep datatrove off the terminal, in this process: what fails is told in one sentence by who runs it."""
    logger.remove()
    datatrove.utils.logging.setup_default_logger = logger.remove
    datatrove.executor.base.add_task_logger = _to_file_alone
    if (minhash := sys.modules.get("datatrove.pipeline.dedup.minhash")) is not None:
        minhash.tqdm = _no_bar  # type: ignore[attr-defined]


def _no_bar(files: Iterable[str], **_: object) -> Iterable[str]:
    return files


class QuietLocalExecutor(LocalPipelineExecutor):  # type: ignore[misc]
    """The same, in each of its processes."""

    def _run_for_rank(self, rank: int, local_rank: int = 0, node_rank: int = -1) -> Any:
        keep_quiet()
        return super()._run_for_rank(rank, local_rank, node_rank)
