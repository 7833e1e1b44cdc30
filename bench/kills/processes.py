"""Starts the processes of a run, on each rank one, kills them at a moment, and says what became of them.

They are forked from a process that has imported torch: to import it takes longer than most of them live.
"""

import multiprocessing
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from bench.kills.life import Orders, live
from bench.kills.moments import Moment

FORKED = multiprocessing.get_context("forkserver")
IMPORTED = ["__main__", "bench.kills.life", "bench.kills.inspection"]
"""What the process has imported that all are forked from."""
PATIENCE_S = 120.0
"""After which a life is a hang."""
T = TypeVar("T")


@dataclass
class Life:
    """What became of a process, or of one on each rank."""

    is_born: bool = False
    """Whether its guard was made."""
    began_with: tuple[int | None, str, dict[str, str]] | None = None
    """The checkpoint that it goes on from, why that one, and those that were passed over; None of a new run."""
    killed_while: str | None = None
    """The phase in which a signal was sent."""
    is_struck: bool = False
    """Whether the fault has struck that strikes once."""
    end: str = ""
    """``done``, ``stopped``, ``halted``, ``error`` or ``hang``; empty where it came to none."""
    detail: Any = None
    """With ``done`` and ``stopped`` the step and a digest of the state, else a text."""


def begin_life(orders: Orders, moment: Moment | None = None, victims: Sequence[int] = ()) -> Life:
    """Have the orders carried out, kill the ranks that are ``victims`` at the moment, and wait for all to end."""
    processes: list[BaseProcess] = []
    ends: list[Connection] = []
    for rank in range(orders.kind.ranks):
        told, tell = multiprocessing.Pipe(duplex=False)
        mine = moment if moment is None or moment.is_graceful or rank in victims else None
        processes.append(FORKED.Process(target=live, args=(orders, rank, mine, tell), daemon=True))
        processes[-1].start()
        tell.close()
        ends.append(told)
    return _watched(processes, ends, moment, victims)


def _watched(
    processes: Sequence[BaseProcess], ends: Sequence[Connection], moment: Moment | None, victims: Sequence[int]
) -> Life:
    life, deadline = Life(), time.monotonic() + PATIENCE_S
    rank_of: dict[Any, int] = {end: rank for rank, end in enumerate(ends)}
    killer: threading.Thread | None = None
    while rank_of:
        for end in wait(list(rank_of), timeout=0.1):
            assert isinstance(end, Connection)
            try:
                what, detail = end.recv()
            except (EOFError, OSError):
                del rank_of[end]
                continue
            _take_in(life, what, detail, rank_of[end])
            if moment is not None and rank_of[end] == victims[0] and not killer and not life.killed_while:
                is_time = not moment.calls and (what, detail) == (moment.phase, moment.count)
                if is_time or (what, detail) == ("training", moment.at_latest):
                    victim = [processes[rank] for rank in victims]
                    killer = threading.Thread(target=_kill, args=(life, victim, moment, what))
                    killer.start()
        ended = [process for process in processes if process.exitcode not in (None, 0)]
        if time.monotonic() > deadline:
            life.end, life.detail = "hang", f"not at its end after {PATIENCE_S:.0f} s"
        if 0 < len(ended) < len(processes):  # whatever starts ranks ends those that are left
            time.sleep(random.uniform(0, 0.1))  # noqa: S311
        if ended or life.end == "hang":
            _end(processes)
    if killer:
        killer.join()
    for process in processes:
        process.join()
    codes = [process.exitcode for process in processes]
    if life.end == "error" and life.killed_while and len(processes) > 1:
        life.end = ""  # of a rank whose neighbour was killed, and with which it could not exchange anything any more
    if not life.end and not life.killed_while:
        life.end, life.detail = "error", f"exit codes {codes}"
    return life


def _take_in(life: Life, what: str, detail: Any, rank: int) -> None:
    """One message of a rank."""
    if what == "born" and rank == 0:
        life.is_born, life.began_with = True, detail
    elif what == "killed":
        life.killed_while = detail
    elif what == "struck":
        life.is_struck = True
    elif what == "error" or (what in ("done", "stopped", "halted") and rank == 0 and life.end != "error"):
        life.end, life.detail = what, detail


def _kill(life: Life, victims: Sequence[BaseProcess], moment: Moment, phase: str) -> None:
    """Send the signal after the moment's delay; once more, where it is so."""
    for delay_s in (moment.delay_s, moment.again_after_s):
        if delay_s is None:
            return
        time.sleep(delay_s)
        for process in victims:
            with suppress(OSError):  # it has ended by itself
                if process.exitcode is None and process.pid is not None:
                    os.kill(process.pid, moment.signal)
                    life.killed_while = phase


def _end(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        process.kill()


def in_a_process(function: Callable[..., T], *words: Any) -> T:
    """What a function gives, in a process of its own: readers may leave behind what they like."""
    told, tell = multiprocessing.Pipe(duplex=False)
    process = FORKED.Process(target=_answer, args=(tell, function, *words), daemon=True)
    process.start()
    tell.close()
    try:
        answer: T = told.recv()
    finally:
        process.join()
    return answer


def _answer(tell: Connection, function: Callable[..., Any], *words: Any) -> None:
    tell.send(function(*words))
