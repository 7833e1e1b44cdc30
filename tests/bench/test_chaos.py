"""A few kills, and proof that the bench would see what must not happen: one that finds nothing proves nothing else."""

import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tests.forked  # noqa: F401 -- one process to fork from serves all

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench.chaos import Campaign
from bench.kills.chain import Chain, _begun_elsewhere
from bench.kills.inspection import Left, Problem, Written, differing, inspect
from bench.kills.processes import Life
from bench.kills.report import found_in, kills_of, report
from bench.kills.training import KINDS, Kind, Training

KIND = Kind("standard", "one NaN", 1)


@pytest.mark.long
@pytest.mark.xdist_group("jobs")
def test_a_run_that_is_killed_again_and_again_ends_as_one_that_was_not(tmp_path: Path) -> None:
    campaign = Campaign([KIND], seed=1, place=tmp_path)
    campaign.run(kills=6, jobs=1)
    (chain,) = campaign.chains
    assert chain.problems == []
    assert chain.kills.total() >= 6
    assert chain.is_compared
    assert [path.name for path in tmp_path.iterdir()] == ["untouched-0"]
    assert f"| {KIND} | 1 | {chain.kills.total()} | {chain.lives} | 1 of 1 |" in report([chain])


def test_there_is_every_kind_of_run_and_most_are_compared() -> None:
    assert len(KINDS) == 20
    assert {kind.ranks for kind in KINDS} == {1, 2}
    assert sum(kind.is_repeatable for kind in KINDS) == 10


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Left]:
    """A run of thirty steps whose first checkpoints are proven."""
    run = tmp_path_factory.mktemp("chaos") / "run"
    training = Training(Kind("observe", "none", 1), run, 0)
    with training.guard as guard:
        for batch in training.batches():
            training.step(batch, strikes=False)
            assert guard.loop.checkpoints is not None
            guard.loop.checkpoints.wait()
            if guard.number == 30:
                break
    left = inspect(run, Left(), list(range(30)), 0)
    assert left.problems == []
    assert left.tags == {10: "healthy", 20: "candidate", 30: "candidate"}
    return run, left


def lines_of(run: Path) -> list[bytes]:
    return (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)


def drop_row(run: Path) -> None:
    (run / "metrics.jsonl").write_bytes(b"".join(lines_of(run)[:-1]))


def rewrite_row(run: Path) -> None:
    (run / "metrics.jsonl").write_bytes(
        b"".join([lines_of(run)[0].replace(b'"step":0', b'"step":7'), *lines_of(run)[1:]])
    )


def flip(run: Path) -> None:
    path = run / "checkpoints" / "20" / "plain.json"
    path.write_bytes(b" " + path.read_bytes())


def forget_tag(run: Path) -> None:
    (run / "checkpoints" / "tags.json").write_text("{}")


def suspect(run: Path) -> None:
    path = run / "checkpoints" / "tags.json"
    path.write_text(path.read_text().replace("healthy", "suspect"))


DAMAGES: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "a row is lost": (drop_row, "rows", "what was in metrics.jsonl is not in it any more"),
    "a row is another": (rewrite_row, "rows", "what was in metrics.jsonl is not in it any more"),
    "a checkpoint is half there": (flip, "checkpoint", "20 has its name and is not whole"),
    "a proven one is a candidate": (forget_tag, "checkpoint", "10 was proven, and is candidate now"),
    "a proven one is suspect": (suspect, "checkpoint", "10 was proven, and is suspect now"),
    "a proven one is gone": (
        lambda run: shutil.rmtree(run / "checkpoints" / "10"), "checkpoint", "10 was proven, and is gone"
    ),
    "no manifest": (lambda run: (run / "manifest.json").unlink(), "folder", "manifest.json: "),
    "no folder": (shutil.rmtree, "folder", "it is gone"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_a_kill_must_not_do_is_seen(trained: tuple[Path, Left], tmp_path: Path, damage: str) -> None:
    change, kind, text = DAMAGES[damage]
    run = tmp_path / "run"
    shutil.copytree(trained[0], run)
    change(run)
    found = inspect(run, trained[1], [], 0).problems
    assert [problem.kind for problem in found if text in problem.text] == [kind]


def test_a_step_that_had_ended_without_a_row_is_seen(trained: tuple[Path, Left]) -> None:
    (found,) = inspect(trained[0], Left(), [*range(30), 30], 0).problems
    assert found == Problem("rows", "steps [30] had ended and have no row")


def test_a_proven_one_may_go_where_the_run_went_back_behind_it(trained: tuple[Path, Left], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained[0], run)
    suspect(run)
    with (run / "events.jsonl").open("a") as events:
        events.write(json.dumps({"time": 1.0, "step": 30, "kind": "counted-back", "to_step": 5}) + "\n")
    left = inspect(run, trained[1], [], 0)
    assert left.problems == []
    assert left.has_gone_back


def test_a_row_that_is_not_bit_for_bit_the_same_is_seen(trained: tuple[Path, Left], tmp_path: Path) -> None:
    shutil.copytree(trained[0], run := tmp_path / "run")
    assert list(differing(run, trained[0], 1)) == []
    row = json.loads(lines_of(run)[-1])
    with (run / "metrics.jsonl").open("a") as rows:
        rows.write(json.dumps({**row, "loss": row["loss"] * (1 + 1e-15), "time": 7.0}) + "\n")
    assert list(differing(run, trained[0], 1)) == ["step 29: ['loss']"]


KNOWN = {"metrics.jsonl": Written(1, hashlib.sha256(b"x").hexdigest())}
STARTS: dict[str, tuple[dict[int, str], tuple[int | None, str, dict[str, str]] | None, bool]] = {
    "at the newest proven one": ({0: "healthy", 10: "healthy", 20: "candidate"}, (10, "", {}), True),
    "at one that is not proven": ({0: "healthy", 10: "healthy", 20: "candidate"}, (20, "", {}), False),
    "at 0": ({0: "healthy", 10: "healthy"}, (0, "because", {}), False),
    "at 0 without a word": ({0: "healthy", 10: "candidate"}, (0, "", {}), False),
    "at the newest, with a word": ({0: "healthy", 10: "candidate"}, (10, "because", {}), True),
    "from scratch": ({10: "healthy"}, (None, "", {}), False),
    "as a new run": ({}, None, False),
    "where there is nothing else": ({}, (None, "", {}), True),
}


@pytest.mark.parametrize("start", STARTS)
def test_a_process_that_begins_elsewhere_is_seen(start: str) -> None:
    tags, began_with, is_right = STARTS[start]
    problems = list(_begun_elsewhere(Life(is_born=True, began_with=began_with), Left(KNOWN, tags)))
    assert [problem.kind for problem in problems] == ([] if is_right else ["start"])


def test_the_report_counts_what_was_found() -> None:
    chain = Chain(0, KIND, problems=[("life 3", Problem("rows", "gone")), ("the end", Problem("end", "another"))])
    chain.kills["saving", "SIGKILL"] += 2
    assert kills_of([chain, chain]).total() == 4
    assert found_in([chain])["rows"] == 1
    assert "| saving | 2 | 0 | 0 | 2 |" in report([chain])
    assert "| rows lost | 1 |" in report([chain])
