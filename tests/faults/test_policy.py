"""Samplers, rewards and losses in, ones that have gone wrong out."""

import pytest
import torch
from torch import nn

from sealegs.errors import ConfigError
from sealegs.faults.injector import inject
from sealegs.faults.policy import PolicyFaults
from sealegs.faults.spec import parse

ANSWERS = torch.tensor([[1, 1, 1, 9], [1, 2, 9, 0]])
COUNTS = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 0.0]])
REWARDS = torch.tensor([0.5, 1.0])


def broken(fault: str, step: int = 3) -> tuple[PolicyFaults, list[str]]:
    lines: list[str] = []
    return PolicyFaults([parse(fault), parse("nan-gradient@1")], clock=lambda: step, say=lines.append), lines


def rewards(fault: str, step: int = 3) -> list[float]:
    given: list[float] = broken(fault, step)[0].rewards(REWARDS, ANSWERS, COUNTS).tolist()
    return given


def test_rewards_are_replaced_or_paid_for_something_else() -> None:
    assert rewards("constant-reward:value=0.25@3") == [0.25, 0.25]
    assert rewards("hacked-reward:weight=2@3") == [2.5, 2.5]  # four tokens of four, three of four
    assert rewards("hacked-reward:weight=2,pays=repetition@3") == [1.5, 1.0]
    assert rewards("hacked-reward:steps=2@1") == [0.5, 1.0]  # over at step 3


def test_an_entropy_bonus_changes_its_sign() -> None:
    faults, lines = broken("entropy-penalty:weight=0.5@3")
    assert [faults.entropy_weight(0.1), faults.entropy_weight(0.1)] == [-0.4, -0.4]
    assert lines == ["step 3: entropy-penalty:weight=0.5@3 took 0.5 off the factor on the entropy"]
    assert not faults.pending()


def test_a_samplers_weights_are_off_by_a_share_of_their_size_and_the_loops_chance_is_not() -> None:
    torch.manual_seed(0)
    sampler = nn.Linear(100, 100)
    before, chance = sampler.weight.detach().clone(), torch.get_rng_state()
    broken("noisy-sampler:noise=0.1@3")[0].disturb_sampler(sampler)
    noise = sampler.weight.detach() - before
    assert float(noise.square().mean() / before.square().mean()) == pytest.approx(0.01, rel=0.1)
    assert torch.equal(torch.get_rng_state(), chance)


def test_a_placebo_changes_nothing_and_is_reported() -> None:
    for fault in ("constant-reward:placebo=yes@3", "hacked-reward:placebo=yes@3"):
        assert rewards(fault) == REWARDS.tolist()
    faults, lines = broken("noisy-sampler:placebo=yes@3")
    sampler = nn.Linear(3, 3)
    before = sampler.weight.detach().clone()
    faults.disturb_sampler(sampler)
    assert torch.equal(sampler.weight, before)
    assert lines == ["step 3: noisy-sampler:placebo=yes@3 a placebo, nothing changed"]
    assert broken("entropy-penalty:placebo=yes@3")[0].entropy_weight(0.1) == 0.1


def test_what_never_came_is_pending_and_a_hook_cannot_strike_it() -> None:
    faults, lines = broken("constant-reward@9")
    assert faults.rewards(REWARDS, ANSWERS, COUNTS) is REWARDS
    assert [str(fault) for fault in faults.pending()] == ["constant-reward@9"]
    assert not lines
    with pytest.raises(ConfigError, match="those of a policy-gradient loop to"):
        inject([parse("constant-reward@9")], nn.Linear(1, 1), clock=lambda: 0)


@pytest.mark.parametrize("fault", ["hacked-reward:weight=0@1", "noisy-sampler:noise=-1@1", "hacked-reward:pays=me@1"])
def test_what_would_do_nothing_is_refused(fault: str) -> None:
    with pytest.raises(ConfigError, match=r"(weight|noise|pays)="):
        parse(fault)
