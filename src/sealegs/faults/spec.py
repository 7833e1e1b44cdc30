"""Text in, Faults out, and back: ``gradient-scale:factor=1000,rank=1@200``.

    NAME[:key=value,...]@STEP

Standard library only, so that a misspelt fault is refused before torch is loaded. A new kind is a class here, its place
in ``KINDS``, and what it does in the module that has what it strikes: ``gradient.py``, ``weight.py``, ``optimizer.py``,
``rates.py``, ``activation.py``, ``code.py``, ``batches.py``.
"""

import re
import sys
from dataclasses import MISSING, Field, dataclass, fields
from fractions import Fraction
from typing import Any, ClassVar, Literal, get_args, get_type_hints

from sealegs.errors import ConfigError

DIGITS = re.compile("[0-9]{1,18}")
SHARE = re.compile("[0-9]{1,9}/[0-9]{1,9}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that is made to go wrong, at a time that is known. Prints as the text that ``parse`` reads."""

    name: ClassVar[str]

    step: int
    """When it strikes first, counted from 0: a step; for a fault of the data, the number of a batch."""
    rank: int | None = None
    """The one rank that it strikes; without it, all of them."""
    placebo: Literal["no", "yes"] = "no"
    """``yes``: everything is done as for the fault, and nothing is changed by it."""

    def __post_init__(self) -> None:
        refuse_unless_count(self, "step", 0)
        refuse_unless_choice(self, "placebo")
        if self.rank is not None:
            refuse_unless_count(self, "rank", 0)

    @property
    def is_placebo(self) -> bool:
        """Whether its magnitude is zero."""
        return self.placebo == "yes"

    def __str__(self) -> str:
        """``bit-flip:in=weight@50``: what is not left at its default."""
        given = [
            f"{key}={written(value)}"
            for key, field in options(type(self)).items()
            if (value := getattr(self, field.name)) != field.default
        ]
        return f"{self.name}{':' if given else ''}{','.join(given)}@{self.step}"


# What strikes a model or an optimizer, by the loop's step.


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


# What strikes the data, by the batch's number.


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFault(Fault):
    """Batches are bad, in the same way whenever they come, after a rollback too: is given to ``batches.Spoiler``."""

    def is_at(self, number: int) -> bool:
        """Whether it strikes a batch."""
        return self.step <= number


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchesFault(DataFault):
    """So many bad batches in a row."""

    batches: int = 1
    """How many."""

    def __post_init__(self) -> None:
        DataFault.__post_init__(self)
        refuse_unless_count(self, "batches", 1)

    def is_at(self, number: int) -> bool:
        """Whether it strikes a batch."""
        return self.step <= number < self.step + self.batches


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnTokens(BatchesFault):
    """Every token of a batch is another."""

    seed: int = 0
    """Chooses the tokens, together with the batch's number."""

    def __post_init__(self) -> None:
        BatchesFault.__post_init__(self)
        refuse_unless_count(self, "seed", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomShard(DrawnTokens):
    """Every token of a batch is drawn at random, each id as likely as another: a corrupt shard."""

    name: ClassVar[str] = "random-shard"


@dataclass(frozen=True, slots=True, kw_only=True)
class RareTokens(DrawnTokens):
    """Every token of a batch is drawn from those that are rare in the data: what the model has hardly been taught."""

    name: ClassVar[str] = "rare-tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShiftedLabels(BatchesFault):
    """Labels are one place too far: each position is asked for what comes after its next token.

    As when both the loader and the model shift them. The first label of a row stands at its end.
    """

    name: ClassVar[str] = "shifted-labels"


@dataclass(frozen=True, slots=True, kw_only=True)
class DuplicateBatch(BatchesFault):
    """The first of the batches comes in the place of all of them: a loader that is stuck."""

    name: ClassVar[str] = "duplicate-batch"

    batches: int = 2
    """How many, the first included."""

    def __post_init__(self) -> None:
        BatchesFault.__post_init__(self)
        if self.batches == 1:
            raise ConfigError(f"{self.name}: batches=1: nothing comes twice; give at least 2")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoisonedSource(DataFault):
    """From a batch on, the rows that come from one source are random tokens."""

    name: ClassVar[str] = "poisoned-source"

    source: str
    """Its name, as the batches have it."""
    seed: int = 0
    """Chooses the tokens, together with the batch's number."""

    def __post_init__(self) -> None:
        DataFault.__post_init__(self)
        refuse_unless_count(self, "seed", 0)
        if not isinstance(self.source, str) or not self.source or "," in self.source:
            raise ConfigError(f"{self.name}: source={self.source!r}: the name of a source, without commas")


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedNgram(DrawnTokens):
    """Each row of a batch says one thing again and again: a span of its own tokens, repeated to its end."""

    name: ClassVar[str] = "repeated-ngram"

    length: int = 3
    """Tokens of the span, 1 to 13; a row that has fewer repeats all that it has."""

    def __post_init__(self) -> None:
        DrawnTokens.__post_init__(self)
        refuse_unless_count(self, "length", 1)
        if self.length > 13:
            raise ConfigError(f"{self.name}: length={self.length}: a span is short; give 1 to 13 tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class PermutedVocabulary(DrawnTokens):
    """Every token of a batch is the one that a permutation has in its place: text of another tokenizer.

    One permutation for all batches, chosen by the seed alone, that leaves no id as it is.
    """

    name: ClassVar[str] = "permuted-vocabulary"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingJunk(DrawnTokens):
    """Every token of a batch becomes two that are rare: text decoded with the wrong character set.

    The same two wherever it stands, chosen by the seed alone. Rows keep their length: the second half of them is lost.
    """

    name: ClassVar[str] = "encoding-junk"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedBatches(BatchesFault):
    """Batches come that came ``back`` before, as the loader gave them: it has gone back too far.

    Where there are more than ``back`` of them, it goes back again and again.
    """

    name: ClassVar[str] = "replayed-batches"

    batches: int = 50
    """How many."""
    back: int = 50
    """How many batches too early it begins again."""

    def __post_init__(self) -> None:
        BatchesFault.__post_init__(self)
        refuse_unless_count(self, "back", 1)
        if self.back > self.step:
            cure = "give a smaller back, or a later step"
            raise ConfigError(f"{self.name}: back={self.back}: only {self.step} come before batch {self.step}; {cure}")

    @property
    def replayed(self) -> range:
        """The batches that come again."""
        return range(self.step - self.back, self.step - self.back + min(self.back, self.batches))

    def original(self, number: int) -> int:
        """The batch that comes in the place of another."""
        return self.step - self.back + (number - self.step) % self.back


KINDS: dict[str, type[Fault]] = {
    kind.name: kind
    for kind in (
        NanGradient,
        InfGradient,
        GradientScale,
        BitFlip,
        WeightScale,
        LrSpike,
        MomentsReset,
        FrozenMoment2,
        WrongBetas,
        WarmupLost,
        ScalerOff,
        Bf16Weights,
        Fp16Overflow,
        ActivationScale,
        MissingZeroGrad,
        SkippedAllReduce,
        RandomShard,
        RareTokens,
        ShiftedLabels,
        DuplicateBatch,
        PoisonedSource,
        RepeatedNgram,
        PermutedVocabulary,
        EncodingJunk,
        ReplayedBatches,
    )
}
"""Every fault that can be written, by its name."""


def parse(text: str) -> Fault:
    """The fault that a text describes, such as ``nan-gradient@120``.

    >>> parse("gradient-scale:factor=1000,rank=1@200")
    GradientScale(step=200, rank=1, placebo='no', steps=1, every=None, times=None, factor=1000.0, tensor=None)
    >>> str(parse("bit-flip:in=weight@50"))
    'bit-flip:in=weight@50'
    """
    described, at, step = text.strip().rpartition("@")
    if not at:
        raise ConfigError(f"fault {text!r}: has no step; write NAME[:key=value,...]@STEP, such as nan-gradient@120")
    name, colon, listed = described.partition(":")
    if name not in KINDS:
        raise ConfigError(f"fault {text!r}: no fault is named {name!r}; take one of {', '.join(KINDS)}")
    kind = KINDS[name]
    known = options(kind)
    values: dict[str, Any] = {}
    for option in listed.split(",") if colon else ():
        key, equals, value = option.partition("=")
        if not equals or key not in known:
            cure = f"write key=value, the key one of {', '.join(known)}"
            raise ConfigError(f"fault {text!r}: {option!r} is no option of {name}; {cure}")
        if known[key].name in values:
            raise ConfigError(f"fault {text!r}: {key}= is given twice; keep one")
        values[known[key].name] = read(kind, known[key].name, value, text)
    for key, field in known.items():
        if field.default is MISSING and field.name not in values:
            raise ConfigError(f"fault {text!r}: {name} needs {key}=; write {name}:{key}=VALUE@STEP")
    return kind(step=read(kind, "step", step, text), **values)


def options(kind: type[Fault]) -> dict[str, Field[Any]]:
    """What may stand between colon and @, by its key; what fewest kinds share comes first.

    ``in`` is a word of Python's: its field is ``in_``.
    """
    shared_by = {
        field: sum(field.name in getattr(base, "__dataclass_fields__", ()) for base in kind.__mro__)
        for field in fields(kind)
        if field.name != "step"
    }
    return {field.name.rstrip("_"): field for field in sorted(shared_by, key=lambda field: shared_by[field])}


def read(kind: type[Fault], field: str, value: str, text: str) -> Any:
    """The value of one option, of its field's type; whether it makes sense is the fault's own to say."""
    hint = get_type_hints(kind)[field]
    key = field.rstrip("_")
    if hint in (int, int | None):
        if not DIGITS.fullmatch(value):
            raise ConfigError(f"fault {text!r}: {key}={value!r}: a whole number of digits alone, such as 120")
        return int(value)
    if hint in (float, float | None):
        try:
            return float(value)
        except ValueError:
            raise ConfigError(f"fault {text!r}: {key}={value!r}: a number, such as 1000 or 1e-3") from None
    if hint == Fraction | None:
        if not SHARE.fullmatch(value) or not int(value.partition("/")[2]):
            raise ConfigError(f"fault {text!r}: {key}={value!r}: a share, such as 2/3")
        return Fraction(value)
    return value


def written(value: object) -> str:
    """A value as ``read`` reads it: 1000.0 as 1000."""
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


def refuse_unless_count(fault: Fault, field: str, least: int) -> None:
    """A field that counts something takes whole numbers."""
    value = getattr(fault, field)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 10**18:
        raise ConfigError(f"{fault.name}: {field}={value!r}: a whole number from {least} to below 10^18")


def refuse_unless_number(fault: Fault, field: str) -> None:
    """A field that measures something takes finite numbers, and keeps them as float: ints print without end."""
    value = getattr(fault, field)
    is_number = isinstance(value, float | int) and not isinstance(value, bool)
    if not is_number or not abs(value) <= sys.float_info.max:  # NaN too
        raise ConfigError(f"{fault.name}: {field}={value!r}: a finite number")
    object.__setattr__(fault, field, float(value))


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


def refuse_unless_choice(fault: Fault, field: str) -> None:
    """A field that names one of a few takes these."""
    value, choices = getattr(fault, field), get_args(get_type_hints(type(fault))[field])
    if value not in choices:
        raise ConfigError(f"{fault.name}: {field.rstrip('_')}={value!r}: one of {', '.join(choices)}")


def refuse_unless_tensor(fault: Fault, tensor: str | None) -> None:
    """A name that could not be read back is none."""
    if tensor is not None and (not isinstance(tensor, str) or not tensor or "," in tensor):
        raise ConfigError(f"{fault.name}: tensor={tensor!r}: a parameter's name, or its dotted start, without commas")


def refuse_unless_module(fault: Fault, module: str | None) -> None:
    """A name that could not be read back is none."""
    if module is not None and (not isinstance(module, str) or not module or "," in module):
        raise ConfigError(f"{fault.name}: module={module!r}: the name of a module, without commas")
