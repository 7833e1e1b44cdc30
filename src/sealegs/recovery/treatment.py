"""Judged rows in, interventions out: follows a run, asks the playbook, carries out what it says, writes it down.

The one place that changes what is being trained besides the update itself. Acting fails closed: a rollback brings back
everything, or raises and changes nothing. Nothing here waits for a device while nothing is wrong.
"""

import copy
import json
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sealegs import incidents, judge
from sealegs.detectors.spike import Spike
from sealegs.errors import ConfigError, RunHalted, SealegsError, SourceError
from sealegs.incidents import News
from sealegs.record import requests
from sealegs.record.files import whole_file, writing
from sealegs.record.schema import RECOVERY, speakable
from sealegs.recovery import asked
from sealegs.recovery.actions import Action, Halt, LowerLR, ResetMoments, Rollback, SkipBatches, SwapSource, Tighten
from sealegs.recovery.checkpoints import Checkpoints
from sealegs.recovery.data import Batches
from sealegs.recovery.evidence import Evidence, Trouble
from sealegs.recovery.margins import Margins
from sealegs.recovery.playbook import Decision, Playbook, Treatment, Trigger, choose, plain_actions
from sealegs.recovery.snapshots import Snapshot, Snapshots
from sealegs.recovery.state import Trainee, restore_rng, rng_now
from sealegs.recovery.together import Together
from sealegs.vocabulary import Row, Verdict
from sealegs.watch import Watch

HELD = 50
"""Healthy steps past an onset after which what was done has helped."""
HEALTHY_AFTER = 16
"""Healthy steps after which a checkpoint is one to go back to."""
SCALES, SMALLEST_RISE = 2.0, math.log(1.03)
"""By how much the loss of a batch must have risen for the weights to be damaged: in scales of noise, and at least."""
GROWN_NORM = 1.5
"""By what factor the norm of its gradients."""
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


@dataclass(frozen=True, slots=True)
class Target:
    """A state to go back to, in memory or on disk."""

    step: int
    snapshot: Snapshot | None

    def __str__(self) -> str:
        return f"the {'checkpoint' if self.snapshot is None else 'snapshot'} of step {self.step}"


@dataclass(frozen=True, slots=True)
class Kept:
    """A batch that can be handed out once more, and the step that it was trained on in."""

    step: int = -1
    batch: Any = None
    loss: float = math.nan
    """That it had then ..."""
    grad_norm: float = math.nan
    """... and the norm of its gradients."""


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
    ) -> None:
        """``folder`` is the run's, where this rank is the one that writes it."""
        self.playbook = playbook
        self.margins = Margins()
        self.tokens = 0
        """Trained on in this process."""
        self.batch: Any = None
        """The one that was handed out last, probes apart."""
        self._probe = Kept()
        self._next_probe = Kept()
        self._newest = Kept()
        """Of the row that was followed last."""
        self._trainee = trainee
        self._watch = watch
        self._batches = batches
        self._snapshots = snapshots
        self._checkpoints = checkpoints
        self._folder = folder
        self._act = act
        self._probes = act and any(map(playbook.has_rung_for, (Trigger.DAMAGED, Trigger.BAD_DATA)))
        self._ranks = Together()
        self._history: tuple[Treatment, ...] = ()
        self._evidence = Evidence(playbook)
        self._incidents = incidents.begin()
        self._judged: deque[tuple[Row, Verdict]] = deque()
        self._healthy = 0
        """Steps in a row."""
        self._untold = False
        """Whether the outcome of the last treatment is not known yet."""
        self._cost = Cost()
        self._batch_of: deque[tuple[int, int]] = deque(maxlen=incidents.MEMORY)
        """Steps, and the batches that they trained on: an incident may have begun before it was found."""
        self._unproven: dict[int, int] = {}
        """Checkpoints that are not known to be healthy, and how many healthy steps have come of each."""
        self._asked_at = time.monotonic()
        self._is_over = False
        """Whether a halt was decided: in shadow mode the run goes on, and there is nothing left to decide."""
        self._is_described = False
        self._has_snapshots = True
        watch.after = self._hear

    # What the guard calls, in the order of a step.

    def before_update(self) -> None:
        """The weights are about to change: copies of them that are under way come first. The host does not wait."""
        self._snapshots.before_update()
        if self._checkpoints is not None:
            self._checkpoints.before_update()

    def after_step(self, number: int) -> int | None:
        """Act on what was judged by now, before step ``number``. Gives the step to run instead, if it is another."""
        trouble = None
        while self._judged:
            trouble = self._follow(*self._judged.popleft()) or trouble
        if trouble is not None and not self._is_over:
            return self._treat(trouble, number)
        if self._probes and self._evidence.wants_probe and self._probe.batch is not None:
            self._batches.repeat(self._probe.batch)
        if self._next_probe.batch is None and self._healthy:
            is_known = self._newest.step == number - 1  # on a device the row is still under way
            newest = self._newest if is_known else Kept()
            self._next_probe = replace(newest, step=number - 1, batch=self.batch)
        if self._has_snapshots and self._snapshots.due(number):
            self._take_snapshot(number)
        return self._heed_people(number)

    def probed(self, loss: float, grad_norm: float | None, number: int) -> int | None:
        """Act on what a batch shows now which was healthy before.

        It is compared with what it was then. Between batches losses differ by a ``scale`` or more, but one batch has
        much the same loss a few steps later: so little is needed to tell that the weights are not what they were.
        """
        _, state = self._watch.states_of(Spike)[0]
        then = self._probe
        limit = then.loss * math.exp(max(SCALES * state.stream.scale, SMALLEST_RISE))
        norm_limit = then.grad_norm * GROWN_NORM
        is_condemned = not loss <= limit or (grad_norm is not None and not grad_norm <= norm_limit)
        self._watch.note(
            "probe",
            step=number,
            loss=loss,
            limit=limit,
            grad_norm=grad_norm,
            grad_norm_limit=norm_limit,
            is_condemned=is_condemned,
        )
        found = f"a loss of {loss:.4g}, expected below {limit:.4g}"
        if grad_norm is not None:
            found += f", and a gradient norm of {grad_norm:.4g}, expected below {norm_limit:.4g}"
        trouble = self._evidence.probed(found, is_condemned=is_condemned)
        return None if trouble is None else self._treat(trouble, number)

    def saved(self, step: int, *, is_last: bool) -> None:
        """A checkpoint is written: one to go back to when healthy steps have come of it; the last one, if led to it."""
        self._unproven[step] = self._healthy if is_last else 0
        self._prove_checkpoints(step, 0)

    # What survives the process.

    def bookkeeping(self) -> dict[str, Any]:
        """What going back does not undo, as JSON values."""
        return {
            "playbook": self.playbook.name,
            "history": [treatment.to_plain() for treatment in self._history],
            "margins": asdict(self.margins),
            "data": self._batches.bookkeeping(),
            "incidents": self._incidents,
        }

    def take_over(self, books: Mapping[str, Any]) -> None:
        """Go on with the books of the process before."""
        self._history = tuple(Treatment.from_plain(entry) for entry in books["history"])
        self.margins = Margins(**books["margins"])
        self._batches.take_over(books["data"])
        self._incidents = judge.thaw(incidents.begin(), books["incidents"])

    # Following.

    def _hear(self, row: Row, verdict: Verdict) -> None:
        self._judged.append((row, verdict))
        candidate = self._snapshots.candidate
        if candidate is not None and int(row["step"]) == candidate.step - 1:
            candidate.plain["judging"] = self._watch.judging

    def _follow(self, row: Row, verdict: Verdict) -> Trouble | None:
        step = int(row["step"])
        if (batch := row.get("batch_index")) is not None:
            self._batch_of.append((step, int(batch)))
        self._incidents, news = incidents.follow(self._incidents, row, verdict, self.playbook.looks)
        trouble = self._evidence.take(row, verdict)
        is_calm = verdict.go and not self._incidents.is_open
        if not verdict.go:
            self._cost += Cost(steps=1)
        if is_calm:
            self._healthy += 1
            self._snapshots.healthy(step)
            self._prove_checkpoints(step, 1)
            if self._next_probe.batch is not None and step >= self._next_probe.step + HEALTHY_AFTER:
                if math.isfinite(self._next_probe.loss):
                    self._probe = self._next_probe
                self._next_probe = Kept()
        elif self._incidents.is_open or trouble is not None:
            self._healthy = 0
            self._next_probe = Kept()
            self._snapshots.doubtful()
            self._unproven = dict.fromkeys(self._unproven, 0)
        loss = float(row["loss"]) if is_calm else math.inf
        self._newest = Kept(step, None, loss, float(row.get("grad_norm", math.nan)))
        if step == self._next_probe.step:
            self._next_probe = replace(self._newest, batch=self._next_probe.batch)
        for item in news:
            trouble = self._told(item, row) or trouble
        if self._untold and self._healthy >= HELD and step >= self._history[-1].onset + HELD:
            self._tell_outcome(step, "helped", f"{HELD} healthy steps have come of it")
        return trouble

    def _told(self, news: News, row: Row) -> Trouble | None:
        incident = news.incident
        if news.kind == "closed":
            self._watch.note(
                "incident-closed",
                step=int(row["step"]),
                **asdict(incident),
                text=str(incident),
                cost=self._priced(self._cost),
            )
            self._cost = Cost()
        elif news.kind == "look" and not news.is_decaying:
            return Trouble(
                trigger=Trigger.NOT_RECOVERING,
                onset=incident.start,
                batch=next((batch for step, batch in self._batch_of if step >= incident.start), None),
                text=f"{incident}; the loss is not coming down",
            )
        return None

    def _prove_checkpoints(self, step: int, healthy: int) -> None:
        """So many healthy steps have come of the checkpoints up to a step."""
        for saved in [saved for saved in self._unproven if saved <= step]:
            self._unproven[saved] += healthy
            if self._unproven[saved] >= HEALTHY_AFTER:
                assert self._checkpoints is not None
                self._checkpoints.tag(saved, "healthy", f"{HEALTHY_AFTER} healthy steps")
                del self._unproven[saved]

    def _take_snapshot(self, number: int) -> None:
        is_judged = self._watch.verdict.step == number - 1
        self._snapshots.take(
            number,
            {
                "schedulers": [copy.deepcopy(scheduler.state_dict()) for scheduler in self._trainee.schedulers],
                "scaler": scale_of(self._trainee),
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
        while True:
            decision = choose(self.playbook, trouble.trigger, trouble.onset, self._history)
            if decision.rung is None and not decision.halts:  # nothing is to be done about it
                self._evidence.forget()
                return None
            who = f"playbook {self.playbook.name}" + (f", rung {decision.rung}" if decision.rung else "")
            try:
                return self._carry_out(decision.actions, trouble, number, who=who, rung=decision.rung)
            except Impossible as reason:
                self._watch.note("rung-passed-over", step=number, rung=decision.rung, reason=str(reason))
                nothing = replace(decision, actions=())
                self._history = (*self._history, self._treatment(trouble, number, nothing))

    def _carry_out(
        self,
        actions: Sequence[Action],
        trouble: Trouble,
        number: int,
        *,
        who: str,
        rung: int | None,
        request: str | None = None,
    ) -> int | None:
        began = time.perf_counter()
        target = None
        for action in actions:
            if isinstance(action, Rollback):
                target = self._target(action, trouble)
            elif isinstance(action, SwapSource) and action.source is None and trouble.source is None:
                raise Impossible("the evidence names no source")
        first = number if target is None else target.step
        changed = []
        for action in actions if self._act else ():
            changed.append(self._prepared(action, trouble, first))
        if self._untold:
            self._tell_outcome(number, "came back", f"trouble again, since step {trouble.onset}")
        decision = Decision(rung, tuple(actions), "")
        self._history = (*self._history, self._treatment(trouble, number, decision))
        self._write_books()  # before anything is changed: whoever is killed now goes on from a checkpoint with these
        cost = Cost()
        if self._act and target is not None:
            cost = self._go_back(target, number)
            self._cost += cost
            changed.append(f"went back from step {number} to {target}")
        if self._act and any(isinstance(action, ResetMoments) for action in actions):
            for optimizer in self._trainee.optimizers:
                optimizer.state.clear()
            changed.append("the optimizers begin anew")
        self._evidence.forget()
        self._healthy = 0
        halts = [action for action in actions if isinstance(action, Halt)]
        self._is_over |= bool(halts)
        if not halts:
            self._watch.forgive()
        self._untold = not halts
        incident = self._incidents.open
        self._watch.note(
            "intervention",
            step=number,
            number=len(self._history),
            incident=None if incident is None else incident.number,
            decided_by=who,
            trigger=str(trouble.trigger),
            onset=trouble.onset,
            evidence=trouble.text,
            actions=plain_actions(actions),
            text="; ".join(map(str, actions)),
            changed="; ".join(filter(None, changed)),
            acted=self._act,
            to_step=first,
            cost=self._priced(cost),
            seconds=round(time.perf_counter() - began, 3),
            request=request,
        )
        if halts and self._act:
            if (last := incidents.ended(self._incidents)) is not None:
                self._watch.note(
                    "incident-closed", step=number, **asdict(last), text=str(last), cost=self._priced(self._cost)
                )
            verdict = self._watch.verdict
            raise RunHalted(f"the run is halted: {trouble.text}; {halts[0]}", verdict, self._watch.incident)
        return first if self._act and target is not None else None

    def _treatment(self, trouble: Trouble, number: int, decision: Decision) -> Treatment:
        incident = self._incidents.open
        return Treatment(
            incident=0 if incident is None else incident.number,
            onset=trouble.onset,
            step=number,
            trigger=trouble.trigger,
            rung=decision.rung,
            actions=decision.actions,
        )

    def _prepared(self, action: Action, trouble: Trouble, first: int) -> str:
        """Everything about an action but going back, which comes after the books are written: what it changed."""
        margins = self.margins
        match action:
            case Rollback(skip=count) if count and trouble.batch is not None:
                # the update that did it may have come of the batch before
                begin = max(trouble.batch - 1, 0)
                self._batches.skip(begin, count)
                return f"batches {begin} to {begin + count - 1} are left out"
            case SkipBatches(count=count):
                begin = (self._batches.number or 0) + 1
                self._batches.skip(begin, count)
                return f"batches {begin} to {begin + count - 1} are left out"
            case LowerLR(factor=factor, rewarm_steps=steps):
                self.margins = replace(margins, lr=margins.lr * factor, rewarm_from=first, rewarm_steps=steps)
                return f"the learning rate is {self.margins.lr:g} of the schedule's"
            case Tighten(clip=clip, clip_value=value, weight_decay=decay):
                self.margins = replace(
                    margins,
                    clip=clip or margins.clip,
                    clip_value=value or margins.clip_value,
                    weight_decay=margins.weight_decay * (decay or 1.0),
                )
                return str(action)
            case SwapSource(weight=weight):
                source = action.source or trouble.source
                assert source is not None
                try:
                    self._batches.swap(source, weight)
                except ConfigError as error:
                    raise Impossible(str(error)) from error
                return f"source {source} has the weight {weight:g}"
        return ""

    # Going back.

    def _target(self, rollback: Rollback, trouble: Trouble) -> Target:
        """The newest healthy state that is old enough; else the oldest there is. Its step comes before the onset's
        by one at least: the update that did it may have been that of the step before."""
        latest = trouble.onset - 1
        for before in (latest - rollback.back, latest):
            in_memory = self._snapshots.newest(before)
            if in_memory is not None and not self._is_newer_on_disk(in_memory.step, before):
                return Target(in_memory.step, in_memory)
            on_disk = self._checkpoints.newest_healthy(before)[0] if self._checkpoints is not None else None
            if on_disk is not None and (in_memory is None or on_disk > in_memory.step):
                return Target(on_disk, None)
            if in_memory is not None:  # what is on disk is damaged
                return Target(in_memory.step, in_memory)
        raise Impossible(f"there is no healthy state from before step {trouble.onset}")

    def _is_newer_on_disk(self, step: int, before: int) -> bool:
        """Going by what is known of checkpoints: to check one is to read it whole."""
        tags = self._checkpoints.tags() if self._checkpoints is not None else {}
        newest = max((saved for saved, tag in tags.items() if tag == "healthy" and saved <= before), default=-1)
        return self._ranks.gather(newest > step)[0]

    def _go_back(self, target: Target, number: int) -> Cost:
        """All of it, or an error and nothing. Gives what is to be done once more."""
        self._watch.catch_up()
        self._judged.clear()
        self._batch_of.clear()
        if target.snapshot is not None:
            self._restore_snapshot(target.snapshot)
            plain = target.snapshot.plain
            tokens, seconds = self.tokens - plain["tokens"], time.monotonic() - plain["time"]
        else:
            assert self._checkpoints is not None
            state = self._checkpoints.load(target.step, like=self._trainee.capture())
            self._trainee.restore(state)
            self._watch.load_state_dict(state.plain["guard"]["watch"])
            tokens, seconds = 0, 0.0
        self._snapshots.forget_after(target.step)
        self._unproven = {saved: count for saved, count in self._unproven.items() if saved <= target.step}
        if self._checkpoints is not None:
            self._checkpoints.discard_after(target.step)
        return Cost(number - target.step, tokens, seconds)

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
        restore_scale(trainee, plain["scaler"])
        restore_rng(plain["rng"])
        self._watch.go_back(plain["judging"])

    # People.

    def ask(self, number: int, words: Sequence[str], *, by: str, request: str) -> int | None:
        """Carry out what a person asks for, or say why not."""
        try:
            action = asked.parse(words)
            trouble = Trouble(
                trigger=Trigger.ASKED, onset=number, batch=None, text=f"asked for: {' '.join(words)}", source=None
            )
            return self._carry_out((action,), trouble, number, who=f"person {by}", rung=None, request=request)
        except (Impossible, ConfigError) as reason:
            self._watch.note("request-refused", step=number, request=request, by=by, reason=str(reason))
            return None

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
        return self.ask(number, found[0].words, by=found[0].by, request=found[0].id)

    # Writing down.

    def _tell_outcome(self, step: int, result: str, text: str) -> None:
        self._untold = False
        treated = self._history[-1]
        self._watch.note(
            "outcome",
            step=step,
            intervention=len(self._history),
            result=result,
            text=f"{result}: {text}, {step - treated.onset} steps after the onset",
        )

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


def read_books(folder: Path) -> dict[str, Any] | None:
    """The books of a run, where it has some."""
    path = folder / RECOVERY
    try:
        books: dict[str, Any] = json.loads(path.read_bytes())
        Margins(**books["margins"])
        return books if isinstance(books["history"], list) and isinstance(books["data"], dict) else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SourceError(f"{path}: cannot be read ({error}); restore it from a copy, or remove it") from error


def scale_of(trainee: Trainee) -> Any:
    """The loss scale, as tensors: reading their numbers would wait for the device."""
    scaler: Any = trainee.scaler
    if scaler is None or scaler._scale is None:
        return None
    return scaler._scale.clone(), scaler._growth_tracker.clone()


def restore_scale(trainee: Trainee, scale: Any) -> None:
    """The inverse."""
    scaler: Any = trainee.scaler
    if scale is not None:
        scaler._scale.copy_(scale[0])
        scaler._growth_tracker.copy_(scale[1])
