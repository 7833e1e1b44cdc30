"""The base of every fault: a name, a step, and options that can be written and read back.

Standard library only, like ``live.py`` and ``data.py``, so that a misspelt fault is refused before torch is loaded.
"""

import sys
from dataclasses import Field, dataclass, fields
from typing import Any, ClassVar, Literal, get_args, get_type_hints

from sealegs.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that goes wrong on purpose, at a known time. Prints as the text that ``parse`` reads."""

    name: ClassVar[str]

    step: int
    """The first step that it strikes, from 0; for a fault of the data, the number of a batch."""
    rank: int | None = None
    """The one rank that it strikes; without it, all ranks."""
    placebo: Literal["no", "yes"] = "no"
    """``yes``: everything happens as for the fault, and nothing is changed by it."""

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
        """The fault as text, ``bit-flip:in=weight@50``, with the options that are not at their defaults."""
        given = [
            f"{key}={written(value)}"
            for key, field in options(type(self)).items()
            if (value := getattr(self, field.name)) != field.default
        ]
        return f"{self.name}{':' if given else ''}{','.join(given)}@{self.step}"


def options(kind: type[Fault]) -> dict[str, Field[Any]]:
    """The options between colon and @, by key; options that fewest kinds share come first.

    ``in`` is a keyword of Python, so its field is ``in_``.
    """
    shared_by = {
        field: sum(field.name in getattr(base, "__dataclass_fields__", ()) for base in kind.__mro__)
        for field in fields(kind)
        if field.name != "step"
    }
    return {field.name.rstrip("_"): field for field in sorted(shared_by, key=lambda field: shared_by[field])}


def written(value: object) -> str:
    """A value as ``read`` reads it: 1000.0 as 1000."""
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


def refuse_unless_count(fault: Fault, field: str, least: int) -> None:
    """Refuse a count that is not a whole number of at least ``least``."""
    value = getattr(fault, field)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 10**18:
        raise ConfigError(f"{fault.name}: {field}={value!r}: a whole number from {least} to below 10^18")


def refuse_unless_number(fault: Fault, field: str) -> None:
    """Refuse a measure that is not a finite number, and keep it as a float: huge ints print without end."""
    value = getattr(fault, field)
    is_number = isinstance(value, float | int) and not isinstance(value, bool)
    if not is_number or not abs(value) <= sys.float_info.max:  # NaN too
        raise ConfigError(f"{fault.name}: {field}={value!r}: a finite number")
    object.__setattr__(fault, field, float(value))


def refuse_unless_choice(fault: Fault, field: str) -> None:
    """Refuse a value that is not one of the field's choices."""
    value, choices = getattr(fault, field), get_args(get_type_hints(type(fault))[field])
    if value not in choices:
        raise ConfigError(f"{fault.name}: {field.rstrip('_')}={value!r}: one of {', '.join(choices)}")
