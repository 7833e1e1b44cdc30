"""State in, folders on disk out, and back."""

import errno
import json
import pickle
import random
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.disk.layer import DiskLayer, Fault
from tests.forked import start

from sealegs.errors import RanksChanged, SourceError, StorageError
from sealegs.record.checkpoint_tags import Tag
from sealegs.state import checkpoint_files
from sealegs.state.checkpoints import Checkpoints, Damage, StoredState


def state(value: float) -> StoredState:
    tensors = {"model/w": torch.full((40, 5), value), "rng/0/cpu": torch.get_rng_state()}
    return StoredState(tensors, {"data": {"next": value}}, {"python": value})


PLAIN: dict[str, Any] = {
    "ranks": 1,
    "extra": {},
    "optimizers": [],
    "schedulers": [],
    "scaler": {},
    "data": None,
    "also": {},
}


def files_of(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def test_what_was_saved_comes_back_bit_for_bit(tmp_path: Path) -> None:
    odd = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    tensors = {"a": odd, "b": odd.bfloat16(), "step": torch.tensor(3.0), "count": torch.tensor([2**40])}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(7, StoredState(tensors, {"lr": 0.1 + 0.2}, {"of rank": 0}))
    loaded = checkpoints.load(7)
    assert (loaded.plain, loaded.own, loaded.step) == ({"lr": 0.1 + 0.2}, {"of rank": 0}, 7)
    assert loaded.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded.tensors[name].dtype == tensor.dtype
        assert loaded.tensors[name].shape == tensor.shape
        assert torch.equal(loaded.tensors[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_the_newest_n_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (10, 20, 100):
        checkpoints.save(step, state(step))
    assert checkpoints.steps() == [20, 100]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["100", "20"]


DAMAGES = {
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-10]),
    "flipped": lambda file: file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:]),
    "emptied": lambda file: file.write_bytes(b""),
    "missing": lambda file: file.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("which", range(5), ids=[".metadata", "tensors", "digests", "plain", "own"])
def test_damage_to_any_file_is_noticed_and_named(tmp_path: Path, damage: str, which: int) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state(1.0))
    checkpoints.save(2, state(2.0))
    files = files_of(tmp_path / "2")
    assert len(files) == 5
    DAMAGES[damage](files[which])
    step, passed_over = checkpoints.newest_intact()
    assert step == 1
    assert [entry.step for entry in passed_over] == [2]
    assert files[which].name in passed_over[0].reason
    assert checkpoints.load(step).tensors["model/w"][0, 0] == 1.0


HISTORIES: dict[str, tuple[str, str]] = {
    "newest": ("1 2 3 4", "3 4"),
    "a healthy one stays": ("1h 2h 3 4 5", "2h 4 5"),
    "one healthy one is enough": ("1h 2h 3h 4", "3h 4"),
    "an intact healthy one stays": ("1h 2hx 3 4", "1h 3 4"),
    "suspect ones go first": ("1 2 3s 4s", "1 2"),
    "suspect ones fill up": ("1 2s 3s 4s", "1 4s"),
    "nothing goes if no kept one is intact": ("1 2x 3x", "1 2x 3x"),
    "the first": ("0 1 2 3", "0 2 3"),
    "a damaged one counts": ("1 2 3x 4", "3x 4"),
}
"""Checkpoints (h healthy, s suspect, x damaged) and what is left of them, of which two are to be kept."""


@pytest.mark.parametrize("history", HISTORIES)
def test_what_rotation_leaves(tmp_path: Path, history: str) -> None:
    before, after = (words.split() for words in HISTORIES[history])
    unlimited = Checkpoints(tmp_path, keep=99)
    for word in before:
        step = int(word.rstrip("hsx"))
        unlimited.save(step, state(step))
        if word.strip("0123456789x"):
            unlimited.tag(step, "healthy" if "h" in word else "suspect")
        if "x" in word:
            DAMAGES["flipped"](files_of(tmp_path / str(step))[1])
    checkpoints = Checkpoints(tmp_path, keep=2, keep_first=True)
    checkpoints._take_in(99)
    assert checkpoints.steps() == [int(word.rstrip("hsx")) for word in after]
    assert {entry.name for entry in tmp_path.iterdir()} - {"tags.json"} == {word.rstrip("hsx") for word in after}


def test_one_stays_that_is_no_newer_than_the_states_in_memory(tmp_path: Path) -> None:
    """A run that goes back to one of them gives up all later checkpoints."""
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.oldest_in_memory = lambda: 25
    for step in (10, 20, 30, 40, 50):
        checkpoints.save(step, state(1.0))
        checkpoints.tag(step, "healthy")
    assert checkpoints.steps() == [20, 40, 50]
    checkpoints.oldest_in_memory = lambda: 45
    checkpoints.save(60, state(1.0))
    assert checkpoints.steps() == [40, 50, 60]


def test_one_stays_that_is_as_old_as_a_run_may_have_to_go_back_and_one_that_will_be(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2, keep_first=True, backs={1000})
    checkpoints.save(0, state(1.0))
    for step in range(200, 4001, 200):
        checkpoints.save(step, state(1.0))
        kept = checkpoints.steps()
        checkpoints.tag(step, "healthy")
        assert len(kept) <= 5
        assert kept[-2:] == [step - 200, step]
        if step > 1200:
            assert any(1000 <= step - 200 - old < 2000 for old in kept), f"at {step} there are {kept}"
    for step in (4200, 4400, 4600, 4800, 5000, 5200):  # an incident that lasts: none of these is proven
        checkpoints.save(step, state(1.0))
    assert any(old <= 3000 for old in checkpoints.steps()[1:]), "it is counted from the last that is healthy"


def test_each_rung_has_one_that_is_not_much_older_than_it_asks_for(tmp_path: Path) -> None:
    """A run that goes back 100 steps, or 1000 where that does not help; each is proven before the next is written."""
    checkpoints = Checkpoints(tmp_path, keep=3, keep_first=True, backs={100, 1000}, proves=True)
    for step in range(0, 4001, 100):
        checkpoints.save(step, state(1.0))
        kept = checkpoints.steps()
        assert len(kept) <= 8
        newest = step - 100  # the newest that is proven by now
        checkpoints.tag(step, "healthy")
        if step > 1200:
            assert newest - 100 in kept
            assert any(1000 <= newest - old < 2000 for old in kept[1:]), f"at {step} there are {kept}"
    for step in range(4100, 4600, 100):  # an incident that lasts: none of these is proven
        checkpoints.save(step, state(1.0))
    assert {3900, 4000} <= {*checkpoints.steps()}, "counted from the last that is healthy"


def test_one_stays_until_it_is_proven_though_many_are_written_meanwhile(tmp_path: Path) -> None:
    """16 healthy steps prove one: of a checkpoint every 2 steps, all three newest are younger than that."""
    checkpoints = Checkpoints(tmp_path, keep=3, proves=True)
    proven = []
    for step in range(0, 61, 2):
        checkpoints.save(step, state(1.0))
        assert len(checkpoints.steps()) <= 5
        if step >= 16 and step - 16 in checkpoints.steps():
            checkpoints.tag(step - 16, "healthy")
            proven.append(step - 16)
    assert proven == [0, 12, 24, 36], "each one later than the last by what it takes, and not the first for ever"


def test_a_removal_that_is_cut_short_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, state(1.0))
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda *_, **__: None)  # as if killed there
        checkpoints.save(2, state(2.0))
    assert checkpoints.steps() == [2]
    checkpoints.save(3, state(3.0))
    assert [entry.name for entry in tmp_path.iterdir()] == ["3"]


def test_a_step_can_be_saved_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(5, state(1.0))
    checkpoints.save(5, state(2.0))
    assert checkpoints.load(5).tensors["model/w"][0, 0] == 2.0
    assert [entry.name for entry in tmp_path.iterdir()] == ["5"]


def test_no_kill_amid_a_save_loses_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is saved again; what a kill would leave before each rename and removal is gone on with."""
    run = tmp_path / "run"
    left: list[Path] = []

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            left.append(tmp_path / f"killed-{len(left)}")
            shutil.copytree(run, left[-1])
            return function(*arguments, **options)

        return call

    checkpoints = Checkpoints(run)
    checkpoints.save(5, state(1.0))
    with monkeypatch.context() as patch:
        for thing, name in ((Path, "rename"), (Path, "replace"), (shutil, "rmtree")):
            patch.setattr(thing, name, noted(getattr(thing, name)))
        checkpoints.save(5, state(2.0))
    had_none = [folder for folder in left if not (folder / "5").exists()]
    assert had_none, "there is a moment at which no folder has the name"
    values = []
    for folder in left:
        checkpoints = Checkpoints(folder)
        checkpoints.take_over()
        assert checkpoints.newest_intact() == (5, [])
        assert [entry.name for entry in folder.iterdir()] == ["5"]
        values.append(float(checkpoints.load(5).tensors["model/w"][0, 0]))
    assert set(values) == {1.0, 2.0}
    assert values == sorted(values)


def test_a_replacement_that_fails_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(5, state(1.0))
    rename = Path.rename

    def refused(path: Path, target: Path) -> Path:
        if target.name == "5" and "replaced" not in path.name:
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refused)
        with pytest.raises(StorageError, match="Input/output error"):
            checkpoints.save(5, state(2.0))
    assert checkpoints.newest_intact() == (5, [])
    assert [entry.name for entry in tmp_path.iterdir()] == ["5"]


@pytest.mark.parametrize("at_start", [True, False], ids=["at the start", "by the next save"])
def test_what_a_kill_left_behind_is_cleared_away(tmp_path: Path, at_start: bool) -> None:
    (tmp_path / ".7.partial").mkdir()
    (tmp_path / ".7.partial" / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / ".tags.json.77.partial").write_bytes(b"{")
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.steps() == []
    if at_start:
        checkpoints.take_over()
        assert list(tmp_path.iterdir()) == []
    checkpoints.save(9, state(9.0))
    assert {"9"} <= {entry.name for entry in tmp_path.iterdir()} <= {"9", ".tags.json.77.partial"}


def test_none_at_all(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "nowhere").newest_intact() == (None, [])


def test_a_save_that_fails_leaves_nothing_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(StorageError, match="cannot be written"):
        Checkpoints(tmp_path / "checkpoints").save(1, state(1.0))
    assert (tmp_path / "checkpoints").read_text() == "in the way"


def test_a_state_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state(1.0))
    with pytest.raises(TypeError):
        checkpoints.save(1, StoredState({}, {"not json": object()}))
    assert checkpoints.newest_intact() == (1, [])
    assert [entry.name for entry in tmp_path.iterdir()] == ["1"]


KILLS = 10


def go_on_saving(folder: Path, by_thread: bool, told: Connection) -> None:
    """In a process of its own, until it is killed."""
    torch.set_num_threads(1)
    checkpoints = Checkpoints(folder, keep=2)
    for step in range(max(checkpoints.steps(), default=0) + 1, 10**6):
        content = StoredState({"w": torch.full((2000, 100), float(step))}, {"step": step})
        if by_thread:
            assert checkpoints.save_soon(step, content)
            checkpoints.wait()
            assert checkpoints.failure() is None
        else:
            checkpoints.save(step, content)
        told.send(step)


@pytest.mark.xdist_group("ranks")
def test_killed_while_saving_leaves_whole_checkpoints_only(tmp_path: Path) -> None:
    """Kills at many moments of a save, by the thread and without: what has a checkpoint's name is always intact."""
    moments = random.Random(0)  # noqa: S311
    for attempt in range(KILLS):
        told, tell = Pipe(duplex=False)
        process = start(go_on_saving, tmp_path, attempt % 2 == 0, tell)
        tell.close()
        last_told = told.recv()
        time.sleep(moments.uniform(0, 0.03))  # a save takes some 10 ms
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        with told, suppress(EOFError):
            while True:
                last_told = told.recv()
        checkpoints = Checkpoints(tmp_path, keep=2)
        assert [checkpoints.check(step) for step in checkpoints.steps()] == [None] * len(checkpoints.steps())
        newest, passed_over = checkpoints.newest_intact()
        assert not passed_over
        assert newest is not None
        assert newest >= last_told
        loaded = checkpoints.load(newest)
        assert loaded.plain == {"step": newest}
        assert torch.equal(loaded.tensors["w"], torch.full((2000, 100), float(newest)))


class Exploit:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("code from a checkpoint ran",)


def test_a_table_of_contents_that_would_run_code_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state(1.0))
    (tmp_path / "1" / ".metadata").write_bytes(pickle.dumps(Exploit()))
    is_refused = partial(
        pytest.raises, SourceError, match=r"not a checkpoint that Sealegs wrote \(it names builtins.print\)"
    )
    with is_refused():
        checkpoints.load(1)
    with is_refused():
        checkpoint_files.read_tensors(tmp_path / "1", {"model/w": torch.empty(40, 5)}, None)
    assert capsys.readouterr().out == ""


def test_digests_are_of_every_file(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(1, state(1.0))
    digests = json.loads((tmp_path / "1" / "digests.json").read_text())
    written = {str(file.relative_to(tmp_path / "1")) for file in files_of(tmp_path / "1")}
    assert digests.keys() == written - {"digests.json"}


# By a thread.


@contextmanager
def held_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The thread waits with its writing until this is over. The event says that it has come so far."""
    has_come, may_go_on = threading.Event(), threading.Event()
    write = checkpoint_files.write_tensors

    def write_later(*arguments: Any) -> None:
        has_come.set()
        may_go_on.wait(60)
        write(*arguments)

    monkeypatch.setattr(checkpoint_files, "write_tensors", write_later)
    try:
        yield has_come
    finally:
        may_go_on.set()


def test_a_thread_saves_the_state_of_the_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path)
    weights, position = torch.ones(5), {"next": [1]}
    with held_up(monkeypatch):
        assert checkpoints.save_soon(3, StoredState({"model/w": weights}, {"data": position}))
        checkpoints.before_update()
        weights += 1
        position["next"].append(2)
        assert checkpoints.steps() == []
        assert checkpoints.written() == []
    checkpoints.wait()
    assert checkpoints.failure() is None
    ((step, seconds),) = checkpoints.written()
    assert (step, checkpoints.written()) == (3, [])
    assert seconds > 0
    loaded = checkpoints.load(3)
    assert loaded.tensors["model/w"].tolist() == [1.0] * 5
    assert loaded.plain == {"data": {"next": [1]}}


def test_one_is_written_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path)
    with held_up(monkeypatch):
        assert checkpoints.save_soon(1, state(1.0))
        assert not checkpoints.save_soon(2, state(2.0))
    checkpoints.wait()
    assert checkpoints.save_soon(2, state(2.0))
    checkpoints.wait()
    assert checkpoints.steps() == [1, 2]


def test_the_copies_take_the_same_memory_every_time(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    places = []
    for step in (1, 2):
        checkpoints.save_soon(step, state(float(step)))
        checkpoints.wait()
        places.append([room.data_ptr() for room in checkpoints._staging._rooms.values()])
    assert places[0] == places[1]
    assert checkpoints.held_bytes == sum(tensor.nbytes for tensor in state(1.0).tensors.values())
    checkpoints.save_soon(3, StoredState({"model/w": torch.ones(7)}, {}))  # other shapes, fewer tensors
    checkpoints.wait()
    assert checkpoints.load(3).tensors["model/w"].tolist() == [1.0] * 7
    assert checkpoints.held_bytes == 28


def test_a_synchronous_save_waits_for_the_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    others = threading.Event()
    write = checkpoint_files.write_tensors

    def write_noting(folder: Path, *arguments: Any) -> None:
        number = folder.name.split(".")[1]
        order.append(f"{number} begins")
        others.set() if number == "2" else others.wait(0.3)  # long enough for one that does not wait to come
        write(folder, *arguments)
        order.append(f"{number} ends")

    monkeypatch.setattr(checkpoint_files, "write_tensors", write_noting)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save_soon(1, state(1.0))
    checkpoints.save(2, state(2.0))
    assert order == ["1 begins", "1 ends", "2 begins", "2 ends"]


def test_a_full_disk_costs_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    """A limit on the size of files, which the system refuses in the same way."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save_soon(1, state(1.0))
    checkpoints.wait()
    large = StoredState({"model/w": torch.ones(1_000_000)}, {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        assert checkpoints.save_soon(2, large)
        checkpoints.wait()
        with pytest.raises(StorageError, match="raise the file size limit"):
            checkpoints.save(2, large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    failure = checkpoints.failure()
    assert failure is not None
    assert failure.startswith(f"checkpoint 2: {tmp_path}/2: cannot be written (File too large): raise the file size")
    assert checkpoints.failure() is None, "it is said once"
    assert [entry.name for entry in tmp_path.iterdir()] == ["1"]
    assert checkpoints.save_soon(2, large), "the next one is tried"
    checkpoints.wait()
    assert checkpoints.newest_intact() == (2, [])


def test_a_state_that_a_thread_cannot_write_is_trouble_too(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.save_soon(1, StoredState({}, {"not json": object()}))
    checkpoints.wait()
    assert checkpoints.failure() == "checkpoint 1: Object of type object is not JSON serializable"
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    """It was read whole a moment ago, when its digests were compared."""
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(1, state(1.0))
    with DiskLayer(tmp_path) as disk:
        checkpoints.load(1)
        calls = len(disk.calls)
        for number in range(1, calls + 1):
            disk.fault = Fault("error", len(disk.calls) + number)
            with pytest.raises(SourceError, match="Input/output error"):
                checkpoints.load(1)
        disk.strike("error")
        with pytest.raises(SourceError, match="checkpoints: cannot be listed"):
            checkpoints.steps()
    assert calls > 10


def test_a_folder_that_is_not_the_runs_any_more_is_left_alone(tmp_path: Path) -> None:
    lost = ""
    checkpoints = Checkpoints(tmp_path / "a", lost=lambda: lost)
    checkpoints.save(1, state(1.0))
    lost = "a: moved away"
    with pytest.raises(StorageError, match="a: moved away"):
        checkpoints.save(2, state(2.0))
    assert checkpoints.save_soon(2, state(2.0))
    checkpoints.wait()
    checkpoints.tag(1, "healthy")
    assert (checkpoints.failure(), checkpoints.failed_steps()) == ("checkpoint 2: a: moved away", [2])
    assert checkpoints.newest_intact() == (None, [])
    lost = ""
    assert checkpoints.newest_intact() == (1, [])
    assert checkpoints.tags() == {1: "candidate"}


# Tags.


def saved(folder: Path, tags: dict[int, Tag | None]) -> Checkpoints:
    checkpoints = Checkpoints(folder, keep=99)
    for step, tag in tags.items():
        checkpoints.save(step, state(step))
        if tag is not None:
            checkpoints.tag(step, tag, f"because of {step}")
    return Checkpoints(folder, keep=99)  # another process


def test_a_checkpoint_is_a_candidate_until_it_is_tagged(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, {1: "healthy", 2: None, 3: "suspect", 4: "healthy"})
    assert checkpoints.tags() == {1: "healthy", 2: "candidate", 3: "suspect", 4: "healthy"}
    checkpoints.tag(4, "suspect")
    assert checkpoints.tags()[4] == "suspect"
    checkpoints.tag(77, "healthy")  # was rotated away
    assert 77 not in checkpoints.tags()


def test_a_resume_takes_the_newest_that_is_not_suspect(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, {1: "healthy", 2: None, 3: None, 4: "suspect"})
    assert checkpoints.newest_intact() == (3, [Damage(4, "suspect: because of 4")])
    DAMAGES["missing"](tmp_path / "3" / "plain.json")
    step, passed_over = checkpoints.newest_intact()
    assert step == 2
    assert passed_over[1] == Damage(3, "plain.json is missing")


def test_a_restart_takes_the_newest_healthy_one_before_a_step(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, {10: "healthy", 20: "healthy", 30: "healthy", 40: None})
    assert checkpoints.newest_healthy() == (30, [Damage(40, "not known to be healthy")])
    assert checkpoints.newest_healthy(before=30) == (30, [])
    assert checkpoints.newest_healthy(before=29) == (20, [])
    assert checkpoints.newest_healthy(before=9) == (None, [])
    DAMAGES["flipped"](tmp_path / "20" / "plain.json")
    assert checkpoints.newest_healthy(before=29) == (10, [Damage(20, "plain.json is not what was written")])


def test_a_tag_belongs_to_what_was_tagged(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, {1: None, 2: "suspect"})
    assert checkpoints.save(2, state(2.5))
    assert checkpoints.tags() == {1: "candidate", 2: "candidate"}


@pytest.mark.parametrize("by_thread", [False, True])
def test_a_healthy_one_is_never_replaced_while_it_is_intact(tmp_path: Path, by_thread: bool) -> None:
    checkpoints = saved(tmp_path, {1: "healthy"})

    def is_written(value: float) -> bool:
        if not by_thread:
            return checkpoints.save(1, state(value))
        assert checkpoints.save_soon(1, state(value))
        checkpoints.wait()
        assert checkpoints.failure() is None
        return (checkpoints.kept(), [each.step for each in checkpoints.written()]) == ([], [1])

    assert not is_written(1.5)
    assert checkpoints.tags() == {1: "healthy"}
    assert checkpoints.load(1).tensors["model/w"][0, 0] == 1.0
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["1", "tags.json"]
    DAMAGES["flipped"](tmp_path / "1" / "plain.json")
    assert is_written(1.5)
    assert checkpoints.load(1).tensors["model/w"][0, 0] == 1.5


def test_what_lies_after_a_rollback_is_suspect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = saved(tmp_path, {1: "healthy", 2: None, 3: "healthy"})
    with held_up(monkeypatch):
        checkpoints.save_soon(4, state(4.0))
        checkpoints.discard_after(2)
    checkpoints.wait()
    assert checkpoints.tags() == {1: "healthy", 2: "candidate", 3: "suspect", 4: "suspect"}
    assert checkpoints.newest_intact() == (
        2,
        [Damage(step, "suspect: the run went back to step 2") for step in (4, 3)],
    )
    checkpoints.save(3, state(3.5))
    assert checkpoints.newest_intact()[0] == 3


def test_tags_of_a_save_that_failed_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = saved(tmp_path, {1: None})
    with held_up(monkeypatch) as has_come:
        checkpoints.save_soon(2, state(2.0))
        checkpoints.tag(2, "healthy")
        assert has_come.wait(60)
        next(tmp_path.glob(".2.*.partial")).rename(tmp_path / ".gone.partial")  # from under its hands
    checkpoints.wait()
    assert "checkpoint 2: " in (checkpoints.failure() or "")
    checkpoints.save_soon(2, state(2.0))
    checkpoints.wait()
    assert checkpoints.tags() == {1: "candidate", 2: "candidate"}


def test_tags_that_cannot_be_read_are_not_guessed(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, {1: "suspect"})
    (tmp_path / "tags.json").write_text("{")
    with pytest.raises(SourceError, match=r"tags.json: cannot be read .*; delete it"):
        checkpoints.newest_intact()


def test_a_name_may_stand_for_another_tensor_on_each_rank(tmp_path: Path) -> None:
    """Real ranks are in tests/ranks/test_matrix.py."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.holders = lambda tensors: {"model/w": 0}
    tensors = {"model/w": torch.ones(3), "model/shared": torch.zeros(2)}
    own = {"data": {"next": 4}, "rng": None}
    checkpoints.save(4, StoredState(tensors, {**PLAIN, "guard": {"number": 4}}, own))
    assert checkpoint_files.tensors_in(tmp_path / "4").keys() == {"@0/model/w", "model/shared"}
    found = checkpoints.load(4)
    assert {name: tensor.tolist() for name, tensor in found.tensors.items()} == {
        "model/w": [1.0, 1.0, 1.0],
        "model/shared": [0.0, 0.0],
    }
    assert (found.plain, found.own) == ({**PLAIN, "guard": {"number": 4}}, own)


@pytest.mark.parametrize(
    ("changed", "error", "said"),
    [
        (
            {"parts": 4},
            RanksChanged,
            "it has a part for each of 4 ranks, which hold different tensors, and there are 1",
        ),
        ({"parts": "four"}, SourceError, "parts is no number"),
    ],
)
def test_parts_of_other_ranks_are_refused(
    changed: dict[str, Any], error: type[Exception], said: str, tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.holders = lambda tensors: {"model/w": 0}
    checkpoints.save(4, StoredState({"model/w": torch.ones(3)}, PLAIN, {"data": None, "rng": None}))
    path = tmp_path / "4" / "plain.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(error, match=said):
        checkpoints.load(4)


def test_a_rank_whose_part_is_damaged_is_told_so(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.holders = lambda tensors: {"model/w": 0}
    checkpoints.save(4, StoredState({"model/w": torch.ones(3)}, PLAIN, {"data": None, "rng": None}))
    path = tmp_path / "4" / "plain" / "0.json"
    sound = json.loads(path.read_text())
    for broken in ({"holders": [1]}, {"holders": {"model/w": "x"}}, {"holders": {"model/w": 7}}, {"parts": None}):
        path.write_text(json.dumps(sound | broken))
        with pytest.raises(SourceError, match="damaged"):
            checkpoints.load(4)
