"""A line of a log that is no row: a warning, an error, a word about a checkpoint, with the step it stands at."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line that is no row, as the log has it. Lines that differ in their digits alone are one."""

    step: int | None
    """The step of the last row before it; None before the first row."""
    text: str
    count: int
    """How often lines of this wording come, this one included."""
