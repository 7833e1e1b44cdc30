"""The training that is killed: a small model, a guard, and everything that a checkpoint has to bring back."""

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from sealegs import Guard, Playbook
from sealegs.errors import ConfigError
from sealegs.guard_options import Checkpointing, Telemetry
from sealegs.signals.ranks import Ranks

STEPS, EVERY, SNAPSHOTS = 140, 10, 15
"""Of a whole run; between checkpoints; between snapshots in memory."""
NAN, BURST = {33}, {40, 41, 42}
"""Batches whose loss is not finite: one, which is skipped, and three in a row, which a playbook goes back from."""
LOST_S = 30.0
"""How long ranks wait for one that does not come: well within the time after which a life is a hang."""
DAMAGED = 70
"""The step before which the weights are damaged, once in a run."""
FAULTS = ("none", "one NaN", "NaN in a row", "damaged weights", "asked to go back")
PLAYBOOKS: dict[str, Callable[[], Playbook]] = {"observe": Playbook.observe, "standard": Playbook.standard}


@dataclass(frozen=True, slots=True)
class Kind:
    """What is trained, and under what."""

    playbook: str
    fault: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.playbook}, {self.fault}, {self.ranks} rank{'s' if self.ranks > 1 else ''}"

    @property
    def goes_back(self) -> bool:
        """Whether the playbook has a reason to, once."""
        return self.playbook == "standard" and self.fault in ("NaN in a row", "damaged weights")

    @property
    def is_asked(self) -> bool:
        """Whether somebody asks for it, again and again."""
        return self.fault == "asked to go back"

    @property
    def is_repeatable(self) -> bool:
        """Whether a run that was killed has to end bit for bit as one that was not: nothing but skips is done to it."""
        return not self.goes_back and not self.is_asked and self.fault != "damaged weights"


KINDS = tuple(Kind(playbook, fault, ranks) for ranks, fault, playbook in product((1, 2), FAULTS, PLAYBOOKS))


class Total:
    """What the loop keeps of its own: it goes along in every state."""

    def __init__(self) -> None:
        self.loss = 0.0

    def state_dict(self) -> dict[str, float]:
        """As JSON."""
        return {"loss": self.loss}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """From there on."""
        self.loss = state["loss"]


def half_life(step: int) -> float:
    """The share of the learning rate."""
    return 1 / (1 + step / STEPS)


class Training:
    """One process's part of a run: begun, or gone on with where the folder has one."""

    def __init__(self, kind: Kind, folder: Path, rank: int) -> None:
        torch.manual_seed(7)
        network = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 4))
        self.model: nn.Module = nn.parallel.DistributedDataParallel(network) if kind.ranks > 1 else network
        self.optimizer = AdamW(self.model.parameters(), lr=3e-3)
        self.total = Total()
        self._kind = kind
        torch.manual_seed(100 + rank)  # of dropout
        drawn = torch.randn(2 * STEPS, 16, 8, generator=torch.Generator().manual_seed(rank))
        self._data = list(drawn)
        self.guard = Guard(
            self.model,
            self.optimizer,
            run=folder,
            scheduler=LambdaLR(self.optimizer, half_life),
            clip=1.0,
            playbook=PLAYBOOKS[kind.playbook](),
            checkpoint_every=Checkpointing(every=EVERY, snapshot_every=SNAPSHOTS, also={"total": self.total}),
            resume="auto",
            telemetry=Telemetry(sample_every=10, ranks=Ranks(timeout_s=LOST_S)),
        )

    def batches(self) -> Iterator[Tensor]:
        """Those of the guard."""
        return self.guard.batches(self._data)

    def step(self, batch: Tensor, *, strikes: bool) -> bool:
        """One step, before which the weights are damaged where the fault ``strikes``; whether it did."""
        is_struck = strikes and self._kind.fault == "damaged weights" and self.guard.number == DAMAGED
        if is_struck and not self.guard.is_probe:
            with torch.no_grad():
                for weight in self.model.parameters():
                    weight.mul_(30.0)
        loss = (self.model(batch) - batch[:, :4]).square().mean() * self._factor()
        loss.backward()
        self.guard.step(loss)
        if not self.guard.is_probe:
            self.total.loss += float(loss.detach())
        return is_struck

    def ask_back(self) -> None:
        """Ask the guard to go back, as a person does; it may have nowhere to go."""
        with suppress(ConfigError):
            self.guard.ask("rollback", "1")

    def _factor(self) -> float:
        bad = {"one NaN": NAN, "NaN in a row": BURST}.get(self._kind.fault, ())
        return math.nan if self.guard.loop.data.number in bad and not self.guard.is_probe else 1.0

    def digest(self) -> str:
        """Of weights, moments, schedule and what the loop keeps: of everything that the next step would read."""
        parts: list[Any] = [tensor.detach().double().flatten() for tensor in self.model.parameters()]
        for state in self.optimizer.state.values():
            parts += [state[name].double().flatten() for name in sorted(state)]
        told = hashlib.sha256(torch.cat(parts).numpy().tobytes())
        told.update(repr((self.optimizer.param_groups[0]["lr"], self.total.loss)).encode())
        return told.hexdigest()
