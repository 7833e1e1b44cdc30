"""Text in, Faults out, and back: ``gradient-scale:factor=1000,rank=1@200``.

    NAME[:key=value,...]@STEP

Standard library only, so that a misspelt fault is refused before torch is loaded. What a fault does is in the module
that injects it (``gradient.py``); a new kind is a class here and its place in ``KINDS``.
"""

import re
import sys
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, ClassVar, Literal, get_args, get_type_hints

from sealegs.errors import ConfigError

DIGITS = re.compile("[0-9]{1,18}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that is made to go wrong, at steps that are known. Prints as the text that ``parse`` reads."""

    name: ClassVar[str]

    step: int
    """The first step at which it strikes, counted from 0."""
    steps: int = 1
    """At how many steps in a row."""
    rank: int | None = None
    """The one rank that it strikes; without it, all of them."""

    def __post_init__(self) -> None:
        refuse_unless_count(self, "step", 0)
        refuse_unless_count(self, "steps", 1)
        if self.rank is not None:
            refuse_unless_count(self, "rank", 0)

    @property
    def when(self) -> range:
        """The steps at which it strikes."""
        return range(self.step, self.step + self.steps)

    def __str__(self) -> str:
        """``bit-flip:in=weight@50``: what is not left at its default."""
        given = [
            f"{key}={written(value)}"
            for key, field in options(type(self)).items()
            if (value := getattr(self, field.name)) != field.default
        ]
        return f"{self.name}{':' if given else ''}{','.join(given)}@{self.step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementFault(Fault):
    """One element of one tensor, chosen by the seed: the tensor once, the element at each step anew."""

    tensor: str | None = None
    """A parameter's name, or the dotted beginning of several (``blocks.0``) among which the seed chooses. Without it,
    among all that are trained."""
    seed: int = 0
    """Chooses the tensor and the element."""

    def __post_init__(self) -> None:
        Fault.__post_init__(self)
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

    in_: Literal["gradient", "weight"] = "gradient"
    """``gradient``: in the first backward pass of the step. ``weight``: for good, before the first forward pass."""

    def __post_init__(self) -> None:
        ElementFault.__post_init__(self)
        choices = get_args(get_type_hints(BitFlip)["in_"])
        if self.in_ not in choices:
            raise ConfigError(f"{self.name}: in={self.in_!r}: one of {', '.join(choices)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientScale(Fault):
    """The gradient times a factor, in every backward pass of the step, so that what is accumulated is scaled too."""

    name: ClassVar[str] = "gradient-scale"

    factor: float
    """Any finite number but 1."""
    tensor: str | None = None
    """A parameter's name, or the dotted beginning of several (``blocks.0``). Without it, the whole gradient."""

    def __post_init__(self) -> None:
        Fault.__post_init__(self)
        refuse_unless_tensor(self, self.tensor)
        refuse_unless_number(self, "factor")
        if self.factor == 1:
            raise ConfigError(f"{self.name}: factor=1: changes nothing; give another factor")


KINDS: dict[str, type[Fault]] = {kind.name: kind for kind in (NanGradient, InfGradient, GradientScale, BitFlip)}
"""Every fault that can be written, by its name."""


def parse(text: str) -> Fault:
    """The fault that a text describes, such as ``nan-gradient@120``.

    >>> parse("gradient-scale:factor=1000,rank=1@200")
    GradientScale(step=200, steps=1, rank=1, factor=1000.0, tensor=None)
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
    if hint is float:
        try:
            return float(value)
        except ValueError:
            raise ConfigError(f"fault {text!r}: {key}={value!r}: a number, such as 1000 or 1e-3") from None
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


def refuse_unless_tensor(fault: Fault, tensor: str | None) -> None:
    """A name that could not be read back is none."""
    if tensor is not None and (not isinstance(tensor, str) or not tensor or "," in tensor):
        raise ConfigError(f"{fault.name}: tensor={tensor!r}: a parameter's name, or its dotted start, without commas")
