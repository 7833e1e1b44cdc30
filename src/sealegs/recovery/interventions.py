"""Troubles and people's words in, interventions out: asks the playbook, carries out what it says, writes it down.

The one place that changes what is being trained besides the update itself. Acting fails closed: a rollback brings back
everything or nothing, and where nothing is brought back the next rung is asked for.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

from torch.optim import Optimizer

from sealegs.data.position import Batches
from sealegs.errors import ConfigError, RunHalted
from sealegs.recovery import asked
from sealegs.recovery.actions import Halt, Impossible, LowerLR, ResetMoments, Rollback, plain_actions
from sealegs.recovery.cost import Cost
from sealegs.recovery.evidence import Trouble
from sealegs.recovery.history import Treatment, Trigger
from sealegs.recovery.incident_tracker import Following
from sealegs.recovery.ledger import Books
from sealegs.recovery.orders import Order, change_books, change_data, makes_its_rate, refuse_idle
from sealegs.recovery.playbook import HEALS, Playbook, choose
from sealegs.recovery.restore_points import Retreat, Target
from sealegs.watch import Watch


class Interventions:
    """Does something about trouble. Where it does not ``act``, everything is decided and written down all the same."""

    def __init__(
        self,
        *,
        playbook: Playbook,
        books: Books,
        following: Following,
        retreat: Retreat,
        optimizers: Sequence[Optimizer],
        batches: Batches,
        watch: Watch,
        act: bool,
    ) -> None:
        self.is_over = False
        """Whether a halt was decided: in shadow mode the run goes on, and there is nothing left to decide."""
        self.loop_clips = False
        """Whether the user's loop clips, so that no clipping of the guard's can be tightened."""
        self.batches_a_step = 1
        """Of the last step."""
        self._playbook = playbook
        self._books = books
        self._following = following
        self._retreat = retreat
        self._optimizers = optimizers
        self._batches = batches
        self._watch = watch
        self._act = act

    def treat(self, trouble: Trouble, number: int) -> int | None:
        """Ask the playbook until something can be done: a halt can. Gives the step that the run went back to."""
        if trouble.trigger == Trigger.BUDGET_SPENT:
            trouble = replace(trouble, source=self._following.suspect())
        while True:
            decision = choose(
                self._playbook,
                trouble.trigger,
                trouble.onset,
                self._books.history,
                batch=trouble.batch,
                kind=self._kind,
            )
            if decision.rung is None and not decision.halts:  # nothing is to be done about it
                if trouble.trigger not in HEALS:  # of what heals, the weights were sound, and that is still known
                    self._following.evidence.forget()
                return None
            who = f"playbook {self._playbook.name}" + (f", rung {decision.rung}" if decision.rung else "")
            order = Order(decision.actions, trouble, number, who, decision.rung, decision.reason)
            try:
                return self._carry_out(order)
            except Impossible as reason:
                self._watch.note("rung-passed-over", step=number, rung=decision.rung, reason=str(reason))
                self._books.history = (*self._books.history, self._treatment(replace(order, actions=())))

    def stand_back(self) -> None:
        """Do no more by itself than a guard without a playbook; people may still ask."""
        self._playbook = Playbook.observe()

    def ask(self, number: int, words: Sequence[str], *, by: str, request: str | None = None) -> int | None:
        """Carry out what a person asks for, or say why not."""
        text = f"asked for: {' '.join(words)}"
        trouble = Trouble(trigger=Trigger.ASKED, onset=number, batch=None, text=text)
        order = Order((asked.parse(words),), trouble, number, f"person {by}", None, "a person wants it", request)
        try:
            return self._carry_out(order)
        except Impossible as reason:
            raise ConfigError(f"{' '.join(words)}: {reason}") from reason

    def _carry_out(self, order: Order) -> int | None:
        """All of it, or ``Impossible``, and nothing has changed."""
        began = time.perf_counter()
        onset, number = order.trouble.onset, order.number
        refuse_idle(order, self._batches, self._optimizers)
        rollback = order.find(Rollback) if self._act else None
        targets = iter(()) if rollback is None else self._retreat.targets(onset, rollback.back)
        target = next(targets, None)
        if rollback is not None and target is None:
            raise Impossible(self._retreat.why_none(onset, rollback.back))
        self._books.came_back(number, onset)
        before = self._books.now()
        changed = self._changed_aside(order, number if target is None else target.step)
        self._books.enter(self._treatment(order), is_last=order.find(Halt) is not None)
        self._books.write()  # before anything is changed: whoever is killed now goes on from a checkpoint with these
        cost = Cost()
        if target is not None:
            try:
                target, cost = self._retreat.go_back(target, targets, number)
            except Impossible:
                self._books.put_back(before)
                raise
            self._following.went_back(cost)
            changed += self._changed_by_going_back(order, target)
        if self._act and order.find(ResetMoments) is not None:
            for optimizer in self._optimizers:
                optimizer.state.clear()
            changed.append("the optimizers begin anew")
        if self._act:
            self._books.write()
        self._conclude(order, changed, target, cost, began)
        return None if target is None else target.step

    def _changed_aside(self, order: Order, first: int) -> list[str]:
        """Everything but what touches the training itself: what it changes, in words."""
        if not self._act:
            return []
        changed = change_data(order, self._batches)
        return changed + change_books(
            order,
            self._books,
            self._batches,
            first=first,
            loop_clips=self.loop_clips,
            batches_a_step=self.batches_a_step,
        )

    def _changed_by_going_back(self, order: Order, target: Target) -> list[str]:
        """What depends on which state it was in the end."""
        said = [f"went back from step {order.number} to {target}"]
        if order.find(LowerLR) is not None:
            self._books.margins = replace(self._books.margins, rewarm_from=target.step)
        elif target.step == 0:
            said.append("from scratch, since no later state is healthy and old enough")
            if not any(map(makes_its_rate, self._optimizers)):
                self._books.margins = self._books.margins.from_scratch()
                said[-1] += f", with {self._books.margins.lr:g} of the learning rate"
        return said

    def _conclude(self, order: Order, changed: list[str], target: Target | None, cost: Cost, began: float) -> None:
        """What was done is written down, and what comes then is judged for itself; after a halt nothing does."""
        self._following.begin_anew()
        halt = order.find(Halt)
        self.is_over |= halt is not None
        if halt is None:
            self._watch.forgive()
        incident = self._following.incident
        self._watch.note(
            "intervention",
            step=order.number,
            number=self._books.interventions,
            incident=None if incident is None else incident.number,
            decided_by=order.who,
            because=order.reason,
            trigger=str(order.trouble.trigger),
            onset=order.trouble.onset,
            evidence=order.trouble.text,
            actions=plain_actions(order.actions),
            text="; ".join(map(str, order.actions)),
            changed="; ".join(changed),
            acted=self._act,
            to_step=order.number if target is None else target.step,
            cost=cost.told(self._watch.record),
            seconds=round(time.perf_counter() - began, 3),
            request=order.request,
        )
        if halt is not None and self._act:
            self._following.end(order.number)
            text = f"the run is halted: {order.trouble.text}; {halt}"
            raise RunHalted(text, self._watch.verdict, self._watch.incident)

    def _treatment(self, order: Order) -> Treatment:
        incident = self._following.incident
        return Treatment(
            incident=0 if incident is None else incident.number,
            onset=order.trouble.onset,
            step=order.number,
            trigger=order.trouble.trigger,
            rung=order.rung,
            actions=order.actions,
            batch=order.trouble.batch,
            kind=self._kind,
        )

    @property
    def _kind(self) -> str:
        """Of the incident that is open."""
        incident = self._following.incident
        return "" if incident is None else incident.kind
