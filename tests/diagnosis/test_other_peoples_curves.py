"""Curves as other people's logs have them: rises that were missed, and healthy courses that were called ill."""

from pathlib import Path

import numpy as np
import pytest
from tests.diagnosis.test_findings import Floats, falling, kinds, noise, run

from sealegs.diagnosis.curve.leaps import leaps_of
from sealegs.diagnosis.findings import look
from sealegs.incidents import Incident
from sealegs.record.columns import Columns
from sealegs.record.manifest import Manifest
from sealegs.record.run import run_of


def share_found(rows: list[int], incidents: tuple[Incident, ...], every: int = 1) -> float:
    spans = [(one.start / every - 3, (one.end or 10**9) / every + 3) for one in incidents]
    return float(np.mean([any(first <= row <= last for first, last in spans) for row in rows]))


@pytest.mark.parametrize("every", [1, 10])
def test_many_spikes_do_not_become_usual(every: int) -> None:
    losses, rows = falling(3000, seed=2), list(range(200, 2990, 60))
    for row in rows:
        losses[row : row + 3] *= [2.4, 1.8, 1.3]
    assert share_found(rows, look(run(losses, every=every)).incidents, every) >= 0.9


def test_leaps_that_come_alone_are_hard_batches_where_they_are_many() -> None:
    """A tail without a gap, the higher the rarer, says nothing; the same leaps in runs of three do."""
    found = [0, 0]
    for seed in range(10):
        heights = np.random.default_rng(seed).exponential(0.6, 4000)
        found[0] += len(list(leaps_of(heights, smallest=0.16, quietest=0.01)))
        heights = 0.02 * noise("normal", 4000, seed)
        for row in range(200, 4000, 50):
            heights[row : row + 3] += 0.5
        found[1] += len(list(leaps_of(heights, smallest=0.16, quietest=0.01)))
    assert found[0] <= 2
    assert found[1] == 10 * 76


@pytest.mark.parametrize("row", [25, 40, 60])
def test_a_spike_on_the_steep_start_is_found(row: int) -> None:
    """The curve falls by several percent a row: that is no noise."""
    losses = falling(1200, seed=4, size=0.01)
    losses[row : row + 2] *= 1.35
    assert share_found([row], look(run(losses, every=10)).incidents, 10) == 1


@pytest.mark.parametrize("factor", [2.2, 3.0])
def test_the_statistic_of_the_live_guard_has_no_veto_over_twofold_rises(factor: float) -> None:
    losses = falling(6000, seed=5)
    rows = list(range(1500, 5900, 200))
    losses[rows] *= factor
    assert share_found(rows, look(run(losses)).incidents) == 1


def test_a_rise_of_a_loss_that_has_fallen_ten_thousandfold_is_found() -> None:
    losses = 1e3 * np.exp(-np.minimum(np.arange(600) / 40, 9)) * np.exp(0.05 * noise("t5", 600, 6))
    losses[450:455] *= 30
    found = look(run(losses, every=100))
    assert share_found([450], found.incidents, 100) == 1
    assert found.incidents[0].pre_loss < found.incidents[0].peak_loss


def test_a_high_spike_is_not_lost_for_a_hump_after_it() -> None:
    losses = 1e-4 * np.exp(0.05 * noise("t5", 240, 7))
    losses[:10] = np.geomspace(2.0, 1e-4, 10)
    losses[140:147] = [30, 8, 2, 1, 0.1, 0.01, 1e-3]
    losses[156:200] += np.linspace(4e-3, 0, 44)
    assert share_found([141], look(run(losses, every=10)).incidents, 10) == 1


def test_four_percent_for_thousands_of_rows_are_a_shift() -> None:
    losses = (2.2 + 0.3 / (1 + np.arange(8000) / 2000)) * np.exp(0.02 * noise("t5", 8000, 0))
    assert look(run(losses)).verdict == "healthy"
    for share, verdict in ((1.04, "watch"), (1.08, "act")):
        shifted = np.append(losses[:5000], losses[5000:] * share)
        found = look(run(shifted))
        assert (kinds(found), found.verdict) == (["level_shift"], verdict)


def test_the_loss_before_is_below_the_highest_where_a_steep_curve_rises() -> None:
    losses = 700 * np.exp(-np.minimum(np.arange(400) / 10, 6.0)) * np.exp(0.01 * noise("t5", 400, 1))
    losses[50:54] *= 3
    (one,) = look(run(losses, every=10)).incidents
    assert one.pre_loss < one.peak_loss


def started_again(*attempts: Floats) -> tuple[Floats, Floats]:
    return np.concatenate(attempts), np.concatenate([np.arange(1.0, len(each) + 1) for each in attempts])


@pytest.mark.parametrize("rows", [[20, 20], [3, 8, 20, 20], [15, 60]])
def test_a_fresh_start_is_no_jump_and_the_last_one_has_the_verdict(rows: list[int]) -> None:
    losses, steps = started_again(*(8 * np.exp(-np.arange(count) / 8) + 2 for count in rows))
    found = look(run(losses, steps=steps))
    assert (found.verdict, found.incidents) == ("healthy", ())


def test_a_start_with_other_settings_may_begin_lower() -> None:
    attempts = [1.5 * np.exp(-np.arange(7) / 3) + 7, *(2.6 * np.exp(-np.arange(n) / 3) + 3 for n in (6, 6, 20))]
    losses, steps = started_again(*attempts)
    found = look(run(losses, steps=steps))
    assert (found.verdict, found.incidents) == ("healthy", ())


def test_a_resume_that_loses_state_at_a_later_step_still_jumps() -> None:
    losses, steps = falling(600, seed=1), np.arange(600.0)
    losses = np.concatenate([losses, losses[300:] + 1.5])
    found = look(run(losses, steps=np.concatenate([steps, steps[300:]])))
    assert "resume_jump" in kinds(found)


def test_many_short_runs_in_one_file_are_not_jumps() -> None:
    attempts = [
        size * (1 + 3 * np.exp(-np.arange(12) / 3)) for size in (1.0, 40.0, 0.2, 7.0, 90.0, 3.0, 0.5, 20.0, 60.0)
    ]
    losses, steps = started_again(*attempts)
    assert "resume_jump" not in kinds(look(run(losses, steps=steps)))


def test_a_log_that_goes_on_from_another_may_be_level() -> None:
    losses, steps = 0.015 * np.exp(0.2 * noise("normal", 1500, 1)), np.arange(1500.0)
    assert kinds(look(run(losses, steps=100 * steps))) == ["plateau"]
    assert look(run(losses, steps=100 * steps + 300_000)).verdict == "healthy"


@pytest.mark.parametrize(("vocabulary", "verdict"), [(None, "act"), (256, "act"), (32_000, "watch")])
def test_a_loss_that_stands_at_the_guess_calls_for_action(vocabulary: int | None, verdict: str) -> None:
    losses = np.log(256) + 0.003 * noise("normal", 320, 1)
    values = {"step": np.arange(320.0), "loss": losses}
    settings = {} if vocabulary is None else {"model": {"vocab_size": vocabulary}}
    columns = Columns(values, {name: np.ones(320, dtype=bool) for name in values})
    found = look(run_of(Path("log"), Manifest(run_id="log", settings=settings), columns))
    assert found.verdict == verdict, found.because
    assert ("guesses among 256" in found.because) == (verdict == "act")


def test_gradients_that_are_never_finite_again_began_where_they_began() -> None:
    norms = np.full(400, np.nan)
    norms[0] = 1.0
    (one,) = look(run(falling(400), grad_norm=norms)).incidents
    assert (one.kind, one.start) == ("nonfinite", 1)
    norms[12:] = 1.0
    assert look(run(falling(400), grad_norm=norms)).verdict == "healthy"  # a scaler that found its scale


@pytest.mark.parametrize(("rows", "verdict"), [(7, "unknown"), (9, "healthy"), (20, "healthy")])
def test_a_few_rows_that_fall_beyond_doubt_are_healthy(rows: int, verdict: str) -> None:
    assert look(run(2 + 3 * np.exp(-np.arange(rows) / 4), every=100)).verdict == verdict


def test_a_few_rows_that_go_to_and_fro_say_nothing() -> None:
    assert look(run(2 + 0.3 * noise("normal", 20, 0), every=100)).verdict == "unknown"


def test_a_held_out_loss_that_turns_is_to_be_watched_and_told() -> None:
    losses, steps = falling(2000, seed=8), np.arange(2000.0)
    at = steps[100::100]
    for rise in (0.0, 0.5):
        held_out = np.full(2000, np.nan)
        held_out[100::100] = 2.2 + np.exp(-at / 200) + rise * np.maximum(at - 1000, 0) / 1000
        logged = {
            "step": np.ones(2000, dtype=bool),
            "loss": np.ones(2000, dtype=bool),
            "eval_loss": np.isfinite(held_out),
        }
        columns = Columns({"step": steps, "loss": losses, "eval_loss": held_out}, logged)
        found = look(run_of(Path("log"), Manifest(run_id="log"), columns))
        assert found.verdict == ("watch" if rise else "healthy")
        assert ("by heart" in found.because) == (rise > 0)


def test_a_batch_a_little_harder_than_its_neighbours_is_no_incident() -> None:
    """The live statistic finds one among twenty thousand: only a higher leap says something by itself."""
    losses = falling(20_000, seed=6, size=0.004)
    beside = float(np.median(losses[11_990:12_010]))
    for factor, count in ((1.09, 0), (1.2, 1)):
        leapt = losses.copy()
        leapt[12_000] = factor * beside
        assert len(look(run(leapt)).incidents) == count


def test_one_digit_more_is_no_rise() -> None:
    """Losses of 0.0001 and 0.0002, of a logger of four digits."""
    losses = np.asarray(np.round(np.maximum(0.5 * np.exp(-np.arange(200) / 12), 1.2e-4), 4), np.float64)
    losses[[170, 180, 199]] = 2e-4
    assert look(run(losses, every=25)).verdict == "healthy"
    losses[[170, 180, 199]] = 9e-4
    assert len(look(run(losses, every=25)).incidents) == 3


def test_a_rise_in_the_warm_up_that_lasts_beyond_it_is_found() -> None:
    """A rate that is too high from the first steps on: the loss comes down only as the rate does."""
    line = np.interp(np.arange(60), [0, 1, 3, 24, 59], [9.2, 3.2, 4.6, 4.4, 2.0])
    found = look(run(line * np.exp(0.01 * noise("t5", 60, 3)), every=200))
    assert (found.verdict, kinds(found)) == ("watch", ["level_shift"])
    soon = np.interp(np.arange(60), [0, 1, 3, 8, 59], [9.2, 3.2, 4.6, 3.2, 2.0])
    assert look(run(soon * np.exp(0.01 * noise("t5", 60, 3)), every=200)).verdict == "healthy"


@pytest.mark.parametrize(("factor", "end", "verdict"), [(1.1, 1.0, "healthy"), (1.1, 2.6, "act"), (1.6, 1.0, "act")])
def test_a_small_rise_does_no_damage_where_the_held_out_loss_falls_on(factor: float, end: float, verdict: str) -> None:
    losses = np.interp(np.arange(60), [0, 8, 45, 59], [2.0, 0.21, 0.2, 0.2]) * np.exp(0.01 * noise("t5", 60, 4))
    losses[40:] *= np.linspace(0.97, 1, 20) * factor
    held_out = np.interp(np.arange(60), [0, 40, 59], [4.0, 2.0, end]) * np.exp(0.02 * noise("t5", 60, 5))
    found = look(run(losses, eval_loss=held_out))
    assert found.verdict == verdict, found.because
    assert len(found.incidents) == 1


def test_a_bound_that_comes_down_from_far_above_measures_something() -> None:
    losses = 50_000 * np.exp(-np.arange(190) / 8) + 900 * noise("t5", 190, 7)
    assert look(run(losses, every=50)).verdict == "healthy"
    assert "hovers" in [problem.kind for problem in look(run(losses[60:], every=50)).problems]


@pytest.mark.parametrize(("row", "verdict"), [(59, "watch"), (40, "healthy")])
def test_a_last_evaluation_that_is_not_finite_is_of_the_weights_as_they_are(row: int, verdict: str) -> None:
    held_out = falling(60, seed=9)
    held_out[row] = np.nan
    found = look(run(falling(60, seed=8), eval_loss=held_out))
    assert found.verdict == verdict, found.because


def test_a_shift_or_a_drift_exceeds_what_stood_before_it() -> None:
    """A curve that falls fast and grows noisy has low rows near its end: those after them have lost nothing."""
    lost = 0
    for seed in range(60):
        random = np.random.default_rng([19, seed])
        rows = int(random.integers(25, 120))
        far = np.linspace(0, 1, rows)
        noise = random.standard_normal(rows) * (0.03 + random.uniform(0.1, 0.4) * far)
        losses = random.uniform(1, 5) * np.exp(-random.uniform(2, 7) * far + noise)
        found = look(run(losses))
        lost += sum(it.kind in ("level_shift", "drift") and it.peak_loss <= it.pre_loss for it in found.incidents)
    assert lost == 0


def test_several_trainings_that_fall_are_no_plateau_together() -> None:
    """Thirds of all rows are level with each other where each attempt falls alike; the last one has the verdict."""
    for seed in range(5):
        parts = [falling(15, seed=seed + at, size=0.01) for at in range(6)]
        loss, steps = started_again(*parts)
        found = look(run(loss, steps=steps))
        assert "plateau" not in kinds(found)
        assert found.verdict == "healthy"


def test_a_few_rows_that_leap_beyond_doubt_are_to_be_watched() -> None:
    for rows in (14, 18, 23):
        losses = (2.0 + 1.7 * np.exp(-np.arange(rows) / 3.0)) * np.exp(0.004 * noise("Gaussian", rows, rows))
        losses[-3:] *= 1.6
        assert look(run(losses, every=500)).verdict == "watch"
        losses[-3:] = losses[-4] * np.array([1.3, 0.9, 1.4])  # to and fro
        assert look(run(losses, every=500)).verdict == "unknown"


def test_a_few_percent_in_a_few_rows_call_for_no_action() -> None:
    for rows in (14, 18, 23):
        losses = np.linspace(3.7, 3.6, rows) * np.exp(0.004 * noise("Gaussian", rows, rows))
        losses[-4:] *= 1.04
        assert look(run(losses, every=500)).verdict in ("unknown", "watch")
        losses[-4:] *= 1.3
        assert look(run(losses, every=500)).verdict in ("watch", "act")
