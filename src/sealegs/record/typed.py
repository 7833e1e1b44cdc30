"""Makes typed values of JSON: the one place where what a file says is believed or not.

Files come from other versions, from torn disks and from strangers. A value of another type than the field has is no
value. Standard library only, because a run in progress reads with it, too.
"""

import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from sealegs.record.reading import shown
from sealegs.record.rows import HIGHEST_STEP
from sealegs.record.schema import unspell

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


def typed(kind: type[T], values: Any, *, wrong_is_missing: bool = False) -> T:
    """A dataclass of a JSON object. Unknown fields are left alone.

    A ``ValueError`` names the first field that is missing, or of another type; with ``wrong_is_missing`` a field of
    another type gets its default, where it has one.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{shown(values)} is no object")  # noqa: TRY004 - of a file: every fault of it is one
    hints = _hints(kind)
    found = {}
    for field in fields(kind):
        name, hint = field.name, hints[field.name]
        value = unspelt(values.get(name), hint)
        if name in values and fits(value, hint):
            found[name] = float(value) if hint is float else value
        elif not (_has_default(field) and (wrong_is_missing or name not in values)):
            raise ValueError(f"{name} is {shown(value)}" if name in values else f"it has no {name}")
    return kind(**found)


def unspelt(value: Any, hint: Any) -> Any:
    """The number that a string stands for, unless text is what is asked for."""
    return value if fits(value, hint) else unspell(value)


def fits(value: Any, hint: Any) -> bool:
    """Whether a JSON value is of a type; of a list or an object its own type counts, not that of what is in it.

    >>> fits(5, float), fits(True, int), fits("x", str | None), fits({}, Mapping[str, int]), fits(10**30, int)
    (True, False, True, True, False)
    """
    if hint is str:
        return isinstance(value, str)
    if hint is bool:
        return isinstance(value, bool)
    if hint in (int, float):
        is_number = isinstance(value, int if hint is int else int | float) and not isinstance(value, bool)
        return is_number and (isinstance(value, float) or -HIGHEST_STEP <= value <= HIGHEST_STEP)
    if hint is None or hint is type(None):
        return value is None
    if hint is Any:
        return True
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, each) for each in get_args(hint))
    if origin is Literal:
        return any(type(value) is type(each) and value == each for each in get_args(hint))
    plain = origin or hint
    if isinstance(plain, type) and issubclass(plain, str):
        return isinstance(value, str)
    if isinstance(plain, type) and issubclass(plain, Mapping):
        return isinstance(value, dict)
    assert isinstance(plain, type), hint
    assert issubclass(plain, Sequence), hint
    return isinstance(value, list)


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    return get_type_hints(kind)


def _has_default(field: "Field[Any]") -> bool:
    return field.default is not MISSING or field.default_factory is not MISSING
