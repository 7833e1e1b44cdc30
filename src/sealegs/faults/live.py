"""Faults that strike a model in training or its optimizers, by the loop's step: what can be said about each.

What they do stands in the module that has what they strike: ``gradient.py``, ``weight.py``, ``optimizer.py``,
``rates.py``, ``activation.py``, ``code.py``.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal

from sealegs.errors import ConfigError
from sealegs.faults.contract import Fault, refuse_unless_choice, refuse_unless_count, refuse_unless_number


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveFault(Fault):
    """Strikes a model in training, or its optimizers: is given to ``inject``."""

    steps: int = 1
    """At how many steps in a row."""

    def __post_init__(self) -> None:
        Fault.__post_init__(self)
        refuse_unless_count(self, "steps", 1)

    def is_at(self, step: int) -> bool:
        """Whether it strikes at a step."""
        return self.step <= step < self.step + self.steps

    @property
    def total(self) -> int | None:
        """At how many steps it strikes in all; none where there is no end to it."""
        return self.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class LastingFault(LiveFault):
    """A state that a run is in, rather than a moment of it."""

    steps: int = 50
    """At how many steps in a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurringFault(LiveFault):
    """May come again and again."""

    every: int | None = None
    """Comes again so many steps after it came; without it, never again."""
    times: int | None = None
    """How often it comes in all; without it, until the run ends."""

    def __post_init__(self) -> None:
        LiveFault.__post_init__(self)
        if self.every is not None:
            refuse_unless_count(self, "every", self.steps)
        if self.times is not None:
            refuse_unless_count(self, "times", 1)
            if self.every is None:
                raise ConfigError(f"{self.name}: times={self.times}: say how many steps apart, such as every=50")

    def is_at(self, step: int) -> bool:
        """Whether it strikes at a step."""
        if self.every is None or step < self.step:
            return LiveFault.is_at(self, step)
        turn, since = divmod(step - self.step, self.every)
        return since < self.steps and (self.times is None or turn < self.times)

    @property
    def total(self) -> int | None:
        """At how many steps it strikes in all; none where there is no end to it."""
        if self.every is None:
            return self.steps
        return None if self.times is None else self.steps * self.times


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementFault(RecurringFault):
    """One element of one tensor, chosen by the seed: the tensor once, the element at each step anew."""

    tensor: str | None = None
    """A parameter's name, or the dotted beginning of several (``blocks.0``) among which the seed chooses; ``*`` stands
    for anything (``blocks.*.mlp``), ``+`` for "and" (``head+blocks.0``). Without it, among all that are trained."""
    seed: int = 0
    """Chooses the tensor and the element."""

    def __post_init__(self) -> None:
        RecurringFault.__post_init__(self)
        refuse_unless_tensor(self, self.tensor)
        refuse_unless_count(self, "seed", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class NanGradient(ElementFault):
    """One element of one gradient is NaN, in the first backward pass of the step."""

    name: ClassVar[str] = "nan-gradient"


@dataclass(frozen=True, slots=True, kw_only=True)
class InfGradient(ElementFault):
    """One element of one gradient is +Inf, in the first backward pass of the step."""

    name: ClassVar[str] = "inf-gradient"


@dataclass(frozen=True, slots=True, kw_only=True)
class BitFlip(ElementFault):
    """The top exponent bit of one element is flipped: below 2 it grows 2^128-fold in fp32, bf16; 0 becomes 2."""

    name: ClassVar[str] = "bit-flip"

    in_: Literal["gradient", "weight", "moment1", "moment2", "activation"] = "gradient"
    """``gradient``: in the first backward pass of the step. ``weight``, and the optimizer's first or second ``moment``:
    for good, before the first forward pass. ``activation``: in what a module gives in the step's first forward pass
    that is trained on."""
    module: str | None = None
    """For ``activation``: the module's name; without it, the last that has parameters."""

    def __post_init__(self) -> None:
        ElementFault.__post_init__(self)
        refuse_unless_choice(self, "in_")
        refuse_unless_module(self, self.module)
        if self.module is not None and self.in_ != "activation":
            raise ConfigError(f"{self.name}: module={self.module!r}: is for in=activation; name a tensor= instead")
        if self.tensor is not None and self.in_ == "activation":
            raise ConfigError(f"{self.name}: tensor={self.tensor!r}: in=activation has none; name a module= instead")


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientScale(RecurringFault):
    """The gradient times a factor, in every backward pass of the step, so that what is accumulated is scaled too."""

    name: ClassVar[str] = "gradient-scale"

    factor: float
    """Any finite number but 1."""
    tensor: str | None = None
    """A parameter's name, or the dotted beginning of several, with ``*`` and ``+`` as in ``ElementFault``. Without it,
    the whole gradient."""

    def __post_init__(self) -> None:
        RecurringFault.__post_init__(self)
        refuse_unless_tensor(self, self.tensor)
        refuse_unless_factor(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightScale(LiveFault):
    """Weights times a factor, for good, before the first forward pass of the step.

    Queries and keys of every block: ``weight-scale:factor=16,tensor=*.q_proj+*.k_proj@200``; where one matrix has
    queries, keys and values below each other, ``weight-scale:factor=16,tensor=*.query_key_value,rows=2/3@200``.
    """

    name: ClassVar[str] = "weight-scale"

    factor: float
    """Any finite number but 1."""
    tensor: str | None = None
    """A parameter's name, or the dotted beginning of several, with ``*`` and ``+`` as in ``ElementFault``. Without it,
    all that are trained."""
    rows: Fraction | None = None
    """This share of a tensor's rows, from the first one on; without it, all of them."""

    def __post_init__(self) -> None:
        LiveFault.__post_init__(self)
        refuse_unless_tensor(self, self.tensor)
        refuse_unless_factor(self)
        if self.rows is not None and not (isinstance(self.rows, Fraction) and 0 < self.rows < 1):
            raise ConfigError(f"{self.name}: rows={self.rows}: a share between 0 and 1, such as 2/3")


@dataclass(frozen=True, slots=True, kw_only=True)
class LrSpike(LiveFault):
    """The learning rate times a factor, at each of the steps: a schedule that is mis-set at a resume.

    It is there for the update and taken back after it, so that the schedule goes on as if nothing had been: what looks
    at the rate at another time, a record for one, sees the schedule's. When the loop's clock goes back, the fault is
    over, also for those of its steps that had not come: a rollback restores the schedule.
    """

    name: ClassVar[str] = "lr-spike"

    factor: float
    """Any number above 0 but 1."""
    log: Literal["hides", "shows"] = "hides"
    """``shows``: it is there from the step's first forward pass on, so that a record has it: a jump of the schedule."""

    def __post_init__(self) -> None:
        LiveFault.__post_init__(self)
        refuse_unless_factor(self)
        refuse_unless_positive(self)
        refuse_unless_choice(self, "log")


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentsReset(LiveFault):
    """All that the optimizers have gathered in their parameters' shapes is zero, before the first forward pass.

    As after a resume that lost the moments. The step counters stay, so that no bias correction makes up for it.
    """

    name: ClassVar[str] = "moments-reset"

    in_: Literal["both", "moment1", "moment2"] = "both"
    """``moment1`` or ``moment2``: the first or the second moments alone."""

    def __post_init__(self) -> None:
        LiveFault.__post_init__(self)
        refuse_unless_choice(self, "in_")


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenMoment2(LastingFault):
    """Second moments are after an update what they were before it: they forget nothing and learn nothing."""

    name: ClassVar[str] = "frozen-moment2"


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongBetas(LastingFault):
    """The optimizers' betas are others, as after a resume with another config; over when the loop's clock goes back.

    They are there from the step's first forward pass to its update.
    """

    name: ClassVar[str] = "wrong-betas"

    beta1: float | None = None
    """Of the first moments; without it, their own."""
    beta2: float | None = None
    """Of the second moments; without it, their own."""

    def __post_init__(self) -> None:
        LastingFault.__post_init__(self)
        if self.beta1 is None and self.beta2 is None:
            raise ConfigError(f"{self.name}: neither beta1= nor beta2= is given; write {self.name}:beta2=0.5@STEP")
        for field in ("beta1", "beta2"):
            if getattr(self, field) is None:
                continue
            refuse_unless_number(self, field)
            if not 0 <= getattr(self, field) < 1:
                raise ConfigError(f"{self.name}: {field}={getattr(self, field):g}: a number from 0 to below 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupLost(LastingFault):
    """The learning rate is the schedule's peak: each group's ``initial_lr``, which a scheduler of torch puts there.

    It is there from the step's first forward pass to its update, so that a record has it; over when the loop's clock
    goes back.
    """

    name: ClassVar[str] = "warmup-lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerOff(LastingFault):
    """Gradients go through fp16 without loss scaling, in every backward pass: below 6e-8 is 0, above 65504 Inf."""

    name: ClassVar[str] = "scaler-off"

    tensor: str | None = None
    """A parameter's name, or the dotted beginning of several, with ``*`` and ``+`` as in ``ElementFault``. Without it,
    the whole gradient."""

    def __post_init__(self) -> None:
        LastingFault.__post_init__(self)
        refuse_unless_tensor(self, self.tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bf16Weights(LastingFault):
    """Weights are rounded to bf16 after each update: there are no fp32 master weights, and small updates are lost."""

    name: ClassVar[str] = "bf16-weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp16Overflow(LiveFault):
    """What a module gives goes through fp16 in every forward pass: what is beyond 65504 is Inf.

    The gradient passes as if nothing had been.
    """

    name: ClassVar[str] = "fp16-overflow"

    module: str | None = None
    """Its name; without it, the last that has parameters."""
    factor: float = 1e5
    """Above 0: what it is multiplied by for that while, so that it does overflow: a norm gives up to 4 or so."""

    def __post_init__(self) -> None:
        LiveFault.__post_init__(self)
        refuse_unless_module(self, self.module)
        refuse_unless_positive(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationScale(LiveFault):
    """What a module gives times a factor, in every forward pass of the step: logits that are too large, for one."""

    name: ClassVar[str] = "activation-scale"

    factor: float
    """Any finite number but 1."""
    module: str
    """Its name."""

    def __post_init__(self) -> None:
        LiveFault.__post_init__(self)
        refuse_unless_module(self, self.module)
        refuse_unless_factor(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingZeroGrad(LastingFault):
    """What an update has left in the gradients is added to those of the next step, again and again: none were cleared.

    Where a step was not updated for, the next one is spared.
    """

    name: ClassVar[str] = "missing-zero-grad"


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedAllReduce(LastingFault):
    """One rank of DDP uses its own gradients instead of the mean of all, so that replicas drift apart."""

    name: ClassVar[str] = "skipped-all-reduce"

    rank: int
    """That rank; the others use the mean of all, as ever."""

    def __post_init__(self) -> None:
        LastingFault.__post_init__(self)
        refuse_unless_count(self, "rank", 0)


def refuse_unless_factor(fault: GradientScale | WeightScale | LrSpike | ActivationScale) -> None:
    """A factor is a finite number, and changes something."""
    refuse_unless_number(fault, "factor")
    if fault.factor == 1:
        raise ConfigError(f"{fault.name}: factor=1: changes nothing; give another factor")


def refuse_unless_positive(fault: LrSpike | Fp16Overflow) -> None:
    """A factor that changes no sign."""
    refuse_unless_number(fault, "factor")
    if not fault.factor > 0:
        raise ConfigError(f"{fault.name}: factor={fault.factor:g}: a number above 0")


def refuse_unless_tensor(fault: Fault, tensor: str | None) -> None:
    """A name that could not be read back is none."""
    if tensor is not None and (not isinstance(tensor, str) or not tensor or "," in tensor):
        raise ConfigError(f"{fault.name}: tensor={tensor!r}: a parameter's name, or its dotted start, without commas")


def refuse_unless_module(fault: Fault, module: str | None) -> None:
    """A name that could not be read back is none."""
    if module is not None and (not isinstance(module, str) or not module or "," in module):
        raise ConfigError(f"{fault.name}: module={module!r}: the name of a module, without commas")
