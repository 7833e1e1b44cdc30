"""torchrun agents on one machine, each as if it were a machine: begun, and killed with their workers.

The rendezvous store has a process of its own, so that no kill takes it along.
"""

import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self

Start = Callable[..., BaseProcess]
"""Begins a function in a process that has imported torch."""


class Agents:
    """Two agents of one job."""

    def __init__(self, start: Start, program: Path, *words: str, restarts: int, log: Path) -> None:
        self._start = start
        self._log = log
        receives, sends = multiprocessing.Pipe(duplex=False)
        self._store = start(_hold_store, sends)
        sends.close()
        settings = "is_host=0,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=5,join_timeout=120"
        self._words = (
            *("--nnodes=1:2", "--nproc-per-node=1", f"--max-restarts={restarts}", "--monitor-interval=0.1"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{receives.recv()}", f"--rdzv-conf={settings}"),
            *("--rdzv-id=elastic", "--local-addr=127.0.0.1", "--run-path", "--start-method=fork"),
            *(str(program), *words),
        )
        self.running: dict[int, BaseProcess] = {}
        """By number, 0 and 1."""

    def begin(self, number: int) -> None:
        """Begin one."""
        self.running[number] = self._start(_torchrun, str(self._log), *self._words, has_children=True)

    def kill(self, number: int) -> None:
        """Kill one and its worker, as a machine is lost."""
        agent = self.running.pop(number)
        assert agent.pid is not None
        os.killpg(agent.pid, signal.SIGKILL)
        agent.join()

    def ended(self) -> dict[int, int]:
        """The exit codes of those that have ended by themselves."""
        return {number: agent.exitcode for number, agent in self.running.items() if agent.exitcode is not None}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for number in list(self.running):
            if self.running[number].exitcode is None:
                self.kill(number)
        self._store.kill()
        self._store.join()


def _hold_store(sends: Connection) -> None:
    import torch.distributed as dist

    make: Any = getattr(dist, "TCPStore")  # noqa: B009 -- torch does not export it for mypy
    store = make("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    sends.send(store.port)
    while True:
        time.sleep(3600)


def _torchrun(log: str, *words: str) -> None:
    """The command itself, in this process."""
    from torch.distributed.run import main

    os.setpgid(0, 0)  # so that its workers can be killed with it
    with open(log, "a", buffering=1) as file:  # noqa: PTH123
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    warnings.simplefilter("ignore")
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    main(words)
