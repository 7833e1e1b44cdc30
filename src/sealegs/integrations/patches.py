"""Methods of one object replaced, and put back: how a loop of somebody else's is joined, without a class of its own."""

from collections.abc import Callable
from typing import Any

_ABSENT = object()


class Patches:
    """What was replaced, newest last. Only the object itself is changed: others of its class are as they were."""

    def __init__(self) -> None:
        self._kept: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace a method by what ``make`` makes of it."""
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
