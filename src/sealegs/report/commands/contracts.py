"""What a command found in, the object of its ``--json`` out, and back; docs/*.schema.json say what is in each."""

from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

from sealegs.record.reading import parse_json
from sealegs.record.rows import HIGHEST_STEP
from sealegs.record.schema import speakable, unspell

T = TypeVar("T", bound=msgspec.Struct)


def contract(found: msgspec.Struct) -> dict[str, Any]:
    """As JSON values; NaN and the infinities as strings, as in the run folder."""
    told: dict[str, Any] = speakable(msgspec.to_builtins(found))
    return told


def read_back(content: bytes, kind: type[T]) -> T:
    """Read an object back from its file; a ``ValueError`` says what is wrong with any other file."""
    try:
        found = msgspec.convert(parse_json(content), kind)
    except (msgspec.ValidationError, UnicodeError) as error:
        raise ValueError(str(error)) from None
    _refuse_unsound(found)
    return found


def _refuse_unsound(found: msgspec.Struct) -> None:
    """Refuse what the types leave open: text that stands for no number, and integers beyond all counting."""
    for field in msgspec.structs.fields(found):
        for value in _flat(getattr(found, field.name)):
            if isinstance(value, msgspec.Struct):
                _refuse_unsound(value)
            elif isinstance(value, str) and field.type in (float | str, float | str | None):
                if unspell(value) == value:
                    raise ValueError(f"{field.name} is {value!a:.40}, no number")
            elif isinstance(value, int) and abs(value) > HIGHEST_STEP:
                raise ValueError(f"{field.name} is larger than any number of steps")


def _flat(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else (value,)
