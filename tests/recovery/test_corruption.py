"""Who has computed wrongly, of answers that are apart. Real processes are in tests/ranks/test_recomputed.py."""

from itertools import combinations
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import sealegs
from sealegs.errors import ConfigError
from sealegs.integrations.loop_options import guard_options
from sealegs.recovery.corruption import (
    BEYOND,
    MEASURED,
    Answer,
    Bound,
    Wrong,
    disputed,
    ranks_of,
    who_is_wrong,
)
from sealegs.signals.gradient_digest import Digest, GradientDigests, difference

EXACT = Bound(is_exact=True)
Apart = dict[tuple[Answer, Answer], float]


def apart(answers: dict[Answer, int]) -> Apart:
    """Answers are the same where their numbers are."""
    return {(one, other): float(answers[one] != answers[other]) for one, other in combinations(answers, 2)}


def judged(world: int, is_wrong: set[tuple[int, str]]) -> Wrong | None:
    """Each rank gives the right answer, but for what is in ``is_wrong``: a rank, and in which pass."""
    owners, of_each = [], {}
    for owner in range(world):
        given = {name: int((rank, name) in is_wrong) * (1 + rank) for name, rank in ranks_of(owner, world).items()}
        if given["own"] != given["next"]:
            owners.append(owner)
            of_each[owner] = apart(given)
    return who_is_wrong(owners, world, of_each, EXACT)


@pytest.mark.parametrize("world", [3, 4, 9])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_third_rank_says_who_was_wrong(world: int, rank: int) -> None:
    assert judged(world, {(rank, "own")}) == Wrong((rank,), is_lasting=False)
    assert judged(world, {(rank, "next")}) == Wrong((rank,), is_lasting=False)
    assert judged(world, {(rank, "own"), (rank, "again")}) == Wrong((rank,), is_lasting=True)
    always = {(rank, name) for name in ("own", "next", "third", "again")}
    assert judged(world, always) == Wrong((rank,), is_lasting=True)


def test_of_two_ranks_a_fault_that_lasts_names_the_pair() -> None:
    assert judged(2, {(1, "own")}) == Wrong((1,))
    assert judged(2, {(1, "next")}) == Wrong((1,))
    found = judged(2, {(1, name) for name in ("own", "next", "third", "again")})
    assert found == Wrong((0, 1), is_lasting=True)


def test_what_no_single_rank_explains_names_nobody() -> None:
    assert judged(6, {(0, "own"), (3, "own")}) is None
    assert judged(4, {(rank, "own") for rank in range(4)}) is None


def test_a_bound_is_known_after_so_many_distances_and_learns_nothing_of_what_is_unlike() -> None:
    bound = Bound(is_exact=False, smallest=1e-7).with_measured([1e-6, 2e-6])
    assert not bound.is_known
    assert disputed([1.0, 1e-6], bound) == ()
    for _ in range(MEASURED // 2 - 1):
        bound = bound.with_measured([1e-6, 0.7, float("nan")])
    assert not bound.is_known
    bound = (
        bound.with_measured([1e-6] * 3).with_measured([1e-6] * 3).with_measured([1e-6] * 3).with_measured([1e-6] * 3)
    )
    bound = bound.with_measured([1e-6] * 3)
    assert bound.is_known
    limit = BEYOND * 2e-6
    assert disputed([limit, 1.01 * limit, float("inf")], bound) == (1, 2)
    assert disputed([limit, float("nan")], bound) == (1,)
    fresh = Bound(is_exact=False, smallest=1e-7)
    assert fresh.from_plain(bound.to_plain(2), 3) == bound
    assert fresh.from_plain(bound.to_plain(2), 8) == fresh.from_plain({}, 2) == fresh


def test_batches_that_round_worse_are_compared_with_what_is_usual_among_ranks() -> None:
    bound = Bound(is_exact=False, smallest=1e-9)
    for number in range(MEASURED):
        bound = bound.with_measured([(1 + number) * 1e-6] * 4)
    assert disputed([1e-3] * 4, bound) == ()
    assert disputed([1e-6, 1e-6, 1e-4, 1e-4], bound) == (2, 3)


def digest_of(model: nn.Module, gradients: dict[str, Tensor], loss: float = 1.0) -> Digest:
    digests = GradientDigests(model)
    digests.arm()
    for name, parameter in model.named_parameters():
        digests.see(parameter, gradients[name])
    return digests.collect(torch.tensor(loss))


def test_a_single_bit_of_one_gradient_shows_and_is_named() -> None:
    model = nn.Linear(7, 5)
    torch.manual_seed(0)
    gradients = {name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}
    one = digest_of(model, gradients)
    assert difference(one, digest_of(model, gradients)).is_exact
    flipped = {name: gradient.clone() for name, gradient in gradients.items()}
    flipped["weight"].view(torch.int32)[2, 3] ^= 1
    found = difference(one, digest_of(model, flipped))
    assert (found.is_exact, found.tensors, found.of, found.worst, found.is_in_loss) == (False, 1, 2, "weight", False)
    assert 0 < found.distance < 1e-6
    flipped["weight"][2, 3] = float("nan")
    assert difference(one, digest_of(model, flipped)).distance == float("inf")
    nans = {name: torch.full_like(gradient, float("nan")) for name, gradient in gradients.items()}
    assert difference(digest_of(model, nans, float("nan")), digest_of(model, nans, float("nan"))).is_exact


def test_in_one_process_there_is_nobody_to_compute_anything_again(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    options = sealegs.Telemetry(recompute=True)
    with sealegs.Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), run=tmp_path / "run", telemetry=options):
        pass
    (told,) = [event for event in sealegs.open_run(tmp_path / "run").events if event.kind == "no-recompute"]
    assert told.detail["reason"] == "there is one rank, and none beside it to compute anything again"


def test_what_cannot_be_asked_for_is_refused() -> None:
    for wrong in (-1, 0.5, "often"):
        with pytest.raises(ConfigError, match=r"Telemetry.recompute=.*: True for every 500 steps, a number of steps"):
            sealegs.Telemetry(recompute=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a framework's loop counts each batch"):
        guard_options({"telemetry": sealegs.Telemetry(recompute=100)})
