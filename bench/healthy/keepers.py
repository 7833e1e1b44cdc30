"""A folder in, a keeper out: nobody in particular, the guard, the guard with its playbook, the rules of peers.

    keeper = KEEPERS["guard"](folder)
    quality = training.train(seed, keeper)
    counts = keeper.finish()

What peers call a spike is said by bench/peers.py at the thresholds of bench/rescue/rules.py; here the training's own
limit on the gradient norm is their base. Two things are kinder than life. A step in which a ``GradScaler`` found an
overflow is the scaler's, and no rule is shown it. Lightning's SpikeDetection looks after the update, stops the job and
wants it restarted from a checkpoint, which a loop of somebody else's does not have: it only counts where it would stop.
"""

import math
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from bench.healthy.contract import Keeper, Steps
from bench.rescue.rules import PEERS
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import sealegs
from bench import peers
from sealegs.cli.check import check
from sealegs.errors import RunHalted
from sealegs.guard_options import Checkpointing
from sealegs.recovery.actions import Rollback, actions_from
from sealegs.vocabulary import Event, Severity

T = TypeVar("T")

OVERFLOW = "overflow"
"""The reason of a skip that is a loss scaler's own, and would be without any keeper."""
LONGEST_MEMORY = 400
"""Steps that a peer's rule is given at most. ZClip would want 1000: what its running mean forgets after 400 is 1e-5."""
VERDICTS = ("healthy", "watch", "unknown", "act")
"""Of ``sealegs check``, from good to bad."""
TOLD = 40
"""Skips of one cell whose particulars are kept."""


@dataclass
class Counts:
    """What a keeper did in one training."""

    steps: int = 0
    """Without those that were only tried again."""
    probes: int = 0
    skips: Counter[str] = field(default_factory=Counter)
    """Updates that were left out, by what asked for it."""
    clipped: int = 0
    """Updates that a rule made smaller than the training's own clipping does."""
    alarms: Counter[str] = field(default_factory=Counter)
    """Incidents that were opened, by detector; of Lightning, where it would stop the job."""
    rollbacks: int = 0
    other_interventions: int = 0
    halts: int = 0
    verdict: str | None = None
    """What ``sealegs check`` says of the run; of several run folders, the worst."""
    warned: int = 0
    """Runs that ``guard.close()`` warned of: an incident that the loss had not come back from."""
    told: list[dict[str, Any]] = field(default_factory=list)
    """Particulars of the first skips, for whoever wants to know why."""

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self) | {"skips": dict(self.skips), "alarms": dict(self.alarms)}


class Finishing(Keeper, Protocol):
    """A keeper that says in the end what it did."""

    def finish(self, error: BaseException | None = None) -> Counts:
        """After the training has ended, or failed."""


class PlainSteps:
    """The end of a step as any loop has it."""

    is_probe = False

    def __init__(
        self,
        counts: Counts,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        scheduler: LRScheduler | None,
        clip: float | None,
        scaler: GradScaler | None,
    ) -> None:
        self.counts = counts
        self.model = model
        self.clip = clip
        self._optimizers = optimizers
        self._scheduler = scheduler
        self._scaler = scaler

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """As they come."""
        return iter(loader)

    def accumulate(self) -> AbstractContextManager[None]:
        """Nothing to do on one device."""
        return nullcontext()

    def limit(self, loss: Tensor) -> float | None:
        """The largest norm that the gradient of this step may have; infinite for any, None to leave the update out."""
        return math.inf if self.clip is None else self.clip

    def step(self, loss: Tensor) -> None:
        """Unscale, clip, update, schedule, zero."""
        self.counts.steps += 1
        if self._scaler is not None:
            for optimizer in self._optimizers:
                self._scaler.unscale_(optimizer)
        limit = self.limit(loss)
        if limit is not None:
            if limit < math.inf:
                nn.utils.clip_grad_norm_(self.model.parameters(), limit)
            for optimizer in self._optimizers:
                optimizer.step() if self._scaler is None else self._scaler.step(optimizer)
        if self._scaler is not None:
            before = self._scaler.get_scale()
            self._scaler.update()
            self.counts.skips[OVERFLOW] += self._scaler.get_scale() < before
        if self._scheduler is not None:
            self._scheduler.step()
        for optimizer in self._optimizers:
            optimizer.zero_grad()


@dataclass
class Plain:
    """Nobody guards."""

    folder: Path
    counts: Counts = field(default_factory=Counts)

    def around(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        scheduler: LRScheduler | None = None,
        clip: float | None = None,
        scaler: GradScaler | None = None,
        reads_data: bool = True,
        also: dict[str, Any] | None = None,
    ) -> Steps:
        """Ends steps as they always were."""
        return PlainSteps(self.counts, model, several(optimizer), scheduler, clip, scaler)

    def finish(self, error: BaseException | None = None) -> Counts:
        """Nothing is open."""
        self.counts.skips += Counter()  # drops what was counted zero times
        return self.counts


class PeerSteps(PlainSteps):
    """A step whose loss and gradient norm a peer's rule is asked about, before the update."""

    def __init__(self, rule: peers.Rule, counts: Counts, *how: Any) -> None:
        super().__init__(counts, *how)
        self._rule = rule
        memory = min(rule.memory or LONGEST_MEMORY, LONGEST_MEMORY)
        self._losses: deque[float] = deque(maxlen=memory)
        self._norms: deque[float] = deque(maxlen=memory)

    def limit(self, loss: Tensor) -> float | None:
        """What the rule says, and never more than the training's own."""
        own = math.inf if self.clip is None else self.clip
        gradients = [each.grad for each in self.model.parameters() if each.grad is not None]
        norm = float(nn.utils.get_total_norm(gradients))
        if self._scaler is not None and not math.isfinite(norm):
            return own
        self._losses.append(float(loss.detach()))
        self._norms.append(norm)
        norms = np.array(self._norms)
        if isinstance(self._rule, peers.ZClip):
            usual = float(self._rule.clipped(norms)[-1])
            self.counts.clipped += usual < min(norm, own)
            return min(own, usual) if usual < norm else own
        if not self._rule.flags(np.array(self._losses), norms)[-1]:
            return own
        if isinstance(self._rule, peers.OverLastAccepted):
            self._losses.clear()  # a new process has new statistics
            self._norms.clear()
            self.counts.alarms[self._rule.name] += 1
            return own
        self.counts.skips[self._rule.name] += 1
        return None


@dataclass
class Peer(Plain):
    """The rule of somebody else."""

    rule: peers.Rule = field(kw_only=True)

    def around(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        scheduler: LRScheduler | None = None,
        clip: float | None = None,
        scaler: GradScaler | None = None,
        reads_data: bool = True,
        also: dict[str, Any] | None = None,
    ) -> Steps:
        """Every loop has statistics of its own."""
        return PeerSteps(self.rule, self.counts, model, several(optimizer), scheduler, clip, scaler)


class GuardSteps:
    """Steps that a guard ends."""

    def __init__(self, counts: Counts, guard: sealegs.Guard) -> None:
        self._counts = counts
        self._guard = guard

    @property
    def is_probe(self) -> bool:
        """As the guard says."""
        return bool(getattr(self._guard, "is_probe", self._guard.loop.data.is_probe))

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """As the guard hands them out."""
        return self._guard.batches(loader)

    def accumulate(self) -> AbstractContextManager[None]:
        """As the guard wants it."""
        return self._guard.accumulate()

    def step(self, loss: Tensor) -> None:
        """All of it is the guard's."""
        is_probe = self.is_probe
        self._counts.probes += is_probe
        self._counts.steps += not is_probe
        self._guard.step(loss)


@dataclass
class Guarded:
    """The guard with all its defaults, and a playbook or none."""

    folder: Path
    playbook: sealegs.Playbook | None = None
    counts: Counts = field(default_factory=Counts)
    guards: list[sealegs.Guard] = field(default_factory=list)

    def around(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        scheduler: LRScheduler | None = None,
        clip: float | None = None,
        scaler: GradScaler | None = None,
        reads_data: bool = True,
        also: dict[str, Any] | None = None,
    ) -> Steps:
        """A guard, and a run folder, of its own for every loop; only one that reads the data can go back in it."""
        guard = sealegs.Guard(
            model,
            optimizer,
            run=self.folder / f"run-{len(self.guards)}",
            scheduler=scheduler,
            clip=clip,
            scaler=scaler,
            playbook=self.playbook if reads_data else None,
            checkpoint_every=Checkpointing(also=also or {}),
        )
        self.guards.append(guard)
        return GuardSteps(self.counts, guard)

    def finish(self, error: BaseException | None = None) -> Counts:
        """Close the run folders, and read in them what was done."""
        self.counts.halts = int(isinstance(error, RunHalted))
        verdicts = []
        for guard in self.guards:
            if error is not None:
                guard.loop.fail(error)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", sealegs.RunEndedBadly)  # it is counted
                guard.close()
            self.counts.warned += bool(guard.loop.ended_badly)
            folder = guard.watch.folder
            assert folder is not None
            for event in sealegs.open_run(folder).events:
                count(event, self.counts)
            verdicts.append(check(str(folder), metrics={}, pattern=None, rules="calibrated").findings.verdict)
        self.counts.verdict = max(verdicts, key=VERDICTS.index, default=None)
        return self.counts


def count(event: Event, counts: Counts) -> None:
    """Take one event of a run folder into the counts."""
    detail = event.detail
    if event.kind == "intervention" and detail["acted"]:
        is_rollback = any(isinstance(action, Rollback) for action in actions_from(detail["actions"]))
        counts.rollbacks += is_rollback
        counts.other_interventions += not is_rollback
    if event.kind == "alarm":
        counts.alarms[detail["findings"][0]["detector"]] += 1
    if event.kind in ("skip", "alarm", "halt") and detail["acted"]:
        grave = [each for each in detail["findings"] if Severity[each["severity"]] >= Severity.GATE]
        asked = [each for each in grave if each["spoils_update"]]
        counts.skips["+".join(dict.fromkeys(each["detector"] for each in asked))] += 1
        if len(counts.told) < TOLD:
            counts.told.append({"step": event.step, "text": detail["text"]})


def several(one_or_more: Optimizer | Sequence[Optimizer]) -> Sequence[Optimizer]:
    """One is several, too."""
    return (one_or_more,) if isinstance(one_or_more, Optimizer) else one_or_more


def peer(name: str) -> Callable[[Path], Finishing]:
    """A keeper that goes by a rule of bench/peers.py."""
    return lambda folder: Peer(folder, rule=PEERS[name])


PLAIN = "plain"
GUARDS: Mapping[str, Callable[[Path], Finishing]] = {
    "guard": Guarded,
    "playbook": lambda folder: Guarded(folder, playbook=sealegs.Playbook.standard()),
}
OTHERS: Mapping[str, Callable[[Path], Finishing]] = {
    "olmo": peer("OLMo-core 6 sigma / 128"),
    "llmc": peer("llm.c z > 3 / 128"),
    "zclip": peer("ZClip 2.5"),
    "lightning": peer("Lightning 3x / 10"),
}
KEEPERS: Mapping[str, Callable[[Path], Finishing]] = {PLAIN: Plain, **GUARDS, **OTHERS}
"""By the name that the command line has."""


def one_thread() -> None:
    """Cells run side by side, each on a core of its own; and sums in the same order are the same sums."""
    torch.set_num_threads(1)
