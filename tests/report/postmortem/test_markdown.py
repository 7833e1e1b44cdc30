"""The document: its text to the letter, what is empty, and what a guard can say by itself."""

import math
import subprocess
import sys
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from sealegs.report.postmortem.blocks import empty, sections
from sealegs.report.postmortem.events import cost
from sealegs.report.postmortem.markdown import draft, markdown
from sealegs.report.postmortem.numbers import ema, last_bad_batch, layers, met, promises, symptoms
from sealegs.report.postmortem.values import (
    After,
    CandidateCause,
    Cost,
    EvidenceFiles,
    LayerActivations,
    Measured,
    Picture,
    Postmortem,
    Promise,
    Symptoms,
)

FULL = Postmortem(
    incident=2,
    kind="spike",
    time=1794756910.5,
    run_id="night-2f25efcf",
    symptoms=Symptoms(
        onset=312,
        loss_before=2.31,
        peak_loss=5.84,
        peak_step=313,
        after=(After(steps=50, loss=3.4, is_back=False), After(steps=500, loss=None, ends_at=700)),
        grad_norm=47.2,
        grad_norm_step=312,
        grad_norm_before=0.6,
        lr=2.94e-4,
        dtype="fp32",
        batches=(312, 314),
        batch_steps=(312, 314),
        unusual_tokens=("`'tten'` (3 in the batch, 5 before, loss 12)",),
    ),
    evidence=EvidenceFiles(
        record="experiments/night",
        tracker="http://127.0.0.1:5000/#/experiments/1/runs/ab",
        pictures=(Picture(file="evidence/course.png", caption="Panels 1, 3 and 2"),),
        layers=(
            LayerActivations(name="embedding", before=1.0, at=3.2, step=312),
            LayerActivations(name="h.0", before=2.0, at=math.inf, step=312),
        ),
        texts=("row 1 of the batch: 'written <b>'",),
    ),
    hypotheses=(
        CandidateCause(
            cause="long-tail-token",
            title="Long-tail token",
            grade="tested",
            panels=(3, 7),
            evidence_for=("panel 3: grad norm 47.2 at step 312, 0.6 before: 78.7-fold",),
            missing=("activation_norm/<layer>", "culprit"),
        ),
        CandidateCause(
            cause="lr-discontinuity",
            title="The learning rate jumps",
            grade="ruled out",
            panels=(2,),
            evidence_against=("panel 2: LR smooth about step 312",),
        ),
        CandidateCause(cause="hard-batch", title="A hard batch", grade="hypothesis", panels=(1,), next_test="compare"),
    ),
    discriminating=("panel 2: LR smooth about step 312: rules out H2",),
    root_cause="Long-tail token, tested: without it the incident is gone.",
    classification=("trajectory: lingering, type 2 (lingering): not back within 500 steps", "kind: spike"),
    recovery=("skipped 3 updates, steps 312 to 314",),
    outcome=("the trajectory resumed at step 480",),
    cost=Cost(lost_steps=550, counted="skipped", seconds_per_step=1.0, price_per_hour=1.1, downtime_s=50.0),
    remediation=("clip gradients at 0.5 (clip: 0.5)",),
    verification="Run again from the seed 42 with the change above, and expect:",
    promises=(
        Promise(signal="loss", first=312, last=312, below=2.5, was=5.84),
        Promise(signal="loss", first=354, last=363, below=2.4, was=3.4, mean_of=10),
        Promise(signal="grad_norm", first=300, last=400, below=3.0, was=47.2),
    ),
    lesson="spike at step 312: Long-tail token; clip gradients at 0.5 (clip: 0.5).",
    follow_ups=("log next time: culprit",),
)

TEXT = """\
# Post-mortem: incident 2, 2026-11-15 15:35:10 UTC, run night-2f25efcf

Spike at step 312. Every section is filled.

## Symptoms

- onset: step 312
- loss before (EMA over 50 steps): 2.31
- peak loss: 5.84 at step 313
- loss 50 steps after the peak (mean of up to 10 rows): did not recover (3.4)
- loss 500 steps after the peak (mean of up to 10 rows): the record ends at step 700
- gradient norm before clipping: 47.2 at step 312; baseline 0.6
- learning rate at the onset: 0.000294
- dtype: fp32
- batch index: 312 to 314 (steps 312 to 314)
- unusual tokens: `'tten'` (3 in the batch, 5 before, loss 12)

## Evidence

- tracker: http://127.0.0.1:5000/#/experiments/1/runs/ab; record: experiments/night
- row 1 of the batch: 'written \\<b>'

![Panels 1, 3 and 2](evidence/course.png)

| layer (panel 4) | activation norm before | nearest to the peak | ratio | at step |
|---|---:|---:|---:|---:|
| embedding | 1 | 3.2 | 3.20 | 312 |
| h.0 | 2 | not finite |  | 312 |

## Hypotheses

### H1. Long-tail token (tested; panels 3, 7)

- for: panel 3: grad norm 47.2 at step 312, 0.6 before: 78.7-fold
- against: nothing that was logged
- not logged: activation_norm/\\<layer>, culprit

### H2. The learning rate jumps (ruled out; panel 2)

- for: nothing that was logged
- against: panel 2: LR smooth about step 312

### H3. A hard batch (hypothesis; panel 1)

- for: nothing that was logged
- against: nothing that was logged
- next test: compare

## Discriminating evidence

- panel 2: LR smooth about step 312: rules out H2

## Root cause

Long-tail token, tested: without it the incident is gone.

## Classification

- trajectory: lingering, type 2 (lingering): not back within 500 steps
- kind: spike

## Recovery action

- skipped 3 updates, steps 312 to 314

## Outcome

- the trajectory resumed at step 480

## Cost

(550 steps (skipped) x 1 s, plus 50 s of downtime) x 1.1 an hour / 3600 = 0.18.

## Remediation

- clip gradients at 0.5 (clip: 0.5)

## Verification

Run again from the seed 42 with the change above, and expect:

- [ ] loss at step 312 below 2.5 (it was 5.84)
- [ ] mean loss at steps 354 to 363 below 2.4 (it was 3.4)
- [ ] gradient norm before clipping at steps 300 to 400 below 3 (it was 47.2)

## Lesson

spike at step 312: Long-tail token; clip gradients at 0.5 (clip: 0.5).

## Follow-ups

- log next time: culprit
"""


def section(document: Postmortem, title: str) -> list[str]:
    """The lines of a section."""
    _, _, content = markdown(document).partition(f"## {title}\n\n")
    return content.partition("\n\n## ")[0].splitlines()


def test_the_text_of_a_full_document() -> None:
    assert markdown(FULL) == TEXT
    assert empty(FULL) == ()


FIELDS = {
    "Hypotheses": "hypotheses",
    "Discriminating evidence": "discriminating",
    "Root cause": "root_cause",
    "Classification": "classification",
    "Recovery action": "recovery",
    "Outcome": "outcome",
    "Cost": "cost",
    "Remediation": "remediation",
    "Verification": "promises",
    "Lesson": "lesson",
    "Follow-ups": "follow_ups",
}


def test_every_section_but_what_is_always_there_can_be_empty() -> None:
    assert {"Symptoms", "Evidence", *FIELDS} == set(sections(FULL))


@pytest.mark.parametrize(("title", "field"), FIELDS.items())
def test_an_empty_section_is_flagged_and_counted(title: str, field: str) -> None:
    nothing: dict[str, Any] = {field: None if field == "cost" else type(getattr(FULL, field))()}
    text = markdown(replace(FULL, **nothing, why_empty={title: "nobody knows"}))
    assert f"\n## {title}\n\nEMPTY: nobody knows\n" in text
    assert f"Spike at step 312. 1 of 13 sections is empty: {title}.\n" in text
    assert text.count("EMPTY") == 1


def test_all_that_can_be_empty_at_once() -> None:
    none = {field: type(getattr(FULL, field))() for field in FIELDS.values() if field != "cost"}
    text = markdown(replace(FULL, **none, cost=None, time=None))
    assert text.startswith("# Post-mortem: incident 2, time not recorded, run night-2f25efcf\n")
    assert f"11 of 13 sections are empty: {', '.join(FIELDS)}." in text
    assert text.count("EMPTY: nothing is known") == 11


def test_numbers_that_are_not_there_are_named() -> None:
    unseen = replace(
        FULL.symptoms, loss_before=None, peak_loss=math.nan, grad_norm=None, grad_norm_step=None, lr=None, dtype=None,
        batches=None, unusual_tokens=None, after=(After(steps=50, loss=math.nan, is_back=False),),
    )  # fmt: skip
    assert section(replace(FULL, symptoms=unseen), "Symptoms") == [
        "- onset: step 312",
        "- loss before (EMA over 50 steps): not logged",
        "- peak loss: not finite at step 313",
        "- loss 50 steps after the peak (mean of up to 10 rows): did not recover (not finite)",
        "- gradient norm before clipping: not logged; baseline 0.6",
        "- learning rate at the onset: not logged",
        "- dtype: not logged",
        "- batch index: not logged",
        "- unusual tokens: not logged",
    ]
    looked_at = replace(unseen, unusual_tokens=())
    assert section(replace(FULL, symptoms=looked_at), "Symptoms")[-1] == "- unusual tokens: none flagged"


def test_the_numbers_that_are_shown_give_the_cost_that_is_shown() -> None:
    """A downtime below a tenth of a second counts, where steps are short."""
    short = Cost(lost_steps=60, counted="skipped", seconds_per_step=0.0422, price_per_hour=36.0, downtime_s=0.0481)
    (line,) = section(replace(FULL, cost=short), "Cost")
    assert line == "(60 steps (skipped) x 0.0422 s, plus 0.0481 s of downtime) x 36 an hour / 3600 = 0.026."
    assert f"{(60 * 0.0422 + 0.0481) * 36 / 3600:.2g}" == "0.026"


@pytest.mark.parametrize(
    ("known", "told"),
    [
        ({"price_per_hour": None}, "550 steps (skipped) x 1 s, plus 50 s of downtime = 600 s; price not given."),
        ({"seconds_per_step": None}, "550 steps (skipped), plus 50 s of downtime; seconds a step were not logged."),
    ],
)
def test_a_cost_without_a_price_or_a_pace_says_so(known: dict[str, Any], told: str) -> None:
    assert FULL.cost is not None
    assert section(replace(FULL, cost=replace(FULL.cost, **known)), "Cost") == [told]


# What a guard knows.

MANIFEST = {"run_id": "night-2f25efcf", "dtype": "bf16", "price_per_hour": 3.6, "tracker": {"uri": "mlflow:ab"}}
INCIDENT = {
    "number": 3, "start": 100, "kind": "spike", "pre_loss": 2.0, "usual": 2.0, "limit": 2.1, "peak": 101,
    "peak_loss": 7.0, "grad_norm_peak": 30.0, "end": 150, "trajectory": "fast", "recovery_loss": 1.9,
}  # fmt: skip


def row(step: int, loss: float, **other: Any) -> dict[str, Any]:
    norm = 10 * loss if loss > 3 else 0.5
    return {
        "step": step,
        "loss": loss,
        "grad_norm": norm,
        "lr": 1e-3,
        "step_s": 2.0,
        "batch_index": 1000 + step,
        **other,
    }


def attempts() -> list[dict[str, Any]]:
    """Three bad steps, back to 90, and on."""
    first = [row(step, 2.0, time=float(step)) for step in range(100)]
    bad = [row(100, 6.0, time=100.0, **{"activation_norm/h.0": 8.0}), row(101, 7.0, time=101.0), row(102, 6.5)]
    first[95]["activation_norm/h.0"] = 2.0
    return [*first, *bad, *(row(step, 1.9, batch_index=1010 + step) for step in range(90, 700))]


def events() -> list[dict[str, Any]]:
    skip = {"kind": "skip", "acted": True, "skipped_in_a_row": 1}
    return [
        {"kind": "guard", "step": 0, "time": 0.0},
        *({**skip, "step": step, "time": float(step)} for step in (100, 101, 102)),
        {
            "kind": "intervention", "step": 103, "time": 103.0, "number": 1, "incident": 3, "acted": True,
            "decided_by": "playbook standard, rung 3", "text": "roll back, skip 10 batches", "to_step": 90,
            "actions": [{"action": "rollback", "back": 0, "skip": 10}], "changed": "went back from step 103 to 90",
            "cost": {"steps": 13}, "seconds": 4.0,
        },
        {"kind": "outcome", "step": 150, "time": 200.0, "intervention": 1, "text": "helped: 50 healthy steps"},
    ]  # fmt: skip


def test_a_gradient_that_leaps_before_the_loss_is_a_symptom_and_no_baseline() -> None:
    rows = attempts()
    rows[98]["grad_norm"], rows[98]["activation_norm/h.0"] = 90.0, 2.0
    rows[102]["activation_norm/h.0"] = 9.0
    early = {**INCIDENT, "start": 97}  # dated too early, as a late finding may be
    seen = draft(MANIFEST, INCIDENT, rows, events()).symptoms
    assert (seen.grad_norm, seen.grad_norm_step, seen.grad_norm_before) == (90.0, 98, 0.5)
    document = draft(MANIFEST, early, rows, events())
    assert document.evidence.layers == (LayerActivations(name="h.0", before=2.0, at=8.0, step=100),), "not of step 98"


def test_a_draft_has_what_a_guard_knows() -> None:
    document = draft(MANIFEST, INCIDENT, attempts(), events())
    unknown = (
        "Hypotheses",
        "Discriminating evidence",
        "Root cause",
        "Remediation",
        "Verification",
        "Lesson",
        "Follow-ups",
    )
    assert empty(document) == unknown
    text = markdown(document)
    assert text.count("EMPTY: not diagnosed yet: run `sealegs postmortem night#3`") == 7
    assert document.time == 100.0
    seen = document.symptoms
    assert (seen.onset, seen.peak_loss, seen.peak_step, seen.lr, seen.dtype) == (100, 7.0, 101, 1e-3, "bf16")
    assert (seen.grad_norm, seen.grad_norm_step, seen.grad_norm_before) == (70.0, 101, 0.5), "of the bad attempt"
    assert seen.loss_before == pytest.approx(2.0)
    assert (seen.batches, seen.batch_steps) == ((1100, 1102), (100, 102))
    assert [(after.steps, after.is_back) for after in seen.after] == [(50, True), (500, True)]
    assert [after.loss for after in seen.after] == pytest.approx([1.9, 1.9])
    assert document.evidence.layers == (LayerActivations(name="h.0", before=2.0, at=8.0, step=100),)
    assert document.evidence.tracker == "mlflow:ab"
    assert document.recovery == (
        "skipped 3 updates, steps 100 to 102",
        "step 103, by playbook standard, rung 3: roll back, skip 10 batches (rollback back=0, skip=10): "
        "went back from step 103 to 90",
    )
    assert document.outcome == (
        "the trajectory resumed at step 150, 50 steps after the onset: loss 1.9 (mean of 10 rows, limit 2.1)",
        "intervention 1 helped: 50 healthy steps",
    )
    assert document.cost is not None
    assert (document.cost.lost_steps, document.cost.counted) == (13, "done once more"), "the skips are among them"
    assert document.cost.seconds == 13 * 2.0 + 4.0
    assert document.cost.money == pytest.approx(0.03)


def test_a_draft_without_the_rows_of_the_incident_takes_its_numbers() -> None:
    """A guard forgets the rows that it went back behind."""
    kept = [each for each in attempts() if each["loss"] < 3]
    seen = draft(MANIFEST, INCIDENT, kept, events()).symptoms
    assert (seen.peak_loss, seen.grad_norm, seen.grad_norm_step) == (7.0, 30.0, None)
    assert seen.batches is None
    assert seen.loss_before is not None


@pytest.mark.parametrize(
    ("then", "last"),
    [
        ([7.0, 6.0, 5.0, 4.4, 4.2, 4.0, 2.1], 105),  # batches that the model begins to learn, and then others
        ([7.0, 6.0, 5.0, 4.2, 3.6, 3.1, 2.7, 2.4, 2.2], 102),  # weights that heal
        ([7.0, 2.1], 100),
        ([7.0, 6.0, 5.0, 4.2, 4.1, 4.0], 102),  # nobody knows how it goes on
    ],
)
def test_bad_batches_end_where_the_loss_falls_at_once(then: list[float], last: int) -> None:
    course = [row(100 + place, loss) for place, loss in enumerate(then)]
    after = [row(100 + len(then) + place, 2.0) for place in range(50)] if then[-1] < 3 else []
    rows = [*(row(step, 2.0) for step in range(100)), *course, *after]
    assert last_bad_batch(met({**INCIDENT, "peak": 100, "peak_loss": 7.0}, rows)) == last


def test_a_draft_of_an_incident_that_is_open_and_not_finite() -> None:
    spelt = {**INCIDENT, "peak_loss": "NaN", "grad_norm_peak": "Infinity", "end": None, "trajectory": None}
    rows = [
        *(row(step, 2.0) for step in range(100)),
        *(row(step, 0.0) | {"loss": "NaN", "grad_norm": "NaN"} for step in (100, 101)),
    ]
    document = draft(MANIFEST, {**spelt, "recovery_loss": None, "peak": 100}, rows, [])
    assert document.why_empty["Outcome"] == "the incident was still open at step 101, the last that is recorded"
    assert {"Outcome", "Recovery action"} <= set(empty(document))
    assert document.symptoms.batch_steps == (100, 101)
    assert document.symptoms.grad_norm == math.inf
    assert "peak loss: not finite at step 100" in markdown(document)
    assert document.cost is not None
    assert document.cost.counted == "from the onset to the last one"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"recovery_loss": None, "trajectory": "lingering"}, "did not resume: lingering at step 150"),
        ({"recovery_loss": None, "trajectory": "divergent", "end": None}, "did not resume: divergent at step 699"),
    ],
)
def test_what_did_not_resume_is_told(changes: dict[str, Any], told: str) -> None:
    assert draft(MANIFEST, {**INCIDENT, **changes}, attempts(), []).outcome == (told,)


def test_a_loss_above_the_limit_did_not_recover() -> None:
    rows = [*(row(step, 2.0) for step in range(100)), row(100, 6.0), row(101, 7.0)]
    rows += [row(step, 2.5) for step in range(102, 400)]
    lingering = {**INCIDENT, "end": 399, "trajectory": "lingering", "recovery_loss": None}
    first, second = draft(MANIFEST, lingering, rows, []).symptoms.after
    assert (first.loss, first.is_back) == (2.5, False)
    assert (second.loss, second.is_back, second.ends_at) == (None, False, 399)
    later = draft(MANIFEST, {**lingering, "end": 120, "recovery_loss": 2.0}, rows, []).symptoms.after
    assert later[0].is_back, "it had recovered before: this is another matter"


@pytest.mark.parametrize("event", [{"kind": "halt"}, {"kind": "end", "reason": "halted"}])
def test_a_halt_is_the_outcome(event: dict[str, Any]) -> None:
    halted = [{"step": 103, "time": 1.0, **event}]
    open_still = {**INCIDENT, "recovery_loss": None, "end": None, "trajectory": None}
    document = draft(MANIFEST, open_still, attempts(), halted)
    assert document.outcome == ("did not resume: the run was halted at step 103",)


@pytest.mark.parametrize("finished", [[], [{"step": 420, "time": 3.0, "kind": "end", "reason": "finished"}]])
def test_a_halt_in_shadow_mode_is_what_would_have_been_done(finished: list[dict[str, Any]]) -> None:
    told = [{"step": 103, "time": 1.0, "kind": "halt", "acted": False}, *finished]
    open_still = {**INCIDENT, "recovery_loss": None, "end": None, "trajectory": None}
    would_be = "the run was not halted (shadow mode); it would have been at step 103"
    assert draft(MANIFEST, open_still, attempts(), told).outcome == (would_be,)
    assert draft(MANIFEST, {**open_still, "trajectory": "divergent"}, attempts(), told).outcome[-1] == would_be


def test_shadow_mode_did_nothing_and_says_what_it_would_have_done() -> None:
    shadow = [{**event, "acted": False} if "acted" in event else event for event in events()]
    document = draft(MANIFEST, INCIDENT, attempts(), shadow)
    assert document.recovery[0] == "none was skipped (shadow mode); it would have been 3 updates, steps 100 to 102"
    assert ": none (shadow mode); it would have been: roll back, skip 10 batches" in document.recovery[1]
    assert document.cost is not None
    assert (document.cost.lost_steps, document.cost.counted) == (50, "from the onset to where it resumed")


def test_skips_that_were_counted_back_all_belong_to_it() -> None:
    """Forty steps are skipped, the run counts them back and is well at step 105: by number, most were later."""
    known = {**INCIDENT, "start": 100, "peak": 105, "peak_loss": 7.0, "end": 105}
    rows = [*(row(s, 2.0) for s in range(100)), *(row(s, 7.0 if s == 105 else 6.0) for s in range(100, 139))]
    rows += [row(139, 6.9), *(row(s, 2.0) for s in range(100, 300))]
    skip = {"acted": True, "skipped_in_a_row": 1, "time": 1.0}
    told = [
        {"kind": "skip", "step": 20, **skip},
        {"kind": "skip", "step": 100, **skip},
        {"kind": "alarm", "step": 101, "incident": 3, **skip},
        *({"kind": "skip", "step": step, **skip} for step in range(102, 140)),
        {"kind": "counted-back", "step": 140, "to_step": 100, "time": 1.0, "text": "40 steps are counted back"},
        {"kind": "incident-closed", "step": 105, "number": 3, "time": 1.0},
        {"kind": "skip", "step": 104, **skip},
    ]
    document = draft(MANIFEST, known, rows, told)
    assert document.recovery == ("skipped 40 updates, steps 100 to 139", "40 steps are counted back")
    assert document.cost is not None
    assert (document.cost.lost_steps, document.cost.counted) == (40, "skipped")
    assert (document.symptoms.grad_norm, document.symptoms.grad_norm_step) == (70.0, 105)
    late = [each if each["step"] != 139 else each | {"grad_norm": 99.0} for each in rows]
    assert draft(MANIFEST, known, late, told).symptoms.grad_norm_step == 139


def test_downtime_is_the_gap_before_a_resume_within_the_incident() -> None:
    found = met(INCIDENT, attempts())
    resumes = [{"kind": "resume", "step": 90, "time": 401.0}]
    assert cost(found, MANIFEST, resumes).downtime_s == 300.0
    assert cost(found, MANIFEST, [{"kind": "resume", "step": 90, "time": 50.5}]).downtime_s == 0.0


@pytest.mark.parametrize("playbook", [None, "standard", "observe"])
@pytest.mark.parametrize("is_skipped", [False, True])
def test_what_a_playbook_that_observes_did_not_do_was_not_to_be_done(playbook: str | None, is_skipped: bool) -> None:
    rows = [row(step, 7.0 if 100 <= step < 103 else 2.0) for step in range(700)]
    guard = {"kind": "guard", "step": 0, "playbook": playbook}
    alarm = {"kind": "alarm", "step": 100, "incident": 3, "acted": is_skipped, "skipped_in_a_row": int(is_skipped)}
    document = draft(MANIFEST, {**INCIDENT, "end": 103, "peak": 100}, rows, [guard, alarm])
    told = " ".join(document.recovery)
    assert ("its playbook observes" in told) == (playbook == "observe")
    assert ("skipped 1 update, step 100" in told) == is_skipped


def test_what_came_after_an_incident_that_no_event_closed_is_not_its_own() -> None:
    """Without a playbook nothing closes an incident: a later skip, or a halt in shadow mode, is of another one."""
    rows = [row(step, 7.0 if 100 <= step < 103 else 2.0) for step in range(700)]
    rows[130] |= {"loss": "NaN", "grad_norm": "NaN"}
    calm = {**INCIDENT, "end": 103, "peak": 100}
    alarm = {"kind": "alarm", "step": 100, "incident": 3, "acted": False}
    skip = {"kind": "skip", "step": 130, "acted": True, "skipped_in_a_row": 1}
    halt = {"kind": "halt", "step": 131, "acted": False, "skipped_in_a_row": 2}
    document = draft(MANIFEST, calm, rows, [alarm, skip, halt], until=129)
    assert document.recovery == ("none: no update was skipped, and nothing else was done",)
    assert document.cost is not None
    assert (document.cost.lost_steps, document.cost.counted) == (3, "from the onset to where it resumed")
    assert not any("shadow mode" in text for text in document.outcome)
    again = {**alarm, "step": 103, "incident": 4}
    known = draft(MANIFEST, {**calm, "end": None}, rows, [alarm, again, {**skip, "step": 104}])
    assert known.recovery == ("none: no update was skipped, and nothing else was done",), "the alarm of the next one"


def test_numbers_of_an_incident_end_before_other_trouble() -> None:
    rows = [row(step, 7.0 if 100 <= step < 103 else 2.0) for step in range(700)]
    for step in (130, 148):
        rows[step] |= {"loss": "NaN", "grad_norm": "NaN"}
    rows[130]["activation_norm/h.0"] = "Infinity"
    found = met({**INCIDENT, "end": 103, "peak": 100}, rows, until=129)
    assert [(one.signal, one.last, one.was) for one in promises(found)] == [
        ("loss", 129, 7.0), ("loss", 129, 3.5), ("grad_norm", 129, 70.0)
    ]  # fmt: skip
    assert layers(found) == ()
    soon, _ = symptoms(found, MANIFEST).after
    assert (soon.loss, soon.is_back) == (2.0, True)


def test_the_line_that_the_weights_went_has_each_step_once() -> None:
    found = met(INCIDENT, attempts())
    assert [row["step"] for row in found.line] == list(range(700))
    assert [row["step"] for row in (*found.before, *found.course)] == list(range(103))


def test_the_moving_average_leans_on_what_is_new() -> None:
    assert ema([3.0] * 200 + [2.0] * 50) == pytest.approx(2.135, abs=0.001)


def test_promises_are_kept_or_not() -> None:
    loss, mean, norm = promises(met(INCIDENT, attempts()))
    assert (loss.first, loss.last) == (100, 151)
    assert loss.below == pytest.approx(2.8)
    assert (mean.first, mean.last, mean.mean_of, norm.below) == (100, 151, 10, 1.5)
    assert mean.below == pytest.approx(2 + 0.8 / math.sqrt(10)), "a mean of ten varies less than a row"
    assert (loss.was, norm.was) == (7.0, 70.0)
    assert loss.holds(2.7)
    assert not loss.holds(2.9)
    assert not loss.holds(math.nan)
    assert loss.highest({99: 9.0, 100: 2.0, 151: 2.5, 152: 9.0}) == (2.5, 151)
    assert mean.highest({step: 12.0 if step == 120 else 2.0 for step in range(200)}) == (3.0, 120)
    assert mean.highest({100: 2.0, 101: 4.0}) == (3.0, 101), "of what there is"
    assert mean.highest({99: 2.0}) is None


class Usual(NamedTuple):
    loss: float | str = 1.9
    deviation: float | str = 0.1
    grad_norm: float | str = 0.4


def test_promises_are_of_what_reruns_found_usual() -> None:
    loss, mean, norm, clipped = promises(met(INCIDENT, attempts()), Usual(), first=110, clip=0.5)
    assert {(each.first, each.last) for each in (loss, mean, norm, clipped)} == {(110, 151)}
    assert (loss.below, norm.below) == pytest.approx((2.3, 1.2))
    assert loss.was is None, "the attempt ended before"
    assert clipped.holds(0.5 * (1 + 1e-7)), "rounding of single precision"
    assert not clipped.holds(0.501)
    without = promises(met(INCIDENT, attempts()), Usual(grad_norm="NaN"), clip=0.5)
    assert [each.signal for each in without] == ["loss", "loss"]


def test_what_was_measured_takes_the_place_of_what_was_promised() -> None:
    row, mean, norm = FULL.promises
    results = (
        Measured(promise=row, value=2.4, step=312),
        Measured(promise=mean, value=None),
        Measured(promise=replace(norm, or_equal=True, was=2.0), value=math.nan, step=333),
    )
    assert section(replace(FULL, measured=results, verification="Run again: 1 of 3."), "Verification") == [
        "Run again: 1 of 3.",
        "",
        "- [x] loss at step 312 below 2.5 (it was 5.84): 2.4, kept",
        "- [ ] mean loss at steps 354 to 363 below 2.4 (it was 3.4): not measured, broken",
        "- [ ] gradient norm before clipping at steps 300 to 400 at most 3 (it was 2, kept then too): "
        "not finite at step 333, broken",
    ]


def test_a_guard_can_call_it_with_what_it_has_itself() -> None:
    program = (
        "import sys; import sealegs.report.postmortem.markdown; "
        "print(sorted({name.partition('.')[0] for name in sys.modules} & "
        "{'msgspec', 'torch', 'rich', 'tyro', 'matplotlib', 'markdown_it'}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
