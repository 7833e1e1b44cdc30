"""What two runs come to, in a word."""

import math
from typing import Any

import pytest

from sealegs.drills.catalogue import DRILLS
from sealegs.drills.score import Score, done_in
from sealegs.report.postmortem.events import steps_spent
from sealegs.vocabulary import Event

NONE = {"seen": None, "latency": None, "skipped": 0, "done_again": 0, "done": (), "halted": False, "struck": True}
SEEN = NONE | {"seen": 231, "latency": 1, "skipped": 1}


def scored(name: str = "lr-x30", *, watched: float, guarded: float, **known: Any) -> Score:
    return Score(drill=DRILLS[name], watched=watched, guarded=guarded, **(NONE | known))


@pytest.mark.parametrize(
    ("watched", "guarded", "known", "verdict"),
    [
        (50.0, 0.5, SEEN, "survived"),
        (math.nan, 1.9, SEEN, "survived"),
        (0.1, 0.1, {}, "no effect"),
        (0.1, 0.1, SEEN, "survived"),
        (-9.0, -9.0, {}, "harmless"),
        (50.0, 2.1, SEEN, "damaged"),
        (0.1, 3.0, SEEN, "damaged"),
        (50.0, math.nan, SEEN, "lost"),
        (50.0, math.nan, SEEN | {"halted": True}, "stopped"),
        (0.0, 0.0, {"struck": False}, "not struck"),
    ],
)
def test_a_fault(watched: float, guarded: float, known: dict[str, Any], verdict: str) -> None:
    assert scored(watched=watched, guarded=guarded, **known).verdict == verdict


@pytest.mark.parametrize(
    ("known", "verdict"),
    [
        ({}, "damaged"),
        (SEEN, "observed"),
        ({"cause": "zero-reward-spread", "why": "so"}, "observed"),
        ({"cause": "entropy-collapse", "why": "so"}, "damaged"),
        ({"cause": None, "why": "nothing is called for"}, "damaged"),
        (SEEN | {"halted": True}, "stopped"),
    ],
)
def test_what_can_only_be_observed_counts_where_somebody_was_told(known: dict[str, Any], verdict: str) -> None:
    assert scored("zero-spread", watched=50.0, guarded=50.0, **known).verdict == verdict
    assert scored("zero-spread", watched=0.5, guarded=0.5).verdict == "no effect"


def test_what_is_benign_is_to_be_left_alone() -> None:
    assert scored("domain-switch", watched=80.0, guarded=80.0, skipped=3).verdict == "left alone"
    assert scored("domain-switch", watched=80.0, guarded=80.0, done=("went back",)).verdict == "disturbed"


def test_to_go_on_is_to_do_nothing() -> None:
    def decided(number: int, action: str, changed: str) -> Event:
        detail = {"number": number, "actions": [{"action": action}], "changed": changed, "text": f"{action} it is"}
        return Event(kind="intervention", step=240, time=0.0, detail=detail)

    events = [decided(1, "continue", ""), decided(2, "rollback", ""), decided(3, "lower-lr", "half the rate")]
    assert done_in(events) == ("rollback it is", "half the rate")


def test_harm_that_was_prevented_is_a_share_of_what_there_was() -> None:
    assert scored(watched=50.0, guarded=5.0).prevented == pytest.approx(0.9)
    assert scored(watched=math.nan, guarded=5.0).prevented == 1.0
    assert scored(watched=50.0, guarded=math.nan).prevented == 0.0
    assert scored(watched=50.0, guarded=-1.0).prevented == 1.0
    assert scored(watched=1.0, guarded=1.0).prevented is None


def test_a_cause_is_right_or_wrong_only_where_there_was_something_to_explain() -> None:
    assert scored(watched=50.0, guarded=0.0, cause="unlogged-step-size", why="so").is_right
    assert scored(watched=50.0, guarded=0.0, cause="bad-data-batch", why="so").is_right is False
    assert scored(watched=50.0, guarded=0.0, cause=None, why="not told apart").is_right is False
    assert scored(watched=50.0, guarded=0.0).is_right is None
    assert scored("wrong-betas", watched=50.0, guarded=0.0, cause="lr-too-high", why="so").is_right is None


def test_of_a_struck_rank_the_cause_is_right_if_the_rank_is() -> None:
    known: dict[str, Any] = {"watched": math.nan, "guarded": 0.0, "cause": "corrupt-gradient", "why": "so"}
    assert scored("rank-nan", **known, rank=1).is_right
    assert scored("rank-nan", **known, rank=0).is_right is False
    assert scored("rank-nan", **known, rank=None).is_right is False
    assert scored("nan-gradient", **known, rank=None).is_right


def test_a_step_costs_once_also_where_it_was_skipped_and_done_again() -> None:
    def skip(step: int, *, acted: bool = True) -> dict[str, Any]:
        return {"kind": "skip", "step": step, "skipped_in_a_row": 1, "acted": acted}

    back = {"kind": "intervention", "step": 240, "to_step": 200, "cost": {"steps": 40}, "acted": True}
    counted_back = {"kind": "counted-back", "step": 232, "to_step": 230, "steps": 2}
    assert steps_spent([skip(230), skip(231), counted_back]) == (2, 0)
    assert steps_spent([skip(150), skip(239), back, skip(250)]) == (2, 40)
    assert steps_spent([skip(230), skip(231), counted_back, skip(239), back]) == (2, 40), "two are not among the forty"
    assert steps_spent([skip(230, acted=False), {**back, "acted": False}]) == (0, 0)
