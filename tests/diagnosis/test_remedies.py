"""What must not be advised: remedies that do harm where they are carried out, and tests that would."""

import re
from pathlib import Path
from typing import Any

import pytest
from tests.diagnosis.streams import Case, run_from

from sealegs.diagnosis.contract import Diagnosis
from sealegs.diagnosis.findings import look
from sealegs.diagnosis.rank import diagnose

CALM: dict[str, Any] = {"line": [[0, 6.0], [100, 3.0], [600, 2.5]], "noise": 0.01}
NORM: dict[str, Any] = {"line": [[0, 3.0], [100, 1.0], [600, 0.8]], "noise": 0.05}


def diagnosed(place: Path, **stream: Any) -> Diagnosis:
    place.mkdir(exist_ok=True)
    run = run_from(Case("remedies", "", {"steps": 600, **stream}, {}), place)
    return diagnose(look(run), source="here", format="case")


@pytest.mark.parametrize(("rate", "is_advised"), [(1e-4, True), (5e-7, False)])
def test_a_rate_of_a_millionth_is_not_halved(rate: float, is_advised: bool, tmp_path: Path) -> None:
    ran_away = {
        "reward": {"line": [[0, 0.2], [300, 0.6], [330, 0.1], [600, 0.1]], "noise": 0.05},
        "kl": {"line": [[0, 0.01], [300, 0.012], [310, 0.6], [600, 0.7]], "noise": 0.05},
        "policy_entropy": {"line": [[0, 0.5], [300, 0.5], [320, 2.5], [600, 2.6]], "noise": 0.03},
        "lr": {"line": [[0, rate], [600, rate]]},
    }
    found = diagnosed(tmp_path, signals={"loss": {"line": [[0, 0.02], [600, 0.02]], "noise": 0.3}, **ran_away})
    assert (found.hypotheses[0].cause, found.hypotheses[0].grade) == ("kl-blow-up", "supported")
    assert ("halve the LR" in found.first_action) is is_advised
    assert "weight" in found.first_action, "what is left is still advised"


def test_what_never_fell_gets_no_lower_rate(tmp_path: Path) -> None:
    level = {"line": [[0, 2.9], [600, 2.9]], "noise": 0.01}
    found = diagnosed(tmp_path, signals={"loss": level, "grad_norm": {"line": [[0, 0.4], [600, 0.4]], "noise": 0.1}})
    assert found.hypotheses[0].cause == "plateau"
    assert "ower the LR" not in found.first_action
    assert "decay" not in found.first_action
    assert "one batch until it is known by heart" in found.first_action


@pytest.mark.parametrize(("scale", "words"), [
    (0.4, "clip gradients at 0.5 (0.5 would clip 0%"),
    (0.8, "would clip 100% of the healthy steps, whose median norm"),
    (16384.0, "unscale gradients"),
])  # fmt: skip
@pytest.mark.parametrize("clip", [None, 0.2, 0.6, 50.0])
def test_a_clip_is_checked_against_the_norms_of_the_run(
    scale: float, words: str, clip: float | None, tmp_path: Path
) -> None:
    """In the units of the gradients, and so that it does not clip most steps; none that is looser than the present."""
    norm = {"line": [[0, 3.0 * scale], [100, 0.9 * scale], [600, 0.8 * scale]], "noise": 0.05}
    shares = {"0": f"{'9 ' * 20}{'0 ' * 20}", "400": f"{'9 ' * 20}0 3{' 0' * 18}", "401": f"{'9 ' * 20}{'0 ' * 20}"}
    leap = CALM | {"line": [[0, 6.0], [100, 3.0], [399, 2.6], [400, 5.6], [440, 3.6], [600, 3.4]]}
    signals = {
        "loss": leap,
        "grad_norm": norm | {"set": [[400, 400, 60.0 * scale]]},
        "lr": {"line": [[0, 1e-5], [50, 3e-4], [600, 2e-4]]},
        "batch_hash": {"batches": True},
        "token_loss_histogram": {"texts": shares},
    }
    settings = {} if clip is None else {"max_grad_norm": clip}
    found = diagnosed(tmp_path, signals=signals, settings=settings)
    assert (found.hypotheses[0].cause, found.hypotheses[0].grade) == ("long-tail-token", "supported"), found.hypotheses
    is_looser = clip is not None and clip <= (0.7 if scale == 0.8 else 0.5)
    assert (words in found.first_action) is not is_looser, found.first_action
    advised = re.search(r"clip gradients at (\S+)", found.first_action)
    assert advised is None or 0.36 * scale / 0.4 <= float(advised[1]) <= max(0.5, 1.1 * scale), (
        "most steps go unclipped"
    )


def test_weights_are_not_left_alone_where_the_evaluation_loss_rose(tmp_path: Path) -> None:
    """The first evaluation that is hit comes before the training loss is seen to leave its course."""
    shifted = {"line": [[0, 6.0], [100, 3.0], [299, 2.8], [300, 3.6], [600, 3.5]], "noise": 0.01}
    mixed = {"texts": {"0": "code=7 web=1", "300": "code=1 web=7"}}
    for held_out, is_left in (([[0, 3.2], [600, 2.7]], True), ([[0, 3.2], [240, 2.9], [260, 3.5], [600, 3.6]], False)):
        measured = {"line": held_out, "every": 20}
        signals = {"loss": shifted, "grad_norm": NORM, "eval_loss": measured, "sources": mixed}
        found = diagnosed(tmp_path / str(is_left), signals=signals)
        assert ("eave the weights alone" in found.first_action) is is_left, found.first_action


def test_a_run_that_calls_for_action_is_not_left_alone(tmp_path: Path) -> None:
    breaks = CALM | {"set": [[590, 600, "NaN"]], "line": [[0, 6.0], [60, 3.0], [100, 2.9], [600, 2.9]], "noise": 0.003}
    found = diagnosed(tmp_path, signals={"loss": breaks, "grad_norm": NORM})
    assert found.findings.verdict == "act"
    assert "eave it" not in found.first_action


def test_the_checkpoint_lies_before_the_gradients_left_their_course(tmp_path: Path) -> None:
    loss = CALM | {"line": [[0, 6.0], [100, 3.0], [430, 2.6], [431, 4.5], [600, 4.9]]}
    climbing = NORM | {"line": [[0, 3.0], [100, 1.0], [400, 0.8], [406, 9.0], [430, 40.0], [600, 30.0]]}
    found = diagnosed(tmp_path, signals={"loss": loss, "grad_norm": climbing}, checkpoints=20)
    assert "before step 40" in found.first_action, found.first_action


def test_what_was_tried_and_did_not_help_counts_against_its_cause(tmp_path: Path) -> None:
    """Half the rate from step 300 on, and the loss leaps again."""
    leaps = [[150 * turn + 50, 150 * turn + 60, 5.0] for turn in range(1, 4)]
    loss = CALM | {"set": leaps, "after_resume": CALM | {"set": leaps}}
    halved = {"line": [[0, 1e-3], [600, 1e-3]], "after_resume": {"line": [[300, 5e-4], [600, 5e-4]]}}
    once = {"line": [[0, 1e-3], [600, 1e-3]]}
    grades = []
    for place, rate in (("halved", halved), ("once", once)):
        signals = {"loss": loss, "grad_norm": NORM, "lr": rate}
        found = diagnosed(tmp_path / place, signals=signals, resumes=[[300, 380]] if rate is halved else [])
        grades.append({each.cause: each for each in found.hypotheses}.get("lr-too-high"))
    assert grades[1] is not None
    assert grades[0] is None or any("came again" in text for text in grades[0].evidence_against)


def infinite(step: int, *, is_skipped: bool, **stream: Any) -> dict[str, Any]:
    """One infinite gradient in the embedding, skipped or not, in a run that clips at 20 by its settings."""
    finding = {"detector": "nonfinite", "severity": "GATE", "spoils_update": True, "signal": "grad_norm"}
    skip = {"kind": "skip", "step": step, "acted": True, "findings": [finding]}
    signals = {
        "loss": CALM,
        "grad_norm": NORM | {"set": [[step, step, "inf"]]},
        "culprit": {"texts": {"0": "", str(step): "emb.weight", str(step + 1): ""}},
        "clip_norm": {"line": [[0, 20.0], [300, 20.0], [301, 0.5], [600, 0.5]]},
    }
    settings = {"optimizer": {"clip": 20.0}}
    return {"signals": signals, "settings": settings, "events": [skip] if is_skipped else [], **stream}


def test_what_the_guard_has_skipped_is_not_to_be_skipped(tmp_path: Path) -> None:
    went_in = diagnosed(tmp_path / "in", **infinite(400, is_skipped=False))
    left_out = diagnosed(tmp_path / "out", **infinite(400, is_skipped=True))
    assert went_in.hypotheses[0].cause == "inf-times-zero"
    assert "kip updates that are not finite" in went_in.first_action
    assert any("clipped at 0.5" in text for text in went_in.hypotheses[0].evidence_for), "the clip that was in force"
    assert left_out.hypotheses[0].cause == "infinite-embedding-gradient"
    assert "kip updates" not in left_out.first_action
    assert "lip gradients by value" in left_out.first_action


def test_what_is_clipped_already_is_not_to_be_clipped(tmp_path: Path) -> None:
    margins = [{"margin": "clip_value", "value": 100.0, "because": "it was infinite"}]
    tightened = {"kind": "intervention", "step": 401, "number": 1, "trigger": "asked", "acted": True}
    tightened |= {"actions": [{"action": "tighten", "clip_value": 100.0}], "margins": margins}
    stream = infinite(400, is_skipped=True)
    found = diagnosed(tmp_path, **stream | {"events": [*stream["events"], tightened]})
    assert "by value" not in found.first_action
    assert "fp32" in found.first_action


@pytest.mark.parametrize(("clip", "is_advised"), [(1.0, True), (0.5, False)])
def test_a_clip_that_is_in_force_is_not_advised(clip: float, is_advised: bool, tmp_path: Path) -> None:
    shares = {"0": f"{'9 ' * 20}{'0 ' * 20}", "400": f"{'9 ' * 20}0 3{' 0' * 18}", "401": f"{'9 ' * 20}{'0 ' * 20}"}
    signals = {
        "loss": CALM | {"line": [[0, 6.0], [100, 3.0], [399, 2.6], [400, 5.6], [440, 3.6], [600, 3.4]]},
        "grad_norm": NORM | {"set": [[400, 400, 60.0]]},
        "lr": {"line": [[0, 1e-5], [50, 3e-4], [600, 2e-4]]},
        "batch_hash": {"batches": True},
        "token_loss_histogram": {"texts": shares},
        "clip_norm": {"line": [[0, clip], [600, clip]]},
    }
    found = diagnosed(tmp_path, signals=signals)
    assert (found.hypotheses[0].cause, found.hypotheses[0].grade) == ("long-tail-token", "supported")
    assert ("clip gradients at 0.9" in found.first_action) is is_advised
    assert "stratified" in found.first_action


@pytest.mark.parametrize(("before", "is_advised"), [("web=8", False), ("web=7 code=1", True)])
def test_the_only_source_is_not_taken_out(before: str, is_advised: bool, tmp_path: Path) -> None:
    signals = {
        "loss": CALM | {"line": [[0, 6.0], [100, 3.0], [399, 2.6], [400, 5.6], [412, 5.6], [413, 2.6], [600, 2.5]]},
        "grad_norm": NORM | {"set": [[400, 412, 20.0]]},
        "token_entropy": {"line": [[0, 5.0], [600, 5.0]], "noise": 0.02, "set": [[400, 412, 2.0]]},
        "batch_hash": {"batches": True},
        "sources": {"texts": {"0": before}},
    }
    found = diagnosed(tmp_path, signals=signals)
    assert found.hypotheses[0].cause == "bad-data-batch"
    assert "kip those batches" in found.first_action
    assert ("take the source out" in found.first_action) is is_advised


@pytest.mark.parametrize("ended", [700, 1450])
@pytest.mark.parametrize(("begun", "height"), [(300, 1.25), (600, 1.7), (690, 2.5)])
def test_what_is_long_over_is_not_waited_for(begun: int, height: float, ended: int, tmp_path: Path) -> None:
    """Whatever it was: no page says to look again in 200 steps where 200 steps show that it is over."""
    begun += ended - 700
    leap = {"line": [[0, 6.0], [100, 3.0], [begun - 1, 2.6], [begun, 2.6 * height], [ended - 1, 2.6 * height]]}
    leap["line"] += [[ended, 2.6], [1500, 2.5]]
    found = diagnosed(tmp_path, steps=1500, signals={"loss": leap | {"noise": 0.01}, "grad_norm": NORM})
    assert found.findings.incidents
    assert ("look again in 200 steps" in found.first_action) <= (ended == 1450), found.first_action
    assert "the loss is back" in found.first_action or "go on" in found.first_action or ended == 1450


def test_a_healthy_page_does_not_say_that_all_is_well_and_not_well(tmp_path: Path) -> None:
    rising = {"line": [[0, 0.5], [600, 3.0]], "noise": 0.05}
    found = diagnosed(tmp_path / "rises", signals={"loss": CALM, "grad_norm": rising})
    assert found.findings.verdict == "healthy"
    assert "but" not in found.findings.because
    assert "beside it: gradient norm rising" in found.findings.because
    assert "look again when it stops, since gradients grow" in found.first_action
    leaps = NORM | {"set": [[400, 405, 20.0]]}
    found = diagnosed(tmp_path / "leaps", signals={"loss": CALM, "grad_norm": leaps})
    assert "beside it: gradient norm up to 20" in found.findings.because
    assert found.first_action == "Leave it: nothing asks for an action."


@pytest.mark.parametrize("logs", ["norms", "no norms", "rare overflows"])
@pytest.mark.parametrize("scale", [1024.0, 65536.0])
def test_a_constant_loss_scale_is_made_dynamic_before_anything_else(logs: str, scale: float, tmp_path: Path) -> None:
    broken: dict[str, Any] = {"set": [[400, 600, "NaN"]]} if logs != "rare overflows" else {}
    signals = {"loss": CALM | broken, "loss_scale": {"line": [[0, scale], [600, scale]]}}
    if logs != "no norms":
        overflows = [[step, step, "inf"] for step in range(300, 600, 7)]
        signals["grad_norm"] = NORM | {"set": [*overflows, *([[400, 600, "inf"]] if broken else [])]}
    found = diagnosed(tmp_path, signals=signals, dtype="fp16")
    assert found.findings.verdict == "act"
    assert {it.question: it.answer for it in found.path}.get("Q3.2", "constant") == "constant"
    assert "GradScaler" in found.first_action, found.first_action
    assert "halve the LR" not in found.first_action
    order = [found.first_action.find(word) for word in ("GradScaler", "bf16")]
    assert order == sorted(order), found.first_action


@pytest.mark.parametrize(("highest", "is_ruled_out"), [(0.9, True), (1.7, False), (2.6, False)])
def test_a_rare_token_is_ruled_out_by_gradients_that_would_have_shown_it(
    highest: float, is_ruled_out: bool, tmp_path: Path
) -> None:
    """A doubled norm is what a few rare tokens among many common ones leave: not for it, and no proof against it."""
    leap = CALM | {"line": [[0, 6.0], [100, 3.0], [399, 2.6], [400, 5.6], [404, 2.6], [600, 2.5]]}
    norm = NORM | {"set": [[400, 404, highest * 0.85]]}
    found = diagnosed(tmp_path, signals={"loss": leap, "grad_norm": norm})
    out = {it.cause for it in found.hypotheses if it.grade == "ruled out"}
    assert ("long-tail-token" in out) is is_ruled_out


@pytest.mark.parametrize("value", ["inf", "NaN"])
@pytest.mark.parametrize(("settings", "cause"), [
    ({}, None),
    ({"model": {"naive_log_loss": True}}, "log-of-zero"),
    ({"model": {"naive_softmax": True}}, "softmax-overflow"),
])  # fmt: skip
def test_log_of_zero_and_logits_that_overflow_are_told_apart_or_both_named(
    value: str, settings: dict[str, Any], cause: str | None, tmp_path: Path
) -> None:
    """An infinite loss comes from a probability of 0, and from logits beyond the range of exp as well."""
    signals = {"loss": CALM | {"set": [[400, 400, value], [401, 600, "NaN"]]}, "grad_norm": NORM}
    signals["grad_norm"] = NORM | {"set": [[400, 600, "NaN"]]}
    found = diagnosed(tmp_path, signals=signals, settings=settings, dtype="bf16")
    likely = [it.cause for it in found.hypotheses if it.grade != "ruled out"]
    assert {"log-of-zero", "softmax-overflow"} <= set(likely)
    grades = {it.cause: it.grade for it in found.hypotheses}
    if cause is not None:
        assert (likely[0], grades[cause]) == (cause, "supported")
    else:
        assert {grades["log-of-zero"], grades["softmax-overflow"]} == {"hypothesis"}
        assert value == "NaN" or "logits that are not finite have overflowed" in found.first_action
