"""Rows in, Verdicts out."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sealegs import judge
from sealegs.errors import ConfigError
from sealegs.judge import COOL_DOWN, Budget, Disturbance, Tally, begin, fold, standard, thaw
from sealegs.vocabulary import Finding, Row, Severity, Verdict


def finding(severity: Severity, **other: Any) -> Finding:
    values: dict[str, Any] = {"detector": "spike/loss", "step": 5, "signal": "loss", "value": 6.93, "limit": 3.41}
    return Finding(**values | {"severity": severity, "p": 2e-9, "note": "loss spike"} | other)


def decide(step: int, findings: tuple[Finding, ...]) -> Verdict:
    return judge.decide(Tally(steps=step), {"step": step}, findings, Budget())[1]


def verdicts(rows: Sequence[Row], budget: Budget | None = None) -> list[Verdict]:
    detectors = standard()
    state, out = begin(detectors), []
    for row in rows:
        state, verdict = fold(detectors, state, row, budget or Budget())
        out.append(verdict)
    return out


def healthy(steps: int, seed: int = 0) -> list[dict[str, Any]]:
    random = np.random.default_rng(seed)
    loss = 2.5 * np.exp(0.01 * random.standard_t(5, steps))
    norm = 0.5 * np.exp(0.2 * random.standard_t(5, steps))
    return [{"step": i, "loss": float(loss[i]), "grad_norm": float(norm[i])} for i in range(steps)]


def test_a_verdict_prints_as_one_line() -> None:
    verdict = Verdict(step=4821, findings=(finding(Severity.GATE),), skips_in_a_row=1, skip_limit=3)
    assert str(verdict) == "step 4821  SKIP  loss spike: 6.93, expected below 3.41 (p 2e-09)  rejected 1 of 3"
    assert str(Verdict(step=7)) == "step 7  GO"


@pytest.mark.parametrize(
    ("severity", "word", "go"),
    [(Severity.WATCH, "GO", True), (Severity.GATE, "SKIP", False), (Severity.ALARM, "ALARM", False)],
)
def test_the_gravest_finding_decides(severity: Severity, word: str, go: bool) -> None:
    verdict = decide(5000, (finding(Severity.WATCH, detector="drift/loss"), finding(severity)))
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


def test_the_worked_example_is_found_at_its_first_step() -> None:
    """Seed 002: 2.31 -> 5.84 and 0.6 -> 47.2 at step 312 of 500, in 40 runs with heavy-tailed noise."""
    skips = 0
    for seed in range(40):
        random = np.random.default_rng(seed)
        loss = (2.31 + 4 * np.exp(-np.arange(500) / 60)) * np.exp(0.03 * random.standard_t(5, 500))
        norm = 0.6 * np.exp(0.25 * random.standard_t(5, 500))
        loss[312], norm[312] = 5.84, 47.2
        rows = [{"step": i, "loss": float(loss[i]), "grad_norm": float(norm[i])} for i in range(500)]
        verdict = verdicts(rows)[312]
        assert verdict.findings, f"seed {seed}"
        skips += not verdict.go
    assert skips >= 36, "but where such gradients have been seen before"


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
    (verdict,) = verdicts([{"step": 0, "loss": 2.0, "params_finite": 0.0, "culprit": "emb.weight"}])
    assert (verdict.word, verdict.go) == ("HALT", False)
    assert verdict.culprit == "", "that of the first gradient, and all are NaN"


def test_in_a_young_run_two_doubtful_spikes_are_a_surprise_and_one_is_a_remark() -> None:
    loss = finding(Severity.WATCH, p=2e-5, spoils_update=False)
    norm = finding(Severity.WATCH, p=2e-5, spoils_update=False, detector="spike/grad_norm", signal="grad_norm")
    assert decide(500, (loss,)).word == "GO"
    assert [f.severity for f in decide(500, (loss,)).findings] == [Severity.WATCH]
    both = decide(500, (loss, norm))
    assert ([f.severity for f in both.findings], both.word) == ([Severity.GATE, Severity.GATE], "GO")
    drift = finding(Severity.WATCH, detector="drift/loss", spoils_update=False)
    assert decide(500, (loss, drift)).go


def test_alarms_close_together_are_one_incident() -> None:
    rows = healthy(2400)
    for at in (1500, 1501, 1560, 2000):
        rows[at]["loss"] = 9.0
    out = verdicts(rows)
    assert [(out[at].incident, out[at].opens_incident) for at in (1500, 1501, 1560, 2000)] == [
        (1, True),
        (1, False),
        (1, False),
        (2, True),
    ]
    assert COOL_DOWN < 2000 - 1560
    assert out[1600].incident is None


@pytest.mark.parametrize(
    ("earlier", "leap", "quiet", "is_another"),
    [
        ([2.72] * 12, 9.0, 70, True),  # many a little high: by the limit of a leap each was well
        ([3.0], 9.0, 70, True),
        ([3.0], 3.2, 70, False),
        ([9.0], 9.0, 70, False),
        ([math.nan] * 3, 9.0, 70, False),
        ([3.0], 9.0, judge.QUIET - 5, False),
        ([3.0], math.nan, 70, True),
        ([3.0], math.nan, judge.QUIET - 5, False),
        ([math.nan] * 3, math.nan, 70, False),
    ],
    ids=str,
)
def test_a_leap_far_beyond_an_incident_that_was_over_or_a_nan_is_another_one(
    earlier: list[float], leap: float, quiet: int, is_another: bool
) -> None:
    rows = healthy(2000)
    for at, loss in enumerate(earlier, 1500):
        rows[at]["loss"] = loss
    at = 1500 + len(earlier) + quiet
    for row in rows[at : at + 10]:
        row["loss"] = leap
    out = verdicts(rows)
    opened = [verdict.step for verdict in out if verdict.opens_incident]
    assert 1500 <= opened[0] < 1500 + len(earlier)
    alarms = [verdict for verdict in out[at : at + 10] if verdict.incident is not None]
    assert opened[1:] == ([alarms[0].step] if is_another else [])
    assert {verdict.incident for verdict in alarms} == {1 + is_another}


def test_too_many_skips_in_a_row_halt() -> None:
    rows = healthy(1000)
    for row in rows[500:]:
        row["loss"] = math.nan
    out = verdicts(rows, Budget(in_a_row=20, nonfinite_in_a_row=100))
    assert [v.word == "HALT" for v in out[500:521]] == [False] * 20 + [True]
    assert str(out[520]).startswith("step 520  HALT  steps skipped in a row: 21, expected below 20")


def test_too_many_steps_that_are_not_finite_halt() -> None:
    rows = healthy(400)
    for row in rows[300:]:
        row["loss"] = math.nan
    out = verdicts(rows)
    assert next(v.step for v in out if v.word == "HALT") == 310


def test_too_many_skips_in_all_halt() -> None:
    rows = healthy(3000)
    for row in rows[200::20]:
        row["loss"] = math.nan
    words = [v.word for v in verdicts(rows, Budget(total=30, share=0.0))]
    assert words.index("HALT") == 200 + 30 * 20
    # a share of a long run is more than the fixed number
    assert "HALT" not in [v.word for v in verdicts(rows, Budget(total=30, share=0.06))]


def test_a_level_that_is_accepted_is_not_accepted_silently() -> None:
    rows = healthy(1500)
    for row in rows[800:]:
        row["loss"] *= 1.4
    out = verdicts(rows)
    said = [v for v in out if any("new level" in f.note for f in v.findings)]
    assert [v.step for v in said] == [899]
    assert all(v.go for v in out), "a loss alone is no reason to skip"
    assert [v.step for v in out if v.opens_incident] == [800]
    assert "surprising steps in a row: 5, expected below 4" in str(out[804])


def test_the_end_of_a_long_row_of_skips_is_said() -> None:
    rows = healthy(400)
    for row in rows[300:312]:
        row["loss"] = math.nan
    assert "updates are applied again; steps that were skipped in a row: 12" in str(
        verdicts(rows, Budget(nonfinite_in_a_row=50))[312]
    )


def test_a_scaler_that_looks_for_its_scale_spends_no_budget() -> None:
    overflow = finding(Severity.GATE, detector="overflow", p=None)
    tally, verdict = judge.decide(Tally(skips_in_a_row=9, skips=9), {"step": 3}, (overflow,), Budget(in_a_row=9))
    assert (verdict.word, verdict.go, tally.skips) == ("SKIP", False, 9)
    _, verdict = judge.decide(
        Tally(skips=9), {"step": 3}, (replace(overflow, severity=Severity.ALARM),), Budget(total=9)
    )
    assert verdict.word == "HALT"


def test_overflows_are_no_finite_steps_that_were_skipped() -> None:
    """Of a scaler that never halves each is an alarm and counts, but nothing about it is finite."""
    rows = healthy(1000)
    for step, row in enumerate(rows):
        row |= {"loss_scale": 65536.0} | ({"grad_norm": math.inf, "grads_finite": 0.0} if 900 <= step < 930 else {})
    overflows = "\n".join(str(verdict) for verdict in verdicts(rows)[900:930])
    assert "not lowered after an overflow: 6.554e+04" in overflows
    assert "expected below 6.554e+04" not in overflows
    assert "rejected 28 of 150" in overflows
    assert "finite steps skipped in a row" not in overflows


@pytest.mark.parametrize(("norms", "is_told"), [([9.0] * 3, True), ([9.0, math.inf, 9.0], False)])
def test_three_finite_steps_skipped_in_a_row_are_an_alarm(norms: list[float], is_told: bool) -> None:
    tally, told = Tally(steps=5000), ""
    for step, norm in enumerate(norms):
        row = {"step": step, "loss": 2.5 + step, "grad_norm": norm}
        tally, verdict = judge.decide(tally, row, (finding(Severity.GATE, step=step),), Budget())
        told += str(verdict)
    assert ("finite steps skipped in a row: 3, expected below 2" in told) is is_told


def test_the_same_step_again_is_not_skipped_again() -> None:
    """One batch over and over: skipped, it comes back as it was, and skipping it for ever would be standing still."""
    rows = healthy(1300)
    for row in rows[1200:1206]:
        row |= {"loss": 30.0, "grad_norm": 1e9}
    out = verdicts(rows)
    assert [v.go for v in out[1200:1206]] == [False, True, False, True, False, True]
    assert "the same step again" in str(out[1201])
    gated = [replace(v, findings=tuple(replace(f, severity=Severity.GATE) for f in v.findings)) for v in out[1200:1202]]
    assert [v.word for v in gated] == ["SKIP", "GO"], "by what is done about them"
    for row in rows[1200:1206]:
        row["loss"] = math.nan
    assert not any(v.go for v in verdicts(rows)[1200:1206]), "what is not finite is never applied"


def test_steps_that_go_back_or_by_tens_count_as_steps() -> None:
    rows = healthy(2600)
    for at in (1500, 2300):
        rows[at]["loss"] = 9.0
    for row in rows[2000:]:
        row["step"] -= 1900  # rolled back
    assert verdicts(rows)[2300].opens_incident
    nan = [{"step": 10 * i, "loss": math.nan} for i in range(3)]
    assert [v.word for v in verdicts(nan)] == ["SKIP", "SKIP", "ALARM"]


def test_a_remark_is_not_made_at_every_step() -> None:
    tally, made = Tally(), []
    for step in range(300):
        remark = finding(Severity.WATCH, detector="drift/loss", step=step)
        tally, verdict = judge.decide(tally, {"step": step}, (remark,), Budget())
        made += [f.step for f in verdict.findings]
    assert made == [0, 101, 202]


def test_what_the_device_decided_stands() -> None:
    spoilt = finding(Severity.ALARM)
    open_: Row = {"step": 5000, "gate_closed": 0.0}
    closed: Row = {"step": 5000, "gate_closed": 1.0, "culprit": "head.weight"}
    _, verdict = judge.decide(Tally(), open_, (spoilt,), Budget())
    assert (verdict.go, verdict.word) == (True, "ALARM")
    _, verdict = judge.decide(Tally(), closed, (), Budget())
    assert (verdict.go, verdict.word, verdict.skips_in_a_row) == (False, "SKIP", 1)
    assert str(verdict).endswith("in head.weight  rejected 1 of 150")
    _, verdict = judge.decide(Tally(), closed, (spoilt,), Budget())
    assert len(verdict.findings) == 1


def test_a_state_survives_being_written() -> None:
    rows = healthy(1200)
    rows[700]["loss"] = 9.0
    rows[900]["announced"] = "lr decay"
    detectors = standard()
    state = begin(detectors)
    for row in rows[:1100]:
        state, _ = fold(detectors, state, row)
    restored = thaw(begin(detectors), json.loads(json.dumps(state)))
    assert restored == state
    assert repr(restored) == repr(state)  # the types too
    older = (state.detectors, state.tally[:-3])
    assert thaw(begin(detectors), json.loads(json.dumps(older))).tally == state.tally._replace(
        disturbance=Disturbance()
    )
    for row in rows[1100:]:
        assert fold(detectors, restored, row) == fold(detectors, state, row)

    older = json.loads(json.dumps(state.detectors[2]))[:-2]
    assert thaw(detectors[2].init(), older) == state.detectors[2]._replace(calm=(), recent=()), (
        "from before the fields were there"
    )


@pytest.mark.parametrize("option", [{"in_a_row": 0}, {"nonfinite_in_a_row": 0}, {"total": 0}, {"share": 1.5}], ids=str)
def test_impossible_budgets_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(option))):
        Budget(**option)


def leapt(rows: list[dict[str, Any]], at: int) -> list[dict[str, Any]]:
    return [row | {"lr": 3e-4 if row["step"] < at else 1.5e-2} for row in rows]


def test_a_leap_of_the_learning_rate_is_said_once_and_named_beside_all_that_is_graver() -> None:
    rows = leapt(healthy(800), at=412)
    for step, loss in ((300, 40.0), (415, math.nan), (500, 40.0), (780, 40.0)):
        rows[step]["loss"] = loss
    told = {verdict.step: verdict for verdict in verdicts(rows) if "learning rate" in str(verdict)}
    assert [step for step, verdict in told.items() if verdict.go] == [412]
    assert not told[500].go, "a loss that runs away while the rate is up: such updates do harm"
    assert told[412].word == "GO"
    assert "the learning rate leapt from 3e-4 to 1.5e-2 at step 412, 3 steps before" in str(told[415])
    assert "88 steps before" in str(told[500])
    assert {300, 780}.isdisjoint(told)
    assert (told[500].findings[0].detector, told[500].findings[-1].detector) == ("spike/loss", "rate/lr")


def test_no_update_is_held_for_a_loss_of_both_signs() -> None:
    """Its spread may grow with the rate, in health; it is an alarm all the same."""
    rows = leapt(healthy(800), at=412)
    for row in rows:
        row["loss"] -= 2.5
    rows[500]["loss"] = 40.0
    out = verdicts(rows)
    assert (out[500].word, out[500].go, out[500].findings[0].detector) == ("ALARM", True, "spike/loss")


def test_a_detector_of_one_s_own_gives_alarms_and_no_evidence() -> None:
    """A reward may leap for good reasons; only loss and gradient norm speak of the weights."""
    own, loss = (finding(Severity.ALARM, detector=f"spike/{signal}") for signal in ("reward", "loss"))
    assert [judge.is_surprise(one) for one in (own, loss)] == [False, True]


def test_a_halt_names_the_leap_of_the_learning_rate() -> None:
    rows = [row | {"lr": row["lr"], "loss": math.nan} if row["step"] > 414 else row for row in leapt(healthy(430), 412)]
    halt = next(verdict for verdict in verdicts(rows) if verdict.word == "HALT")
    assert "the learning rate leapt from 3e-4 to 1.5e-2 at step 412" in str(halt)


def test_a_rate_that_is_no_number_is_remarked_now_and_then_and_beside_what_comes_of_it() -> None:
    rows = [row | {"lr": math.nan if row["step"] >= 200 else 3e-4} for row in healthy(240)]
    rows[220]["loss"] = math.nan
    told = {verdict.step: verdict.word for verdict in verdicts(rows) if "rate is not finite" in str(verdict)}
    assert told == {200: "GO", 220: "SKIP"}


def test_a_loss_that_runs_away_after_the_rate_came_down_again_is_applied() -> None:
    rows = [row | {"lr": 1.5e-2 if 412 <= row["step"] < 420 else 3e-4} for row in healthy(800)]
    for step in (415, 450):
        rows[step]["loss"] = 40.0
    out = verdicts(rows)
    assert [out[step].go for step in (415, 450)] == [False, True]
    assert "the learning rate leapt" in str(out[450])


def rare(every: int, steps: int, factor: float = 15.0) -> list[dict[str, Any]]:
    """Gradients each of which is larger by far than any before: no size is known for long."""
    rows, largest = healthy(steps), 1.0
    for row in rows[200::every]:
        largest = factor * max(largest, *(each["grad_norm"] for each in rows[: row["step"]]))
        row["grad_norm"] = largest
    return rows


def test_a_guard_that_skips_one_at_a_time_learns_restraint_and_says_so_once() -> None:
    out = verdicts(rare(every=150, steps=1000))
    assert [v.step for v in out if not v.go] == [200, 350]
    said = [v for v in out if any(f.detector == "restraint" for f in v.findings)]
    assert [v.step for v in said] == [351]
    assert "such are these data, and from here on only what is not finite is skipped" in str(said[0])
    assert out[500].severity is not None
    assert out[500].severity >= Severity.GATE, "it is still found"


def test_one_in_a_thousand_alone_is_no_reason_for_restraint() -> None:
    out = verdicts(rare(every=2500, steps=9000, factor=11.0))
    assert [v.step for v in out if not v.go] == [200, 2700, 5200, 7700]


def test_restraint_is_not_for_what_is_not_finite_nor_for_rows_of_skips() -> None:
    rows = healthy(1000)
    for at in (300, 400, 500, 600):
        rows[at]["loss"] = math.nan
    for at in (700, 701, 702):
        rows[at]["grad_norm"] = 10.0 ** (at - 696)
    out = verdicts(rows)
    assert [v.step for v in out if not v.go] == [300, 400, 500, 600, 700, 701, 702]
    assert not any(f.detector == "restraint" for v in out for f in v.findings)


def test_a_row_of_doubtful_gradients_is_suspicious_though_it_is_remarked_on_once() -> None:
    """One signal alone is no surprise to a young statistic, but it may be the first sign of an incident."""
    rows = healthy(420)
    for step in range(400, 403):
        rows[step]["grad_norm"] = 5.0
    found = verdicts(rows)
    assert [verdict.step for verdict in found if verdict.is_suspicious and verdict.step >= 395] == [400, 401, 402]
    assert all(verdict.go for verdict in found[400:])


def test_a_later_alarm_says_that_it_is_of_the_same_incident() -> None:
    """Its event is a notice, for one incident has one alarm."""
    alarm = (finding(Severity.ALARM, spoils_update=False),)
    first = Verdict(step=7, findings=alarm, incident=2, opens_incident=True)
    assert "incident" not in str(first)
    assert str(replace(first, opens_incident=False)).endswith("  still incident 2")
