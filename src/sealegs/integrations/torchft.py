"""A guard for a loop under torchft: replica groups that decide alike, and heal each other with the detectors' memory.

manager = Manager(pg=ProcessGroupGloo(), load_state_dict=load, state_dict=save, min_replica_size=1, replica_id="group0")
model = DistributedDataParallel(manager, model)
optimizer = OptimizerWrapper(manager, optimizer)
guard = torchft.attach(manager, model, optimizer, run="experiments/a1/group0")
for batch in guard.batches(loader):
    optimizer.zero_grad()  # asks for the quorum, as ever
    loss = model(batch).loss
    loss.backward()
    guard.step(loss)  # instead of optimizer.step()
"""

import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Unpack, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from sealegs.errors import ConfigError, MissingExtra

try:
    from torchft import Manager
    from torchft import Optimizer as OptimizerWrapper
    from torchft.manager import extract_trailing_digits
except ModuleNotFoundError as error:
    if error.name not in ("torchft", "torch"):
        raise
    raise MissingExtra("sealegs.integrations.torchft", "torchft", "torchft") from None

from torch.distributed import ReduceOp

from sealegs.detectors.spike import Spike
from sealegs.guard import Guard
from sealegs.guard_options import LoopScheduler, several
from sealegs.integrations.loop_options import LoopOptions, guard_options, refuse_options
from sealegs.integrations.patches import Patches
from sealegs.signals.collect import Signal, waited_for
from sealegs.signals.ranks import CULPRIT_EXCESS, FIELDS, MERGED, NormsBefore, contribution, merge
from sealegs.vocabulary import Verdict

OLDEST, NEXT = (0, 2), (0, 3)
"""The releases whose behaviour is known: from the one on, and before the other."""
KEY = "sealegs"
"""Under which the manager has the guard's state."""
PLACE = ("number", "memory", "interventions", "since", "group")
"""What a group says of itself beside its loss: its step, a checksum of what its verdicts have counted, how often its
playbook has intervened, the commits since it joined or was healed, and its own number."""
MANAGED = ("loss", "grad_norm")
"""Signals that are the same in all groups."""
NO_PROBE = "a group that is healed while others try batches again could not follow them"
OWN = {
    "skip": "give it to guard.batches(loader, skip=...)",
    "attention_logit": "give clip=Clipping(norm=..., attention_logit=...)",
}
"""Options that belong elsewhere."""


def attach(
    manager: Manager,
    model: nn.Module,
    optimizer: OptimizerWrapper,
    *,
    run: str | Path | None,
    scheduler: LRScheduler | Sequence[LRScheduler] | LoopScheduler | None = None,
    **options: Unpack[LoopOptions],
) -> "GroupGuard":
    """A guard for the loop of a replica group; ``options`` are those of ``sealegs.Guard``.

    Attach in every group, before the first quorum, and give each a run folder of its own. The manager's
    ``state_dict`` has model and optimizer, as torchft asks; the guard adds itself, its schedulers and its ledger.
    """
    return GroupGuard(manager, model, optimizer, run=run, scheduler=scheduler, **options)


class GroupGuard(Guard):
    """A guard that decides what the guards of the other groups decide: by numbers that all of them have."""

    def __init__(
        self,
        manager: Manager,
        model: nn.Module,
        optimizer: OptimizerWrapper,
        *,
        run: str | Path | None,
        scheduler: Any,
        **options: Unpack[LoopOptions],
    ) -> None:
        refuse_version(version("torchft"))
        _refuse_manager(manager)
        if not isinstance(optimizer, OptimizerWrapper):
            raise ConfigError(f"optimizer={type(optimizer).__name__}: give torchft's OptimizerWrapper around yours")
        refuse_options(options, OWN)
        checkpointing = guard_options(options).checkpointing
        also = {**checkpointing.also, "torchft": _Commits(manager)}
        given = cast(Any, {**options, "checkpoint_every": replace(checkpointing, also=also)})
        self.is_committed = True
        """Whether the last step counted. One that did not was not judged, and its batch is passed over."""
        self._manager: Any = manager
        self._schedulers = several(scheduler.scheduler if isinstance(scheduler, LoopScheduler) else scheduler)
        self._since = 0
        self._suspects: dict[int, str] = {}
        """The group at fault of steps whose verdict is not known yet."""
        self._has_quorum = False
        self._patches = Patches()
        self._norms = NormsBefore(getattr(model, "module", model))
        super().__init__(model, cast(Optimizer, optimizer.optim), run=run, scheduler=scheduler, **given)
        self._norms.attach_to(model.parameters(), "torchft")
        if self.loop.recovery is not None:
            self.loop.recovery.try_no_batch_again(NO_PROBE)
        self._for_peers = self._state_later()
        manager.register_state_dict_fn(KEY, self._heal, lambda: self._for_peers())
        self._patches.put(manager, "start_quorum", self._start_quorum)
        self._patches.put(optimizer, "step", lambda _: _refuse_step)
        self.watch.note("framework", step=self.number, name="torchft", version=version("torchft"), group=self._group)

    def step(
        self,
        loss: Tensor | None,
        *,
        grad_norm: Tensor | float | None = None,
        tokens: int | None = None,
        token_losses: Tensor | None = None,
        **signals: Signal,
    ) -> Verdict:
        """End a step of all groups: they exchange their losses, torchft says whether it counts, the guard decides.

        It asks ``manager.should_commit()``, once. A step that is rejected counts for torchft, and changes no weight in
        any group. One that torchft does not count is not judged (``is_committed``). See ``Guard.step``.
        """
        if loss is None:
            raise ConfigError("loss=None: every group has a loss; give the one that was backpropagated")
        if not self._has_quorum:
            raise ConfigError(
                "guard.step: no quorum was asked for in this step; call optimizer.zero_grad() of torchft's "
                "OptimizerWrapper, or manager.start_quorum(), before the forward pass"
            )
        self._has_quorum = False
        groups = self._exchange(loss.detach())
        apart = groups.apart()
        if apart and self._manager.is_participating() and groups.mine_is_apart:
            self._manager.report_error(RuntimeError(f"sealegs: {apart}"))  # of this group alone: the others go on
        self.is_committed = self._manager.should_commit()  # heals this group, where it has to be
        if apart or not self.is_committed:
            return self._give_up(apart)
        self._since += 1
        number = self.number
        self._suspects[number] = groups.at_fault()
        known: dict[str, Signal] = {"groups": float(len(groups.rows)), **signals}
        verdict = super().step(groups.loss, grad_norm=grad_norm, tokens=tokens, token_losses=token_losses, **known)
        self._name_group_at_fault(verdict)
        return verdict

    def close(self) -> None:
        """Finish, release the folder, and leave the manager and the optimizer as they were."""
        self._patches.undo()
        self._norms.close()
        for functions in (self._manager._load_state_dict_fns, self._manager._user_state_dicts):
            functions.pop(KEY, None)
        super().close()

    # Before the forward pass

    def _start_quorum(self, start: Any) -> Any:
        def started(*args: Any, **kwargs: Any) -> Any:
            self._for_peers = self._state_later()  # torchft's thread asks for it while the loop goes on
            self._has_quorum = True
            return start(*args, **kwargs)

        return started

    def _state_later(self) -> Callable[[], dict[str, Any]]:
        """What gives a group that is healed all that it needs to decide as this one does."""
        recovery = self.loop.recovery
        guard, ledger = self.loop.state_later(), None if recovery is None else recovery.bookkeeping()
        schedulers = [each.state_dict() for each in self._schedulers]
        return lambda: {"guard": json.dumps(guard()), "ledger": json.dumps(ledger), "schedulers": schedulers}

    def _heal(self, state: Mapping[str, Any]) -> None:
        before, self._since = self.number, 0
        self.loop.heal_from(json.loads(state["guard"]), json.loads(state["ledger"]))
        for scheduler, saved in zip(self._schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(saved)
        text = f"healed by another group: at step {self.number}, from {before}"
        self.watch.note("healed", step=self.number, text=text)

    # After the backward pass

    @property
    def _group(self) -> int:
        replica = self._manager._replica_id
        return -1 if replica is None else int(extract_trailing_digits(replica))

    def _exchange(self, loss: Tensor) -> "_Groups":
        """The rows of all groups that take part, the same on all of them: one small sum."""
        nothing = torch.zeros((), dtype=torch.float64, device=loss.device)
        before = self._norms.collect()
        numbers = (loss, nothing, nothing, nothing, None if before is None else before.to(loss.device), 0)
        place = [float(number) for number in self._place()]
        mine = torch.cat((contribution(*numbers, torch.stack((nothing, nothing))), nothing.new_tensor(place)))
        rank, world = self._manager.participating_rank(), max(self._manager.num_participants(), 1)
        rows = mine.new_zeros(world, mine.numel())
        if rank is not None and rank < world:
            rows[rank] = mine
        self._manager.allreduce(rows, reduce_op=ReduceOp.SUM).wait()
        takes_part = rows[:, FIELDS.index("has_loss")] > 0  # torchft sends zeros for a group that is being healed
        return _Groups(rows[takes_part], place)

    def _place(self) -> tuple[int, ...]:
        self.watch.catch_up()
        tally = self.watch.judging.tally
        judged = [of.stream.age for detector, of in self.watch.states_of(Spike) if detector.signal in MANAGED]
        counted = (*judged, tally.skips, tally.skips_in_a_row, tally.nonfinite_in_a_row, tally.lone_skips)
        interventions = 0 if self.loop.recovery is None else self.loop.recovery.interventions
        return self.number, zlib.crc32(repr(counted).encode()), interventions, self._since, self._group

    def _name_group_at_fault(self, verdict: Verdict) -> None:
        """Of a step that is not healthy, as late as its verdict comes."""
        who = self._suspects.pop(verdict.step, "")
        self._suspects = {step: name for step, name in self._suspects.items() if step > verdict.step}
        if who and verdict.word != "GO":
            self.watch.note("group-at-fault", step=verdict.step, text=who)

    def _give_up(self, apart: str) -> Verdict:
        """The step changes no weight: torchft does not count it, or the groups were at different places."""
        self.loop.give_up_step()
        errored = self._manager.errored()
        reason = apart or (f"{errored.original_exception}".splitlines() or ["an error"])[0] if errored else apart
        text = f"not trained on: {reason or 'too few groups, or another process of this group'}"
        self.watch.note("step-given-up", step=self.number, text=text, committed=self.is_committed)
        return Verdict(step=self.number)


class _Commits:
    """The commits that a manager has counted: a resume brings them back, a rollback does not.

    torchft heals whoever has fewer. So they go on where a run goes back, and a group that missed it is healed.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def state_dict(self) -> dict[str, int]:
        """As the manager has them."""
        return dict(self._manager.state_dict())

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Count from there, in a new process."""
        if not self._manager.current_step():
            self._manager.load_state_dict(dict(state))


class _Groups(NamedTuple):
    """What all groups that take part in a step say of it, by their rank in the quorum."""

    rows: Tensor
    mine: list[float]
    """The place of this group, whether it takes part or not."""

    def at_fault(self) -> str:
        """The group whose own loss or gradients stand out, before they were averaged; empty where none does."""
        merged = dict(zip(MERGED, waited_for(merge(self.rows[:, : len(FIELDS)])), strict=True))
        excess = merged["culprit_excess"]
        if not excess > CULPRIT_EXCESS:
            return ""
        group = self.places[int(merged["culprit_rank"])][PLACE.index("group")]
        if excess == math.inf:
            return f"group {group:.0f}: of all groups only its own loss or gradients are not finite"
        return f"group {group:.0f}: its own gradients are {excess:.3g} times the median of all groups"

    @property
    def loss(self) -> Tensor:
        """The mean over the groups."""
        return self.rows[:, FIELDS.index("loss")].mean()

    @property
    def places(self) -> list[list[float]]:
        """In the order of PLACE."""
        return [waited_for(row) for row in self.rows[:, len(FIELDS) :]]

    @property
    def _leader(self) -> list[float]:
        """The group that was longest in the run; of several the one that has intervened most, as a person may ask."""
        return max(self.places, key=lambda place: (place[3], place[2]))

    @property
    def mine_is_apart(self) -> bool:
        """Whether this group is not where the leader is."""
        return self.mine[:3] != self._leader[:3]

    def apart(self) -> str:
        """How the groups are at different places, in words; empty where they are not."""
        if not len(self.rows):
            return ""
        leader = self._leader
        others = [place for place in self.places if place[:3] != leader[:3]]
        if not others:
            return ""
        told = ", ".join(f"group {place[4]:.0f} at step {place[0]:.0f}" for place in others)
        return f"the guards of the groups differ: {told}, group {leader[4]:.0f} at step {leader[0]:.0f}"


def refuse_version(installed: str) -> None:
    """Refuse releases whose behaviour is not known."""
    numbers = tuple(int(part) for part in installed.split("+")[0].split(".")[:3] if part.isdecimal())
    if not OLDEST <= numbers < NEXT:
        known = f"from {'.'.join(map(str, OLDEST))} on, before {'.'.join(map(str, NEXT))}"
        raise ConfigError(
            f"torchft {installed}: a guard goes by the order in which it heals and commits, and knows that of releases "
            f"{known}; use one of these, as `pip install 'sealegs[torchft]'` brings"
        )


def _refuse_manager(manager: Any) -> None:
    if not isinstance(manager, Manager):
        raise ConfigError(f"manager={type(manager).__name__}: give torchft's Manager")
    if KEY in manager._load_state_dict_fns:
        raise ConfigError("manager: a guard is attached to it already; close that one")
    if manager._group_world_size != 1:
        raise ConfigError(
            f"manager: its group has {manager._group_world_size} processes, and only groups of one were tested; guard "
            "several ranks without torchft, or watch the run with sealegs.Watch"
        )


def _refuse_step(*_: Any, **__: Any) -> NoReturn:
    raise ConfigError("optimizer.step: the step of this loop is the guard's; call guard.step(loss) instead")
