"""The fault layer under the file system: that it does what it says, and what becomes of run folders under it."""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from itertools import cycle
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from bench.disk.layer import KILLED, DiskLayer, Fault, Kind, is_hit
from bench.disk.scenarios import RUN, SCENARIOS
from bench.disk.soundness import Outcome, Reference, after_fault, once_it_is_well
from bench.disk_faults import FAULTS, Result, Stage, report
from tests.forked import start

OBSERVE = SCENARIOS["observe"]


# The layer.


def copied(folder: Path) -> None:
    """Six calls that write, in each of the ways in which Python does."""
    (folder / "a").mkdir()
    with (folder / "a" / "file").open("wb") as file:
        file.write(b"0123456789")
        file.flush()
        os.fsync(file.fileno())
    (folder / "a").rename(folder / "b")


CALLS = ["mkdir", "create", "write", "fsync", "close", "rename"]


def test_calls_are_counted_in_the_folder_and_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "elsewhere").mkdir()
    with DiskLayer(tmp_path / "disk") as layer:
        copied(tmp_path / "disk")
        copied(tmp_path / "elsewhere")
        assert (tmp_path / "disk" / "b" / "file").read_bytes() == b"0123456789"
        shutil.rmtree(tmp_path / "disk" / "b")
    kinds = [call.kind for call in layer.calls]
    assert kinds[:6] == CALLS
    assert [call.path for call in layer.calls[:6]] == ["a", *["a/file"] * 4, "b"]
    assert {"open to read", "read", "list", "unlink", "rmdir"} <= set(kinds)
    count = len(layer.calls)
    copied(tmp_path / "disk")
    assert len(layer.calls) == count, "it is closed"


@pytest.mark.parametrize("at", range(1, 7), ids=CALLS)
@pytest.mark.parametrize("kind", ["error", "torn", "full", "read-only"])
def test_the_call_fails_as_a_disk_would_fail(tmp_path: Path, kind: Kind, at: int) -> None:
    number = {"full": errno.ENOSPC, "read-only": errno.EROFS}.get(kind, errno.EIO)
    is_spared = not any(is_hit(kind, call) for call in CALLS[at - 1 :])
    with DiskLayer(tmp_path, Fault(kind, at)):
        try:
            copied(tmp_path)
        except OSError as error:
            assert error.errno == number  # noqa: PT017 -- some are spared
        else:
            assert is_spared
    done = [path.name for path in sorted(tmp_path.rglob("*"))]
    if kind == "torn":
        assert done == [["a"], ["a", "file"], ["a", "file"], ["a", "file"], ["a", "file"], ["b", "file"]][at - 1]
    if kind == "torn" and CALLS[at - 1] == "write":
        assert (tmp_path / "a" / "file").read_bytes().startswith(b"01234")


def test_a_full_disk_takes_half_of_a_row_and_stays_full(tmp_path: Path) -> None:
    with DiskLayer(tmp_path) as layer:
        handle = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
        layer.strike("full")
        assert os.write(handle, b"0123456789") == 5
        for _ in range(2):
            with pytest.raises(OSError, match="No space left"):
                os.write(handle, b"0123456789")
        os.close(handle)
    assert (tmp_path / "file").read_bytes() == b"01234"


def die(folder: Path) -> None:
    """In the third call."""
    with DiskLayer(folder, Fault("death", 3)):
        copied(folder)


@pytest.mark.xdist_group("jobs")
def test_a_process_that_dies_leaves_half_of_what_it_was_writing(tmp_path: Path) -> None:
    child = start(die, tmp_path)
    child.join()
    assert child.exitcode == KILLED
    assert (tmp_path / "a" / "file").read_bytes() == b"01234"


# What a run folder is after it.


HIT = ("create", "write", "fsync", "close", "rename", "mkdir", "link", "read", "rmdir")


def some(stage: Stage) -> Iterator[Fault]:
    """A case of some kinds of calls, with one fault after the other."""
    kinds = cycle(FAULTS)
    calls = [call.kind for call in stage.calls]
    for call in HIT:
        places = [number for number, kind in enumerate(calls, 1) if kind == call]
        yield Fault(next(kind for kind in kinds if is_hit(kind, call)), places[len(places) // 2])


def run_some(pipe: Connection, place: Path) -> None:
    """In a process that has done nothing yet, since others are forked from it."""
    stage = Stage(OBSERVE, place)
    pipe.send([stage.case(fault, place / "case") for fault in some(stage)])


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Result], Path]:
    here, there = Pipe()
    place = tmp_path_factory.mktemp("disks") / "observe"
    child = start(run_some, there, place, has_children=True)
    there.close()
    results: list[Result] = here.recv()
    child.join()
    return results, place / "whole" / "disk"


@pytest.mark.xdist_group("jobs")
def test_a_run_folder_is_sound_after_a_fault_of_every_kind(cases: tuple[list[Result], Path]) -> None:
    """Every fault at every call of every scenario takes hours: bench/disk_faults.py."""
    results, _ = cases
    assert [(each.words, each.call, each.complaints) for each in results if each.complaints] == []
    assert {each.fault for each in results} == {*FAULTS}
    assert {each.status for each in results} == {0, 2, KILLED}
    assert len(results) == len(HIT)
    assert f"| all | all | {len(results)} |" in report(results)


@pytest.mark.xdist_group("jobs")
def test_a_folder_that_is_not_sound_is_complained_of(cases: tuple[list[Result], Path], tmp_path: Path) -> None:
    """The same looks, at a whole run that somebody has damaged."""
    _, whole = cases
    reference = Reference.of(whole)
    steps = sorted(reference.rows)
    done, again = Outcome(0, steps), Outcome(0, began=0)
    assert after_fault(OBSERVE, whole, done, reference) == []
    assert once_it_is_well(OBSERVE, whole, done, again, reference) == []

    folder = shutil.copytree(whole, tmp_path / "disk")
    run = folder / RUN
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] != 5))
    shutil.rmtree(run / "checkpoints" / str(reference.last))
    (run / "incidents" / "1" / "capsule" / "capsule.json").unlink()
    with (run / "incidents" / "1" / "capsule" / "state" / "__0_0.distcp").open("ab") as file:
        file.write(b"more")
    (run / "recovery.json").write_text("{")
    (run / ".recovery.json.77.partial").write_text("{")
    found = "; ".join(after_fault(OBSERVE, folder, done, reference))
    for complaint in (
        "rows lost: [5]",
        "recovery.json is torn",
        "state: __0_0.distcp is not what was written",
        f"status 0 without a checkpoint of step {reference.last}",
        "status 0 without incidents/1/capsule/capsule.json",
    ):
        assert complaint in found
    later = "; ".join(once_it_is_well(OBSERVE, folder, done, again, reference))
    assert "left over: a/.recovery.json.77.partial" in later
    assert "no incidents/1/capsule/capsule.json" in later
    assert "other weights in the end" in later
    assert (
        "at step 0, and there was a checkpoint of step 8"
        in once_it_is_well(OBSERVE, folder, done, again, reference, 8)[0]
    )
    loud = Outcome(1, stderr="Traceback (most recent call last):\nOSError: no")
    assert after_fault(OBSERVE, folder, loud, reference)[0] == "a traceback: OSError: no"
