"""What a skip kept from the weights, what a rollback undid, and what no update can have done."""

import math
from pathlib import Path
from typing import Any

import pytest
from tests.report.runs import write

from sealegs.diagnosis.contract import Diagnosis
from sealegs.diagnosis.findings import look
from sealegs.diagnosis.rank import diagnose
from sealegs.record.run import open_run

Rows = list[dict[str, Any]]


def rows(first: int, last: int, broken: range = range(0)) -> Rows:
    """Rows of a run that learns; weights and groups are seen every ten steps, and where something is broken."""
    found = []
    for step in range(first, last):
        noise = 0.02 * math.sin(12.9898 * step)
        row: dict[str, Any] = {"step": step, "loss": 2 + 4 * math.exp(-step / 60) + noise, "grad_norm": 0.8 + noise}
        row |= {"lr": 1e-3, "batch_hash": f"{step:016x}"}
        if step in broken:
            row |= {"loss": math.nan, "grad_norm": math.nan}
        if step in broken or step % 10 == 0:
            row |= {"param_norm": 40.0, "params_finite": 1.0, "grad_norm/a": row["grad_norm"], "grad_norm/b": 0.2}
        found.append(row)
    return found


def rejected(step: int, *, acted: bool = True, signal: str = "loss") -> dict[str, Any]:
    finding = {"detector": "nonfinite", "severity": "GATE", "signal": signal, "spoils_update": True}
    return {"time": 1.7e9, "step": step, "kind": "skip", "acted": acted, "findings": [finding]}


def diagnosed(folder: Path, logged: Rows, events: Rows) -> Diagnosis:
    return diagnose(look(open_run(write(folder, logged, events))), source="log", format="")


def test_a_nan_at_the_last_step_whose_update_was_skipped_calls_for_nothing(tmp_path: Path) -> None:
    found = diagnosed(tmp_path / "a", rows(0, 400, range(399, 400)), [rejected(399)])
    (incident,) = found.findings.incidents
    assert (found.findings.verdict, incident.kind, incident.trajectory) == ("watch", "nonfinite", None)
    assert "the last update was skipped" in found.findings.because
    assert found.first_action.startswith("Leave it, its update was skipped; to know more")
    answers = {one.question: one for one in found.path}
    assert "Q2.4" not in answers, "no moments are spoilt"
    assert "then finite again" not in answers["Q1.1"].evidence
    assert answers["Q1.1"].evidence.endswith("and the log ends with such a loss")
    said = [text for one in found.hypotheses for text in (*one.evidence_for, *one.evidence_against)]
    assert not any("finite again" in text for text in said)
    assert not {"grad_norm", "grad_norm/<group>"} & set(found.log_next_time), "both are in the log"


@pytest.mark.parametrize("reason", ["not logged", "not acted on", "weights", "three in a row"])
def test_it_does_where_the_update_may_have_been_made(reason: str, tmp_path: Path) -> None:
    broken = range(397, 400) if reason == "three in a row" else range(399, 400)
    logged = rows(0, 400, broken)
    events = [rejected(step, acted=reason != "not acted on") for step in broken]
    if reason == "weights":
        logged[-1] |= {"params_finite": 0.0}
    found = diagnosed(tmp_path / "a", logged, [] if reason == "not logged" else events)
    assert found.findings.verdict == "act"
    assert not found.first_action.startswith("Leave it")


def written_from_outside(folder: Path, *, to: int = 300, events: Rows = [], **more: Any) -> Diagnosis:  # noqa: B006
    """A weight is inf at step 210; the run goes back to 150, and on to ``to``, if that is a later step."""
    first = rows(0, 211, range(210, 211))
    first[210] |= {"params_finite": 0.0, "param_norm": math.inf}
    first[209] |= more
    told = {"time": 1.7e9, "step": 211, "kind": "intervention", "number": 1, "acted": True, "to_step": 150}
    back = [{**told, "actions": [{"action": "rollback"}], "text": "roll back"}] if to > 150 else []
    return diagnosed(folder, [*first, *rows(150, to)], [*events, rejected(210), *back])


@pytest.mark.parametrize("is_skipped", [False, True])
def test_a_weight_that_breaks_after_finite_or_skipped_updates_is_no_updates_doing(
    is_skipped: bool, tmp_path: Path
) -> None:
    more: dict[str, Any] = {"grad_norm": math.nan} if is_skipped else {}
    events = [rejected(209, signal="grad_norm")] if is_skipped else []
    found = written_from_outside(tmp_path / "a", events=events, **more)
    assert (found.hypotheses[0].cause, found.hypotheses[0].grade) == ("corrupt-weight", "hypothesis")
    assert "the updates since step 200 were finite or skipped" in found.hypotheses[0].evidence_for[0]
    grades = {one.cause: one.grade for one in found.hypotheses}
    assert grades.get("destructive-update") in (None, "hypothesis", "ruled out")


def test_an_update_that_was_made_with_nan_is_established(tmp_path: Path) -> None:
    found = written_from_outside(tmp_path / "a", grad_norm=math.nan)
    assert (found.hypotheses[0].cause, found.hypotheses[0].grade) == ("destructive-update", "established")
    assert found.first_action.startswith("Leave it, the run went back and has passed it; if it comes again, go back to")


def test_the_first_action_knows_that_the_run_went_back_and_whether_it_has_passed_the_step(tmp_path: Path) -> None:
    passed = written_from_outside(tmp_path / "a")
    assert passed.findings.verdict == "watch"
    assert passed.first_action.startswith("Leave it, the run went back and has passed it; find out: ")
    not_yet = written_from_outside(tmp_path / "b", to=180)
    assert "passed it" not in not_yet.first_action
    never = written_from_outside(tmp_path / "c", to=0)
    assert never.findings.verdict == "act"
    assert never.first_action.startswith("Reload the last checkpoint")


@pytest.mark.parametrize("is_skipped", [True, False])
def test_a_row_of_nans_that_was_skipped_and_is_long_over_calls_for_nothing(is_skipped: bool, tmp_path: Path) -> None:
    broken = range(200, 206)
    alarms = [rejected(step) | {"kind": "alarm" if step >= 202 else "skip"} for step in broken]
    found = diagnosed(tmp_path / "a", rows(0, 500, broken), alarms if is_skipped else [])
    assert [(one.kind, one.start, one.end) for one in found.findings.incidents] == [("nonfinite", 200, 205)]
    assert found.findings.verdict == ("watch" if is_skipped else "act")
    assert found.first_action.startswith("Leave it, the loss is back")
