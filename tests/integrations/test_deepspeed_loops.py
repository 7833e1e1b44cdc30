"""DeepSpeed where somebody else has the loop: Accelerate, and a Hugging Face Trainer, on two ranks."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.ranks.launch import launch

import sealegs

pytest.importorskip("deepspeed", reason="deepspeed is not installed: `make test-long` runs this in its own environment")
pytestmark = [pytest.mark.xdist_group("deepspeed"), pytest.mark.trains]

NAN, SPIKE, SAVED, STEPS = 12, 20, 10, 26
"""As in deepspeed_loops.py, which imports DeepSpeed."""


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("loops")
    launch(Path(__file__).with_name("deepspeed_loops.py"), 2, str(out), framework="transformers.trainer")
    return out


def saw(out: Path) -> list[dict[str, Any]]:
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


WHOSE = {"loop": "DeepSpeed under Accelerate", "trainer": "DeepSpeed in the Trainer"}
LOOPS = [
    pytest.param(f"{loop} zero {stage}", marks=pytest.mark.integration(whose))
    for loop, whose in WHOSE.items()
    for stage in (2, 3)
]


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.conforms("unchanged")
def test_nothing_changes_where_nothing_is_wrong(launched: Path, name: str) -> None:
    for rank in saw(launched):
        assert rank[f"{name} guarded"] == rank[name]
        assert rank[name]["unchanged"] == []


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.conforms("nan", "spike", "ranks")
def test_a_skip_is_exact_counted_and_says_who_is_at_fault(launched: Path, name: str) -> None:
    for rank in saw(launched):
        assert rank[f"{name} faulted"]["unchanged"] == [NAN, SPIKE]
        assert rank[f"{name} faulted"]["lr"] == rank[name]["lr"], "the schedule counts attempts"
    loop, _, stage = name.split()
    run = sealegs.open_run(launched / f"{loop}-{stage}-faulted")
    skips = {event.step: event.detail["text"] for event in run.events if event.kind == "skip"}
    assert skips.keys() == {NAN, SPIKE}
    assert all("rank 1" in text for text in skips.values())


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.integration("DeepSpeed in the Trainer")
@pytest.mark.conforms("resume")
def test_a_trainer_goes_on_in_the_same_folder(launched: Path, stage: int) -> None:
    for rank in saw(launched):
        plain, resumed = rank[f"trainer zero {stage}"], rank[f"trainer zero {stage} resumed"]
        assert (resumed["end"], resumed["steps"]) == (plain["end"], STEPS)
    run = sealegs.open_run(launched / f"trainer-{stage}-guarded")
    assert run.steps[run.logged("loss")].tolist() == list(range(STEPS))
    (resumed,) = (event for event in run.events if event.kind == "resumed")
    assert (resumed.step, resumed.detail["with_guard"]) == (SAVED, True)


@pytest.mark.integration("DeepSpeed under Accelerate")
@pytest.mark.conforms("accumulation")
def test_the_loop_has_two_micro_batches_a_step(launched: Path) -> None:
    for rank in saw(launched):
        assert len(rank["loop zero 2 guarded"]["losses"]) == 2 * STEPS
    assert len(sealegs.open_run(launched / "loop-2-guarded").steps) == STEPS


@pytest.mark.integration("DeepSpeed under Accelerate")
@pytest.mark.conforms("resume")
@pytest.mark.parametrize("stage", [2, 3])
def test_a_loop_goes_on_from_a_state_of_accelerates(launched: Path, stage: int) -> None:
    for rank in saw(launched):
        whole, resumed = rank[f"loop zero {stage} standard"], rank[f"loop zero {stage} resumed"]
        assert whole["end"] == rank[f"loop zero {stage}"]["end"] == resumed["end"]
        assert resumed["losses"] == whole["losses"][-len(resumed["losses"]) :]
        assert resumed["numbers"][0] == SAVED + 1
    run = sealegs.open_run(launched / f"loop-{stage}-standard")
    assert run.steps[run.logged("loss")].tolist() == list(range(STEPS))


@pytest.mark.integration("DeepSpeed under Accelerate")
@pytest.mark.conforms("rollback")
@pytest.mark.parametrize("stage", [2, 3])
def test_a_loop_is_taken_back(launched: Path, stage: int) -> None:
    one, other = (rank[f"loop zero {stage} damaged"] for rank in saw(launched))
    assert one["numbers"] == other["numbers"]
    assert any(after < before for before, after in pairwise(one["numbers"]))
    assert one["numbers"][-1] == 110
