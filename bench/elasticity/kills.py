"""Kills one of two agents at a random moment, lets the other go on alone, brings it back, and kills again."""

import json
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

from bench.elasticity import training
from bench.elasticity.agents import Agents, Start

PATIENCE_S = 180.0
"""How long nothing may happen."""


@dataclass
class Killed:
    """What became of the job."""

    kills: int = 0
    after_steps: list[int] = field(default_factory=list)
    """At about which step each kill came."""
    loss: float = float("nan")
    """At the end, over all data."""
    died: str = ""
    """Why the job is dead, if it is."""
    wall_s: float = 0.0


def run_with_kills(
    start: Start,
    out: Path,
    *,
    kills: int,
    epochs: int,
    seed: int,
    pause_s: float,
    between: tuple[int, int],
    wrapper: str = "ddp",
) -> Killed:
    """One job, killed so often. ``between`` are the fewest and the most new steps before each kill and each return."""
    draw, found, began = random.Random(seed), Killed(), time.monotonic()  # noqa: S311 - no secret
    words = (str(out), str(epochs), str(seed), str(pause_s), wrapper)
    with Agents(start, Path(training.__file__), *words, restarts=4 * kills + 4, log=out / "agents.log") as agents:
        agents.begin(0)
        agents.begin(1)
        while not found.died and not (out / "end.json").exists():
            if found.kills < kills:
                _wait(found, agents, out, draw.randint(*between))
                if found.died or (out / "end.json").exists():
                    break
                time.sleep(draw.uniform(0, 0.5))  # anywhere: in a step, a checkpoint, a meeting of the agents
                found.after_steps.append(_newest(out))
                victim = draw.choice(sorted(agents.running))
                agents.kill(victim)
                found.kills += 1
                _wait(found, agents, out, draw.randint(*between))  # alone
                if not found.died:
                    agents.begin(victim)
            else:
                _wait(found, agents, out, 10**9)
        _let_end(found, agents)
    if not found.died:
        found.loss = float(json.loads((out / "end.json").read_text())["loss"])
    found.wall_s = time.monotonic() - began
    return found


def _wait(found: Killed, agents: Agents, out: Path, steps: int) -> None:
    """Until so many steps have been made since, of whichever life, or the end."""
    since, changed = _made(out), time.monotonic()
    last = since
    while last < since + steps and not (out / "end.json").exists():
        time.sleep(0.05)
        if (now := _made(out)) > last:
            last, changed = now, time.monotonic()
        if any(agents.ended().values()):
            found.died = f"exit codes {agents.ended()} at about step {_newest(out)}"
            return
        if time.monotonic() - changed > PATIENCE_S:
            found.died = f"nothing has happened for {PATIENCE_S:.0f} s at about step {_newest(out)}"
            return


def _let_end(found: Killed, agents: Agents) -> None:
    """The training is over: its agents leave by themselves."""
    for agent in agents.running.values():
        agent.join(30 if not found.died else 0)
    # one that is about to meet the others finds that there is nothing to meet for, and ends with torch's error
    if not found.died and 0 not in agents.ended().values():
        found.died = f"exit codes {agents.ended()} after the last step"


def _made(out: Path) -> int:
    """Lines of steps, of all lives and ranks."""
    return sum(path.stat().st_size > 0 and path.read_bytes().count(b"\n") for path in (out / "steps").glob("*.jsonl"))


def _newest(out: Path) -> int:
    lines = [path.read_text().splitlines() for path in sorted((out / "steps").glob("*.jsonl"))[-2:]]
    return max((json.loads(each[-1]).get("step", 0) for each in lines if each and each[-1].endswith("}")), default=0)
