"""A guarded loop on three ranks of which one is lost, or is late: run by test_lost.py on each of them.

Writes how each rank that is left ended to OUT/<rank>.json.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

import sealegs
from sealegs.guard_options import Telemetry
from sealegs.signals.ranks import Ranks
from sealegs.state import checkpoint_files

TIMEOUT_S = 2.0
AT = 3
"""The step to which a rank does not come."""
STEPS = 6
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def lose_itself(how: str) -> None:
    os.kill(os.getpid(), SIGNALS[how])


def write_late(folder: Path, rank: int, plain: bytes, own: bytes) -> None:
    """Storage that takes longer than the ranks wait, once."""
    checkpoint_files.write_plain = WRITE_PLAIN
    time.sleep(3 * TIMEOUT_S)  # beyond the roll call, too
    WRITE_PLAIN(folder, rank, plain, own)


WRITE_PLAIN = checkpoint_files.write_plain


def main(how: str, where: str, victim: int, store: str, out: Path) -> None:
    """``how`` a rank is lost, and ``where``: in a step, in a checkpoint, at the end, or because of the folder."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    model = nn.Linear(4, 4)
    if where == "checkpoint" and rank == victim:
        late: Any = write_late if how == "late" else lambda *_: lose_itself(how)
        checkpoint_files.write_plain = late
    steps, pause_s = (40, TIMEOUT_S / 10) if how == "late" else (STEPS, 0.0)
    steps += where == "end"  # a checkpoint is due there, which needs all ranks: that of step 6 may be whole already
    ended: dict[str, Any] = {"error": None, "kind": None, "steps": 0}
    try:
        with sealegs.Guard(
            model,
            SGD(model.parameters(), lr=0.1),
            run=out / "file" / "run" if how == "read-only" else out / "run",
            checkpoint_every=2 if where in ("checkpoint", "end") else 0,
            telemetry=Telemetry(ranks=Ranks(timeout_s=TIMEOUT_S)),
        ) as guard:
            for step in range(steps):
                if where == "step" and step == AT and rank == victim:
                    lose_itself(how)
                loss = model(torch.ones(2, 4)).square().mean()
                loss.backward()
                guard.step(loss)
                ended["steps"] = step + 1
                time.sleep(pause_s)
            if where == "end" and rank == victim:
                lose_itself(how)
    except Exception as error:
        ended |= {"error": str(error), "kind": type(error).__name__}
    (out / f"{rank}.json").write_text(json.dumps(ended))
    os._exit(0)  # torch may wait for the rank that is lost when it takes its own groups down


if __name__ == "__main__":
    how, where, victim, store, out = sys.argv[1:]
    main(how, where, int(victim), store, Path(out))
