"""Rows and Verdicts in, Incidents out."""

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from sealegs import judge, open_run
from sealegs.detectors import drift
from sealegs.incidents import (
    BLOCK,
    LATEST,
    LOOKS,
    MEMORY,
    Incident,
    IncidentState,
    News,
    advance,
    begin,
    ended,
    incidents_of,
    kind_of,
)
from sealegs.judge import thaw
from sealegs.vocabulary import Finding, Row, Severity, Verdict
from sealegs.watch import Watch

ONSET = 100
LIMIT = 2.55
"""Mean and half a standard deviation of the healthy rows below: 2.5 + 0.1 / 2."""

Floats = NDArray[np.float64]
Step = tuple[int, float, str]
"""A step, its loss, and the word of its verdict."""


def healthy(first: int = 0, end: int = ONSET) -> list[Step]:
    return [(step, 2.4 if step % 2 else 2.6, "GO") for step in range(first, end)]


def alarm(step: int, loss: float) -> Step:
    return (step, loss, "ALARM")


def level(first: int, rows: int, loss: float, word: str = "GO") -> list[Step]:
    return [(step, loss, word) for step in range(first, first + rows)]


def finding(
    severity: Severity = Severity.ALARM, detector: str = "spike/loss", note: str = "loss spike", lasts: int = 1
) -> Finding:
    spoils = severity > Severity.WATCH and not detector.startswith("drift")
    return Finding(
        detector=detector,
        step=0,
        severity=severity,
        signal="loss",
        value=9.0,
        limit=3.0,
        spoils_update=spoils,
        lasts=lasts,
        note=note,
    )


def verdict(word: str, number: int = 1, opens: bool = True, **of_finding: Any) -> Verdict:
    if word == "GO":
        return Verdict(step=0)
    if word == "SKIP":
        return Verdict(step=0, findings=(finding(Severity.GATE, **of_finding),))
    return Verdict(step=0, findings=(finding(**of_finding),), incident=number, opens_incident=opens)


def followed(steps: Iterable[Step], state: IncidentState | None = None) -> tuple[IncidentState, list[tuple[int, News]]]:
    """The state after all of them, and the news with the place among them that it came at."""
    state = begin() if state is None else state
    heard = []
    for place, (step, loss, word) in enumerate(steps):
        state, news = advance(state, {"step": step, "loss": loss, "grad_norm": 0.5}, verdict(word))
        heard += [(place, item) for item in news]
    return state, heard


def told(steps: Iterable[Step]) -> list[tuple[int, str, str | bool | None]]:
    """Where what was heard: with the trajectory if it was closed, with whether it decays at a look."""
    return [(place, n.kind, n.incident.trajectory or n.is_decaying) for place, n in followed(steps)[1]]


def test_ranks_that_differ_are_an_incident_until_they_are_compared_and_the_same() -> None:
    """The loss, a mean over all ranks, tells nothing of it."""
    detectors = judge.standard()
    state, before, news = judge.begin(detectors), begin(), []
    for step in range(800):
        row: dict[str, Any] = {"step": step, "loss": 2.5 + 0.05 * math.sin(step), "grad_norm": 0.5}
        if step % 100 == 0:
            row |= {"ranks_differ": float(300 <= step < 600), "differing_rank": 1.0}
        state, now = judge.fold(detectors, state, row)
        before, heard = advance(before, row, now)
        news += [(step, item.kind, item.incident.start) for item in heard if item.kind != "look"]
    assert news == [(300, "opened", 201), (600, "closed", 201)]


def test_an_incident_says_what_was_before_and_how_bad_it_was() -> None:
    falling = [(step, 3.0 - 0.01 * step, "GO") for step in range(150)]
    steps = [*falling, alarm(150, 4.0), (151, 9.0, "SKIP"), *level(152, 10, 1.4)]
    _, ((opened_at, opened), (closed_at, closed)) = followed(steps)
    incident = opened.incident
    assert (opened_at, opened.kind, incident.number, incident.start, incident.kind) == (150, "opened", 1, 150, "spike")
    assert incident.pre_loss == pytest.approx(np.mean([loss for _, loss, _ in falling[-50:]]))
    last = [loss for _, loss, _ in falling[-100:]]
    assert incident.usual == pytest.approx(np.mean(last))
    assert incident.limit == pytest.approx(np.mean(last) + 0.5 * np.std(last))
    assert (incident.peak, incident.peak_loss, incident.grad_norm_peak) == (150, 4.0, 0.5)
    assert (incident.end, incident.trajectory, incident.recovery_loss) == (None, None, None)
    incident = closed.incident
    assert (closed_at, incident.peak, incident.peak_loss) == (161, 151, 9.0)
    assert (incident.end, incident.trajectory) == (161, "fast")
    assert incident.recovery_loss == pytest.approx(1.4)
    assert str(incident) == "incident 1: spike at step 150, loss 1.755 before, 9 at step 151; fast: 1.4 at step 161"


@pytest.mark.parametrize(
    ("high_rows", "back_after", "trajectory"),
    [(1, 10, "fast"), (41, 50, "fast"), (42, 51, "slow"), (491, 500, "slow"), (492, 501, "lingering")],
)
def test_the_ten_row_mean_back_under_the_limit_closes(high_rows: int, back_after: int, trajectory: str) -> None:
    """High for so many rows from the onset on, then all ten of the mean must be of the rows after."""
    steps = [*healthy(), alarm(ONSET, 5.0), *level(ONSET + 1, high_rows - 1, 5.0), *level(ONSET + high_rows, 600, 2.5)]
    closed = [(place, item) for place, item in followed(steps)[1] if item.kind == "closed"]
    ((place, news),) = closed
    assert (place - ONSET, news.incident.trajectory) == (back_after, trajectory)
    assert news.incident.limit == pytest.approx(LIMIT)
    assert news.incident.recovery_loss == pytest.approx(2.5)


@pytest.mark.parametrize(
    ("loss_after", "trajectory"),
    [
        (lambda t: 2.56, "lingering"),
        (lambda t: 5.0, "lingering"),
        (lambda t: 5.0 + 0.3 * math.sin(t), "lingering"),
        (lambda t: 3.2 + 0.5 * math.sin(49 * t * t), "lingering"),
        (lambda t: 3.0 + 0.01 * t, "divergent"),
        (lambda t: 3.0 + 0.01 * t + 0.5 * math.sin(49 * t * t), "divergent"),
        (lambda t: math.nan, "divergent"),
        (lambda t: 2.5 if t < 470 else math.inf, "divergent"),
    ],
    ids=["just above", "flat", "noisy", "noisier", "climbing", "climbing in noise", "NaN", "infinite in the end"],
)
def test_what_is_not_back_lingers_or_diverges(loss_after: Any, trajectory: str) -> None:
    """At 500 rows it is looked at once more; ten rows later nobody has rolled back, and it is closed."""
    steps = [*healthy(), *((ONSET + t, loss_after(t), "SKIP" if t else "ALARM") for t in range(600))]
    place, news = followed(steps)[1][-1]
    assert (place - ONSET, news.kind, news.incident.trajectory) == (510, "closed", trajectory)
    assert news.incident.recovery_loss is None
    assert (news.incident.end or 0) - ONSET == 510


def test_a_mean_just_under_the_limit_is_back() -> None:
    assert told([*healthy(), alarm(ONSET, 5.0), *level(ONSET + 1, 60, 2.54)])[-1] == (110, "closed", "fast")


def falling(first: int, rows: int, from_: float, to: float) -> list[Step]:
    """A loss that falls from row to row by as much."""
    return [(first + row, from_ + (to - from_) * (row + 1) / rows, "GO") for row in range(rows)]


def test_it_is_looked_at_after_50_200_and_500_rows() -> None:
    """Decaying is to have come down by a tenth of what is left: 4.75 to 4.52 is, 4.52 to 4.35 is not."""
    steps = [alarm(ONSET, 6.0), *falling(101, 50, 6.0, 4.75), *falling(151, 150, 4.75, 4.52)]
    assert told([*healthy(), *steps, *falling(301, 310, 4.52, 4.35)]) == [
        (100, "opened", None),
        (150, "look", True),
        (300, "look", True),
        (600, "look", False),
        (610, "closed", "lingering"),
    ]


@pytest.mark.parametrize(("then", "decays"), [(5.0, False), (4.72, False), (4.65, True)])
def test_the_first_look_compares_with_the_highest_mean(then: float, decays: bool) -> None:
    """The mean of 5.00 to that of the last ten rows. Compared with its highest row a climbing mean would be coming
    down."""
    steps = [*healthy(), alarm(ONSET, 5.0), *level(ONSET + 1, 10, 5.0), *falling(ONSET + 11, 50, 5.0, then)]
    assert told(steps)[1] == (150, "look", decays)
    climbing = [(ONSET + t, 5.0 + 0.1 * t, "GO" if t else "ALARM") for t in range(51)]
    assert told([*healthy(), *climbing])[1] == (150, "look", False)


LEFT = 2.0
"""How far above its limit a loss of the tests below stays, or is when it is looked at first."""


def noisy(course: Floats, noise: float, kind: str, rng: np.random.Generator) -> list[Step]:
    """A hundred healthy rows and then a course above them, with noise as that of real losses: with heavy tails, or
    lasting from row to row."""
    rows = ONSET + len(course)
    of_rows = rng.standard_t(3, rows) / math.sqrt(3) if kind == "heavy" else rng.standard_normal(rows)
    if kind == "lasting":
        of_rows = np.array(list(accumulate(of_rows, lambda last, new: 0.5 * last + math.sqrt(0.75) * new)))
    losses = 2.5 + noise * LEFT * of_rows
    losses[ONSET:] += course
    return [(step, float(loss), "ALARM" if step == ONSET else "GO") for step, loss in enumerate(losses)]


def decays_at(look: int, course: Callable[[Floats], Floats], noise: float, kind: str) -> float:
    """How often a course passes a look."""
    rng = np.random.default_rng(0)
    runs = [followed(noisy(course(np.arange(look + 1.0)), noise, kind, rng))[1] for _ in range(20)]
    looks = [item.is_decaying for heard in runs for place, item in heard if place == ONSET + look]
    assert len(looks) == len(runs)
    return float(np.mean([bool(look) for look in looks]))


@pytest.mark.parametrize("kind", ["normal", "heavy", "lasting"])
@pytest.mark.parametrize(("look", "since"), [(50, 30), (200, 150)])
def test_a_loss_that_came_down_and_is_flat_is_not_decaying(look: int, since: int, kind: str) -> None:
    """By noise of 1 % of what is left, as after a bad spike."""
    assert decays_at(look, lambda t: LEFT * (3 - 2 * np.minimum(t / since, 1)), 0.01, kind) <= 0.2


@pytest.mark.parametrize("kind", ["normal", "heavy", "lasting"])
@pytest.mark.parametrize(
    "course",
    [lambda t: LEFT * np.exp((50 - t) / 200), lambda t: LEFT * ((10 + t) / 60) ** -0.3],
    ids=["exponential", "power law"],
)
@pytest.mark.parametrize(("look", "noise"), [(50, 0.02), (50, 0.05), (200, 0.02), (200, 0.05)])
def test_a_loss_that_comes_down_slowly_is_decaying_by_any_noise(
    look: int, noise: float, course: Callable[[Floats], Floats], kind: str
) -> None:
    assert decays_at(look, course, noise, kind) >= 0.9


def test_other_looks_can_be_asked_for() -> None:
    state, looked = begin(), []
    for step, loss, word in [*healthy(), alarm(ONSET, 5.0), *level(ONSET + 1, 800, 5.0)]:
        state, news = advance(state, {"step": step, "loss": loss}, verdict(word), looks=(20, 700))
        looked += [(step - ONSET, item.kind) for item in news]
    assert looked == [(0, "opened"), (20, "look"), (700, "look"), (710, "closed")]


def test_what_is_back_but_not_proven_yet_is_not_looked_at() -> None:
    state, kinds = begin(), []
    for step, loss, word in [*healthy(), alarm(ONSET, 5.0), *level(ONSET + 1, 10, 5.0), *healthy(90, 170)]:
        state, news = advance(state, {"step": step, "loss": loss}, verdict(word), looks=(20, 40))
        kinds += [item.kind for item in news]
    assert kinds == ["opened", "closed"]


def test_losses_that_are_not_finite_are_never_decaying() -> None:
    """Nine of ten rows that were NaN are no longer; the tenth is."""
    steps = [*healthy(), alarm(ONSET, math.nan), *level(ONSET + 1, 41, math.nan, "SKIP"), *level(142, 20, 3.0)]
    assert told(steps)[1] == (150, "look", False)
    steps[141] = (141, 3.0, "GO")
    steps[140] = (140, 3.0, "GO")
    assert told(steps)[1] == (150, "look", True)


def test_a_rollback_is_a_new_attempt() -> None:
    """Back from step 160 to 90: nothing counts until the onset is passed again, then fifty rows must have gone well."""
    bad = [*healthy(), alarm(ONSET, 5.0), *level(ONSET + 1, 60, 5.0, "SKIP")]
    good = [*healthy(90, 151)]
    assert told([*bad, *good[:-1]]) == [(100, "opened", None), (150, "look", False)]
    assert told([*bad, *good])[2:] == [(len(bad) + 60, "closed", None)]
    incident = followed([*bad, *good])[1][-1][1].incident
    assert (incident.number, incident.start, incident.end, incident.peak_loss) == (1, ONSET, 150, 5.0)


def test_healthy_steps_after_a_rollback_are_no_part_of_it() -> None:
    """Gradients are NaN at a finite loss: the run goes back, and healthy losses on the way are higher than those."""
    bad = [(step, 2.5, verdict("ALARM", detector="nonfinite", note="")) for step in range(ONSET, ONSET + 3)]
    again = [(step, 2.7 if step in (80, 120) else 2.5, verdict("GO")) for step in range(60, 151)]
    state, heard = begin(), list[News]()
    for step, loss, judged in [*((step, loss, verdict(word)) for step, loss, word in healthy()), *bad, *again]:
        norm = 0.5 if judged.go else math.nan
        state, news = advance(state, {"step": step, "loss": loss, "grad_norm": norm}, judged)
        heard += news
    closed = heard[-1].incident
    assert (heard[-1].kind, closed.kind, closed.start, closed.end) == ("closed", "nonfinite", ONSET, 150)
    assert (closed.peak, closed.peak_loss, closed.grad_norm_peak) == (ONSET, 2.5, math.inf)


def test_after_a_rollback_it_is_looked_at_again() -> None:
    bad = [*healthy(), alarm(ONSET, 5.0), *level(ONSET + 1, 60, 5.0, "SKIP")]
    again = [*healthy(90), *level(ONSET, 210, 4.0, "SKIP")]
    assert told([*bad, *again])[2:] == [(len(bad) + 60, "look", False), (len(bad) + 210, "look", False)]


def test_far_back_a_higher_loss_is_as_it_should_be() -> None:
    """A thousand steps earlier the loss was higher than before the onset: that is no reason to despair of it."""
    falling = [(step, 4.0 - 0.001 * step, "GO") for step in range(1500)]
    steps = [*falling, alarm(1500, 9.0), *level(1501, 60, 9.0, "SKIP"), *falling[400:]]
    assert [kind for _, kind, _ in told(steps)] == ["opened", "look"]
    assert told([*steps, *[(1500 + t, 2.4, "GO") for t in range(51)]])[-1][1:] == ("closed", None)


def test_trouble_that_comes_sooner_in_a_later_attempt_has_its_onset_there() -> None:
    bad = [*healthy(), alarm(ONSET, 5.0), *level(ONSET + 1, 20, 5.0)]
    again = [*level(60, 20, 2.0), alarm(80, 6.0)]
    state, _ = followed([*bad, *again])
    assert state.open is not None
    assert (state.open.number, state.open.start, state.open.peak_loss) == (1, 80, 6.0)
    assert state.open.usual == pytest.approx((60 * 2.5 + 20 * 2.0) / 80)  # of this attempt
    assert told([*bad, *again, *level(81, 60, 6.0)])[-1][:2] == (len(bad) + 70, "look")


def test_steps_after_a_rollback_take_the_place_of_those_before_it() -> None:
    """Without an incident too: the 100 healthy steps before an onset are those that led to it."""
    _, heard = followed([*healthy(), *level(100, 200, 7.0), *level(100, 50, 3.0), alarm(150, 9.0)])
    assert heard[0][1].incident.pre_loss == pytest.approx(3.0)
    assert heard[0][1].incident.usual == pytest.approx(2.75)


@pytest.mark.parametrize("before", [0, 1, 9])
def test_with_too_few_healthy_steps_calm_closes_it_and_no_trajectory_is_claimed(before: int) -> None:
    steps = [*healthy(0, before), alarm(before, 9.0), (before + 1, 9.0, "SKIP"), *level(before + 2, 60, 4.0)]
    (_, opened), (_, looked), (place, closed) = followed(steps)[1]
    assert (opened.kind, looked.kind, closed.kind, place) == ("opened", "look", "closed", before + 51)
    assert math.isnan(closed.incident.limit)
    assert math.isnan(closed.incident.usual) == (before == 0)
    assert (closed.incident.trajectory, closed.incident.recovery_loss) == (None, 4.0)
    never = [*healthy(0, before), alarm(before, 9.0), *level(before + 1, 600, math.nan, "SKIP")]
    assert followed(never)[1][-1][1].incident.trajectory == "divergent"


def test_ten_healthy_steps_are_enough() -> None:
    assert told([*healthy(0, 10), alarm(10, 9.0), *level(11, 20, 2.5)])[-1] == (20, "closed", "fast")


def test_only_healthy_steps_are_remembered() -> None:
    """Neither skipped ones nor those of an incident: the second has the same usual loss as the first."""
    first = [*healthy(0, 50), (50, 7.0, "SKIP"), *healthy(51, 101), alarm(101, 5.0), *level(102, 30, 5.0)]
    back = [(step, 2.4 if step % 2 else 2.6, "GO") for step in range(132, 142)]
    (_, one), (_, closed), (_, two) = followed([*first, *back, alarm(142, 5.0)])[1]
    assert closed.kind == "closed"
    assert one.incident.usual == pytest.approx(2.5)
    assert two.incident.number == 2
    assert two.incident.usual == pytest.approx(2.5)


def test_updates_must_be_applied_again() -> None:
    """A loss can be as usual while every gradient is NaN: the weights stand still."""
    frozen = [*healthy(), alarm(ONSET, 2.5), *level(ONSET + 1, 40, 2.5, "SKIP")]
    assert told(frozen) == [(100, "opened", None)]
    assert told([*frozen, *level(ONSET + 41, 10, 2.5)])[-1] == (150, "closed", "fast")


def test_the_skips_that_led_to_an_alarm_are_its_beginning() -> None:
    state = begin()
    rows: list[tuple[float, float, str]] = [(2.5, 0.5, "GO")] * 20 + [(9.0, 40.0, "SKIP"), (8.0, 30.0, "ALARM")]
    rows[3] = (99.0, 99.0, "SKIP")  # an isolated one is not part of it
    for step, (loss, norm, word) in enumerate(rows):
        state, _ = advance(state, {"step": step, "loss": loss, "grad_norm": norm}, verdict(word))
    assert state.open is not None
    assert (state.open.start, state.open.peak, state.open.peak_loss, state.open.grad_norm_peak) == (20, 20, 9.0, 40.0)


def test_peaks_that_are_not_finite_and_norms_that_were_not_logged() -> None:
    state, _ = followed([*healthy(), alarm(ONSET, 9.0), (101, math.nan, "SKIP"), (102, 99.0, "SKIP")])
    assert state.open is not None
    assert (state.open.peak, math.isnan(state.open.peak_loss)) == (101, True)
    for norm, expected in ({}, math.nan), ({"grad_norm": math.nan}, math.inf), ({"grad_norm": 0.0}, 0.0):
        state, _ = advance(begin(), {"step": 0, "loss": 9.0, **norm}, verdict("ALARM"))
        assert state.open is not None
        assert repr(state.open.grad_norm_peak) == repr(expected)


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        ([("spike/loss", Severity.ALARM, "loss spike")], "spike"),
        ([("drift/loss", Severity.ALARM, "loss level shift")], "level_shift"),
        ([("drift/loss", Severity.ALARM, "loss drifting up")], "drift"),
        ([("nonfinite", Severity.ALARM, "loss is not finite, 3 times in 500 steps")], "nonfinite"),
        ([("overflow", Severity.ALARM, "loss scale collapsed")], "overflow"),
        ([("monotonic-rise/loss", Severity.ALARM, "")], "drift"),
        ([("proportion", Severity.ALARM, "param_norm has grown 2.1 times in 200 steps")], "drift"),
        ([("three-sigma/loss", Severity.ALARM, "")], "spike"),
        ([("too_hot", Severity.ALARM, "too hot")], "spike"),
        ([("budget", Severity.HALT, "steps in a row not finite"), ("nonfinite", Severity.ALARM, "")], "nonfinite"),
        ([("too_hot", Severity.ALARM, "too hot"), ("drift/loss", Severity.WATCH, "loss level shift")], "spike"),
    ],
    ids=str,
)
def test_kinds(found: list[tuple[str, Severity, str]], kind: str) -> None:
    findings = tuple(finding(severity, detector, note) for detector, severity, note in found)
    assert kind_of(Verdict(step=0, findings=findings)) == kind


def test_the_slow_channel_is_as_late_as_is_thought() -> None:
    assert (drift.TREND + 1) * drift.BLOCK == LATEST


def test_what_is_found_late_began_earlier() -> None:
    rows: list[Row] = [{"step": 10 * i, "loss": 2.4 if i % 2 else 2.6} for i in range(200)]
    rows += [{"step": 10 * i, "loss": 5.0} for i in range(200, 232)]
    state = begin()
    for row in rows[:-1]:
        state, _ = advance(state, row, verdict("GO"))
    state, _ = advance(state, rows[-1], verdict("ALARM", detector="drift/loss", lasts=32))
    assert state.open is not None
    assert state.open.start == 2000
    assert (state.open.usual, state.open.limit) == pytest.approx((2.5, LIMIT))


def test_alarms_that_the_judge_counts_as_one_are_one_incident() -> None:
    """Closed and opened again, under its number and with its onset; what the judge calls another one is another one."""
    state = begin()
    heard: list[tuple[int, str, int, int, str | None]] = []
    alarms = {100: (1, True), 160: (1, False), 400: (2, True)}
    for step in range(420):
        number, opens = alarms.get(step, (0, False))
        row: Row = {"step": step, "loss": 9.0 if number else 2.5}
        state, news = advance(state, row, verdict("ALARM" if number else "GO", number, opens))
        heard += [(step, n.kind, n.incident.number, n.incident.start, n.incident.trajectory) for n in news]
    assert heard == [
        (100, "opened", 1, 100, None),
        (110, "closed", 1, 100, "fast"),
        (160, "opened", 1, 100, None),
        (170, "closed", 1, 100, "slow"),
        (400, "opened", 2, 400, None),
        (410, "closed", 2, 400, "fast"),
    ]


def test_numbers_are_given_once_though_the_judge_goes_back() -> None:
    state, numbers = begin(), []
    for step in range(900):
        is_alarm = step % 200 == 150
        judged = verdict("ALARM", number={150: 1, 350: 1, 550: 7, 750: 2}[step]) if is_alarm else verdict("GO")
        state, news = advance(state, {"step": step, "loss": 9.0 if is_alarm else 2.5}, judged)
        numbers += [item.incident.number for item in news if item.kind == "opened"]
    assert numbers == [1, 2, 7, 8]


def test_rows_without_a_loss_are_not_counted() -> None:
    state, _ = followed(healthy())
    assert advance(state, {"step": 100, "eval_loss": 2.0}, verdict("GO")) == (state, ())


def test_weights_that_are_not_finite_diverge_whatever_the_loss() -> None:
    state, _ = followed(healthy())
    halt = finding(Severity.HALT, "nonfinite", "a parameter is not finite")
    judged = Verdict(step=100, findings=(halt,), incident=1, opens_incident=True)
    state, _ = advance(state, {"step": 100, "loss": 2.5, "params_finite": 0.0}, judged)
    incident = ended(state)
    assert incident is not None
    assert (incident.kind, incident.trajectory, incident.end) == ("nonfinite", "divergent", None)
    assert str(incident) == "incident 1: nonfinite at step 100, loss 2.5 before, not finite at step 100; divergent"


def test_at_the_end_of_a_run_what_cannot_be_told_is_not() -> None:
    def at_the_end(steps: list[Step]) -> Incident | None:
        return ended(followed([*healthy(), alarm(ONSET, 5.0), *steps])[0])

    flat, climbing = (
        at_the_end(level(ONSET + 1, 40, 5.0)),
        at_the_end([(101 + t, 5 + 0.1 * t, "GO") for t in range(40)]),
    )
    assert flat is not None
    assert climbing is not None
    assert (flat.trajectory, climbing.trajectory) == (None, "divergent")
    assert ended(begin()) is None


def recorded(folder: Path, loss_at: Any, steps: int = 2400) -> tuple[list[Row], list[Incident]]:
    """A run that a Watch has recorded, and the incidents that were followed meanwhile."""
    random = np.random.default_rng(3)
    state = begin()
    found: dict[int, Incident] = {}
    with Watch(folder) as watch:
        for step in range(steps):
            loss = float(2.5 * np.exp(0.01 * random.standard_t(5))) * loss_at(step)
            judged = watch.see(step, loss=loss, grad_norm=float(0.5 * np.exp(0.2 * random.standard_t(5)))).verdict
            if step % 100 == 99:
                watch.see(step, eval_loss=2.5)
            state, news = advance(state, {"step": step, "loss": loss}, judged)
            found |= {item.incident.number: item.incident for item in news}
    return list(open_run(folder).rows()), list(found.values())


def test_a_recorded_run_has_the_incidents_that_were_followed_live(tmp_path: Path) -> None:
    def loss_at(step: int) -> float:
        if 1300 <= step < 1303:
            return math.nan
        return 1 + 2 * math.exp(-(step - 1600) / 20) if step >= 1600 else 1.0

    rows, live = recorded(tmp_path / "a1", loss_at)
    incidents = incidents_of(rows, judge.replay(rows))
    assert [(i.number, i.kind, i.start, i.trajectory) for i in incidents] == [
        (1, "nonfinite", 1300, "fast"),
        (2, "spike", 1600, "slow"),
    ]
    assert (math.isnan(incidents[0].peak_loss), incidents[1].peak) == (True, 1600)
    assert [(i.start, i.end, i.trajectory) for i in incidents] == [(i.start, i.end, i.trajectory) for i in live]
    assert all(i.pre_loss == pytest.approx(2.5, rel=0.01) for i in incidents)


def test_a_recorded_level_shift_began_where_it_began(tmp_path: Path) -> None:
    """Found by the slow channel alone, at the second block of 16: the loss before it is that before the shift."""
    rows, _ = recorded(tmp_path / "a1", lambda step: 1.04 if step >= 1500 else 1.0)
    (incident,) = incidents_of(rows, judge.replay(rows))
    assert (incident.kind, incident.trajectory) == ("level_shift", "lingering")
    assert abs(incident.start - 1500) <= drift.BLOCK
    assert incident.usual == pytest.approx(2.5, rel=0.005)


def test_a_recorded_run_that_ends_in_nan_has_diverged(tmp_path: Path) -> None:
    rows, _ = recorded(tmp_path / "a1", lambda step: math.nan if step >= 1500 else 1.0, steps=1506)
    (incident,) = incidents_of(rows, judge.replay(rows))
    assert (incident.start, incident.end, incident.trajectory) == (1500, None, "divergent")


def test_a_verdict_is_missing() -> None:
    with pytest.raises(ValueError, match="shorter"):
        incidents_of([{"step": 0, "loss": 2.5}], [])


anything = st.floats() | st.sampled_from([math.nan, math.inf, -math.inf, 2.5, 1e308, -1e308])
findings = st.builds(
    finding,
    st.sampled_from(Severity),
    st.sampled_from(["spike/loss", "drift/loss", "nonfinite", "overflow", "budget", "mine"]),
    st.sampled_from(["", "loss level shift", "loss drifting up"]),
)


@st.composite
def streams(draw: st.DrawFn) -> list[tuple[Row, Verdict]]:
    """Stretches of rows: steps going on, back or by tens, with any losses and any verdicts, consistent or not."""
    stream: list[tuple[Row, Verdict]] = []
    step = 0
    for _ in range(draw(st.integers(1, 10))):
        step = max(0, step + draw(st.integers(-150, 30)))
        loss, stride = draw(anything | st.just(2.5)), draw(st.sampled_from([0, 1, 1, 1, 10]))
        others = draw(st.fixed_dictionaries({}, optional={"grad_norm": anything, "params_finite": anything}))
        found = draw(st.just(()) | st.lists(findings, max_size=2).map(tuple))
        number = draw(st.none() | st.integers(1, 9))
        judged = Verdict(step=step, findings=found, incident=number, opens_incident=draw(st.booleans()))
        for _ in range(draw(st.sampled_from([1, 2, 12, 60, 200]))):
            step += stride
            stream.append(({"step": step, "loss": loss, **others}, judged))
            judged = judged if number is None else Verdict(step=step)
    return stream


def parts(state: Any) -> Iterator[Any]:
    if isinstance(state, tuple):
        for part in state:
            yield from parts(part)
    else:
        yield state


@settings(max_examples=100)
@given(stream=streams(), looks=st.sampled_from([LOOKS, (10,), (50, 600), ()]))
def test_any_stream_has_at_most_one_open_incident(stream: list[tuple[Row, Verdict]], looks: tuple[int, ...]) -> None:
    state, numbers = begin(), [0]
    open_: int | None = None
    for row, judged in stream:
        state, news = advance(state, row, judged, looks)
        for item in news:
            incident = item.incident
            if item.kind == "opened":
                assert open_ is None
                assert judged.incident is not None
                assert incident.number >= numbers[-1]
                numbers.append(incident.number)
            else:
                assert open_ == incident.number
            assert (incident.end is None) == (item.kind != "closed")
            assert (item.is_decaying is None) == (item.kind != "look")
            assert incident.trajectory in (None, "fast", "slow", "lingering", "divergent")
            assert str(incident)
            open_ = None if item.kind == "closed" else incident.number
        assert state.is_open == (open_ is not None)
    last = ended(state)
    assert (last.number if last else None) == open_


@settings(max_examples=60)
@given(stream=streams(), cut=st.floats(0, 1))
def test_a_state_is_plain_and_survives_being_written(stream: list[tuple[Row, Verdict]], cut: float) -> None:
    state = restored = begin()
    for place, (row, judged) in enumerate(stream):
        (state, news), (restored, same) = advance(state, row, judged), advance(restored, row, judged)
        assert repr(news) == repr(same)  # NaN too
        if news or place == int(cut * len(stream)):
            restored = thaw(begin(), json.loads(json.dumps(state, allow_nan=False)))
            assert repr(restored) == repr(state)  # the types too
    assert restored == state
    json.dumps(state, allow_nan=False)


def test_memory_is_bounded() -> None:
    sizes = [sum(1 for _ in parts(followed(healthy(0, rows))[0])) for rows in (500, 2000)]
    assert max(sizes) < MEMORY + 2 * BLOCK + 50


@settings(max_examples=25)
@given(
    seed=st.integers(0, 1000),
    factors=st.lists(st.sampled_from([1.0, 1.1, 4.0, math.nan, math.inf]), min_size=5, max_size=30),
    back=st.integers(0, 60),
)
def test_whatever_the_judge_says_every_incident_is_closed_or_open_at_the_end(
    seed: int, factors: list[float], back: int
) -> None:
    random = np.random.default_rng(seed)
    detectors = judge.standard()
    judging, state, opened = judge.begin(detectors), begin(), 0
    for place in range(30 * len(factors)):
        step = place if place < 15 * len(factors) else place - back
        row: Row = {"step": step, "loss": float(2.5 * np.exp(0.01 * random.normal())) * factors[place // 30]}
        judging, judged = judge.fold(detectors, judging, row)
        state, news = advance(state, row, judged)
        opened += sum({"opened": 1, "look": 0, "closed": -1}[item.kind] for item in news)
        assert opened == (state.open is not None)


def test_no_torch_is_needed() -> None:
    check = "import sealegs.incidents, sys; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


@pytest.mark.parametrize(("suspicious", "start"), [((97, 98, 99), 97), ((96, 97, 98), 100)], ids=["lead", "gap"])
def test_an_incident_begins_with_the_suspicious_rows_right_before_it(suspicious: tuple[int, ...], start: int) -> None:
    """The gradient norm leads the loss by a few steps, and no single one of these is an alarm."""
    state = begin()
    for step, loss, _ in [*healthy(), *level(ONSET, 8, 6.0)]:
        is_last = step == ONSET + 7
        found = (finding(lasts=8, note="loss stays high"),) if is_last else ()
        verdict = Verdict(
            step=step,
            findings=found,
            incident=1 if is_last else None,
            opens_incident=is_last,
            is_suspicious=step in suspicious,
        )
        state, _ = advance(state, {"step": step, "loss": loss}, verdict)
    assert state.open is not None
    assert state.open.start == start
    assert state.open.pre_loss == pytest.approx(2.5, abs=0.05), "losses from the onset on are not usual"
    assert thaw(begin(), json.loads(json.dumps(state))) == state


def test_an_incident_that_was_opened_again_closes_past_its_last_stretch() -> None:
    """It closed, opened again at step 150, and the run went back to step 140: only from 150 on is anything known."""
    steps = [*healthy(), alarm(100, 6.0), *healthy(101, 150), *level(150, 30, 6.0, "ALARM"), *healthy(140, 260)]
    state, closings = begin(), []
    for step, loss, word in steps:
        found = (finding(),) if word == "ALARM" else ()
        verdict = Verdict(
            step=step, findings=found, incident=1 if found else None, opens_incident=step == 100 and bool(found)
        )
        state, news = advance(state, {"step": step, "loss": loss}, verdict)
        closings += [item.incident for item in news if item.kind == "closed"]
    assert [incident.number for incident in closings] == [1, 1]
    assert closings[-1].end == 200
    assert "6 at step 100" in str(closings[-1])


def test_the_text_of_an_incident_says_nothing_of_a_loss_that_it_does_not_know() -> None:
    known = Incident(
        number=1,
        start=2,
        kind="spike",
        pre_loss=math.nan,
        usual=math.nan,
        limit=math.nan,
        peak=9,
        peak_loss=7.0,
        grad_norm_peak=math.nan,
        end=5,
    )
    text = "incident 1: spike at step 2, loss 7 at step 9, before the run went back; closed: did not recover at step 5"
    assert str(known) == text
