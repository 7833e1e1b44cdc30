"""The first signals of a kind: that healthy runs of any shape stay quiet, and that broken ones do not."""

import time
from collections import Counter

import numpy as np
import pytest
from tests.diagnosis.healthy_kinds import FAMILIES, noisy, rows_of, run_with
from tests.diagnosis.sick_kinds import SICK

from sealegs.diagnosis.contract import Standing
from sealegs.diagnosis.curve.loss_curve import curve_of
from sealegs.diagnosis.findings import look
from sealegs.diagnosis.first_signals.judged import of_kind
from sealegs.diagnosis.first_signals.track import Track, track_of
from sealegs.diagnosis.kind import kind_of
from sealegs.record.run import Run

SEEDS = 40
GRAVE, WATCHED = 0, 2
"""Of so many healthy runs of a family: those that call for action, and those that are to be watched, at the most."""
FOUND, LOWER = 0.9, 0.75
"""Share of the broken runs that must call for action, and be seen to be broken in that way. A reward of any sign and
scale does not show every collapse by itself."""


def shown(run: Run) -> tuple[Standing, ...]:
    return of_kind(run, kind_of(run, curve_of(run)))


def rows(values: list[float]) -> Track:
    column = np.asarray(values, float)
    return Track("it", np.arange(len(column)), column, column)


@pytest.mark.parametrize("family", FAMILIES)
def test_healthy_runs_stay_quiet(family: str) -> None:
    """A reward that never rises is told of a plateau, and is no false alarm there."""
    graves, told = 0, Counter[str]()
    for seed in range(SEEDS):
        random = np.random.default_rng([1, seed, *family.encode()])
        found = shown(run_with(FAMILIES[family](random, rows_of(random))))
        graves += any(one.is_grave for one in found)
        told.update({one.shows for one in found if (family, one.shows) != ("plateau", "reward-flat")})
    assert graves <= GRAVE, told
    assert told.total() <= WATCHED, told


@pytest.mark.parametrize("name", SICK)
def test_broken_runs_are_seen_to_be_broken(name: str) -> None:
    broken, wanted = SICK[name]
    seen = graves = 0
    for seed in range(SEEDS // 2):
        random = np.random.default_rng([2, seed, *name.encode()])
        found = shown(run_with(broken(random, 40 + rows_of(random))))
        seen += wanted in {one.shows for one in found}
        graves += any(one.is_grave for one in found)
    assert seen >= (FOUND if name != "policy-collapse" else LOWER) * (SEEDS // 2)
    assert graves >= FOUND * (SEEDS // 2)


def test_a_scale_and_a_sign_change_nothing() -> None:
    """Rewards are of any unit: a fall is measured by what the reward itself does."""
    random = np.random.default_rng(3)
    reward = np.concatenate([np.linspace(0.2, 0.8, 150), np.full(150, 0.21)]) + 0.03 * random.standard_normal(300)
    entropy = np.full(300, 0.5) + 0.02 * random.standard_normal(300)
    for scale in (1e-6, 1.0, 1e6):
        (fall,) = shown(run_with({"reward": scale * reward, "policy_entropy": entropy}))
        assert (fall.shows, fall.is_grave) == ("reward-falls", True)
        assert 130 < fall.step < 170
    (fall,) = shown(run_with({"reward": reward - 1.0, "policy_entropy": entropy}))
    assert fall.shows == "reward-falls"


def test_a_reward_that_comes_back_is_no_collapse() -> None:
    random = np.random.default_rng(4)
    course = np.interp(np.arange(300), [0, 100, 150, 200, 299], [0.2, 0.8, 0.8, 0.2, 0.78])
    reward = course + 0.03 * random.standard_normal(300)
    assert not shown(run_with({"reward": reward, "policy_entropy": np.full(300, 0.5)}))


def test_a_solved_task_is_watched_and_not_called_sick() -> None:
    """The reward is at its best, and so nothing more is learned: stop, and no damage."""
    random = np.random.default_rng(5)
    learned = np.interp(np.arange(200), [0, 120, 199], [0.1, 1.0, 1.0])
    alive = np.arange(200) < 150
    found = shown(
        run_with(
            {
                "reward": np.clip(learned + 0.05 * random.standard_normal(200) * alive, 0, 1),
                "policy_entropy": np.interp(np.arange(200), [0, 120, 199], [1.0, 0.1, 0.004]),
                "zero_spread_share": np.where(alive, 0.3, 1.0),
                "grad_norm": np.where(alive, 0.3, 0.0),
            }
        )
    )
    assert "nothing-to-learn" in {one.shows for one in found}
    assert not any(one.is_grave for one in found)


@pytest.mark.parametrize(("dies_at", "gained", "is_grave"), [(150, 0.0, True), (150, 0.6, False), (60, 0.6, True)])
def test_a_dead_gradient_calls_for_action_unless_the_task_was_learned(
    dies_at: int, gained: float, is_grave: bool
) -> None:
    """And also where it was, if more of the log is dead than it has learned in."""
    random, at = np.random.default_rng(7), np.arange(200)
    reward = 0.3 + gained * np.minimum(at / dies_at, 1) + 0.02 * random.standard_normal(200) * (at < dies_at)
    gradient = np.where(at < dies_at, 0.3, 0.0)
    found = shown(run_with({"reward": reward, "kl": np.full(200, 0.01), "grad_norm": gradient}))
    (dead,) = [one for one in found if one.shows == "nothing-to-learn"]
    assert (dead.is_grave, dead.step) == (is_grave, dies_at)


def test_a_signal_every_tenth_row_is_judged_as_one_in_every_row() -> None:
    reward = np.full(1000, np.nan)
    reward[::10] = np.concatenate([np.linspace(0, 1, 50), np.zeros(50)])
    (fall,) = shown(run_with({"loss": np.zeros(1000), "reward": reward, "policy_entropy": np.full(1000, 0.7)}))
    assert fall.is_grave
    assert fall.step % 10 == 0


def test_too_few_values_show_nothing() -> None:
    assert track_of(run_with({"reward": np.linspace(1, 0, 19)}), "reward") is None
    assert not shown(run_with({"reward": np.linspace(1, 0, 19), "kl": np.geomspace(1e-3, 10, 19)}))


def test_slow_growth_is_no_leap_however_far() -> None:
    slow = np.geomspace(1, 50, 400).tolist()
    assert rows(slow).leap(10.0, 0.0) is None
    assert rows([*np.full(200, 1.0), *np.full(200, 50.0)]).leap(10.0, 0.0) in range(195, 205)
    assert rows([*np.full(200, 1.0), *np.full(20, 50.0), *np.full(180, 1.0)]).leap(10.0, 0.0) is None, "it came back"


def test_the_running_median_has_both_ends() -> None:
    track = rows([5.0, 1.0, 2.0, 90.0, 3.0, 4.0, 0.0])
    assert track.level.tolist() == [2.0, 3.5, 3.0, 3.0, 3.0, 3.5, 3.0]


def test_a_million_rows_take_no_time() -> None:
    random = np.random.default_rng(6)
    count = 1_000_000
    ones = np.ones(count)
    run = run_with({name: noisy(random, ones, 0.1) for name in ("reward", "policy_entropy", "kl", "grad_norm")})
    began = time.process_time()
    shown(run)
    assert time.process_time() - began < 10, "half of one on an idle core: more would be another order of growth"


def test_a_first_signal_that_is_not_finite_in_some_rows_is_told_where_the_loss_is_finite() -> None:
    columns = FAMILIES["preference"](np.random.default_rng(3), 100)
    columns["reward_margin"][40] = np.inf
    (one,) = (one for one in shown(run_with(columns)) if "not finite" in one.text)
    assert one.text == "reward_margin is not finite in 1 of 100 rows, first at step 40"
    assert not one.is_grave


def test_a_reward_that_never_changes_is_no_proof_that_nothing_is_learned() -> None:
    """An episode that is always at its best looks so: it is told, and no reason to act, nor an established cause."""
    random = np.random.default_rng(4)
    solved = {"loss": random.standard_normal(60), "reward": np.full(60, 500.0), "policy_kl": np.full(60, 0.01)}
    solved |= {"policy_entropy": 0.3 + 0.01 * random.random(60)}
    (one,) = shown(run_with(solved))
    assert (one.shows, one.is_grave) == ("reward-flat", False)
    broken = of_kind(run := run_with(solved | {"reward_std": np.zeros(60)}), kind_of(run, curve_of(run)))
    assert [(one.shows, one.is_grave) for one in broken] == [("nothing-to-learn", True)]


def found_in(**signals: object) -> dict[str, Standing]:
    return {one.shows: one for one in shown(run_with(signals))}


def policy(random: np.random.Generator, rows: int = 240) -> dict[str, np.ndarray]:
    """A policy that learns steadily, and pays for it with entropy."""
    far = np.linspace(0, 1, rows)
    return {
        "reward": 0.2 + 0.6 * far + 0.03 * random.standard_normal(rows),
        "policy_entropy": 2 * np.exp(-1.6 * far) * np.exp(0.05 * random.standard_normal(rows)),
        "grad_norm": np.exp(0.1 * random.standard_normal(rows)),
    }


def test_entropy_is_judged_by_what_was_won_for_it() -> None:
    random, far = np.random.default_rng(5), np.linspace(0, 1, 240)
    low = 2 * np.exp(-3 * np.clip(3 * far - 1, 0, 1)) * (1 + 0.05 * random.standard_normal(240))
    low = np.maximum(low, 0.2)
    for seed in range(5):
        sound = policy(np.random.default_rng([6, seed]))
        won = sound["reward"]
        stays = np.where(far > 0.4, 0.44 + 0.03 * np.random.default_rng(seed).standard_normal(240), won)
        assert "entropy-vanishes" not in found_in(
            **sound | {"policy_entropy": np.minimum(low, sound["policy_entropy"])}
        )
        found = found_in(**sound | {"policy_entropy": low, "reward": stays})["entropy-vanishes"]
        assert not found.is_grave
        leap = sound["grad_norm"] * np.where(far > 0.35, 9, 1)
        assert "entropy-vanishes" in found_in(**sound | {"policy_entropy": low, "grad_norm": leap})


@pytest.mark.parametrize("end", [0.05, 0.45])
def test_a_held_out_reward_that_falls_is_told_also_where_it_comes_back(end: float) -> None:
    for seed in range(5):
        random = np.random.default_rng([7, seed])
        signals = policy(random)
        signals["reward"] += np.linspace(0, 1, 240) > 0.4
        course = np.interp(np.arange(240), [0, 96, 140, 239], [0.2, 0.44, 0.1, end])
        held_out = np.full(240, np.nan)
        held_out[::20] = course[::20] + 0.01 * random.standard_normal(12)
        assert found_in(**signals | {"eval_reward": held_out})["held-out-reward-falls"].is_grave == (end < 0.2)
        held_out[::20] = 0.2 + 0.002 * np.arange(0, 240, 20) + 0.05 * random.standard_normal(12)
        assert "held-out-reward-falls" not in found_in(**signals | {"eval_reward": held_out})


def test_a_reward_at_its_floor_asks_for_action_and_one_at_its_top_does_not() -> None:
    random = np.random.default_rng(8)
    seldom = np.where(random.random(200) < 0.03, 0.25, 0.0)
    seldom[7] = 0.25
    assert found_in(reward=seldom, policy_entropy=np.full(200, 0.5))["reward-flat"].is_grave
    late = np.where(np.arange(200) > 180, random.random(200), 0.0)
    for reward in (1 - seldom, late):
        assert not any(one.is_grave for one in found_in(reward=reward, policy_entropy=np.full(200, 0.5)).values())


def test_a_critic_is_judged_by_what_it_explains_and_by_its_loss_beside_the_reward() -> None:
    for seed in range(5):
        random = np.random.default_rng([9, seed])
        far, noise = np.linspace(0, 1, 240), random.standard_normal(240)
        blown = np.exp(4 * np.clip(6 * far - 2, 0, 1) + 0.5 * noise)
        sound = {"train/explained_variance": 0.8 * far + 0.1 * noise, "train/value_loss": np.exp(0.8 * noise)}
        assert not found_in(**policy(random) | sound)
        assert not found_in(**policy(random) | {"train/value_loss": blown})  # it grows with the reward
        assert set(found_in(**policy(random) | {"train/explained_variance": 0.01 * noise})) == {
            "critic-explains-nothing"
        }
        flat = {"reward": 0.2 + 0.03 * random.standard_normal(240)}
        assert "critic-blows-up" in found_in(**policy(random) | flat | {"train/value_loss": blown})


@pytest.mark.parametrize("every", [1, 10])
def test_one_expert_of_many_that_dies_is_told_and_one_that_never_lived_is_not(every: int) -> None:
    random, rows = np.random.default_rng(10), 400
    loads = random.dirichlet(np.full(8, 50.0), rows)
    loads[::1, 3] *= np.where(np.arange(rows) > 150, 0.01, 1)
    loads[:, 5] *= 0.01
    loads[np.arange(rows) % every > 0] = np.nan
    names = {f"expert_load/0.{expert}": loads[:, expert] for expert in range(8)}
    found = found_in(loss=np.linspace(6, 3, rows), **names)
    assert set(found) == {"experts-die"}
    assert "expert 3 of the 8" in found["experts-die"].text


def test_groups_that_never_had_a_spread_call_for_action_unless_all_of_them_are_at_the_best() -> None:
    """All rewards nothing but in one group near the start; the same where the task is solved soon."""
    shares, spread = np.ones(100), np.zeros(100)
    shares[11] = 0.5
    for reward, is_grave in ((0.0, True), (1.0, False)):
        rewards = np.full(100, reward)
        rewards[11] = 0.5
        found = shown(run_with({"reward": rewards, "zero_spread_share": shares, "reward_std": spread}))
        assert [one.is_grave for one in found if one.shows == "nothing-to-learn"] == [is_grave]


def test_a_flat_reward_and_a_critic_that_explains_nothing_go_together() -> None:
    random = np.random.default_rng(5)
    rewards = -99.7 + 0.3 * random.normal(size=400)
    explained = -1e13 * np.exp(random.normal(size=400))
    entropy = 1.3 + 0.01 * random.normal(size=400)
    alone = shown(run_with({"reward": rewards, "policy_entropy": entropy}))
    assert {(one.shows, one.is_grave) for one in alone} == {("reward-flat", False)}
    both = shown(run_with({"reward": rewards, "policy_entropy": entropy, "EVAfter": explained}))
    assert {("reward-flat", True), ("critic-explains-nothing", False)} <= {(one.shows, one.is_grave) for one in both}


def test_a_reward_that_rose_is_enough_where_an_environment_gives_it() -> None:
    """A scorer can be pleased without doing what is meant: of its policy the entropy, or held-out data, must tell."""
    at, random = np.arange(60), np.random.default_rng(8)
    risen = {"loss": random.standard_normal(60), "reward": at / 60 + 0.05 * random.standard_normal(60)}
    flat = risen | {"reward": 0.5 + 0.05 * random.standard_normal(60)}
    held_out = {"heldout_accuracy": 0.5 + at / 200}
    for columns, lacks in (
        (risen, True),
        (risen | {"ep_len_mean": 20.0 + at}, False),
        (risen | {"ep_len_mean": 20.0 + at, "completion_length": 200.0 + at}, True),
        (risen | held_out, False),
        (risen | {"eval_batch_size": np.full(60, 8.0)}, True),
        (flat | {"ep_len_mean": 20.0 + at}, True),
    ):
        run = run_with(columns)
        assert bool(kind_of(run, curve_of(run)).missing) == lacks, columns.keys()
        gains_nothing = columns["reward"] is flat["reward"]
        assert look(run).verdict == ("watch" if gains_nothing else "unknown" if lacks else "healthy")


@pytest.mark.parametrize(("end", "verdict"), [(0.9, "healthy"), (0.2, "unknown")])
def test_ten_rewards_that_rise_beyond_doubt_are_enough(end: float, verdict: str) -> None:
    reward = np.linspace(0.1, end, 10) + np.tile([0.05, -0.05], 5)
    assert look(run_with({"reward": reward, "episode": np.arange(10.0)})).verdict == verdict


def test_a_critic_of_a_task_that_is_solved_has_nothing_to_explain() -> None:
    at, random = np.arange(200), np.random.default_rng(9)
    course = np.minimum(at / 120, 1)
    columns = policy(random, 200) | {"train/explained_variance": np.where(at < 80, 0.6, -5.0)}
    assert "critic-explains-nothing" not in found_in(**columns | {"reward": 500 * course})
    assert "critic-explains-nothing" in found_in(
        **columns | {"reward": 500 * course + 20 * random.standard_normal(200)}
    )


def test_updates_that_are_too_large_throughout_are_told() -> None:
    sound = policy(np.random.default_rng(10))
    far = np.exp(0.2 * np.random.default_rng(11).standard_normal(240))
    for name, usual, large in (("policy_kl", 0.02, 0.4), ("clip_share", 0.15, 0.7)):
        assert "clip-saturates" not in found_in(**sound | {name: usual * far})
        assert "clip-saturates" in found_in(**sound | {name: np.minimum(large * far, 1.0)})
        first = np.where(np.arange(240) < 100, large, usual)
        assert "clip-saturates" not in found_in(**sound | {name: first * far}), "only at first"


def test_a_running_mean_that_wanders_has_gained_nothing() -> None:
    """Returns over the last hundred episodes differ from row to row by less than they wander."""
    at, random = np.arange(224), np.random.default_rng(12)
    returns = 22.5 + np.sin(at / 9) + 0.005 * at + 0.02 * random.standard_normal(224)
    assert set(found_in(reward=returns, policy_entropy=np.full(224, 0.5))) == {"reward-flat"}
    assert not found_in(reward=returns + 0.05 * at, policy_entropy=np.full(224, 0.5))


@pytest.mark.parametrize(("end", "shows"), [(-33.5, {"reward-falls"}), (-28.0, set())])
def test_half_of_a_sure_gain_that_is_lost_is_told_on_any_scale(end: float, shows: set[str]) -> None:
    """Costs are negative rewards: how far they are from zero says little of what was won and lost."""
    at, random = np.arange(130), np.random.default_rng(13)
    reward = np.interp(at, [0, 15, 65, 75, 129], [-40, -25.5, -25.5, end, end]) + 0.2 * random.standard_normal(130)
    assert set(found_in(reward=reward, policy_entropy=np.full(130, 0.5))) == shows


def test_rises_of_a_loss_that_measures_nothing_are_no_incidents_and_are_counted() -> None:
    """A policy's loss leaps and drifts while its reward rises; what is not finite is an incident of any loss."""
    for seed in range(4):
        random = np.random.default_rng([13, seed])
        rows = 300 + 60 * seed
        loss = np.exp(np.cumsum(0.03 * random.standard_normal(rows)))
        loss[rows // 2 : rows // 2 + 9] *= 8.0
        columns = policy(random, rows) | {"loss": loss}
        found = look(run_with(columns))
        assert (found.verdict, found.incidents) == ("healthy", ())
        assert found.uncounted > 0
        assert f"{found.uncounted} rise" in found.because
        loss[rows // 3 : rows // 3 + 5] = np.nan
        (incident,) = look(run_with(columns)).incidents
        assert incident.kind == "nonfinite"


@pytest.mark.parametrize("signal", ["reward", "eval_reward"])
def test_a_run_is_judged_by_its_evaluations_where_no_other_reward_is_logged(signal: str) -> None:
    for seed in range(4):
        random = np.random.default_rng([14, seed])
        rows = 150 + 50 * seed
        up = np.minimum(np.linspace(0, 2, rows), 1) * 4.0**seed
        calm = {"policy_entropy": 1.5 + 0.05 * random.standard_normal(rows)}
        noise = 0.05 * 4.0**seed * random.standard_normal(rows)
        rising = look(run_with(calm | {signal: up + noise}))
        assert (rising.kind.name, rising.verdict, rising.kind.missing) == ("policy-gradient", "healthy", ())
        falling = look(run_with(calm | {signal: up - 2 * up[::-1] + noise}))
        assert falling.verdict == look(run_with(calm | {"reward": up - 2 * up[::-1] + noise})).verdict
        lost = np.where(np.arange(rows) < rows // 2, up, 0.0) + noise
        assert "reward-falls" in {one.shows for one in shown(run_with(calm | {signal: lost}))}


def test_a_reward_that_is_no_better_than_at_first_is_told_of_a_policy_that_acts() -> None:
    """At any scale and sign, wandering, after a dip or after a peak that was lost again; a rise is none of it."""
    for seed in range(8):
        random = np.random.default_rng([15, seed])
        rows, scale = int(random.integers(60, 900)), float(np.exp(random.uniform(-4, 6)))
        far, noise = np.linspace(0, 1, rows), 0.3 * random.standard_normal(rows)
        acts = {"ep_len_mean": 20 + random.random(rows), "policy_entropy": 1.4 + 0.1 * random.standard_normal(rows)}
        offset = random.uniform(-20, 20)
        for course, is_told in (
            (0 * far, True),
            (-4 * np.exp(-(((far - 0.35) / 0.1) ** 2)), True),
            (0.8 * np.exp(-(((far - 0.3) / 0.15) ** 2)), True),
            (4 * far, False),
            (4 * np.minimum(3 * far, 1), False),
        ):
            found = shown(run_with(acts | {"reward": scale * (offset + course + noise)}))
            told = {one.shows for one in found}
            assert (not told.isdisjoint({"reward-flat", "reward-falls"})) == is_told, (seed, rows, course.max())


def test_a_short_steady_rise_is_learning() -> None:
    """What a reward gains from block to block on a line is no wandering."""
    for rows in (30, 36, 45):
        random = np.random.default_rng([16, rows])
        rise = {"reward": np.linspace(-300, 900, rows) + 40 * random.standard_normal(rows)}
        assert look(run_with(rise | {"ep_len_mean": 20 + random.random(rows)})).verdict == "healthy"


def test_an_entropy_that_explodes_where_nothing_is_rewarded_calls_for_action() -> None:
    for rows in (24, 60, 200):
        random = np.random.default_rng([17, rows])
        at = np.arange(rows)
        entropy = np.where(at < rows // 4, 0.5, 9.0) * np.exp(0.05 * random.standard_normal(rows))
        won = np.where(at < rows // 5, 0.1 * random.random(rows), 0.0)
        (verdicts,) = {
            look(run_with({"policy_entropy": entropy, "reward": won, "completion_length": 80.0 + at})).verdict
        }
        assert verdicts == "act"


def test_a_leap_beyond_all_before_counts_of_a_loss_that_measures_nothing() -> None:
    random = np.random.default_rng(18)
    columns = policy(random) | {"loss": np.exp(0.5 * random.standard_normal(240))}
    assert look(run_with(columns)).incidents == ()
    columns["loss"][120:123] *= 3e4
    (incident,) = look(run_with(columns)).incidents
    assert (incident.kind, incident.start) == ("spike", 120)


@pytest.mark.parametrize("column", ["train/value_loss", "Score", "min_loss"])
def test_losses_and_scores_in_training_of_a_policy_that_has_learned_are_told_and_no_more(column: str) -> None:
    for seed in range(3):
        random = np.random.default_rng([20, seed])
        far = np.linspace(0, 1, 300)
        worse = np.exp(3 * np.clip(4 * far - 2, 0, 1) * (-1 if column == "Score" else 1) + 0.05 * random.random(300))
        columns = policy(random, 300) | {column: worse}
        found = look(run_with(columns))
        assert found.verdict == "healthy"
        assert column in found.because
        if column != "min_loss":
            lost = columns | {"reward": columns["reward"].mean() + 0.03 * random.standard_normal(300)}
            assert look(run_with(lost)).verdict == "watch"


def test_a_reward_that_never_changes_beside_a_loss_of_nothing_calls_for_action() -> None:
    for reward in (-100.0, 0.0, 500.0):
        columns = {"loss": np.zeros(80), "reward": np.full(80, reward), "policy_entropy": np.full(80, 0.03)}
        assert look(run_with(columns | {"ep_len_mean": np.ones(80)})).verdict == "act"
