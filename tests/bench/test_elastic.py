"""The kill test in short: an agent is lost and comes back, and the record accounts for every sample."""

import sys
from pathlib import Path

import pytest
from tests.forked import start

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench.elasticity.account import account_of
from bench.elasticity.kills import run_with_kills

pytestmark = [pytest.mark.trains, pytest.mark.xdist_group("jobs")]


def test_a_job_outlives_its_machines_and_loses_no_sample(tmp_path: Path) -> None:
    killed = run_with_kills(start, tmp_path, kills=1, epochs=7, seed=3, pause_s=0.03, between=(20, 30))
    assert (killed.died, killed.kills) == ("", 1), (tmp_path / "agents.log").read_text()[-3000:]
    account = account_of(tmp_path, epochs=7)
    assert (account.lost, account.twice) == ([], [])
    assert {1, 2} <= set(account.worlds), "it went on alone"
    assert account.divided
