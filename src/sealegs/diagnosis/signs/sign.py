"""What a sign says of a run: that something is so, that it is not, or what would have to be logged to tell."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from sealegs.diagnosis.facts import Facts


@dataclass(frozen=True, slots=True)
class Sign:
    """One thing that is so, or is not."""

    holds: bool | None
    """None where the log does not tell."""
    text: str = ""
    """The sentence, with the numbers."""
    missing: str = ""
    """The signal that would tell."""


Ask: TypeAlias = Callable[[Facts], Sign]


def so(holds: bool, text: str) -> Sign:
    """It is told, one way or the other."""
    return Sign(bool(holds), text)


def unlogged(signal: str) -> Sign:
    """It is not told, because that signal is not in the log."""
    return Sign(None, missing=signal)


def opposite(sign: Sign) -> Sign:
    """The other way round, where it is told at all."""
    return so(not sign.holds, sign.text) if sign.holds is not None and sign.text else sign


NOT_ASKED = Sign(False)
"""There is no incident of the kind that it would be about."""
