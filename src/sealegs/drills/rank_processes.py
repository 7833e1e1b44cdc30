"""Runs jobs on ranks: processes in a gloo group that stay for all the runs of a score card.

A rank that dies, fails or falls silent ends the job with one sentence that names it. Leaving the ``with`` ends all
ranks, and they end by themselves if this process is gone.
"""

import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, TypeAlias, TypeVar

from sealegs.errors import RankMissing, SealegsError
from sealegs.scan.scan import interrupts_held

RANKS = 2
PATIENCE_S = 120.0
"""Seconds that a rank may take for a step, or to start: a hundred times what a slow machine needs."""
ROLL_CALL_S = 5.0
"""Seconds to wait for the others once one has failed: the rank that it waited for in vain must be named."""

Beat: TypeAlias = Callable[[int], None]
"""Called after every step."""
T = TypeVar("T")


class _Member(NamedTuple):
    process: BaseProcess
    pipe: Connection


class _RankMessage(NamedTuple):
    """A message from a rank."""

    kind: Literal["step", "done", "failed", "waited"]
    """``waited``: in vain, for another rank."""
    value: Any


class Crew:
    """Ranks on this machine's CPU. They start with the first job."""

    def __init__(self, ranks: int = RANKS, *, patience_s: float = PATIENCE_S) -> None:
        self.ranks = ranks
        self.patience_s = patience_s
        """Seconds of silence of all ranks after which they are given up."""
        self._members: list[_Member] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def do(self, what: str, job: Callable[[Beat], T]) -> list[T]:
        """The result of a job on each rank; both go through a pipe. ``what`` names the job in an error."""
        last = dict.fromkeys(range(self.ranks), "before its first step")
        answers: dict[int, Any] = {}
        try:
            if not self._members:
                self._begin()
            for rank, member in enumerate(self._members):
                _hand_over(member, job, what, rank)
            while len(answers) < self.ranks:
                for rank, told in self._heard([rank for rank in last if rank not in answers], what, last).items():
                    if told.kind == "step":
                        last[rank] = f"after step {told.value}"
                    elif told.kind == "done":
                        answers[rank] = told.value
                    else:
                        if told.kind == "waited":
                            self._roll_call([r for r in last if r != rank and r not in answers], what, last)
                        raise RankMissing(f"{what}: rank {rank} failed {last[rank]}: {told.value}")
        except BaseException:
            self.close()
            raise
        return [answers[rank] for rank in range(self.ranks)]

    def close(self) -> None:
        """End the ranks, whatever they do."""
        for process, pipe in self._members:
            process.kill()
            process.join()
            pipe.close()
        self._members = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="sealegs-ranks-")
        context = get_context("spawn")
        for rank in range(self.ranks):
            here, there = context.Pipe()
            words = (rank, self.ranks, Path(self._folder.name) / "store", self.patience_s, there)
            process = context.Process(target=_member, args=words, daemon=True, name=f"sealegs-rank-{rank}")
            with interrupts_held():
                process.start()
            there.close()  # otherwise the end of the process would go unnoticed
            self._members.append(_Member(process, here))

    def _heard(self, ranks: list[int], what: str, last: dict[int, str]) -> dict[int, _RankMessage]:
        """The next message of each rank that has one."""
        pipes = {self._members[rank].pipe: rank for rank in ranks}
        ready = wait(list(pipes), timeout=self.patience_s)
        if not ready:
            raise RankMissing(f"{what}: nothing from {_named(ranks, last)} for {self.patience_s:g} s; run it again")
        heard = {}
        for pipe in ready:
            rank = pipes[pipe]  # type: ignore[index]
            try:
                heard[rank] = self._members[rank].pipe.recv()
            except (EOFError, OSError):
                raise RankMissing(_ended(self._members[rank], what, rank, last[rank])) from None
        return heard

    def _roll_call(self, ranks: list[int], what: str, last: dict[int, str]) -> None:
        """Find out why a rank waited in vain: name the rank that is silent now, or that reports an error."""
        deadline = time.monotonic() + ROLL_CALL_S
        while ranks:
            if not wait([self._members[rank].pipe for rank in ranks], timeout=max(0.0, deadline - time.monotonic())):
                raise RankMissing(f"{what}: {_named(ranks, last)} is silent, and the others wait for it; run it again")
            for rank, told in self._heard(ranks, what, last).items():
                if told.kind == "failed":
                    raise RankMissing(f"{what}: rank {rank} failed {last[rank]}: {told.value}")
                ranks = ranks if told.kind == "step" else [other for other in ranks if other != rank]


def _hand_over(member: _Member, job: Callable[[Beat], Any], what: str, rank: int) -> None:
    try:
        member.pipe.send(job)
    except OSError:
        raise RankMissing(_ended(member, what, rank, "between two runs")) from None


def _named(ranks: list[int], last: dict[int, str]) -> str:
    return " and ".join(f"rank {rank} {last[rank]}" for rank in ranks)


def _ended(member: _Member, what: str, rank: int, when: str) -> str:
    member.process.join(timeout=ROLL_CALL_S)
    code = member.process.exitcode
    how = "is gone" if code is None else f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return f"{what}: rank {rank} {how} {when}; look at what else is on stderr and at free memory, and run it again"


def _member(rank: int, ranks: int, store: Path, patience_s: float, pipe: Connection) -> None:
    """One rank: does one job after the other, until nobody sends one."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # sooner than the parent gives up, so that a rank can still say which one was missing
    timeout = timedelta(seconds=patience_s / 2)
    with suppress(EOFError, OSError):  # the parent is gone
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timeout)
        while True:
            pipe.send(_done(pipe.recv(), partial(_beat, pipe)))
    os._exit(0)  # threads of gloo may wait for ranks that are gone


def _beat(pipe: Connection, step: int) -> None:
    pipe.send(_RankMessage("step", step))


def _done(job: Callable[[Beat], Any], beat: Beat) -> _RankMessage:
    try:
        return _RankMessage("done", job(beat))
    except (RankMissing, RuntimeError) as error:  # gloo raises nothing more specific
        is_of_gloo = isinstance(error, RankMissing) or "gloo" in str(error).lower()
        return _RankMessage("waited" if is_of_gloo else "failed", _sentence(error))
    except Exception as error:
        return _RankMessage("failed", _sentence(error))


def _sentence(error: Exception) -> str:
    text = str(error).partition("\n")[0]
    return text if isinstance(error, SealegsError | OSError) else f"{type(error).__name__}: {text}"
