"""Text of any origin in, text that a terminal, a log or a page shows as it is out. Standard library only.

What a file, a data set or another program says may hold escape sequences, line ends, or characters that turn the text
around them about. Here they are spelt out, as Python's ``repr`` spells them, so that one can see that they are there.
"""

import copy
import unicodedata
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

Value = TypeVar("Value")


def visible(text: str) -> str:
    r"""The text on one line, with everything spelt out that is neither a blank nor seen.

    >>> print(visible("café\x1b[2J\n"), visible("\u202etxt.exe"))
    café\x1b[2J\n \u202etxt.exe
    """
    if text.isprintable():
        return text
    return "".join(each if _is_seen(each) else repr(each)[1:-1] for each in text)


def visible_lines(text: str) -> str:
    """The same of a text whose line ends are meant."""
    return "\n".join(map(visible, text.split("\n")))


def counted(count: int, what: str) -> str:
    """So many of something.

    >>> counted(1, "step"), counted(1200, "step")
    ('1 step', '1,200 steps')
    """
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def spanned(what: str, first: int, last: int) -> str:
    """From one number of something to another.

    >>> spanned("step", 7, 7), spanned("step", 7, 9)
    ('step 7', 'steps 7 to 9')
    """
    return f"{what} {first}" if first == last else f"{what}s {first} to {last}"


def _is_seen(character: str) -> bool:
    return character.isprintable() or unicodedata.category(character) == "Zs"


def printable(value: Value) -> Value:
    r"""A value with every text in it made visible, names of tables included; itself where all of them are.

    Goes through tables, lists, dataclasses and msgspec's structs, so that nobody has to know which fields hold text. A
    path stays as it is: it is to be opened, not to be read.

    >>> print(printable({"dtype\n": ["fp32", "\x1b[31m", 4]}))
    {'dtype\\n': ['fp32', '\\x1b[31m', 4]}
    """
    shown: Any = _printable(value)
    return shown  # type: ignore[no-any-return]


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, Mapping):
        pairs = [(_printable(name), _printable(item)) for name, item in value.items()]
        is_same = all(new[0] is old[0] and new[1] is old[1] for new, old in zip(pairs, value.items(), strict=True))
        return value if is_same else dict(pairs)
    if isinstance(value, list | tuple):
        items = [_printable(item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    names = _fields(value)
    changed = {name: new for name in names if (new := _printable(old := getattr(value, name))) is not old}
    if not changed:
        return value
    if hasattr(value, "__struct_fields__"):
        return type(value)(**{name: changed.get(name, getattr(value, name)) for name in names})
    other = copy.copy(value)
    for name, new in changed.items():
        object.__setattr__(other, name, new)  # a frozen one, too: the copy is nobody else's yet
    return other


def _fields(value: object) -> tuple[str, ...]:
    if isinstance(value, type):
        return ()
    if is_dataclass(value):
        return tuple(field.name for field in fields(value))
    return getattr(value, "__struct_fields__", ())
