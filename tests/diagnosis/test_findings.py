"""Each kind of incident is found, and curves without one are healthy: of any noise, length, interval and sign."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sealegs.detectors.textbook import ThreeSigma
from sealegs.diagnosis.contract import Findings
from sealegs.diagnosis.curve.live_statistic import _windowed
from sealegs.diagnosis.damage import is_cleared
from sealegs.diagnosis.findings import look
from sealegs.diagnosis.incident_order import gravity
from sealegs.diagnosis.rank import diagnose
from sealegs.errors import ConfigError
from sealegs.record.columns import Columns
from sealegs.record.manifest import Manifest
from sealegs.record.run import Run, run_of

Floats = NDArray[np.float64]


def run(loss: Floats, *, every: int = 1, steps: Floats | None = None, created: str = "", **more: Floats) -> Run:
    numbered = every * np.arange(float(len(loss))) if steps is None else steps.astype(np.float64)
    values = {"step": numbered, "loss": np.asarray(loss, dtype=np.float64), **more}
    logged = {name: np.ones(len(loss), dtype=bool) for name in values}
    return run_of(Path("log"), Manifest(run_id="log", created=created), Columns(values, logged))


def noise(kind: str, rows: int, seed: int) -> Floats:
    rng = np.random.default_rng(seed)
    if kind == "gamma":
        return np.asarray(rng.gamma(4, 0.5, rows) - 2)
    values = rng.standard_t(5, rows) if kind == "t5" else rng.normal(size=rows)
    if kind == "AR":
        for at in range(1, rows):
            values[at] = 0.87 * values[at] + 0.5 * values[at - 1]
    return np.asarray(values)


def falling(rows: int, seed: int = 0, kind: str = "t5", size: float = 0.02) -> Floats:
    trend = 2 + 8 / (1 + np.arange(rows) / (rows / 20))
    return np.asarray(trend * np.exp(size * noise(kind, rows, seed)))


def kinds(found: Findings) -> list[str]:
    return [incident.kind for incident in found.incidents]


@pytest.mark.parametrize("size", [1e-7, 1.0])
def test_a_loss_of_both_signs_is_judged_as_it_would_be_live(size: float) -> None:
    """About zero, and falling through it: what is a spike is said by its own past, as in the live guard."""
    about_zero = noise("t5", 2000, 0)
    through_zero = 60 * np.exp(-np.arange(2000) / 400) - 30 + 0.5 * noise("Gaussian", 2000, 1)
    for healthy, leap in ((about_zero, 50.0), (through_zero, 30.0)):
        assert look(run(size * healthy)).incidents == ()
        healthy = healthy.copy()
        healthy[1000] = healthy[1700] = 0.0  # of steps without anything to learn from
        healthy[1500:1503] += leap
        (found,) = look(run(size * healthy)).incidents
        assert (found.kind, found.start) == ("spike", 1500)


@pytest.mark.parametrize("kind", ["Gaussian", "t5", "gamma", "AR"])
@pytest.mark.parametrize(("rows", "every"), [(40, 1), (300, 10), (1500, 1), (5000, 1), (400, 100)])
def test_healthy_curves_are_healthy(kind: str, rows: int, every: int) -> None:
    found = [look(run(falling(rows, seed, kind), every=every)) for seed in range(3)]
    assert [one.verdict for one in found] == ["healthy"] * 3, [one.because for one in found]
    assert not any(one.incidents for one in found)


@pytest.mark.parametrize("size", [0.1, 0.3])
def test_a_noisy_curve_is_healthy_too(size: float) -> None:
    for seed in range(3):
        assert not look(run(falling(600, seed, size=size), every=10)).incidents


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e18])
def test_the_unit_of_the_loss_does_not_matter(scale: float) -> None:
    loss = falling(500)
    assert look(run(scale * loss)).verdict == "healthy"
    loss[300:304] *= 2
    assert [(one.kind, one.start) for one in look(run(scale * loss)).incidents] == [("spike", 300)]


def test_a_spike_is_found_with_its_numbers() -> None:
    loss, norm = falling(5000), np.ones(5000)
    loss[3000:3005] *= np.array([1.5, 3.0, 2.5, 2.0, 1.5])
    norm[3001] = 40.0
    found = look(run(loss, grad_norm=norm))
    (spike,) = found.incidents
    assert (spike.kind, spike.trajectory, found.verdict) == ("spike", "fast", "watch")
    assert (spike.number, spike.start, spike.peak, spike.grad_norm_peak) == (1, 3000, 3001, 40.0)
    assert spike.end is not None
    assert spike.end <= 3010
    assert spike.pre_loss == pytest.approx(2.6, abs=0.1)
    assert spike.recovery_loss == pytest.approx(spike.pre_loss, rel=0.05)
    assert "spike at step 3000" in found.because


@pytest.mark.parametrize("rows", [3, 6, 13])
@pytest.mark.parametrize("at", [300, 700, 1500])
def test_a_few_rows_that_are_high_together_are_found_though_none_is_alone(rows: int, at: int) -> None:
    losses = falling(2000, seed=1, size=0.012)
    losses[at : at + rows] *= 1.6 if at < 500 else 1.2  # a young statistic knows less of its tail
    assert [(one.kind, one.start) for one in look(run(losses)).incidents] == [("spike", at)]


def test_a_spike_that_takes_its_time_is_slow() -> None:
    loss = falling(5000)
    loss[3000:3300] *= 1 + 2 * np.exp(-np.arange(300) / 80)
    (spike,) = look(run(loss)).incidents
    assert (spike.kind, spike.trajectory) == ("spike", "slow")


@pytest.mark.parametrize(("rows", "every", "trajectory"), [
    *((400, 1, None), (400, 100, "lingering"), (5000, 1, "lingering")),
])  # fmt: skip
def test_a_new_level_is_one_that_lingers(rows: int, every: int, trajectory: str | None) -> None:
    """Two hundred steps are too few to say that it lingers, and enough of such a log to call for action."""
    loss = falling(rows)
    loss[rows // 2 :] *= 1.5
    found = look(run(loss, every=every))
    (shift,) = found.incidents
    assert (shift.kind, shift.trajectory, found.verdict) == ("level_shift", trajectory, "act")
    assert abs(shift.start - every * rows // 2) <= 16 * every
    assert shift.recovery_loss is None


def test_a_loss_that_climbs_above_its_beginning_diverges() -> None:
    loss = falling(300)
    loss[200:] *= np.exp(np.linspace(0, 5, 100))
    found = look(run(loss, every=10))
    assert found.verdict == "act"
    assert "divergent" in [one.trajectory for one in found.incidents]


def test_a_loss_that_only_rises_is_not_healthy() -> None:
    loss = 3 * np.exp(0.02 * np.arange(100)) * np.exp(0.02 * noise("t5", 100, 0))
    assert look(run(loss)).verdict == "act"


def test_a_slow_rise_is_a_drift() -> None:
    loss = falling(2000)
    loss[1000:] *= np.exp(np.linspace(0, 0.25, 1000))
    found = look(run(loss, every=10))
    assert kinds(found) == ["drift"]
    assert found.verdict == "act"
    assert 10_000 < found.incidents[0].start < 17_000


def test_nan_to_the_end_asks_for_action() -> None:
    loss = falling(300)
    loss[200:] = np.nan
    found = look(run(loss))
    (broken,) = found.incidents
    assert (broken.kind, broken.start, broken.end, broken.trajectory) == ("nonfinite", 200, 299, "divergent")
    assert np.isnan(broken.peak_loss)
    assert found.verdict == "act"


def test_nan_from_the_first_step_does_too() -> None:
    found = look(run(np.full(100, np.nan)))
    assert (found.verdict, kinds(found)) == ("act", ["nonfinite"])


def test_a_rise_that_ends_in_nan_diverges() -> None:
    loss = falling(300)
    loss[190:200] *= np.exp(np.linspace(0.5, 6, 10))
    loss[200:] = np.inf
    found = look(run(loss))
    assert [(one.kind, one.trajectory) for one in found.incidents] == [
        ("spike", "divergent"),
        ("nonfinite", "divergent"),
    ]


def test_one_nan_is_worth_a_look_and_three_in_a_row_more() -> None:
    loss = falling(300)
    loss[200] = np.nan
    assert look(run(loss)).verdict == "watch"
    loss[200:203] = np.nan
    assert look(run(loss)).verdict == "act"


@pytest.mark.parametrize("apart", [1, 2, 5, 8, 11, 12, 40])
def test_two_nans_are_worth_a_look_however_far_apart_and_three_near_each_other_more(apart: int) -> None:
    loss = falling(600)
    loss[[200, 200 + apart]] = np.nan
    assert look(run(loss)).verdict == "watch"
    loss[200 + 2 * apart] = np.nan
    assert look(run(loss)).verdict == ("act" if apart <= 11 else "watch")
    ends = falling(600)
    ends[-1 - apart] = ends[-1] = np.nan
    assert look(run(ends)).verdict == "act", "what comes of the last is in no row"


def test_nan_that_a_logger_wrote_as_zero_is_nan() -> None:
    loss, norm = falling(300), np.ones(300)
    loss[200:], norm[200:] = 0.0, np.nan
    found = look(run(loss, grad_norm=norm))
    assert (found.verdict, kinds(found)) == ("act", ["nonfinite"])


def test_gradients_that_are_often_none_are_an_incident_and_one_is_not() -> None:
    norm = np.ones(300)
    norm[100] = np.inf
    assert look(run(falling(300), grad_norm=norm)).verdict == "healthy"
    norm[100:105] = np.nan
    assert look(run(falling(300), grad_norm=norm)).verdict == "act"


def test_a_loss_scale_that_collapses_is_an_overflow_and_a_halving_is_not() -> None:
    scale = np.full(600, 65536.0)
    scale[300:] /= 2
    norm = np.ones(600)
    norm[299] = np.inf
    assert look(run(falling(600), grad_norm=norm, loss_scale=scale)).verdict == "healthy"
    scale[400:420] = 2.0 ** np.arange(14, -6, -1)
    scale[420:] = 2.0**-6
    norm[400:420] = np.inf
    found = look(run(falling(600), grad_norm=norm, loss_scale=scale))
    assert "overflow" in kinds(found)
    assert found.verdict in ("watch", "act")


def test_an_overflow_after_which_the_scale_stays_is_told_at_its_row() -> None:
    norms = np.ones(3000)
    norms[[500, 900]] = np.inf
    found = look(run(falling(3000), grad_norm=norms, loss_scale=np.full(3000, 65536.0)))
    assert [one.start for one in found.incidents if one.kind == "overflow"] == [500, 900]
    halved = np.where(np.arange(3000) < 500, 65536.0, 32768.0)
    norms[900] = 1.0
    assert look(run(falling(3000), grad_norm=norms, loss_scale=halved)).verdict == "healthy"


def test_a_loss_scale_of_one_is_none_and_does_not_overflow() -> None:
    """As Megatron writes it in bf16."""
    loss, norm = falling(600), np.ones(600)
    loss[301:], norm[300:] = np.nan, np.inf
    found = look(run(loss, grad_norm=norm, loss_scale=np.ones(600)))
    assert kinds(found) == ["nonfinite"]
    asked = {reply.question: reply for reply in diagnose(found, source="", format="").path}
    assert asked["Q1.2"].evidence == "no dtype is in the log, and a loss scale of 1 is none"


@pytest.mark.parametrize(("scale_after", "verdict"), [(2.0**-6, "act"), (65536.0, "watch")])
def test_a_loss_scale_that_stays_below_one_asks_for_the_action_of_its_question(
    scale_after: float, verdict: str
) -> None:
    scale, norm = np.full(3000, 65536.0), np.ones(3000)
    scale[1800:1823] = 2.0 ** np.arange(16, -7, -1)
    scale[1823:] = 2.0**-6
    scale[2200:] = scale_after
    norm[1800:1823] = norm[1830:2200:3] = np.inf
    found = diagnose(look(run(falling(3000), grad_norm=norm, loss_scale=scale)), source="", format="")
    assert found.findings.verdict == verdict
    assert (found.findings.incidents[0].end is None) is (verdict == "act")
    assert found.first_action.startswith("Leave it") is (verdict == "watch")
    assert {"Q3.4": "halve the LR, or bf16"}.items() <= {it.question: it.answer for it in found.path}.items()
    assert "se bf16, halve the LR" in found.first_action
    assert not {"dynamic", "eload"} & set(found.first_action.split())


def test_a_loss_that_never_falls_is_a_plateau() -> None:
    found = look(run(11 * np.exp(0.003 * noise("t5", 800, 0)), every=10))
    assert (found.verdict, kinds(found)) == ("watch", ["plateau"])


def test_a_jump_after_a_resume_is_called_so() -> None:
    first, second = falling(600), falling(800)[500:]
    steps = np.concatenate([np.arange(600), np.arange(500, 800)])
    jumped = second * (1 + np.exp(-np.arange(300) / 20))
    found = look(run(np.concatenate([first, jumped]), steps=steps))
    assert [(one.kind, one.start) for one in found.incidents] == [("resume_jump", 500)]
    calm = look(
        run(np.concatenate([first, falling(800, seed=1)[500:] * first[-50:].mean() / second[:50].mean()]), steps=steps)
    )
    assert calm.verdict == "healthy"


def test_what_a_resume_has_lost_is_to_be_acted_on_though_it_was_learned_anew() -> None:
    """Other data raise the loss for a while, too, and are no damage; the weights that a resume left behind are, and the
    next will leave them again."""
    first, second = falling(600), falling(1400)[500:]
    steps = np.concatenate([np.arange(600), np.arange(500, 1400)])
    relearned = second * (1 + np.exp(-np.arange(900) / 120))
    found = look(run(np.concatenate([first, relearned]), steps=steps))
    assert [(one.kind, one.start, one.trajectory) for one in found.incidents] == [("resume_jump", 500, "lingering")]
    assert found.verdict == "act"
    assert relearned[-50:].mean() < first[450:500].mean(), "and it is over"


def test_a_task_that_is_learned_after_another_is_to_be_watched() -> None:
    """A step up that stays for a tenth of the run and more, and is over where the run ends: below what was before."""
    loss = falling(3000)
    loss[1000:1600] *= 1.6
    loss[2400:] *= 0.7
    found = look(run(loss))
    (shift,) = [one for one in found.incidents if one.start == 1000]
    assert shift.trajectory == "lingering"
    assert found.verdict == "watch"
    stays = falling(3000)
    stays[1000:] *= 1.6
    assert look(run(stays)).verdict == "act"


def test_a_step_up_is_dated_where_it_is() -> None:
    """Ten to twenty times the noise: points that chance has raised before it do not begin it."""
    for seed in (0, 11, 13, 24):  # in the last three there are such points
        loss = 2 + 0.05 * noise("Gaussian", 1000, seed)
        loss[600:] += 1.0
        (found,) = look(run(loss)).incidents
        assert (found.kind, found.start) == ("level_shift", 600), seed


@pytest.mark.parametrize(("name", "kind"), [("one-row-at-a-time", "spike"), ("returns-that-grow", "level_shift")])
def test_healthy_losses_that_stay_high_for_a_while_do_not_ask_for_action(name: str, kind: str) -> None:
    """A hinge loss of single rows, most of them learned, in which a few that are not keep every mean of ten up; and the
    loss of an actor and its critic, which is high from the first step on, the more the better it plays."""
    loss = np.array((Path(__file__).parent / "healthy" / f"{name}.txt").read_text().split(), dtype=np.float64)
    found = look(run(loss, created="now"))
    assert kind in kinds(found)
    assert found.verdict == "watch", found.because
    worse = loss.copy()
    worse[-200:] *= 5
    assert look(run(worse, created="now")).verdict == "act", "which is a level, and the last"


def witnessed(loss: Floats, seed: int = 7) -> dict[str, Floats]:
    """The norms that belong to a loss where nothing is wrong: gradients that go with it, weights that grow slowly."""
    rows = len(loss)
    rates = np.full(rows, 1e-3)
    norms = 0.5 * np.sqrt(loss) * np.exp(0.1 * noise("t5", rows, seed))
    return {"grad_norm": norms, "param_norm": np.linspace(30, 33, rows), "lr": rates}


def harder_in_stages(rows: int) -> Floats:
    return falling(rows) * 1.7 ** (3 * np.arange(rows) // rows)


def weighed_more_and_more(rows: int) -> Floats:
    """A term whose weight grows over the second half."""
    return falling(rows) * np.exp(np.clip(np.linspace(-1, 1, rows), 0, 0.5))


def in_turns(rows: int) -> Floats:
    return falling(rows) * np.where(np.arange(rows) // (rows // 7) % 2, 2.5, 1.0)


@pytest.mark.parametrize("rises", [harder_in_stages, weighed_more_and_more, in_turns])
@pytest.mark.parametrize("rows", [800, 3000])
def test_a_rise_of_nothing_but_the_loss_is_to_be_watched(rises: Callable[[int], Floats], rows: int) -> None:
    """Where the norms of every step are there, and would show damage; the loss alone may be anything."""
    loss = rises(rows)
    assert look(run(loss)).verdict == "act"
    found = with_norms(loss)
    assert (found.verdict, "show no damage" in found.because) == ("watch", True), found.because
    action = diagnose(found, source="", format="").first_action
    assert action.startswith("Leave the weights alone")
    assert f"about step {min(found.cleared, key=gravity).start} " in action


def with_norms(loss: Floats, damage: str = "", *, every: int = 1, without: str = "") -> Findings:
    """A loss with its norms, and with one thing that is wrong from step 600 on."""
    logged = witnessed(loss)
    late = np.arange(len(loss)) >= 600
    match damage:
        case "weights leap":
            logged["param_norm"] *= np.where(late, 1.5, 1.0)
        case "weights leap by updates":
            logged["param_norm"] *= np.where(late, 1.5, 1.0)
            logged["update_ratio/blocks"] = np.where(late & (np.arange(len(loss)) < 620), 0.3, 0.02)
            logged["update_ratio/blocks"][0] = 0.5  # a run begins with its largest
        case "updates explode":
            logged["update_ratio/blocks"] = np.where(late, 0.3, 0.02)
        case "gradients explode":
            logged["grad_norm"] *= np.where(late, 6.0, 1.0)
        case "one gradient":
            logged["grad_norm"][601] = 40.0
        case "the rate leaps":
            logged["lr"] *= np.where(late, 20.0, 1.0)
        case "worse on what is held out":
            logged["eval_loss"] = np.where(np.arange(len(loss)) % 100 == 50, np.where(late, 4.0, 2.0), np.nan)
        case "gradients are not measured":
            logged["grad_norm"][:] = 1.0
    logged.pop(without, None)
    return look(run(loss, every=every, created="", **logged))


def risen_at_600() -> Floats:
    loss = falling(1200)
    loss[600:] *= 1.6
    return loss


@pytest.mark.parametrize(
    "damage",
    [
        *("weights leap", "updates explode", "gradients explode", "one gradient"),
        *("the rate leaps", "worse on what is held out"),
    ],
)
def test_a_rise_with_a_sign_of_damage_asks_for_action(damage: str) -> None:
    assert with_norms(risen_at_600()).verdict == "watch"
    assert with_norms(risen_at_600(), damage).verdict == "act"


def test_what_updates_explain_that_the_run_has_had_before_is_no_damage() -> None:
    assert with_norms(risen_at_600(), "weights leap by updates").verdict == "watch"


def test_weights_that_grow_slowly_while_the_loss_rises_to_the_end_are_damage() -> None:
    """No 200 steps double them; over the rise they do."""
    rows = 3000
    loss = falling(rows) * np.exp(0.4 * np.clip((np.arange(rows) - 2000) / 1000, 0, 1))
    logged: dict[str, Any] = witnessed(loss)
    assert look(run(loss, created="", **logged)).verdict == "watch"
    logged["param_norm"] = 40 * 11.0 ** (np.arange(rows) / rows)
    found = look(run(loss, created="", **logged))
    assert (found.verdict, found.cleared) == ("act", ())


def test_gradients_that_stay_high_while_a_harder_task_is_learned_are_no_damage() -> None:
    loss = falling(1200)
    loss[600:] *= 1.6 + 7 * np.exp(-np.arange(600) / 60)
    logged: dict[str, Any] = witnessed(loss)
    logged["grad_norm"][600:] = 6 * logged["grad_norm"][:600]
    assert look(run(loss, created="", **logged)).verdict == "watch"


def test_gradients_that_grow_to_a_size_that_the_run_has_learned_with_are_no_damage() -> None:
    """A rollout of five moments after one of two: errors add up along it, and gradients more than errors."""
    loss = falling(1200)
    loss[600:] *= 1.6
    logged: dict[str, Any] = witnessed(loss)
    logged["grad_norm"][600:] *= 6
    assert look(run(loss, created="", **logged)).verdict == "act"
    logged["grad_norm"][:40] *= 8  # as a run begins that has nothing learned
    assert look(run(loss, created="", **logged)).verdict == "watch"


@pytest.mark.parametrize("begins_with", [0.0, 3.0])
def test_gradients_of_the_first_steps_excuse_no_loss_that_rises_on_with_its_gradients(begins_with: float) -> None:
    """Silent divergence: every run begins with large gradients, and this says nothing about its last ones."""
    rows = 2500
    steps = np.arange(rows)
    late = np.clip(steps - 1700, 0, None) / 800
    loss = falling(rows) * (1 + 0.3 * late)
    logged: dict[str, Any] = {**witnessed(loss), "grad_norm": (0.4 + begins_with / (1 + steps / 50)) * (1 + 4 * late)}
    found = look(run(loss, created="", **logged))
    assert (found.verdict, found.cleared) == ("act", ()), found.because
    assert "halve the LR" in diagnose(found, source="", format="").first_action


def test_a_cleared_rise_whose_gradients_grow_is_not_said_to_show_nothing() -> None:
    """The decision tree says of the same run that its gradients rise: both are right, and neither decides."""
    rows = 2500
    late = np.clip(np.arange(rows) - 1700, 0, None) / 800
    loss = falling(rows) * (1 + 0.3 * late)
    logged: dict[str, Any] = {**witnessed(loss), "grad_norm": 0.4 + 0.6 * late}
    found = look(run(loss, created="", **logged))
    diagnosis = diagnose(found, source="", format="")
    assert [(it.question, it.answer) for it in diagnosis.path][-1] == ("Q4.4", "yes")
    assert (found.verdict, "gradients have grown" in found.because) == ("watch", True), found.because
    assert diagnosis.first_action.startswith("Leave the weights alone for now, and find out whether the data")
    assert "if not, reload the last checkpoint before step" in diagnosis.first_action


def test_an_overflow_is_listed_once() -> None:
    """The live statistic sees it last ten steps longer than the history of the loss scale."""
    steps = np.arange(400)
    broken = np.isin(steps, [200, 201, 202, 230, 260, 290]) | ((steps >= 300) & (steps <= 325))
    norms = np.where(broken, np.nan, 0.5 * np.exp(0.1 * noise("Gaussian", 400, 1)))
    finite = np.where(broken, 0.0, 1.0)
    found = look(
        run(falling(400), created="now", grad_norm=norms, grads_finite=finite, loss_scale=np.full(400, 65536.0))
    )
    assert [(it.kind, it.start) for it in found.incidents] == [("overflow", 200)]


@pytest.mark.parametrize(("scale", "is_told"), [(None, True), (1.0, True), (65536.0, False)])
def test_infinite_gradient_norms_without_a_scaler_are_told_beside_a_healthy_loss(
    scale: float | None, is_told: bool
) -> None:
    """A loss scale of 1 is none. A scaler's overflows are as they should be."""
    norms = 0.5 * np.exp(0.1 * noise("Gaussian", 2000, 1))
    norms[[5, 900, 1300, 1500]] = np.inf  # the first is of a scaler that looks for its scale, logged or not
    logged = {"grad_norm": norms} | ({} if scale is None else {"loss_scale": np.full(2000, scale)})
    if scale == 65536.0:
        for at in (5, 900, 1300, 1500):
            logged["loss_scale"][at + 1 :] /= 2
    found = look(run(falling(2000), **logged))
    assert found.verdict == "healthy"
    told = "gradient norm infinite in 3 of 2000 rows, the first at step 900"
    assert (told in found.because, "nothing out of the ordinary in the loss" in found.because) == (is_told, is_told)
    action = diagnose(found, source="", format="").first_action
    assert action.startswith("Leave it"), action
    precision = replace(found.run.manifest, dtype="fp16")
    assert "infinite" not in look(replace(found.run, manifest=precision)).because


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("height", [0.0, 0.07, 0.09])
def test_a_rise_of_several_times_the_noise_is_an_incident_or_told_beside_the_verdict(height: float, seed: int) -> None:
    """One that is over again after some two hundred rows: beyond doubt, if too little for an incident."""
    rows = np.arange(3000)
    loss = (2.9 + 5 * np.exp(-rows / 150)) * np.exp(0.015 * noise("Gaussian", 3000, seed))
    found = look(run(loss * (1 + np.where(rows >= 1808, height * np.exp(-(rows - 1808) / 200), 0.0))))
    told = [notice for notice in found.notices if "too little for an incident" in notice]
    assert len(told) + len(found.incidents) == (1 if height else 0)
    if height == 0.07:
        assert told[0].startswith(("loss up by 7% about steps 1808 to ", "loss up by 8% about steps 1808 to "))
        assert (found.verdict, told[0] in found.because) == ("healthy", True)


def test_no_small_rise_is_told_of_where_an_incident_is_nor_where_nothing_is_finite() -> None:
    loss = falling(3000, kind="Gaussian", size=0.015)
    assert look(run(np.append(loss, np.full(5, np.nan)))).verdict == "act"
    loss[1808:1900] *= 1.6
    assert not any("too little" in notice for notice in look(run(loss)).notices)
    nothing = np.full(100, np.nan)
    assert look(run(nothing)).verdict == "act"


@pytest.mark.parametrize(("higher", "verdict"), [(0.2, "watch"), (0.5, "act")])
def test_a_shift_is_over_where_the_loss_ends_at_the_level_before_give_or_take_a_standard_error(
    higher: float, verdict: str
) -> None:
    """That of a mean of ten losses is a third of a deviation."""
    loss = np.tile([1.9, 2.1], 600)
    loss[600:900] = 3.2
    loss[900:] += 0.1 * higher
    assert look(run(loss)).verdict == verdict


def test_a_run_that_ends_no_higher_than_before_a_shift_has_nothing_to_go_back_for() -> None:
    """Hard batches were rare and dear before it, and all are a little dear since: most losses stay higher."""
    loss = np.where(np.arange(1200) % 10 == 0, 0.3, 0.03) + 2 * np.exp(-np.arange(1200) / 50)
    loss[600:900] = np.geomspace(2.3, 0.05, 300)
    loss[900:] = 0.05
    found = look(run(loss))
    assert (found.incidents[-1].trajectory, found.incidents[-1].end, found.verdict) == ("lingering", 1199, "watch")
    loss[900:] = 0.2
    assert look(run(loss)).verdict == "act"


def test_a_loss_below_zero_has_no_size_that_gradients_could_outgrow() -> None:
    """An energy, and the price of a constraint that is raised tenfold."""
    loss = falling(1200) - 10
    loss[600:] += 3
    logged: dict[str, Any] = witnessed(falling(1200))
    logged["grad_norm"][600:640] *= 30
    assert look(run(loss, created="", **logged)).verdict == "watch"
    logged["param_norm"][600:] *= 1.5
    assert look(run(loss, created="", **logged)).verdict == "act"


def announced_at(step: int, loss: Floats, events: Path | None = None) -> Run:
    """Recorded by a guard, with an announcement in the row of one step."""
    rows = len(loss)
    values = {"step": np.arange(float(rows)), "loss": loss, "announced": np.array(["the next mixture"] * rows)}
    logged = {"step": np.ones(rows, bool), "loss": np.ones(rows, bool), "announced": np.arange(rows) == step}
    manifest = Manifest(run_id="log", created="2026-01-01T00:00:00")
    return run_of(Path("log"), manifest, Columns(values, logged), events=events)


def test_a_rise_that_was_announced_is_left_alone_unless_it_goes_on_rising() -> None:
    found = look(announced_at(600, risen_at_600()))
    assert (found.verdict, "the next mixture was announced at step 600" in found.because) == ("watch", True)
    assert diagnose(found, source="", format="").first_action == "Leave it: the next mixture was announced at step 600."
    assert look(announced_at(20, risen_at_600())).verdict == "act"
    assert look(announced_at(700, risen_at_600())).verdict == "act"
    diverging = falling(1200)
    diverging[600:] *= np.exp(np.arange(600) / 150)
    assert look(announced_at(600, diverging)).verdict == "act"


def test_what_a_probe_announced_excuses_no_rise(tmp_path: Path) -> None:
    """Gradients of eight times the size, in every tensor: somebody's mistake, which the statistic has to learn."""
    probe = '{"kind": "probe", "step": 600, "time": 0.0, "factor": %s}\n'
    events = tmp_path / "events.jsonl"
    events.write_text(probe % "null")
    assert look(announced_at(600, risen_at_600(), events)).verdict == "watch"
    events.write_text(probe % "8.0")
    assert look(announced_at(600, risen_at_600(), events)).verdict == "act"


def test_a_log_that_would_not_show_damage_clears_nothing() -> None:
    loss = risen_at_600()
    assert with_norms(loss, every=10).verdict == "act"
    assert with_norms(loss, without="grad_norm").verdict == "act"
    assert with_norms(loss, without="param_norm").verdict == "act"
    assert with_norms(loss, "gradients are not measured").verdict == "act"


@pytest.mark.parametrize("seed", range(3))
def test_a_loss_about_zero_is_not_told_well_nor_ill(seed: int) -> None:
    """Whatever it does; what is not finite is, all the same."""
    loss = 0.02 * noise("Gaussian", 600, seed)
    assert look(run(loss)).verdict in ("unknown", "watch")
    rising = loss + 0.05 * (np.arange(600) >= 300)
    found = look(run(rising))
    assert (found.verdict, "about zero" in found.because) == ("watch", True)
    assert [problem.kind for problem in found.problems] == ["hovers"]
    rising[500:] = np.nan
    assert look(run(rising)).verdict == "act"


def test_a_run_that_was_begun_again_is_no_jump() -> None:
    steps = np.concatenate([np.arange(300), np.arange(300)])
    assert look(run(np.concatenate([falling(300), falling(300, seed=1)]), steps=steps)).verdict == "healthy"


@pytest.mark.parametrize("rules", ["calibrated", "textbook"])
def test_a_long_run_that_was_begun_again_is_no_spike(rules: str) -> None:
    """Long enough for the live statistic, which would take the high losses of a start for a spike."""
    steps = np.concatenate([np.arange(900), np.arange(1500)])
    loss = np.concatenate([falling(900, kind="Gaussian"), falling(1500, seed=1, kind="Gaussian")])
    found = look(run(loss, steps=steps), rules=rules)
    assert not [incident for incident in found.incidents if incident.start < 100]


def test_our_own_run_that_went_back_to_its_beginning_is_no_spike() -> None:
    """The fold goes on with what the detectors knew at that step, as they did live."""
    steps = np.concatenate([np.arange(600), np.arange(600)])
    found = look(run(np.concatenate([falling(600), falling(600)]), steps=steps, created="2026-01-01T00:00:00"))
    assert (found.verdict, found.incidents) == ("healthy", ())


@pytest.mark.parametrize(("rows", "are_few"), [(12, True), (23, True), (40, False)])
def test_nothing_is_healthy_of_a_few_rows_that_do_not_fall(rows: int, are_few: bool) -> None:
    found = look(run(3 + 0.1 * noise("normal", rows, 0)))
    assert found.verdict == "unknown", found.because
    assert ("too few" in found.because) == are_few


def test_steps_down_at_epochs_are_benign() -> None:
    epoch = np.arange(600) / 150
    loss = 2.5 * 0.7 ** np.floor(epoch) * np.exp(0.02 * noise("t5", 600, 0))
    found = look(run(loss, every=10, epoch=epoch))
    assert (found.verdict, kinds(found)) == ("healthy", ["epoch_step"])
    assert "memorised" in found.because


def test_rises_at_the_end_of_every_epoch_are_artefacts() -> None:
    epoch = np.arange(600) / 100
    loss = falling(600)
    loss[[100, 200, 300, 400, 500]] *= 1.6
    found = look(run(loss, every=10, epoch=epoch))
    assert (found.verdict, kinds(found)) == ("healthy", ["spike"] * 5)
    assert "end of an epoch" in found.because
    assert look(run(loss, every=10)).verdict == "watch"


def test_losses_below_zero_are_looked_at_as_they_are() -> None:
    loss = -5 + 4 / (1 + np.arange(400) / 20) + 0.05 * noise("t5", 400, 0)
    assert look(run(loss)).verdict == "healthy"
    loss[250:256] += 6
    assert [(one.kind, one.start) for one in look(run(loss)).incidents] == [("spike", 250)]


def test_rises_far_below_the_first_loss_do_not_count() -> None:
    loss = 5 * 0.9 ** np.arange(300.0) + 1e-9
    loss[200:220] += 1e-5
    assert look(run(loss)).verdict == "healthy"
    loss[200:220] += 1.0
    assert kinds(look(run(loss))) == ["spike"]


def test_a_log_of_40_rows() -> None:
    loss = falling(40)
    loss[25:27] *= 3
    found = look(run(loss, every=50))
    assert [(one.kind, one.trajectory) for one in found.incidents] == [("spike", "slow")]
    assert any("40 rows" in text for text in found.unseen)


def test_what_a_coarse_log_cannot_show_is_said() -> None:
    found = look(run(falling(300), every=100))
    assert any("back within 100 steps can be missed" in text for text in found.unseen)
    assert "coarse" in [problem.kind for problem in found.problems]


@pytest.mark.parametrize("loss", [np.array([3.0, 2.0, 1.0]), np.full(200, 2.5), np.empty(0)])
def test_what_cannot_be_told_is_unknown(loss: Floats) -> None:
    found = look(run(loss))
    assert found.verdict == "unknown"
    assert found.because


def test_the_textbook_is_literal() -> None:
    loss = falling(3000)
    loss[2000:2003] *= 2
    found = look(run(loss), rules="textbook")
    assert 2000 in [one.start for one in found.incidents]
    assert len(found.incidents) > 3  # three sigma are passed in health
    rising = np.concatenate([falling(300), np.linspace(2.5, 2.6, 201)])
    assert "drift" in kinds(look(run(rising), rules="textbook"))
    with pytest.raises(ConfigError, match="calibrated, textbook"):
        look(run(loss), rules="mine")


def test_the_textbooks_limits_are_those_of_its_detector() -> None:
    loss, rule = falling(3000), ThreeSigma()
    loss[500], loss[2000] = 1e12, 4.0
    mean, sigma = _windowed(loss[:-1], rule.window)
    state, found = rule.init(), []
    for step, value in enumerate(loss.tolist()):
        now = {"step": step, "loss": value}
        found += [step] if rule.look(state, now) else []
        state = rule.learn(state, now)
    assert found == (np.flatnonzero(loss[rule.window :] > mean + rule.sigmas * sigma) + rule.window).tolist()
    assert 500 in found


def test_our_own_runs_are_judged_as_they_were_live() -> None:
    loss, norm = falling(2000), np.exp(0.1 * noise("t5", 2000, 1))
    assert look(run(loss, grad_norm=norm, created="now")).verdict == "healthy"
    loss[1500:1504] *= 2
    norm[1500:1504] *= 30
    (spike,) = look(run(loss, grad_norm=norm, created="now")).incidents
    assert (spike.kind, spike.start) == ("spike", 1500)


def test_what_was_rolled_back_is_an_incident_where_it_was() -> None:
    loss = falling(2000)
    spoilt = loss[:1520].copy()
    spoilt[1500:] *= 3
    steps = np.concatenate([np.arange(1520), np.arange(1450, 2000)])
    found = look(run(np.concatenate([spoilt, loss[1450:]]), steps=steps, created="now"))
    (spike,) = found.incidents
    assert (spike.kind, spike.start, spike.trajectory) == ("spike", 1500, None), "nobody saw how it would have gone on"
    assert spike.peak_loss > 6
    assert found.verdict == "watch"


def test_a_million_steps_take_seconds_and_lose_no_gross_spike() -> None:
    loss = falling(1_000_000)
    loss[600_000:600_005] *= 2
    loss[900_000:] *= 1.3
    one = run(loss, grad_norm=np.ones(1_000_000))
    began = time.process_time()
    found = look(one)
    assert time.process_time() - began < 60, "about one on an idle core: more would be another order of growth"
    kinds_at = {(it.kind, round(it.start / 1000)) for it in found.incidents}
    assert {("spike", 600), ("level_shift", 900)} <= kinds_at
    assert len(kinds_at) <= 8  # of a million rows of t5 noise
    assert any("only around" in text for text in found.unseen)


def spiked(points: int, rows: int, *, every: int = 1) -> Findings:
    losses = falling(points, kind="Gaussian")
    losses[points // 2 : points // 2 + rows] += 5
    return look(run(losses, every=every))


@pytest.mark.parametrize("points", [400, 1500, 2500, 6000])
@pytest.mark.parametrize(("rows", "every", "trajectory"), [
    *((38, 1, "fast"), (60, 1, "slow"), (7, 5, "fast"), (20, 10, "slow"), (60, 10, "lingering")),
    *((5, 10, None), (1, 100, None), (3, 100, "slow"), (5, 100, None), (8, 100, "lingering")),
])  # fmt: skip
def test_a_trajectory_is_told_in_steps_whatever_the_length_of_the_log(
    points: int, rows: int, every: int, trajectory: str | None
) -> None:
    (spike,) = spiked(points, rows, every=every).incidents
    assert (spike.trajectory, spike.recovery_loss is not None) == (trajectory, True)


def test_a_log_that_cannot_tell_fast_says_so() -> None:
    assert any("whether a rise was back within 50 steps" in text for text in spiked(400, 1, every=100).unseen)
    assert not any("within 50 steps" in text for text in spiked(400, 1, every=10).unseen)


@pytest.mark.parametrize("fold", [8, 40])
def test_a_norm_that_leaps_for_three_steps_is_told_though_the_loss_is_as_before(fold: float) -> None:
    norms = 0.5 * np.exp(0.2 * noise("t5", 1500, 1))
    norms[700:703] = 0.5 * fold
    found = look(run(falling(1500), grad_norm=norms))
    assert found.verdict == "healthy"
    (notice,) = found.notices
    assert notice.startswith(f"gradient norm up to {0.5 * fold:.4g} at steps 700 to 702, ")
    assert notice in found.because
    assert notice in diagnose(found, source="log", format="").remarks


@pytest.mark.parametrize("seed", range(10))
def test_heavy_tails_and_single_high_norms_are_no_leaps(seed: int) -> None:
    norms = 0.5 * np.exp(0.3 * noise("t5", 3000, seed))
    norms[1000] = 20.0
    assert look(run(falling(3000), grad_norm=norms)).notices == ()


def test_a_norm_that_leaps_in_an_incident_is_told_there() -> None:
    losses, norms = falling(1500), 0.5 * np.exp(0.2 * noise("t5", 1500, 1))
    losses[702:710] += 5
    norms[700:705] = 20.0
    found = look(run(losses, grad_norm=norms))
    assert (kinds(found), found.notices) == (["spike"], ())


def test_a_rise_that_the_run_has_gone_back_behind_is_not_cleared() -> None:
    """The record of the newest pass ends before it, so nothing in it can show whether there was damage."""
    found = with_norms(risen_at_600())
    (rise,) = found.cleared
    assert is_cleared(found, rise)
    assert not is_cleared(found, replace(rise, start=found.run.steps[-1] + 500, end=None))


@pytest.mark.parametrize("is_dense", [False, True])
def test_copies_of_a_target_network_are_no_leap_however_often_it_is_measured(is_dense: bool) -> None:
    """It is a copy of what learns, made every ten steps; around an incident each step is measured."""
    loss, steps = risen_at_600(), np.arange(1200)
    learns = 1 + 0.02 * np.clip(steps - 600, 0, 40)
    is_measured = (steps % 10 == 0) | (is_dense & (steps > 600) & (steps < 660))
    logged: dict[str, Any] = witnessed(loss) | {
        "param_norm/target": np.where(is_measured, learns[steps // 10 * 10], np.nan),
        "update_ratio/blocks": np.where(is_measured, 0.02, np.nan),
    }
    assert look(run(loss, **logged)).verdict == "watch"


def gone_back_over(bad: Callable[[int], float], *, to: int = 1000, end: int = 1400, **more: Any) -> Run:
    """Steps 0 to 1102, of which the last three are bad; then from ``to`` on again, and nothing is."""
    steps = np.concatenate([np.arange(1103), np.arange(to, end)])
    losses, norms = falling(max(end, 1103))[steps], np.full(len(steps), 0.5)
    norms[1100:1103] = [bad(step) for step in range(1100, 1103)]
    return run(losses, steps=steps.astype(np.float64), grad_norm=norms, **more)


@pytest.mark.parametrize("created", ["", "2026-01-01T00:00:00Z"])
def test_what_the_run_went_back_over_and_passed_is_told_and_calls_for_nothing(created: str) -> None:
    """A NaN gradient at a finite loss, and the rollback: the log of it is there, the weights never went through it."""
    found = look(gone_back_over(lambda _: np.nan, created=created))
    assert [(it.kind, it.start, it.end, it.grad_norm_peak) for it in found.incidents] == [
        ("nonfinite", 1100, 1102, np.inf)
    ]
    (incident,) = found.incidents
    assert incident.start <= incident.peak <= 1102
    assert found.verdict == "watch"
    assert found.because.endswith("the present weights have not gone through it")
    told = diagnose(found, source="log", format="")
    answers = {answer.question: answer for answer in told.path}
    assert answers["Q1.1"].answer == "yes"
    assert "grad norm at step 1100" in answers["Q1.1"].evidence
    assert not any("went back" in name for name in told.log_next_time)


def test_what_was_not_passed_again_is_not_over_and_the_verdict_is_of_the_last_attempt() -> None:
    found = look(gone_back_over(lambda _: np.nan, end=1105))
    assert (found.verdict, found.incidents[0].start) == ("watch", 1100)
    assert found.because.endswith("the last one has not come past that step yet")
    found = look(gone_back_over(lambda _: np.nan, end=1009))
    assert found.verdict == "act", "nine rows say nothing of an attempt"


def test_an_attempt_that_was_given_up_did_not_heal() -> None:
    """The loss is low again because the run went back, not because it came down."""
    steps = np.concatenate([np.arange(1100), np.arange(900, 1400)])
    losses = falling(1400)[steps]
    losses[1000:1100] += 3
    found = look(run(losses, steps=steps.astype(np.float64)))
    (rise,) = found.incidents
    assert (rise.start, rise.recovery_loss, rise.trajectory) == (1000, None, None)
    assert "the loss is back" not in diagnose(found, source="log", format="").first_action


def test_what_stands_is_not_excused_by_a_rollback_before_it() -> None:
    losses = falling(1400)
    losses[1300:1303] = np.nan
    steps = np.concatenate([np.arange(1103), np.arange(1000, 1400)])
    assert look(run(losses[steps], steps=steps.astype(np.float64))).verdict == "act"


def test_what_was_usual_before_a_rise_stood_when_it_came() -> None:
    """The attempt before was damaged: its losses are no measure for a spike after the way back."""
    steps = np.concatenate([np.arange(1100), np.arange(1000, 1400)])
    losses = falling(1400)[steps]
    usual = float(losses[1100:1140].mean())
    losses[1000:1100] *= 2
    losses[1140:1143] = 9.0
    found = look(run(losses, steps=steps.astype(np.float64)))
    spike = next(it for it in found.incidents if it.peak_loss > 8)
    assert spike.start == 1040
    assert spike.pre_loss == pytest.approx(usual, rel=0.05)


def test_rows_before_the_first_update_have_no_loss() -> None:
    """Loggers write the mean of nothing as NaN. Weights that are not finite would not have come back."""
    losses = falling(400, seed=3)
    losses[0] = np.nan
    assert look(run(losses)).verdict == "healthy"
    gone = losses.copy()
    gone[390:] = np.nan
    assert kinds(look(run(gone))) == ["nonfinite"]
    died = np.concatenate([np.full(30, np.nan), losses[1:]])
    steps = np.concatenate([np.arange(30.0), np.arange(399.0)])
    assert "nonfinite" in kinds(look(run(died, steps=steps))), "another attempt came back, and not these weights"
