"""The checkpoints of a run, with their tags: each is whole or not there, and checked before use.

Tensors go through ``torch.distributed.checkpoint``, in one process as in many; everything else is JSON. A checkpoint is
written under a temporary name, synced, given the digests of its files, and then renamed. So a kill never leaves a
folder that looks like a checkpoint and is not one. A thread can write it while training goes on.

Whether its weights are any good shows later: a checkpoint is a candidate first, and ``Tags`` holds what becomes known.
One that is known to be healthy and is intact is never written over: what would take its place is known less well.
"""

import json
import math
import os
import shutil
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from sealegs.errors import ConfigError, RanksChanged, SourceError, StorageError
from sealegs.record.checkpoint_tags import Tag, Tags
from sealegs.record.files import PARTIAL, folder_aside, put_back_replaced, remove_leftovers, writing
from sealegs.record.reading import is_number
from sealegs.record.typed import fits
from sealegs.signals.collective import TIMEOUT_S, Collective
from sealegs.state import checkpoint_files
from sealegs.state.memory import CPU, Staging, free_bytes, in_words, on_host
from sealegs.state.plain_state import fault_in_plain


@dataclass(frozen=True, slots=True)
class StoredState:
    """Everything needed to resume at a step, split by how it is stored."""

    tensors: Mapping[str, Tensor]
    """Tensors by name. A name means the same tensor on all ranks, or shards of it; ``rng/<rank>/...`` belongs to one
    rank."""
    plain: Mapping[str, Any]
    """JSON values that are the same on all ranks; rank 0 stores them."""
    own: Mapping[str, Any] = field(default_factory=dict)
    """JSON values of this rank alone; empty where there was no such rank at the save."""
    step: int | None = None
    """The step to run next; known when the state comes from a checkpoint."""


class Damage(NamedTuple):
    """A checkpoint that cannot be used, and why."""

    step: int
    reason: str


class WrittenCheckpoint(NamedTuple):
    """A checkpoint that a thread has written, and the seconds since the request."""

    step: int
    seconds: float


class _Parts(NamedTuple):
    """A state ready to be written; later changes of the live objects do not affect it."""

    tensors: Mapping[str, Tensor]
    plain: bytes
    own: bytes


SEEN_WITHIN_S = 20.0
"""How long a file of one machine may take to be seen on another."""


class Checkpoints:
    """The checkpoints of one run, by the step to run next.

    In a process group, make one on every rank, on a folder that all ranks see, and call every method on every rank.
    Rank 0 alone renames, tags and deletes.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 3,
        keep_first: bool = False,
        backs: Collection[int] = (),
        proves: bool = False,
        lost: Callable[[], str] = lambda: "",
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Keep the newest ``keep`` checkpoints, and with ``keep_first`` also that of step 0.

        ``backs`` are the steps that the run may have to go back: for each, the newest healthy one that is so old stays,
        and the one after it, which will be. ``proves`` says that somebody tags those that are healthy.

        ``lost`` says, on the rank that can tell, why the folder is not the run's any more. Then nothing is written to
        it, and nothing that lies there is gone back to. A rank that does not come within the timeout is named.
        """
        self.holders: Callable[[Mapping[str, Tensor]], Mapping[str, int] | None] = lambda tensors: None
        """By name, the first rank that holds a tensor, but of those that all ranks have a part or a copy of. None where
        that is so of all, which all ranks must say alike."""
        self.oldest_in_memory: Callable[[], int | None] = lambda: None
        """The step of the oldest state that the run may go back to without the disk, where there is one."""
        self._folder = folder
        self._keep = keep
        self._keep_first = keep_first
        self._backs = backs
        self._proves = proves
        self._lost = lost
        self._tags = Tags(folder)
        self._timeout_s = timeout_s
        self._ranks = Collective(timeout_s)
        # for the writing threads: their messages must not mix with those of the loops
        self._writers = Collective(timeout_s)
        self._staging = Staging()
        self._thread: threading.Thread | None = None
        self._is_writing = False
        self._written: deque[WrittenCheckpoint] = deque()
        self._kept: deque[int] = deque()
        self._failures: deque[str] = deque()
        self._failed_steps: deque[int] = deque()
        self._failed_elsewhere: dict[Path, str] = {}
        checkpoint_files.expect_to_be_alone()

    def steps(self) -> list[int]:
        """The steps for which there is a checkpoint, rising."""
        try:
            return sorted(int(entry.name) for entry in self._folder.iterdir() if is_number(entry.name))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise SourceError(f"{self._folder}: cannot be listed ({error.strerror}); see to the disk") from error

    def take_over(self) -> None:
        """Clear up what the process before has left in the middle, where it was killed. The run has one writer."""
        self._ranks.first(self._clear_up)

    def refuse_unshared(self) -> None:
        """Refuse a folder that a rank does not see: it writes to the disk of its own machine, and a checkpoint of which
        each machine has a part goes with the first machine."""
        if self._ranks.world == 1:
            return
        run = self._folder.parent
        name = self._ranks.first(lambda: f".shared-{os.getpid()}-{time.time_ns()}{PARTIAL}")
        self._ranks.first(lambda: _touch(run / name))
        deadline = time.monotonic() + SEEN_WITHIN_S
        while not (is_seen := (run / name).exists()) and time.monotonic() < deadline:
            time.sleep(0.05)
            with suppress(OSError):
                list(run.iterdir())  # a network's file system looks again
        seen = self._ranks.gather((is_seen, socket.gethostname()))
        self._ranks.first(lambda: (run / name).unlink(missing_ok=True))
        blind = next((rank for rank, (sees, _) in enumerate(seen) if not sees), None)
        if blind is not None:
            raise ConfigError(
                f"run={run}: rank {blind} on {seen[blind][1]} does not see what rank 0 on {seen[0][1]} writes there, "
                "and would write its part of a checkpoint elsewhere; give a folder on storage that all machines share"
            )

    def _clear_up(self) -> None:
        with writing(self._folder):
            put_back_replaced(self._folder)
            remove_leftovers(self._folder, has_lock=True)

    # Saving.

    def save(self, step: int, state: StoredState) -> bool:
        """Write a checkpoint, then remove those that are no longer kept. False where the step has a healthy one."""
        self.wait()
        self._make_writers_anew_if_lost()
        return self._write(self._folder / str(step), lambda: self._parts(state, state.tensors))

    def save_soon(self, step: int, state: StoredState, *, to: Path | None = None) -> bool:
        """Copy the state, and let a thread write it. False, and nothing is done, while another one is being written.

        Call ``before_update`` before the tensors change. ``written``, ``kept`` and ``failure`` report the outcome. With
        ``to``, the state goes to that folder and is not one of the run's checkpoints: it is not tagged or removed, and
        ``failure_elsewhere`` reports why it is not there.
        """
        if any(self._ranks.gather(self._is_writing)):
            return False
        self._make_writers_anew_if_lost()
        began = time.perf_counter()
        self._is_writing = True
        if to is None:
            self._tags.expect(step)
        parts: _Parts | Exception
        try:
            parts = self._parts(state, self._staging.copy(state.tensors))
        except Exception as error:  # the thread tells the other ranks
            parts = error
        target = to or self._folder / str(step)
        self._thread = threading.Thread(target=self._write_late, args=(target, parts, began), name=f"checkpoint {step}")
        self._thread.start()
        return True

    def _parts(self, state: StoredState, tensors: Mapping[str, Tensor]) -> _Parts:
        """What this rank writes. Where ranks hold different tensors under a name, its holder is put before it, and each
        rank has all of the JSON for itself."""
        holders = self.holders(state.tensors)
        if holders is None:
            return _Parts(tensors, json.dumps(state.plain).encode(), json.dumps(state.own).encode())
        named = {_on_disk(name, holders): tensor for name, tensor in tensors.items()}
        own = {**state.own, HOLDERS: {**holders}, PARTS: state.plain}
        return _Parts(named, json.dumps({**state.plain, PARTS: self._ranks.world}).encode(), json.dumps(own).encode())

    def _make_writers_anew_if_lost(self) -> None:
        """A rank that wrote too slowly cost one checkpoint, and does not cost the next ones."""
        if any(self._ranks.gather(bool(self._writers.lost))):
            self._writers = Collective(self._timeout_s)

    def before_update(self) -> None:
        """Let the device finish its copy before the tensors change. The host does not wait."""
        self._staging.before_update()

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def written(self) -> list[WrittenCheckpoint]:
        """What ``save_soon`` has written since the last call."""
        return _taken(self._written)

    def kept(self) -> list[int]:
        """The steps for which ``save_soon`` has written nothing since the last call: each has a healthy one."""
        return _taken(self._kept)

    def failure(self) -> str | None:
        """What went wrong in ``save_soon`` since the last call, as a sentence. The run may go on."""
        return "; ".join(_taken(self._failures)) or None

    def failed_steps(self) -> list[int]:
        """The steps whose checkpoints ``save_soon`` could not write, since the last call."""
        return _taken(self._failed_steps)

    def failure_elsewhere(self, target: Path) -> str | None:
        """What went wrong in ``save_soon(to=target)``, as a sentence."""
        return self._failed_elsewhere.pop(target, None)

    @property
    def is_writing(self) -> bool:
        """Whether a thread of this rank is writing."""
        return self._is_writing

    @property
    def held_bytes(self) -> int:
        """Host memory that ``save_soon`` holds, from its first call on."""
        return self._staging.held_bytes

    def _write_late(self, target: Path, parts: _Parts | Exception, began: float) -> None:
        def arrived() -> _Parts:
            if isinstance(parts, Exception):
                raise parts
            self._staging.wait()
            return parts

        try:
            is_written = self._write(target, arrived)
            if target.parent == self._folder and is_written:
                self._written.append(WrittenCheckpoint(int(target.name), time.perf_counter() - began))
            elif not is_written:
                self._tags.arrived(int(target.name))
                self._kept.append(int(target.name))
        except BaseException as error:  # torch raises some that are no Exception, and nobody else would report them
            if target.parent == self._folder:
                self._failures.append(f"checkpoint {target.name}: {error}")
                self._failed_steps.append(int(target.name))
            else:
                self._failed_elsewhere[target] = str(error)
        finally:
            self._tags.expect(None)
            self._is_writing = False

    def _write(self, target: Path, make: Callable[[], _Parts]) -> bool:
        """Write a folder with a state. False, and nothing is done, where there is a healthy checkpoint."""
        ranks = self._writers

        def begin() -> Path | None:
            if lost := self._lost():
                raise StorageError(lost)
            if target.parent == self._folder and self._is_worth_keeping(int(target.name)):
                return None
            target.parent.mkdir(parents=True, exist_ok=True)
            return on_disk.enter_context(folder_aside(target, replace=True))

        def finish(aside: Path) -> None:
            checkpoint_files.write_digests(aside, digests)
            on_disk.close()  # it gets its name here
            if target.parent == self._folder:
                self._take_in(int(target.name))

        with writing(target), ExitStack() as on_disk:
            parts = ranks.agree(make)
            aside = ranks.first(begin)
            if aside is None:
                return False
            ranks.agree(lambda: checkpoint_files.write_plain(aside, ranks.rank, parts.plain, parts.own))
            ranks.together(lambda: checkpoint_files.write_tensors(aside, parts.tensors, ranks.group))
            digests = ranks.gather(ranks.agree(lambda: checkpoint_files.digests_of(aside, ranks.rank)))
            ranks.first(partial(finish, aside))
        return True

    def _is_worth_keeping(self, step: int) -> bool:
        """Whether a step has a checkpoint that is known to be healthy, and intact."""
        if not (self._folder / str(step)).exists():
            return False
        ((tag, _),) = self._tags.of([step]).values()
        return tag == "healthy" and self.check(step) is None

    def _take_in(self, step: int) -> None:
        self._tags.arrived(step)
        put_back_replaced(self._folder)
        remove_leftovers(self._folder, "[0-9]*", has_lock=True)  # the tags may be under way
        for old in self._no_longer_kept():
            # rename before deleting: a kill in between must not leave a checkpoint with half its files
            aside = (self._folder / str(old)).rename(self._folder / f".{old}.partial")
            shutil.rmtree(aside, ignore_errors=True)

    def _no_longer_kept(self) -> list[int]:
        """Checkpoints to delete: all but the newest, suspect ones first.

        The last healthy one stays, and the last that is no newer than the states in memory: a run that goes back to one
        of these gives up all later checkpoints, and may be killed before that one is on disk. So do those that the run
        may have to go back to, and the one that will be proven next: where few steps lie between checkpoints, all would
        go before they are proven. All stay if none that is kept is intact.
        """
        tags = self.tags()
        best_first = sorted(tags, key=lambda step: (tags[step] != "suspect", step), reverse=True)
        kept, old = best_first[: self._keep], best_first[self._keep :]
        spared = {0} if self._keep_first else set()
        if any(tags[step] == "healthy" for step in old):
            intact = (step for step in best_first if tags[step] == "healthy" and self.check(step) is None)
            spared |= set(islice(intact, 1))
        if (oldest := self.oldest_in_memory()) is not None:
            spared |= set(islice((step for step in best_first if tags[step] == "healthy" and step <= oldest), 1))
        healthy = sorted(step for step in tags if tags[step] == "healthy")
        for back in self._backs if healthy else ():
            far = [step for step in healthy if step <= healthy[-1] - back][-1:]
            later = sorted(step for step in tags if tags[step] != "suspect" and step > max(far, default=0))
            spared |= {*far, *later[:1]}
        if self._proves:
            newest = max(healthy, default=-1)
            spared |= set(sorted(step for step in tags if tags[step] == "candidate" and step > newest)[:1])
        going = [step for step in old if step not in spared]
        return going if going and any(self.check(step) is None for step in kept) else []

    # Which to go back to.

    def tag(self, step: int, tag: Tag, why: str = "") -> None:
        """Tag a checkpoint, even one that is being written; a missing one is ignored."""
        if self._ranks.rank == 0 and not self._lost():
            self._tags.give(step, tag, why)

    def tags(self) -> dict[int, Tag]:
        """The tag of each checkpoint."""
        return {step: tag for step, (tag, _) in self._tags.of(self.steps()).items()}

    def discard_after(self, step: int, why: str = "") -> None:
        """Tag later checkpoints as suspect: the run went back to this step."""
        being_written = [] if self._tags.expected is None else [self._tags.expected]
        for later in (*self.steps(), *being_written):
            if later > step:
                self.tag(later, "suspect", why or f"the run went back to step {step}")

    def newest_intact(self, doubt: Callable[[int], str] = lambda step: "") -> tuple[int | None, list[Damage]]:
        """The newest checkpoint that is intact and not suspect, and why newer ones were passed over.

        ``doubt`` says why that of a step is passed over as well; rank 0 alone is asked.
        """
        return self._newest(("healthy", "candidate"), doubt)

    def newest_healthy(self, before: int | None = None) -> tuple[int | None, list[Damage]]:
        """The newest checkpoint that is intact and healthy, at or before a step, and why newer ones were passed
        over."""
        return self._newest(("healthy",), before=before)

    def _newest(
        self, wanted: tuple[Tag, ...], doubt: Callable[[int], str] = lambda step: "", before: int | None = None
    ) -> tuple[int | None, list[Damage]]:
        self.wait()
        return self._ranks.first(lambda: self._search(wanted, doubt, before))

    def _search(
        self, wanted: tuple[Tag, ...], doubt: Callable[[int], str], before: int | None
    ) -> tuple[int | None, list[Damage]]:
        passed_over: list[Damage] = []
        known = {} if self._lost() else self._tags.of(self.steps())
        for step in sorted(known, reverse=True):
            if before is not None and step > before:
                continue
            tag, why = known[step]
            if tag not in wanted:
                damage: Damage | None = Damage(
                    step, f"suspect: {why}" if tag == "suspect" else "not known to be healthy"
                )
            elif tag == "candidate" and (reason := doubt(step)):
                damage = Damage(step, reason)
            else:
                damage = self.check(step)
            if damage is None:
                return step, passed_over
            passed_over.append(damage)
        return None, passed_over

    def check(self, step: int) -> Damage | None:
        """Read a checkpoint whole and compare it with its digests."""
        fault = checkpoint_files.fault_in(self._folder / str(step))
        return None if fault is None else Damage(step, fault)

    def load(self, step: int, like: StoredState | None = None) -> StoredState:
        """Read a checkpoint that has been checked, into host memory.

        Tensors that are sharded in ``like`` are read as this rank's shards, however they were sharded when written; so
        are optimizer tensors of such weights. Everything else is read whole.
        """
        self.wait()
        return read_state(self._folder / str(step), step, like, self._ranks)


def read_state(
    folder: Path, step: int, like: StoredState | None = None, ranks: Collective | None = None
) -> StoredState:
    """The state in the folder of a checkpoint or a capsule; without ``ranks``, this process reads alone."""
    try:
        return _read_state(folder, step, like, ranks)
    except OSError as error:  # it was intact when it was checked
        raise SourceError(f"{folder}: cannot be read ({error.strerror or error}); see to the disk") from error


def _read_state(folder: Path, step: int, like: StoredState | None, ranks: Collective | None) -> StoredState:
    rank = 0 if ranks is None else ranks.rank
    plain, own = checkpoint_files.read_plain(folder, rank)
    plain, own, holders = _own_parts(folder, plain, own, None if ranks is None else ranks.world)
    there = checkpoint_files.tensors_in(folder)
    names = {_on_disk(name, holders): name for name in holders}
    names |= {name: name for name in there if not name.startswith(HELD) and not name.startswith("rng/")}
    names |= {name: name for name in there if name.startswith(f"rng/{rank}/")}
    if lost := sorted(names.keys() - there.keys()):
        raise SourceError(f"{folder}: damaged (there is no {lost[0]!a:.80}); use another checkpoint")
    entries = {name: there[stored] for stored, name in names.items()}
    if like is None:  # somebody looks at it, and it may be a stranger's
        needed = sum(math.prod(entry.size) * entry.properties.dtype.itemsize for entry in entries.values())
        if needed > (free := free_bytes(CPU)):
            raise SourceError(f"{folder}: its tensors take {in_words(needed)} of memory, and {in_words(free)} are free")
    tensors = {name: _room(name, entry, {} if like is None else like.tensors) for name, entry in entries.items()}
    rooms = {stored: tensors[name] for stored, name in names.items()}
    if ranks is None:
        checkpoint_files.read_tensors(folder, rooms, None)
    else:
        ranks.together(lambda: checkpoint_files.read_tensors(folder, rooms, ranks.group))
    if fault := fault_in_plain(plain, own):
        raise SourceError(f"{folder}: damaged ({fault}); use another checkpoint")
    return StoredState(tensors, plain, own, step)


def _touch(path: Path) -> None:
    with writing(path):
        path.touch()


HELD, HOLDERS, PARTS = "@", "holders", "parts"
"""What the name of a tensor begins with that is not that of all ranks; whose each is, and the JSON beside it."""


def _on_disk(name: str, holders: Mapping[str, int]) -> str:
    """
    >>> _on_disk("model/0.weight", {"model/0.weight": 2}), _on_disk("model/gate.weight", {})
    ('@2/model/0.weight', 'model/gate.weight')
    """
    return f"{HELD}{holders[name]}/{name}" if name in holders else name


def _own_parts(
    folder: Path, plain: dict[str, Any], own: dict[str, Any], world: int | None
) -> tuple[dict[str, Any], dict[str, Any], dict[str, int]]:
    """The JSON as this rank has it, and the holders of its tensors, where each rank has its own."""
    if PARTS not in plain:
        return plain, own, {}
    count, parts, holders = plain[PARTS], own.pop(PARTS, None), own.pop(HOLDERS, None)
    if not fits(count, int):
        raise SourceError(f"{folder}: damaged ({PARTS} is no number); use another checkpoint")
    if world is not None and world != count:
        raise RanksChanged(
            f"{folder}: it has a part for each of {count} ranks, which hold different tensors, and there are {world}: "
            f"start the job with {count} ranks",
            ranks=count,
        )
    if not fits(parts, Mapping) or not fits(holders, Mapping) or not all(fits(each, int) for each in holders.values()):
        raise SourceError(f"{folder}: damaged (a rank's part of its JSON is none); use another checkpoint")
    return dict(parts), own, dict(holders)


def _room(name: str, entry: TensorStorageMetadata, like: Mapping[str, Tensor]) -> Tensor:
    """An empty tensor to read into."""
    model = like.get(name)
    weight = _weight_of(name, like) if model is None else model
    if isinstance(weight, DTensor) and weight.shape == entry.size:
        return on_host(weight, entry.properties.dtype)
    return torch.empty(entry.size, dtype=entry.properties.dtype)


def _weight_of(name: str, tensors: Mapping[str, Tensor]) -> Tensor | None:
    """The weight that ``optimizer/0/blocks.1.weight.exp_avg`` belongs to."""
    if not name.startswith("optimizer/"):
        return None
    path = name.split("/", 2)[-1]
    while "." in path:
        path = path.rpartition(".")[0]
        if (weight := tensors.get(f"model/{path}")) is not None:
            return weight
    return None


def _taken(entries: deque[Any]) -> list[Any]:
    """Remove and return all entries of a queue that another thread may be adding to."""
    return [entries.popleft() for _ in range(len(entries))]
