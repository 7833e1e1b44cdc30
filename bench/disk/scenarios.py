"""Short runs to break: each makes every kind of file that a run folder has, and ends with an exit status."""

import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from sealegs.errors import RunHalted, SealegsError
from sealegs.guard import Guard
from sealegs.guard_options import Checkpointing
from sealegs.record import requests
from sealegs.recovery import requests as request_queue
from sealegs.recovery.playbook import Playbook

STEPS = 32
"""Steps of a whole run."""
EVERY = 8
"""Steps between checkpoints."""
BAD = range(18, 21)
"""Batches with a NaN: three of them are an incident."""
ASKED_AT = 26
"""The step at which a person asks for something, where there is a playbook."""
HALF = 14
"""The step at which a run to resume was killed."""
RUN = "a"

Told = Callable[[str], None]


@dataclass(frozen=True)
class Scenario:
    """A run in a folder."""

    name: str
    run: Callable[[Path, Told], int]
    """Runs to the end and gives the exit status. Tells each step that is done."""
    prepare: Callable[[Path], None]
    """Makes what is there before, where no fault happens."""
    is_exact: bool = True
    """Whether a run that was cut short comes to the same weights, bit for bit."""


def batches() -> list[Tensor]:
    """The data, with the bad batches among them."""
    generator = torch.Generator().manual_seed(1)
    data = [torch.randn(16, 8, generator=generator) for _ in range(2 * STEPS)]
    for number in BAD:
        data[number][0, 0] = math.nan
    return data


def guarded(folder: Path, told: Told, playbook: Playbook, until: int = STEPS) -> int:
    """Train under a guard, which begins the run or goes on with it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    how = Checkpointing(every=EVERY, keep=2, snapshot_every=EVERY)
    with Guard(
        model, optimizer, run=folder / RUN, clip=1.0, playbook=playbook, checkpoint_every=how, resume="auto"
    ) as guard:
        told(f"from {guard.number}")
        for batch in guard.batches(batches()) if guard.number < until else ():
            loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
            loss.backward()
            number = guard.number
            guard.step(loss)
            told(f"step {number}")
            assert guard.loop.checkpoints is not None
            guard.loop.checkpoints.wait()  # so that calls come in the same order every time
            if guard.number == ASKED_AT and playbook.rungs:
                leave_request(folder / RUN)
            if guard.number >= until:
                break
    if guard.ended_badly or guard.missing:
        print(guard.ended_badly or guard.missing, file=sys.stderr)
        return 1 if guard.ended_badly else 2
    return 0


def leave_request(run: Path) -> None:
    """A person asks for something, from a process of their own."""
    if (child := os.fork()) == 0:
        requests.leave(run, ("lr", "0.5"))
        os._exit(0)
    os.waitpid(child, 0)


def observe(folder: Path, told: Told) -> int:
    """Under a playbook that does nothing: checkpoints, an incident with its capsule, a draft of its post-mortem."""
    return guarded(folder, told, Playbook.observe())


def standard(folder: Path, told: Told) -> int:
    """Under one that acts: rollbacks, a ledger, and a person's request."""
    request_queue.ASK_EVERY_S = 0.0
    return guarded(folder, told, Playbook.standard())


def killed(folder: Path) -> None:
    """A run that was killed in the middle, with what it was writing."""
    if (child := os.fork()) == 0:

        def stop(text: str) -> None:
            if text == f"step {HALF}":
                os._exit(0)

        guarded(folder, stop, Playbook.observe())
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    left = folder / RUN / "checkpoints" / ".16.4194305.partial"  # beyond the largest number that a process can have
    left.mkdir()
    (left / "__0_0.distcp").write_bytes(b"half of it")
    (folder / RUN / ".recovery.json.4194305.partial").write_bytes(b"{")


TRAIN = (
    *("--size", "nano", "--steps", "9", "--threads", "1", "--data.batch", "2", "--model.vocabulary", "64"),
    *("--model.layers", "1", "--model.context", "16", "--cadence.checkpoint-steps", "3"),
    *("--cadence.evaluate-batches", "1"),
)


def train(folder: Path, told: Told) -> int:
    """``sealegs train``, to be begun; resumed where there is a run. Needs tyro, which the others do not."""
    from sealegs.cli.main import main

    words = (*TRAIN, "--data.sources", str(folder.parent / "tokens.npy"))
    is_there = (folder / RUN / "manifest.json").exists()
    return main(["train", "--run", str(folder / RUN), *(("--resume",) if is_there else words)])


def tokens(folder: Path) -> None:
    """Token ids, beside the folder that faults are in."""
    np.save(folder.parent / "tokens.npy", (np.arange(4000) % 64).astype(np.uint16))


def nothing(folder: Path) -> None:
    """Nothing is there."""


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("observe", observe, nothing),
        Scenario("standard", standard, nothing, is_exact=False),
        Scenario("resume", observe, killed),
        Scenario("train", train, tokens),
    )
}


def status_of(scenario: Scenario, folder: Path, told: Told) -> int:
    """The exit status of a run, with errors as the command line has them."""
    try:
        return scenario.run(folder, told)
    except RunHalted as halt:
        print(halt, file=sys.stderr)
        return 1
    except SealegsError as error:
        print(error, file=sys.stderr)
        return 2
