"""Attention logits are limited by the largest of all ranks, and all of them rescale alike, whole weights and shards."""

import json
import math
from pathlib import Path

import pytest
from tests.ranks.launch import launch

import sealegs

PROGRAM = Path(__file__).with_name("qk_clip.py")
LIMIT, EVERY = 3.0, 4

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_all_ranks_rescale_by_the_largest_logit_of_any(wrapper: str, tmp_path: Path) -> None:
    launch(PROGRAM, 2, wrapper, str(tmp_path))
    saw = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert saw[0]["sums"] == saw[1]["sums"]
    run = sealegs.open_run(tmp_path / "limited")
    (first,) = (event for event in run.events if event.kind == "qk-clip")
    assert first.step == EVERY
    (module,) = first.detail["modules"]
    of_ranks = [each["own"][0][4:] for each in saw]  # of the second block
    assert of_ranks[0] != of_ranks[1], "each has data of its own"
    largest = [max(pair) for pair in zip(*of_ranks, strict=True)]
    assert module["heads"] == [head for head in range(4) if largest[head] > LIMIT]
    assert module["logit"] == pytest.approx(max(largest), rel=1e-6)
    wanted = [math.sqrt(min(1.0, LIMIT / logit)) for logit in largest]
    for each in saw:
        assert each["ratio"] == [pytest.approx(wanted, rel=1e-6)] * 2
        assert each["spread"] < 1e-6
        assert each["changed"] == ["blocks.1.attention.query_key_value.weight"]
