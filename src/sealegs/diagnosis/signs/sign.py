"""The answer of a sign about a run: yes, no, or the signal that would have to be logged to tell."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from sealegs.diagnosis.facts import Facts


@dataclass(frozen=True, slots=True)
class Sign:
    """The answer to one question about a run."""

    holds: bool | None
    """None where the log does not tell."""
    text: str = ""
    """The sentence, with the numbers."""
    missing: str = ""
    """The signal that would tell."""


Ask: TypeAlias = Callable[[Facts], Sign]


def so(holds: bool, text: str) -> Sign:
    """A sign that the log decides, one way or the other."""
    return Sign(bool(holds), text)


def unlogged(signal: str) -> Sign:
    """A sign that is unknown, because that signal is not in the log."""
    return Sign(None, missing=signal)


def opposite(sign: Sign) -> Sign:
    """The negation of a sign; an unknown one stays unknown."""
    return so(not sign.holds, sign.text) if sign.holds is not None and sign.text else sign


NOT_ASKED = Sign(False)
"""The answer if there is no incident of the kind that the sign is about."""
