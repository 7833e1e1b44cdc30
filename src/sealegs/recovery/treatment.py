"""Judged rows in, interventions out: follows a run, asks the playbook, carries out what it says, writes it down.

The one place that changes what is being trained besides the update itself. Acting fails closed: a rollback brings back
everything or nothing, and where nothing is brought back the next rung is asked for. Nothing here waits for a device
while nothing is wrong.
"""

import copy
import json
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from sealegs import incidents, judge
from sealegs.detectors.spike import Spike
from sealegs.errors import ConfigError, RunHalted, SealegsError, SourceError
from sealegs.incidents import Incident, News
from sealegs.record import requests
from sealegs.record.files import whole_file, writing
from sealegs.record.schema import RECOVERY, speakable
from sealegs.recovery import asked
from sealegs.recovery.actions import (
    Action,
    Halt,
    LowerLR,
    ResetMoments,
    Rollback,
    SkipBatches,
    Stratify,
    SwapSource,
    Tighten,
    plain_actions,
)
from sealegs.recovery.checkpoints import Checkpoints
from sealegs.recovery.data import Batches
from sealegs.recovery.evidence import Evidence, Trouble
from sealegs.recovery.margins import Margins
from sealegs.recovery.playbook import Playbook, Treatment, Trigger, choose
from sealegs.recovery.probe import Probe
from sealegs.recovery.recorder import Recorder
from sealegs.recovery.schedules import Schedules
from sealegs.recovery.snapshots import Snapshot, Snapshots
from sealegs.recovery.state import Trainee, restore_rng, restore_scale, rng_now, scale_of
from sealegs.recovery.together import Together
from sealegs.vocabulary import Row, Verdict
from sealegs.watch import Watch

A = TypeVar("A")

HELD = 50
"""Healthy steps past an onset after which what was done has helped."""
HEALTHY_AFTER = 16
"""Healthy steps after which a checkpoint is one to go back to."""
FROM_SCRATCH = 0.5
"""The share of its learning rate that a run goes on with which has to begin anew."""
ASK_EVERY_S = 0.5
"""How often the folder is looked at for a person's requests ..."""
ASK_STEPS = 100
"""... and how often the ranks tell each other of one."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What trouble has cost."""

    steps: int = 0
    """Skipped, or done once more."""
    tokens: int = 0
    seconds: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.steps + other.steps, self.tokens + other.tokens, self.seconds + other.seconds)


class Recovery:
    """Keeps states to go back to, and goes back where the playbook says so. Owned by a guard, asked once a step."""

    def __init__(
        self,
        *,
        playbook: Playbook,
        trainee: Trainee,
        watch: Watch,
        batches: Batches,
        snapshots: Snapshots,
        checkpoints: Checkpoints | None,
        folder: Path | None,
        act: bool,
        capsule_bytes: float,
    ) -> None:
        """``folder`` is the run's, where this rank is the one that writes it."""
        self.playbook = playbook
        self.margins = Margins()
        self.tokens = 0
        """Trained on in this process."""
        self.probe = Probe()
        self.loop_clips = False
        """Whether the user's loop clips, so that no clipping of the guard's can be tightened."""
        self._trainee = trainee
        self._watch = watch
        self._batches = batches
        self._snapshots = snapshots
        self._checkpoints = checkpoints
        self._folder = folder
        self._act = act
        self._probes = act and any(map(playbook.has_rung_for, (Trigger.DAMAGED, Trigger.BAD_DATA)))
        self._ranks = Together()
        self.recorder = Recorder(
            trainee=trainee,
            watch=watch,
            snapshots=snapshots,
            checkpoints=checkpoints,
            ranks=self._ranks,
            acts=act,
            budget=capsule_bytes,
        )
        self._history: tuple[Treatment, ...] = ()
        self._evidence = Evidence(playbook)
        self._incidents = incidents.begin()
        self._judged: deque[tuple[Row, Verdict]] = deque()
        self._healthy = 0
        """Steps in a row ..."""
        self._good = 0
        """... whether or not an incident is still open."""
        self._interventions = 0
        """How many were noted in all."""
        self._untold: int | None = None
        """The onset of what was treated last, while it is not known what came of it."""
        self._cost = Cost()
        self._batch_of: deque[tuple[int, int]] = deque(maxlen=incidents.LATEST)
        """Steps, and the batches that they trained on: an incident may have begun before it was found."""
        self._first_batch: int | None = None
        """That of the incident which was opened last."""
        self._unproven: dict[int, int] = {}
        """Checkpoints that are not known to be healthy, and how many healthy steps have come of each."""
        self._asked_at = time.monotonic()
        self._is_over = False
        """Whether a halt was decided: in shadow mode the run goes on, and there is nothing left to decide."""
        self._is_described = False
        self._has_snapshots = True
        self._schedules = Schedules(trainee.optimizers, trainee.schedulers)
        self._skipped = 0
        """Steps in a row, up to the last that was judged."""
        self._counts_back = 0
        """Steps that were skipped in a row which is over."""
        self._counted_back_from = 0
        """The step that came next when some were: none is counted back twice, so that it has an end."""
        watch.after = self._hear

    # What the guard calls, in the order of a step.

    def handed_out(self, step: int, batch: Any) -> None:
        """A batch is about to be trained on in a step, probes apart."""
        if self._probes:
            self.probe.handed_out(batch)
        self.recorder.handed_out(step, self._batches.number, batch)

    def before_update(self) -> None:
        """The weights are about to change: copies of them that are under way come first. The host does not wait."""
        self._snapshots.before_update()
        if self._checkpoints is not None:
            self._checkpoints.before_update()

    def after_step(self, number: int) -> int | None:
        """Act on what was judged by now, before step ``number``. Gives the step to run instead, if it is another."""
        trouble = None
        while self._judged:
            trouble = self._follow(*self._judged.popleft(), number) or trouble
        self._keep_probe(number)
        self.recorder.after_step()
        if trouble is not None and not self._is_over:
            return self._treat(trouble, number)
        if self._probes and self._evidence.wants_probe and (batch := self.probe.batch) is not None:
            self._batches.repeat(batch)
        if self._counts_back and (before := self._counted_back(number)) is not None:
            return before
        if self._act and self.playbook.rungs:
            self._schedules.note(number)
        if self._has_snapshots and self._snapshots.due(number):
            self._take_snapshot(number)
        return self._heed_people(number)

    def probed(self, loss: float, grad_norm: float | None, number: int) -> int | None:
        """Act on what a batch shows now which was healthy before."""
        (_, state), *_ = self._watch.states_of(Spike)
        found = self.probe.compared(loss, grad_norm, state.stream.scale)
        self._watch.note("probe", step=number, **asdict(found), is_condemned=found.is_condemned)
        source = None if found.is_condemned else self._suspect()
        trouble = self._evidence.probed(str(found), is_condemned=found.is_condemned, source=source)
        return None if trouble is None else self._treat(trouble, number)

    def saved(self, step: int, *, was_waited_for: bool) -> None:
        """A checkpoint is being written: one to go back to when healthy steps have come of it.

        That of step 0 is at once; so is one that was waited for, as the last of a run is, if healthy steps led to it
        and the weights in it are finite.
        """
        led_by_healthy = was_waited_for and self._healthy >= HEALTHY_AFTER
        is_proven = step == 0 or (led_by_healthy and all(self._ranks.gather(is_finite(self._trainee.model))))
        self._unproven[step] = HEALTHY_AFTER if is_proven else 0
        self._prove_checkpoints(step, 0)

    def forget_after(self, step: int) -> None:
        """Somebody else has brought the run to a step: what was kept of steps after it belongs to another line."""
        self._snapshots.forget_after(step)
        self._evidence.forget()
        self._judged.clear()
        self._schedules.forget_from(step)
        self._healthy = self._good = self._skipped = self._counts_back = 0

    def close(self) -> None:
        """Wait for what is being written of incidents; one that is open is written as it stands."""
        if (incident := incidents.ended(self._incidents)) is not None:
            self.recorder.follow_up(incident)
        self.recorder.close()

    # What survives the process.

    def bookkeeping(self) -> dict[str, Any]:
        """What going back does not undo, as JSON values."""
        return {
            "playbook": self.playbook.name,
            "history": [treatment.to_plain() for treatment in self._history],
            "interventions": self._interventions,
            "untold": self._untold,
            "margins": asdict(self.margins),
            "data": self._batches.bookkeeping(),
        }

    def take_over(self, books: Mapping[str, Any]) -> None:
        """Go on with the books of the process before. Rungs of another playbook are none of this one's."""
        history = [Treatment.from_plain(entry) for entry in books["history"]]
        is_same = books["playbook"] == self.playbook.name
        self._history = tuple(history if is_same else (replace(treatment, rung=None) for treatment in history))
        self._interventions, self._untold = books["interventions"], books["untold"]
        self.margins = Margins(**books["margins"])
        self._batches.take_over(books["data"])

    def state_dict(self) -> dict[str, Any]:
        """What belongs to a step, as JSON values."""
        return {"incidents": self._incidents}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._incidents = judge.thaw(incidents.begin(), state["incidents"])

    # Following.

    def _hear(self, row: Row, verdict: Verdict) -> None:
        self._judged.append((row, verdict))
        candidate = self._snapshots.candidate
        if candidate is not None and int(row["step"]) == candidate.step - 1:
            candidate.plain["judging"] = self._watch.judging

    def _follow(self, row: Row, verdict: Verdict, number: int) -> Trouble | None:
        step = int(row["step"])
        self.recorder.follow(row, verdict)
        if (batch := row.get("batch_index")) is not None:
            self._batch_of.append((step, int(batch)))
        self._incidents, news = incidents.follow(self._incidents, row, verdict, self.playbook.looks)
        trouble = self._evidence.take(row, verdict)
        is_calm = verdict.go and not self._incidents.is_open
        is_doubtful = self._incidents.is_open or trouble is not None
        if not verdict.go:
            self._cost += Cost(steps=1)
        elif is_calm and not news:  # which may be that one has just been closed
            self._cost = Cost()  # what was skipped alone is no incident's
        self._good = self._good + 1 if verdict.go and verdict.incident is None else 0
        if not verdict.go:
            self._skipped += 1
        elif self._skipped:
            self._counts_back = self._skipped if self._skipped >= self.playbook.probe_after else 0
            self._skipped = 0
        if is_calm:
            self._healthy += 1
            self._snapshots.healthy(step)
            self._prove_checkpoints(step, 1)
        elif is_doubtful:
            self._healthy = 0
            self._snapshots.doubtful()
            self._unproven = dict.fromkeys(self._unproven, 0)
        self.probe.follow(row, is_calm=is_calm, is_doubtful=is_doubtful)
        for item in news:
            trouble = self._told(item, row, number) or trouble
        if self._untold is not None and self._good >= HELD and step >= self._untold + HELD:
            self._tell_outcome(step, "helped", f"{HELD} healthy steps have come of it")
        return trouble

    def _told(self, news: News, row: Row, number: int) -> Trouble | None:
        incident = news.incident
        if news.kind == "opened":
            self._first_batch = next((batch for step, batch in self._batch_of if step >= incident.start), None)
            self.recorder.open(incident, number)
        elif news.kind == "closed":
            self._note_closed(int(row["step"]), incident)
            self._cost = Cost()
        elif not news.is_decaying:
            return Trouble(
                trigger=Trigger.NOT_RECOVERING,
                onset=incident.start,
                batch=self._first_batch,
                text=f"{incident}; the loss is not coming down",
            )
        return None

    def _note_closed(self, step: int, incident: Incident) -> None:
        cost = self._priced(self._cost)
        self._watch.note("incident-closed", step=step, **asdict(incident), text=str(incident), cost=cost)
        self.recorder.follow_up(incident)

    def _keep_probe(self, number: int) -> None:
        """Keep a batch that can be tried again."""
        if not self._probes:
            return
        self.probe.after_step(number, is_healthy=self._healthy > 0)
        if self.probe.why_none:
            self._probes = False
            self._watch.note("no-probe", step=number, reason=self.probe.why_none)

    def _counted_back(self, number: int) -> int | None:
        """A row of skips is over, and the weights are what they were before it: so let the schedules be, too.

        Else the run would have so many updates less in the end, and come to a lower learning rate sooner.
        """
        count, self._counts_back = self._counts_back, 0
        before = number - count
        if not self._act or not self.playbook.rungs or before < self._counted_back_from:
            return None
        if not self._schedules.go_to(before):
            return None
        self._counted_back_from = number
        self._watch.catch_up()
        self._judged.clear()
        self._snapshots.forget_after(before)
        if self._checkpoints is not None:
            self._checkpoints.discard_after(before)
        self._cost += Cost(steps=count)
        text = f"{count} steps in a row were skipped, which left the weights as they were: they are counted back"
        self._watch.note("counted-back", step=number, to_step=before, steps=count, text=text)
        return before

    def _suspect(self) -> str | None:
        """Each rank knows the sources of its own batches; all go by what rank 0 finds."""
        return self._ranks.gather(self._evidence.suspect())[0]

    def _prove_checkpoints(self, step: int, healthy: int) -> None:
        """So many healthy steps have come of the checkpoints up to a step."""
        for saved in [saved for saved in self._unproven if saved <= step]:
            self._unproven[saved] += healthy
            if self._unproven[saved] >= HEALTHY_AFTER:
                assert self._checkpoints is not None
                self._checkpoints.tag(saved, "healthy")
                del self._unproven[saved]

    def _take_snapshot(self, number: int) -> None:
        is_judged = self._watch.verdict.step == number - 1
        self._snapshots.take(
            number,
            {
                "schedulers": [copy.deepcopy(scheduler.state_dict()) for scheduler in self._trainee.schedulers],
                "scaler": scale_of(self._trainee.scaler),
                "rng": rng_now(),
                "data": self._batches.position(),
                "judging": self._watch.judging if is_judged else None,  # on a device the row is still under way
                "tokens": self.tokens,
                "time": time.monotonic(),
            },
        )
        if not self._is_described:
            self._is_described = True
            text = self._snapshots.description
            if not all(self._ranks.gather(self._snapshots.held_bytes > 0)):  # all ranks go back, or none
                self._snapshots.drop()
                self._has_snapshots = False
                text = (
                    f"no snapshots: {text}" if self._ranks.world == 1 else f"no snapshots: not on every rank ({text})"
                )
            self._watch.note("snapshots", step=number, text=text)

    # Deciding and acting.

    def _treat(self, trouble: Trouble, number: int) -> int | None:
        """Ask the playbook until something can be done: a halt can."""
        if trouble.trigger == Trigger.BUDGET_SPENT:
            trouble = replace(trouble, source=self._suspect())
        while True:
            decision = choose(self.playbook, trouble.trigger, trouble.onset, self._history)
            if decision.rung is None and not decision.halts:  # nothing is to be done about it
                self._evidence.forget()
                return None
            who = f"playbook {self.playbook.name}" + (f", rung {decision.rung}" if decision.rung else "")
            order = Order(decision.actions, trouble, number, who, decision.rung, decision.reason)
            try:
                return self._carry_out(order)
            except Impossible as reason:
                self._watch.note("rung-passed-over", step=number, rung=decision.rung, reason=str(reason))
                self._history = (*self._history, self._treatment(replace(order, actions=())))

    def _carry_out(self, order: "Order") -> int | None:
        """All of it, or ``Impossible``, and nothing has changed."""
        began = time.perf_counter()
        trouble, number = order.trouble, order.number
        self._refuse_idle(order)
        targets = self._targets(order) if self._act and order.find(Rollback) is not None else iter(())
        target = next(targets, None)
        if self._act and target is None and order.find(Rollback) is not None:
            raise Impossible(f"there is no healthy state from before step {trouble.onset}")
        if self._untold is not None:
            self._tell_outcome(number, "came back", f"trouble again, since step {trouble.onset}")
        before = self.margins, self._batches.bookkeeping(), self._history, self._interventions
        changed = self._change_data(order) + self._prepare(order, number if target is None else target.step)
        self._history = (*self._history, self._treatment(order))
        self._interventions += 1
        self._untold = None if order.find(Halt) else trouble.onset
        self._write_books()  # before anything is changed: whoever is killed now goes on from a checkpoint with these
        cost = Cost()
        if target is not None:
            try:
                target, cost = self._go_back(target, targets, number)
            except Impossible:
                self.margins, data, self._history, self._interventions = before
                self._untold = None
                self._batches.put_back(data)
                self._write_books()
                raise
            self._cost += cost
            changed += self._after_going_back(order, target)
        if self._act and order.find(ResetMoments) is not None:
            for optimizer in self._trainee.optimizers:
                optimizer.state.clear()
            changed.append("the optimizers begin anew")
        if self._act:
            self._write_books()
        self._evidence.forget()
        self._healthy = self._good = self._skipped = self._counts_back = 0
        halt = order.find(Halt)
        self._is_over |= halt is not None
        if halt is None:
            self._watch.forgive()
        self._note_intervention(order, changed, target, cost, time.perf_counter() - began)
        if halt is not None and self._act:
            if (last := incidents.ended(self._incidents)) is not None:
                self._note_closed(number, last)
            raise RunHalted(f"the run is halted: {trouble.text}; {halt}", self._watch.verdict, self._watch.incident)
        return None if target is None else target.step

    def _note_intervention(
        self, order: "Order", changed: list[str], target: "Target | None", cost: Cost, seconds: float
    ) -> None:
        incident = self._incidents.open
        self._watch.note(
            "intervention",
            step=order.number,
            number=self._interventions,
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
            cost=self._priced(cost),
            seconds=round(seconds, 3),
            request=order.request,
        )

    def _treatment(self, order: "Order") -> Treatment:
        incident = self._incidents.open
        return Treatment(
            incident=0 if incident is None else incident.number,
            onset=order.trouble.onset,
            step=order.number,
            trigger=order.trouble.trigger,
            rung=order.rung,
            actions=order.actions,
        )

    def _prepare(self, order: "Order", first: int) -> list[str]:
        """Everything but what touches the training itself: what it changes, in words."""
        changed = []
        margins = self.margins
        for action in order.actions if self._act else ():
            match action:
                case Rollback(skip=count) if count and order.trouble.batch is not None:
                    # the update that did it may have come of the batch before
                    changed.append(self._leave_out(max(order.trouble.batch - 1, 0), count))
                case SkipBatches(count=count):
                    assert self._batches.number is not None
                    changed.append(self._leave_out(self._batches.number + 1, count))
                case LowerLR(factor=factor, rewarm_steps=steps):
                    margins = replace(margins, lr=margins.lr * factor, rewarm_from=first, rewarm_steps=steps)
                    changed.append(f"the learning rate is {margins.lr:g} of the schedule's")
                case Tighten(clip=clip, clip_value=value, weight_decay=decay):
                    margins = replace(
                        margins,
                        clip=clip or margins.clip,
                        clip_value=value or margins.clip_value,
                        weight_decay=margins.weight_decay * (decay or 1.0),
                    )
                    is_idle = clip is not None and self.loop_clips
                    changed.append(f"{action}{' (but the loop clips by itself: tighten that)' if is_idle else ''}")
        self.margins = margins
        return changed

    def _leave_out(self, first: int, count: int) -> str:
        self._batches.skip(first, count)
        return f"batches {first} to {first + count - 1} are left out"

    def _refuse_idle(self, order: "Order") -> None:
        """What would do nothing here."""
        if order.find(SkipBatches) is not None and self._batches.number is None:
            raise Impossible("no batch was handed out yet; use guard.batches(loader)")
        if order.find(Stratify) is not None and (refusal := self._batches.cannot_stratify()):
            raise Impossible(refusal)
        if (swap := order.find(SwapSource)) is None:
            return
        source = swap.source or order.trouble.source
        if source is None:
            raise Impossible("the evidence names no source")
        if refusal := self._batches.cannot_swap(source):
            raise Impossible(refusal)

    def _change_data(self, order: "Order") -> list[str]:
        """The part that the user's loader does, and may refuse: it comes first, and is not undone."""
        changed = []
        try:
            if self._act and (swap := order.find(SwapSource)) is not None:
                source = swap.source or order.trouble.source
                assert source is not None
                self._batches.swap(source, swap.weight)
                changed.append(f"source {source} has the weight {swap.weight:g}")
            if self._act and (stratify := order.find(Stratify)) is not None:
                self._batches.stratify()
                changed.append(str(stratify))
        except Exception as error:
            raise Impossible(str(error)) from error
        return changed

    # Going back.

    def _targets(self, order: "Order") -> "Iterator[Target]":
        """Healthy states, the best first: the newest that is old enough, else the newest, else the very beginning. Its
        step comes before the onset's by one at least: the update that did it may have been that of the step before."""
        rollback = order.find(Rollback)
        assert rollback is not None
        latest = order.trouble.onset - 1
        for before in (latest - rollback.back, latest):
            in_memory = self._snapshots.newest(before)
            if in_memory is not None and not self._is_newer_on_disk(in_memory.step, before):
                yield Target(in_memory.step, in_memory)
            on_disk = self._checkpoints.newest_healthy(before)[0] if self._checkpoints is not None else None
            if on_disk:
                yield Target(on_disk, None)
            if in_memory is not None:  # what is newer on disk is damaged
                yield Target(in_memory.step, in_memory)
        if on_disk == 0:
            yield Target(0, None)

    def _is_newer_on_disk(self, step: int, before: int) -> bool:
        """Going by what is known of checkpoints: to check one is to read it whole."""
        tags = self._checkpoints.tags() if self._checkpoints is not None else {}
        newest = max((saved for saved, tag in tags.items() if tag == "healthy" and saved <= before), default=-1)
        return self._ranks.gather(newest > step)[0]

    def _go_back(self, target: "Target", others: "Iterator[Target]", number: int) -> "tuple[Target, Cost]":
        """To the first state that can be restored, on every rank. Gives that, and what is to be done once more."""
        self._watch.catch_up()
        reasons = []
        for state in chain((target,), others):
            try:
                cost = self._ranks.agree(partial(self._restore, state, number))
            except SealegsError as error:
                reasons.append(f"{state}: {error}")
                continue
            self._judged.clear()
            self._batch_of.clear()
            self._schedules.forget_from(state.step)
            self._snapshots.forget_after(state.step)
            self._unproven = {saved: count for saved, count in self._unproven.items() if saved <= state.step}
            if self._checkpoints is not None:
                self._checkpoints.discard_after(state.step)
            return state, cost
        if self._ranks.world > 1:  # some of them may have gone back, and then they are no longer the same
            text = f"the ranks cannot go back together: {'; '.join(reasons)}"
            raise RunHalted(text, self._watch.verdict, self._watch.incident)
        raise Impossible("; ".join(reasons))

    def _restore(self, target: "Target", number: int) -> Cost:
        """All of it, or an error and nothing."""
        if target.snapshot is not None:
            self._restore_snapshot(target.snapshot)
            plain = target.snapshot.plain
            return Cost(number - target.step, self.tokens - plain["tokens"], time.monotonic() - plain["time"])
        assert self._checkpoints is not None
        state = self._checkpoints.load(target.step, like=self._trainee.capture())
        self._trainee.restore(state)
        self._watch.go_back(self._watch.thawed(state.plain["guard"]["watch"]))
        return Cost(number - target.step)

    def _after_going_back(self, order: "Order", target: "Target") -> list[str]:
        """What depends on which state it was in the end."""
        said = [f"went back from step {order.number} to {target}"]
        if order.find(LowerLR) is not None:
            self.margins = replace(self.margins, rewarm_from=target.step)
        elif target.step == 0:
            self.margins = replace(self.margins, lr=self.margins.lr * FROM_SCRATCH, rewarm_steps=0)
            said.append(
                f"from scratch, since there is no healthy state after it, with {self.margins.lr:g} of the learning rate"
            )
        return said

    def _restore_snapshot(self, snapshot: Snapshot) -> None:
        plain, trainee = snapshot.plain, self._trainee
        before = [copy.deepcopy(scheduler.state_dict()) for scheduler in trainee.schedulers], self._batches.position()
        try:
            self._batches.go_to(plain["data"])
            for scheduler, state in zip(trainee.schedulers, plain["schedulers"], strict=True):
                scheduler.load_state_dict(copy.deepcopy(state))
            self._snapshots.restore_tensors(snapshot)  # the last that can refuse
        except BaseException:
            for scheduler, state in zip(trainee.schedulers, before[0], strict=True):
                scheduler.load_state_dict(state)
            self._batches.go_to(before[1])
            raise
        restore_scale(trainee.scaler, plain["scaler"])
        restore_rng(plain["rng"])
        self._watch.go_back(plain["judging"])

    # People.

    def ask(self, number: int, words: Sequence[str], *, by: str, request: str | None = None) -> int | None:
        """Carry out what a person asks for, or say why not."""
        text = f"asked for: {' '.join(words)}"
        trouble = Trouble(trigger=Trigger.ASKED, onset=number, batch=None, text=text)
        order = Order((asked.parse(words),), trouble, number, f"person {by}", None, "a person wants it", request)
        try:
            return self._carry_out(order)
        except Impossible as reason:
            raise ConfigError(f"{' '.join(words)}: {reason}") from reason

    def _heed_people(self, number: int) -> int | None:
        """At steps that all ranks agree on; where there is one rank, as soon as there is something."""
        if self._ranks.world > 1 and number % ASK_STEPS:
            return None
        now = time.monotonic()
        if self._ranks.world == 1 and now - self._asked_at < ASK_EVERY_S:
            return None
        self._asked_at = now
        found = requests.waiting(self._folder)[:1] if self._folder is not None else []
        if self._ranks.world > 1:
            found = self._ranks.gather(found)[0]
        if not found:
            return None
        if self._folder is not None:
            requests.remove(self._folder, found[0])
        request = found[0]
        try:
            return self.ask(number, request.words, by=request.by, request=request.id)
        except ConfigError as reason:
            self._watch.note("request-refused", step=number, request=request.id, by=request.by, reason=str(reason))
            return None

    # Writing down.

    def _tell_outcome(self, step: int, result: str, text: str) -> None:
        assert self._untold is not None
        text = f"{result}: {text}, {step - self._untold} steps after the onset"
        self._watch.note("outcome", step=step, intervention=self._interventions, result=result, text=text)
        self._untold = None
        self._write_books()

    def _priced(self, cost: Cost) -> dict[str, Any]:
        manifest = self._watch.record.manifest if self._watch.record is not None else None
        price = manifest.price_per_hour if manifest is not None else None
        money = None if price is None else round(cost.seconds / 3600 * price, 2)
        return {**asdict(cost), "seconds": round(cost.seconds, 1), "money": money}

    def _write_books(self) -> None:
        if self._folder is None:
            return
        path = self._folder / RECOVERY
        with writing(path), whole_file(path) as file:
            file.write(json.dumps(speakable(self.bookkeeping()), indent=1).encode())


class Impossible(SealegsError):
    """An action that cannot be carried out here: the next rung is asked for instead."""


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be done, and everything that its record says."""

    actions: tuple[Action, ...]
    trouble: Trouble
    number: int
    """The step that would come next."""
    who: str
    rung: int | None
    reason: str
    request: str | None = None

    def find(self, kind: type[A]) -> A | None:
        """The action of a kind; a rung has one at most."""
        return next((action for action in self.actions if isinstance(action, kind)), None)


@dataclass(frozen=True, slots=True)
class Target:
    """A state to go back to, in memory or on disk."""

    step: int
    snapshot: Snapshot | None

    def __str__(self) -> str:
        return f"the {'checkpoint' if self.snapshot is None else 'snapshot'} of step {self.step}"


def read_books(folder: Path) -> dict[str, Any] | None:
    """The books of a run, where it has some."""
    path = folder / RECOVERY
    try:
        books: dict[str, Any] = json.loads(path.read_bytes())
        Margins(**books["margins"])
        is_sound = isinstance(books["history"], list) and isinstance(books["data"], dict)
        is_sound &= {"playbook", "interventions", "untold"} <= books.keys()
        reason = "" if is_sound else "it has no history, interventions and data"
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error)
    if reason:
        raise SourceError(f"{path}: cannot be read ({reason}); restore it from a copy, or remove it")
    return books


def is_finite(model: nn.Module) -> bool:
    """Whether all that this rank has of the weights is."""
    own = (getattr(parameter, "to_local", lambda p=parameter: p)() for parameter in model.parameters())
    return all(bool(torch.isfinite(weights).all()) for weights in own)
