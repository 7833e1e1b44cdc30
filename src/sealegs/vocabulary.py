"""The words that the stages speak to each other: frozen values and protocols, standard library only."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

Number: TypeAlias = float | int
Row: TypeAlias = Mapping[str, Number | str]
"""What is known of one step, by signal name. A signal that was not measured has no key; NaN is a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to a run: a line of ``events.jsonl``."""

    kind: str
    """What happened, in kebab case: ``start``, ``resume``, ``checkpoint``, ``sink-failed``, ..."""
    step: int
    time: float
    """Seconds since 1970, UTC."""
    detail: Mapping[str, Any] = field(default_factory=dict)
    """The particulars, as JSON values."""


class Sink(Protocol):
    """A place that rows and events go to besides the run folder: a tracker, a terminal.

    The training loop calls it and does not wait: a sink that may take time belongs behind ``sinks.queued.Queued``.
    An exception from any of these costs the run one event and the sink its place.
    """

    name: str

    def start(self, manifest: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Get ready for a run, new or resumed. What is returned is kept in the manifest under ``tracker``."""

    def row(self, row: Row) -> None:
        """Take one step."""

    def event(self, event: Event) -> None:
        """Take one event."""

    def close(self) -> None:
        """Take no more; hand over what is still held."""
