"""Carries out interventions: anomalies and requests in, changes to the run out, each written down as an event.

Besides the update itself, this is the one place that changes what is being trained. Acting fails closed: a rollback
restores everything or nothing; where it restores nothing, the playbook's next rung is tried.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TypeVar, assert_never

from torch.optim import Optimizer

from sealegs.data.position import Batches
from sealegs.errors import ConfigError, RunHalted
from sealegs.recovery.actions import (
    Action,
    ClipQK,
    Continue,
    CopyMajority,
    Halt,
    Impossible,
    LowerLR,
    Rollback,
    SkipBatches,
    Stratify,
    SwapSource,
    Tighten,
    TightenByEvidence,
    UseBf16,
    plain_actions,
    requested_action,
)
from sealegs.recovery.evidence import Anomaly
from sealegs.recovery.incident_tracker import CostSoFar, IncidentTracker
from sealegs.recovery.ledger import Ledger
from sealegs.recovery.margin_evidence import Margin, Means
from sealegs.recovery.playbook import HALTING, HEALS, Playbook, choose
from sealegs.recovery.recurrence import PastIntervention, Trigger
from sealegs.recovery.restore_points import RestorePoint, RestorePoints
from sealegs.watch import Watch

A = TypeVar("A")

SHARP = 3
"""Steps by which the end of a bad stretch may be dated too early."""
MOST_OF_AN_EPOCH = 0.05
"""Share of an epoch's batches that a rung leaves out at the most, beyond those that the evidence names: a run must not
lose its data to its recovery."""


@dataclass(frozen=True, slots=True)
class Order:
    """An intervention to carry out, with everything that its event says."""

    actions: tuple[Action, ...]
    anomaly: Anomaly
    number: int
    """The step that would come next."""
    who: str
    rung: int | None
    reason: str
    request: str | None = None
    margins: tuple[Margin, ...] = ()
    """What the evidence says about margins, and what becomes of each."""

    @property
    def evidence(self) -> str:
        """The evidence in a sentence."""
        return "; ".join([self.anomaly.text, *map(str, self.margins)])

    def find(self, kind: type[A]) -> A | None:
        """The action of a kind, if there is one; a rung has at most one of each."""
        return next((action for action in self.actions if isinstance(action, kind)), None)


def makes_its_rate(optimizer: Optimizer) -> bool:
    """Whether the optimizer computes its own learning rate, as Hugging Face's Adafactor does: there is none to
    lower."""
    return any(group["lr"] is None for group in optimizer.param_groups)


def refuse_idle(order: Order, batches: Batches, optimizers: Sequence[Optimizer]) -> None:
    """Raise Impossible for an action that would do nothing in this run."""
    if order.find(LowerLR) is not None and any(map(makes_its_rate, optimizers)):
        raise Impossible("an optimizer has lr=None: it makes its rate itself")
    if not order.actions:
        raise Impossible("; ".join(["the evidence asks for no tighter margin", *map(str, order.margins)]))
    if order.find(SkipBatches) is not None and batches.number is None:
        raise Impossible("no batch was handed out yet; use guard.batches(loader)")
    if order.find(Stratify) is not None and (refusal := batches.cannot_stratify()):
        raise Impossible(refusal)
    if (swap := order.find(SwapSource)) is None:
        return
    source = swap.source or order.anomaly.source
    if source is None:
        raise Impossible("the evidence names no source")
    if refusal := batches.cannot_swap(source):
        raise Impossible(refusal)


def change_data(order: Order, batches: Batches) -> list[str]:
    """Change the data through the user's loader. It comes first, since the loader may refuse; it is not undone."""
    changed = []
    try:
        if (swap := order.find(SwapSource)) is not None:
            source = swap.source or order.anomaly.source
            assert source is not None
            batches.swap(source, swap.weight)
            changed.append(f"source {source} has the weight {swap.weight:g}")
        if (stratify := order.find(Stratify)) is not None:
            batches.stratify()
            changed.append(str(stratify))
    except Exception as error:
        raise Impossible(str(error)) from error
    return changed


def change_ledger(
    order: Order, ledger: Ledger, batches: Batches, *, first: int, loop_clips: bool, batches_a_step: int = 1
) -> list[str]:
    """Enter skipped batches and adjustments into the ledger, from step ``first`` on; the training state stays as it is.

    ``loop_clips`` says that the user's loop clips, so the guard has no clipping to tighten.
    """
    changed = []
    for action in order.actions:
        match action:
            case Rollback(skip=count) if count and order.anomaly.batch is not None:
                fewest = count if order.anomaly.trigger == Trigger.ASKED else least_left_out(count, batches.length)
                place, number = bad_stretch(order.anomaly, fewest, batches_a_step)
                reach = ", as far as they were bad" if number > count else ""
                changed.append(_leave_out(batches, place, number) + reach)
            case SkipBatches(count=count):
                assert batches.number is not None
                changed.append(_leave_out(batches, batches.number + 1, count))
            case LowerLR():
                ledger.adjustments = ledger.adjustments.lowered(action, first)
                changed.append(f"the learning rate is {ledger.adjustments.lr:g} of the schedule's")
            case Tighten(clip=clip):
                ledger.adjustments = ledger.adjustments.tightened(action)
                is_idle = clip is not None and loop_clips
                changed.append(f"{action}{' (but the loop clips by itself: tighten that)' if is_idle else ''}")
            case ClipQK(limit=limit):
                ledger.adjustments = replace(ledger.adjustments, qk_clip=limit)
                changed.append(str(action))
            case UseBf16():
                ledger.adjustments = replace(ledger.adjustments, bf16=True)
                changed.append(str(action))
            case Rollback() | SwapSource() | Stratify() | Continue() | Halt() | TightenByEvidence() | CopyMajority():
                pass  # carried out elsewhere: the state goes back, the loader changes, the run goes on or ends
            case _:
                assert_never(action)
    return changed


def least_left_out(asked: int, length: int | None) -> int:
    """How many batches a rung leaves out at the least, where it asks for ``asked`` and an epoch has ``length``.

    >>> least_left_out(200, None), least_left_out(200, 250), least_left_out(10, 250)
    (200, 12, 10)
    """
    return asked if length is None else min(asked, max(1, int(MOST_OF_AN_EPOCH * length)))


def bad_stretch(anomaly: Anomaly, fewest: int, batches_a_step: int) -> tuple[int, int]:
    """The first of the batches to leave out, and their number."""
    assert anomaly.batch is not None
    # the step before may have done the damage; a row names the last batch of its step
    first = max(anomaly.batch - (2 * batches_a_step - 1), 0)
    lasted = (1 + anomaly.lasted + SHARP) * batches_a_step if anomaly.lasted else 0
    reach = first if anomaly.triggered_by is None else anomaly.triggered_by
    return first, max(fewest, lasted, reach - first + 1)


def _leave_out(batches: Batches, first: int, count: int) -> str:
    batches.skip(first, count)
    return f"batches {first} to {first + count - 1} are left out"


def _no_replicas() -> str:
    raise Impossible("there are no replicas: one process trains")


OF_NO_LOSS = HALTING | {Trigger.NONFINITE_OFTEN, Trigger.REPLICAS_DIFFER}
"""Triggers that no loss tells of."""


class PlaybookRunner:
    """Carries out the playbook's decisions and people's requests. In shadow mode it decides and writes, and changes
    nothing."""

    def __init__(
        self,
        *,
        playbook: Playbook,
        ledger: Ledger,
        tracker: IncidentTracker,
        restore_points: RestorePoints,
        optimizers: Sequence[Optimizer],
        embeddings: frozenset[str],
        batches: Batches,
        watch: Watch,
        act: bool,
    ) -> None:
        self.is_over = False
        """Whether a halt was decided. In shadow mode the run goes on, but nothing more is decided."""
        self.loop_clips = False
        """Whether the user's loop clips, so that the guard has no clipping to tighten."""
        self.batches_a_step = 1
        """Batches of the last step."""
        self.clip: float | None = None
        """The clipping limit of the last step; None where the guard does not clip."""
        self.asks_precision = False
        """Whether the loop asks for its precision, so that it can be changed."""
        self.watch_heads: Callable[[], str] = lambda: "nobody looks at the heads of its attention"
        """Begins to look at the logits of attention, if nobody has yet; says why that cannot be, else nothing."""
        self.copy_majority: Callable[[], str] = _no_replicas
        """Makes replicas equal again, and says what was done; Impossible where that cannot be."""
        self._playbook = playbook
        self._leaves_the_loss = False
        self._ledger = ledger
        self._tracker = tracker
        self._restore_points = restore_points
        self._optimizers = optimizers
        self._embeddings = embeddings
        self._batches = batches
        self._watch = watch
        self._act = act

    def intervene(self, anomaly: Anomaly, number: int) -> int | None:
        """Go up the playbook's rungs until one can be carried out; a halt always can. Gives the step that the run went
        back to."""
        if self._leaves_the_loss and anomaly.trigger not in OF_NO_LOSS:
            self._tracker.evidence.forget()
            return None
        if anomaly.trigger == Trigger.BUDGET_SPENT:
            anomaly = replace(anomaly, source=self._tracker.suspect())
        if anomaly.trigger == Trigger.NONFINITE_WEIGHTS and (weights := self._restore_points.not_finite()):
            anomaly = replace(anomaly, text=f"{anomaly.text}: {weights}")
        while True:
            decision = choose(
                self._playbook,
                anomaly.trigger,
                anomaly.onset,
                self._ledger.history,
                batch=anomaly.batch,
                kind=self._kind,
            )
            if decision.rung is None and not decision.halts:  # the playbook does nothing about it
                if anomaly.trigger not in HEALS:  # a stretch that heals by itself left sound weights
                    self._tracker.evidence.forget()
                return None
            who = f"playbook {self._playbook.name}" + (f", rung {decision.rung}" if decision.rung else "")
            actions, margins = self._tracker.led_actions(decision.actions, self._means)
            order = Order(actions, anomaly, number, who, decision.rung, decision.reason, margins=margins)
            try:
                return self._carry_out(order)
            except Impossible as reason:
                self._watch.note("rung-passed-over", step=number, rung=decision.rung, reason=str(reason))
                self._ledger.history = (*self._ledger.history, self._past_intervention(replace(order, actions=())))

    def stand_back(self) -> None:
        """Drop the playbook; people's requests are still carried out."""
        self._playbook = Playbook.observe()

    def leave_the_loss(self) -> None:
        """Act no more on what a loss shows."""
        self._leaves_the_loss = True

    def ask(self, number: int, words: Sequence[str], *, by: str, request: str | None = None) -> int | None:
        """Carry out a person's request, or raise a ConfigError that says why not."""
        text = f"asked for: {' '.join(words)}"
        anomaly = Anomaly(trigger=Trigger.ASKED, onset=number, batch=None, text=text)
        action = requested_action(words)
        margins: tuple[Margin, ...] = ()
        if isinstance(action, Tighten) and action.clip is not None:  # who asks for it gets it, and is told
            margins = (replace(self._tracker.margins.check_clip(action.clip), value=action.clip),)
        who, why = f"person {by}", "a person wants it"
        order = Order((action,), anomaly, number, who, None, why, request, margins)
        try:
            return self._carry_out(order)
        except Impossible as reason:
            raise ConfigError(f"{' '.join(words)}: {reason}") from reason

    def _carry_out(self, order: Order) -> int | None:
        """Carry out all of an order, or raise Impossible and change nothing."""
        with self._watch.spent.of("recovery"):
            return self._do(order)

    def _do(self, order: Order) -> int | None:
        began = time.perf_counter()
        onset, number = order.anomaly.onset, order.number
        refuse_idle(order, self._batches, self._optimizers)
        if order.find(UseBf16) is not None and not self.asks_precision:
            raise Impossible("the loop does not ask guard.autocast_dtype(dtype) for its precision")
        if order.find(ClipQK) is not None and (refusal := self.watch_heads()):
            raise Impossible(refusal)
        rollback = order.find(Rollback) if self._act else None
        targets = iter(()) if rollback is None else self._restore_points.targets(onset, rollback.back)
        target = next(targets, None)
        if rollback is not None and target is None:
            raise Impossible(self._restore_points.unavailable_because(onset, rollback.back))
        copied = [self.copy_majority()] if self._act and order.find(CopyMajority) is not None else []
        if order.anomaly.trigger != Trigger.ASKED:  # what a person asks for is no anomaly
            self._ledger.came_back(number, onset)
        before = self._ledger.now()
        changed = copied + self._change_data_and_ledger(order, number if target is None else target.step)
        if copied:
            self._restore_points.doubt_after(onset)  # whoever has taken a later one may have been wrong
        self._ledger.enter(self._past_intervention(order), is_last=order.find(Halt) is not None)
        self._ledger.write()  # before anything changes: a run killed now resumes from a checkpoint with these entries
        cost = CostSoFar()
        if target is not None:
            try:
                target, cost = self._restore_points.go_back(target, targets, number)
            except Impossible:
                self._ledger.put_back(before)
                raise
            self._ledger.went_to(target.step)
            self._tracker.went_back(cost)
            changed += self._adjust_after_rollback(order, target)
        if self._act:
            self._ledger.write()
        self._conclude(order, changed, target, cost, began)
        return None if target is None else target.step

    def _change_data_and_ledger(self, order: Order, first: int) -> list[str]:
        """Change everything but the training state; gives the changes in words."""
        if not self._act:
            return []
        changed = change_data(order, self._batches)
        return changed + change_ledger(
            order,
            self._ledger,
            self._batches,
            first=first,
            loop_clips=self.loop_clips,
            batches_a_step=self.batches_a_step,
        )

    def _adjust_after_rollback(self, order: Order, target: RestorePoint) -> list[str]:
        """Adjust what depends on the state that was restored in the end; gives the changes in words."""
        said = [f"went back from step {order.number} to {target}"]
        if target.step == 0:
            said.append("from scratch, since no later state is healthy and old enough")
        if order.find(LowerLR) is not None:
            self._ledger.adjustments = replace(self._ledger.adjustments, rewarm_from=target.step)
        elif target.step == 0 and not any(map(makes_its_rate, self._optimizers)):
            self._ledger.adjustments = self._ledger.adjustments.from_scratch()
            said[-1] += f", with {self._ledger.adjustments.lr:g} of the learning rate"
        return said

    def _conclude(
        self, order: Order, changed: list[str], target: RestorePoint | None, cost: CostSoFar, began: float
    ) -> None:
        """Write the intervention down and start the evidence over; a halt ends the run here."""
        self._tracker.begin_anew()
        halt = order.find(Halt)
        self.is_over |= halt is not None
        if halt is None:
            self._watch.clear_skip_row()
        incident = self._tracker.incident
        self._watch.note(
            "intervention",
            step=order.number,
            number=self._ledger.interventions,
            incident=None if incident is None else incident.number,
            decided_by=order.who,
            because=order.reason,
            trigger=str(order.anomaly.trigger),
            onset=order.anomaly.onset,
            evidence=order.evidence,
            margins=[asdict(margin) for margin in order.margins],
            actions=plain_actions(order.actions),
            text="; ".join(map(str, order.actions)),
            changed="; ".join(changed),
            acted=self._act,
            to_step=order.number if target is None else target.step,
            adjustments=asdict(self._ledger.adjustments),
            cost=cost.as_event(self._watch.record),
            seconds=round(time.perf_counter() - began, 3),
            request=order.request,
        )
        if halt is not None:
            self._ledger.halted(order.number, acted=self._act)
        if halt is not None and self._act:
            self._tracker.end(order.number)
            text = f"the run is halted: {order.anomaly.text}; {halt}"
            raise RunHalted(text, self._watch.verdict, self._watch.incident)

    @property
    def _means(self) -> Means:
        """What this run could change."""
        groups = (group for optimizer in self._optimizers for group in optimizer.param_groups)
        has_decay = any(group.get("weight_decay") for group in groups)
        return Means(
            clip=None if self.loop_clips else self.clip,
            has_decay=has_decay,
            has_rate=not any(map(makes_its_rate, self._optimizers)),
            can_use_bf16=self.asks_precision,
            embeddings=self._embeddings,
        )

    def _past_intervention(self, order: Order) -> PastIntervention:
        incident = self._tracker.incident
        return PastIntervention(
            incident=0 if incident is None else incident.number,
            onset=order.anomaly.onset,
            step=order.number,
            trigger=order.anomaly.trigger,
            rung=order.rung,
            actions=order.actions,
            batch=order.anomaly.batch,
            kind=self._kind,
        )

    @property
    def _kind(self) -> str:
        """The kind of the open incident."""
        incident = self._tracker.incident
        return "" if incident is None else incident.kind
