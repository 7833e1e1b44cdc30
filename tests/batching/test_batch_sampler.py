"""Batches for a DataLoader in which rare tokens do not meet."""

from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

from sealegs.batching.batch_sampler import StratifiedBatchSampler
from sealegs.batching.stratified import RareRows, meetings
from sealegs.errors import ConfigError

ROWS = 103
RARE = RareRows(ROWS, np.arange(36), np.repeat(np.arange(4), 9))
"""Four rare tokens, each in nine rows that lie side by side."""


def sampler(batch_size: int = 8, **options: Any) -> StratifiedBatchSampler:
    return StratifiedBatchSampler(RARE, batch_size, **options)


def test_every_row_comes_once_an_epoch_and_no_token_twice_a_step() -> None:
    batches = list(sampler())
    assert len(batches) == len(sampler()) == 13
    assert sorted(row for batch in batches for row in batch) == list(range(ROWS))
    for batch in batches:
        held = [row // 9 for row in batch if row < 36]
        assert len(held) == len(set(held))
    shuffled_alone = [len(meetings(np.random.default_rng(seed).permutation(ROWS), RARE, 8).rows) for seed in range(9)]
    assert min(shuffled_alone) > 0, "else there was nothing to part"


def test_epochs_differ_and_come_again() -> None:
    subject = sampler()
    first, second = list(subject), list(subject)
    assert first != second
    subject.set_epoch(0)
    assert list(subject) == first
    assert list(sampler(seed=1)) != first


def test_leaving_an_epoch_begins_it_again() -> None:
    subject = sampler()
    batches = list(sampler())
    assert next(iter(subject)) == next(iter(subject)) == batches[0]


def test_the_next_epoch_may_be_named_in_the_middle_of_one() -> None:
    """As a guard does that goes through an epoch again, and leaves everything as the loop had it."""
    subject = sampler()
    first, second = list(sampler()), list(subject)
    subject.set_epoch(0)
    walk = iter(subject)
    assert next(walk) == first[0]
    subject.set_epoch(4)
    place = subject.state_dict()
    assert (place["epoch"], place["rows_done"]) == (0, 8)
    assert [next(walk), *walk] == first[1:] == second[1:]
    assert subject.state_dict()["epoch"] == 4
    subject.set_epoch(6)
    assert subject.state_dict()["epoch"] == 6
    resumed = sampler()
    resumed.load_state_dict(place)
    assert list(resumed) == first[1:]


@pytest.mark.parametrize(("world", "accumulation"), [(2, 1), (4, 1), (2, 2), (1, 4)])
def test_ranks_and_micro_batches_share_the_steps(world: int, accumulation: int) -> None:
    """Ordered by rank and micro-batch they are the steps of one rank with batches as large as a step."""
    ranks = [list(sampler(2, rank=rank, world_size=world, accumulation=accumulation)) for rank in range(world)]
    assert len({len(batches) for batches in ranks}) == 1
    sizes = [[len(batch) for batch in batches] for batches in ranks]
    assert all(each == sizes[0] for each in sizes)
    whole = list(sampler(2 * world * accumulation))
    in_order = [batch for batches in zip(*ranks, strict=True) for batch in batches]
    parts = world * accumulation
    steps = [list(chain(*in_order[at : at + parts])) for at in range(0, len(in_order), parts)]
    assert steps[:-1] == whole[: len(steps) - 1]
    assert set(steps[-1]) <= set(whole[-1])
    assert len(whole[-1]) - len(steps[-1]) < parts


def test_the_rest_can_be_dropped() -> None:
    batches = list(StratifiedBatchSampler(RARE, 8, drop_last=True))
    assert {len(batch) for batch in batches} == {8}
    assert len(batches) == 12


@pytest.mark.parametrize("place", [0, 1, 7, 13])
def test_a_place_is_gone_to_in_another_process_and_by_other_ranks(place: int) -> None:
    subject = sampler()
    expected = list(sampler())
    batches = iter(subject)
    for _ in range(place):
        next(batches)
    state = subject.state_dict()
    again = sampler()
    again.load_state_dict(state)
    assert list(again) == expected[place:]
    halves = [sampler(4, rank=rank, world_size=2) for rank in range(2)]
    for half in halves:
        half.load_state_dict(state)
    joined = [one + two for one, two in zip(*halves, strict=True)]
    assert joined[:-1] == expected[place:-1]
    assert not joined or set(joined[-1]) < set(expected[-1]), "of seven rows each has three"
    assert list(again) != expected, "the next epoch"


def test_another_order_is_refused() -> None:
    state = sampler().state_dict()
    for other, name in ((sampler(9), "step_rows=9"), (sampler(seed=2), "seed=2")):
        with pytest.raises(ConfigError, match=f"{name}: the place is in an order with"):
            other.load_state_dict(state)


def test_what_cannot_be_is_said() -> None:
    subject = StratifiedBatchSampler(RareRows(20, np.arange(9), np.zeros(9, np.int64)), 5)
    unmet = subject.unmet()
    assert sorted(unmet.rows.tolist()) == [2, 2, 2, 3]
    assert unmet.tokens.tolist() == [0] * 4
    assert len(sampler().unmet().rows) == 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"batch_size": 0}, "batch_size=0: at least 1"),
        ({"batch_size": 4, "rank": 2, "world_size": 2}, "rank=2: from 0 to world_size - 1, which is 1"),
        ({"batch_size": 200, "world_size": 200}, "103 rows are too few for a step of 40000"),
    ],
)
def test_bad_settings_are_one_sentence(options: dict[str, int], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        sampler(**options)


def test_rows_without_rare_tokens_land_everywhere_alike() -> None:
    """Chi squared over 400 seeds: places of one row, and how far apart two neighbours come to lie."""
    seeds = 400
    orders = np.array([StratifiedBatchSampler(RARE, 8, seed=seed).order() for seed in range(seeds)])
    places = np.argsort(orders, axis=1)
    for row in (36, 70, 102):
        counts = np.bincount(places[:, row] * 10 // ROWS, minlength=10)
        assert ((counts - seeds / 10) ** 2 / (seeds / 10)).sum() < 33.7, "p 1e-4 of 9 degrees of freedom"
    together = np.count_nonzero(places[:, 70] // 8 == places[:, 71] // 8)
    assert abs(together - seeds * 7 / 102) < 4 * np.sqrt(seeds * 7 / 102)


def dataset() -> TensorDataset:
    return TensorDataset(torch.arange(ROWS))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataloader_takes_it(workers: int) -> None:
    loader = DataLoader(dataset(), batch_sampler=sampler(), num_workers=workers)
    subject = sampler()
    for _ in range(2):
        assert [batch[0].tolist() for batch in loader] == list(subject)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_torchdata_brings_it_back(workers: int) -> None:
    """In the second epoch, with workers that have read ahead."""
    loader = StatefulDataLoader(dataset(), batch_sampler=sampler(), num_workers=workers)
    list(loader)
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    state = loader.state_dict()
    expected = [batch[0].tolist() for batch in batches]
    assert len(expected) == 9
    again = StatefulDataLoader(dataset(), batch_sampler=sampler(), num_workers=workers)
    again.load_state_dict(state)
    assert [batch[0].tolist() for batch in again] == expected
