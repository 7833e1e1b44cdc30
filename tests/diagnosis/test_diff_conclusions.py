"""What follows from two runs: offsets below the noise, noise, whole ratios, resumes, suspects, and nothing."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sealegs.diagnosis.diff import differ
from sealegs.diagnosis.diff_conclusions import Conclusion, conclude
from sealegs.record.columns import Columns
from sealegs.record.manifest import Manifest
from sealegs.record.run import Run, run_of

STEPS = 1600


def run(settings: dict[str, Any] | None = None, steps: Any = None, **columns: Any) -> Run:
    values = {"step": np.arange(STEPS, dtype=np.float64) if steps is None else steps, **columns}
    logged = {name: np.ones(len(values["step"]), np.bool_) for name in values}
    return run_of(Path("a"), Manifest(run_id="a", settings=settings or {}), Columns(values, logged))


def losses(seed: int = 0, noise: float = 0.02) -> Any:
    random = np.random.default_rng(seed)
    slow = np.cumsum(random.standard_normal(STEPS)) * 2e-5  # neighbours share a little, as in a run
    return (2.4 + 6 * np.exp(-np.arange(STEPS) / 120)) * np.exp(noise * random.standard_t(5, STEPS) + slow)


def concluded(a: Run, b: Run) -> dict[str, Conclusion]:
    return {each.about: each for each in conclude(a, b, differ(a, b))}


def test_an_offset_below_the_noise_of_a_step_is_found() -> None:
    other = losses(1)
    other[600:] *= 1.01
    found = concluded(run(loss=losses()), run(loss=other))
    assert "higher from about step 6" in found["offset"].text or "higher from about step 5" in found["offset"].text
    assert "less than the noise of a step" in found["offset"].text


@pytest.mark.parametrize("seed", range(2, 42))
def test_other_noise_is_no_difference(seed: int) -> None:
    found = concluded(run(loss=losses(seed)), run(loss=losses(seed + 100)))
    assert set(found) <= {"none", "start"}, found
    assert "what would have been seen: loss apart for good by" in found["none"].text


def test_noise_that_grew() -> None:
    found = concluded(run({"batch_size": 64}, loss=losses()), run({"batch_size": 16}, loss=losses(1, noise=0.04)))
    assert re.search(r"steps of B are 2(\.1)? times as noisy in loss, as batches of 64 and 16 are", found["noise"].text)
    unknown = concluded(run(loss=losses()), run(loss=losses(1, noise=0.04)))
    assert re.search(r"4(\.\d)? times fewer", unknown["noise"].test)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"gradient_accumulation_steps": 8}, "the accumulation is 8"),
        ({"world_size": "8"}, "the number of ranks is 8"),
        ({}, "a whole number"),
    ],
)
def test_a_ratio_that_is_a_size(settings: dict[str, Any], says: str) -> None:
    found = concluded(run(settings, loss=losses()), run(settings, loss=8 * losses(1)))
    assert "loss of B is 8" in found["ratio"].text
    assert says in found["ratio"].text
    assert "offset" not in found
    drifting = losses() * np.linspace(2.0, 9.0, STEPS)
    assert "ratio" not in concluded(run(loss=losses()), run(loss=drifting)), "no whole number all along"


def test_a_parting_at_a_resume() -> None:
    steps = np.concatenate([np.arange(900), np.arange(800, STEPS)]).astype(np.float64)
    again = losses()[steps.astype(int)]
    again[900:] += 0.5
    found = concluded(run(loss=losses()), run(loss=again, steps=steps))
    assert "loss parts at step 800, where B was resumed (at step 800)" in found["resume"].text


def test_the_only_setting_that_differs_is_the_first_suspect() -> None:
    other = losses()
    other[1:] *= np.linspace(1, 1.2, STEPS - 1)
    a = run({"lr": 1e-3, "output_dir": "x"}, loss=losses())
    b = run({"lr": 2e-3, "output_dir": "y"}, loss=other)
    found = concluded(a, b)
    assert "lr (0.001 -> 0.002) is all that differs" in found["suspect"].text
    assert "run B again with lr as in A" in found["suspect"].test
    assert "the first loss is the same" in found["start"].text


def test_of_several_the_one_that_acts_on_the_numbers_comes_first() -> None:
    a = run({"zeta": 1, "warmup_steps": 10}, loss=losses())
    b = run({"zeta": 2, "warmup_steps": 90}, loss=losses() + 0.7)
    assert concluded(a, b)["suspect"].text.startswith("warmup_steps (10 -> 90) is the first suspect of 2")


def test_where_they_part_is_told_if_nothing_more_is_known() -> None:
    a, b = losses(), losses()
    b[0] *= 1.0001
    b[700:] *= np.exp(np.cumsum(np.random.default_rng(5).standard_normal(900)) * 0.05)  # to and fro, and no offset
    found = concluded(run(loss=a), run(loss=b))
    assert re.search(r"loss of A and B parts by more than noise from step 7\d\d on", found["parting"].text)
    assert "as good as the same" in found["start"].text


def test_too_few_steps_are_said_to_be_too_few() -> None:
    a, b = (run(loss=losses(seed)[:20], steps=np.arange(20.0)) for seed in (0, 1))
    assert "too few" in concluded(a, b)["none"].text
    assert "the same at all 1,600 steps" in concluded(run(loss=losses()), run(loss=losses()))["none"].text
    c = run(loss=losses()[:20], steps=np.arange(5000.0, 5020.0))
    assert "no step in common" in concluded(a, c)["unknown"].text


ODD = {
    "zero": np.zeros(200),
    "nan": np.full(200, np.nan),
    "inf": np.full(200, np.inf),
    "largest": np.full(200, 1e308),
    "smallest": np.full(200, 1e-320),
    "negative": -np.ones(200),
    "both": np.random.default_rng(0).standard_normal(200),
    "tiny": np.random.default_rng(0).random(200) * 1e-300,
    "ends": np.append(np.ones(100), np.full(100, np.nan)),
    "one": np.ones(1),
}


@pytest.mark.parametrize("name", ODD)
def test_any_numbers_lead_to_a_conclusion(name: str) -> None:
    settings = {"batch_size": 0, "world_size": 10**400, "lr": [1]}
    for other in ODD.values():
        a = run(loss=ODD[name], steps=np.arange(len(ODD[name])) * 1.0)
        b = run(settings, loss=other, steps=np.arange(len(other)) * 1.0)
        assert conclude(a, b, differ(a, b))
