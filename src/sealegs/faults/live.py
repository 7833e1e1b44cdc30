"""The faults that strike a model in training or its optimizers, by the loop's step: their options.

The modules named after what they strike apply them: ``injector.py`` (gradients), ``weight.py``, ``optimizer.py``,
``rates.py``, ``activation.py``, ``code.py``.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal

from sealegs.errors import ConfigError
from sealegs.faults.contract import Fault, refuse_unless_choice, refuse_unless_count, refuse_unless_number


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveFault(Fault):
    """Strikes a model in training, or its optimizers. For ``inject``."""

    steps: int = 1
    """Number of consecutive steps."""

    def __post_init__(self) -> None:
        Fault.__post_init__(self)
        refuse_unless_count(self, "steps", 1)

    def is_at(self, step: int) -> bool:
        """Whether it strikes at a step."""
        return self.step <= step < self.step + self.steps

    @property
    def total(self) -> int | None:
        """The number of steps at which it strikes in all; None if there is no end to it."""
        return self.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class LastingFault(LiveFault):
    """A lasting state of a run, not a moment of it."""

    steps: int = 50
    """Number of consecutive steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurringFault(LiveFault):
    """A fault that may recur."""

    every: int | None = None
    """Steps after which it recurs; without it, never."""
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
        """The number of steps at which it strikes in all; None if there is no end to it."""
        if self.every is None:
            return self.steps
        return None if self.times is None else self.steps * self.times


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementFault(RecurringFault):
    """Strikes one element of one tensor. The seed chooses the tensor once, and the element at each step anew."""

    tensor: str | None = None
    """A parameter's name, or the dotted prefix of several (``blocks.0``) among which the seed chooses; ``*`` stands for
    anything (``blocks.*.mlp``), ``+`` for "and" (``head+blocks.0``). Without it, all trained parameters."""
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
    """The top exponent bit of one element is flipped. In fp32 and bf16 values below 2 grow 2^128-fold; 0 becomes 2."""

    name: ClassVar[str] = "bit-flip"

    in_: Literal["gradient", "weight", "moment1", "moment2", "activation"] = "gradient"
    """``gradient``: in the first backward pass of the step. ``weight``, or the optimizer's first or second ``moment``:
    permanently, before the first forward pass. ``activation``: in a module's output, in the step's first forward pass
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
    """The gradient times a factor in every backward pass of the step, so that accumulated gradients are scaled, too."""

    name: ClassVar[str] = "gradient-scale"

    factor: float
    """Any finite number but 1."""
    tensor: str | None = None
    """A parameter's name, or the dotted prefix of several, with ``*`` and ``+`` as in ``ElementFault``. Without it, the
    whole gradient."""

    def __post_init__(self) -> None:
        RecurringFault.__post_init__(self)
        refuse_unless_tensor(self, self.tensor)
        refuse_unless_factor(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightScale(LiveFault):
    """Weights times a factor, permanently, before the first forward pass of the step.

    Queries and keys of every block: ``weight-scale:factor=16,tensor=*.q_proj+*.k_proj@200``. If one matrix holds
    queries, keys and values below each other: ``weight-scale:factor=16,tensor=*.query_key_value,rows=2/3@200``.
    """

    name: ClassVar[str] = "weight-scale"

    factor: float
    """Any finite number but 1."""
    tensor: str | None = None
    """A parameter's name, or the dotted prefix of several, with ``*`` and ``+`` as in ``ElementFault``. Without it, all
    trained parameters."""
    rows: Fraction | None = None
    """The share of a tensor's rows to scale, from the first one on; without it, all of them."""

    def __post_init__(self) -> None:
        LiveFault.__post_init__(self)
        refuse_unless_tensor(self, self.tensor)
        refuse_unless_factor(self)
        if self.rows is not None and not (isinstance(self.rows, Fraction) and 0 < self.rows < 1):
            raise ConfigError(f"{self.name}: rows={self.rows}: a share between 0 and 1, such as 2/3")


@dataclass(frozen=True, slots=True, kw_only=True)
class LrSpike(LiveFault):
    """The learning rate times a factor, at each of the steps: a schedule that is mis-set at a resume.

    The factor is applied for the update and removed after it, so that the schedule goes on undisturbed. A reader of the
    rate at any other time, such as a record, sees the schedule's rate. The fault is over when the loop's clock goes
    back, also for its later steps: a rollback restores the schedule.
    """

    name: ClassVar[str] = "lr-spike"

    factor: float
    """Any number above 0 but 1."""
    log: Literal["hides", "shows"] = "hides"
    """``shows``: the factor is applied from the step's first forward pass on, so that a record shows a jump."""

    def __post_init__(self) -> None:
        LiveFault.__post_init__(self)
        refuse_unless_factor(self)
        refuse_unless_positive(self)
        refuse_unless_choice(self, "log")


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentsReset(LiveFault):
    """All optimizer state in the shape of its parameter is zeroed, before the first forward pass.

    This is a resume that lost the moments. The step counters stay, so that no bias correction makes up for it.
    """

    name: ClassVar[str] = "moments-reset"

    in_: Literal["both", "moment1", "moment2"] = "both"
    """``moment1`` or ``moment2``: the first or the second moments alone."""

    def __post_init__(self) -> None:
        LiveFault.__post_init__(self)
        refuse_unless_choice(self, "in_")


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenMoment2(LastingFault):
    """Second moments are restored after each update: they forget nothing and learn nothing."""

    name: ClassVar[str] = "frozen-moment2"


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongBetas(LastingFault):
    """The optimizers have other betas, as after a resume with another config; over when the loop's clock goes back.

    They apply from the step's first forward pass to its update.
    """

    name: ClassVar[str] = "wrong-betas"

    beta1: float | None = None
    """Beta of the first moments; without it, their own."""
    beta2: float | None = None
    """Beta of the second moments; without it, their own."""

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

    It applies from the step's first forward pass to its update, so that a record shows it. The fault is over when the
    loop's clock goes back.
    """

    name: ClassVar[str] = "warmup-lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerOff(LastingFault):
    """Gradients go through fp16 without loss scaling, in every backward pass: below 6e-8 is 0, above 65504 Inf."""

    name: ClassVar[str] = "scaler-off"

    tensor: str | None = None
    """A parameter's name, or the dotted prefix of several, with ``*`` and ``+`` as in ``ElementFault``. Without it, the
    whole gradient."""

    def __post_init__(self) -> None:
        LastingFault.__post_init__(self)
        refuse_unless_tensor(self, self.tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bf16Weights(LastingFault):
    """Weights are rounded to bf16 after each update: no fp32 master weights, so that small updates are lost."""

    name: ClassVar[str] = "bf16-weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp16Overflow(LiveFault):
    """The output of a module goes through fp16 in every forward pass: values beyond 65504 become Inf.

    The gradient passes unchanged.
    """

    name: ClassVar[str] = "fp16-overflow"

    module: str | None = None
    """The module's name; without it, the last that has parameters."""
    factor: float = 1e5
    """A positive factor for the time in fp16, so that values do overflow: a norm's output goes up to 4 or so."""

    def __post_init__(self) -> None:
        LiveFault.__post_init__(self)
        refuse_unless_module(self, self.module)
        refuse_unless_positive(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationScale(LiveFault):
    """The output of a module times a factor in every forward pass of the step, such as logits that are too large."""

    name: ClassVar[str] = "activation-scale"

    factor: float
    """Any finite number but 1."""
    module: str
    """The module's name."""

    def __post_init__(self) -> None:
        LiveFault.__post_init__(self)
        refuse_unless_module(self, self.module)
        refuse_unless_factor(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterBias(LastingFault):
    """The logits of some experts are off by an amount in every forward pass: tokens go to them, or never.

    A router that has collapsed: ``router-bias:experts=2,amount=6@200``. An expert that has died:
    ``router-bias:expert=3,amount=-30@200``.
    """

    name: ClassVar[str] = "router-bias"

    amount: float
    """Any finite number but 0."""
    expert: int = 0
    """The first of them, from 0."""
    experts: int = 1
    """How many."""
    module: str | None = None
    """The routers' name, with ``*`` as in ``ElementFault``. Without it, every module whose name ends in ``router`` or
    ``gate``."""

    def __post_init__(self) -> None:
        LastingFault.__post_init__(self)
        refuse_unless_module(self, self.module)
        refuse_unless_count(self, "expert", 0)
        refuse_unless_count(self, "experts", 1)
        refuse_unless_number(self, "amount")
        if self.amount == 0:
            raise ConfigError(f"{self.name}: amount=0: changes nothing; give another amount")


@dataclass(frozen=True, slots=True, kw_only=True)
class StuckScale(LastingFault):
    """The scale of tensors of few bits stays as it was at the first step, times a factor.

    Above 1, large values are beyond the largest number; far below, small ones become zero. For modules that have
    ``scale_of(x)`` and ``rounded(x, scale)``, as the lab's quantisers have.
    """

    name: ClassVar[str] = "stuck-scale"

    factor: float = 16.0
    """A number above 0."""
    module: str | None = None
    """The quantisers' name, with ``*`` as in ``ElementFault``; without it, all of them."""

    def __post_init__(self) -> None:
        LastingFault.__post_init__(self)
        refuse_unless_module(self, self.module)
        refuse_unless_positive(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingZeroGrad(LastingFault):
    """The gradients that an update leaves are added to those of the next step, again and again: a missing zero_grad.

    A step after one without an update is spared.
    """

    name: ClassVar[str] = "missing-zero-grad"


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedAllReduce(LastingFault):
    """One rank of DDP uses its own gradients instead of the mean of all, so that replicas drift apart."""

    name: ClassVar[str] = "skipped-all-reduce"

    rank: int
    """That rank; the others use the mean of all, as usual."""

    def __post_init__(self) -> None:
        LastingFault.__post_init__(self)
        refuse_unless_count(self, "rank", 0)


def refuse_unless_factor(fault: GradientScale | WeightScale | LrSpike | ActivationScale) -> None:
    """Refuse a factor that is not finite, or changes nothing."""
    refuse_unless_number(fault, "factor")
    if fault.factor == 1:
        raise ConfigError(f"{fault.name}: factor=1: changes nothing; give another factor")


def refuse_unless_positive(fault: LrSpike | Fp16Overflow | StuckScale) -> None:
    """Refuse a factor that changes signs."""
    refuse_unless_number(fault, "factor")
    if not fault.factor > 0:
        raise ConfigError(f"{fault.name}: factor={fault.factor:g}: a number above 0")


def refuse_unless_tensor(fault: Fault, tensor: str | None) -> None:
    """Refuse a name that could not be read back."""
    if tensor is not None and (not isinstance(tensor, str) or not tensor or "," in tensor):
        raise ConfigError(f"{fault.name}: tensor={tensor!r}: a parameter's name, or its dotted start, without commas")


def refuse_unless_module(fault: Fault, module: str | None) -> None:
    """Refuse a name that could not be read back."""
    if module is not None and (not isinstance(module, str) or not module or "," in module):
        raise ConfigError(f"{fault.name}: module={module!r}: the name of a module, without commas")
