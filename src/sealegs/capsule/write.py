"""The flight recorder: keeps the last batches and rows of a run, and writes a capsule when an incident opens.

``BatchHandle`` is a batch as it was handed out. ``FlightRecorder`` writes ``incidents/<n>/capsule`` beside the
training: rows, batches, and a state from before the onset. The state is a snapshot in memory, or links to the newest
checkpoint that is not suspect. Observing fails open: the capsule names what could not be kept.
"""

import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from stat import S_ISREG
from typing import Any, NamedTuple, Self

from torch import Tensor

from sealegs.errors import SealegsError, SourceError, StorageError
from sealegs.incidents import Incident
from sealegs.record import manifest as manifests
from sealegs.record.events import plain_events, read_events
from sealegs.record.files import files_in, folder_aside, whole_file
from sealegs.record.reading import open_file
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
    STATE,
    TOKENIZER,
    speakable,
    to_line,
)
from sealegs.report.postmortem.markdown import draft, markdown
from sealegs.signals.collective import Collective
from sealegs.state.checkpoints import Checkpoints
from sealegs.state.memory import in_words
from sealegs.state.serialization import plain
from sealegs.state.snapshots import Snapshot, Snapshots
from sealegs.state.training_state import TrainingState
from sealegs.vocabulary import Row, Verdict
from sealegs.watch import Watch

SCARCE = 4
"""A byte on a device counts as this many, since device memory is what runs are short of."""


@dataclass(frozen=True, slots=True)
class BatchHandle:
    """A batch as it was handed out: the very object, not a copy."""

    step: int
    index: int | None
    batch: Any
    size: int
    versions: tuple[int, ...]
    """torch's version counters of its tensors, which tell whether the loop has changed the batch in place."""

    @classmethod
    def of(cls, step: int, index: int | None, batch: Any) -> Self:
        """The handle of a batch that is about to be trained on."""
        return cls(step, index, batch, size_of(batch), versions_of(batch))

    def recorded(self) -> dict[str, Any]:
        """A line of ``batches-<rank>.jsonl``; the batch is null if the loop has changed it since."""
        recorded = self.batch.recorded() if hasattr(self.batch, "recorded") else _opened_up(self.batch)
        batch = plain(recorded, "a batch")
        is_same = versions_of(self.batch) == self.versions
        return {"step": self.step, "index": self.index, "batch": batch if is_same else None}


def size_of(batch: Any) -> int:
    """Bytes of the tensors and arrays in a batch, with device memory counted ``SCARCE`` times.

    >>> import torch
    >>> size_of({"ids": torch.zeros(2, 8, dtype=torch.long), "names": ["a", "b"]})
    128
    """
    return sum(part.nbytes * (SCARCE if getattr(part, "is_cuda", False) else 1) for part in _parts(batch))


def versions_of(batch: Any) -> tuple[int, ...]:
    """How often each tensor of a batch has been changed in place."""
    return tuple(part._version for part in _parts(batch) if isinstance(part, Tensor) and not part.is_inference())


def _opened_up(batch: Any) -> Any:
    """The batch with data classes as dicts of their fields."""
    if is_dataclass(batch) and not isinstance(batch, type):
        return {field.name: _opened_up(getattr(batch, field.name)) for field in fields(batch)}
    if isinstance(batch, Mapping):
        return {key: _opened_up(item) for key, item in batch.items()}
    if isinstance(batch, list | tuple):
        return [_opened_up(item) for item in batch]
    return batch


def _parts(batch: Any) -> Iterator[Any]:
    if hasattr(batch, "nbytes"):
        yield batch
    elif isinstance(batch, Mapping):
        for item in batch.values():
            yield from _parts(item)
    elif isinstance(batch, list | tuple):
        for item in batch:
            yield from _parts(item)
    elif is_dataclass(batch):
        for field in fields(batch):
            yield from _parts(getattr(batch, field.name))


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


class Unfinished(NamedTuple):
    """A capsule that still waits for the steps after its opening."""

    capsule: Path
    description: Description
    last_row: int
    """The step of its last row; some steps before the opening may not have been judged yet."""


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
        self._unfinished: Unfinished | None = None
        self._waiting: tuple[Incident, Snapshot] | None = None
        """A state that waits while a checkpoint is being written."""
        self._state_under_way: tuple[Incident, Snapshot] | None = None
        self._writer: ThreadPoolExecutor | None = None
        self._last_write: Future[None] | None = None
        self._failures: deque[str] = deque()
        self._opened: set[int] = set()
        """Incidents whose capsules this process has begun."""
        self._incomplete: dict[int, str] = {}
        """Incidents of which the disk has not taken everything, and why."""

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
        if self._folder is not None:
            self._rows.append((row, verdict.go or not self._acts))

    def forget_from(self, step: int) -> None:
        """Forget this step and later ones: the run has gone back and will do them again."""
        self._finish()
        kept = [handed for handed in self._handed if handed.step < step]
        self._handed = deque(kept, maxlen=STEPS)
        self._bytes = sum(handed.size for handed in kept)
        self._rows = deque((seen for seen in self._rows if int(seen[0]["step"]) < step), maxlen=STEPS)

    def open(self, incident: Incident, number: int) -> None:
        """Write the capsule of an incident that was found before step ``number``."""
        if self._folder is None:
            return
        folder = self._folder / str(incident.number)
        if self._ranks.first(lambda: incident.number in self._opened or is_whole(folder / CAPSULE)):
            return  # reopened, or opened by the process before
        self._opened.add(incident.number)
        if self._ranks.rank == 0:
            shutil.rmtree(self._state_folder(incident), ignore_errors=True)  # of a capsule that a kill cut short
        snapshot = self._snapshots.newest(before=incident.start)
        has_room = self._has_room()
        state, without = None, "no state: the bytes for capsules are spent"
        if has_room:
            state, without = self._state(incident, snapshot, folder / CAPSULE)
        handed = tuple(each for each in self._handed if has_room and (state is None or each.step >= state))
        description = Description(
            version=VERSION,
            run=str(self._watch.folder),
            opened=number - 1,
            state=state,
            without_state=without,
            clip=self.clip,
            loop_clips=self.loop_clips,
            acts=self._acts,
            ranks=self._ranks.world,
            batches=len(handed),
            without_batches=self._missing(handed, state) if has_room else "the bytes for capsules are spent",
        )
        self._finish()  # the one before, which may overlap
        rows = self._rows_after(-1) if has_room else []
        self._beside(incident.number, lambda: self._write(folder, incident, description, rows, handed))
        if has_room:
            self._unfinished = Unfinished(folder / CAPSULE, description, self._latest)
        if snapshot is not None and state is not None:
            self._waiting = incident, snapshot
            self.after_step()
        self._watch.note(
            "capsule",
            step=number - 1,
            incident=incident.number,
            state=state,
            batches=len(handed),
            text=f"{INCIDENTS}/{incident.number}/{CAPSULE}: {len(handed)} batches, "
            + (without if state is None else f"the state of step {state}"),
        )

    def follow_up(self, incident: Incident) -> None:
        """Write how an incident ended, or stands at the end of the run, with a draft of its post-mortem."""
        if self._folder is None or self._ranks.rank or not (folder := self._folder / str(incident.number)).exists():
            return
        rows = [row for row, _ in self._rows]
        self._beside(incident.number, lambda: write_draft(folder, asdict(incident), rows))

    @property
    def missing(self) -> tuple[str, ...]:
        """Incidents of which the disk has not taken everything, in sentences."""
        known = dict(self._incomplete)  # a thread adds to it
        return tuple(f"{INCIDENTS}/{number} is not whole ({why})" for number, why in known.items())

    def after_step(self) -> None:
        """Write what is still waiting, and report failures."""
        if self._unfinished is not None and self._latest >= self._unfinished.description.opened + AFTER:
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
        self._finish()
        if self._waiting is not None and self._checkpoints is not None:
            self._checkpoints.wait()
            if self._ranks.world > 1:  # a rank may be gone already, and the others would wait for it
                incident, snapshot = self._waiting
                self._give_up_state(incident, f"the run ended before the state of step {snapshot.step} was written")
                self._waiting = None
        self.after_step()
        if self._state_under_way is not None and self._checkpoints is not None:
            self._checkpoints.wait()
            self._look_at_state(*self._state_under_way)
        if self._writer is not None:
            self._writer.shutdown()
            self._writer = None
        self._report_failures()

    def _write_state(self, incident: Incident, snapshot: Snapshot) -> None:
        """Write a state beside the training; while a checkpoint is being written, try again at the next step."""
        assert self._folder is not None
        assert self._checkpoints is not None
        if self._ranks.world == 1 and self._checkpoints.is_writing:  # several ranks must ask each other
            return
        try:
            state = self._training.capture_past(self._snapshots, snapshot)
        except SealegsError as error:  # the snapshot is gone by now
            self._waiting = None
            self._give_up_state(incident, str(error))
            return
        if self._checkpoints.save_soon(snapshot.step, state, to=self._state_folder(incident)):
            self._waiting, self._state_under_way = None, (incident, snapshot)

    def _look_at_state(self, incident: Incident, snapshot: Snapshot) -> None:
        """Take in what became of a state that was being written."""
        assert self._checkpoints is not None
        if self._checkpoints.is_writing:
            return
        self._state_under_way = None
        if (reason := self._checkpoints.failure_elsewhere(self._state_folder(incident))) is not None:
            self._incomplete[incident.number] = reason
            self._give_up_state(incident, f"the state of step {snapshot.step} could not be written ({reason})")

    def _state_folder(self, incident: Incident) -> Path:
        assert self._folder is not None
        return self._folder / str(incident.number) / CAPSULE / STATE

    def _give_up_state(self, incident: Incident, reason: str) -> None:
        """Report that there will be no state, in the capsule too."""
        self._failures.append(reason)
        changes: dict[str, Any] = {"state": None, "without_state": f"no state: {reason}"}
        capsule = self._state_folder(incident).parent
        path = capsule / f"{CAPSULE}.json"
        if self._unfinished is not None and self._unfinished.capsule == capsule:  # which will be written once more
            description = replace(self._unfinished.description, **changes)
            self._unfinished = self._unfinished._replace(description=description)

        def amend() -> None:
            if path.exists():
                _write_json(path, {**json.loads(path.read_bytes()), **changes})

        if self._ranks.rank == 0:
            self._beside(incident.number, amend)

    def _has_room(self) -> bool:
        """Whether anything is left of the budget, on all ranks: they write together, or none does."""
        if self._last_write is not None:
            self._last_write.result()  # of the incident before: written long ago, or what it takes is not known
        while self._spent:
            self._left -= self._spent.popleft()
        return all(left > 0 for left in self._ranks.gather(self._left))

    def _state(self, incident: Incident, snapshot: Snapshot | None, capsule: Path) -> tuple[int | None, str]:
        """The step of the state that the capsule will have, or why it will have none."""
        if self._checkpoints is None:
            return None, "no state: the guard writes no checkpoints"
        if snapshot is not None:
            size = self._snapshots.held_bytes // 2
            if not all(self._ranks.gather(size <= self._left)):  # a rank that wrote alone would wait for the others
                return None, self._too_large(size)
            self._left -= size
            return snapshot.step, ""
        reason = ""
        try:
            tags = self._checkpoints.tags()
            step = max((step for step, tag in tags.items() if tag != "suspect" and step <= incident.start), default=-1)
            if step < 0:
                return None, f"no state: there is neither a snapshot nor a checkpoint from before step {incident.start}"
            assert self._watch.folder is not None
            if self._ranks.rank == 0:
                source = self._watch.folder / CHECKPOINTS / str(step)
                size = 0 if step in self._linked else _bytes_in(source)  # it stays when it is no checkpoint any more
                if size > self._left:
                    return None, self._too_large(size)
                link_folder(source, capsule / STATE)
                self._linked.add(step)
                self._left -= size
        except SourceError as error:
            reason = str(error)
        except OSError as error:
            reason = f"checkpoint {step} cannot be linked ({error.strerror})"
        if reason:
            self._incomplete[incident.number] = reason
            return None, f"no state: {reason}"
        return step, ""

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
        (capsule, description, last_row), self._unfinished = self._unfinished, None
        rows = self._rows_after(last_row)
        handed = tuple(each for each in self._handed if each.step > description.opened)
        description = replace(description, batches=description.batches + len(handed))
        self._beside(int(capsule.parent.name), lambda: self._add(capsule, description, rows, handed))

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

    def _beside(self, incident: int, write: Callable[[], None]) -> None:
        """Let a thread write, one task after the other, since they may share files."""

        def fail_open() -> None:
            try:
                self._watch.refuse_lost_folder()
                write()
            except Exception as error:
                self._failures.append(f"{type(error).__name__}: {error}")
                if isinstance(error, OSError | StorageError | SourceError):
                    self._incomplete.setdefault(incident, str(error))

        self._writer = self._writer or ThreadPoolExecutor(max_workers=1, thread_name_prefix="capsule")
        self._last_write = self._writer.submit(fail_open)


def is_whole(capsule: Path) -> bool:
    """Whether a capsule has been written to its end: a process that was killed may have left a part of one."""
    try:
        description = json.loads((capsule / f"{CAPSULE}.json").read_bytes())
    except (OSError, ValueError):
        return False
    return description.get("state") is None or (capsule / STATE).exists()


def write_draft(folder: Path, incident: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Write the draft of a post-mortem: what is known without a diagnosis. One with a diagnosis is not overwritten."""
    _write_json(folder / INCIDENT, incident)
    if (folder / REPLAY).exists() or (folder / POSTMORTEM).with_suffix(".html").exists():
        return
    run = folder.parent.parent
    manifest = asdict(manifests.load(run))
    events = plain_events(read_events(_last_lines(run / EVENTS, EVENTS_TAIL)))
    with whole_file(folder / POSTMORTEM) as file:
        file.write(markdown(draft(manifest, incident, rows, events, source=run.name)).encode())


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
