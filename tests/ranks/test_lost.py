"""A rank that is killed, stands still or is late: the others end with a sentence that names it, and none hangs."""

import json
import socket
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.forked import start
from tests.ranks.launch import _on_rank

import sealegs

pytestmark = pytest.mark.xdist_group("jobs")  # all jobs are under way at once, and mostly wait

PATIENCE_S = 120.0
"""A hang would be of half an hour, torch's own timeout, or have no end."""


class Case(NamedTuple):
    """How a rank is lost."""

    how: str
    where: str
    victim: int
    world: int = 2
    is_held_by_rank_0: bool = False
    """Whether the store in which the ranks found each other is in the process of rank 0, as it is without torchrun."""


CASES = {
    "a rank is killed": Case("kill", "step", 1, world=3),
    "a rank stands still": Case("stop", "step", 2, world=3),
    "the rank with the store is killed": Case("kill", "step", 0, is_held_by_rank_0=True),
    "the rank with the store stands still": Case("stop", "step", 0, is_held_by_rank_0=True),
    "a rank stands still in a checkpoint": Case("stop", "checkpoint", 1),
    "a rank stands still at the end": Case("stop", "end", 1),
    "a rank writes too slowly": Case("late", "checkpoint", 1),
    "the folder cannot be written": Case("read-only", "folder", 0),
}
LOST = {name: case for name, case in CASES.items() if case.how in ("kill", "stop")}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[int, dict[str, Any]]]]:
    """How the ranks that are left ended, in each case."""
    jobs: dict[str, Path] = {}
    processes = []
    for name, case in CASES.items():
        jobs[name] = out = tmp_path_factory.mktemp("lost")
        (out / "file").write_text("stands where a folder should be")
        store = f"tcp://127.0.0.1:{free_port()}" if case.is_held_by_rank_0 else f"file://{out}/store"
        words = (case.how, case.where, str(case.victim), store, str(out))
        program = str(Path(__file__).with_name("lost.py"))
        processes += [start(_on_rank, rank, case.world, program, *words) for rank in range(case.world)]
    left = {
        name: [rank for rank in range(case.world) if name not in LOST or rank != case.victim]
        for name, case in CASES.items()
    }
    deadline = time.monotonic() + PATIENCE_S
    try:
        while not all((jobs[name] / f"{rank}.json").exists() for name in CASES for rank in left[name]):
            assert time.monotonic() < deadline, [
                name for name in CASES if len([*jobs[name].glob("*.json")]) < len(left[name])
            ]
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()  # also those that stand still
            process.join()
    return {
        name: (jobs[name], {rank: json.loads((jobs[name] / f"{rank}.json").read_text()) for rank in left[name]})
        for name in CASES
    }


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


Ended = dict[str, tuple[Path, dict[int, dict[str, Any]]]]


@pytest.mark.parametrize("name", LOST)
def test_a_lost_rank_is_named_by_all_others(name: str, ended: Ended) -> None:
    case = LOST[name]
    others = set(range(case.world)) - {case.victim}
    assert len(ended[name][1]) == len(others)
    for rank, end in ended[name][1].items():
        assert rank in others
        assert end["kind"] == "RankMissing", end
        assert f"rank {case.victim}" in end["error"]
        assert not any(f"rank {other} " in end["error"] for other in others)
        assert "look at the log of that rank, and restart from a checkpoint" in end["error"]
        assert "\n" not in end["error"]


@pytest.mark.parametrize("name", [name for name, case in LOST.items() if case.victim != 0])
def test_the_record_says_which_rank_was_lost(name: str, ended: Ended) -> None:
    run = sealegs.open_run(ended[name][0] / "run")
    (end,) = [event for event in run.events if event.kind == "end"]
    assert end.detail["reason"] == "failed"
    assert f"rank {LOST[name].victim} did not come" in end.detail["error"]


def test_the_record_of_a_rank_that_was_killed_opens(ended: Ended) -> None:
    run = sealegs.open_run(ended["the rank with the store is killed"][0] / "run")
    assert run.steps.tolist() == [0, 1, 2]


def test_a_rank_that_writes_too_slowly_costs_a_checkpoint_and_not_the_run(ended: Ended) -> None:
    folder, ends = ended["a rank writes too slowly"]
    assert [(end["error"], end["steps"]) for end in ends.values()] == [(None, 40)] * 2
    failed = [event for event in sealegs.open_run(folder / "run").events if event.kind == "checkpoint-failed"]
    assert len(failed) == 1
    assert "checkpoint 2: the ranks could not agree within 2 s: rank 1 did not come" in failed[0].detail["reason"]
    assert any((folder / "run" / "checkpoints").glob("[0-9]*")), "the next ones are written again"


def test_a_folder_that_one_rank_cannot_write_is_told_by_all(ended: Ended) -> None:
    _, ends = ended["the folder cannot be written"]
    assert {end["kind"] for end in ends.values()} == {"StorageError"}
    assert "cannot be written" in ends[0]["error"]
    assert ends[1]["error"].startswith("rank 0 could not do its part: StorageError: ")
