"""Two replica groups under torchft, of which one is killed at random moments and comes back, again and again.

Each group has spikes and NaN of its own at random steps. What is looked at: whether the job comes to its end, and
whether both groups have the same weights, moments and verdicts after every step that both have committed.

    python bench/torchft_kills.py --kills 30
"""

import argparse
import hashlib
import json
import math
import random
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchft import Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer

import sealegs
from sealegs.guard_options import Checkpointing
from sealegs.integrations import torchft

FAULTS = 0.02
"""Share of the steps of a group at which its loss is broken."""
BROKEN = (*[1e4] * 9, math.nan)
"""By what. More NaN than one step in a hundred would, rightly, halt the run."""
PATIENCE_S = 120.0


def train(folder: Path, group: int, address: str, life: int) -> None:
    """A group, until the file ``stop`` names the step at which to end."""
    torch.manual_seed(group)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["adam"])

    store: Any = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)  # type: ignore[attr-defined]
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "adam": adam.state_dict()},
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=address,
        replica_id=f"group{group}",
        hostname="localhost",
        timeout=timedelta(seconds=30),
        heartbeat_interval=timedelta(milliseconds=50),
    )
    optimizer = Optimizer(manager, adam)
    checkpointing = Checkpointing(snapshot_every=20)
    playbook = sealegs.Playbook.standard()
    detection = sealegs.Detection(budget=sealegs.Budget(total=10**6, share=1.0))  # a fault in 25 steps is on purpose
    guard = torchft.attach(
        manager, model, optimizer, run=folder / f"group{group}", clip=1.0, resume="auto",
        playbook=playbook, checkpoint_every=checkpointing, detection=detection,
    )  # fmt: skip
    draw, faults = torch.Generator().manual_seed(97 * life + group), random.Random(f"{group} {life}")  # noqa: S311
    batches = [torch.randn(16, 8, generator=draw) for _ in range(64)]
    with (folder / f"{group}.jsonl").open("a") as log:
        while True:
            for batch in guard.batches(batches):
                optimizer.zero_grad()
                loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
                if faults.random() < FAULTS:
                    loss = loss * faults.choice(BROKEN)
                loss.backward()
                for weight in model.parameters():  # torchft 0.2's DDP does not outlive a group that is killed in it
                    assert weight.grad is not None
                    manager.allreduce(weight.grad).wait()
                before = digest(model, adam)
                guard.step(loss)
                told = {
                    "step": manager.current_step(),
                    "is_committed": guard.is_committed,
                    "groups": manager.num_participants(),
                    "is_same": digest(model, adam) == before,
                    "digest": digest(model, adam),
                }
                log.write(json.dumps(told) + "\n")
                log.flush()
                stop = folder / "stop"
                if stop.exists() and manager.current_step() >= int(stop.read_text()):
                    guard.close()
                    manager.shutdown(wait=False)
                    return
                time.sleep(0.005)


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of weights and moments."""
    found = hashlib.sha256()
    moments = [each for state in optimizer.state.values() for each in state.values() if isinstance(each, Tensor)]
    for each in (*model.parameters(), *moments):
        found.update(each.detach().double().numpy().tobytes())
    return found.hexdigest()[:16]


def rows(folder: Path, group: int) -> list[dict[str, Any]]:
    """What a group has told; the last line of one that was killed may be torn."""
    path = folder / f"{group}.jsonl"
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def main() -> int:
    """Kill, wait, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a folder for the runs")
    parser.add_argument("--group", nargs=3, metavar=("NUMBER", "ADDRESS", "LIFE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.group:
        train(options.keep, int(options.group[0]), options.group[1], int(options.group[2]))
        return 0
    folder = options.keep or Path(tempfile.mkdtemp(prefix="torchft-"))
    folder.mkdir(parents=True, exist_ok=True)
    lighthouse = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=5000, quorum_tick_ms=20, heartbeat_timeout_ms=1000
    )
    draw, lives = random.Random(options.seed), [0, 0]  # noqa: S311
    errors = (folder / "stderr.txt").open("a")

    def begin(group: int) -> "subprocess.Popen[bytes]":
        lives[group] += 1
        words = ["--keep", str(folder), "--group", str(group), lighthouse.address(), str(lives[group])]
        return subprocess.Popen([sys.executable, __file__, *words], stderr=errors, stdout=errors)

    groups = [begin(0), begin(1)]
    for _ in range(options.kills):
        _wait_until_together(folder, groups)
        time.sleep(draw.uniform(0.0, 0.5))
        victim = draw.randrange(2)
        groups[victim].send_signal(signal.SIGKILL)
        groups[victim].wait()
        time.sleep(draw.uniform(0.0, 3.0))
        groups[victim] = begin(victim)
    _wait_until_together(folder, groups)
    (folder / "stop").write_text(str(max(row["step"] for row in rows(folder, 0)) + 50))
    codes = [process.wait(PATIENCE_S) for process in groups]
    lighthouse.shutdown()
    return _account(folder, codes, options.kills)


def _wait_until_together(folder: Path, groups: "list[subprocess.Popen[bytes]]") -> None:
    """Until both groups have made ten steps together."""
    began = [len(rows(folder, group)) for group in range(2)]
    deadline = time.monotonic() + PATIENCE_S
    while True:
        recent = [rows(folder, group)[began[group] :][-10:] for group in range(2)]
        if all(len(each) == 10 and all(row["groups"] == 2 and row["is_committed"] for row in each) for each in recent):
            return
        assert all(process.poll() is None for process in groups), f"a group has ended; see {folder}/stderr.txt"
        assert time.monotonic() < deadline, f"the groups do not come together; see {folder}/stderr.txt"
        time.sleep(0.05)


def _account(folder: Path, codes: list[int], kills: int) -> int:
    one, other = ({row["step"]: row for row in rows(folder, group) if row["is_committed"]} for group in range(2))
    both = one.keys() & other.keys()
    apart = sorted(step for step in both if one[step]["digest"] != other[step]["digest"])
    skipped = [step for step in both if one[step]["is_same"] and other[step]["is_same"]]
    unlike = [
        step for step in both if one[step]["is_same"] != other[step]["is_same"] and not _is_healed(one, other, step)
    ]
    given_up = sum(not row["is_committed"] for group in range(2) for row in rows(folder, group))
    print(
        f"{kills} kills, exit codes {codes}; {max(one.keys() | other.keys())} steps, {len(both)} of them by both: "
        f"{len(apart)} with other bits {apart[:5]}, {len(skipped)} skipped by both, {len(unlike)} by one {unlike[:5]}; "
        f"{given_up} steps that did not count"
    )
    return 1 if apart or unlike or any(codes) else 0


def _is_healed(one: dict[int, Any], other: dict[int, Any], step: int) -> bool:
    """Whether a group was brought to the other's weights in this step: then they differ from its own before."""
    return step - 1 not in one or step - 1 not in other


if __name__ == "__main__":
    sys.exit(main())
