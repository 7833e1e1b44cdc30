"""A chain: one run folder in which processes are killed one after the other, looked at each time, and brought to its
end."""

import random
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.kills.inspection import Left, Problem, differing, inspect
from bench.kills.life import Orders
from bench.kills.moments import PHASES, drawn
from bench.kills.processes import Life, begin_life, in_a_process
from bench.kills.training import STEPS, Kind

LIVES = 3
"""Lives for each kill that is to be made, at most: some end before their moment comes."""


@dataclass
class Chain:
    """What became of a run folder."""

    number: int
    kind: Kind
    kills: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By phase and signal."""
    lives: int = 0
    starts: list[int | None] = field(default_factory=list)
    """The checkpoint that each life went on from; None where there was none."""
    end: str = ""
    is_compared: bool = False
    """Whether its end was compared with that of a run that nobody killed."""
    problems: list[tuple[str, Problem]] = field(default_factory=list)
    """What is wrong, and after which kill it was found."""

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "chain": self.number,
            "kind": str(self.kind),
            "kills": {f"{phase}, {name}": count for (phase, name), count in self.kills.items()},
            "lives": self.lives,
            "starts": self.starts,
            "end": self.end,
            "is_compared": self.is_compared,
            "problems": [f"{where}: {problem}" for where, problem in self.problems],
        }


class Untouched:
    """A run that nobody kills."""

    def __init__(self, kind: Kind, folder: Path) -> None:
        folder.mkdir(parents=True)
        life = begin_life(Orders(kind=kind, chain=folder, attempt=0, until=STEPS))
        if life.end != "done":
            raise SystemExit(f"chaos: {kind}: it does not come to its end by itself: {life.end}\n{life.detail}")
        self.run = folder / "run"
        self.digest: str = life.detail[1]


def run_chain(number: int, kind: Kind, chance: random.Random, quota: int, folder: Path, untouched: Untouched) -> Chain:
    """Kill and look, until so many kills have been made or the run is over; then let it come to its end."""
    chain, left, strikes = Chain(number, kind), Left(), True
    folder.mkdir(parents=True)
    is_over = False
    while chain.kills.total() < quota and chain.lives < LIVES * quota and not is_over:
        to_come = 3 if kind.is_asked or (kind.goes_back and not left.has_gone_back) else 0
        phases = [phase for phase in PHASES if phase != "rolling back"] + to_come * ["rolling back"]
        moment = drawn(chance, phases)
        farthest = max([0, *left.tags])
        until = min(STEPS, farthest + chance.randint(1, 40)) if moment.phase == "closing" else STEPS
        everyone = list(range(kind.ranks))
        is_for_all = not moment.calls and (moment.is_graceful or chance.random() < 0.5)
        victims = everyone if is_for_all else [chance.choice(everyone)]
        asks_after = chance.randint(2, 50) if kind.is_asked and moment.phase == "rolling back" else None
        orders = Orders(
            kind=kind, chain=folder, attempt=chain.lives, until=until, strikes=strikes, asks_after=asks_after
        )
        life = begin_life(orders, moment, victims)
        left = _look(chain, life, folder, left, str(moment))
        strikes &= not life.is_struck
        if life.killed_while:
            chain.kills[life.killed_while, signal.Signals(moment.signal).name] += 1
        is_over = life.end == "halted" or (life.end == "done" and until == STEPS)
    life = begin_life(Orders(kind=kind, chain=folder, attempt=chain.lives, until=STEPS, strikes=strikes))
    left = _look(chain, life, folder, left, "the last life")
    _compare(chain, life, folder, left, untouched)
    return chain


def _look(chain: Chain, life: Life, folder: Path, before: Left, where: str) -> Left:
    """Look at what a life has left, and at how it began."""
    chain.end = life.end
    problems: list[Problem] = []
    if life.is_born:
        chain.starts.append(None if life.began_with is None else life.began_with[0])
        problems += _begun_elsewhere(life, before)
    if life.end in ("error", "hang"):
        problems.append(Problem(life.end, str(life.detail)))
    ended = (folder / "steps.txt").read_text().split() if (folder / "steps.txt").exists() else []
    steps = [int(step) for attempt, step in zip(ended[::2], ended[1::2], strict=True) if int(attempt) == chain.lives]
    chain.lives += 1
    left = in_a_process(inspect, folder / "run", before, steps, chain.lives)
    chain.problems += [(f"life {chain.lives - 1}, {where}", problem) for problem in (*problems, *left.problems)]
    return left


def _begun_elsewhere(life: Life, before: Left) -> Iterator[Problem]:
    """Whether a process began elsewhere than at the newest proven checkpoint, or where none is, without a word."""
    if not before.written:
        return
    if life.began_with is None:
        yield Problem("start", "as a new run, though there was one")
        return
    began, because, passed_over = life.began_with
    if before.proven and began != max(before.proven):
        yield Problem("start", f"at {began}, though {max(before.proven)} is proven ({because}; {passed_over})")
    elif not before.proven and before.unproven and not because:
        yield Problem("start", f"at {began} without a word, though {before.unproven} are intact")


def _compare(chain: Chain, life: Life, folder: Path, left: Left, untouched: Untouched) -> None:
    """Whether the run has ended as one that nobody killed, where that is promised."""
    found: list[str] = []
    if life.end not in ("done", "halted") or (life.end == "halted" and chain.kind.is_repeatable):
        found = [f"{life.end or 'none'}: {life.detail}"]
    elif chain.kind.is_repeatable and left.has_gone_back:
        found = ["something was done to a run beside skips"]
    elif chain.kind.is_repeatable:
        chain.is_compared = True
        found = ["the last state is another"] if life.detail[1] != untouched.digest else []
        found += list(differing(folder / "run", untouched.run, chain.kind.ranks))[:5]
    chain.problems += [("the end", Problem("end", text)) for text in found]
