"""A model in training and Faults in, gradients as mistakes in a loop's code leave them out."""

from typing import Any

import pytest
import torch
from tests.faults.loops import Loop, adam, loss_of, net, same
from tests.faults.two_ranks import MICRO_BATCHES, RANKS, SKIPPED, STEPS, UNCLEARED, seed_of
from torch import Tensor, nn
from torch.optim import SGD

from sealegs.errors import ConfigError
from sealegs.faults.injector import inject
from sealegs.faults.spec import parse

Run = dict[str, Any]
one_launch = pytest.mark.xdist_group("ranks")


# Gradients that nobody clears.


@pytest.mark.parametrize("options", [{}, {"clip": 0.1}, {"micro_batches": 3}], ids=str)
def test_it_is_as_if_zero_grad_had_not_been_called(options: dict[str, Any]) -> None:
    fault = "missing-zero-grad:steps=3@4"
    struck, by_hand = Loop([fault], **options), Loop(uncleared=(3, 4, 5), **options)
    for until in range(1, 10):
        assert same(struck.run(until).weights(), by_hand.run(until).weights()), until
    assert not same(struck.weights(), Loop(**options).run(9).weights())
    assert struck.lines() == [
        f"step {step}: {fault} struck the gradient of *: sum of {of} steps" for step, of in ((4, 2), (5, 3), (6, 4))
    ]
    assert not struck.injector.pending()


def test_gradients_may_be_cleared_at_any_time_before_the_backward_pass() -> None:
    model = nn.Linear(4, 1)
    optimizer = SGD(model.parameters(), lr=0.0)
    seen = []
    step = 0
    with inject([parse("missing-zero-grad:steps=2@1")], model, optimizers=optimizer, clock=lambda: step):
        for step in range(4):
            loss = model(torch.full((1, 4), float(10**step))).sum()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            loss.backward()
            optimizer.step()
            assert model.weight.grad is not None
            seen.append(model.weight.grad[0, 0].item())
    assert seen == [1, 11, 111, 1000]


def test_after_a_step_that_was_not_updated_for_or_a_rollback_nothing_is_left() -> None:
    loop = Loop(["missing-zero-grad:steps=3@4"]).run(8, skip=[4])
    assert [(strike.step, strike.after) for strike in loop.injector.strikes] == [(4, 2), (6, 2)]
    loop = Loop(["missing-zero-grad:steps=3@4"]).run(6)
    loop.step = 3
    loop.run(9)
    assert [(strike.step, strike.after) for strike in loop.injector.strikes] == [(4, 2), (5, 3), (6, 2)]
    loop = Loop(["missing-zero-grad:steps=3@4"]).run(6, skip=[3])
    loop.step = 4  # which was spared, and does not get what step 5 has left
    loop.run(9)
    assert [(strike.step, strike.after) for strike in loop.injector.strikes] == [(5, 2), (6, 2)]


def test_what_has_no_gradient_or_is_frozen_is_left_alone() -> None:
    model = net()
    model[0].requires_grad_(False)
    model.register_module("unused", nn.Linear(2, 2))
    model.forward = lambda x: model[2](model[1](model[0](x)))  # type: ignore[method-assign]
    optimizer = adam(model)
    step = 0
    with inject([parse("missing-zero-grad:steps=1@1")], model, optimizers=optimizer, clock=lambda: step) as injector:
        for step in range(2):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(injector.strikes) == 1
    assert not injector.pending()


@one_launch
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_on_two_ranks_it_is_as_if_zero_grad_had_not_been_called(two_ranks: list[Run], how: str) -> None:
    for rank in two_ranks:
        clean, struck, by_hand = (rank[f"{how}{which}"] for which in ("", " uncleared", " uncleared by hand"))
        for step in range(STEPS + 1):
            for one, other in zip(struck["weights"][step], by_hand["weights"][step], strict=True):
                # DDP divides what was left together with the rest, and FSDP2 adds it after that
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
            assert same(struck["weights"][step], clean["weights"][step]) == (step <= 2)
        assert struck["strikes"] == [
            f"step {step}: {UNCLEARED} struck the gradient of *: sum of {step} steps" for step in (2, 3)
        ]


# Gradients that one rank keeps for itself.


def gradients_of(weights: list[Tensor], step: int, rank: int) -> list[Tensor]:
    """What a rank's own data say."""
    model = net()
    with torch.no_grad():
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.copy_(weight)
    for micro_batch in range(MICRO_BATCHES):
        loss_of(model, seed_of(step, micro_batch, rank)).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@one_launch
@pytest.mark.parametrize("run", ["ddp skipped", "ddp skipped views", "ddp skipped reduced twice"])
def test_one_rank_uses_its_own_gradients_and_the_others_the_mean(two_ranks: list[Run], run: str) -> None:
    first, second = (rank[run] for rank in two_ranks)
    for step in range(STEPS):
        own = [gradients_of(two_ranks[rank][run]["weights"][step], step, rank) for rank in range(RANKS)]
        mean = [(one + other) / 2 for one, other in zip(*own, strict=True)]
        for seen, wanted in zip(first["gradients"][step], mean, strict=True):
            torch.testing.assert_close(seen, wanted)
        for seen, wanted in zip(second["gradients"][step], own[1] if step in (2, 3) else mean, strict=True):
            torch.testing.assert_close(seen, wanted)
        assert same(first["weights"][step], second["weights"][step]) == (step <= 2), step  # they drift apart
    assert not first["strikes"]
    assert second["strikes"] == [
        f"step {step}: {SKIPPED} struck the gradient of *: mean of 2 ranks became that of 1" for step in (2, 3)
    ]


@one_launch
def test_without_ddp_there_is_no_mean_to_leave_out(two_ranks: list[Run]) -> None:
    sentence = "no DistributedDataParallel reduces the gradients; give inject a model inside one"
    assert [rank["refusal"] for rank in two_ranks] == [f"{SKIPPED}: {sentence}"] * RANKS
    model = net()
    for rank in (0, 1):
        with pytest.raises(ConfigError, match="this run has one rank, and reduces nothing; start it with two or more"):
            inject([parse(f"skipped-all-reduce:rank={rank}@2")], model, optimizers=adam(model), clock=lambda: 0)


# Other faults of updates, where what is updated is a shard.


@one_launch
def test_shards_are_rounded_and_their_moments_stand_still(two_ranks: list[Run]) -> None:
    for number, rank in enumerate(two_ranks):
        clean, rounded, frozen = (rank[name] for name in ("fsdp", "fsdp precision", "fsdp moments"))
        assert same(clean["weights"][2], rounded["weights"][2])
        for step in range(STEPS + 1):
            weights = rounded["weights"][step]
            assert same(weights, [weight.bfloat16().float() for weight in weights]) == (step in (3, 4, 5))
        assert sum("scaler-off" in line for line in rounded["strikes"]) == 3
        for line in ("fp16-overflow:factor=1000000,rank=1@5 struck the output of 2: ", "activation-scale:"):
            said = rounded["strikes"] + rank["fsdp outputs"]["strikes"]
            assert sum(line in each for each in said) == number  # on rank 1 alone, but both get its gradients
        assert not all(gradient.isfinite().all() for gradient in rounded["gradients"][5])
        changed = [same(*both) for both in zip(rank["fsdp outputs"]["gradients"], clean["gradients"], strict=True)]
        assert changed == [True] * 5 + [False]
        assert sum("frozen-moment2" in line for line in frozen["strikes"]) == STEPS - 2
        assert sum("wrong-betas" in line for line in frozen["strikes"]) == STEPS - 2
        assert not same(frozen["moments"], clean["moments"])
    assert same(two_ranks[0]["fsdp moments"]["moments"], two_ranks[1]["fsdp moments"]["moments"])
