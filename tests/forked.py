"""A function in, a process of its own out, forked from one that has imported torch and done nothing else.

For tests that need what only a process has, and not the way in which a program begins or ends: to import torch costs
more than most of them do. Tests in the group "ranks" share the one that it is done in, and those in "jobs", which
mostly wait, another.
"""

import multiprocessing
from collections.abc import Callable
from multiprocessing.process import BaseProcess

FORKED = multiprocessing.get_context("forkserver")
"""For what starts processes in a context of its own."""
FORKED.set_forkserver_preload(["forked_from"])  # of tests/processes, which is in the path of every process


def start(function: Callable[..., None], *arguments: object, has_children: bool = False) -> BaseProcess:
    """Begin it; it dies with this one, unless it has children. Of this process it has the path and the folder, and no
    other state."""
    process = FORKED.Process(target=function, args=arguments, daemon=not has_children)
    process.start()
    return process
