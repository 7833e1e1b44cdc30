"""A sample of the drills on a loop that is not the lab's: what was put in is what the replay names."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest

from bench import other_loop
from sealegs.capsule.read import open_capsule
from sealegs.lab.branches import fork
from sealegs.replay.experiment import Experiment
from sealegs.replay.tested_causes import judge_causes

pytestmark = [
    pytest.mark.xdist_group("other loop"),  # some share a beginning
    pytest.mark.filterwarnings("ignore::sealegs.errors.RunEndedBadly"),  # they are to
]

Train = Callable[..., None]
LEAD = 50
"""Steps between the resume of a beginning and what goes wrong, as many as between two snapshots."""


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """``other_loop.train``, in which runs that differ only in what goes wrong with their data or from outside have
    their steps before that in common."""

    @cache
    def beginning(at: int, seed: int) -> Path:
        folder = tmp_path_factory.mktemp("beginning") / "a"
        healthy = other_loop.parsed("" if at == other_loop.AT else "hard-batch")  # so many batches are made
        other_loop.train(healthy, seed, folder, until=at - LEAD)
        return folder

    def trained(wrong: other_loop.Wrong, seed: int, folder: Path, faults: Sequence[str] = ()) -> None:
        if is_shared := wrong.cause in ("", "hard-batch", "bad-data-batch"):
            fork(beginning(wrong.at, seed), folder)
        other_loop.train(wrong, seed, folder, faults, resume=is_shared)

    return trained


CAUSES = (
    "hard-batch",
    "hard-batch:strength=2.4",  # ten times as dear as usual, and right
    "bad-data-batch:strength=2.5",
    "optimizer-reset",
    "stale-beta2",
    "zero-variance-norm",
    "fp16-overflow",
    "log-of-zero",
)


LIKE_OTHERS = ("hard-batch:strength=2.4", "stale-beta2", "log-of-zero")


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=[pytest.mark.long] if what in LIKE_OTHERS else []) for what in CAUSES]
)
def test_the_cause_is_the_one_that_was_put_in(what: str, train: Train, tmp_path: Path) -> None:
    wrong = other_loop.parsed(what)
    train(wrong, 0, tmp_path / "a")
    capsule = open_capsule(tmp_path / "a" / "incidents" / "1")
    found = judge_causes(Experiment(capsule, other_loop.build(wrong, 0)))
    assert found.cause == wrong.cause, found.because


@pytest.mark.parametrize("what", ["hard-batch:strength=3,steps=12", "bad-data-batch:steps=12"])
def test_in_a_young_run_it_is_found_after_a_row_of_batches_that_were_trained_on(
    what: str, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(other_loop, "AT_GROWN", 400)
    wrong = other_loop.parsed(what)
    train(wrong, 802, tmp_path / "a")
    capsule = open_capsule(tmp_path / "a" / "incidents" / "1")
    assert capsule.description.opened == 404
    assert all(row["applied"] for row in capsule.rows)
    found = judge_causes(Experiment(capsule, other_loop.build(wrong, 802)))
    assert found.cause == wrong.cause, found.because


@pytest.mark.parametrize(
    ("fault", "cause", "told"),
    [
        ("activation-scale:factor=30,module=1", "kernel-fault", "the step after it is as the rerun has it"),
        ("weight-scale:factor=12,tensor=1.weight", "corrupt-weight", "changed the weights or what is computed"),
    ],
)
def test_what_is_not_in_the_record_is_told_apart(
    fault: str, cause: str, told: str, train: Train, tmp_path: Path
) -> None:
    healthy = other_loop.parsed("")
    train(healthy, 0, tmp_path / "a", [f"{fault}@{other_loop.AT}"])
    capsule = open_capsule(tmp_path / "a" / "incidents" / "1")
    found = judge_causes(Experiment(capsule, other_loop.build(healthy, 0)))
    assert found.cause == cause, found.because
    assert told in found.because


def test_where_nothing_is_wrong_there_is_nothing_to_explain(train: Train, tmp_path: Path) -> None:
    train(other_loop.parsed(""), 0, tmp_path / "a")
    assert not (tmp_path / "a" / "incidents").exists()
