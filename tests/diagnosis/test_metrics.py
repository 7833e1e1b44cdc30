"""Each problem of a metric is found where it is, and none where there is none."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sealegs.diagnosis.contract import Problem
from sealegs.diagnosis.curve.loss_curve import curve_of
from sealegs.diagnosis.metrics import claimed_schedule, problems_of
from sealegs.record.columns import Columns
from sealegs.record.manifest import Manifest
from sealegs.record.run import run_of

Floats = NDArray[np.float64]


def problems(
    loss: Floats, *, every: int = 1, steps: Floats | None = None, settings: dict[str, Any] | None = None, **more: Floats
) -> dict[str, Problem]:
    """What is found, by signal and kind."""
    numbered = every * np.arange(float(len(loss))) if steps is None else steps.astype(np.float64)
    values = {"step": numbered, "loss": loss, **more}
    logged = {name: np.ones(len(loss), dtype=bool) for name in values}
    run = run_of(Path("log"), Manifest(run_id="log", settings=settings or {}), Columns(values, logged))
    return {f"{one.signal}: {one.kind}": one for one in problems_of(run, curve_of(run))}


def falling(rows: int = 600, seed: int = 0) -> Floats:
    noise = np.random.default_rng(seed).standard_t(5, rows)
    return np.asarray(2 + 8 / (1 + np.arange(rows) / 30) + 0.06 * noise)


def norms(rows: int = 600) -> Floats:
    return np.asarray(np.exp(0.3 * np.random.default_rng(1).standard_normal(rows)))


@pytest.mark.parametrize("seed", range(5))
def test_healthy_metrics_have_no_problem(seed: int) -> None:
    rates = np.linspace(1e-3, 1e-5, 600)
    assert not problems(falling(seed=seed), grad_norm=norms(), lr=rates, loss_scale=np.full(600, 65536.0))


def test_neighbours_that_are_half_alike_are_no_average() -> None:
    noise = np.random.default_rng(2).normal(size=2000)
    for at in range(1, 2000):
        noise[at] += 0.5 * noise[at - 1]
    assert not problems(3 + 0.1 * noise)


def test_a_norm_of_zero_on_every_row_is_a_broken_metric() -> None:
    found = problems(falling(), grad_norm=np.zeros(600))["grad_norm: constant"]
    assert "0 on all of its 600 rows" in found.text


def test_the_norm_of_what_is_frozen_is_none() -> None:
    norms: dict[str, Any] = {"param_norm/base": np.full(600, 8.3), "grad_norm/adapter": np.exp(np.sin(np.arange(600)))}
    assert not problems(falling(), **norms)
    assert set(problems(falling(), **norms | {"grad_norm/base": norms["grad_norm/adapter"]})) == {
        "param_norm/base: constant"
    }


def test_a_constant_loss_is_one_too_and_a_constant_rate_is_not() -> None:
    assert set(problems(np.full(100, 2.5), lr=np.full(100, 1e-3))) == {"loss: constant"}


@pytest.mark.parametrize("seed", range(3))
def test_a_loss_that_goes_to_and_fro_about_zero_is_no_measure(seed: int) -> None:
    """As that of a policy gradient, whose size says nothing; and nothing more is said of it."""
    found = problems(0.02 * np.random.default_rng(seed).standard_t(5, 600), lr=np.full(600, 1e-3))
    assert set(found) == {"loss: hovers"}
    assert "about zero" in found["loss: hovers"].text
    assert "reward" in found["loss: hovers"].hides


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(np.linspace(3.0, -2.0, 600), id="falls through zero, as a likelihood of densities does"),
        pytest.param(falling() - 12, id="is negative all the time"),
        pytest.param(falling() * np.where(np.arange(600) % 100 == 0, -1, 1), id="is negative now and then"),
        pytest.param(np.tile([0.01, -0.01], 29), id="is too short to say"),
    ],
)
def test_a_loss_of_both_signs_may_be_one(loss: Floats) -> None:
    assert "loss: hovers" not in problems(np.asarray(loss))


def test_a_loss_kept_in_bf16_is_quantised() -> None:
    loss = falling(2000)
    kept = (loss.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32).astype(np.float64)
    assert "bf16" in problems(kept)["loss: quantised"].text


def test_a_rounded_loss_is_quantised_and_says_by_how_much() -> None:
    assert "0.1 apart: it was rounded" in problems(falling().round(1))["loss: quantised"].text


def test_decimals_finer_than_the_noise_are_no_problem() -> None:
    low = falling(2000) / 20
    assert len(np.unique(low.round(3))) < 1000 / 5
    assert "loss: quantised" not in problems(low.round(3))


@pytest.mark.parametrize("width", [8, 20])
def test_a_running_average_is_told_from_single_batches(width: int) -> None:
    averaged = np.convolve(falling(3000), np.ones(width) / width, mode="valid")
    assert set(problems(averaged)) == {"loss: smoothed"}


def test_zeros_after_a_loss_far_above_are_hidden_nan() -> None:
    loss, norm = falling(), norms()
    loss[400:], norm[400:] = 0.0, np.nan
    assert "from step 400 to 599" in problems(loss, grad_norm=norm)["loss: hidden-nan"].text


def test_a_loss_that_falls_to_zero_hides_nothing() -> None:
    loss = np.maximum(10 * 0.95 ** np.arange(400.0) - 1e-6, 0)
    assert loss[-1] == 0
    assert "loss: hidden-nan" not in problems(loss)


def test_steps_without_a_row_are_missing() -> None:
    steps = np.arange(600.0)
    steps[300:] += 50
    assert "from step 299 to 350" in problems(falling(), steps=steps)["loss: missing"].text


def test_what_cannot_be_negative() -> None:
    norm = norms()
    norm[7] = -1.0
    assert "negative on 1 rows (-1)" in problems(falling(), grad_norm=norm)["grad_norm: impossible"].text


def test_a_norm_after_clipping_has_a_ceiling() -> None:
    assert "are 1, and none is above" in problems(falling(), grad_norm=norms().clip(max=1.0))["grad_norm: clipped"].text


def test_a_coarse_log_says_what_it_hides() -> None:
    assert "within 100 steps" in problems(falling(), every=100)["loss: coarse"].hides


def test_a_flat_rate_contradicts_a_schedule_that_is_claimed() -> None:
    settings = {"training": {"lr_scheduler_type": "cosine"}}
    rate = np.full(600, 1e-3)
    assert "lr_scheduler_type = cosine" in problems(falling(), lr=rate, settings=settings)["lr: flat"].text
    assert not problems(falling(), lr=rate, settings={"lr_scheduler_type": "constant"})
    assert not problems(falling(), lr=np.linspace(1e-3, 0, 600), settings=settings)
    assert claimed_schedule({"optimizer": {"lr": 1e-3}}) == ""


def test_short_and_empty_logs_are_no_problem() -> None:
    assert not problems(np.array([2.0]))
    assert not problems(np.array([2.0, 2.0, 2.0]), grad_norm=np.zeros(3))
    assert not problems(np.full(50, np.nan))
