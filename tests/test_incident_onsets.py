"""Where an incident begins, and that it is at its worst from there on, not from its alarm on."""

import json

import pytest
from tests.test_incidents import ONSET, finding, followed, healthy, level

from sealegs.incidents import advance, begin
from sealegs.judge import thaw
from sealegs.vocabulary import Finding, Severity, Verdict


@pytest.mark.parametrize(
    ("beside", "start"),
    [
        ((finding(),), ONSET),
        ((finding(lasts=8, note="loss stays high"),), ONSET - 19),
        ((finding(Severity.GATE),), ONSET - 19),
        ((finding(), finding(detector="budget", lasts=5)), ONSET - 4),
        ((finding(), finding(detector="drift/loss", lasts=32)), ONSET - 31),
        ((), ONSET - 19),
    ],
    ids=["a spike", "one of many", "no alarm", "a row", "a drift", "alone"],
)
def test_a_spike_says_when_the_weights_changed_that_are_sampled_now_and_then(
    beside: tuple[Finding, ...], start: int
) -> None:
    state, _ = followed(healthy())
    grown = finding(detector="proportion", note="param_norm/b has grown 30.1 times in 20 steps", lasts=20)
    judged = Verdict(step=ONSET, findings=(*beside, grown), incident=1, opens_incident=True)
    state, (news,) = advance(state, {"step": ONSET, "loss": 900.0}, judged)
    assert news.incident.start == start


@pytest.mark.parametrize(
    ("detector", "opens", "peak"),
    [("spike/loss", True, (103, 9.0, 70.0)), ("nonfinite/loss", True, (107, 6.0, 0.5)), ("", False, (103, 9.0, 70.0))],
    ids=["new", "not finite", "again"],
)
def test_the_worst_row_of_an_incident_may_come_before_its_alarm(
    detector: str, opens: bool, peak: tuple[int, float, float]
) -> None:
    """Row 90 was suspicious, too, and is none of it."""
    worst = {90: (11.0, 90.0), 103: (9.0, 2.0), 105: (6.0, 70.0)}
    last = level(40, 1, 3.0, "ALARM") if not opens else []
    state, _ = followed([*healthy(0, 40), *last, *healthy(len(last) + 40, 90)])
    for step in range(90, 108):
        is_last, is_bad = step == 107, step >= 100
        loss, norm = worst.get(step, (6.0 if is_bad else 2.5, 0.5))
        found = (finding(detector=detector or "spike/loss", lasts=8, note="loss stays high"),) if is_last else ()
        judged = Verdict(
            step=step,
            findings=found,
            incident=1 if is_last else None,
            opens_incident=is_last and opens,
            is_suspicious=is_bad or step == 90,
        )
        state, _ = advance(state, {"step": step, "loss": loss, "grad_norm": norm}, judged)
        assert thaw(begin(), json.loads(json.dumps(state))) == state
    assert state.open is not None
    assert (state.open.peak, state.open.peak_loss, state.open.grad_norm_peak) == peak
    assert not state.suspects
