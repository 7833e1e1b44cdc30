"""Two real processes go back together, and stay identical."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.ranks.launch import launch

import sealegs
from sealegs.capsule.read import open_capsule

LOOP = Path(__file__).with_name("rollback.py")
pytestmark = pytest.mark.xdist_group("ranks")


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    out = tmp_path_factory.mktemp("rollback")
    launch(LOOP, 2, str(out))
    return out, [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
@pytest.mark.integration("a loop of one's own")
@pytest.mark.conforms("rollback")
def test_ranks_go_back_together_and_stay_identical(wrapper: str, launched: tuple[Path, list[dict[str, Any]]]) -> None:
    out, saw = launched
    first, second = (of_rank[wrapper] for of_rank in saw)
    assert first["numbers"] == second["numbers"]
    assert first["skipped"] == second["skipped"] != []
    numbers = first["numbers"]
    assert numbers[-1] == 140
    assert any(after < before for before, after in pairwise(numbers)), "they went back"
    if wrapper == "ddp":
        assert first["digests"] == second["digests"]
    events = [event for event in sealegs.open_run(out / wrapper).events if event.kind == "intervention"]
    assert [(event.detail["trigger"], event.detail["acted"]) for event in events] == [("damaged", True)]
    for rank in range(2):
        capsule = open_capsule(out / wrapper / "incidents" / "1", rank=rank)
        assert capsule.description.ranks == 2
        assert len(capsule.steps()) > 10, "each rank has kept its own batches"
    together = open_capsule(out / wrapper / "incidents" / "1")
    assert together.steps() == capsule.steps()
    assert len([each for each in together.batches if each.step == together.incident.start]) == 2, "one of each rank"
    assert capsule.state().tensors["model/0.weight"].shape == (16, 8), "of which one process has the whole"
    # the weights that were gone back to are those of that step, bit for bit: what follows from the same batches is too
    back = events[0].detail["to_step"]
    assert back % 50, "a snapshot in memory"
    assert first["tags"][str(back)] == "healthy", "and it is on disk now"
    again = [i for i, number in enumerate(numbers) if number == back + 1]
    for of_rank in (first, second):
        assert len({of_rank["digests"][i] for i in again}) == 1


def test_ranks_take_out_the_same_source_though_one_of_them_knows_it(
    launched: tuple[Path, list[dict[str, Any]]],
) -> None:
    out, saw = launched
    events = [event for event in sealegs.open_run(out / "poisoned").events if event.kind == "intervention"]
    assert [event.detail["changed"] for event in events] == ["source noise has the weight 0"]
    assert [of_rank["poisoned"]["weights"] for of_rank in saw] == [{"good": 1.0, "noise": 0.0}] * 2
    assert saw[0]["poisoned"]["digest"] == saw[1]["poisoned"]["digest"]
