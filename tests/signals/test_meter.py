"""What several ranks measured becomes one row. Real processes are in tests/ranks."""

import math

import pytest
import torch

from sealegs.errors import ConfigError
from sealegs.signals.meter import ABSENT, _agreed, _largest, _mean, _present


def test_ranks_at_different_steps_are_refused_before_anything_else_is_read() -> None:
    names = ("culprit_rank", "steps_apart", "ranks_differ")
    assert _agreed(7, names, [1.0, 0.0, 2.0]) == {"culprit_rank": 1.0, "ranks_differ": 2.0}
    with pytest.raises(ConfigError, match="step 7: the guards of the ranks are 3 steps apart"):
        _agreed(7, names, [1.0, 3.0, 2.0])


def test_a_layer_that_one_rank_dropped_is_known_from_the_others() -> None:
    rows = torch.tensor([[2.0, ABSENT, ABSENT, 1.0], [4.0, 6.0, ABSENT, math.nan]])
    assert _mean(rows).tolist()[:3] == [3.0, 6.0, ABSENT]
    assert math.isnan(_mean(rows)[3]), "NaN is seen"
    assert _largest(rows).tolist()[:3] == [4.0, 6.0, ABSENT]
    assert list(_present(("a", "b", "c", "d"), _mean(rows).tolist())) == ["a", "b", "d"]
