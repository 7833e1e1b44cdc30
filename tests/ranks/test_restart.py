"""Under ``torchrun --max-restarts`` a run goes on by itself, with everything that it knew."""

import json
import os
import warnings
from pathlib import Path

import pytest
from tests.forked import start
from tests.ranks.launch import PATIENCE_S

import sealegs

PROGRAM = Path(__file__).with_name("restart.py")
pytestmark = pytest.mark.xdist_group("ranks")


def torchrun(*words: str) -> None:
    """The command itself, in this process."""
    from torch.distributed.run import main

    warnings.simplefilter("ignore")
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    main(words)


def test_a_crash_and_a_halt_are_gone_on_from(tmp_path: Path) -> None:
    """One rank is killed after a rollback; NaN without end then climbs the rest of the ladder; then it ends."""
    forked = ("--run-path", "--start-method=fork")  # no rank has to import torch again
    words = ("--standalone", "--nproc-per-node=2", "--max-restarts=2", *forked, str(PROGRAM), str(tmp_path))
    agent = start(torchrun, *words, has_children=True)
    agent.join(PATIENCE_S)
    agent.terminate()  # which it passes on, should it not have ended
    assert agent.exitcode == 0
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert len(found) == 6, "three attempts of two ranks"
    for attempt in range(3):
        assert found[f"{attempt}-0"] == found[f"{attempt}-1"], "all ranks go on from the same"
    first, second, third = (found[f"{attempt}-0"] for attempt in range(3))
    assert (first["number"], first["books"]["history"]) == (0, [])

    assert 20 <= second["number"] <= 80
    assert [entry["rung"] for entry in second["books"]["history"]] == [3]
    assert second["books"]["data"]["skipped"] == [[59, 69]]

    assert third["number"] == 80, "of none that is proven, the newest from before the trouble of step 100"
    assert [entry["rung"] for entry in third["books"]["history"]] == [3, 4, 5, 6], "one ladder, over both attempts"
    assert third["books"]["margins"]["lr"] == 0.25, "half of it from scratch, and half again when that did not help"
    assert third["books"]["data"]["skipped"][0] == [59, 69]

    run = sealegs.open_run(tmp_path / "run")
    assert run.steps[-1] == 129
    kinds = [event.kind for event in run.events]
    assert kinds.count("guard") == 3
    assert not set(run.column("batch_index").astype(int).tolist()) & set(range(59, 69))
