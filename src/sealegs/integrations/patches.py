"""Replaces methods of one object and puts them back: so a guard joins a framework's loop without a subclass."""

from collections.abc import Callable
from typing import Any

_ABSENT = object()


class Patches:
    """The replaced methods, newest last. Only the object itself is changed, not others of its class."""

    def __init__(self) -> None:
        self._kept: list[tuple[Any, str, Any, Any]] = []

    def put(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace a method by what ``make`` returns for it."""
        before, mine = vars(owner).get(name, _ABSENT), make(getattr(owner, name))
        self._kept.append((owner, name, before, mine))
        setattr(owner, name, mine)

    def undo(self) -> None:
        """Put everything back, once; not what somebody has replaced again meanwhile, who calls ours."""
        while self._kept:
            owner, name, before, mine = self._kept.pop()
            if vars(owner).get(name, _ABSENT) is not mine:
                continue
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
