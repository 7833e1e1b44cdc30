"""Two replica groups under torchft, with and without a guard: run by test_torchft.py in each of them.

Each scenario is a process of its own, forked, since one of them is killed. Writes to OUT/<group>-<scenario>.json what
the group saw.
"""

import hashlib
import json
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchft import DistributedDataParallel, Manager, ProcessGroupGloo
from torchft.optim import OptimizerWrapper

import sealegs
from sealegs.guard_options import Checkpointing
from sealegs.integrations import torchft as guarded

STEPS, NAN, SPIKE, AT_FAULT, HALF = 60, 20, 45, 1, 30
KILLED, AFTER_HEALING = 50, 120
ASKED, ASKED_ALONE, BACK_STEPS, POISONED = 45, 75, 160, 120
PATIENCE_S = 60.0


class Group:
    """What a group trains, and what it saw."""

    def __init__(self, out: Path, group: int, scenario: str) -> None:
        self.out, self.group, self.scenario = out, group, scenario
        torch.manual_seed(group)  # torchft makes them equal at its first step
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.adam = torch.optim.AdamW(self.inner.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.adam, 1, gamma=0.995)
        store: Any = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)  # type: ignore[attr-defined]
        self._store = store
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
            load_state_dict=self._load,
            state_dict=self._save,
            min_replica_size=1,
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=store.port,
            lighthouse_addr=json.loads((out / "lighthouses.json").read_text())[scenario],
            replica_id=f"group{group}",
            hostname="localhost",
            timeout=timedelta(seconds=20),
            heartbeat_interval=timedelta(milliseconds=50),
            use_async_quorum=not scenario.endswith("waiting for the quorum"),
        )
        self.model = DistributedDataParallel(self.manager, self.inner)
        self.optimizer = OptimizerWrapper(self.manager, self.adam)
        self.saw: dict[str, Any] = {"digests": {}, "numbers": [], "commits": [], "participants": [], "unchanged": []}

    def attach(self, **options: Any) -> Any:
        run = self.out / self.scenario.replace(" ", "-").replace(",", "") / f"group{self.group}"
        return guarded.attach(self.manager, self.model, self.optimizer, run=run, scheduler=self.schedule, **options)

    def _load(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state["model"])
        self.adam.load_state_dict(state["optimizer"])

    def _save(self) -> dict[str, Any]:
        return {"model": self.inner.state_dict(), "optimizer": self.adam.state_dict()}

    def meet(self, occasion: str = "") -> None:
        """Wait until both groups can be heard by the lighthouse: it then makes one quorum of them."""
        (self.out / f"{self.scenario}-{self.group}.ready{occasion}").touch()
        time.sleep(0.2)
        wait_for(lambda: len([*self.out.glob(f"{self.scenario}-[01].ready{occasion}")]) == 2)

    def digest(self) -> str:
        found = hashlib.sha256()
        moments = [each for state in self.adam.state.values() for each in state.values() if isinstance(each, Tensor)]
        for each in (*self.inner.parameters(), *moments):
            found.update(each.detach().double().numpy().tobytes())
        return found.hexdigest()

    def batch(self, number: int) -> Tensor:
        draw = torch.Generator().manual_seed(10_000 * (self.group + 1) + number)
        return torch.randn(16, 8, generator=draw)

    def loss(self, batch: Tensor) -> Tensor:
        loss: Tensor = (self.model(batch) - batch.sum(1, keepdim=True)).square().mean()
        return loss

    def end(self, guard: Any = None) -> None:
        self.saw |= {"end": self.digest(), "lr": self.adam.param_groups[0]["lr"], "step": self.manager.current_step()}
        if guard is not None:
            self.saw["memory"] = memory(guard)
            guard.close()
            self.saw["left alone"] = "start_quorum" not in vars(self.manager) and "step" not in vars(self.optimizer)
        (self.out / f"{self.group}-{self.scenario}.json").write_text(json.dumps(self.saw))
        (self.out / f"{self.scenario}-{self.group}.done").touch()
        wait_for(lambda: len([*self.out.glob(f"{self.scenario}-*.done")]) >= 2)
        self.manager.shutdown(wait=False)


def wait_for(it: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not it():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def memory(guard: Any) -> list[Any]:
    """What the detectors know of what all groups share."""
    watched = guard.state_dict()["watch"]
    names, states = watched["detectors"], watched["state"][0]
    return [[name, state] for name, state in zip(names, states, strict=True) if "loss" in name or "grad_norm" in name]


def plain(out: Path, group: int, scenario: str) -> None:
    """torchft alone."""
    of = Group(out, group, scenario)
    of.meet()
    for number in range(STEPS):
        of.optimizer.zero_grad()
        if scenario == "plain accumulated":
            with of.model.no_sync():
                (of.loss(of.batch(1000 + number)) / 2).backward()
            (of.loss(of.batch(number)) / 2).backward()
        else:
            of.loss(of.batch(number)).backward()
        torch.nn.utils.clip_grad_norm_(of.inner.parameters(), 1.0)
        of.optimizer.step()
        of.schedule.step()
    of.end()


def with_guard(out: Path, group: int, scenario: str) -> None:
    """The same with a guard, and with faults in one group."""
    of = Group(out, group, scenario)
    guard = of.attach(clip=1.0)
    of.meet()
    for number in range(STEPS):
        of.optimizer.zero_grad()
        share = nullcontext(1.0)
        total = torch.zeros(())
        if scenario == "guarded accumulated":
            share = nullcontext(0.5)
            with guard.accumulate():
                loss = of.loss(of.batch(1000 + number)) / 2
                loss.backward()
                total += loss.detach()
        with share as part:
            loss = of.loss(of.batch(number)) * part
        if scenario == "faulted" and group == AT_FAULT:
            loss = loss * {NAN: math.nan, SPIKE: 1e4}.get(number, 1.0)
        loss.backward()
        before = of.digest()
        verdict = guard.step(loss + total)
        of.saw["numbers"].append(guard.number)
        of.saw["participants"].append(of.manager.num_participants())
        if of.digest() == before:
            of.saw["unchanged"].append(number)
            of.saw.setdefault("verdicts", []).append(str(verdict))
    of.end(guard)


def resumed(out: Path, group: int, scenario: str) -> bool:
    """Both groups end in the middle, and go on from their checkpoints. Gives whether they are to be started again."""
    is_second = (out / f"{scenario}-{group}.half").exists()
    of = Group(out, group, scenario)
    guard = of.attach(clip=1.0, checkpoint_every=HALF, resume="auto")
    of.saw["began at"] = guard.number
    of.meet("-again" if is_second else "")
    for number in range(guard.number, STEPS if is_second else HALF):
        of.optimizer.zero_grad()
        loss = of.loss(of.batch(number))
        loss.backward()
        guard.step(loss)
    if is_second:
        of.end(guard)
        return False
    guard.close()
    (out / f"{scenario}-{group}.half").touch()
    wait_for(lambda: len([*out.glob(f"{scenario}-[01].half")]) == 2)
    of.manager.shutdown(wait=False)
    return True


def killed(out: Path, group: int, scenario: str) -> None:
    """One group is killed in the middle of a step, and comes back; then the other one has a spike."""
    is_second, goes_alone = (out / f"{scenario}-killed").exists() and group == AT_FAULT, out / f"{scenario}-alone"
    if is_second:
        wait_for(goes_alone.exists)
    of = Group(out, group, scenario)
    guard = of.attach(clip=1.0, resume="auto") if is_second else of.attach(clip=1.0)
    if is_second:
        of.saw["began with"] = memory(guard)
    of.meet()
    has_joined = 0
    while guard.number < AFTER_HEALING:
        of.optimizer.zero_grad()
        number = guard.number
        loss = of.loss(of.batch(of.manager.current_step() + 5000 * is_second))
        participants = of.manager.num_participants()
        if participants == 1:
            goes_alone.touch()
            time.sleep(0.02)  # so that the other one is back before the end
        elif number > KILLED:
            has_joined = has_joined or number
        if has_joined and number == has_joined + 10 and group != AT_FAULT:
            loss = loss * 1e4
        loss.backward()
        if number == KILLED and group == AT_FAULT and not is_second:
            (out / f"{scenario}-killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        before = of.digest()
        guard.step(loss)
        of.saw["participants"].append(participants)
        of.saw["numbers"].append(guard.number)
        of.saw["digests"][of.manager.current_step()] = of.digest()
        if guard.is_committed and of.digest() == before:
            of.saw["unchanged"].append(number)
    of.end(guard)


def back(out: Path, group: int, scenario: str) -> None:
    """All go back together, where both ask; and where only one does."""
    of = Group(out, group, scenario)
    guard = of.attach(clip=1.0, playbook=sealegs.Playbook.standard(), checkpoint_every=Checkpointing(snapshot_every=10))
    of.meet()
    asked: set[int] = set()
    is_poisoned = False

    def batches() -> Any:
        while guard.number < BACK_STEPS:
            yield from guard.batches([of.batch(number) for number in range(40)])

    for batch in batches():
        of.optimizer.zero_grad()
        loss = of.loss(batch)
        loss.backward()
        guard.step(loss)
        if scenario == "poisoned" and guard.number == POISONED and group == AT_FAULT and not is_poisoned:
            is_poisoned = True
            with torch.no_grad():
                next(of.inner.parameters())[0, 0] = math.nan
        for at, who in ((ASKED, (0, 1)), (ASKED_ALONE, (0,))) if scenario == "asked" else ():
            if guard.number == at and at not in asked:
                asked.add(at)
                if group in who:
                    guard.ask("rollback", "15")
        of.saw["numbers"].append(guard.number)
        of.saw["commits"].append(guard.is_committed)
        of.saw["digests"][of.manager.current_step()] = of.digest()
        if guard.number >= BACK_STEPS:
            break
    of.end(guard)


SCENARIOS = {
    "plain": plain,
    "plain accumulated": plain,
    "guarded": with_guard,
    "guarded accumulated": with_guard,
    "faulted": with_guard,
    "resumed": resumed,
    "killed": killed,
    "killed, waiting for the quorum": killed,
    "asked": back,
    "poisoned": back,
}


AGAIN = 3
"""How a scenario ends that is to be started again."""


def in_process(run: Callable[[], Any]) -> bool:
    """Run it in a process of its own. Gives whether it is to be started again: it was killed, or says so."""
    if not (child := os.fork()):
        try:
            is_to_go_on = run()
        except BaseException:
            logging.exception("a group failed")
            os._exit(1)
        os._exit(AGAIN if is_to_go_on else 0)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, AGAIN, -signal.SIGKILL), "a group failed"
    return code != 0


def import_what_optimizers_need() -> None:
    """Once for all scenarios: torch imports much of itself at the first step of an optimizer."""
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    torch.optim.AdamW([weight]).step()


def main() -> None:
    out, group = Path(sys.argv[1]), int(os.environ["RANK"])
    import_what_optimizers_need()
    for scenario, run in SCENARIOS.items():
        if len(sys.argv) > 2 and scenario not in sys.argv[2:]:
            continue
        if in_process(lambda: run(out, group, scenario)):  # noqa: B023 -- it runs now
            in_process(lambda: run(out, group, scenario))  # noqa: B023


main()
