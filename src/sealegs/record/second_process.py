"""Calls a function of ours in a process beside this one, so that two cores work; without one where there can be none.

The process is a fresh interpreter that imports this package and nothing of the user's: neither threads nor a main
module are carried over, as a fork or ``multiprocessing`` would. It ends with the block that it was started for.
"""

import gc
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from subprocess import DEVNULL, PIPE, Popen
from typing import Any, TypeVar

T = TypeVar("T")


@contextmanager
def called_beside(function: Callable[..., T], *arguments: object) -> Iterator[Callable[[], T | None]]:
    """Begin a call; what is yielded waits for its result, which is None if anything went wrong: then do it yourself."""
    with ExitStack() as stack:
        result: Callable[[], T | None] = lambda: None  # noqa: E731
        with suppress(OSError):  # no room for processes, or for a file
            answer = stack.enter_context(tempfile.TemporaryFile())  # a pipe would have to be emptied meanwhile
            process = stack.enter_context(_started(answer))
            stack.callback(process.kill)
            assert process.stdin is not None
            with process.stdin as request:
                pickle.dump((function, arguments), request)
            result = lambda: _result(process, answer)  # noqa: E731
        yield result


def may_call_beside() -> bool:
    """Whether there is a second core, and an interpreter to start on it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores > 1 and bool(sys.executable) and not getattr(sys, "frozen", False)  # a frozen program starts itself


def _started(answer: Any) -> "Popen[bytes]":
    # -P: no module of the folder that the user happens to be in
    command = [sys.executable, "-P", "-m", __name__]
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    return Popen(command, stdin=PIPE, stdout=answer, stderr=DEVNULL, env=os.environ | path)  # noqa: S603 - ourselves


def _result(process: "Popen[bytes]", answer: Any) -> Any:
    if process.wait():
        return None
    answer.seek(0)
    with suppress(Exception):  # something else has printed into it
        return pickle.load(answer)  # noqa: S301 - of our own process, in a file without a name
    return None


def _main() -> None:
    function, arguments = pickle.load(sys.stdin.buffer)  # noqa: S301 - of the process that started this one
    gc.disable()  # a tenth of the time, and nothing here lives long
    pickle.dump(function(*arguments), sys.stdout.buffer, pickle.HIGHEST_PROTOCOL)


if __name__ == "__main__":
    _main()
