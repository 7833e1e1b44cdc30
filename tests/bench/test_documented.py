"""Documented failures: the cards that they name are there, a seed gives one evidence, and points are what is said."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench.documented import half_named, scored
from bench.failures.building import Evidence, Failure

from sealegs.diagnosis.cause_cards import causes

FAILURES = half_named("both")


def test_every_card_that_is_named_is_there_and_no_name_is_given_twice() -> None:
    named = {card for failure in FAILURES for card in (*failure.right, *failure.near, *failure.wrong)}
    assert named <= {*causes(), "unknown"}
    assert len({failure.name for failure in FAILURES}) == len(FAILURES) >= 60
    assert all(failure.verdicts and (failure.right or failure.wrong) for failure in FAILURES)
    areas = {half: {failure.area for failure in half_named(half)} for half in ("tune", "report")}
    assert areas["tune"] == areas["report"]


def test_a_seed_gives_the_same_evidence_and_another_one_does_not() -> None:
    make = half_named("tune")[0].make
    first, again, other = (make(np.random.default_rng(seed)).files for seed in (1, 1, 2))
    assert first == again
    assert first != other


FAILURE = Failure(
    lambda rng: Evidence({}, ""), "an area", "a source", ("stale-beta2",), ("act",), near=("lr-too-high",)
)
NO_CARD = replace(FAILURE, right=(), near=(), wrong=("plateau",), column=("tokens per second",))


@pytest.mark.parametrize(
    ("failure", "verdict", "because", "ranked", "points", "is_wrong"),
    [
        (FAILURE, "act", "", [("stale-beta2", "supported")], 2, False),
        (FAILURE, "healthy", "", [("stale-beta2", "supported")], 1, False),
        (FAILURE, "act", "", [("plateau", "supported"), ("stale-beta2", "hypothesis")], 1, True),
        (FAILURE, "act", "", [("plateau", "hypothesis")], 0, False),
        (FAILURE, "act", "", [("lr-too-high", "established")], 0, False),
        (FAILURE, "act", "", [("unknown", "hypothesis")], 1, False),
        (FAILURE, "act", "", [("stale-beta2", "ruled out")], 1, False),
        (NO_CARD, "act", "tokens per second halved", [("unknown", "hypothesis")], 2, False),
        (NO_CARD, "act", "something", [], 1, False),
        (NO_CARD, "act", "tokens per second halved", [("plateau", "established")], 1, True),
        (NO_CARD, "healthy", "tokens per second halved", [], 0, False),
    ],
)
def test_points(
    failure: Failure, verdict: str, because: str, ranked: list[tuple[str, str]], points: int, is_wrong: bool
) -> None:
    findings = SimpleNamespace(verdict=verdict, because=because, notices=(), standing=(), problems=())
    hypotheses = [SimpleNamespace(cause=cause, grade=grade, evidence_for=()) for cause, grade in ranked]
    diagnosis: Any = SimpleNamespace(findings=findings, hypotheses=hypotheses, first_action="")
    answer = scored(failure, 1, diagnosis)
    assert (answer.points, answer.is_confidently_wrong) == (points, is_wrong)
