"""Makes a detector of a user's own rule: one function of a row."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

from sealegs.detectors.contract import Detector
from sealegs.errors import ConfigError
from sealegs.vocabulary import Finding, Row, Severity

Rule: TypeAlias = Callable[[Row], str | Finding | None]
"""Returns what is wrong with a step in a few words, or a Finding, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomDetector:
    """A rule as a detector: its text becomes an alarm, its Finding is passed on unchanged.

    >>> def hot(row):
    ...     return "too hot" if row.get("gpu_celsius", 0) > 90 else None
    >>> CustomDetector(function=hot).look((), {"step": 7, "gpu_celsius": 95}).note
    'too hot'
    """

    function: Rule
    name: str = ""
    """By default the function's name."""

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ConfigError(f"CustomDetector.function={self.function!r}: a function of a row")
        if not self.name:
            object.__setattr__(self, "name", getattr(self.function, "__name__", type(self.function).__name__))

    def init(self) -> tuple[()]:
        """The empty state: a function remembers nothing."""
        return ()

    def look(self, state: tuple[()], now: Row) -> Finding | None:
        """Call the function. Observing fails open: a function that raises gives a notice, and never ends the run."""
        try:
            answer: object = self.function(MappingProxyType(now))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            return self._finding(now, Severity.WATCH, f"{self.name} failed: {reason}")
        if answer is None or isinstance(answer, Finding):
            return answer
        if isinstance(answer, str):
            return self._finding(now, Severity.ALARM, answer)
        kind = type(answer).__name__
        return self._finding(now, Severity.WATCH, f"{self.name} gave a {kind}, not a text, a Finding or None")

    def learn(self, state: tuple[()], now: Row) -> tuple[()]:
        """The empty state."""
        return ()

    def _finding(self, now: Row, severity: Severity, note: str) -> Finding:
        return Finding(
            detector=self.name,
            step=int(now["step"]),
            severity=severity,
            signal=self.name,
            value=1.0,
            limit=math.inf,
            spoils_update=False,
            note=note,
        )


def as_detector(value: Any) -> Detector[Any]:
    """The detector itself, or a detector made of a function."""
    if isinstance(value, type):
        raise ConfigError(f"{value.__name__} is a class: give one of it, {value.__name__}(...)")
    if all(hasattr(value, part) for part in ("name", "init", "look", "learn")):
        detector: Detector[Any] = value
        return detector
    if callable(value):
        return CustomDetector(function=value)
    raise ConfigError(f"{value!r} is no detector: give a function of a row, or an object with name, init, look, learn")
