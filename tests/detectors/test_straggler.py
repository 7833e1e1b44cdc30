"""A rank that is slower than the others."""

import pytest

from sealegs.detectors.straggler import SURE, Straggler
from sealegs.errors import ConfigError
from sealegs.vocabulary import Severity


def told(checks: list[tuple[int, float, float]]) -> dict[int, str]:
    detector, out = Straggler(), {}
    state = detector.init()
    for step, (rank, by, surprise) in enumerate(checks):
        row = {"step": step, "slowest_rank": float(rank), "slowest_by": by, "slowest_surprise": surprise}
        if finding := detector.look(state, row):
            assert (finding.severity, finding.spoils_update) == (Severity.WATCH, False)
            out[step] = finding.note
        state = detector.learn(state, row)
        state = detector.learn(state, {"step": step})  # most rows have nothing of it
    return out


def test_a_slow_rank_is_told_once() -> None:
    assert told([(1, 0.02, 1.0), (3, 0.21, 9.0), (3, 0.2, 9.0), (3, 0.08, 4.0), (3, 0.2, 9.0)]) == {
        1: "rank 3 takes 21% longer than the others, over 50 steps"
    }


def test_another_one_and_one_that_was_well_meanwhile_are_told() -> None:
    assert list(told([(3, 0.2, 9.0), (4, 0.3, 9.0), (4, 0.01, 1.0), (4, 0.3, 9.0)])) == [0, 1, 3]


def test_noise_is_not_told() -> None:
    assert told([(3, 0.4, SURE - 0.1), (3, 0.09, 50.0), (3, -0.1, 50.0)]) == {}


def test_a_share_is_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"Straggler.slow=0: how much longer"):
        Straggler(slow=0)
