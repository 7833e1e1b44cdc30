"""A sample of bench/harm.py: healthy trainings that a guard must not touch; and the bench sees it when one does."""

import math
import sys
from collections import Counter
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench.harm import HALVES, Cell, modules_of, run, trainings_of
from bench.healthy.keepers import PLAIN

from sealegs import judge
from sealegs.detectors.spike import Spike, SpikeState
from sealegs.vocabulary import Row

pytestmark = pytest.mark.xdist_group("harm")  # one plain training serves several tests
OPEN = "bench.healthy.open"
SAMPLE = [
    pytest.param("tabular", "rare-positives", "guard", marks=pytest.mark.long, id="rare-positives"),
    pytest.param("images", "task-switches", "playbook", id="task-switches"),
    pytest.param("generative", "adversaries", "playbook", marks=pytest.mark.long, id="adversaries"),
]
"""What a guard that skips high losses ruined, what playbooks rolled back: see docs/benchmarks/2026-11-17-harm.md."""


@cache
def plain_cell(module: str, training: str) -> dict[str, Any]:
    """It depends on nothing that a test changes, so one serves all."""
    return run(Cell(f"{OPEN}.{module}", training, 0, PLAIN), "")


def cells_of(module: str, training: str, keeper: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return plain_cell(module, training), run(Cell(f"{OPEN}.{module}", training, 0, keeper), "")


@pytest.fixture
def half_a_game(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two players take 500 turns of their 1000: both guards have had alarms by then."""
    monkeypatch.setattr("bench.healthy.open.generative.range", lambda turns: range(turns // 2), raising=False)


@pytest.mark.usefixtures("half_a_game")
@pytest.mark.parametrize(("module", "training", "keeper"), SAMPLE)
def test_a_healthy_training_is_left_alone(module: str, training: str, keeper: str) -> None:
    plain, guarded = cells_of(module, training, keeper)
    counts = guarded["counts"]
    assert guarded["error"] is None
    assert (counts["skips"], counts["rollbacks"], counts["halts"]) == ({}, 0, 0)
    assert counts["steps"] == plain["counts"]["steps"] > 500
    assert counts["verdict"] != "act"
    assert guarded["quality"] == pytest.approx(plain["quality"], rel=0.02)


@pytest.mark.long
@pytest.mark.parametrize("is_restrained", [True, False])
def test_a_guard_that_skips_high_losses_does_harm_unless_it_notices(
    monkeypatch: pytest.MonkeyPatch, is_restrained: bool
) -> None:
    """Twice the median of the last losses, the way it was until 2026-11-17, on one positive in a hundred."""
    seen: list[float] = []
    own = Spike.learn

    def learn(self: Spike, state: SpikeState, now: Row) -> SpikeState:
        if self.signal == "loss":
            seen.append(float(now["loss"]))
        return own(self, state, now)

    def gross_limit(self: Spike, state: SpikeState) -> float:
        recent = sorted(seen[-32:])
        return 2 * recent[len(recent) // 2] if self.signal == "loss" and len(recent) >= 8 else math.inf

    monkeypatch.setattr(Spike, "learn", learn)
    monkeypatch.setattr(Spike, "gross_limit", gross_limit)
    if not is_restrained:
        monkeypatch.setattr(judge, "restrained", lambda before, tally, step: (tally, ()))
    plain, guarded = cells_of("tabular", "rare-positives", "guard")
    skips = Counter(guarded["counts"]["skips"]).total()
    if is_restrained:
        assert skips <= 5
        assert guarded["quality"] == pytest.approx(plain["quality"], rel=0.05)
    else:
        assert skips > 50
        assert guarded["quality"] < 0.5 < plain["quality"]


def test_there_are_as_many_as_are_claimed_in_every_half_and_each_has_a_name_of_its_own() -> None:
    names = {half: [each.name for module in modules_of(half) for each in trainings_of(module)] for half in HALVES}
    assert min(map(len, names.values())) >= 30
    assert not [name for name, count in Counter(chain(*names.values())).items() if count > 1]
