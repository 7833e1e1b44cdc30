"""A live finding that the curve neither clears nor explains is named in hindsight, and so is a norm that doubles."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.diagnosis.streams import Case, run_from

from sealegs.diagnosis.contract import Diagnosis
from sealegs.diagnosis.findings import look
from sealegs.diagnosis.rank import diagnose
from sealegs.readers.read import read

CALM = {"line": [[0, 6.0], [100, 3.0], [1600, 2.4]], "noise": 0.01}
LOGITS = {"line": [[0, 40.0], [500, 40.0], [600, 60.0], [1600, 60.0]], "every": 10}


def diagnosed(tmp_path: Path, *events: dict[str, Any], **signals: Any) -> Diagnosis:
    stream = {"steps": 1600, "signals": {"loss": CALM, **signals}, "events": events}
    return diagnose(look(run_from(Case("live", "", stream, {}), tmp_path)), source="here", format="case")


def event(
    kind: str, severity: str, signal: str, *, step: int = 800, limit: float = 5.0, detector: str = "own"
) -> dict[str, Any]:
    finding = {"detector": detector, "step": step, "severity": severity, "signal": signal, "value": 7.0, "limit": limit}
    return {"kind": kind, "step": step, "text": "told", "findings": [finding | {"note": f"about {signal}"}]}


def test_a_repeated_batch_that_was_noticed_live_is_a_reason_to_look_and_its_cause_is_named(tmp_path: Path) -> None:
    again = {"batches": True, "same_as": [[800, 1100, 800]]}
    noticed = event("remark", "WATCH", "batch_hash", step=804, detector="repeated-batch")
    found = diagnosed(tmp_path, noticed, batch_hash=again)
    assert found.findings.verdict == "watch"
    assert found.findings.because.startswith("live notice at step 804: about batch_hash: 7, expected below 5; loss")
    assert (found.hypotheses[0].cause, found.hypotheses[0].grade) == ("duplicate-batch", "established")
    assert found.first_action.startswith("Mend the loader")


@pytest.mark.parametrize("few", [1, 2])
@pytest.mark.parametrize("rows_a_step", [1, 2])
def test_a_repeated_batch_in_a_strangers_log_is_found_without_any_event(
    few: int, rows_a_step: int, tmp_path: Path
) -> None:
    lines: list[dict[str, object]] = []
    for step in range(300):
        loss: dict[str, object] = {"step": step, "loss": 2 + 4 / (1 + step / 20) + 0.01 * (step * 7919 % 13)}
        batch: dict[str, object] = {"step": step, "batch_hash": f"{step if step < 150 else 150 + step % few:08d}"}
        lines += [loss | batch] if rows_a_step == 1 else [loss, batch]
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    found = diagnose(look(read(str(path)).run), source="here", format="jsonl")
    assert found.findings.verdict == "watch"
    assert "the loader has given one" in found.findings.because
    assert (found.hypotheses[0].cause, found.hypotheses[0].grade) == ("duplicate-batch", "established")


def test_what_a_stuck_loader_taught_by_heart_is_no_level_that_the_loss_has_to_come_back_to(tmp_path: Path) -> None:
    loss = {"line": [[0, 3.0], [300, 2.6], [801, 2.5], [840, 0.6], [841, 4.0], [880, 2.5], [1600, 2.4]], "noise": 0.01}
    again = {"batches": True, "same_as": [[801, 840, 800]]}
    found = diagnosed(tmp_path, event("remark", "WATCH", "other"), loss=loss, batch_hash=again)
    (leap,) = found.findings.incidents
    assert (leap.start, leap.trajectory) == (841, "fast")
    assert leap.pre_loss == pytest.approx(2.5, abs=0.05)
    assert found.findings.verdict == "watch"
    assert found.findings.unseen[0] == (
        "steps 801 to 840: 40 losses of a batch that came again and again are not judged"
    )
    assert found.first_action.startswith("Mend the loader")
    assert "and so on 40 times up to step 840" in found.hypotheses[0].evidence_for[0]


@pytest.mark.parametrize("to", [(20.0, 44.0), (44.0, 20.0)])
def test_a_group_whose_norm_changes_twofold_in_200_steps_is_found_without_any_event(
    to: tuple[float, float], tmp_path: Path
) -> None:
    group = {"line": [[0, to[0]], [1000, to[0]], [1190, to[1]], [1600, to[1]]], "every": 10}
    norms = {"param_norm": {"line": [[0, 50.0], [1600, 50.0]], "every": 10}, "param_norm/head": group}
    found = diagnosed(tmp_path, **norms)
    assert found.findings.verdict == "watch"
    assert f"param_norm/head has {'grown' if to[1] > to[0] else 'shrunk'} from" in found.findings.because
    assert found.first_action.startswith("Look into what the loss does not show: param_norm/head")


@pytest.mark.parametrize(
    ("line", "whole"),
    [
        ([[0, 20.0], [300, 20.0], [490, 44.0], [1600, 44.0]], 50.0),  # while a group is new
        ([[0, 20.0], [800, 20.0], [1200, 44.0], [1600, 44.0]], 50.0),  # in more than 200 steps
        ([[0, 0.1], [1000, 0.1], [1190, 0.4], [1600, 0.4]], 50.0),  # hardly a part of the weights
    ],
)
def test_norms_that_the_live_guard_would_not_judge_are_left_alone(
    line: list[list[float]], whole: float, tmp_path: Path
) -> None:
    norms = {
        "param_norm": {"line": [[0, whole], [1600, whole]], "every": 10},
        "param_norm/head": {"line": line, "every": 10},
    }
    assert diagnosed(tmp_path, **norms).findings.verdict == "healthy"


@pytest.mark.parametrize(
    ("told", "verdict"),
    [
        (event("alarm", "ALARM", "loss", detector="spike/loss"), "healthy"),
        (event("alarm", "ALARM", "ranks_differ", detector="replicas"), "watch"),
        (event("remark", "WATCH", "step_s", detector="throughput"), "healthy"),
        (event("remark", "WATCH", "attention_logit_max/0", limit=50.0), "watch"),
        (event("remark", "WATCH", "attention_logit_max/0", limit=61.0), "healthy"),
        (event("alarm", "ALARM", "attention_logit_max/0", limit=61.0), "watch"),
    ],
)
def test_what_the_curve_clears_stays_cleared(told: dict[str, Any], verdict: str, tmp_path: Path) -> None:
    found = diagnosed(tmp_path, told, **{"attention_logit_max/0": LOGITS})
    assert found.findings.verdict == verdict
    assert found.first_action.startswith("Leave it") is (verdict == "healthy")


@pytest.mark.parametrize(
    "back",
    [
        {"kind": "intervention", "step": 801, "acted": True, "to_step": 700, "actions": [{"action": "rollback"}]},
        {"kind": "resume", "step": 801, "text": "resumed"},
    ],
)
def test_what_the_run_went_back_over_does_not_stand(back: dict[str, Any], tmp_path: Path) -> None:
    alarm = event("alarm", "ALARM", "ranks_differ", step=801, detector="replicas")
    assert diagnosed(tmp_path, alarm, back).findings.verdict == "healthy"


@pytest.mark.parametrize(("until", "verdict"), [(1600, "act"), (1200, "watch")])
def test_ranks_that_differ_to_the_end_call_for_action(until: int, verdict: str, tmp_path: Path) -> None:
    differ = {"line": [[0, 0.0], [1600, 0.0]], "every": 100, "set": [[1000, until, 1.0]]}
    found = diagnosed(tmp_path, ranks_differ=differ).findings
    assert found.verdict == verdict
    assert ("since step 1000, to the end" in found.because) == (verdict == "act")


@pytest.mark.parametrize(("times", "verdict"), [(1, "watch"), (2, "act")])
def test_a_device_that_computes_something_else_is_the_cause(times: int, verdict: str, tmp_path: Path) -> None:
    text = "rank 2 (cuda:2 of node7) computed a micro-batch wrongly, once"
    wrong = [
        {"kind": "silent-corruption", "step": 500 * (1 + number), "rank": 2, "is_lasting": False, "text": text}
        for number in range(times)
    ]
    found = diagnosed(tmp_path, *wrong)
    assert found.findings.verdict == verdict
    assert "cuda:2 of node7" in found.findings.because
    assert (found.hypotheses[0].cause, found.hypotheses[0].grade) == ("device-fault", "established")
    assert "the machine with the faulty device out" in found.first_action


def test_a_finding_within_an_incident_is_told_there(tmp_path: Path) -> None:
    alarm = event("alarm", "ALARM", "ranks_differ", step=1003, detector="replicas")
    spike = CALM | {"set": [[1000, 1008, 9.0]]}
    found = diagnosed(tmp_path, alarm, loss=spike).findings
    assert (found.verdict, found.standing) == ("watch", ())


def beside_a_calm_loss(tmp_path: Path, **signals: Any) -> Diagnosis:
    """4,000 rows in which the loss shows nothing."""
    rows = ({"step": step, "loss": 2 + 4 / (1 + step / 20) + 0.01 * (step * 7919 % 13)} for step in range(4000))
    told = [
        row | {name: value for name, of in signals.items() if (value := of(row["step"])) is not None} for row in rows
    ]
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, told)))
    return diagnose(look(read(str(path)).run), source="here", format="jsonl")


@pytest.mark.parametrize("until", [4000, 3000])
def test_gradients_that_underflow_to_the_end_are_a_reason_to_look(until: int, tmp_path: Path) -> None:
    found = beside_a_calm_loss(
        tmp_path,
        loss_scale=lambda step: 2.0 ** (12 + step // 2000),
        underflow_share=lambda step: None if step % 10 else 0.7 if 2000 <= step < until else 0.03,
    )
    is_so = until == 4000
    assert found.findings.verdict == ("watch" if is_so else "healthy")
    assert ("70% of the gradients underflow in fp16 since step 2000" in found.findings.because) == is_so
    assert ("fp16-underflow" in [each.cause for each in found.hypotheses]) == is_so


@pytest.mark.parametrize(("scale", "is_told"), [(65536.0, True), (1.0, False)])
def test_a_loss_scale_that_stands_still_is_told(scale: float, is_told: bool, tmp_path: Path) -> None:
    found = beside_a_calm_loss(tmp_path, loss_scale=lambda step: scale).findings
    assert found.verdict == "healthy"
    assert ("beside it: loss scale constant at 65536 in steps 0 to 3999" in found.because) == is_told


@pytest.mark.parametrize(("fold", "is_told"), [(7.0, True), (2.5, True), (1.6, False)])
def test_a_gradient_norm_that_rises_to_a_multiple_is_told(fold: float, is_told: bool, tmp_path: Path) -> None:
    found = beside_a_calm_loss(
        tmp_path, grad_norm=lambda step: fold ** max(step / 2000 - 1, 0) + step % 7 / 70
    ).findings
    assert found.verdict == "healthy"
    assert ("beside it: gradient norm rising since about step" in found.because) == is_told


@pytest.mark.parametrize(("scale", "action"), [(8192.0, "Raise the loss scale to 65536"), (524288.0, "Use bf16")])
def test_underflow_under_a_high_loss_scale_is_not_cured_by_a_lower_one(
    scale: float, action: str, tmp_path: Path
) -> None:
    found = beside_a_calm_loss(
        tmp_path,
        loss_scale=lambda step: scale / 2 ** (1 - step // 2000),
        underflow_share=lambda step: None if step % 10 else 0.75,
    )
    assert found.first_action.startswith(action)


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [
        (["lr of group 0 was 0.0003 and is 0.00031"], "healthy"),  # a longer schedule
        (["lr of group 0 was 0.0003 and is 0.003", "moments of optimizer 0 was 4 and is 0"], "watch"),
    ],
)
def test_what_the_audit_of_a_resume_found_lost_is_a_reason_to_look(
    changed: list[str], verdict: str, tmp_path: Path
) -> None:
    audit = {"kind": "resume-audit", "step": 800, "not_as_saved": {}, "changed": changed}
    found = diagnosed(tmp_path, audit)
    assert found.findings.verdict == verdict
    assert ("moments of optimizer 0 was 4 and is 0" in found.findings.because) == (verdict == "watch")


def test_a_loop_that_stood_still_is_told_and_harms_nothing(tmp_path: Path) -> None:
    """Where it waited is what helps; the pace is no reason for a verdict."""
    stalls = [{"kind": "stalled", "step": step, "seconds": 612.4, "where": "loader.py, line 7"} for step in (300, 900)]
    (tmp_path / "calm").mkdir()
    assert not any("stood still" in notice for notice in diagnosed(tmp_path / "calm").findings.notices)
    found = diagnosed(tmp_path, *stalls)
    told = "the loop stood still after step 300: no step for 612 s, waiting in loader.py, line 7, and 1 times more"
    assert told in found.findings.notices
    assert told in found.remarks
    assert found.findings.verdict == "healthy"
