"""Single signs, where an incident in prose would say too little: what they must not be taken in by."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.diagnosis.streams import Case, run_from

from sealegs.diagnosis.contract import Diagnosis
from sealegs.diagnosis.facts import Facts
from sealegs.diagnosis.findings import look
from sealegs.diagnosis.rank import diagnose
from sealegs.diagnosis.signs.registry import SIGNS
from sealegs.diagnosis.signs.sign import Sign

LOSS = {"line": [[0, 6.0], [100, 3.6], [400, 3.0], [1200, 2.7]], "noise": 0.012}
LEAP = {"line": [[0, 6.0], [100, 3.6], [600, 2.9], [603, 4.6], [640, 4.0], [1200, 3.6]], "noise": 0.012}
NORM = {"line": [[0, 3.0], [100, 1.0], [1200, 0.7]], "noise": 0.1}
RATE = {"line": [[0, 1e-5], [100, 1e-3], [1200, 4e-4]]}
RESUMED: dict[str, Any] = {"resumes": [[600, 640]], "events": [{"kind": "resume", "step": 600}]}


def facts_of(tmp_path: Path, **stream: Any) -> Facts:
    return Facts(look(run_from(Case("signs", "", {"steps": 1200, **stream}, {}), tmp_path)))


def sign(name: str, tmp_path: Path, **stream: Any) -> Sign:
    return SIGNS[name](facts_of(tmp_path, **stream))


def diagnosed(tmp_path: Path, **stream: Any) -> Diagnosis:
    return diagnose(facts_of(tmp_path, **stream).findings, source="", format="")


def updates(*folds: float) -> dict[str, Any]:
    """Update ratios of as many groups, each so many times the usual from step 603 to 611."""
    usual = {"line": [[0, 0.001], [100, 0.004], [1200, 0.0016]], "noise": 0.05, "every": 5}
    return {
        f"update_ratio.{group}": usual | ({"set": [[603, 611, fold * 0.0029]]} if fold > 1 else {})
        for group, fold in enumerate(folds)
    }


def test_updates_that_leap_alone_in_every_group(tmp_path: Path) -> None:
    found = sign("updates-leap", tmp_path, signals={"loss": LEAP, "grad_norm": NORM, "lr": RATE, **updates(20, 12, 30)})
    assert found.holds
    assert "in all 3 groups" in found.text


def test_updates_that_leap_in_the_embedding_alone_are_no_step_size(tmp_path: Path) -> None:
    assert not sign(
        "updates-leap", tmp_path, signals={"loss": LEAP, "grad_norm": NORM, "lr": RATE, **updates(20, 1)}
    ).holds


def test_updates_that_follow_the_gradients_are_no_step_size(tmp_path: Path) -> None:
    exploding = NORM | {"set": [[600, 620, 30.0]]}
    signals = {"loss": LEAP, "grad_norm": exploding, "lr": RATE, **updates(10, 10)}
    assert not sign("updates-leap", tmp_path, signals=signals).holds


def test_updates_that_follow_the_logged_rate_are_no_secret(tmp_path: Path) -> None:
    jumping = RATE | {"set": [[600, 612, 0.02]]}
    signals = {"loss": LEAP, "grad_norm": NORM, "lr": jumping, **updates(25, 25)}
    assert not sign("updates-leap", tmp_path, signals=signals).holds
    assert sign("step-size-jumps", tmp_path, signals=signals).holds
    (top, *_) = diagnosed(tmp_path, signals=signals).hypotheses
    assert top.cause == "lr-discontinuity"


def test_updates_are_not_judged_without_the_gradients(tmp_path: Path) -> None:
    found = sign("updates-leap", tmp_path, signals={"loss": LEAP, "lr": RATE, **updates(20, 20)})
    assert (found.holds, found.missing) == (None, "grad_norm")


def test_moments_that_are_not_logged_are_told_by_what_their_loss_does(tmp_path: Path) -> None:
    """The first loss is as before, then updates overshoot until the second moment has filled up."""
    after = {"line": [[600, 2.9], [601, 3.0], [604, 4.2], [612, 3.8], [640, 2.95], [1200, 2.7]], "noise": 0.012}
    norm = {"line": [[600, 0.85], [604, 3.4], [620, 1.6], [650, 0.8], [1200, 0.7]], "noise": 0.1}
    signals = {"loss": LOSS | {"after_resume": after}, "grad_norm": NORM | {"after_resume": norm}, "lr": RATE}
    top = diagnosed(tmp_path, **RESUMED, settings={"beta2": 0.95}, signals=signals).hypotheses[0]
    assert (top.cause, top.grade) == ("optimizer-reset", "supported")
    told = "; ".join(top.evidence_for)
    assert "before the resume, and leaps at step 60" in told
    assert "-fold from 20 steps on" in told


def test_a_first_loss_that_is_off_acquits_the_moments(tmp_path: Path) -> None:
    after = {"line": [[600, 4.4], [640, 3.6], [800, 3.0], [1200, 2.75]], "noise": 0.012}
    likely = [
        hypothesis
        for hypothesis in diagnosed(tmp_path, **RESUMED, signals={"loss": LOSS | {"after_resume": after}}).hypotheses
        if hypothesis.grade != "ruled out"
    ]
    assert (likely[0].cause, likely[0].grade) == ("resume-state-missing", "hypothesis"), "from a loss alone no more"
    assert "optimizer-reset" not in {hypothesis.cause for hypothesis in likely}


def test_a_batch_that_was_harmless_before_the_resume_acquits_the_batch_alone(tmp_path: Path) -> None:
    after = {"line": [[600, 4.4], [640, 3.6], [800, 3.0], [1200, 2.75]], "noise": 0.012}
    signals = {"loss": LOSS | {"after_resume": after}, "lr": RATE, "batch_hash": {"batches": True}}
    grades = {each.cause: each.grade for each in diagnosed(tmp_path, **RESUMED, signals=signals).hypotheses}
    assert (grades["resume-state-missing"], grades["batch-and-state"]) == ("supported", "hypothesis")


def test_a_leap_between_logged_rows_does_not_tell_what_the_first_loss_was(tmp_path: Path) -> None:
    after = {"line": [[600, 4.4], [640, 3.6], [800, 3.0], [1200, 2.75]], "noise": 0.012}
    facts = facts_of(tmp_path, **RESUMED, every=4, signals={"loss": LOSS | {"after_resume": after}})
    assert facts.resumed_before == 600
    assert not SIGNS["leaps-with-resume"](facts).holds
    assert not SIGNS["leaps-after-resume"](facts).holds


def test_what_came_back_is_listed(tmp_path: Path) -> None:
    other = RATE | {"after_resume": {"line": [[600, 1e-5], [1200, 1e-3]]}}
    found = sign(
        "parts-restored", tmp_path, **RESUMED, signals={"loss": LOSS, "lr": other, "batch_hash": {"batches": True}}
    )
    assert found.text == (
        "after the resume: learning rate not as before, batches as before; the random state leaves no trace"
    )


def test_what_a_rollback_changes_it_was_to_change(tmp_path: Path) -> None:
    """Resumed at 590, damaged at 600, rolled back from 640 to 580 with other batches and a lower rate."""
    lower = RATE | {"after_resume": {"line": [[580, 1e-4], [1200, 1e-5]]}}
    others = {"batches": True, "after_resume": {"batches": True, "again_from": [[0, 5000]]}}
    signals = {"loss": LEAP | {"after_resume": LOSS}, "lr": lower, "batch_hash": others}
    told: list[dict[str, Any]] = [{"kind": "resume", "step": 590}]
    stream: dict[str, Any] = {"resumes": [[580, 640]], "signals": signals, "events": told}
    names = ("data-not-restored", "lr-not-restored")
    taken_for_a_resume = facts_of(tmp_path, **stream)
    assert taken_for_a_resume.resumes == (580, 590)
    assert all(SIGNS[name](taken_for_a_resume).holds for name in names)
    told.append({"kind": "intervention", "step": 640, "acted": True, "to_step": 580})
    facts = facts_of(tmp_path, **stream)
    assert facts.resumes == (590,)
    assert not any(SIGNS[name](facts).holds for name in names)


def test_a_step_that_was_not_finite_may_be_so_after_a_rollback(tmp_path: Path) -> None:
    broken = LOSS | {"set": [[620, 640, "nan"]], "after_resume": LOSS}
    told = [{"kind": "intervention", "step": 640, "acted": True, "to_step": 580}]
    signals = {"loss": broken, "batch_hash": {"batches": True}}
    assert sign("finite-again", tmp_path, resumes=[[580, 640]], signals=signals, events=told).holds


def test_a_loss_scale_that_doubles_at_a_resume_is_the_scalers_work(tmp_path: Path) -> None:
    scale = {"line": [[0, 4096], [1200, 4096]], "after_resume": {"line": [[600, 8192], [1200, 8192]]}}
    assert not sign(
        "scale-begins-again", tmp_path, **RESUMED, dtype="fp16", signals={"loss": LOSS, "loss_scale": scale}
    ).holds


def test_a_loss_that_was_learned_down_to_zero_has_its_labels(tmp_path: Path) -> None:
    learned = {
        "line": [[0, 3.5], [40, 0.1], [80, 1e-3], [110, 1e-6], [1200, 1e-6]],
        "noise": 0.3,
        "set": [[120, 130, 0.0]],
    }
    masked = LOSS | {"set": [[300, 302, 0.0]]}
    assert not sign("exactly-zero", tmp_path, signals={"loss": learned}).holds
    assert sign("exactly-zero", tmp_path, signals={"loss": masked}).holds


def test_margins_that_are_kept_are_no_masked_labels(tmp_path: Path) -> None:
    """A hinge is exactly 0 ever more often, and next to 0 beside it; a batch without targets comes among usual ones."""
    zeros = [[step, step, 0.0] for step in range(44, 400, 3)]
    for near, holds in ((0.001, False), (0.8, True)):
        near_them = [[step + 1, step + 1, near] for step in range(44, 400, 30)]
        hinge = {"line": [[0, 1.0], [400, 0.8]], "noise": 0.01, "set": [*zeros, *near_them]}
        norms = {"line": [[0, 1.0], [400, 1.0]], "noise": 0.01, "set": zeros}
        made = {"loss": hinge, "grad_norm": norms}
        assert sign("zero-loss-zero-gradient", tmp_path, steps=400, signals=made).holds is holds


def test_only_an_optimizer_with_a_beta2_has_one_that_is_stale(tmp_path: Path) -> None:
    for name, holds in (("SGD", True), ("adafactor", True), ("paged_adamw_8bit", False)):
        told = {"optimizer": {"optimizer": name}}
        assert sign("no-fixed-beta2", tmp_path, signals={"loss": LOSS}, settings=told).holds is holds


def test_a_loss_of_zero_before_a_leap_is_no_denominator(tmp_path: Path) -> None:
    learned = {"line": [[0, 3.5], [40, 0.1], [200, 1e-6], [1200, 1e-6]], "noise": 0.3}
    signals = {"loss": learned | {"set": [[300, 799, 0.0], [800, 1200, 8.0]]}, "grad_norm": NORM}
    facts = facts_of(tmp_path, signals=signals)
    assert facts.persists
    assert not SIGNS["scaled-by-whole-number"](facts).holds


def test_a_planned_restart_of_the_schedule_is_no_cosine_upside_down(tmp_path: Path) -> None:
    restart = {"line": [[0, 1e-5], [20, 1e-3], [600, 1e-8], [620, 1.2e-3], [1200, 4e-4]]}
    turned = {"line": [[0, 1e-3], [500, 1e-5], [1000, 1e-3], [1200, 8e-4]]}
    assert not sign("lr-falls-then-rises", tmp_path, signals={"loss": LOSS, "lr": restart}).holds
    assert sign("lr-falls-then-rises", tmp_path, signals={"loss": LOSS, "lr": turned}).holds
    cycles = {"line": [[200 * turn, (1e-5, 1e-3)[turn % 2]] for turn in range(7)]}
    assert not sign("lr-falls-then-rises", tmp_path, signals={"loss": LOSS, "lr": cycles}).holds


@pytest.mark.parametrize("warmup", [1, 60, 150, 200])
def test_a_cosine_upside_down_may_be_counted_from_the_first_step_of_the_warm_up(warmup: int, tmp_path: Path) -> None:
    """As min(1, step / warmup) * cosine(step) is; the rate is then on its way where the warm-up ends."""

    def holds(shape: Any) -> bool | None:
        line = [[step, 3e-4 * min(1.0, (step + 1) / warmup) * shape(step / 1200)] for step in range(1201)]
        return sign("lr-rises-as-a-cosine", tmp_path, signals={"loss": LOSS, "lr": {"line": line}}).holds

    assert holds(lambda time: 0.1 + 0.45 * (1 - np.cos(np.pi * time)))
    assert not holds(lambda time: 0.1 + 0.9 * time), "which is a warm-up"


def test_trouble_in_the_first_steps_of_a_warm_up_is_not_its_length(tmp_path: Path) -> None:
    lost = {"line": [[0, 10.0], [100, 10.0]], "set": [[2, 100, "NaN"]]}
    signals = {"loss": lost, "lr": {"line": [[0, 1e-6], [100, 1e-4]]}}
    grades = {each.cause: each.grade for each in diagnosed(tmp_path, steps=100, signals=signals).hypotheses}
    assert grades["endless-warmup"] == "hypothesis"


def test_a_spike_that_is_over_before_the_next_evaluation_is_not_put_down_to_the_order_of_the_data(
    tmp_path: Path,
) -> None:
    spike = LOSS | {"line": [[0, 6.0], [100, 3.6], [620, 2.9], [625, 3.9], [650, 3.3], [690, 2.9], [1200, 2.7]]}
    held_out = {"line": [[0, 6.0], [200, 3.4], [1200, 2.8]], "every": 200}
    found = diagnosed(tmp_path, signals={"loss": spike, "grad_norm": NORM, "eval_loss": held_out})
    assert found.findings.incidents
    assert "badly-shuffled-data" not in {each.cause for each in found.hypotheses}


@pytest.mark.parametrize(
    ("line", "jumps"), [([[0, 1e-4], [5, 6e-4], [1200, 6e-4]], 0), ([[0, 1e-4], [1, 6e-4], [1200, 6e-4]], 1)]
)
def test_a_short_warm_up_does_not_jump(line: Any, jumps: int, tmp_path: Path) -> None:
    assert len(facts_of(tmp_path, signals={"loss": LOSS, "lr": {"line": line}}).lr_jumps) == jumps


def test_a_rate_that_is_high_for_one_row_jumps(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, signals={"loss": LOSS, "lr": RATE | {"set": [[600, 600, 0.02]]}})
    assert [jump.step for jump in facts.lr_jumps] == [600, 601]


def test_an_evaluation_loss_that_fell_steeply_before_is_not_noisy(tmp_path: Path) -> None:
    held_out = {"line": [[0, 6.0], [200, 4.4], [400, 3.4], [600, 3.0], [800, 3.5], [1200, 3.4]], "every": 200}
    assert sign("eval-rises", tmp_path, signals={"loss": LEAP, "eval_loss": held_out}).holds


def test_an_evaluation_after_a_spike_says_nothing_of_the_data(tmp_path: Path) -> None:
    spike = LOSS | {"set": [[650, 655, 5.0]]}
    held_out = {"line": [[0, 6.0], [200, 3.4], [1200, 2.8]], "every": 200}
    assert sign("eval-flat", tmp_path, signals={"loss": spike, "eval_loss": held_out}).holds
    assert not sign("eval-flat-meanwhile", tmp_path, signals={"loss": spike, "eval_loss": held_out}).holds


def test_damage_is_not_memorisation(tmp_path: Path) -> None:
    turns = {"line": [[0, 6.0], [400, 3.2], [600, 3.1], [800, 3.5], [1200, 3.45]], "every": 100}
    rises = {"line": [[0, 6.0], [100, 3.6], [400, 2.0], [1200, 1.1]], "noise": 0.012}
    assert sign("eval-turns", tmp_path, signals={"loss": rises, "eval_loss": turns}).holds
    hurt = LEAP | {"line": [[0, 6.0], [100, 3.6], [600, 3.0], [603, 5.6], [680, 3.6], [1200, 2.8]]}
    assert not sign("eval-turns", tmp_path, signals={"loss": hurt, "eval_loss": turns}).holds


def test_a_noisy_ramp_is_a_ramp_and_a_burst_is_none(tmp_path: Path) -> None:
    def norms(*values: float) -> dict[str, Any]:
        return NORM | {"set": [[598 + at, 598 + at, value] for at, value in enumerate(values)]}

    ramp, burst = norms(2.0, 3.4, 2.9, 9.0, 8.0, 40.0, 30.0), norms(38.0, 30.0, 35.0, 33.0, 42.0, 28.0, 31.0)
    assert sign("gradient-ramps", tmp_path, signals={"loss": LEAP, "grad_norm": ramp}).holds
    assert not sign("gradient-ramps", tmp_path, signals={"loss": LEAP, "grad_norm": burst}).holds


def test_the_entropy_of_a_later_batch_is_not_that_of_the_one_that_spiked(tmp_path: Path) -> None:
    spike = LOSS | {"set": [[612, 613, 6.0]]}
    entropy: dict[str, Any] = {"line": [[0, 4.3], [1200, 4.3]], "noise": 0.005, "every": 10}
    found = sign("entropy-usual", tmp_path, signals={"loss": spike, "grad_norm": NORM, "token_entropy": entropy})
    assert (found.holds, found.missing) == (None, "token_entropy")
    signals = {"loss": spike, "grad_norm": NORM, "token_entropy": entropy | {"every": 1}}
    assert sign("entropy-usual", tmp_path, signals=signals).holds


@pytest.mark.parametrize(
    ("factor", "accumulation", "holds"),
    [
        (2.07, None, True),
        (8.2, None, True),  # a model that begins 2.5 % above guessing, eight times over
        (7.8, None, False),  # no model begins so far below guessing
        (8.5, None, False),
        (16.4, 16, True),
        (16.4, 12, False),
        (1.03, 1, False),
    ],
)
def test_a_first_loss_is_a_multiple_where_models_begin_a_little_above_guessing(
    factor: float, accumulation: int | None, holds: bool, tmp_path: Path
) -> None:
    first = factor * math.log(50_000)
    settings = {"model": {"vocabulary": 50_000}} | ({"accumulation": accumulation} if accumulation else {})
    loss = {"line": [[0, first], [2, first], [300, 0.6 * first], [1200, 0.5 * first]], "noise": 0.0005}
    assert sign("multiple-of-uniform", tmp_path, signals={"loss": loss}, settings=settings).holds == holds
