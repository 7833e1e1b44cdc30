"""What a run shows that no single step does."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from sealegs.recovery.evidence import (
    BEING_TAUGHT,
    DEAR_IN_A_ROW,
    FIRST,
    HEALING,
    LATELY,
    OFTEN_WITHIN,
    PROBE_AGAIN,
    TAUGHT,
    WINDOW,
    Anomaly,
    AnomalyEvidence,
)
from sealegs.recovery.playbook import Playbook
from sealegs.recovery.recurrence import Trigger
from sealegs.vocabulary import Finding, Row, Severity, Verdict

NEXT = 10_000
"""The step before which batches are tried again."""


def watching() -> AnomalyEvidence:
    """Of a run that has learned something: it began with a loss of 20."""
    evidence = AnomalyEvidence(Playbook.standard())
    evidence.load_state_dict(evidence.state_dict() | {"first": (math.log(20),) * FIRST})
    return evidence


def seen(evidence: AnomalyEvidence, step: int, kind: str = "go", **signals: float | str) -> Anomaly | None:
    """A step that is judged: one that is ``high`` surprises, and its update is applied."""
    row: Row = {"step": step, "batch_index": step + 1000, "loss": 2.0, **signals}
    gate = Severity.GATE
    severity = {"go": None, "skip": gate, "high": gate, "nan": gate, "halt": Severity.HALT}[kind]
    detector = "nonfinite" if kind == "nan" else "spike/loss"
    findings = () if severity is None else (_finding(detector, step, severity, spoils_update=kind != "high"),)
    return evidence.weigh(row, Verdict(step=step, findings=findings, skips_in_a_row=int(kind not in ("go", "high"))))


def asks(evidence: AnomalyEvidence) -> bool:
    return evidence.wants_probe


def probed(
    evidence: AnomalyEvidence, *, loss: float = 2.0, is_condemned: bool = False, source: str | None = None
) -> Anomaly | None:
    """What is found at once when batches from before have that loss, which were at 2."""
    return evidence.probed(
        f"a loss of {loss:g}",
        number=NEXT,
        loss=loss,
        rise=math.log(loss / 2.0),
        least=0.1,
        is_condemned=is_condemned,
        source=source,
    )


def found_damaged(evidence: AnomalyEvidence, *, loss: float = 9.0) -> Anomaly:
    """The same where batches from before are bad, and so are all that come."""
    assert probed(evidence, loss=loss, is_condemned=True) is None, "which may be other data, or heal"
    anomalies = (seen(evidence, NEXT + after, loss=loss) for after in range(HEALING))
    return next(anomaly for anomaly in anomalies if anomaly is not None)


def _finding(detector: str, step: int, severity: Severity, *, spoils_update: bool) -> Finding:
    return Finding(
        detector=detector,
        step=step,
        severity=severity,
        signal="loss",
        value=9.0,
        limit=3.0,
        spoils_update=spoils_update,
    )


@pytest.mark.parametrize("kind", ["skip", "high"])
def test_a_surprise_asks_for_a_probe_at_once_and_not_again_while_it_goes_on(kind: str) -> None:
    """Be it skipped or trained on: five steps later weights may learn other data, and forgotten the rest."""
    evidence = watching()
    for step in range(5):
        seen(evidence, step)
        assert not asks(evidence)
    seen(evidence, 5, kind)
    assert asks(evidence)
    assert probed(evidence) is None
    for step in range(6, 60):
        assert not asks(evidence)
        seen(evidence, step, kind)
    for step in range(60, 61 + PROBE_AGAIN):
        seen(evidence, step)
    seen(evidence, 61 + PROBE_AGAIN, kind)
    assert asks(evidence), "another one"


def test_a_surprise_that_others_have_followed_is_asked_about_all_the_same() -> None:
    """A device tells of it a few steps later."""
    evidence = watching()
    for step in range(5):
        seen(evidence, step)
    for step in range(5, 5 + LATELY):
        seen(evidence, step, "high" if step == 5 else "go")
        assert asks(evidence)
    seen(evidence, 5 + LATELY)
    assert not asks(evidence), "nobody could be asked, and it is long over"


@pytest.mark.parametrize("kind", ["skip", "high"])
def test_one_surprise_is_no_damage_and_five_in_a_row_are(kind: str) -> None:
    evidence = watching()
    seen(evidence, 0, kind)
    assert probed(evidence, loss=9.0, is_condemned=True) is None
    for step in range(1, 5):
        assert not asks(evidence)
        assert seen(evidence, step, kind) is None
    assert asks(evidence)
    anomaly = found_damaged(evidence)
    assert (anomaly.trigger, anomaly.onset, anomaly.batch) == (Trigger.DAMAGED, 0, 1000)


def test_weights_that_were_dear_at_a_surprise_are_asked_again_though_nothing_surprises_any_more() -> None:
    """As in a young run, which takes what it cannot explain for its new level."""
    evidence = watching()
    for step in range(60):
        seen(evidence, step, "skip" if step >= 57 else "go", loss=9.0 if step >= 57 else 2.0)
        if asks(evidence):
            assert probed(evidence, loss=9.0, is_condemned=True) is None
    for step in range(60, 57 + LATELY):
        seen(evidence, step, loss=9.0)
        assert not asks(evidence), "the first was asked after step 57"
    seen(evidence, 57 + LATELY, loss=9.0)
    assert asks(evidence)
    assert found_damaged(evidence).onset == 57
    grown = watching()
    for step in range(500, 560):
        seen(grown, step, "skip" if step >= 557 else "go", loss=9.0 if step >= 557 else 2.0)
        if asks(grown):
            assert probed(grown, loss=9.0, is_condemned=True) is None
    for step in range(560, 600):
        seen(grown, step, loss=9.0)
        assert not asks(grown), "one that knows its noise would be surprised"


def test_a_loss_that_has_grown_since_the_run_began_asks_for_nothing() -> None:
    """Returns that grow; what is learned becomes harder."""
    for factor, asked in ((1.04, True), (1.06, False)):
        evidence = AnomalyEvidence(Playbook.standard())
        for step in range(200):
            seen(evidence, step, loss=2.0 if step < FIRST else 2.0 * factor)
        seen(evidence, 200, "high", loss=9.0)
        assert asks(evidence) == asked


def test_a_loss_of_both_signs_asks_for_nothing_also_in_a_resumed_run() -> None:
    """Old batches of a policy, or a batch whose loss was -2, cannot be held against their loss then."""
    for first, asked in ((0.1, True), (-0.1, False)):
        evidence = watching()
        seen(evidence, 100, loss=first)
        resumed = AnomalyEvidence(Playbook.standard())
        resumed.load_state_dict(json.loads(json.dumps(evidence.state_dict())))
        for known in (evidence, resumed):
            for step in range(101, 160):
                seen(known, step)
            seen(known, 160, "high", loss=9.0)
            assert asks(known) == asked
            assert known.is_signed != asked
    nonfinite = [seen(evidence, 161 + more, "nan", loss=math.nan) for more in range(9)]
    assert any(nonfinite), "what is not finite is no question of scale"


def test_two_batches_dearer_than_any_before_ask_though_nothing_is_surprised() -> None:
    evidence = watching()
    for step in range(WINDOW):
        seen(evidence, step, loss=2.0 + step % 3 / 4)
    for step, loss in enumerate([3.0, 2.0, 2.9, 2.9], WINDOW):
        assert not asks(evidence)
        seen(evidence, step, loss=loss)
    assert not asks(evidence), "3.0 has come before"
    for step, loss in enumerate([3.2, 3.1], WINDOW + 4):
        seen(evidence, step, loss=loss)
    assert asks(evidence)
    assert probed(evidence) is None
    for step in range(WINDOW + 6, WINDOW + 200):
        seen(evidence, step, loss=3.2)
        assert not asks(evidence), "it is asked once"


@pytest.mark.parametrize(("kind", "is_damage"), [("go", False), ("high", True)])
def test_a_run_without_a_surprise_is_not_brought_back(kind: str, is_damage: bool) -> None:
    """Batches may be dear by chance, at once and again; an adversary makes them so."""
    evidence = watching()
    for step in range(2 * WINDOW):
        seen(evidence, step, "high" if step == 150 and kind == "high" else "go")
        if asks(evidence):
            probed(evidence)
    for step in range(2 * WINDOW, 2 * WINDOW + LATELY + DEAR_IN_A_ROW):
        seen(evidence, step, loss=3.0 if step < 2 * WINDOW + DEAR_IN_A_ROW else 5.0)
        if asks(evidence) and step < 2 * WINDOW + DEAR_IN_A_ROW:
            assert probed(evidence) is None
    for step in range(2 * WINDOW + LATELY + DEAR_IN_A_ROW, 2 * WINDOW + BEING_TAUGHT + 2 * LATELY):
        seen(evidence, step, loss=9.0)
    assert asks(evidence), "they have become dearer since they were found sound"
    assert probed(evidence, loss=9.0, is_condemned=True) is None
    assert any(seen(evidence, NEXT + after, loss=9.0) for after in range(HEALING)) == is_damage


def test_what_a_loss_that_has_grown_was_not_asked_about_it_is_not_asked_later() -> None:
    """Returns that grow, and shrink again."""
    evidence = AnomalyEvidence(Playbook.standard())
    for step in range(FIRST):
        seen(evidence, step, loss=2.0)
    for step in range(FIRST, 3 * WINDOW):
        seen(evidence, step, loss=4.0)
    drift = replace(_finding("drift/loss", 300, Severity.ALARM, spoils_update=False), lasts=50)
    evidence.weigh({"step": 300, "loss": 4.0}, Verdict(step=300, findings=(drift,), skips_in_a_row=0))
    assert not asks(evidence)
    for step in range(301, 600):
        seen(evidence, step, loss=1.9)
        assert not asks(evidence)


@pytest.mark.parametrize(("beside", "onset"), [("spike/loss", 300), ("drift/loss", 281)])
def test_a_spike_dates_the_weights_that_leapt_with_it(beside: str, onset: int) -> None:
    """A weight norm is compared with its last sample; the batches since then are not at fault."""
    evidence = watching()
    for step in range(300):
        seen(evidence, step)
    grown = replace(_finding("proportion", 300, Severity.ALARM, spoils_update=False), lasts=20)
    alarms = (grown, _finding(beside, 300, Severity.ALARM, spoils_update=True))
    evidence.weigh({"step": 300, "loss": 900.0}, Verdict(step=300, findings=alarms))
    assert asks(evidence)
    assert evidence.probed("bad", number=301, loss=900.0, rise=6.0, least=0.1, is_condemned=True, source=None) is None
    anomalies = [seen(evidence, step, loss=900.0) for step in range(301, 301 + HEALING)]
    assert [anomaly.onset for anomaly in anomalies if anomaly is not None][:1] == [onset]


def rejected(*, loss: float = 9.0, least: float = 0.1, spread: float = 1.0) -> AnomalyEvidence:
    """Weights by which batches from before have that loss, after five surprising steps, each so many times dearer or
    cheaper than the next."""
    evidence = watching()
    for step in range(60):
        dear = 9.0 * spread if step % 2 else 9.0 / spread
        seen(evidence, step, "high" if step >= 55 else "go", loss=dear if step >= 55 else 2.0)
    rise = math.log(loss / 2.0)
    found = evidence.probed("bad", number=NEXT, loss=loss, rise=rise, least=least, is_condemned=True, source=None)
    assert found is None
    return evidence


@pytest.mark.parametrize(("then", "is_damage"), [(9.0, True), (4.6, True), (4.4, False)])
def test_weights_by_which_the_next_batch_is_far_cheaper_have_learned_other_data(then: float, is_damage: bool) -> None:
    evidence = rejected()
    seen(evidence, NEXT - 1, loss=2.0)
    assert not evidence.excuse, "which was trained on before they were tried"
    anomaly = seen(evidence, NEXT, loss=then)
    assert evidence.is_sound == bool(evidence.excuse) != is_damage
    for step in range(NEXT + 1, NEXT + HEALING):
        assert not asks(evidence)
        anomaly = seen(evidence, step, loss=then) or anomaly
    assert (anomaly is not None) == is_damage


@pytest.mark.parametrize(("old", "then", "is_damage"), [(4.0, 9.0, False), (4.0, 4.9, True), (8.0, 9.0, True)])
def test_weights_by_which_the_next_batches_are_dearer_still_learn_other_data(
    old: float, then: float, is_damage: bool
) -> None:
    evidence = rejected(loss=old)
    anomaly = seen(evidence, NEXT, loss=then)
    assert evidence.is_sound == bool(evidence.excuse) != is_damage
    for step in range(NEXT + 1, NEXT + HEALING):
        anomaly = seen(evidence, step, loss=then) or anomaly
    assert (anomaly is not None) == is_damage


def test_batches_that_differ_more_tell_less_of_that() -> None:
    evidence = rejected(least=1.0)
    seen(evidence, NEXT, loss=4.4)
    assert not evidence.excuse
    evidence = rejected(least=1.0)
    seen(evidence, NEXT, loss=3.2)
    assert "learn other data" in evidence.excuse


@pytest.mark.parametrize(("old", "then"), [(9.0, 1.5), (4.0, 24.0)])
def test_one_batch_tells_nothing_where_batches_differ_by_as_much(old: float, then: float) -> None:
    """As by a first layer that is twenty times too large: one batch costs ten times what another does."""
    for spread, tells in ((1.1, True), (3.0, False)):
        evidence = rejected(loss=old, spread=spread)
        seen(evidence, NEXT, loss=then)
        assert bool(evidence.excuse) == tells


def test_weights_that_heal_are_left_alone() -> None:
    """Half of the rise is over within sixteen steps, as a logarithm: 9 to 4.2."""
    for last, heals in ((4.0, True), (4.5, False)):
        evidence = rejected()
        anomalies = [seen(evidence, NEXT + after, loss=9.0 if after < 4 else last) for after in range(HEALING)]
        assert any(anomalies) != heals
    evidence = rejected()
    evidence.loss_is_back()
    assert not any(seen(evidence, NEXT + after, loss=9.0) for after in range(HEALING))


@pytest.mark.parametrize(("kind", "loss"), [("high", 11.5), ("skip", 9.0)])
def test_what_becomes_worse_or_is_not_trained_on_is_not_waited_for(kind: str, loss: float) -> None:
    evidence = rejected()
    anomalies = [seen(evidence, NEXT + after, kind, loss=loss) for after in range(LATELY)]
    assert any(anomalies)
    assert any(anomalies[:1]) == (kind == "high")


def test_what_the_loss_has_come_back_from_by_itself_is_no_damage() -> None:
    evidence = watching()
    for step in range(400):
        seen(evidence, step, loss=4.0 if 100 <= step < 150 else 2.0, grad_norm=3.0 if 200 <= step < 240 else 1.0)
    of_loss, of_norm = evidence.wander
    assert 1.5 * math.log(2) < of_loss <= 2 * math.log(2)
    assert 1.5 * math.log(3) < of_norm <= 2 * math.log(3)
    evidence.new_incident()
    for step in range(400, 408):
        seen(evidence, step, loss=6.0)
    assert not evidence.has_risen(2.0)
    for step in range(408, 416):
        seen(evidence, step, loss=9.0)
    assert evidence.has_risen(2.0)


def test_the_way_down_of_an_incident_does_not_excuse_where_it_stays() -> None:
    evidence = watching()
    for step in range(200):
        seen(evidence, step, loss=2.0)
    evidence.new_incident()
    for step in range(200, 600):
        seen(evidence, step, loss=9.0 if step < 250 else 3.0)
    assert evidence.wander[0] > math.log(3 / 2), "as far as it went up, and came down by half"
    assert evidence.has_risen(2.0)


def test_a_rise_that_is_known_to_be_of_the_data_says_nothing_of_that() -> None:
    evidence, end = other_data(40)
    for step in range(end, end + 2 * WINDOW):
        seen(evidence, step)
    assert evidence.wander == (0.0, 0.0)


def test_what_was_gone_back_from_was_not_come_back_from() -> None:
    evidence = watching()
    for step in range(3):
        for _ in range(WINDOW):
            seen(evidence, step)
        for _ in range(20 if step else 2 * WINDOW):  # the window of the recent steps may be past its beginning
            seen(evidence, step, loss=9.0)
        evidence.begin_anew()
    assert evidence.wander == (0.0, 0.0)


def test_a_tenth_of_what_was_learned_is_slight() -> None:
    evidence = watching()
    assert evidence.is_slight(3.7, 2.0)
    assert not evidence.is_slight(3.9, 2.0)
    assert not evidence.is_slight(math.nan, 2.0)
    assert not AnomalyEvidence(Playbook.standard()).is_slight(2.1, 2.0), "nobody knows"


def after_a_leap(to: float, *, taught: int = 0) -> AnomalyEvidence:
    evidence = watching()
    for step in range(40):
        seen(evidence, step, loss=2.0)
    for step in range(40, 52):
        seen(evidence, step, "high" if 40 < step <= 40 + taught else "skip", loss=to)
    return evidence


def is_of_the_data(evidence: AnomalyEvidence, rise: float, *, norm_has_grown: bool = False) -> bool:
    return evidence.is_of_the_data(rise, norm_has_grown=norm_has_grown)


def test_weights_that_were_taught_nothing_since_have_not_forgotten_anything_either() -> None:
    rise = 0.4 * math.log(2)
    assert not is_of_the_data(after_a_leap(4.0), rise, norm_has_grown=True)
    assert not is_of_the_data(after_a_leap(4.0, taught=TAUGHT - 1), rise, norm_has_grown=True)
    assert is_of_the_data(after_a_leap(4.0, taught=TAUGHT), rise, norm_has_grown=True)
    assert is_of_the_data(after_a_leap(4.0), rise), "one batch has not quite the same loss a few steps later"


def test_other_data_are_told_from_damaged_weights_by_how_much_dearer_each_has_become() -> None:
    evidence, doubled = after_a_leap(4.0), math.log(2)
    assert is_of_the_data(evidence, 0.4 * doubled), "a batch from before has changed much less"
    assert not is_of_the_data(evidence, 0.9 * doubled), "it has changed as the new ones have"
    assert not is_of_the_data(evidence, math.inf)
    assert not is_of_the_data(after_a_leap(2.4), 0.0), "no leap: a single batch does not tell such things apart"


@pytest.mark.parametrize(("then", "asks_again"), [(3.9, False), (4.9, False), (5.1, True), (math.inf, True)])
def test_weights_that_were_found_sound_are_asked_once_more_where_batches_become_dearer_again(
    then: float, asks_again: bool
) -> None:
    evidence = after_a_leap(4.0)
    assert probed(evidence) is None
    asked = []
    for step in range(52, 72):
        seen(evidence, step, loss=then)
        asked.append(asks(evidence))
    assert not any(asked[: LATELY - 1]), "a few batches tell nothing"
    assert asked[LATELY - 1] == asked[-1] == asks_again
    if asks_again:
        probed(evidence)
        assert not asks(evidence)


def test_sound_weights_that_nothing_was_taught_since_are_not_asked_again() -> None:
    evidence = after_a_leap(4.0)
    assert probed(evidence) is None
    for step in range(52, 52 + PROBE_AGAIN - 1):
        seen(evidence, step, "skip", loss=9.0)
        assert not asks(evidence)


def test_what_was_usual_before_a_leap_is_remembered_as_long_as_it_lasts() -> None:
    evidence = after_a_leap(4.0)
    assert is_of_the_data(evidence, 0.0)
    for step in range(52, 200):
        seen(evidence, step, "skip", loss=3.9)
    assert is_of_the_data(evidence, 0.2)
    evidence.forget()
    for step in range(200, 205):
        seen(evidence, step, "skip", loss=4.0)
    assert not is_of_the_data(evidence, 0.0), "nothing is known of before"


def mixed(evidence: AnomalyEvidence, steps: range, verdict: str, *, rise: float = 0.0, of_web: float = 0.0) -> None:
    """Steps whose batches are of two sources, of which books are the harder by nature."""
    for step in steps:
        web = step * 5 % 8
        noise = 0.05 * (step * 7 % 5 - 2)
        loss = 2.0 + (8 - web) / 8 + noise + rise + of_web * web / 8
        seen(evidence, step, verdict, loss=loss, sources=f"web={web} books={8 - web}")


def test_a_source_is_named_where_the_loss_has_risen_with_its_share() -> None:
    evidence = watching()
    mixed(evidence, range(30), "go")
    mixed(evidence, range(30, 42), "skip", of_web=3.0)
    anomaly = probed(evidence, source=evidence.suspect())
    assert anomaly is not None
    assert (anomaly.trigger, anomaly.source, anomaly.onset) == (Trigger.BAD_DATA, "web", 30)


def test_a_source_that_is_hard_by_nature_is_not_blamed() -> None:
    for before in (0, 30):
        evidence = watching()
        mixed(evidence, range(before), "go")
        mixed(evidence, range(before, before + 40), "skip", rise=1.0)
        assert evidence.suspect() is None


def test_many_batches_tell_what_few_did_not() -> None:
    evidence = watching()
    mixed(evidence, range(30), "go")
    mixed(evidence, range(30, 36), "skip", of_web=2.0)
    assert probed(evidence, source=evidence.suspect()) is None
    asked = []
    for step in range(36, 100):
        mixed(evidence, range(step, step + 1), "go", of_web=2.0)
        if evidence.wants_suspect:
            asked.append((step, evidence.suspect()))
    assert [step for step, _ in asked] == list(range(40, 90, 5)), "not for ever"
    assert asked[0][1] == "web"
    evidence = watching()
    mixed(evidence, range(30), "go")
    mixed(evidence, range(30, 50), "skip", of_web=2.0)
    anomaly = evidence.explained("web")
    assert (anomaly.trigger, anomaly.source, anomaly.onset) == (Trigger.BAD_DATA, "web", 30)
    assert anomaly.text.startswith("in 20 steps the loss went with the share of web")


def test_not_finite_in_a_row_or_too_often() -> None:
    evidence = watching()
    assert [seen(evidence, step, "nan") for step in range(2)] == [None, None]
    anomaly = seen(evidence, 2, "nan")
    assert anomaly is not None
    assert (anomaly.trigger, anomaly.onset) == (Trigger.NONFINITE_OFTEN, 0)
    evidence.forget()
    found = [step for step in range(1000) if seen(evidence, step, "nan" if step % 50 == 0 else "go")]
    assert found[0] == 250, "the sixth in 500 steps is more than 1 %"
    evidence.forget()
    assert not any(seen(evidence, step, "nan" if step % (OFTEN_WITHIN // 5) == 0 else "go") for step in range(2000))


def test_of_scattered_steps_the_last_stretch_is_left_out_and_the_one_that_triggered() -> None:
    """The run goes back to before the first, at step 400; batches are numbered a thousand higher than steps."""
    evidence = watching()
    nan = {40, 150, 260, 400, 470, 471}
    anomaly = next(found for step in range(500) if (found := seen(evidence, step, "nan" if step in nan else "go")))
    assert (anomaly.onset, anomaly.batch, anomaly.triggered_by) == (400, 1470, 1471)


def test_weights_that_are_not_finite_and_a_spent_budget() -> None:
    evidence = watching()
    anomaly = seen(evidence, 7, params_finite=0.0)
    assert anomaly is not None
    assert (anomaly.trigger, anomaly.onset) == (Trigger.NONFINITE_WEIGHTS, 7)
    spent = seen(evidence, 8, "halt")
    assert spent is not None
    assert spent.trigger == Trigger.BUDGET_SPENT


def test_what_was_dear_before_the_trouble_has_taught_nothing_of_it() -> None:
    evidence = watching()
    for step in range(95):  # a young run, whose first losses are higher than what comes of the damage
        seen(evidence, step, loss=4.0 + 7.0 * math.exp(-step / 30))
    for step in range(95, 100):
        seen(evidence, step, "skip", loss=8.0)
    assert is_of_the_data(evidence, 0.0)
    assert not is_of_the_data(evidence, 0.0, norm_has_grown=True)


def acquitted(*, before: float = 3.0, then: float = 4.0) -> AnomalyEvidence:
    """Sound: batches cost more since step 100, and were trained on."""
    evidence = watching()
    for step in range(100):
        seen(evidence, step, loss=before)
    for step in range(100, 112):
        seen(evidence, step, "skip" if step == 111 else "go", loss=then)
    assert is_of_the_data(evidence, 0.1)
    assert probed(evidence, loss=3.0) is None
    return evidence


@pytest.mark.parametrize("steps", [30, 70, 120])
def test_a_second_change_of_the_data_is_measured_from_before_the_first(steps: int) -> None:
    """As the batches that are tried again are."""
    evidence = acquitted()
    for step in range(112, 112 + steps):
        seen(evidence, step, loss=4.0)
        assert not asks(evidence)
    losses = [6.0] * 7 + [5.1]  # the last of which is no more than the others
    for step, loss in enumerate(losses, 112 + steps):
        seen(evidence, step, loss=loss)
    assert asks(evidence)
    assert is_of_the_data(evidence, 0.25)
    assert not is_of_the_data(evidence, 0.4)


def test_weights_that_were_sound_when_other_data_began_are_taught_by_these() -> None:
    """A stage of a curriculum in which everything becomes dearer for a while: it came with the data."""
    evidence = acquitted()
    for step in range(112, 112 + LATELY + 1):
        seen(evidence, step, loss=5.0 if step < 112 + 1 else 8.0)
    assert asks(evidence)
    assert is_of_the_data(evidence, 2.0)


def test_what_was_dear_when_weights_were_found_sound_is_not_the_measure_for_ever() -> None:
    evidence = acquitted(then=10.0)
    for step in range(112, 300):
        seen(evidence, step, loss=3.0)
        assert not asks(evidence)
    for step in range(300, 300 + LATELY):
        seen(evidence, step, loss=9.0)
    assert asks(evidence)


@pytest.mark.parametrize(("loss", "is_over"), [(3.0, True), (4.0, False), (7.0, False)])
def test_a_surprise_after_other_data_have_gone_is_tried_anew(loss: float, is_over: bool) -> None:
    """Eight calm steps after they have gone; while they last, or are being learned, one more surprise is no news."""
    evidence = acquitted(then=12.0)
    for step in range(112, 112 + LATELY):
        seen(evidence, step, loss=loss)
    seen(evidence, 112 + LATELY, "skip", loss=12.5)
    assert asks(evidence) == is_over


def test_a_new_incident_long_after_a_probe_is_not_covered_by_it() -> None:
    evidence = acquitted()
    for step in range(112, 180):
        seen(evidence, step, loss=4.0)
    evidence.new_incident()
    assert evidence.is_sound, "which may be the same change"
    for step in range(180, 220):
        seen(evidence, step, loss=4.0)
    evidence.new_incident()
    assert not evidence.is_sound


@pytest.mark.parametrize("loss", [4.0, 40.0])
def test_a_finding_that_no_probe_can_renew_holds_for_losses_like_those_that_it_was_about(loss: float) -> None:
    """Other data may cost more for as long as they come; what leaps beyond them was not tried."""
    evidence = acquitted(then=4.0)
    for step in range(112, 160):
        seen(evidence, step, loss=4.0)
    for step in range(160, 160 + LATELY):
        assert evidence.is_sound
        seen(evidence, step, "high", loss=loss)
        evidence.cannot_probe()
    assert evidence.is_sound == (loss == 4.0)


@pytest.mark.parametrize("then", [4.0, math.inf])
def test_what_a_probe_found_is_restored(then: float) -> None:
    evidence, restored = acquitted(then=then), watching()
    restored.load_state_dict(json.loads(json.dumps(evidence.state_dict())))
    assert restored.is_sound
    assert restored.state_dict() == evidence.state_dict()


# Other data that pass.


def other_data(
    length: int,
    *,
    before: int = 60,
    kind: str = "high",
    height: float = 4.0,
    learnt: float = 0.0,
    noise: Callable[[], float] = lambda: 0.0,
) -> tuple[AnomalyEvidence, int]:
    """A stretch that costs more, found by a probe not to be damage after five steps, and the step that comes after it.

    By its end so much of the rise, as a logarithm, has been learnt.
    """
    evidence = watching()
    for step in range(before):
        seen(evidence, step)
    for step in range(before, before + length):
        share = 1 - learnt * (step - before) / length
        seen(evidence, step, kind, loss=2.0 * (height / 2.0) ** share * math.exp(noise()))
        if asks(evidence):
            assert evidence.is_left_worse_off(9.0, 0.1) is None, "it goes on"
            assert probed(evidence) is None
    assert evidence.is_sound
    return evidence, before + length


def asked_at(evidence: AnomalyEvidence, first: int, last: int, loss: float = 2.0) -> list[int]:
    """The steps after which it is asked what other data have left behind; nothing is found."""
    asked = []
    for step in range(first, last):
        seen(evidence, step, loss=loss)
        if asks(evidence):
            asked.append(step)
            probed(evidence)
    return asked


@pytest.mark.parametrize(("surprising", "length"), [(12, 12), (12, 20), (30, 30)])
def test_a_stretch_of_other_data_that_has_passed_is_found_with_its_length(surprising: int, length: int) -> None:
    """Be its batches surprising to its end, or not quite."""
    evidence, then = other_data(surprising)
    end = 60 + length
    for step in range(then, end):
        seen(evidence, step, loss=4.0)
    for step in range(end, end + LATELY):
        assert not asks(evidence), "a few batches tell nothing"
        assert seen(evidence, step) is None
    assert asks(evidence)
    assert evidence.is_left_worse_off(3.7, 0.1) is False, "a tenth of what was learned is slight"
    assert evidence.is_left_worse_off(3.9, 0.1) is True, "beside what they had when it had just begun"
    assert evidence.is_left_worse_off(3.9, 0.7) is False, "so much the loss differs by in health"
    assert evidence.is_left_worse_off(math.nan, 0.1) is True
    anomaly = probed(evidence, loss=2.3, is_condemned=True)
    assert anomaly is not None
    assert (anomaly.trigger, anomaly.onset, anomaly.batch) == (Trigger.SPOILT, 60, 1060)
    assert anomaly.lasted == length
    assert f"other data have passed within {length} steps, and left the weights worse off" in anomaly.text


def test_what_has_passed_is_asked_about_once() -> None:
    evidence, end = other_data(20)
    assert asked_at(evidence, end, end + 300) == [end + LATELY - 1]
    assert evidence.is_left_worse_off(9.0, 0.1) is None
    evidence, end = other_data(20)
    for step in range(end, end + LATELY):
        seen(evidence, step)
    assert probed(evidence) is None, "nothing was left behind"
    for step in range(end + LATELY, end + 40):
        seen(evidence, step, "high" if step >= end + 35 else "go", loss=4.0 if step >= end + 35 else 2.0)
    anomaly = found_damaged(evidence)
    assert (anomaly.trigger, anomaly.lasted) == (Trigger.DAMAGED, 0), "what comes after it is judged for itself"


def test_a_change_that_stays_has_not_passed() -> None:
    evidence, end = other_data(20)
    assert not asked_at(evidence, end, end + 300, loss=4.0)
    assert evidence.is_left_worse_off(9.0, 0.1) is None


@pytest.mark.parametrize("length", [40, 60])
def test_a_change_that_is_learnt_little_by_little_has_not_passed(length: int) -> None:
    evidence, end = other_data(length, learnt=0.9)
    assert not asked_at(evidence, end, end + 300)


def test_a_stretch_that_is_dated_too_early_is_as_high_as_its_end() -> None:
    """A surprise, twenty steps as before, and then a task that is learned: most of the stretch is at the usual loss."""
    evidence = watching()
    learned = [2.0 * (16 / 2) ** (1 - step / 40) for step in range(40)]
    for step, loss in enumerate([2.0] * 60 + [2.6] + [2.0] * 19 + learned):
        seen(evidence, step, "high" if step == 60 or 80 <= step < 90 else "go", loss=loss)
        if asks(evidence):
            assert evidence.is_left_worse_off(9.0, 0.1) is None
            probed(evidence)


@pytest.mark.parametrize(("height", "is_noise"), [(20.0, True), (12.0, False)])
def test_noise_after_which_everything_is_learned_anew_has_passed(height: float, is_noise: bool) -> None:
    """It is as dear as the run began, and stays so; what comes after it is cheaper by a third at first."""
    evidence, end = other_data(40, height=height)
    asked = [asked_at(evidence, end + after, end + after + 1, height * 0.92**after) for after in range(1, LATELY + 2)]
    assert any(asked) == is_noise


@pytest.mark.parametrize("seed", range(40))
def test_a_harder_task_that_is_learned_from_scratch_has_not_passed(seed: int) -> None:
    """It is as dear as the run began, of small batches, and gets cheaper little by little."""
    noise = partial(np.random.default_rng(seed).normal, 0, 0.2)
    evidence, end = other_data(8, height=20.0, noise=noise)
    for after in range(60):
        seen(evidence, end + after, "high" if after < 20 else "go", loss=20.0 * 0.975**after * math.exp(noise()))
        assert evidence.is_left_worse_off(9.0, 0.1) is None


@pytest.mark.parametrize(("before", "is_apart"), [(2.0, False), (2.4, False), (2.6, True), (1.5, True)])
def test_data_have_come_back_where_batches_from_before_cost_what_new_ones_do(before: float, is_apart: bool) -> None:
    evidence, end = other_data(20)
    for step in range(end, end + 2 * LATELY):
        seen(evidence, step)
    evidence.compare_with_what_passed(before)
    assert (evidence.is_left_worse_off(9.0, 0.1) is None) == is_apart


@pytest.mark.parametrize(("since", "is_damage"), [(4.0, False), (8.0, True)])
def test_a_few_cheaper_batches_excuse_weights_whose_noise_is_wide(since: float, is_damage: bool) -> None:
    """One batch is too few, where the loss of a batch may differ tenfold in health."""
    evidence = watching()
    for step in range(NEXT):
        seen(evidence, step, "high" if step >= NEXT - 30 else "go", loss=4.0 if step >= NEXT - 30 else 2.0)
    assert not evidence.excuse
    rise = math.log(9.0 / 2.0)
    evidence.probed("bad", number=NEXT, loss=9.0, rise=rise, least=2.5, is_condemned=True, source=None)
    excuses, anomaly = "", None
    for step in range(NEXT, NEXT + HEALING):
        anomaly = seen(evidence, step, "high", loss=since) or anomaly
        excuses += evidence.excuse
    assert ("the next 3 batches have a loss of 4" in excuses) == (not is_damage)
    assert (anomaly is not None) == is_damage


def test_what_was_not_trained_on_has_left_nothing_behind() -> None:
    evidence, end = other_data(19, kind="skip")
    assert not asked_at(evidence, end, end + 100)


def test_a_rise_that_is_no_leap_is_no_stretch_of_other_data() -> None:
    evidence, end = other_data(20, height=2.4)
    assert not asked_at(evidence, end, end + 100)


def test_data_that_have_come_and_gone_before_are_not_foreign() -> None:
    evidence, end = other_data(40)
    assert asked_at(evidence, end, end + 2 * WINDOW) == [end + LATELY - 1]
    for step in range(end + 2 * WINDOW, end + 2 * WINDOW + 40):
        seen(evidence, step, "high", loss=4.0)
        if asks(evidence):
            probed(evidence)
    assert not asked_at(evidence, end + 2 * WINDOW + 40, end + 4 * WINDOW)


def test_what_a_stretch_is_compared_with_is_of_its_own_beginning() -> None:
    """Not of one long before, when other batches were tried."""
    evidence, end = other_data(20)
    assert asked_at(evidence, end, end + 300, loss=4.0) == []
    for step in range(end + 300, end + 312):
        seen(evidence, step, "high", loss=8.0)
        if step == end + 304:
            assert asks(evidence)
            probed(evidence, loss=3.0)
    for step in range(end + 312, end + 312 + LATELY):
        seen(evidence, step, loss=4.0)
    assert evidence.is_left_worse_off(4.6, 0.1) is False
    assert evidence.is_left_worse_off(4.8, 0.1) is True


def test_damage_that_comes_with_other_data_is_damage() -> None:
    """The probe finds so while the stretch goes on: nothing is waited for."""
    evidence = watching()
    for step in range(60):
        seen(evidence, step)
    for step in range(60, 65):
        seen(evidence, step, "high", loss=4.0)
    anomaly = found_damaged(evidence, loss=4.0)
    assert (anomaly.trigger, anomaly.lasted) == (Trigger.DAMAGED, 0)
    assert not asked_at(evidence, 65, 165)


@pytest.mark.parametrize(("oldest", "acts"), [(300, True), (100, False)], ids=["since the change", "from before it"])
def test_damage_is_found_while_the_statistic_learns_an_announced_level(oldest: int, acts: bool) -> None:
    """Nothing can be a surprise then. Batches from before the change would condemn the change itself."""
    evidence = watching()
    for step in range(200, 400):
        seen(evidence, step, **({"announced": "a new mixture"} if step == 220 else {}))

    def found(number: int) -> Anomaly | None:
        return evidence.probed(
            "worse",
            number=number,
            loss=6.0,
            rise=math.log(3.0),
            least=0.1,
            is_condemned=True,
            source=None,
            oldest=oldest,
        )

    for step in range(400, 402):
        assert not asks(evidence)
        seen(evidence, step, loss=6.0)
    assert asks(evidence)
    assert (found(402), evidence.doubted_since) == (None, None), "it may be chance"
    for step in range(402, 402 + LATELY):
        seen(evidence, step, loss=6.0)
    assert asks(evidence) == acts
    if not acts:
        return
    assert (found(410), evidence.doubted_since) == (None, 400)
    anomalies = [seen(evidence, step, loss=6.0) for step in range(410, 410 + HEALING)]
    assert anomalies[-1] is not None
    assert (anomalies[-1].trigger, anomalies[-1].onset) == (Trigger.DAMAGED, 400)


def test_what_was_usual_is_not_known_of_an_anomaly_that_is_older_than_the_window() -> None:
    """A leap from nowhere would excuse any loss of batches from before, for as long as the weights are sound."""
    evidence = watching()
    late = Finding(
        detector="proportion",
        step=WINDOW + 50,
        severity=Severity.ALARM,
        signal="param_norm",
        value=9.0,
        limit=3.0,
        spoils_update=False,
        lasts=2 * WINDOW,
    )
    for step in range(WINDOW + 51):
        found = (late,) if step == late.step else ()
        evidence.weigh({"step": step, "loss": 5.0}, Verdict(step=step, findings=found))
    assert asks(evidence)
    assert not evidence.is_of_the_data(0.0, norm_has_grown=False)
    assert probed(evidence) is None
    for step in range(WINDOW + 51, 2 * WINDOW + 100):
        seen(evidence, step, loss=5.0)
    for step in range(2 * WINDOW + 100, 2 * WINDOW + 110):
        seen(evidence, step, "high", loss=7.0)
    assert not evidence.is_of_the_data(math.log(7 / 5), norm_has_grown=False), "new batches have risen no further"


def test_an_anomaly_begins_with_the_suspicious_steps_right_before_it() -> None:
    """Else the batches that did it would come again after every rollback."""
    evidence = watching()
    for step in range(100):
        row: Row = {"step": step, "batch_index": step + 1000, "loss": 2.0}
        evidence.weigh(row, Verdict(step=step, is_suspicious=step in (50, 97, 98, 99)))
    for step in range(100, 106):
        seen(evidence, step, "high", loss=9.0)
    anomaly = found_damaged(evidence)
    assert (anomaly.onset, anomaly.batch) == (97, 1097)


@pytest.mark.parametrize(
    ("loss", "grown_at", "runs_away"),
    [(300.0, 350, True), (300.0, 310, False), (300.0, None, False), (90.0, 350, False)],
)
def test_no_change_of_the_data_explains_weights_that_grow_and_a_loss_far_above_that_of_untrained_ones(
    loss: float, grown_at: int | None, runs_away: bool
) -> None:
    evidence = watching()
    for step in range(320, 400):
        found = _finding("proportion", step, Severity.ALARM, spoils_update=False)
        evidence.weigh({"step": step, "loss": loss}, Verdict(step=step, findings=(found,) if step == grown_at else ()))
    if grown_at == 310:
        evidence.load_state_dict(evidence.state_dict() | {"grown_at": 310})
    assert evidence.is_running_away(since=330) is runs_away
    resumed = watching()
    resumed.load_state_dict(json.loads(json.dumps(evidence.state_dict())))
    for step in range(400, 420):
        seen(resumed, step, loss=loss)
    assert resumed.is_running_away(since=330) is runs_away
