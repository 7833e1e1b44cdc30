"""What stands beside the numbers counts in the ranking: what pre-flight rules say by its grade, what replay has tested
before all."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from tests.diagnosis.streams import CASES, Case, read_case, run_from

from sealegs.diagnosis.cause_cards import causes
from sealegs.diagnosis.contract import Advised, Diagnosis, Reruns
from sealegs.diagnosis.facts import Facts
from sealegs.diagnosis.findings import look
from sealegs.diagnosis.rank import diagnose, rank
from sealegs.incidents import Incident
from sealegs.preflight_check.rules import RULES

PATHS = {path.stem: path for path in CASES}
SPIKED: dict[str, Any] = {
    "steps": 600,
    "signals": {
        "loss": {"line": [[0, 6.0], [100, 3.0], [600, 2.5]], "noise": 0.01, "set": [[400, 401, 7.0]]},
        "eval_loss": {"line": [[0, 6.0], [100, 3.0], [600, 2.5]], "every": 20},
        "lr": {"line": [[0, 1e-5], [50, 1e-3], [600, 1e-3]]},
    },
}


@pytest.mark.parametrize(("grade", "more"), [("error", 2), ("warning", 1), ("note", 0)])
def test_a_rule_counts_by_its_grade(grade: Literal["error", "warning", "note"], more: int, tmp_path: Path) -> None:
    findings = look(run_from(read_case(PATHS["spikes-after-warmup"]), tmp_path))

    def weighed(*advised: Advised) -> tuple[int, tuple[str, ...]]:
        found = rank(Facts(replace(findings, advised=advised)))
        return next((one.points, one.hypothesis.evidence_for) for one in found if one.card.name == "lr-too-high")

    before, after = weighed(), weighed(Advised(code="SCH1", grade=grade, text="no warm-up"))
    assert after[0] == before[0] + more
    assert ("settings: no warm-up" in after[1]) == (more > 0)
    other = weighed(Advised(code="OPS2", grade="error", text="only the newest is kept"))
    assert other == before, "a rule of no card says nothing of a cause"


def test_cards_name_rules_that_exist() -> None:
    codes = {rule.code for rule in RULES}
    for card in causes().values():
        assert set(card.rules) <= codes, card.name


def rerun(at: int, cause: str | None, *not_needed: str) -> Reruns:
    incident = Incident(
        number=1,
        start=at,
        kind="spike",
        pre_loss=2.5,
        usual=2.5,
        limit=2.6,
        peak=at,
        peak_loss=7.0,
        grad_norm_peak=1.0,
        end=at + 10,
    )
    return Reruns(incident=incident, cause=cause, because="it is these batches", not_needed=not_needed)


def spiked(folder: Path, *tested: Reruns, **stream: Any) -> Diagnosis:
    findings = look(run_from(Case("beside", "", SPIKED | stream, {}), folder))
    return diagnose(replace(findings, reruns=tested), source="here", format="case")


def test_a_cause_that_was_tested_on_the_incident_is_the_first(tmp_path: Path) -> None:
    before = spiked(tmp_path).hypotheses
    assert before[0].cause == "hard-batch"
    after = spiked(tmp_path, rerun(400, "bad-data-batch", "hard-batch")).hypotheses
    assert (after[0].cause, after[0].grade) == ("bad-data-batch", "established")
    assert after[0].evidence_for[0] == "replay: it is these batches"
    assert after[0].next_test == "", "it was tested"
    out = {each.cause: each for each in after}["hard-batch"]
    assert out.grade == "ruled out"
    assert out.evidence_against[0] == "replay: the incident is there without it too"
    unlikely = spiked(tmp_path, rerun(400, "corrupt-gradient")).hypotheses[0]
    assert (unlikely.cause, unlikely.grade) == ("corrupt-gradient", "established"), "though no sign speaks for it"


def test_a_cause_that_is_merely_left_over_is_not_the_first_where_another_is_established(tmp_path: Path) -> None:
    left_over = replace(rerun(400, "corrupt-weight"), is_by_exclusion=True)
    alone = spiked(tmp_path, left_over).hypotheses
    assert (alone[0].cause, alone[0].grade) == ("corrupt-weight", "established")
    swapped = {"kind": "intervention", "step": 401, "number": 1, "trigger": "bad-data", "acted": True}
    swapped |= {"evidence": "forum: its data are bad", "actions": [{"action": "swap-source", "weight": 0.0}]}
    first, *others = spiked(tmp_path, left_over, events=[swapped]).hypotheses
    assert (first.cause, first.grade) == ("bad-data-batch", "established")
    assert {each.cause: each.grade for each in others}.get("corrupt-weight") != "established"
    assert spiked(tmp_path, rerun(400, "corrupt-weight"), events=[swapped]).hypotheses[0].cause == "corrupt-weight"


def test_what_was_tested_of_another_incident_says_nothing_of_this_one(tmp_path: Path) -> None:
    told = spiked(tmp_path, rerun(200, "bad-data-batch", "hard-batch"))
    assert told.hypotheses == spiked(tmp_path).hypotheses


@pytest.mark.parametrize(
    ("changes", "is_decided"),
    [({}, True), ({"trigger": "asked"}, False), ({"acted": False}, False), ({"step": 500}, False)],
)
def test_a_source_that_recovery_found_to_be_bad_decides(
    changes: dict[str, Any], is_decided: bool, tmp_path: Path
) -> None:
    swapped = {"kind": "intervention", "step": 401, "number": 1, "trigger": "bad-data", "acted": True}
    swapped |= {"evidence": "forum: its data are bad", "actions": [{"action": "swap-source", "weight": 0.0}]}
    found = spiked(tmp_path, events=[swapped | changes])
    first = found.hypotheses[0]
    assert ((first.cause, first.grade) == ("bad-data-batch", "established")) is is_decided
    assert ("recovery: forum: its data are bad" in first.evidence_for) is is_decided
    if is_decided:
        assert "skip those batches" in found.first_action
        assert "source" not in found.first_action, "it is out of the mixture"
