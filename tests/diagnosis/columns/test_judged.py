"""The columns of a log: that healthy ones stay quiet, all of them together, and that one that breaks is found."""

import time
from collections import Counter

import numpy as np
import pytest
from tests.diagnosis.columns.broken_columns import TROUBLES
from tests.diagnosis.columns.healthy_columns import FAMILIES, falling, norms, of_training, rows_of
from tests.diagnosis.healthy_kinds import Signals, noisy, run_with

from sealegs.diagnosis.columns.judged import Judgement, judged
from sealegs.diagnosis.contract import Findings
from sealegs.diagnosis.curve.loss_curve import curve_of
from sealegs.diagnosis.facts import Facts
from sealegs.diagnosis.findings import look
from sealegs.diagnosis.kind import Kind, kind_of
from sealegs.diagnosis.rank import situations
from sealegs.diagnosis.signs import registry
from sealegs.diagnosis.signs.columns import copies_part, held_out_turns, one_rank_leaps_alone, weights_grow_on
from sealegs.diagnosis.signs.data import eval_turns
from sealegs.record.run import Run

SEEDS = 20
STRONG, TOLD = 1, 2
"""Of so many healthy logs of a family: those with a finding that makes them one to watch, and with any, at the most."""
BROKEN, FOUND = 10, 0.9
"""Broken logs of each kind, and the share of them in which the column is found."""


def judgement(run: Run) -> Judgement:
    curve = curve_of(run)
    return judged(run, curve, kind_of(run, curve))


def seen(signals: Signals) -> Findings:
    return look(run_with(signals))


@pytest.mark.parametrize("family", FAMILIES)
def test_healthy_columns_stay_quiet(family: str) -> None:
    strong, told, shown = 0, 0, Counter[str]()
    for seed in range(SEEDS):
        random = np.random.default_rng([1, seed, *family.encode()])
        found = judgement(run_with(FAMILIES[family](random, rows_of(random)))).findings
        strong += any(one.is_strong for one in found)
        told += bool(found)
        shown.update(one.text for one in found)
    assert strong <= STRONG, shown
    assert told <= TOLD, shown


@pytest.mark.parametrize("name", TROUBLES)
def test_what_breaks_is_found(name: str) -> None:
    trouble, missed = TROUBLES[name], []
    for seed in range(BROKEN):
        random = np.random.default_rng([2, seed, *name.encode()])
        rows = int(np.exp(random.uniform(np.log(200), np.log(5000))))
        found = judgement(run_with(trouble.make(random, rows, int(rows * random.uniform(0.4, 0.8))))).findings
        if not any(one.signal == trouble.signal and one.shows in trouble.shows for one in found):
            missed.append((seed, rows, [one.text for one in found]))
    assert len(missed) <= BROKEN * (1 - FOUND) + 1e-9, missed


def calm(rows: int = 1000) -> tuple[np.random.Generator, Signals]:
    random = np.random.default_rng(3)
    return random, {"loss": noisy(random, 3 + 8 * np.exp(-np.arange(rows) / 50), 0.005)}


def test_a_healthy_loss_with_a_broken_column_is_to_be_watched() -> None:
    random, made = calm()
    rows = np.arange(1000)
    logits = noisy(random, np.where(rows < 600, 20.0, 300.0), 0.05)
    assert seen(made).verdict == "healthy"
    found = seen({**made, "max_attention_score_logits": logits})
    assert found.verdict == "watch"
    assert found.because.startswith("max_attention_score_logits")
    assert "step 600" in found.because
    assert "nothing out of the ordinary in the loss" in found.because


def test_what_is_not_strong_is_told_beside_the_verdict() -> None:
    random, made = calm()
    rows = np.arange(1000)
    found = seen({**made, "mystery": noisy(random, np.where(rows < 600, 1.0, 50.0), 0.05)})
    assert found.verdict == "healthy"
    assert any("mystery" in text for text in found.notices)
    assert "mystery" in found.unjudged


def test_the_first_column_before_the_loss_is_named_and_gone_back_behind() -> None:
    random, made = calm(2000)
    rows = np.arange(2000)
    made["loss"] = made["loss"] * np.where(rows < 1500, 1.0, 1.8)
    made["activation_norm/blocks.7"] = noisy(random, np.where(rows < 1420, 5.0, 90.0), 0.03)
    found = seen(made)
    assert found.verdict == "act"
    assert "first out of the ordinary: activation_norm/blocks.7 at step 1420" in found.because
    assert Facts(found).sound_before == 1420


def test_a_column_that_broke_long_before_is_not_gone_back_behind() -> None:
    random, made = calm(4000)
    rows = np.arange(4000)
    made["loss"] = made["loss"] * np.where(rows < 3500, 1.0, 1.8)
    made["activation_norm/blocks.7"] = noisy(random, np.where(rows < 1420, 5.0, 90.0), 0.03)
    assert Facts(seen(made)).sound_before == 3500


@pytest.mark.parametrize(
    ("at", "rows", "share"),
    [
        (1199, 2000, 0.03),
        (1499, 6000, 0.03),
        (699, 1000, 0.03),
        (332, 3000, 0.05),
        (700, 6000, 0.1),
        (2000, 3000, 0.15),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_a_rate_that_halves_is_dated_by_its_row(at: int, rows: int, share: float, seed: int) -> None:
    """Not by the block of rows that it falls in, and though it comes early."""
    random = np.random.default_rng([at, seed])
    pace = 52000 * np.exp(share * random.standard_normal(rows)) * np.where(np.arange(rows) < at, 1.0, 0.5)
    run = run_with({"loss": noisy(random, falling(random, rows), 0.01), "tokens_per_s": pace})
    (one,) = judgement(run).findings
    assert (one.signal, one.shows) == ("tokens_per_s", "slower")
    assert abs(one.step - at) <= 100 * share / 5, one.text


def test_a_rate_that_is_as_ever_stays_quiet() -> None:
    """With noise of 5 to 15 %, slow drifts of 10 %, rows in which the machine stalls, and passages of half the pace."""
    told = []
    for seed in range(200):
        random = np.random.default_rng([7, seed])
        rows = int(np.exp(random.uniform(np.log(60), np.log(3000))))
        time = np.linspace(0, 1, rows)
        drift = (1 - 0.1 * time, 1 + 0.1 * time, 1 + 0.1 * np.sin(12 * time), 1 - 0.1 * (time > 0.15))[seed % 4]
        tails = random.standard_t(4, rows) / np.sqrt(2) if seed % 2 else random.standard_normal(rows)
        pace = 52000 * drift * np.exp(random.uniform(0.05, 0.15) * tails)
        if seed % 3 == 0:
            pace[random.random(rows) < 0.01] /= 10
        if seed % 7 == 0:
            slow = int(random.uniform(0, 0.8) * rows)
            pace[slow : slow + max(2, rows // 40)] *= 0.5
        loss = noisy(random, falling(random, rows), 0.01)
        found = judgement(run_with({"loss": loss, "tokens_per_s": pace})).findings
        told += [(seed, rows, one.text) for one in found if one.signal == "tokens_per_s"]
    assert not told


def test_an_early_fall_of_a_rate_that_is_made_up_for_in_the_end_is_not_told() -> None:
    random, made = calm(3000)
    rows = np.arange(3000)
    pace = 52000 * np.exp(0.05 * random.standard_normal(3000)) * np.where((rows < 333) | (rows >= 2750), 1.0, 0.5)
    assert not judgement(run_with({**made, "tokens_per_s": pace})).findings


def test_columns_that_need_no_judgement_are_not_called_unjudged() -> None:
    random, made = calm()
    rows = np.arange(1000.0)
    made |= {"lr": 1e-3 * rows, "consumed_samples": rows * 64, "wall": rows * 2, "seed_of_run": np.full(1000, 7.0)}
    found = judgement(run_with(made))
    assert (found.findings, found.unjudged) == ((), ())
    made["weird"] = random.standard_normal(1000)
    made["rare"] = np.where(rows % 200 == 0, random.standard_normal(1000), np.nan)
    assert judgement(run_with(made)).unjudged == ("weird", "rare")


def test_the_best_and_the_last_of_what_turned_are_told_as_they_were_logged() -> None:
    """The same in the columns, in the notice and in the sign: not the medians that they are judged by."""
    random, made = calm()
    rows = np.arange(1000)
    is_there = rows % 50 == 49
    made["loss"] = noisy(random, 8 - 6 * rows / 1000, 0.005)
    made["eval_loss"] = np.where(is_there, noisy(random, 1 + np.abs(rows / 1000 - 0.4), 0.003), np.nan)
    made["accuracy"] = np.where(is_there, 0.9 - np.abs(rows / 1000 - 0.4), np.nan)
    errors, scores = made["eval_loss"][is_there], made["accuracy"][is_there]
    found = seen(made)
    told = {one.signal: one.text for one in found.columns}
    best = f"at step {rows[is_there][np.argmin(errors)]}"
    assert told["eval_loss"] == f"eval_loss {errors.min():.4g} at its best, {best}, {errors[-1]:.4g} in the end"
    assert f"{scores.max():.4g} at its best, at step 399, {scores[-1]:.4g} in the end" in told["accuracy"]
    notice = f"held-out loss {errors.min():.4g} {best}, its lowest, and {errors[-1]:.4g} in the end"
    assert any(text.startswith(notice) for text in found.notices), found.notices
    assert f"evaluation loss {errors.min():.4g} {best}, {errors[-1]:.4g} at the end" in eval_turns(Facts(found)).text


def test_a_held_out_error_that_turns_beside_a_score_at_its_best_is_only_told() -> None:
    random, made = calm()
    rows = np.arange(1000)
    is_there = rows % 40 == 0
    turned = noisy(random, 1 + np.abs(rows / 1000 - 0.4), 0.003)
    made["eval_loss"] = np.where(is_there, turned, np.nan)
    assert [one.is_strong for one in judgement(run_with(made)).findings] == [True]
    made["eval/accuracy"] = np.where(is_there, 0.5 + 0.3 * rows / 1000 + 0.002 * random.standard_normal(1000), np.nan)
    assert [one.is_strong for one in judgement(run_with(made)).findings] == [False]


def test_signs_of_ranks_and_weights() -> None:
    random, made = calm(1200)
    rows = np.arange(1200)
    for rank in range(4):
        made[f"checksum_norm/rank_{rank}"] = 100 + 0.01 * rows + (rank == 2) * np.where(rows < 700, 0, 1e-2)
        made[f"grad_norm/rank_{rank}"] = noisy(random, np.ones(1200), 0.03)
    made["grad_norm/rank_1"][[800, 900, 1000]] *= 80
    made["param_norm"] = np.asarray(50 + 0.5 * rows, np.float64)
    facts = Facts(seen(made))
    assert copies_part(facts).text.startswith("checksum_norm/rank_2 is not the same as its 3 siblings since step 700")
    assert one_rank_leaps_alone(facts).text.startswith("grad_norm/rank_1 leaps alone in 3 rows, first at step 800")
    assert weights_grow_on(facts).holds
    calm_facts = Facts(seen(calm()[1]))
    assert not any(sign(calm_facts).holds for sign in (copies_part, one_rank_leaps_alone, weights_grow_on))


def test_many_columns_take_seconds_at_most() -> None:
    random = np.random.default_rng(0)
    made: Signals = {"loss": noisy(random, falling(random, 10_000), 0.01)}
    for number in range(250):
        made[f"grad_norm/layer_{number}"] = noisy(random, np.ones(10_000), 0.1)
        made[f"rms_{number}/act"] = noisy(random, np.ones(10_000), 0.1)
    run = run_with(made)
    began = time.process_time()
    found = judgement(run)
    assert time.process_time() - began < 30, "about one on an idle core: more would be another order of growth"
    assert len(found.judged) == 500


def test_the_layers_of_a_healthy_run_make_a_healthy_run() -> None:
    random, made = calm(3000)
    found = seen({**norms(random, 3000), **of_training(random, 3000), **made})
    assert found.verdict == "healthy"
    assert len(found.judged) > 20


def test_held_out_losses_that_turn_speak_of_memory() -> None:
    random, made = calm()
    rows = np.arange(1000)
    made["loss"] = np.asarray(made["loss"] * (1 - 0.5 * rows / 1000))
    made["dev/nll"] = np.where(rows % 40 == 0, noisy(random, 2 + np.abs(rows / 1000 - 0.4), 0.003), np.nan)
    facts = Facts(seen(made))
    assert held_out_turns(facts).holds
    assert "dev/nll" in held_out_turns(facts).text
    assert "memory" in set(situations(facts, registry.read(facts)))
    del made["dev/nll"]
    assert not held_out_turns(Facts(seen(made))).holds


def test_experts_that_die_one_by_one_are_counted() -> None:
    random, made = calm(2000)
    rows = np.arange(2000)
    dead = np.searchsorted([500, 700, 900, 1300], rows, side="right").astype(float)
    found = seen({**made, "moe/num_dead_experts": dead, "router_balance_loss": noisy(random, np.ones(2000), 0.02)})
    assert "moe" in found.kind.traits
    (one,) = [one for one in found.standing if one.shows == "experts-die"]
    assert one.step == 500
    assert found.verdict == "watch"


def test_gradients_that_stop_or_never_come() -> None:
    random, made = calm()
    rows = np.arange(1000)
    for layer in range(4):
        made[f"grad_norm/layer_{layer}"] = noisy(random, np.ones(1000), 0.2)
    made["grad_norm/layer_2"][rows >= 700] = 0
    made["grad_norm/layer_3"] = np.zeros(1000)
    found = {one.signal: one for one in judgement(run_with(made)).findings}
    assert set(found) == {"grad_norm/layer_2", "grad_norm/layer_3"}
    assert (found["grad_norm/layer_2"].shows, found["grad_norm/layer_2"].step) == ("vanishes", 700)
    assert (found["grad_norm/layer_3"].shows, found["grad_norm/layer_3"].is_strong) == ("never-moves", True)
    tuned = judged(run := run_with(made), curve_of(run), Kind(name="fine-tuning"))
    assert not next(one for one in tuned.findings if one.signal == "grad_norm/layer_3").is_strong, "frozen on purpose"


def test_a_score_that_never_changes() -> None:
    _, made = calm()
    is_there = np.arange(1000) % 40 == 0
    made["eval/accuracy"] = np.where(is_there, 0.3125, np.nan)
    (one,) = judgement(run_with(made)).findings
    assert one.text == "eval/accuracy never leaves 0.3125 while the loss falls"
    made["eval/accuracy"] = np.where(is_there, 1.0, np.nan)
    assert not judgement(run_with(made)).findings, "a full score is no fault"


def test_counts_that_are_always_there_may_leap() -> None:
    random, made = calm()
    made["num-zeros"] = np.round(noisy(random, np.where(np.arange(1000) < 700, 1e5, 2e6), 0.1))
    (one,) = judgement(run_with(made)).findings
    assert (one.shows, one.step, one.is_strong) == ("leaps", 700, True)


def test_a_second_moment_grows_with_the_square_of_a_gradient() -> None:
    random, made = calm()
    is_later = np.arange(1000) >= 600
    made["moment2_norm"] = noisy(random, np.where(is_later, 8.0, 1.0), 0.05)
    assert not judgement(run_with(made)).findings
    made["moment2_norm"] = noisy(random, np.where(is_later, 12.0, 1.0), 0.05)
    (one,) = judgement(run_with(made)).findings
    assert (one.shows, one.step, one.is_strong) == ("leaps", 600, True)


def test_of_three_layers_one_may_part_from_the_others_before_the_run_is_one_to_watch() -> None:
    random, made = calm()
    for layer in range(3):
        made[f"activation_norm/{layer}"] = noisy(random, np.full(1000, 5.0), 0.02)
    for times, is_strong in ((3.0, False), (20.0, True)):
        found = {**made, "activation_norm/1": noisy(random, 5 * np.linspace(1, times, 1000), 0.02)}
        (one,) = [one for one in judgement(run_with(found)).findings if one.shows == "parts"]
        assert one.is_strong is is_strong


def test_weights_of_which_no_gradient_is_logged_are_frozen() -> None:
    random, made = calm()
    for part in ("blocks.0", "blocks.1", "tokens"):
        made[f"param_norm/{part}"] = np.full(1000, 10.0) + (part != "tokens") * np.linspace(0, 1, 1000)
        made[f"grad_norm/{part}"] = noisy(random, np.ones(1000), 0.2)
    assert [one.text.partition(":")[0] for one in judgement(run_with(made)).findings] == [
        "param_norm/tokens never moves"
    ]
    del made["grad_norm/tokens"]
    assert not judgement(run_with(made)).findings


def test_one_gradient_that_is_not_finite_does_not_hide_what_is_frozen() -> None:
    """Twenty rows of each norm are just enough to call one still."""
    random, made = calm()
    short = {name: values[:20] for name, values in made.items()}
    for part in ("adapter.0", "adapter.1"):
        short[f"param_norm/{part}"] = np.linspace(10.0, 11.0, 20)
        short[f"grad_norm/{part}"] = noisy(random, np.ones(20), 0.2)
        short[f"grad_norm/{part}"][7] = np.nan
    short["param_norm/base"] = np.full(20, 10.0)
    assert [one.text for one in judgement(run_with(short)).findings if one.shows == "never-moves"] == []
