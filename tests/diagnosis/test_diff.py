"""Where two runs part."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sealegs.diagnosis.diff import differ
from sealegs.record.columns import Columns
from sealegs.record.manifest import Manifest
from sealegs.record.run import Run, run_of
from sealegs.report.commands.diff import page

STEPS = 400


def run(manifest: Manifest | None = None, **columns: Any) -> Run:
    values = {"step": np.arange(STEPS, dtype=np.float64), **columns}
    logged = {name: np.ones(STEPS, np.bool_) for name in values}
    return run_of(Path("a"), manifest or Manifest(run_id="a"), Columns(values, logged))


def losses(seed: int = 0) -> np.ndarray[Any, Any]:
    return 2.5 + 0.02 * np.random.default_rng(seed).standard_normal(STEPS)


def test_a_run_does_not_differ_from_itself() -> None:
    a = run(loss=losses(), time=np.arange(STEPS) * 1.0)
    b = run(loss=losses(), time=np.arange(STEPS) * 2.0)
    difference = differ(a, b)
    assert not difference.is_any
    assert difference.equal == ("loss",)
    assert page(difference, ("a", "b")).endswith("no difference")


def test_the_first_difference_and_the_first_that_is_more_than_noise() -> None:
    other = losses()
    other[120:] += 1e-6
    other[300:] += 0.5
    (parting,) = differ(run(loss=losses()), run(loss=other)).partings
    assert (parting.signal, parting.first, parting.beyond_noise) == ("loss", 120, 300)
    assert "step 120" in page(differ(run(loss=losses()), run(loss=other)), ("a", "b"))


def test_noise_is_not_a_parting() -> None:
    (parting,) = differ(run(loss=losses()), run(loss=losses(1))).partings
    assert parting.beyond_noise is None


def test_nan_on_one_side_is_a_parting_and_on_both_is_none() -> None:
    a, b = losses(), losses()
    a[50] = b[50] = np.nan
    b[390:] = np.nan
    (parting,) = differ(run(loss=a), run(loss=b)).partings
    assert (parting.first, parting.beyond_noise) == (390, 390)


def test_settings_and_versions() -> None:
    a = Manifest(run_id="a", seed=1, settings={"optimizer": {"lr": 1e-3}}, versions={"torch": "2.12"})
    b = replace(a, seed=2, settings={"optimizer": {"lr": 1e-3, "clip": 1.0}}, versions={"torch": "2.13"})
    difference = differ(run(a, loss=losses()), run(b, loss=losses(), grad_norm=losses()))
    assert difference.settings == {"optimizer.clip": (None, 1.0), "seed": (1, 2)}
    assert difference.versions == {"torch": ("2.12", "2.13")}
    assert difference.only_in == ((), ("grad_norm",))
    assert "optimizer.clip  None -> 1.0" in page(difference, ("a", "b"))


def test_runs_without_a_step_in_common() -> None:
    late = run(loss=losses(), step=np.arange(STEPS) + 1000.0)
    difference = differ(run(loss=losses()), late)
    assert difference.shared_steps == 0
    assert not difference.partings


@pytest.mark.parametrize("points", [1, 2, 5])
def test_short_runs(points: int) -> None:
    def short(values: list[float]) -> Run:
        columns = {"step": np.arange(points, dtype=np.float64), "loss": np.array(values[:points])}
        return run_of(Path("a"), Manifest(run_id="a"), Columns(columns, {n: np.ones(points, bool) for n in columns}))

    (parting,) = differ(short([1.0] * 5), short([2.0] * 5)).partings
    assert parting.beyond_noise == 0
