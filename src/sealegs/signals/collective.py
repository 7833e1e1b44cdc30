"""Lets the ranks of a job do something together: on all of them or on none, and never for longer than a timeout.

A rank that is killed or stands still becomes an error on the others that names it: they ask each other who is still
here, through the store in which they found each other.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sealegs.errors import RankMissing, StorageError

T = TypeVar("T")

TIMEOUT_S = 600.0
"""How long the ranks wait for one of them, unless they are told otherwise."""
ROLL_CALL_S = 5.0
"""How long the ranks that noticed wait for each other before they name the missing ones."""
APART_S = 0.0002
"""How long after the rank before it a rank asks the store."""
_made = count()
"""Groups so far: on every rank the same, since all make them in the same order."""


def group_of_all(timeout_s: float, backend: str | None = None) -> Any:
    """A process group of all ranks with a timeout; None where there is one rank. Make it on every rank."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None
    number = next(_made)
    try:
        return dist.new_group(backend=backend, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        if missing := roll_call("the ranks could not meet", f"group-{number}", timeout_s):
            raise RankMissing(missing) from error
        raise


def roll_call(what: str, occasion: str, timeout_s: float) -> str:
    """A sentence on what failed that names the ranks that are not at this occasion; empty where all of them are."""
    began = f"{what} within {timeout_s:g} s"
    restart = "look at the log of that rank, and restart from a checkpoint"
    answers: list[list[int]] = []
    deadline = time.monotonic() + min(ROLL_CALL_S, timeout_s)

    def ask() -> None:
        store: Any = dist.distributed_c10d._get_default_store()
        answers.append(absent(store, occasion, dist.get_rank(), dist.get_world_size(), deadline))

    def fail_open() -> None:
        with suppress(Exception):  # it says no more than that nobody answered
            ask()

    # a store whose process stands still never answers, and torch would wait for it without end
    asking = threading.Thread(target=fail_open, name="sealegs-roll-call", daemon=True)
    asking.start()
    asking.join(deadline - time.monotonic() + 1.0)
    if not answers:
        return f"{began}, and the store in which they found each other does not answer: {_holder()}; {restart}"
    if not answers[0]:
        return ""
    return f"{began}: rank {', '.join(map(str, answers[0]))} did not come; {restart}"


def absent(store: Any, occasion: str, rank: int, world: int, deadline: float) -> list[int]:
    """The ranks that do not come to an occasion until a deadline; none, where it is this one that is late.

    The first to come looks for all, and the others wait for its answer: a few requests a rank, of however many.
    """
    place = f"sealegs/{occasion}"
    present = [f"{place}/rank-{one}" for one in range(world)]
    time.sleep(min(rank * APART_S, ROLL_CALL_S / 4))  # all of them have noticed at the same moment
    store.set(present[rank], "here")
    is_first = store.add(f"{place}/here", 1) == 1
    missing: list[int] | None = None
    if not is_first:
        with suppress(RuntimeError):  # the first one is lost by now, too
            store.wait([f"{place}/absent"], timedelta(seconds=max(deadline - time.monotonic(), 0.0) + 0.5))
            missing = json.loads(store.get(f"{place}/absent"))
    if missing is None:
        while is_first and time.monotonic() < deadline and store.add(f"{place}/here", 0) < world:
            time.sleep(0.1)
        missing = _not_there(store, present, range(world))
        store.set(f"{place}/absent", json.dumps(missing))
    return [] if rank in missing else missing


def _not_there(store: Any, present: Sequence[str], ranks: range) -> list[int]:
    """The ranks whose keys are not there: halves are looked at until one is whole."""
    if store.check([present[rank] for rank in ranks]):
        return []
    if len(ranks) == 1:
        return [*ranks]
    middle = len(ranks) // 2
    return _not_there(store, present, ranks[:middle]) + _not_there(store, present, ranks[middle:])


def _holder() -> str:
    """Who is gone where the store is: torchrun's agent has it, or else the process of rank 0."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return "torchrun on the machine of rank 0, which holds it, is gone or stands still"
    store: Any = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):  # it is one within another, each with a prefix
        store = store.underlying_store
    if type(store).__name__ == "TCPStore":
        return "rank 0, which holds it, is gone or stands still"
    return "its file cannot be read"


class Collective:
    """The ranks of a job, in a process group of their own; one rank, where there is no process group.

    On the training's own group, a thread's messages would mix with the model's in no fixed order. Make it on every
    rank, in the same order. A rank that does not come within the timeout is named in a ``RankMissing``, then and at
    every later call.
    """

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self.group: Any = group_of_all(timeout_s, backend="gloo")
        self.world = 1 if self.group is None else dist.get_world_size()
        self.rank = 0 if self.group is None else dist.get_rank()
        self._timeout_s = timeout_s
        self._number = next(_made)
        self._gathered = 0
        self.lost = ""
        """Why it is of no use any more: who did not come. Messages that came too late are still in the group."""

    def gather(self, mine: T) -> list[T]:
        """The values of all ranks, by rank."""
        if self.group is None:
            return [mine]
        of_all: list[Any] = [None] * self.world
        try:
            self.together(lambda: dist.all_gather_object(of_all, mine, group=self.group))
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            self.lost = f"the ranks could not agree, though all of them are running; one may have been late ({reason})"
            raise RankMissing(self.lost) from error
        return of_all

    def together(self, do: Callable[[], None]) -> None:
        """Do something on ``group`` that takes all ranks; its own errors are raised as they are."""
        if self.lost:
            raise RankMissing(self.lost)
        self._gathered += 1
        try:
            do()
        except RuntimeError as error:
            occasion = f"collective-{self._number}/{self._gathered}"
            self.lost = roll_call("the ranks could not agree", occasion, self._timeout_s)
            if self.lost:
                raise RankMissing(self.lost) from error
            raise

    def pass_on(self, mine: bytes, by: int) -> bytes:
        """Give bytes to the rank that is ``by`` further, and take those of the rank that is ``by`` before."""
        if self.group is None:
            return mine
        to, giver = (self.rank + by) % self.world, (self.rank - by) % self.world
        found: list[Tensor] = []

        def exchange() -> None:
            sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8) if mine else torch.empty(0, dtype=torch.uint8)
            size = torch.zeros(1, dtype=torch.int64)
            sending: Any = dist.isend(torch.tensor([len(sent)]), to, group=self.group)
            dist.recv(size, giver, group=self.group)
            sending.wait()
            sending = dist.isend(sent, to, group=self.group)
            found.append(torch.empty(int(size), dtype=torch.uint8))
            dist.recv(found[0], giver, group=self.group)
            sending.wait()

        try:
            self.together(exchange)
        except RuntimeError as error:
            self.lost = f"the ranks could not pass on what they have ({str(error).splitlines()[0]})"
            raise RankMissing(self.lost) from error
        return found[0].numpy().tobytes()

    def agree(self, part: Callable[[], T]) -> T:
        """Do this rank's part; return once all ranks have done theirs. An error on one rank is raised on all."""
        if self.group is None:
            return part()
        try:
            result = part()
        except BaseException as error:
            with suppress(RankMissing):  # the error itself says more
                self.gather(f"{type(error).__name__}: {error}")
            raise
        for rank, failure in enumerate(self.gather("")):
            if failure:
                raise StorageError(f"rank {rank} could not do its part: {failure}")
        return result

    def first(self, part: Callable[[], T]) -> T:
        """Rank 0's result, on all ranks."""
        return self.gather(self.agree(lambda: part() if self.rank == 0 else None))[0]  # type: ignore[return-value]
