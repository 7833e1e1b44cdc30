"""Replaces methods of one object and puts them back: so a guard joins a framework's loop without a subclass."""

from collections.abc import Callable
from typing import Any

_ABSENT = object()


class Patches:
    """The replaced methods, newest last. Only the object itself is changed, not others of its class."""

    def __init__(self) -> None:
        self._kept: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace a method by what ``make`` returns for it."""
        self._kept.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, make(getattr(owner, name)))

    def undo(self) -> None:
        """Put everything back, once."""
        while self._kept:
            owner, name, before = self._kept.pop()
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
