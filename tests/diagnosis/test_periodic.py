"""Data that come in turns make a loss that goes up and down with a fixed period: no damage, and said to be that."""

import numpy as np
import pytest
from tests.diagnosis.test_findings import Floats, falling, noise, run

from sealegs.diagnosis.curve.periodic import period_of
from sealegs.diagnosis.findings import look
from sealegs.diagnosis.rank import diagnose

WAYS = ("sine", "blocks", "ramps")


def turns(way: str, rows: int, period: float, height: float) -> Floats:
    """A loss that falls, times a shape that repeats itself."""
    phase = np.arange(rows) / period % 1
    shape = {"sine": np.sin(2 * np.pi * phase), "blocks": np.where(phase < 0.5, -1.0, 1.0), "ramps": 2 * phase - 1}[way]
    return np.asarray(falling(rows, size=0.01) * (1 + height * shape))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("height", [0.04, 0.1, 0.3])
@pytest.mark.parametrize(("rows", "period"), [(300, 20), (600, 60), (2000, 250.3), (4000, 1000), (20_000, 777)])
def test_a_loss_that_comes_in_turns_is_watched_at_most(way: str, height: float, rows: int, period: float) -> None:
    found = look(run(turns(way, rows, period, height)))
    is_hard_to_see = way == "ramps" and rows <= 4 * period  # three ramps and a half are like what wanders
    assert found.verdict in ("healthy", "watch") or is_hard_to_see, found.because
    assert any("goes up and down" in text for text in (found.because, *found.notices)) or is_hard_to_see
    if found.verdict == "watch" and not is_hard_to_see:
        said = diagnose(found, source="log", format="log")
        assert said.first_action.startswith("Leave the weights alone, and find out what comes in turns")
        assert said.hypotheses[0].cause in ("badly-shuffled-data", "unknown")


@pytest.mark.parametrize(("rows", "period"), [(300, 20.0), (2000, 250.3), (20_000, 777.0)])
def test_the_period_is_told_in_rows_whatever_it_is(rows: int, period: float) -> None:
    found = period_of(np.log(turns("sine", rows, period, 0.1))[rows // 10 :])
    assert found is not None
    assert found.rows == pytest.approx(period, rel=0.01)
    assert found.height == pytest.approx(0.2, rel=0.1)


def test_what_wanders_or_falls_has_no_period() -> None:
    found = []
    for seed in range(60):
        rows = (100, 300, 1000, 3000)[seed % 4]
        wander = 0.005 * np.cumsum(noise("normal", rows, seed))
        found += [period_of(np.log(falling(rows, seed, "AR"))), period_of(np.log(falling(rows, seed)) + wander)]
        found.append(period_of(wander))
    assert sum(one is not None for one in found) <= 1


@pytest.mark.parametrize("damage", [1.6, 3.0, np.nan])
def test_damage_in_such_a_run_is_damage(damage: float) -> None:
    losses = turns("sine", 4000, 250, 0.1)
    losses[3500:] *= damage
    assert look(run(losses)).verdict == "act"


def test_a_learning_rate_with_that_period_is_named() -> None:
    rates = 3e-4 * (0.5 + 0.5 * np.cos(2 * np.pi * (np.arange(4000) % 500) / 500)) + 1e-6
    found = look(run(falling(4000, size=0.01) * (1 + 300 * rates), lr=rates))
    assert any("so does the learning rate" in text for text in (found.because, *found.notices))
