"""Who is slow, of the own times of ranks. Real processes are in tests/ranks/test_ranks.py."""

import math
import time

import pytest
import torch
from torch import Tensor

from sealegs.detectors.straggler import SURE
from sealegs.signals.own_time import CHECK_STEPS, FEWEST, SLOW, WINDOW, OwnTime, OwnTimes, slowest

CPU = torch.device("cpu")


def times(world: int, noise: float, seed: int = 0) -> Tensor:
    """Steps of which some are long for all, and each rank's own noise."""
    generator = torch.Generator().manual_seed(seed)
    common = (0.3 * torch.randn(WINDOW, 1, generator=generator, dtype=torch.float64)).exp()
    return common * (noise * torch.randn(WINDOW, world, generator=generator, dtype=torch.float64)).exp()


def found(window: Tensor, peers: tuple[int, ...] | None = None) -> tuple[int, float, float]:
    rank, by, surprise = slowest(window, peers or (0,) * window.shape[1]).tolist()
    return int(rank), by, surprise


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.06])
def test_a_rank_that_is_a_fifth_slower_is_named_after_fifty_steps(noise: float) -> None:
    for seed in range(20):
        window = times(8, noise, seed)
        window[:, 5] *= 1.2
        rank, by, surprise = found(window)
        assert rank == 5
        assert by == pytest.approx(0.2, abs=0.06)
        assert surprise > SURE


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1, 0.5])
def test_noise_is_no_slow_rank(noise: float) -> None:
    """Not one of 40 windows; bench/stragglers.py counts a hundred thousand."""
    assert not [
        seed
        for seed in range(40)
        if found(times(64, noise, seed))[2] >= SURE and found(times(64, noise, seed))[1] >= SLOW
    ]


def test_some_long_steps_of_a_rank_are_not_enough() -> None:
    window = times(8, 0.02)
    window[:20, 3] *= 5
    assert found(window)[1] < SLOW


def test_ranks_are_compared_with_their_peers() -> None:
    window = times(8, 0.02)
    window[:, 4:] *= 3  # the second stage of a pipeline has more to do
    assert found(window, (0,) * 4 + (4,) * 4)[1] < SLOW
    window[:, 1] *= 1.3
    assert found(window, (0,) * 4 + (4,) * 4)[0] == 1


def test_steps_without_a_time_do_not_count() -> None:
    window = times(4, 0.02)
    window[:, 2] *= 1.5
    window[: WINDOW - FEWEST, 2] = math.nan
    assert found(window)[0] == 2
    window[: WINDOW - FEWEST + 1, 2] = math.nan
    assert found(window)[1] < SLOW
    assert math.isnan(found(torch.full((WINDOW, 4), math.nan, dtype=torch.float64))[1])


def test_windows_overlap_by_half() -> None:
    kept = OwnTimes((0,) * 4, CPU)
    due = []
    for step in range(WINDOW + 2 * CHECK_STEPS):
        kept.add(torch.tensor([1.0, 1.0, 1.3, -1.0], dtype=torch.float64))
        due += [step + 1] if kept.is_due else []
    assert due == [WINDOW, WINDOW + CHECK_STEPS, WINDOW + 2 * CHECK_STEPS]
    rank, by, surprise = kept.slowest().tolist()
    assert (rank, by) == (2, pytest.approx(0.3))
    assert surprise > SURE


def test_the_time_ends_with_the_last_gradients_and_not_with_the_wait() -> None:
    own = OwnTime(CPU)
    assert math.isnan(own.seconds()), "nothing was done"
    began = time.perf_counter()
    own.begin()
    time.sleep(0.02)
    own.ready()
    until_ready = time.perf_counter() - began
    time.sleep(0.2)  # for the others
    assert 0.02 <= own.seconds() <= until_ready
    assert math.isnan(own.seconds()), "no gradients have followed"
    own.begin()
    own.ready()
    own.forget()
    assert math.isnan(own.seconds()), "a checkpoint was written"
