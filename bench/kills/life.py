"""One life of a process that trains: from its start to its end, or to its kill."""

import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # so that a process that is forked from one with this module need not import it
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict
from bench.kills.moments import Announcer, Moment
from bench.kills.training import Kind, Training

from sealegs.errors import RunHalted

STOPPED = 130
"""The exit code of a process that a signal has ended in the middle, as far as it could handle it."""


class StopRequest:
    """What a job's own signal handler does: the step ends, a checkpoint is written. A second signal stops at once."""

    def __init__(self, is_graceful: bool) -> None:
        self.is_made = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle if is_graceful else _default(number))

    def _handle(self, number: int, _: object) -> None:
        self.is_made = True
        signal.signal(number, _default(number))

    def is_made_on_any_rank(self) -> bool:
        """All ranks stop at the same step, or they would wait for each other."""
        if not dist.is_initialized():
            return self.is_made
        asked = torch.tensor(float(self.is_made))
        dist.all_reduce(asked)
        return bool(asked > 0)


def _default(number: int) -> Any:
    return signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What all ranks are to do in a life."""

    kind: Kind
    chain: Path
    """The folder of the chain, in which the run's is."""
    attempt: int
    until: int
    """The step to end at."""
    strikes: bool = True
    """Whether weights are damaged, where that is the fault."""
    asks_after: int | None = None
    """The step of this life after which the run is asked to go back."""


def live(orders: Orders, rank: int, moment: Moment | None, told: Connection) -> None:
    """Do in this process what is ordered. What happens is told to whoever holds the other end."""
    request = StopRequest(moment is not None and moment.is_graceful)
    log = os.open(orders.chain / f"log-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)

    def tell(what: str, detail: Any = None) -> None:
        with suppress(OSError):  # whoever listened may have gone
            told.send((what, detail))

    try:
        _train(orders, rank, Announcer(tell, moment), request, tell)
    except KeyboardInterrupt:
        sys.exit(STOPPED)
    except RunHalted as halted:
        tell("halted", str(halted))
    except BaseException:
        tell("error", traceback.format_exc())
        sys.exit(1)


def _train(orders: Orders, rank: int, announcer: Announcer, request: StopRequest, tell: Callable[..., None]) -> None:
    announcer.begin("resuming")
    kind, chain = orders.kind, orders.chain
    if kind.ranks > 1:
        store = f"file://{chain}/store-{orders.attempt}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=kind.ranks)
    training = Training(kind, chain / "run", rank)
    steps = os.open(chain / "steps.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    strikes = orders.strikes
    with training.guard as guard:
        resumed = guard.resumed
        tell("born", None if resumed is None else (resumed.checkpoint, resumed.because, resumed.passed_over))
        is_asked = request.is_made_on_any_rank()
        batches = training.batches() if guard.number < orders.until and not is_asked else iter(())
        for count, batch in enumerate(batches, 1):
            announcer.begin("training")
            number = guard.number
            if training.step(batch, strikes=strikes):
                strikes = False  # once, though the step may come again
                tell("struck")
            if rank == 0 and not guard.is_probe:
                os.write(steps, f"{orders.attempt} {number}\n".encode())  # a step that has ended has its row on disk
            if count == orders.asks_after:
                training.ask_back()
            if request.is_made_on_any_rank() or guard.number >= orders.until:
                break
        announcer.begin("closing")
        guard.loop.save_last()
    tell("stopped" if guard.number < orders.until else "done", (guard.number, training.digest()))
    if kind.ranks > 1:
        dist.destroy_process_group()
