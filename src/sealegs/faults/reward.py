"""The faults that strike a policy-gradient loop, by its step: their options. ``policy.py`` applies them."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from sealegs.errors import ConfigError
from sealegs.faults.contract import Fault, refuse_unless_choice, refuse_unless_count, refuse_unless_number


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFault(Fault):
    """Strikes the sampler, the rewards or the loss of a policy-gradient loop."""

    steps: int = 1000
    """Number of consecutive steps."""

    def __post_init__(self) -> None:
        Fault.__post_init__(self)
        refuse_unless_count(self, "steps", 1)

    def is_at(self, step: int) -> bool:
        """Whether it strikes at a step."""
        return self.step <= step < self.step + self.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyPenalty(PolicyFault):
    """The loss has a term that lowers the policy's entropy: a bonus with the wrong sign."""

    name: ClassVar[str] = "entropy-penalty"

    weight: float = 8.0
    """Its factor, above 0. Rewards that are learned from pull the other way, so a small one only hurries."""

    def __post_init__(self) -> None:
        PolicyFault.__post_init__(self)
        refuse_unless_above_0(self, "weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantReward(PolicyFault):
    """The reward function gives the same to every answer: a check that fails, or passes, whatever it gets."""

    name: ClassVar[str] = "constant-reward"

    value: float = 0.0
    """That reward."""

    def __post_init__(self) -> None:
        PolicyFault.__post_init__(self)
        refuse_unless_number(self, "value")


@dataclass(frozen=True, slots=True, kw_only=True)
class HackedReward(PolicyFault):
    """The reward pays for something that is not the task as well, which is easier to earn."""

    name: ClassVar[str] = "hacked-reward"

    weight: float = 2.0
    """What is paid at most; the whole of the true reward is 1."""
    pays: Literal["length", "repetition"] = "length"
    """``length``: tokens up to the limit. ``repetition``: tokens that are the one before again."""

    def __post_init__(self) -> None:
        PolicyFault.__post_init__(self)
        refuse_unless_above_0(self, "weight")
        refuse_unless_choice(self, "pays")


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisySampler(PolicyFault):
    """The sampler's weights are off by noise, in each sampling by another: an engine that computes differently."""

    name: ClassVar[str] = "noisy-sampler"

    noise: float = 0.1
    """Its size, as a share of each weight's root mean square."""
    seed: int = 0
    """Chooses the noise."""

    def __post_init__(self) -> None:
        PolicyFault.__post_init__(self)
        refuse_unless_above_0(self, "noise")
        refuse_unless_count(self, "seed", 0)


def refuse_unless_above_0(fault: Fault, field: str) -> None:
    """Refuse a magnitude that is 0 or negative."""
    refuse_unless_number(fault, field)
    if not getattr(fault, field) > 0:
        raise ConfigError(f"{fault.name}: {field}={getattr(fault, field):g}: a number above 0")
