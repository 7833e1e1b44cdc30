"""Faults in a policy-gradient loop: in its sampler, its rewards and its loss. The loop hands them over by itself.

    broken = PolicyFaults([parse("constant-reward@100")], clock=lambda: guard.number)
    broken.disturb_sampler(sampler)
    samples = ...
    rewards = broken.rewards(rewards, answers, counts)
    loss = ... - broken.entropy_weight(0.0) * entropy

No hook could strike these: a reward is a number that a loop has computed, of text that nothing but the loop has seen.
"""

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor, nn

from sealegs.faults.contract import Fault
from sealegs.faults.reward import ConstantReward, EntropyPenalty, HackedReward, NoisySampler, PolicyFault
from sealegs.faults.strikes import refuse_twice_or_nowhere
from sealegs.faults.targets import draw

T = TypeVar("T", bound=PolicyFault)


class PolicyFaults:
    """The faults of a policy-gradient loop, at their steps. Others among ``faults`` are left to ``inject``."""

    def __init__(
        self,
        faults: Iterable[Fault],
        *,
        clock: Callable[[], int],
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """``clock`` gives the number of the present step; ``say`` gets a line when a fault begins."""
        self._clock = clock
        self._say = say
        self._faults: list[PolicyFault] = []
        self._begun: set[PolicyFault] = set()
        for fault in faults:
            if isinstance(fault, PolicyFault):
                refuse_twice_or_nowhere(fault, self._faults, None)
                self._faults.append(fault)

    def pending(self) -> tuple[PolicyFault, ...]:
        """Faults that have not struck."""
        return tuple(fault for fault in self._faults if fault not in self._begun)

    @torch.no_grad()
    def disturb_sampler(self, sampler: nn.Module) -> None:
        """Strike the weights that the next answers are sampled with, after they have been brought up to date."""
        for fault in self._due(NoisySampler):
            self._report(fault, f"put noise of {fault.noise:g} of their size into the sampler's weights")
            for place, weight in enumerate(sampler.parameters()):
                noise = fault.noise * weight.square().mean().sqrt() * _noise(weight, fault.seed, self._clock(), place)
                weight.copy_(_result(fault, weight, weight + noise))

    def rewards(self, rewards: Tensor, answers: Tensor, counts: Tensor) -> Tensor:
        """The rewards of answers, one each; ``counts`` is 1 for each token of them."""
        for fault in self._due(ConstantReward):
            self._report(fault, f"made every reward {fault.value:g}")
            rewards = _result(fault, rewards, torch.full_like(rewards, fault.value))
        for hack in self._due(HackedReward):
            self._report(hack, f"paid {hack.weight:g} for {hack.pays}")
            if hack.pays == "length":
                paid = counts.mean(1)
            else:
                paid = ((answers[:, 1:] == answers[:, :-1]) * counts[:, 1:]).sum(1) / counts.sum(1)
            rewards = _result(hack, rewards, rewards + hack.weight * paid)
        return rewards

    def entropy_weight(self, weight: float) -> float:
        """The factor on the entropy that a loss subtracts."""
        for fault in self._due(EntropyPenalty):
            self._report(fault, f"took {fault.weight:g} off the factor on the entropy")
            weight = weight if fault.is_placebo else weight - fault.weight
        return weight

    def _due(self, kind: type[T]) -> list[T]:
        return [fault for fault in self._faults if isinstance(fault, kind) and fault.is_at(self._clock())]

    def _report(self, fault: PolicyFault, deed: str) -> None:
        if fault not in self._begun:
            self._begun.add(fault)
            deed = "a placebo, nothing changed" if fault.is_placebo else deed
            self._say(f"step {self._clock()}: {fault} {deed}")


def _result(fault: PolicyFault, healthy: Tensor, struck: Tensor) -> Tensor:
    return healthy if fault.is_placebo else struck


def _noise(like: Tensor, *key: int) -> Tensor:
    """Noise that depends on the key alone, and leaves the loop's own random numbers as they were."""
    generator = torch.Generator(like.device).manual_seed(draw(2**63, *key))
    return torch.randn(like.shape, generator=generator, device=like.device, dtype=like.dtype)
