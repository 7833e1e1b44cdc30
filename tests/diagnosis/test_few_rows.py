"""A few rows of noise are no rise and no fall; a few that have changed for good are."""

import numpy as np
import pytest
from tests.diagnosis.test_findings import Floats, noise, run

from sealegs.diagnosis.findings import look
from sealegs.diagnosis.rank import diagnose


@pytest.mark.parametrize("rows", [8, 10, 12, 16, 24, 40])
@pytest.mark.parametrize("size", [0.1, 0.3, 0.6])
def test_a_few_level_rows_ask_for_nothing(rows: int, size: float) -> None:
    said = [look(run(2 * np.exp(size * noise("normal", rows, seed)))).verdict for seed in range(12)]
    assert "act" not in said
    assert rows >= 24 or said.count("healthy") == 0, "an order by chance is no fall"


@pytest.mark.parametrize("rows", [14, 18, 24, 40])
def test_a_few_rows_that_have_doubled_for_good_ask_for_an_action(rows: int) -> None:
    for seed in range(6):
        losses: Floats = np.geomspace(3, 3 * 0.97**rows, rows) * np.exp(0.05 * noise("normal", rows, seed))
        losses[-rows // 3 :] *= 2.5
        assert look(run(losses)).verdict == "act"
        losses[-rows // 3 :] *= np.linspace(1, 3, len(losses[-rows // 3 :]))
        assert look(run(losses)).verdict == "act"


def test_eight_rows_that_fall_one_after_the_other_are_healthy() -> None:
    assert look(run(np.geomspace(6, 2, 8))).verdict == "healthy"
    assert look(run(np.array([2.0, 2.3, 2.2, 1.7, 2.4, 2.1, 1.6, 1.9]))).verdict == "unknown"


def test_leaps_that_are_soon_over_and_come_again_are_no_damage_that_lasts() -> None:
    for seed in range(4):
        losses: Floats = np.geomspace(4, 2, 120) * np.exp(0.02 * noise("normal", 120, seed))
        losses[40:64] *= 3  # more than a tenth of the log, and back within fifty steps
        losses[-9:-4] *= 4
        found = look(run(losses))
        assert (found.incidents[0].kind, found.incidents[0].trajectory) == ("level_shift", "fast")
        assert found.verdict == "watch"


def test_a_metric_that_may_be_wrong_does_not_make_weights_sound_whose_loss_has_leapt_for_good() -> None:
    losses: Floats = np.geomspace(3, 2, 300) * np.exp(0.03 * noise("normal", 300, 1))
    losses[230:] *= 3
    found = diagnose(look(run(np.round(losses, 1))), source="log", format="log")
    assert (found.findings.verdict, found.hypotheses[0].cause) == ("act", "metric-wrong")
    assert found.hypotheses[0].grade == "hypothesis"
    assert found.first_action.startswith("Reload the last checkpoint before step 230, then find out")
