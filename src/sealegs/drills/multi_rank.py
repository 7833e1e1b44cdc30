"""Trains the runs of a drill on several ranks, and their clean twin: the lab's model under DDP, on the CPU.

Each rank has its rows of the batches that one process would have. The loop is a plain one, as anybody writes it, with
the lab's model, optimizer, schedule and data.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from sealegs.drills.catalogue import Drill
from sealegs.drills.controls import Altering
from sealegs.drills.loops import LabLoop
from sealegs.drills.rank_processes import PATIENCE_S, Beat, Crew
from sealegs.errors import RunHalted
from sealegs.faults.batches import Spoilt
from sealegs.faults.practice import disturbed
from sealegs.faults.spec import parse
from sealegs.guard import Guard
from sealegs.guard_options import Checkpointing, GuardOptions, Telemetry, skip_ranges
from sealegs.lab.branches import fork
from sealegs.lab.data import Batch
from sealegs.lab.experts import Notes
from sealegs.lab.model import Losses, Transformer
from sealegs.lab.settings import Settings
from sealegs.lab.sources import TokenSources, open_data
from sealegs.lab.train import (
    PLAYBOOKS,
    SNAPSHOT_BYTES,
    backward,
    begin,
    build_optimizer,
    describe,
    evaluate,
    lr_share,
    signals_of,
)
from sealegs.loop_port import LoopPort
from sealegs.record.writer import RunWriter
from sealegs.signals.ranks import Ranks
from sealegs.watch import Watch


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedLoop:
    """Branches of one run of the lab on several ranks."""

    lab: LabLoop
    """The lab whose settings and folder it has."""
    crew: Crew

    @property
    def at(self) -> int:
        """The step at which faults strike."""
        return self.lab.at

    @property
    def last(self) -> int:
        """The step at which runs are compared."""
        return self.lab.last

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return self.crew.ranks

    def __str__(self) -> str:
        return f"{self.lab}, on {self.crew.ranks} ranks"

    def prepare(self) -> None:
        """Train the part before the fork."""
        settings = self.lab.settings(None, guarded=True)
        open_data(settings)  # made once, before all ranks need it
        if self.lab.whole:
            return
        first = partial(trained, settings, self._beginning, until=self.lab.fork)
        self.crew.do("the beginning on several ranks", first)

    def ending(self, folder: Path, drill: Drill | None, *, guarded: bool, without: int = 0) -> float:
        """The final loss on clean batches, NaN if the run was halted. A placebo runs ``without`` some batches."""
        if not self.lab.whole:
            fork(self._beginning, folder)
        losses = self.crew.do(
            f"{drill.name if drill else 'a clean twin'}, {'guarded' if guarded else 'unguarded'}",
            partial(
                trained,
                self.lab.settings(drill, guarded=guarded),
                folder,
                until=self.last,
                resume=not self.lab.whole,
                faults=[str(fault) for fault in drill.struck(self.at)] if drill else [],
                skip=[(self.at, self.at + without)] if without else [],
            ),
        )
        # chance decides which replica is kept, so the worse one counts
        return math.nan if any(map(math.isnan, losses)) else max(losses)

    @property
    def _beginning(self) -> Path:
        return self.lab.place / "beginning-on-ranks"


def trained(
    settings: Settings,
    folder: Path,
    beat: Beat,
    *,
    until: int,
    resume: bool = False,
    faults: Sequence[str] = (),
    skip: Sequence[tuple[int, int]] = (),
) -> float:
    """Train on one rank of several, and give this replica's loss on clean batches; NaN if the run was halted."""
    torch.manual_seed(settings.seed)
    data = open_data(settings)
    model = Transformer(settings.model)
    replica = DistributedDataParallel(model)
    optimizer = build_optimizer(model, settings.optimizer)
    strikes: list[tuple[int, str]] = []
    options = GuardOptions(
        scheduler=LambdaLR(optimizer, partial(lr_share, settings.optimizer, settings.steps)),
        clip=settings.optimizer.clip or None,
        act=not settings.shadow,
        playbook=PLAYBOOKS[settings.playbook](),
        checkpoint_every=Checkpointing(
            keep=settings.cadence.keep_checkpoints,
            snapshot_every=settings.cadence.snapshot_steps,
            snapshot_memory=SNAPSHOT_BYTES,
        ),
        resume=resume,
        telemetry=Telemetry(sample_every=settings.cadence.detail_steps, ranks=Ranks(timeout_s=PATIENCE_S / 2)),
    )
    open_watch = partial(Watch, _record(settings, data, model, folder, resume=resume))
    with Guard.around(LoopPort(replica, optimizer, options, open_watch, has_folder=True)) as guard:
        watch = guard.watch
        skip_ranges(guard.loop.data, skip)
        if dist.get_rank() == 0:
            begin(folder, guard, describe(settings, data, model, folder.name), data, {})
        halted: RunHalted | None = None
        with disturbed(
            [parse(fault) for fault in faults],
            settings.model.vocabulary,
            replica,
            optimizer,
            Spoilt(data.training, Altering(rows_of_this_rank)),
            lambda: guard.number,
            lambda text: strikes.append((guard.number, text)),
        ) as batches:
            try:
                _do_steps(settings, replica, guard, batches, until, beat)
            except RunHalted as error:  # by all ranks at once
                halted = error
        guard.loop.finish()
        _tell_strikes(watch, strikes)
        watch.note("end", reason="halted" if halted else "finished", error=str(halted) if halted else None)
    return math.nan if halted else float(evaluate(model.losses, data.held_out, settings))


def rows_of_this_rank(batch: Batch) -> Batch:
    """Every n-th row of a batch: together the ranks have all of them."""
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    return replace(batch, tokens=batch.tokens[mine], targets=batch.targets[mine], spans=batch.spans[mine])


def _record(
    settings: Settings, data: TokenSources, model: Transformer, folder: Path, *, resume: bool
) -> RunWriter | Path:
    """The record of the run: one rank writes, the others only know the folder."""
    if dist.get_rank() != 0:
        return folder
    return (
        RunWriter.reopen(folder) if resume else RunWriter.create(folder, describe(settings, data, model, folder.name))
    )


def _do_steps(
    settings: Settings, replica: DistributedDataParallel, guard: Guard, batches: Any, until: int, beat: Beat
) -> None:
    model, scaler = replica.module, GradScaler(settings.device, enabled=False)

    def losses(tokens: Tensor, targets: Tensor) -> Losses:
        notes: Notes = []
        found: Losses = model.losses_of(replica(tokens, notes), targets, notes)
        return found

    for batch in guard.batches(batches):
        loss, token_losses, beside = backward(scaler, losses, batch, settings)
        if (loads := beside.get("expert_load")) is not None:  # of all ranks, like the gradients
            dist.all_reduce(loads)
            model.loads = loads.div_(dist.get_world_size())
        signals = signals_of(beside, detailed=guard.number % settings.cadence.detail_steps == 0)
        guard.step(
            loss,
            tokens=batch.target_count,
            token_losses=token_losses,
            batch_hash=batch.hash,
            sources=batch.sources,
            **signals,
        )
        beat(guard.number)
        if guard.number >= until:
            break
    guard.checkpoint(wait=True)


def _tell_strikes(watch: Watch, strikes: list[tuple[int, str]]) -> None:
    """Report the strikes: one rank writes, whichever was struck."""
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, strikes)
    for rank, of_rank in enumerate(of_ranks):
        for step, text in of_rank:
            watch.note("fault", step=step, text=f"rank {rank}: {text}")
