"""The flight recorder: keeps the last batches and rows of a run, and writes a capsule when an incident opens.

``FlightRecorder`` writes ``incidents/<n>/capsule`` beside the
training: rows, batches, and a state from before the onset. The state is a snapshot in memory, or links to the newest
checkpoint that is not suspect. A step that is not finite and opens no incident leaves ``incidents/step-<s>/capsule``,
which is bounded more tightly. Observing fails open: the capsule names what could not be kept.
"""

import json
import math
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from stat import S_ISREG
from typing import Any, NamedTuple

from sealegs.capsule.batch_handle import BatchHandle
from sealegs.detectors.nonfinite import broken, overflows
from sealegs.errors import SealegsError, SourceError, StorageError
from sealegs.incidents import Incident
from sealegs.record import manifest as manifests
from sealegs.record.events import plain_events, read_events
from sealegs.record.files import files_in, folder_aside, whole_file
from sealegs.record.reading import is_number, open_file
from sealegs.record.rows import read_row
from sealegs.record.schema import (
    BATCHES,
    CAPSULE,
    CHECKPOINTS,
    EVENTS,
    INCIDENT,
    INCIDENTS,
    MANIFEST,
    METRICS,
    POSTMORTEM,
    REPLAY,
    SINGLE,
    STATE,
    TOKENIZER,
    speakable,
    to_line,
)
from sealegs.report.postmortem.markdown import draft, markdown
from sealegs.signals.collective import Collective
from sealegs.state.checkpoints import Checkpoints
from sealegs.state.memory import in_words
from sealegs.state.snapshots import Snapshot, Snapshots
from sealegs.state.training_state import TrainingState
from sealegs.vocabulary import Row, Verdict
from sealegs.watch import Watch

VERSION = 1
AFTER = 16
"""Steps after its opening that a capsule holds as well."""
STEPS = 512
"""Rows and batches that are kept at most."""
BATCH_BYTES = 256 * 2**20
"""Bytes that the kept batches may have together."""
TAIL, EVENTS_TAIL = 4 * 2**20, 2**19
"""Bytes at the end of a record that hold more rows than a capsule needs, and more events than an incident has."""
BUDGET = 16 * 2**30
"""Bytes on disk that all capsules of a run may take, per rank: when they are spent, an incident has none any more."""
SINGLES, APART, SHARE = 3, 1000, 1 / 16
"""Capsules of single steps that are kept, steps between two of them, and the share of the budget that the state of one
may take: one skipped step is no reason to write gigabytes."""
EXTENSIONS = 4
"""How often a capsule is extended to a later step that is not finite: each time its files are written anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """The contents of a capsule: ``capsule.json``."""

    version: int
    run: str
    opened: int
    """The step at which the incident was found."""
    state: int | None
    """The step to run next from its state; None without a state."""
    without_state: str
    """Why there is no state."""
    clip: float | None
    """The norm that the guard clipped gradients to."""
    loop_clips: bool
    """Whether the loop clipped, in a way that only the loop knows."""
    acts: bool
    """Whether rejected updates were skipped; False in shadow mode."""
    ranks: int
    batches: int
    without_batches: str
    """Why some or all batches are missing."""
    last: int | None = None
    """The last step whose batches it has; None in capsules of older versions."""


class CapsuleState(NamedTuple):
    """The state that a capsule will have."""

    step: int | None
    without: str = ""
    """Why it will have none."""
    is_checkpoint: bool = False
    """Whether a checkpoint that is too large to hold on to is what it lacks."""


class Written(NamedTuple):
    """A capsule as far as it is written."""

    capsule: Path
    description: Description
    last_row: int
    """The step of its last row; some steps before the opening may not have been judged yet."""
    until: int
    """The step that it waits for, to have what came until then."""
    extensions: int = 0


class FlightRecorder:
    """The flight recorder of one run. Recovery owns it and tells it of steps, rows and incidents."""

    def __init__(
        self,
        *,
        training: TrainingState,
        watch: Watch,
        snapshots: Snapshots,
        checkpoints: Checkpoints | None,
        ranks: Collective,
        acts: bool,
        budget: float = BUDGET,
    ) -> None:
        self.clip: float | None = None
        """The norm in force that gradients are clipped to."""
        self.loop_clips = False
        self._folder = folder = None if watch.folder is None or not budget else watch.folder / INCIDENTS
        self._training = training
        self._watch = watch
        self._snapshots = snapshots
        self._checkpoints = checkpoints
        self._ranks = ranks
        self._acts = acts
        written = 0 if folder is None else ranks.first(lambda: _bytes_in(folder))
        self._budget = budget
        self._left = budget - written / ranks.world
        """What is left of the budget, which the processes before have spent from, too."""
        self._spent: deque[int] = deque()
        """Bytes that the thread has written, and that are still to be taken off."""
        self._linked: set[int] = set()
        """Checkpoints that are taken off already."""
        self._handed: deque[BatchHandle] = deque(maxlen=STEPS)
        self._bytes = 0
        self._rows: deque[tuple[Row, bool]] = deque(maxlen=STEPS)
        """Judged rows, and whether the update was applied."""
        self._was_finite = True
        """Whether the last row was."""
        self._nonfinite: int | None = None
        """The first of the last row of steps that were not finite, until it is seen to."""
        self._singles: list[int] = [] if folder is None else ranks.first(lambda: single_steps(folder))
        """Single steps with a capsule."""
        self._says_unkept = True
        self._unfinished: Written | None = None
        """The capsule that still waits for later steps."""
        self._finished: Written | None = None
        """The last one that is written, if the run has not gone back behind its end."""
        self._waiting: tuple[str, Snapshot] | None = None
        """A state that waits while a checkpoint is being written, and the folder of its capsule."""
        self._state_under_way: tuple[str, Snapshot] | None = None
        self._writer: ThreadPoolExecutor | None = None
        self._last_write: Future[None] | None = None
        self._failures: deque[str] = deque()
        self._opened: set[str] = set()
        """Folders whose capsules this process has begun."""
        self._incomplete: dict[str, str] = {}
        """Those of which the disk has not taken everything, and why."""

    def handed_out(self, step: int, index: int | None, batch: Any) -> None:
        """Keep a batch that is about to be trained on."""
        if self._folder is None:
            return
        if len(self._handed) == STEPS:
            self._bytes -= self._handed[0].size
        self._handed.append(BatchHandle.of(step, index, batch))
        self._bytes += self._handed[-1].size
        while self._bytes > BATCH_BYTES and len(self._handed) > 1:
            self._bytes -= self._handed.popleft().size

    def record_row(self, row: Row, verdict: Verdict) -> None:
        """Keep a judged row."""
        if self._folder is None:
            return
        self._rows.append((row, verdict.go or not self._acts))
        is_finite = broken(row) is None or overflows(row)
        if self._was_finite and not is_finite and self._nonfinite is None:
            self._nonfinite = int(row["step"])
        self._was_finite = is_finite

    def forget_from(self, step: int) -> None:
        """Forget this step and later ones: the run has gone back and will do them again."""
        self._finish()
        kept = [handed for handed in self._handed if handed.step < step]
        self._handed = deque(kept, maxlen=STEPS)
        self._bytes = sum(handed.size for handed in kept)
        self._rows = deque((seen for seen in self._rows if int(seen[0]["step"]) < step), maxlen=STEPS)
        self._was_finite, self._nonfinite = True, None
        if self._finished is not None and max(self._finished.last_row, self._finished.description.last or 0) >= step:
            self._finished = None  # what comes now is not what came after it

    def open(self, incident: Incident, number: int) -> None:
        """Write the capsule of an incident that was found before step ``number``."""
        if self._folder is None:
            return
        name = str(incident.number)
        capsule = self._folder / name / CAPSULE
        if self._ranks.first(lambda: name in self._opened or is_whole(capsule)):
            return  # reopened, or opened by the process before
        if self._nonfinite is not None and self._nonfinite >= incident.start:
            self._nonfinite = None  # this capsule reaches it
        has_room = self._has_room()
        state, snapshot = CapsuleState(None, "no state: the bytes for capsules are spent"), None
        self._begin(name)
        if has_room:
            snapshot = self._snapshots.newest(before=incident.start)
            state = self._state(name, incident.start, snapshot)
        self._write_soon(name, incident, number - 1, state, has_room=has_room)
        if snapshot is not None and state.step is not None:
            self._write_state_soon(name, snapshot)

    def keep_nonfinite(self) -> None:
        """See to it that the first of a row of steps that were not finite can be run again, once the row is over."""
        if (step := self._nonfinite) is None or not self._handed:
            return
        if self._unfinished is not None:  # it will have it
            self._nonfinite = None
        elif all(self._ranks.gather(self._can_be_extended_to(step))):
            assert self._finished is not None
            extensions = self._finished.extensions + 1
            self._unfinished = self._finished._replace(until=step + AFTER, extensions=extensions)
            self._nonfinite = None
        elif self._was_finite:  # else it may become an incident
            self._nonfinite = None
            self._open_single(step)

    def _can_be_extended_to(self, step: int) -> bool:
        """Whether a step can be run from the state of the last capsule, with what is still held of the batches."""
        if self._finished is None or self._finished.extensions == EXTENSIONS:
            return False
        described = self._finished.description
        if described.state is None or described.last is None or described.without_batches:
            return False
        follows = (
            self._handed[0].step <= described.last + 1 and int(self._rows[0][0]["step"]) <= self._finished.last_row + 1
        )
        return follows and described.state <= step < described.state + STEPS

    def _open_single(self, step: int) -> None:
        """Write the capsule of a step that was not finite and opened no incident."""
        assert self._folder is not None
        if self._waiting is not None or any(abs(step - other) < APART for other in self._singles):
            return
        row = next((row for row, _ in self._rows if int(row["step"]) == step), None)
        if row is None or not self._has_room(waits=False):
            return
        name = SINGLE.format(step=step)
        self._begin(name)
        size = self._snapshots.held_bytes // 2
        snapshot = self._snapshots.newest(before=step - 1, proven=False)
        if snapshot is not None and not all(self._ranks.gather(size <= self._budget * SHARE)):
            snapshot = None
        state = self._state(name, step, snapshot, most=self._budget * SHARE)
        if not self._ranks.first(lambda: state.step is not None or state.is_checkpoint):
            if self._says_unkept:
                text = f"step {step} is not finite, and cannot be run again: {state.without} (said once)"
                self._watch.note("capsule", step=step, state=None, batches=0, text=text)
                self._says_unkept = False
            return
        self._singles.append(step)
        self._write_soon(name, _single(row), self._handed[-1].step, state)
        if snapshot is not None and state.step is not None:
            self._write_state_soon(name, snapshot)
        if len(self._singles) > SINGLES:
            self._remove_single(self._singles.pop(0))

    def _remove_single(self, step: int) -> None:
        assert self._folder is not None
        old = self._folder / SINGLE.format(step=step)
        freed = self._ranks.first(lambda: _bytes_in(old)) / self._ranks.world
        self._left = min(self._left + freed, self._budget)
        if self._ranks.rank == 0:
            self._beside(old.name, lambda: shutil.rmtree(old, ignore_errors=True))

    def _begin(self, name: str) -> None:
        self._opened.add(name)
        if self._ranks.rank == 0:
            shutil.rmtree(self._state_folder(name), ignore_errors=True)  # of a capsule that a kill cut short

    def _write_soon(
        self, name: str, incident: Incident, opened: int, state: CapsuleState, *, has_room: bool = True
    ) -> None:
        """Let the thread write everything but the state."""
        assert self._folder is not None
        folder = self._folder / name
        first = state.step or 0
        handed = tuple(each for each in self._handed if has_room and each.step >= first)
        description = Description(
            version=VERSION,
            run=str(self._watch.folder),
            opened=opened,
            state=state.step,
            without_state=state.without,
            clip=self.clip,
            loop_clips=self.loop_clips,
            acts=self._acts,
            ranks=self._ranks.world,
            batches=len(handed),
            without_batches=self._missing(handed, state.step) if has_room else "the bytes for capsules are spent",
            last=handed[-1].step if handed else None,
        )
        self._finish()  # the one before, which may overlap
        self._finished = None
        rows = self._rows_after(-1) if has_room else []
        self._beside(name, lambda: self._write(folder, incident, description, rows, handed))
        if has_room:
            self._unfinished = Written(folder / CAPSULE, description, self._latest, until=opened + AFTER)
        of_incident = {"incident": incident.number} if incident.number else {}
        self._watch.note(
            "capsule",
            step=opened,
            **of_incident,
            state=state.step,
            batches=len(handed),
            text=f"{INCIDENTS}/{name}/{CAPSULE}: {len(handed)} batches, "
            + (state.without if state.step is None else f"the state of step {state.step}"),
        )

    def leave_out_states(self) -> None:
        """Write no states from here on: a stored state could not hold this model."""
        self._checkpoints = None

    def follow_up(self, incident: Incident) -> None:
        """Write how an incident ended, or stands at the end of the run, with a draft of its post-mortem."""
        if self._folder is None or self._ranks.rank or not (folder := self._folder / str(incident.number)).exists():
            return
        rows = [row for row, _ in self._rows]
        self._beside(folder.name, lambda: write_draft(folder, asdict(incident), rows))

    @property
    def missing(self) -> tuple[str, ...]:
        """Incidents of which the disk has not taken everything, in sentences."""
        known = dict(self._incomplete)  # a thread adds to it
        return tuple(f"{INCIDENTS}/{name} is not whole ({why})" for name, why in known.items())

    def after_step(self) -> None:
        """Write what is still waiting, and report failures."""
        if self._unfinished is not None and self._latest >= self._unfinished.until:
            self._finish()
        if self._state_under_way is not None:
            self._look_at_state(*self._state_under_way)
        if self._waiting is not None:
            self._write_state(*self._waiting)
        self._report_failures()

    def _report_failures(self) -> None:
        while self._failures:
            self._watch.note("capsule-failed", reason=self._failures.popleft())

    def close(self) -> None:
        """Wait until everything is written."""
        self._was_finite = True  # nothing comes after it
        if self._ranks.world == 1:  # a rank may be gone already, and the others would wait for it
            self.keep_nonfinite()
        self._finish()
        if self._waiting is not None and self._checkpoints is not None:
            self._checkpoints.wait()
            if self._ranks.world > 1:
                name, snapshot = self._waiting
                self._give_up_state(name, f"the run ended before the state of step {snapshot.step} was written")
                self._waiting = None
        self.after_step()
        if self._state_under_way is not None and self._checkpoints is not None:
            self._checkpoints.wait()
            self._look_at_state(*self._state_under_way)
        if self._writer is not None:
            self._writer.shutdown()
            self._writer = None
        self._report_failures()

    def _write_state_soon(self, name: str, snapshot: Snapshot) -> None:
        if self._waiting is not None:
            before, late = self._waiting
            self._give_up_state(before, f"the state of step {late.step} waited for the disk until the next incident")
        self._waiting = name, snapshot
        self.after_step()

    def _write_state(self, name: str, snapshot: Snapshot) -> None:
        """Write a state beside the training; while a checkpoint is being written, try again at the next step."""
        assert self._folder is not None
        assert self._checkpoints is not None
        if self._ranks.world == 1 and self._checkpoints.is_writing:  # several ranks must ask each other
            return
        try:
            state = self._training.capture_past(self._snapshots, snapshot)
        except SealegsError as error:  # the snapshot is gone by now
            self._waiting = None
            self._give_up_state(name, str(error))
            return
        if self._checkpoints.save_soon(snapshot.step, state, to=self._state_folder(name)):
            self._waiting, self._state_under_way = None, (name, snapshot)

    def _look_at_state(self, name: str, snapshot: Snapshot) -> None:
        """Take in what became of a state that was being written."""
        assert self._checkpoints is not None
        if self._checkpoints.is_writing:
            return
        self._state_under_way = None
        if (reason := self._checkpoints.failure_elsewhere(self._state_folder(name))) is not None:
            self._incomplete[name] = reason
            self._give_up_state(name, f"the state of step {snapshot.step} could not be written ({reason})")

    def _state_folder(self, name: str) -> Path:
        assert self._folder is not None
        return self._folder / name / CAPSULE / STATE

    def _give_up_state(self, name: str, reason: str) -> None:
        """Report that there will be no state, in the capsule too."""
        self._failures.append(reason)
        changes: dict[str, Any] = {"state": None, "without_state": f"no state: {reason}"}
        capsule = self._state_folder(name).parent
        path = capsule / f"{CAPSULE}.json"
        if self._unfinished is not None and self._unfinished.capsule == capsule:  # which will be written once more
            description = replace(self._unfinished.description, **changes)
            self._unfinished = self._unfinished._replace(description=description)
        if self._finished is not None and self._finished.capsule == capsule:
            self._finished = None

        def amend() -> None:
            if path.exists():
                _write_json(path, {**json.loads(path.read_bytes()), **changes})

        if self._ranks.rank == 0:
            self._beside(name, amend)

    def _has_room(self, *, waits: bool = True) -> bool:
        """Whether anything is left of the budget, on all ranks: they write together, or none does."""
        if waits and self._last_write is not None:
            self._last_write.result()  # of the incident before: written long ago, or what it takes is not known
        while self._spent:
            self._left -= self._spent.popleft()
        return all(left > 0 for left in self._ranks.gather(self._left))

    def _state(self, name: str, onset: int, snapshot: Snapshot | None, most: float = math.inf) -> CapsuleState:
        """The state that a capsule will have, of at most so many bytes where it is a checkpoint."""
        if self._checkpoints is None:
            return CapsuleState(None, "no state: the guard writes no checkpoints")
        if snapshot is not None:
            size = self._snapshots.held_bytes // 2
            if not all(self._ranks.gather(size <= self._left)):  # a rank that wrote alone would wait for the others
                return CapsuleState(None, self._too_large(size))
            self._left -= size
            return CapsuleState(snapshot.step)
        reason = ""
        try:
            step = self._checkpoint_before(onset)
            if step is None:
                return CapsuleState(
                    None, f"no state: there is neither a snapshot nor a checkpoint from before step {onset}"
                )
            assert self._watch.folder is not None
            if self._ranks.rank == 0:
                source = self._watch.folder / CHECKPOINTS / str(step)
                size = 0 if step in self._linked else _bytes_in(source)  # it stays when it is no checkpoint any more
                if size > most:
                    too_large = f"no state of its own: {in_words(size)}; checkpoint {step} is it, while that is kept"
                    return CapsuleState(None, too_large, is_checkpoint=True)
                if size > self._left:
                    return CapsuleState(None, self._too_large(size))
                link_folder(source, self._state_folder(name))
                self._linked.add(step)
                self._left -= size
        except SourceError as error:
            reason = str(error)
        except OSError as error:
            reason = f"checkpoint {step} cannot be linked ({error.strerror})"
        if reason:
            self._incomplete[name] = reason
            return CapsuleState(None, f"no state: {reason}")
        return CapsuleState(step)

    def _checkpoint_before(self, step: int) -> int | None:
        """The newest checkpoint at a step or before it that is not suspect."""
        tags = {} if self._checkpoints is None else self._checkpoints.tags()
        return max((saved for saved, tag in tags.items() if tag != "suspect" and saved <= step), default=None)

    def _too_large(self, size: int) -> str:
        return f"no state: {in_words(size)} are more than is left of the budget, {in_words(self._left)}"

    def _missing(self, handed: tuple[BatchHandle, ...], state: int | None) -> str:
        if not handed:
            return "none was handed out through guard.batches"
        if state is not None and handed[0].step > state:
            kept = f"{STEPS} or {in_words(BATCH_BYTES)}"
            return f"those of steps {state} to {handed[0].step - 1} are gone: no more than {kept} are kept"
        return ""

    def _write(
        self,
        folder: Path,
        incident: Incident,
        description: Description,
        rows: Sequence[Row],
        handed: tuple[BatchHandle, ...],
    ) -> None:
        capsule = folder / CAPSULE
        capsule.mkdir(parents=True, exist_ok=True)
        with whole_file(capsule / BATCHES.format(rank=self._ranks.rank)) as file:
            for each in handed:
                file.write(json.dumps(each.recorded()).encode() + b"\n")
            self._spent.append(file.tell())
        if self._ranks.rank:
            return
        with whole_file(capsule / METRICS) as file:
            for row in (*rows_before(folder.parent.parent / METRICS, rows), *rows):
                file.write(to_line(row))
            self._spent.append(file.tell())
        for name in (MANIFEST, TOKENIZER):  # it must be understood without the folder that it lies in
            if (source := folder.parent.parent / name).exists():
                with whole_file(capsule / name) as file:
                    file.write(source.read_bytes())
        _write_json(folder / INCIDENT, asdict(incident))
        _write_json(capsule / f"{CAPSULE}.json", asdict(description))

    @property
    def _latest(self) -> int:
        """The step of the last row."""
        return int(self._rows[-1][0]["step"])

    def _rows_after(self, step: int) -> list[Row]:
        """Rows after a step, in the form that a capsule has."""
        return [{**row, "applied": float(done)} for row, done in self._rows if int(row["step"]) > step]

    def _finish(self) -> None:
        """Add the steps after the opening, as far as there are any: they show what the incident did."""
        if self._unfinished is None:
            return
        before, self._unfinished = self._unfinished, None
        capsule, described = before.capsule, before.description
        rows = self._rows_after(before.last_row)
        had = described.opened if described.last is None else described.last
        handed = tuple(each for each in self._handed if each.step > had)
        last = handed[-1].step if handed else described.last
        description = replace(described, batches=described.batches + len(handed), last=last)
        self._finished = before._replace(description=description, last_row=self._latest)
        self._beside(capsule.parent.name, lambda: self._add(capsule, description, rows, handed))

    def _add(
        self, capsule: Path, description: Description, rows: Sequence[Row], handed: tuple[BatchHandle, ...]
    ) -> None:
        if self._ranks.rank == 0 and not (capsule / f"{CAPSULE}.json").exists():
            return  # what was to be there before could not be written, which has been told of
        lines = [json.dumps(each.recorded()).encode() + b"\n" for each in handed]
        self._spent.append(_add_lines(capsule / BATCHES.format(rank=self._ranks.rank), lines))
        if not self._ranks.rank:
            self._spent.append(_add_lines(capsule / METRICS, map(to_line, rows)))
            _write_json(capsule / f"{CAPSULE}.json", asdict(description))

    def _beside(self, name: str, write: Callable[[], None]) -> None:
        """Let a thread write, one task after the other, since they may share files."""

        def fail_open() -> None:
            try:
                self._watch.refuse_lost_folder()
                write()
            except Exception as error:
                self._failures.append(f"{type(error).__name__}: {error}")
                if isinstance(error, OSError | StorageError | SourceError):
                    self._incomplete.setdefault(name, str(error))

        self._writer = self._writer or ThreadPoolExecutor(max_workers=1, thread_name_prefix="capsule")
        self._last_write = self._writer.submit(fail_open)


def _single(row: Row) -> Incident:
    """A step by itself, as an incident without a number: nothing is known of what is usual."""
    step, unknown = int(row["step"]), math.nan
    return Incident(
        number=0,
        start=step,
        kind="nonfinite",
        pre_loss=unknown,
        usual=unknown,
        limit=unknown,
        peak=step,
        peak_loss=float(row.get("loss", unknown)),
        grad_norm_peak=float(row.get("grad_norm", unknown)),
    )


def single_steps(incidents: Path) -> list[int]:
    """The single steps that have a folder beside the incidents, rising."""
    before = SINGLE.format(step="")
    there = incidents.iterdir() if incidents.is_dir() else ()
    numbers = (entry.name.removeprefix(before) for entry in there if entry.name.startswith(before))
    return sorted(int(number) for number in numbers if is_number(number))


def is_whole(capsule: Path) -> bool:
    """Whether a capsule has been written to its end: a process that was killed may have left a part of one."""
    try:
        description = json.loads((capsule / f"{CAPSULE}.json").read_bytes())
    except (OSError, ValueError):
        return False
    return description.get("state") is None or (capsule / STATE).exists()


def write_draft(folder: Path, incident: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Write the draft of a post-mortem: what is known without a diagnosis. One with a diagnosis is not overwritten.

    The record has rows that a guard forgets when it goes back; ``rows`` stand in for it where it has none.
    """
    _write_json(folder / INCIDENT, incident)
    if (folder / REPLAY).exists() or (folder / POSTMORTEM).with_suffix(".html").exists():
        return
    run = folder.parent.parent
    manifest = asdict(manifests.load(run))
    events = plain_events(read_events(_last_lines(run / EVENTS, EVENTS_TAIL)))
    recorded = [row for line in _last_lines(run / METRICS, TAIL) if (row := read_row(line)) is not None]
    with whole_file(folder / POSTMORTEM) as file:
        file.write(markdown(draft(manifest, incident, recorded or rows, events, source=run.name)).encode())


def rows_before(metrics: Path, rows: Sequence[Row]) -> list[Row]:
    """Rows of the process before, where this one has not done as many steps as a capsule holds."""
    if not rows or len(rows) >= STEPS:
        return []
    first = int(rows[0]["step"])
    found: dict[int, Row] = {
        int(row["step"]): {**row, "applied": 1.0}
        for line in _last_lines(metrics, TAIL)
        if (row := read_row(line)) is not None and "loss" in row
    }
    return [found[step] for step in sorted(found) if step < first][len(rows) - STEPS :]


def _last_lines(path: Path, most: int) -> list[bytes]:
    """The last whole lines of a record: all of it would be read again at every incident, and there may be thousands."""
    with open_file(path, path.parent) as file:
        file.seek(max(os.fstat(file.fileno()).st_size - most, 0))
        return file.read(most).split(b"\n")[:-1]  # without what is still being written


def link_folder(source: Path, target: Path) -> None:
    """Hard links to the files of a folder, in another one."""
    with folder_aside(target) as aside:
        for path in files_in(source):
            place = aside / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            os.link(path, place)


def _add_lines(path: Path, lines: Iterable[bytes]) -> int:
    """Append all lines or none. Gives how many bytes they are."""
    before = path.read_bytes()
    with whole_file(path) as file:
        file.write(before)
        file.writelines(lines)
        return file.tell() - len(before)


def _bytes_in(folder: Path) -> int:
    """Bytes of all files in a folder; links to one file count once."""
    stats = (path.lstat() for path in folder.rglob("*"))
    return sum({stat.st_ino: stat.st_size for stat in stats if S_ISREG(stat.st_mode)}.values())


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    with whole_file(path) as file:
        file.write(json.dumps(speakable(value), indent=1).encode() + b"\n")
