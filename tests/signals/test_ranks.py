"""What several ranks saw becomes one row. Real processes are in tests/ranks."""

import math

import pytest
import torch
from torch import Tensor

from sealegs.signals.ranks import (
    FIELDS,
    MERGED,
    NormsBefore,
    Ranks,
    Standing,
    _medians,
    checksum_of,
    contribution,
    merge,
)

SAME = torch.tensor([3, 4])


def ranks(
    losses: list[float],
    norms_before: list[float] | None,
    worst: list[float] | None = None,
    checksums: object = None,
    steps: list[int] | None = None,
) -> Tensor:
    """The rows of ranks with replicated gradients of norm 2."""
    world = len(losses)
    sums = checksums if isinstance(checksums, list) else [SAME] * world
    return torch.stack(
        [
            contribution(
                torch.tensor(losses[rank]),
                torch.tensor(4.0 / world),
                torch.tensor(worst[rank] if worst else 1.5),
                torch.tensor(rank + 10),
                torch.tensor(norms_before[rank]) if norms_before else None,
                7 if steps is None else steps[rank],
                sums[rank],
            )
            for rank in range(world)
        ]
    )


def merged(rows: Tensor) -> dict[str, float]:
    assert rows.shape[1] == len(FIELDS)
    return dict(zip(MERGED, merge(rows).tolist(), strict=True))


def test_losses_are_averaged_and_squares_added() -> None:
    row = merged(ranks([1.0, 2.0, 6.0], [2.0, 2.1, 1.9]))
    assert row["loss"] == 3.0
    assert row["grad_norm"] == pytest.approx(2.0)
    assert row["ranks_differ"] == 0


def test_the_largest_norm_before_the_mixing_is_the_culprit() -> None:
    row = merged(ranks([1.0] * 4, [2.0, 2.1, 900.0, 1.9], worst=[1.0, 1.0, 1.0, 7.0]))
    assert row["culprit_rank"] == 2
    assert row["culprit_excess"] == pytest.approx(900.0 / 2.0, rel=0.1)
    assert row["worst_tensor"] == 13


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_what_is_not_finite_is_the_culprit(broken: float) -> None:
    by_norm = merged(ranks([1.0] * 3, [2.0, broken, 900.0]))
    assert (by_norm["culprit_rank"], by_norm["culprit_excess"]) == (1, math.inf)
    by_loss = merged(ranks([1.0, 1.0, broken], [900.0, 2.0, 2.0]))
    assert (by_loss["culprit_rank"], by_loss["culprit_excess"]) == (2, math.inf)
    assert not math.isfinite(by_loss["loss"])


def test_nobody_is_named_where_norms_are_unknown() -> None:
    assert merged(ranks([1.0, 1.0], None))["culprit_excess"] == 0.0
    assert merged(ranks([1.0, math.nan], None))["culprit_rank"] == 1


def test_the_minority_holds_the_wrong_weights() -> None:
    odd = torch.tensor([3, 5])
    row = merged(ranks([1.0] * 4, None, checksums=[SAME, SAME, odd, SAME]))
    assert (row["ranks_differ"], row["differing_rank"]) == (1, 2)
    row = merged(ranks([1.0] * 4, None, checksums=[odd, SAME, SAME, SAME]))
    assert (row["ranks_differ"], row["differing_rank"]) == (1, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_any_flipped_bit_changes_the_checksum(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weights = [torch.randn(7, 5).to(dtype), torch.randn(11).to(dtype)]
    cpu = torch.device("cpu")
    before = checksum_of(weights, cpu).tolist()
    assert checksum_of([w.clone() for w in weights], cpu).tolist() == before
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[weights[0].element_size()]
    for bit in range(8 * weights[0].element_size() - 1):
        flipped = weights[0].clone()
        flipped.view(bits)[3, 2] ^= 1 << bit
        assert checksum_of([flipped, weights[1]], cpu).tolist() != before
    swapped = [weights[0].flip(0), weights[1]]
    assert checksum_of(swapped, cpu).tolist() == before, "a sum: the order within a tensor does not count"
    assert all(abs(half) < 2**53 for half in before), "float64 holds the halves exactly"


def test_ranks_at_different_steps_are_noticed() -> None:
    assert merged(ranks([1.0] * 3, None, steps=[7, 7, 7]))["steps_apart"] == 0
    assert merged(ranks([1.0] * 3, None, steps=[7, 9, 7]))["steps_apart"] == 2


def test_one_process_is_a_world_of_its_own() -> None:
    alone = Ranks()
    assert (alone.world, alone.rank) == (1, 0)
    assert alone.gather(torch.arange(3.0), step=0).tolist() == [[0.0, 1.0, 2.0]]
    assert NormsBefore(torch.nn.Linear(2, 2)).attached_to is None


def test_what_is_not_finite_on_several_ranks_is_the_doing_of_none() -> None:
    """As where the weights are not finite, or one rank's numbers have gone through all."""
    assert merged(ranks([math.nan] * 4, [math.nan] * 4))["culprit_excess"] == 0.0
    assert merged(ranks([1.0] * 4, [math.inf, 2.0, math.nan, 2.0]))["culprit_excess"] == 0.0
    one = merged(ranks([1.0, math.nan, 1.0, 1.0], [math.nan] * 4))
    assert (one["culprit_rank"], one["culprit_excess"]) == (1, math.inf), "whose loss it is, is where it began"


def standing(rows: Tensor, peers: tuple[int, ...], twins: tuple[int, ...]) -> dict[str, float]:
    groups = Standing.of(peers, twins, rows.device)
    return dict(zip(MERGED, merge(rows, groups).tolist(), strict=True))


def test_norms_are_compared_among_the_ranks_of_one_mean() -> None:
    """Two stages of a pipeline, two ranks each: the gradients of the second are always a hundred times larger."""
    peers = (0, 0, 2, 2)
    assert standing(ranks([1.0] * 4, [1.0, 1.1, 100.0, 110.0]), peers, peers)["culprit_excess"] < 1.2
    row = standing(ranks([1.0] * 4, [1.0, 50.0, 100.0, 110.0]), peers, peers)
    assert (row["culprit_rank"], row["culprit_excess"]) == (1, 50.0)
    through_all = standing(ranks([1.0] * 4, [1.0, 50.0, 100.0, 5000.0]), peers, peers)
    assert through_all["culprit_excess"] == 0.0, "it may have begun in either stage"


def test_medians_of_groups_are_those_of_torch() -> None:
    torch.manual_seed(0)
    values, groups = torch.rand(64, dtype=torch.float64), torch.randint(0, 5, (64,))
    firsts = torch.stack([(groups == group).int().argmax() for group in groups])
    expected = torch.stack([values[groups == group].median() for group in groups])
    assert torch.equal(_medians(values, firsts), expected)


def test_a_rank_without_a_loss_takes_that_of_the_others() -> None:
    rows = ranks([1.0, 2.0, 6.0], None)
    rows[0] = contribution(None, *(torch.tensor(1.0),) * 3, None, 7, SAME)
    row = merged(rows)
    assert (row["loss"], row["losses"]) == (4.0, 2)
    assert math.isnan(merged(rows[:1])["loss"]), "nobody has one, which is refused"


def test_weights_are_compared_among_the_ranks_that_hold_the_same() -> None:
    odd, other = torch.tensor([3, 5]), torch.tensor([9, 9])
    twins = (0, 0, 0, 3, 3, 3)
    row = standing(ranks([1.0] * 6, None, checksums=[SAME] * 3 + [other] * 3), (0,) * 6, twins)
    assert row["ranks_differ"] == 0
    row = standing(ranks([1.0] * 6, None, checksums=[SAME] * 3 + [other, odd, other]), (0,) * 6, twins)
    assert (row["ranks_differ"], row["differing_rank"]) == (1, 4)
    row = standing(ranks([1.0] * 6, None, checksums=[SAME] * 3 + [odd, other, other]), (0,) * 6, twins)
    assert (row["ranks_differ"], row["differing_rank"]) == (1, 3)
