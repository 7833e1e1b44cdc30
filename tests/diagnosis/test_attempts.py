"""What attempts say: treatments, what did not help, and the lines of the page."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sealegs.diagnosis import attempts
from sealegs.diagnosis.facts import Facts
from sealegs.diagnosis.findings import look
from sealegs.diagnosis.rank import diagnose
from sealegs.record.attempts import Launch
from sealegs.record.columns import Columns
from sealegs.record.manifest import Manifest
from sealegs.record.run import Run, run_of
from sealegs.report.commands.check import contract, page


def run(*parts: tuple[int, int, dict[int, float], float], settings: list[dict[str, Any]] | None = None) -> Run:
    """Attempts one after the other: first and last step, losses that are out of the ordinary, and the rate."""
    steps = np.concatenate([np.arange(first, last + 1) for first, last, _, _ in parts])
    losses = 2 + 2 * np.exp(-steps / 300) + 0.02 * np.random.default_rng(7).standard_normal(len(steps))
    rates, rows, at = [], [], 0
    for first, last, odd, rate in parts:
        rows.append(at)
        rates.append(np.full(last - first + 1, rate))
        for step, loss in odd.items():
            losses[at + step - first] = loss
        at += last - first + 1
    values = {"step": steps.astype(np.float64), "loss": losses, "lr": np.concatenate(rates)}
    logged = {name: np.ones(len(steps), np.bool_) for name in values}
    launches = [
        Launch(row, f"launch {number}", known)
        for number, (row, known) in enumerate(zip(rows, settings or [], strict=False))
    ]
    return run_of(Path("log"), Manifest(run_id="log"), Columns(values, logged, rows=at), launches=tuple(launches))


def spike(step: int, rows: int = 40) -> dict[int, float]:
    return dict.fromkeys(range(step, step + rows), 6.0)


def facts_of(run: Run) -> Facts:
    return Facts(look(run))


def test_a_rate_lowered_after_a_trouble_is_a_treatment_and_no_lost_state() -> None:
    treated = run((0, 539, spike(500), 1e-3), (400, 900, {}, 5e-4))
    found = diagnose(look(treated), source="log", format="")
    assert [(one.knob, one.before, one.after) for one in facts_of(treated).treatments] == [("lr", 1e-3, 5e-4)]
    assert "misaligned-restart" not in {one.cause for one in found.hypotheses if one.grade != "ruled out"}
    assert found.findings.verdict == "watch"

    unasked = run((0, 539, {}, 1e-3), (400, 900, {}, 5e-4))
    found = diagnose(look(unasked), source="log", format="")
    assert facts_of(unasked).treatments == ()
    assert found.hypotheses[0].cause == "misaligned-restart"


def test_a_resume_that_came_after_the_leap_is_not_its_cause() -> None:
    """In steps it stands before the leap; in time it was what was done about it."""
    answer = facts_of(run((0, 539, spike(500), 1e-3), (480, 900, {}, 1e-3)))
    assert answer.focus is not None
    assert answer.focus.start == 500
    assert answer.resumed_before is None
    other = facts_of(run((0, 519, {}, 1e-3), (480, 900, spike(482), 1e-3)))
    assert other.resumed_before == 480


@pytest.mark.parametrize("comes_again", [True, False])
def test_what_was_tried_and_did_not_help_speaks_against_its_cause(comes_again: bool) -> None:
    """Spikes recur; the rate is halved at a restart before them, which helps or does not."""
    spikes = {step: loss for begin in (200, 350, 500) for step, loss in spike(begin, 8).items()}
    known = [{"optimizer.lr": 1e-3, "seed": 1}, {"optimizer.lr": 5e-4, "seed": 2}]
    tried = run((0, 539, spikes, 1e-3), (150, 900, spikes if comes_again else {}, 5e-4), settings=known)
    told = facts_of(tried).tried
    assert set(told) == ({"lr"} if comes_again else set())
    found = look(tried)
    assert [it.start for it in found.incidents] == [200, 350, 500] * (1 + comes_again)
    hypotheses = diagnose(found, source="log", format="").hypotheses
    against = [text for one in hypotheses for text in one.evidence_against]
    sentence = "optimizer.lr was changed from 0.001 to 0.0005 at step 150, and it came again: spike at step 200"
    assert (sentence in against) == comes_again
    assert any(one.cause == "lr-too-high" for one in hypotheses) != comes_again


def test_the_page_has_a_line_for_each_attempt_and_json_has_all() -> None:
    known = [{"lr": 1e-3, "path": "a"}, {"lr": 5e-4, "path": "b"}]
    found = diagnose(look(run((0, 539, spike(500), 1e-3), (400, 900, {}, 5e-4), settings=known)), source="a", format="")
    assert attempts.lines(attempts.attempts_in(found.findings.run)) == [
        "1: steps 0 to 539; given up from 400 on",
        "2: steps 400 to 900, from step 399 of 1 (launch 1); lr 0.001 to 0.0005, path a to b; the last: the verdict is "
        "of this one",
    ]
    assert "\nAttempts\n  1: steps 0 to 539; given up from 400 on\n  2: steps 400" in page(found)
    assert contract(found)["attempts"] == [
        {
            "number": 1,
            "first": 0,
            "last": 539,
            "goes_on_from": None,
            "told_by": "",
            "given_up_from": 400,
            "changed": {},
        },
        {
            "number": 2,
            "first": 400,
            "last": 900,
            "goes_on_from": {"attempt": 1, "step": 399},
            "told_by": "launch 1",
            "given_up_from": None,
            "changed": {"lr": {"before": 1e-3, "after": 5e-4}, "path": {"before": "a", "after": "b"}},
        },
    ]


def test_a_run_made_in_one_go_has_no_attempts_to_tell_of_and_many_are_cut() -> None:
    assert attempts.attempts_in(run((0, 99, {}, 1e-3))) == ()
    many = run(*[(step, step + 20, {}, 1e-3) for step in range(0, 300, 10)])
    told = attempts.lines(attempts.attempts_in(many))
    assert told[0] == "18 earlier attempts: --json has all of them"
    assert len(told) == attempts.MOST_TOLD + 1
