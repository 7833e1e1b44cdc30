"""Two real processes: a fit of Lightning that skips, goes back and resumes on both ranks alike."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.integrations import lightning_small as small
from tests.ranks.launch import launch

import sealegs

pytestmark = pytest.mark.xdist_group("ranks")
DAMAGED, LAST = 62, 90
"""As in lightning_ranks.py, which imports Lightning."""


def events_of(folder: Path, kind: str) -> list[Any]:
    return [event for event in sealegs.open_run(folder).events if event.kind == kind]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One launch of two ranks, which train, go back and resume."""
    out = tmp_path_factory.mktemp("ranks")
    launch(Path(__file__).with_name("lightning_ranks.py"), 2, str(out), framework="lightning.pytorch")
    return out


@pytest.mark.integration("Lightning")
@pytest.mark.conforms("ranks")
def test_two_ranks_decide_alike_go_back_together_and_resume(ranks: Path) -> None:
    one, other = (json.loads((ranks / f"{rank}.json").read_text()) for rank in range(2))
    assert one["unchanged"] == other["unchanged"] == [small.NAN, small.SPIKE]
    assert one["weights"] == other["weights"] == one["resumed"] == other["resumed"]
    assert one["losses"] != other["losses"], "each has data of its own"
    rows = [json.loads(line) for line in (ranks / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(small.STEPS))
    (spike,) = (event for event in events_of(ranks / "run", "skip") if event.step == small.SPIKE)
    assert "on rank 1" in spike.detail["culprit"]
    assert one["went back"] == other["went back"]
    (done,) = events_of(ranks / "back", "intervention")
    assert done.detail["to_step"] < DAMAGED
    assert one["steps"] == other["steps"] == LAST
