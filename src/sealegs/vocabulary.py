"""The values and protocols that all stages share: rows, events, findings, verdicts, sinks. Standard library only."""

import html
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol, TypeAlias

from sealegs.printable import visible

Number: TypeAlias = float | int
Row: TypeAlias = Mapping[str, Number | str]
"""The signals of one step, by name. A signal that was not measured has no key; NaN is a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to a run: a line of ``events.jsonl``."""

    kind: str
    """Its kind, in kebab case: ``start``, ``resume``, ``checkpoint``, ``sink-failed`` and more."""
    step: int
    time: float
    """Seconds since 1970, UTC."""
    detail: Mapping[str, Any] = field(default_factory=dict)
    """The particulars, as JSON values."""


class Severity(IntEnum):
    """What a finding asks for, from least to most."""

    WATCH = 1
    """A notice: nothing is done."""
    GATE = 2
    """Surprising. The update is not applied if the finding says that it would do harm (``spoils_update``)."""
    ALARM = 3
    """Open an incident; a sudden anomaly also rejects this update."""
    HALT = 4
    """Stop: going on would train on nothing, or on garbage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that a detector saw at one step."""

    detector: str
    step: int
    severity: Severity
    signal: str
    value: float
    limit: float
    """The limit that the value should not have passed."""
    p: float | None = None
    """Probability of such a value if nothing is wrong, where the detector has one."""
    spoils_update: bool = True
    """Whether the step's update should not be applied; a slow drift is no fault of this step."""
    lasts: int = 1
    """How many of the rows up to this one it covers: a late finding began that long ago."""
    note: str = ""
    """A few words for it: ``loss spike``."""

    def __str__(self) -> str:
        """``loss spike: 6.93, expected below 3.41 (p 2e-09)``"""
        if self.signal.endswith("_finite"):  # a flag: its value says no more than the note
            return self.note or self.detector
        chance = f" (p {self.p:.0e})" if self.p is not None else ""
        is_told = math.isfinite(self.limit) and self.value != self.limit  # "65536, expected below 65536" tells nothing
        limit = f", {expected(self.value, self.limit)}" if is_told else ""
        return f"{self.note or self.detector}: {self.value:.4g}{limit}{chance}"


def expected(value: float, limit: float) -> str:
    """What was expected in place of a value that is beyond a limit, on whichever side.

    >>> expected(6.93, 3.41), expected(0.5, 1.0)
    ('expected below 3.41', 'expected 1 or more')
    """
    return f"expected {limit:.4g} or more" if value < limit else f"expected below {limit:.4g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The decision about one step, and why."""

    step: int
    findings: tuple[Finding, ...] = ()
    skips_in_a_row: int = 0
    """How many steps have been skipped without a break, this one included."""
    skip_limit: int = 0
    """How many may be."""
    incident: int | None = None
    """Number of the incident that an alarm belongs to, from 1."""
    opens_incident: bool = False
    """Whether this is the alarm that opens the incident."""
    culprit: str = ""
    """Where the worst gradient of a rejected step was: the tensor, and the rank where there are several."""
    is_suspicious: bool = False
    """Whether loss or gradient norm is one that few healthy steps have, be it reported or not: an incident may have
    begun with it."""
    instead: str = ""
    """What becomes of a ``HALT`` that does not end the run: who decides, or that nobody acts on it."""

    @property
    def severity(self) -> Severity | None:
        """The gravest of the findings."""
        return max(finding.severity for finding in self.findings) if self.findings else None

    @property
    def go(self) -> bool:
        """Whether the update should be applied."""
        # asked some twenty times a step, and nearly every step has none
        return not self.findings or not any(f.severity >= Severity.GATE and f.spoils_update for f in self.findings)

    @property
    def word(self) -> str:
        """The verdict in one word: ``GO``, ``SKIP``, ``ALARM`` or ``HALT``."""
        severity = self.severity
        if severity is None or severity < Severity.GATE:
            return "GO"
        if severity == Severity.GATE:
            return "GO" if self.go else "SKIP"
        return severity.name

    def __str__(self) -> str:
        """``step 4821  SKIP  loss spike: 6.93, expected below 3.41 (p 2e-09)  rejected 1 of 3``

        ``HALT`` appears only where the run is halted; otherwise it prints as ``ALARM`` with what is done instead. Names
        of tensors and signals are the user's, so what cannot be seen in them is spelt out.
        """
        parts = [f"step {self.step}", "ALARM" if self.instead else self.word, *map(str, self.findings)]
        if self.culprit:
            parts.append(f"in {self.culprit}")
        if self.incident is not None and not self.opens_incident:
            parts.append(f"still incident {self.incident}")
        if self.instead:
            parts.append(self.instead)
        elif not self.go:
            parts.append(f"rejected {self.skips_in_a_row} of {self.skip_limit}")
        return visible("  ".join(parts))

    def _repr_html_(self) -> str:
        """What a notebook shows: the line, and each finding beside its limit."""
        heads = "".join(f"<th>{name}</th>" for name in ("finding", "signal", "value", "limit", "p"))
        rows = "".join(
            "<tr>" + "".join(f"<td>{html.escape(visible(text))}</td>" for text in _cells(each)) + "</tr>"
            for each in self.findings
        )
        found = f"<table><tr>{heads}</tr>{rows}</table>" if rows else ""
        return f"<code>{html.escape(str(self))}</code>{found}"


def _cells(finding: Finding) -> tuple[str, ...]:
    chance = "" if finding.p is None else f"{finding.p:.0e}"
    return (finding.note or finding.detector, finding.signal, f"{finding.value:.4g}", f"{finding.limit:.4g}", chance)


class Sink(Protocol):
    """A place that rows and events go to besides the run folder: a tracker, a terminal.

    The training loop calls it and does not wait: put a slow sink behind ``sinks.background.BackgroundSink``. An
    exception from any of these costs the run one event and the sink its place.
    """

    name: str

    def start(self, manifest: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Get ready for a run, new or resumed. The result is kept in the manifest under ``tracker``."""

    def row(self, row: Row) -> None:
        """Take one row."""

    def event(self, event: Event) -> None:
        """Take one event."""

    def close(self) -> None:
        """Take no more, and deliver what is still held."""
