"""Rows in, Verdicts out."""

import math
from typing import Any

import numpy as np
import pytest

from sealegs.judge import begin, decide, fold, standard
from sealegs.vocabulary import Finding, Severity, Verdict


def finding(severity: Severity, **other: Any) -> Finding:
    values: dict[str, Any] = {"detector": "spike/loss", "step": 5, "signal": "loss", "value": 6.93, "limit": 3.41}
    return Finding(**values | {"severity": severity, "p": 2e-9, "note": "loss spike"} | other)


def verdicts(rows: list[dict[str, float]]) -> list[Verdict]:
    detectors = standard()
    states, out = begin(detectors), []
    for row in rows:
        states, verdict = fold(detectors, states, row)
        out.append(verdict)
    return out


def test_a_verdict_prints_as_one_line() -> None:
    verdict = Verdict(step=4821, findings=(finding(Severity.GATE),), skips_in_a_row=1, skip_limit=3)
    assert str(verdict) == "step 4821  SKIP  loss spike: 6.93, expected below 3.41 (p 2e-09)  skipped 1 of 3"
    assert str(Verdict(step=7)) == "step 7  GO"


@pytest.mark.parametrize(
    ("severity", "word", "go"),
    [(Severity.WATCH, "GO", True), (Severity.GATE, "SKIP", False), (Severity.ALARM, "ALARM", False)],
)
def test_the_gravest_finding_decides(severity: Severity, word: str, go: bool) -> None:
    verdict = decide(5000, (finding(Severity.WATCH), finding(severity)))
    assert (verdict.word, verdict.go, verdict.severity) == (word, go, severity)


def test_a_slow_alarm_lets_the_update_pass() -> None:
    assert decide(5000, (finding(Severity.ALARM, spoils_update=False),)).go


def test_a_young_run_needs_both_signals_or_certainty_for_an_alarm() -> None:
    doubtful = finding(Severity.ALARM, p=4e-6)
    other = finding(Severity.ALARM, p=4e-6, signal="grad_norm")
    assert decide(500, (doubtful,)).word == "SKIP"
    assert decide(500, (doubtful, other)).word == "ALARM"
    assert decide(500, (finding(Severity.ALARM, p=1e-7),)).word == "ALARM"
    assert decide(1000, (doubtful,)).word == "ALARM"


def test_the_worked_example_is_gated_at_its_first_step() -> None:
    """Seed 002: 2.31 -> 5.84 and 0.6 -> 47.2 at step 312 of 500, in 40 runs with heavy-tailed noise."""
    for seed in range(40):
        random = np.random.default_rng(seed)
        loss = (2.31 + 4 * np.exp(-np.arange(500) / 60)) * np.exp(0.03 * random.standard_t(5, 500))
        norm = 0.6 * np.exp(0.25 * random.standard_t(5, 500))
        loss[312], norm[312] = 5.84, 47.2
        rows = [{"step": i, "loss": float(loss[i]), "grad_norm": float(norm[i])} for i in range(500)]
        assert not verdicts(rows)[312].go, f"seed {seed}"


def test_nan_is_skipped_becomes_an_alarm_and_disables_nothing() -> None:
    random = np.random.default_rng(0)
    rows = [
        {"step": i, "loss": float(2.5 * np.exp(0.01 * random.standard_t(5))), "grad_norm": 0.5} for i in range(1500)
    ]
    for at in (100, 400, 401, 402):
        rows[at]["loss"] = math.nan
    rows[1200]["loss"] = 9.0
    out = verdicts(rows)
    assert [out[at].word for at in (100, 400, 401, 402)] == ["SKIP", "SKIP", "SKIP", "ALARM"]
    assert out[403].go
    assert out[1200].word == "ALARM"


def test_a_parameter_that_is_not_finite_halts() -> None:
    (verdict,) = verdicts([{"step": 0, "loss": 2.0, "params_finite": 0.0}])
    assert (verdict.word, verdict.go) == ("HALT", False)
