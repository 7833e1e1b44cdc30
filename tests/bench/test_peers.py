"""Each peer has the defect that it is known for, and no other: a benchmark against straw men would prove nothing."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench.peers import Column, Flags, Rule

from bench import peers, streams

RULE = {rule.name: rule for rule in peers.RULES}
OLMO = RULE["OLMo-core 6 sigma / 128"]


def calm(steps: int = 2000, level: float = 2.5, seed: int = 0) -> Column:
    noise: Column = level * (1 + 0.01 * np.random.default_rng(seed).standard_normal(steps))
    return noise


def flags_of(rule: Rule, loss: Column, grad_norm: Column | None = None) -> Flags:
    return rule.flags(loss, calm(len(loss), 0.3, seed=1) if grad_norm is None else grad_norm)


def with_nan(column: Column, step: int = 1000) -> Column:
    column = column.copy()
    column[step] = math.nan
    return column


def test_running_sums_are_those_of_each_window() -> None:
    values = calm(400)
    values[200] = 5000.0
    mean, deviation, count = peers.rolling(values, 128)
    for i in (2, 90, 300, 399):
        window = values[max(0, i - 128) : i]
        assert count[i] == len(window)
        assert mean[i] == pytest.approx(window.mean(), rel=1e-9)
        assert deviation[i] == pytest.approx(window.std(ddof=1), rel=1e-6)


def test_six_sigma_flags_four_of_a_burst_of_thirty() -> None:
    loss = calm()
    loss[1000:1030] = 9.0
    assert np.flatnonzero(flags_of(OLMO, loss)).tolist() == [1000, 1001, 1002, 1003]


def test_six_sigma_misses_the_second_shock() -> None:
    norm = calm(level=0.3, seed=1)
    norm[1000] *= 1000
    norm[1040] *= 20
    assert np.flatnonzero(flags_of(OLMO, calm(), norm)).tolist() == [1000]


def test_one_nan_freezes_six_sigma_for_129_steps() -> None:
    assert np.flatnonzero(flags_of(OLMO, with_nan(calm()))).tolist() == list(range(1000, 1129))


def test_six_sigma_begins_with_the_64th_value() -> None:
    loss = calm()
    loss[[62, 63]] = 9.0
    assert np.flatnonzero(flags_of(OLMO, loss)).tolist() == [63]


def test_one_nan_turns_llm_c_off_for_good() -> None:
    rule = RULE["llm.c z > 5 / 128"]
    loss = calm()
    loss[1900] = 9.0
    assert np.flatnonzero(flags_of(rule, loss)).tolist() == [1900]
    assert not flags_of(rule, with_nan(loss)).any()


def test_z_of_llm_c_is_bounded_because_it_contains_the_value() -> None:
    loss = calm()
    loss[1900] = 1e6
    rule = RULE["llm.c z > 5 / 128"]
    assert isinstance(rule, peers.Scored)
    assert rule.scores(loss, None).max() == pytest.approx(math.sqrt(127), rel=1e-3)


def test_one_nan_turns_zclip_off_for_good() -> None:
    norm = calm(level=0.3, seed=1)
    norm[1900] *= 100
    assert flags_of(RULE["ZClip 2.5"], calm(), norm)[1900]
    assert not flags_of(RULE["ZClip 2.5"], calm(), with_nan(norm))[1000:].any()


def test_what_zclip_clips_to_enters_its_mean_and_not_the_shock() -> None:
    norm = calm(level=0.3, seed=1)
    norm[1000] *= 1000
    norm[1003] *= 1.2
    assert flags_of(RULE["ZClip 2.5"], calm(), norm)[[1000, 1003]].all()


def test_one_nan_spoils_every_later_gradient_of_autoclip() -> None:
    flags = flags_of(RULE["AutoClip p10"], calm(), with_nan(calm(level=0.3)))
    assert flags[1000:].all()
    assert flags[100:1000].mean() == pytest.approx(0.9, abs=0.05)


def test_autoclip_scores_are_percentiles_of_the_history() -> None:
    norm = calm(300, 0.3)
    limits = np.array([np.percentile(norm[: i + 1], 10) for i in range(300)])
    assert (flags_of(RULE["AutoClip p10"], norm, norm) == (norm > limits)).all()


@pytest.mark.parametrize("name", ["llm-foundry 2x, 5 in a row", "FlagScale 0.2", "3 sigma / 100", "Megatron 10x"])
def test_a_nan_is_nothing_to(name: str) -> None:
    assert not flags_of(RULE[name], with_nan(calm()))[1000]


@pytest.mark.parametrize("name", ["PyTorch GradScaler", "optax apply_if_finite(5)", "Lightning 3x / 10"])
def test_a_nan_is_flagged_once_by(name: str) -> None:
    assert np.flatnonzero(flags_of(RULE[name], with_nan(calm()))).tolist() == [1000]


def test_apply_if_finite_applies_the_sixth_nan() -> None:
    loss = calm()
    loss[1000:1008] = math.nan
    assert np.flatnonzero(flags_of(RULE["optax apply_if_finite(5)"], loss)).tolist() == list(range(1000, 1005))


def test_apply_if_finite_counts_only_what_follows_one_another() -> None:
    loss = calm()
    loss[1000:1016:2] = math.nan
    assert flags_of(RULE["optax apply_if_finite(5)"], loss).sum() == 8


def test_megatron_measures_by_its_first_hundred_values_and_judges_none_of_them() -> None:
    loss = calm()
    loss[50] = 30.0
    loss[[60, 1000, 1500]] = 25.0, 299.0, 301.0
    assert np.flatnonzero(flags_of(RULE["Megatron 10x"], loss)).tolist() == [1500]
    loss[50] = 5000.0
    assert not flags_of(RULE["Megatron 10x"], loss).any()
    loss[50] = 1.0
    assert np.flatnonzero(flags_of(replace(RULE["Megatron 10x"], threshold=0.9), loss))[0] >= 100


def test_hampel_is_not_moved_by_a_burst_and_does_not_judge_a_value_by_itself() -> None:
    rule = RULE["Hampel 6 MAD / 128"]
    loss = calm()
    loss[1000:1030] = 9.0
    assert np.flatnonzero(flags_of(rule, loss)).tolist() == list(range(1000, 1030))
    assert isinstance(rule, peers.Scored)
    logs = np.log(loss[1:129])
    mad = np.median(np.abs(logs - np.median(logs)))
    assert rule.scores(loss, None)[129] == pytest.approx((np.log(loss[129]) - np.median(logs)) / (1.4826 * mad))


@pytest.mark.parametrize("name", ["Megatron 10x", "Lightning 3x / 10", "llm-foundry 2x, 5 in a row"])
def test_a_ratio_rule_misses_the_spike_of_bloom(name: str) -> None:
    base = streams.Stream(name="calm", loss=calm(), grad_norm=calm(level=0.3, seed=1))
    event = streams.trace(base, 1000, name="BLOOM-176B", reach=9)
    assert not flags_of(RULE[name], np.concatenate([base.loss[:1000], event.loss]))[1000:].any()


def test_llm_foundry_flags_from_the_fifth_step_on() -> None:
    loss = calm()
    loss[1000:1010] = 6.0
    assert np.flatnonzero(flags_of(RULE["llm-foundry 2x, 5 in a row"], loss)).tolist() == list(range(1004, 1010))


@pytest.mark.parametrize(("name", "factor"), [("FlagScale 0.2", 1.4), ("DSPOT 1e-4", 1.4), ("Lightning 3x / 10", 3.3)])
def test_a_level_shift_is_condemned_for_ever_by(name: str, factor: float) -> None:
    loss = calm()
    loss[1500] = 2.4  # the last good value is a low one: Lightning passes whatever is below it
    loss[1501:] = 2.5 * factor
    flags = flags_of(RULE[name], loss)
    assert not flags[:1501].any()
    assert flags[1501:].all()


def test_dspot_is_blind_while_a_nan_is_in_its_local_mean_and_sees_again() -> None:
    loss = with_nan(calm(3000), 1500)
    loss[[1520, 1600]] = 9.0
    assert np.flatnonzero(flags_of(RULE["DSPOT 1e-5"], loss)).tolist() == [1600]


def test_six_sigma_accepts_the_same_shift_at_once() -> None:
    loss = calm()
    loss[1500:] *= 1.4
    assert np.flatnonzero(flags_of(OLMO, loss)).tolist() == [1500, 1501, 1502, 1503]


def test_marin_sees_a_level_that_lasts_and_no_spike() -> None:
    rule = RULE["Marin 6 sigma, 30 after 330"]
    loss = calm()
    loss[1000] = 9.0
    assert not flags_of(rule, loss).any()
    lasting = calm()
    lasting[1000:] *= 1.4
    assert np.flatnonzero(flags_of(rule, lasting))[0] == 1029


def test_metaseq_compares_with_a_mean_that_has_the_value_in_it() -> None:
    loss = np.full(200, 2.0)
    loss[100] = 2.2  # over the mean before by 10 %, over the mean with it by less
    loss[150] = 2.4
    assert np.flatnonzero(flags_of(RULE["metaseq 1.1"], loss)).tolist() == [150]


def test_the_tail_of_spot_is_that_of_its_excesses() -> None:
    uniform = (np.arange(4000) + 0.5) / 4000
    for shape in (0.3, -0.2):
        found, spread = peers.pareto(2.0 / shape * (uniform**-shape - 1))
        assert found == pytest.approx(shape, abs=0.04)
        assert spread == pytest.approx(2.0, rel=0.06)
    shape, spread = peers.pareto(-3.0 * np.log(uniform))
    assert shape == 0.0
    assert spread == pytest.approx(3.0, rel=0.01)


def alternating(steps: int, *, half: float = 0.1) -> Column:
    """1 - half, 1 + half, 1 - half, ...: its mean is 1 and its deviation half, in every even window."""
    return np.where(np.arange(steps) % 2, 1 + half, 1 - half)


@pytest.mark.parametrize(
    ("name", "first", "deviations", "window"),
    [
        ("3 sigma / 100", 100, 3, 100),
        ("OLMo-core 6 sigma / 128", 63, 6, 128),
        ("OLMo 2 score 7 sigma / 1000", 1000, 7, 1000),
    ],
)
def test_so_many_sample_deviations_above_the_mean(name: str, first: int, deviations: float, window: int) -> None:
    limit = 1 + deviations * 0.1 * math.sqrt(window / (window - 1))
    for factor, expected in ((0.999, []), (1.001, [1400])):
        loss = alternating(2000)
        loss[1400] = factor * limit
        assert np.flatnonzero(RULE[name].flags(loss, None)).tolist() == expected
    young = alternating(2000)
    young[first - 1] = 50.0
    assert not RULE[name].flags(young, None)[first - 1]
    young[first + 1] = 500.0
    assert RULE[name].flags(young, None)[first + 1]


def test_of_these_the_score_of_olmo_2_alone_looks_down_too() -> None:
    loss = alternating(2000)
    loss[1400] = 0.1
    assert np.flatnonzero(RULE["OLMo 2 score 7 sigma / 1000"].flags(loss, None)).tolist() == [1400]
    assert not RULE["3 sigma / 100"].flags(loss, None).any()


@pytest.mark.parametrize("threshold", [3, 5])
def test_z_of_llm_c_over_the_last_128_and_itself(threshold: int) -> None:
    # z of one value d above 127 that vary by 0.1: about (127/128) d / sqrt(0.01 + 127/128^2 d^2)
    d = 0.1 * threshold / math.sqrt((127 / 128) ** 2 - threshold**2 * 127 / 128**2)
    for factor, expected in ((0.98, []), (1.02, [1400])):
        loss = alternating(2000)
        loss[1400] = 1 + factor * d
        assert np.flatnonzero(RULE[f"llm.c z > {threshold} / 128"].flags(loss, None)).tolist() == expected


def test_lightning_flags_three_times_the_mean_of_the_last_ten_accepted() -> None:
    loss = np.full(100, 2.0)
    loss[[50, 51, 52]] = 5.99, 30.0, 7.0  # 5.99 is accepted: the mean is then 2.399, and 7.0 is below 3 x 2.399
    assert np.flatnonzero(RULE["Lightning 3x / 10"].flags(loss, None)).tolist() == [51]
    loss[52] = 7.2
    assert np.flatnonzero(RULE["Lightning 3x / 10"].flags(loss, None)).tolist() == [51, 52]


def test_flagscale_flags_a_fifth_above_the_last_good_value() -> None:
    loss = np.full(100, 2.0)
    loss[[50, 60, 61]] = 2.39, 2.41, 2.399
    assert np.flatnonzero(RULE["FlagScale 0.2"].flags(loss, None)).tolist() == [60]


def test_llm_foundry_wants_the_whole_row_and_a_full_window() -> None:
    loss = np.full(400, 2.0)
    loss[10:20] = 50.0
    loss[300:304] = 50.0  # four
    assert not RULE["llm-foundry 2x, 5 in a row"].flags(loss, None).any()


def test_marin_wants_a_rise_of_a_twentieth_and_six_deviations() -> None:
    rule = RULE["Marin 6 sigma, 30 after 330"]
    for half, rise, expected in ((0.001, 0.04, False), (0.001, 0.06, True), (0.1, 0.55, False), (0.1, 0.65, True)):
        loss = alternating(1000, half=half)
        loss[600:] += rise + half  # the smallest of them is the lower of the two
        assert rule.flags(loss, None).any() == expected, (half, rise)


@pytest.mark.parametrize(("threshold", "largest"), [(1.1, 1.1), (1.25, 1.25)])
def test_metaseq_by_its_formula(threshold: float, largest: float) -> None:
    # x over 0.8 + 0.2 x is more than t where x > 0.8 t / (1 - 0.2 t)
    limit = 2.0 * 0.8 * largest / (1 - 0.2 * largest)
    for factor, expected in ((0.999, []), (1.001, [150])):
        loss = np.full(300, 2.0)
        loss[150] = factor * limit
        assert np.flatnonzero(RULE[f"metaseq {threshold}"].flags(loss, None)).tolist() == expected


def test_zclip_begins_after_25_and_has_z_by_its_running_moments() -> None:
    norm = alternating(200, half=0.1)
    norm[[24, 100]] = 9.0, 1.0
    assert not flags_of(RULE["ZClip 2.5"], norm, norm)[:25].any()
    norm = alternating(2000, half=0.1)
    norm[[1501, 1601]] = 1.2, 1.3  # the deviation is about 0.1
    assert np.flatnonzero(flags_of(RULE["ZClip 2.5"], norm, norm)).tolist() == [1601]


@pytest.mark.parametrize("name", ["SPOT 1e-4", "SPOT 1e-5", "DSPOT 1e-4", "DSPOT 1e-5"])
def test_spot_flags_what_its_tail_gives_the_risk(name: str) -> None:
    # exponential quantiles in random order: a value of risk q is one of -log q
    exponential = -np.log((np.arange(1000) + 0.5) / 1000)
    for factor, is_flagged in ((0.8, False), (1.25, True)):
        loss = 100 + np.concatenate([np.random.default_rng(i).permutation(exponential) for i in range(3)])
        loss[2000] = 100 + factor * RULE[name].threshold * math.log(10)
        flags = RULE[name].flags(loss, None)
        assert flags[2000] == is_flagged
        assert not flags[: 1050 if name.startswith("D") else 1000].any()
        assert flags.sum() <= 3


def test_spot_is_blind_on_a_loss_that_has_fallen_and_dspot_is_not() -> None:
    loss = calm(4000, level=0.1) + np.linspace(10, 8, 4000)
    loss[3500] += 1.0
    assert not RULE["SPOT 1e-4"].flags(loss, None).any()
    assert np.flatnonzero(RULE["DSPOT 1e-5"].flags(loss, None)).tolist() == [3500]


def test_the_control_flags_as_often_as_it_says() -> None:
    assert RULE["control: by chance"].flags(calm(100_000), None).mean() == pytest.approx(0.01, rel=0.1)


def test_every_rule_of_the_list_is_here() -> None:
    assert len(peers.RULES) == 24


# but for the control, which is drawn for the whole column, and llm-foundry, whose window is a share of the run
CAUSAL = [rule for rule in peers.RULES if not isinstance(rule, peers.Chance | peers.InARow)]


@pytest.mark.parametrize("rule", CAUSAL, ids=lambda rule: rule.name)
def test_no_rule_sees_the_future(rule: Rule) -> None:
    whole = streams.healthy("t3", "power law", 3000, np.random.default_rng(5), with_norm=True)
    early = whole.part(0, 2500)
    flags = rule.flags(whole.loss, whole.grad_norm)
    assert (rule.flags(early.loss, early.grad_norm) == flags[:2500]).all()


def test_a_larger_threshold_is_stricter() -> None:
    base = streams.healthy("t3", "power law", 4000, np.random.default_rng(5), with_norm=True)
    judged = [rule for rule in peers.RULES if not isinstance(rule, peers.NotFinite | peers.Chance)]
    assert len(judged) == len(peers.RULES) - 3
    for rule in judged:
        low, high = rule.bracket
        many, few = (
            replace(rule, threshold=threshold).flags(base.loss, base.grad_norm).sum()
            for threshold in (low + (rule.threshold - low) / 8, high)
        )
        assert few <= many
        assert few < 3000
