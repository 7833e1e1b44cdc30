"""A watch: records the signals of every step and gives verdicts. It observes a run and cannot change it."""

import math
import sys
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from sealegs import judge
from sealegs.data.shares import world_size
from sealegs.detectors.custom import as_detector
from sealegs.detectors.spike import Spike
from sealegs.errors import ConfigError, FolderIncomplete, RunHalted, SinkFailed, StorageError
from sealegs.judge import Detection
from sealegs.printable import visible
from sealegs.record import manifest as manifests
from sealegs.record.health import HealthFile, refuse_restart
from sealegs.record.interventions import Skips, told_of
from sealegs.record.rows import HIGHEST_STEP, SoundRows
from sealegs.record.stability_tax import StabilityTax
from sealegs.record.unlearned_sources import Division
from sealegs.record.writer import INCOMPLETE, RunWriter
from sealegs.signals.collect import Block, Collector, Signal
from sealegs.signals.collective import Collective
from sealegs.signals.time_spent import TimeSpent
from sealegs.signals.watchdog import Watchdog
from sealegs.sinks.notify import Notifier, Where
from sealegs.state.live_settings import RecordedSettings
from sealegs.vocabulary import Finding, Row, Severity, Sink, Verdict

D = TypeVar("D")

PRICE = "what an hour of the run costs, a number from 0 on; leave it out where it is not known"


def is_price(value: Any) -> bool:
    """Whether it can be the price of an hour."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


class LateVerdict:
    """The verdict of one step, waited for only when it is asked: ``if verdict.go: optimizer.step()``.

    On the CPU it is there at once. On a GPU the numbers are still being computed when ``see`` returns; asking for any
    property waits for them. A loop that never asks never waits.
    """

    def __init__(self, watch: "Watch") -> None:
        self._watch = watch
        self._verdict: Verdict | None = None

    @property
    def verdict(self) -> Verdict:
        """The verdict itself."""
        if self._verdict is None:
            self._watch.catch_up()
        assert self._verdict is not None
        return self._verdict

    @property
    def step(self) -> int:
        """The step that it is about."""
        return self.verdict.step

    @property
    def go(self) -> bool:
        """Whether the update should be applied."""
        return self.verdict.go

    @property
    def word(self) -> str:
        """``GO``, ``SKIP``, ``ALARM`` or ``HALT``."""
        return self.verdict.word

    @property
    def severity(self) -> Severity | None:
        """The gravest of the findings."""
        return self.verdict.severity

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings, the gravest first."""
        return self.verdict.findings

    def __str__(self) -> str:
        return str(self.verdict)


class Observer:
    """What a watch reports to. This one does nothing and records rows as they come; a guard brings its own."""

    @property
    def acts(self) -> bool:
        """Whether someone acts on the verdicts; every event says so."""
        return False

    @property
    def instead_of_halt(self) -> str:
        """What becomes of a run whose verdict is HALT, in words; empty where that ends it."""
        return "it should be halted, which is the loop's to do"

    def complete(self, row: Row) -> Row:
        """Complete a row whose numbers have arrived, before it is judged."""
        return row

    def rest_of(self, row: Row, verdict: Verdict) -> Row:
        """What else can be measured of a step at which something is wrong: the row is judged once more with it."""
        return {}

    def trim(self, row: Row, verdict: Verdict) -> Row:
        """Trim a judged row before it is written."""
        return row

    def recorded(self, row: Row, verdict: Verdict) -> None:
        """Take in a row that was judged and written."""

    @property
    def missing(self) -> tuple[str, ...]:
        """What is not in the run's folder and should be, in sentences, apart from rows."""
        return ()


class Watch:
    """Records a training run into a folder and judges every step of it.

    >>> import sealegs, tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with sealegs.Watch(f"{folder}/a1", settings={"lr": 3e-4}) as watch:
    ...         for step in range(20):
    ...             verdict = watch.see(step, loss=torch.tensor(2.5), grad_norm=0.5 if step < 19 else 99.0)
    ...     print(verdict)
    ...     sealegs.open_run(f"{folder}/a1").column("grad_norm")[-3:].tolist()
    step 19  SKIP  grad_norm spike: 99, expected below 5  rejected 1 of 150
    [0.5, 0.5, 99.0]
    """

    def __init__(
        self,
        run: str | Path | RunWriter | None,
        *,
        resume: bool = False,
        settings: dict[str, Any] | None = None,
        sinks: Sequence[Sink] = (),
        notify: Where | None = None,
        detection: Detection = Detection(),  # noqa: B008 -- a frozen value
        model: nn.Module | None = None,
        optimizer: Optimizer | Sequence[Optimizer] = (),
        scheduler: Any = (),
        scaler: Any = None,
        clip: float | None = None,
        price_per_hour: float | None = None,
        observer: Observer = Observer(),  # noqa: B008 -- it has no state
    ) -> None:
        """Start the run in folder ``run``, or go on with it; a ``RunWriter`` is taken as it is, None records nothing.

        ``settings`` say what the run is; at a resume, what it is from now on. ``detection`` says how it is judged;
        ``observer`` sees each row on its way to the record.

        ``sinks`` get every row and event too: ``sealegs.tracker("wandb")``. ``notify`` is where a message goes when the
        run needs a person: the address of a webhook, a command, the name of an environment variable that holds either
        (``"$HOOK"``), or a ``sealegs.Notify`` with options.

        ``model``, ``optimizer``, ``scheduler``, ``scaler`` and ``clip`` are those of the loop: their settings are read
        once, for the manifest, and nothing is kept of them. ``price_per_hour`` is what an hour of the run costs.
        """
        if price_per_hour is not None and not is_price(price_per_hour):
            raise ConfigError(f"price_per_hour={price_per_hour!r}: {PRICE}")
        notifier = () if notify is None else (Notifier(notify),)  # refused before there is a folder
        standard = judge.rules(detection.rules, detection.halt_on)
        self._detectors = (*standard, *map(as_detector, detection.detectors))
        self._own_from = len(standard)
        self._state = judge.begin(self._detectors)
        self._budget = detection.budget
        self._observer = observer
        self.folder = run.folder if isinstance(run, RunWriter) else None if run is None else Path(run)
        """The run's folder, on every rank; one rank records into it."""
        self.record: RunWriter | None = None
        self.halted: Verdict | None = None
        """The first verdict that was HALT."""
        self.spent = TimeSpent()
        """Where the time of the run goes."""
        self._collector = Collector()
        self._sound_rows = SoundRows()
        self._late: deque[LateVerdict] = deque()
        self._recent: deque[Verdict] = deque(maxlen=32)
        self._announced: str | None = None
        self._damaged_since: int | None = None
        self._step = 0
        self._judged_rows = 0
        self._skips = Skips()
        """Steps that were skipped because of a verdict, in this process."""
        self._division = Division()
        """How those steps divide over the data sources."""
        self._is_closed = False
        self._has_ended = False
        self._has_failed = False
        self._sinks: list[Sink] = []
        self._tracked: list[Mapping[str, Any]] = []
        self._lost = ""
        """What has been said about a folder that is lost."""
        self._watchdog: Watchdog | None = None
        self.record = _opened(run, resume)
        self.recorded = RecordedSettings(self._write_recorded, lambda why: self.note("settings-unread", reason=why))
        """What was read from the live objects of the run."""
        try:
            if self.record is not None and type(observer) is Observer:  # a guard has its own to say
                self.recorded.add_objects(model, _several(optimizer), _several(scheduler), scaler, clip)
                self.recorded.write()
            if self.record is not None and price_per_hour is not None:
                self.record.amend(price_per_hour=float(price_per_hour))
            self._begin(settings, (*sinks, *notifier), detection.stalled_after_s)
        except BaseException:
            if self.record is not None:
                self.record.close()
            raise

    def _begin(self, settings: dict[str, Any] | None, listeners: Sequence[Sink], stalled_after_s: float) -> None:
        if self.record is None:  # without a record there is nothing to send
            return
        if settings is not None:
            self.record.amend(settings=settings)
        record = self.record
        for sink in (HealthFile(record.folder, lost=lambda: record.lost), *listeners):
            self._sinks.append(sink)
            self._tell(sink, partial(self._start, sink))
        self._watchdog = Watchdog(stalled_after_s, self._stalled)

    def see(self, step: int, **signals: Signal) -> LateVerdict:
        """Take the signals of a step by name: numbers, or tensors with one element, read when they are there.

        Steps go up by what you like; going back starts a new segment, and the newest row of a step counts. On several
        ranks give numbers that are the same on all of them, or each comes to its own verdict.
        """
        if not -HIGHEST_STEP <= step <= HIGHEST_STEP:
            raise ConfigError(f"step={step}: between -2**53 and 2**53, so that a float holds it")
        for name in ("loss", "grad_norm"):
            value = signals.get(name, 0.0)
            if value is None or isinstance(value, str) or (isinstance(value, Tensor) and value.numel() != 1):
                raise ConfigError(f"{name}={value!r}: give one number, or a tensor with one element")
        self.spent.begin_step()
        with self.spent.of("verdicts"):
            return self.submit(step, signals)

    def submit(
        self, step: int, signals: dict[str, Signal], blocks: Sequence[Block] = (), lag: int | None = None
    ) -> LateVerdict:
        """``see`` for callers that have tensors of several numbers. With ``lag``, all rows but so many are judged,
        waiting for them if need be."""
        self._step = step
        if self._watchdog is not None:
            self._watchdog.beat()
        is_of_training = "loss" in signals or blocks  # a device that decides has the loss in a block
        if self._announced is not None and is_of_training:
            signals = signals | {"announced": self._announced}
            self._announced = None
        if self._damaged_since is not None and is_of_training:
            signals = signals | {"damaged_since": float(self._damaged_since)}
            self._damaged_since = None
        self._collector.put(step, signals, blocks)
        late = LateVerdict(self)
        self._late.append(late)
        self._judge_and_record(self._collector.ready() if lag is None else self._collector.older_than(lag))
        return late

    def announce(self, change: str) -> None:
        """Announce a change that is made on purpose: a new mixture, a decay that starts, another batch size.

        For 500 steps only the coarse rules judge, while the statistic learns the new level.
        """
        self._announced = change
        self.note("announced", change=change)

    def alarm_of_damage(self, since: int) -> None:
        """Raise an alarm with the next step: a probe has found the weights damaged, since that step."""
        self._damaged_since = since

    def note(self, kind: str, /, *, step: int | None = None, **detail: Any) -> None:
        """Record an event, at the last step or at the one given."""
        self._has_ended |= kind == "end"
        if self.record is None:
            return
        if kind == "end" and self._skips.count:
            detail = {"skipped": self._told_of_skips(), **detail}
        if kind == "end" and (missing := self.missing):
            detail = {"missing": missing, **detail}
        if kind == "end" and (tax := self.tax).steps:
            detail = {"tax": tax.to_plain(), **detail}
        event = self.record.event(kind, self._step if step is None else step, **detail)
        for sink in tuple(self._sinks):
            self._tell(sink, partial(sink.event, event))

    @property
    def has_ended(self) -> bool:
        """Whether an event has said how the run ended."""
        return self._has_ended

    @property
    def missing(self) -> str:
        """What the run's folder should have and does not: checkpoints, rows, capsules, or that it is gone itself."""
        own = () if self.record is None else self.record.missing
        return "; ".join((*own, *self._observer.missing))

    def lost_folder(self) -> str:
        """What became of the run's folder, where its name does not lead to it any more: looks once more.

        Only the rank that records can tell.
        """
        return "" if self.record is None else self.record.look()

    def refuse_lost_folder(self) -> None:
        """Raise an error if the run's folder is not where it was: nothing is to be written to another one."""
        if self.record is not None:
            self.record.refuse_lost()

    @property
    def tax(self) -> StabilityTax:
        """What it has cost until now to keep the run standing."""
        return self.spent.tax(None if self.record is None else self.record.manifest.price_per_hour)

    @property
    def announced(self) -> str | None:
        """A change that was announced for the next step."""
        return self._announced

    def rest(self) -> None:
        """Expect no step for a while: an evaluation, a checkpoint."""
        if self._watchdog is not None:
            self._watchdog.rest()

    @property
    def skipped_before(self) -> tuple[float, float] | tuple[()]:
        """Loss and gradient norm of the last step, if it was skipped."""
        return self._state.tally.skipped

    @property
    def verdict(self) -> Verdict:
        """The newest verdict that is known, without waiting for one."""
        return self._recent[-1] if self._recent else Verdict(step=-1)

    @property
    def incident(self) -> tuple[Verdict, ...]:
        """The last verdicts that were not plain GO, oldest first."""
        return tuple(verdict for verdict in self._recent if verdict.findings)

    @property
    def skips(self) -> int:
        """How many steps should have been skipped so far, without those of a loss scaler."""
        return self._state.tally.skips

    @property
    def judging(self) -> judge.JudgeState:
        """Everything that the next verdict depends on: a value, which later steps do not change."""
        return self._state

    def go_back(self, judging: judge.JudgeState) -> None:
        """Judge on from an earlier state. Skipped steps and incidents so far still count."""
        self._state = judging._replace(tally=self._state.tally)
        self._announced = self._damaged_since = None
        self.clear_skip_row()

    def clear_skip_row(self) -> None:
        """Clear the row of skips after an intervention, so that it does not halt the run any more."""
        tally = self._state.tally._replace(skips_in_a_row=0, nonfinite_in_a_row=0, skipped=())
        self._state = self._state._replace(tally=tally)
        self.halted = None

    def forget_skip(self) -> None:
        """Forget that the last step was skipped: it never ended, so its return is no repetition."""
        self.catch_up()
        self._state = self._state._replace(tally=self._state.tally._replace(skipped=()))

    def judge_arrived(self) -> None:
        """Judge the rows that have arrived, without waiting: while a device is busy, the host has time."""
        self._judge_and_record(self._collector.ready())

    def catch_up(self) -> None:
        """Wait for every row so far, and judge it."""
        self._judge_and_record(self._collector.drain())

    def sync(self) -> None:
        """Wait for every row so far and put it on disk, safe against a power cut: before a checkpoint."""
        self.catch_up()
        if self.record is not None:
            self.record.sync()

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next verdict depends on, as JSON values."""
        return self.state_later()()

    def state_later(self) -> Callable[[], dict[str, Any]]:
        """What gives the state of now, whenever it is called: to hold it costs next to nothing."""
        self.catch_up()
        state, announced = self._state, self._announced  # values, which later steps do not change
        names = [detector.name for detector in self._detectors]
        return lambda: {"detectors": names, "state": _listed(state), "announced": announced}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state. New detectors start over, and an event says so."""
        self._state = self.judge_state_from(state)
        self._announced = state["announced"]
        self.halted = None

    def judge_state_from(self, state: Mapping[str, Any]) -> judge.JudgeState:
        """The ``judging`` of a saved state."""
        saved, tally = state["state"]
        states = dict(zip(state["detectors"], saved, strict=True))
        anew = [detector.name for detector in self._detectors if detector.name not in states]
        if anew:
            self.note("detectors-begin-anew", detectors=anew)
        begun = judge.begin(self._detectors)
        return judge.JudgeState(
            tuple(
                judge.thaw(fresh, states[detector.name]) if detector.name in states else fresh
                for detector, fresh in zip(self._detectors, begun.detectors, strict=True)
            ),
            judge.thaw(begun.tally, tally),
        )

    def states_of(self, kind: type[D]) -> list[tuple[D, Any]]:
        """The detectors of one kind, each with its state."""
        pairs = zip(self._detectors, self._state.detectors, strict=True)
        return [(detector, state) for detector, state in pairs if isinstance(detector, kind)]

    def fail(self, error: BaseException) -> None:
        """Record that the loop has ended with an error, unless an event has said how the run ended."""
        if self._is_closed or (isinstance(error, SystemExit) and not error.code):
            return
        self._has_failed = True
        if self._has_ended:
            return
        reason = "halted" if isinstance(error, RunHalted) else "failed"
        if isinstance(error, KeyboardInterrupt):
            reason = "interrupted"
        with suppress(StorageError):  # the disk may be what failed; the error itself says more
            self.note("end", reason=reason, error=f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Write what is still under way and close the folder. Closing twice is no error."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._watchdog is not None:
            self._watchdog.close()
        try:
            for last in (self.catch_up, self._tell_of_folder, self._say_what_was_corrected):
                with suppress(Exception) if self._has_failed else nullcontext():  # the device may be what was lost
                    last()
            self._say_what_was_skipped()
            for sink in tuple(self._sinks):
                self._tell(sink, sink.close)
        finally:
            missing = self.missing
            if self.record is not None:
                with suppress(StorageError) if self._has_failed else nullcontext():
                    self.record.close()
        if missing and self._has_failed:  # with an error on its way, which no other is to cover
            _say_aloud(f"{INCOMPLETE}: {missing}")
        elif missing and not self._has_ended:
            warnings.warn(f"{INCOMPLETE}: {missing}", FolderIncomplete, stacklevel=level_of_the_loop())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            self.fail(error)
        self.close()

    def _judge_and_record(self, rows: list[Row]) -> None:
        for row in rows:
            late = self._late.popleft()
            row = self._readable(self._observer.complete(row))
            row, verdict = self._verdict_on(row)
            late._verdict = verdict
            row = self._observer.trim(row, verdict)
            if self.record is not None:
                self.record.row(row)
                if self.record.lost != self._lost:  # somebody has looked
                    self._tell_of_folder()
            for sink in tuple(self._sinks):
                self._tell(sink, partial(sink.row, row))
            if "loss" in row:
                self._observer.recorded(row, verdict)

    def _readable(self, row: Row) -> Row:
        """The row with names and values that can be read again: before it is judged, so that a replay judges alike."""
        row, notice = self._sound_rows.sound(row)
        if notice is not None:
            self.note("signals-changed", step=int(row["step"]), **notice.plain())
        return row

    def _verdict_on(self, row: Row) -> tuple[Row, Verdict]:
        """The verdict on a row; and the row, with all that could be measured of it where something is wrong."""
        if "loss" not in row:  # an evaluation on its own, or what else is noted between steps
            return row, Verdict(step=int(row["step"]))
        state, verdict = self._folded(row)
        if verdict.word != "GO" and (rest := self._observer.rest_of(row, verdict)):
            row = self._readable({**row, **rest})
            state, verdict = self._folded(row)
        self._state = state
        if verdict.severity == Severity.HALT and not (judge.is_wished(verdict) and self._observer.acts):
            verdict = replace(verdict, instead=self._observer.instead_of_halt)
        self._recent.append(verdict)
        self._judged_rows += 1
        if "sources" in row:
            self._division.add(str(row["sources"]), skips=self._observer.acts and not verdict.go)
        if verdict.severity == Severity.HALT and self.halted is None:
            self.halted = verdict
        if verdict.findings:
            detail = event_detail(verdict, self.skips) | {"acted": self._observer.acts and not verdict.go}
            if detail["acted"]:
                self._skips = self._skips.after(verdict.step, detail["findings"])
            self.note(kind_of(verdict), step=verdict.step, **detail)
        return row, verdict

    def _folded(self, row: Row) -> tuple[judge.JudgeState, Verdict]:
        try:
            return judge.fold(self._detectors, self._state, row, self._budget)
        except Exception as error:
            if len(self._detectors) == self._own_from:
                raise
            self._drop_own_detectors(error)
            return judge.fold(self._detectors, self._state, row, self._budget)

    def _drop_own_detectors(self, error: Exception) -> None:
        """Drop the user's detectors after one raised. Observing fails open: it costs their place, not the run."""
        names = [detector.name for detector in self._detectors[self._own_from :]]
        self._detectors = self._detectors[: self._own_from]
        self._state = self._state._replace(detectors=self._state.detectors[: self._own_from])
        self.note("detector-failed", detectors=names, reason=f"{type(error).__name__}: {error}")

    def _say_what_was_corrected(self) -> None:
        """Record by how much thresholds were tightened, where p was small more often than it should be."""
        corrections = {spike.signal: round(state.audit.correction, 2) for spike, state in self.states_of(Spike)}
        if any(correction > 1 for correction in corrections.values()):
            self.note("audit", thresholds_divided_by=corrections)

    def _say_what_was_skipped(self) -> None:
        """Print one line about skips at the end, unless they have been shown at every step."""
        if self._skips.count:
            self.say(f"skipped {self._told_of_skips()}")

    def say(self, text: str) -> None:
        """Print a line about the run, unless somebody at a terminal sees its events as they come."""
        if self.record is not None and not any(sink.name == "terminal" for sink in self._sinks):
            _say_aloud(f"{self.record.folder}: {text}")

    def _write_recorded(self, tables: Mapping[str, Any]) -> None:
        """Add what was read to the manifest, as far as the disk takes it."""
        if self.record is None:
            return
        try:
            self.record.amend(recorded={**self.record.manifest.recorded, **tables})
        except StorageError as error:
            self.note("settings-unread", reason=str(error))

    def _tell_of_folder(self) -> None:
        """Say that the folder is gone, or back, if nobody has: on the terminal, to every sink, and in the record, which
        may have gone along."""
        lost = self.lost_folder()
        if lost == self._lost:
            return
        self._lost = lost
        text = lost or f"{self.folder}: is back, and written to again"
        self.say(text.removeprefix(f"{self.folder}: "))
        self.note("folder-lost" if lost else "folder-back", text=text)

    def _told_of_skips(self) -> str:
        return told_of(self._skips, self._judged_rows, self._division.worst())

    def _stalled(self, seconds: float, where: str) -> None:
        self.note("stalled", seconds=round(seconds, 1), where=where)

    def _start(self, sink: Sink) -> None:
        assert self.record is not None
        manifest = self.record.manifest
        started = sink.start(asdict(manifest) | {"folder": str(self.record.folder)})
        if started is not None:
            self._tracked.append(started)
            named = {entry.get("name"): entry for entry in (*manifest.trackers, started)}
            self.record.amend(tracker=self._tracked[0], trackers=list(named.values()))

    def _tell(self, sink: Sink, call: Callable[[], None]) -> None:
        """Call a sink. Observing fails open: a sink that raises costs one event and its place, never a step."""
        if sink not in self._sinks:  # it broke while another one's failure was reported
            return
        try:
            call()
        except Exception as error:
            reason = str(error) or type(error).__name__
            if isinstance(error, SinkFailed) and error.goes_on:
                self.note("sink-failed", sink=sink.name, reason=reason, goes_on=True)
                return
            self._sinks.remove(sink)
            self.note("sink-failed", sink=sink.name, reason=reason)
            with suppress(Exception):  # let it free what it holds, a terminal or a socket; it has failed already
                sink.close()


def opened_on_all(open_watch: Callable[[], Watch], timeout_s: float) -> Watch:
    """A watch on every rank. Where one of them cannot open its own, as the one that writes, all raise an error."""
    opened: list[Watch] = []
    try:
        Collective(timeout_s).agree(lambda: opened.append(open_watch()))
    except BaseException:
        for watch in opened:
            watch.close()
        raise
    return opened[0]


def kind_of(verdict: Verdict) -> str:
    """The event kind of a verdict with findings: an incident has one alarm, its later steps are skips."""
    if verdict.severity == Severity.HALT:
        return "halt"
    if verdict.opens_incident:
        return "alarm"
    return "remark" if verdict.go else "skip"


def event_detail(verdict: Verdict, skips: int) -> dict[str, Any]:
    """A verdict as the details of an event."""
    detail: dict[str, Any] = {
        "text": str(verdict),
        "findings": [asdict(finding) | {"severity": finding.severity.name} for finding in verdict.findings],
    }
    if not verdict.go:
        detail |= {"skipped_in_a_row": verdict.skips_in_a_row, "of": verdict.skip_limit, "skipped_in_all": skips}
    if verdict.incident is not None:
        detail["incident"] = verdict.incident
    if verdict.culprit:
        detail["culprit"] = verdict.culprit
    return detail


def _several(given: Any) -> tuple[Any, ...]:
    return tuple(given) if isinstance(given, list | tuple) else (given,)


def _opened(run: str | Path | RunWriter | None, resume: bool) -> RunWriter | None:
    if run is None or isinstance(run, RunWriter):
        return run
    if dist.is_available() and dist.is_initialized() and dist.get_rank() != 0:
        return None  # one writer; the others judge the same numbers
    if resume:
        refuse_restart(Path(run), world_size())
        return RunWriter.reopen(Path(run))
    return RunWriter.create(Path(run), manifests.describe(Path(run).name))


def _say_aloud(text: str) -> None:
    with suppress(OSError):  # the terminal may be gone
        print(visible(f"sealegs: {text}"), file=sys.stderr, flush=True)  # noqa: T201 - the commands' door is above it


def level_of_the_loop() -> int:
    """How many calls up the code is that is not Sealegs': a warning should point there."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "sealegs":
        frame, level = frame.f_back, level + 1
    return level


def _listed(state: Any) -> Any:
    """Tuples as lists, which JSON will make of them anyway."""
    return [_listed(part) for part in state] if isinstance(state, tuple) else state
