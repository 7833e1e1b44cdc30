"""A function in, a process of its own out, forked from one that has imported torch and done nothing else."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.process import BaseProcess

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["torch._dynamo", "torch.distributed.run", "sealegs.guard"])


def start(function: Callable[..., None], *arguments: object, has_children: bool = False) -> BaseProcess:
    """Begin it; it dies with this one, unless it has children."""
    process = FORKED.Process(target=function, args=arguments, daemon=not has_children)
    process.start()
    return process
