"""Says whether a run that ends now has ended well: judged rows in, a sentence out where it has not."""

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any, NamedTuple

from sealegs import incidents, judge
from sealegs.incidents import Incident
from sealegs.vocabulary import Row, Verdict

LAST = 10
"""Rows whose median is the loss that a run ends with; a single batch says nothing."""
FROZEN = 10
"""Steps skipped in a row up to the end: so many are no hard batch any more."""
FAR, DEVIATIONS = 0.25, 3.0
"""A loss is far above the usual from this share of it on, and from this many of its deviations on."""
LEFT = 0.1
"""A loss within this share of its rise has all but come back."""
SHORT = 0.1
"""Share of its steps by which a run that went back may end short of where it was: batches that are left out at its end
make it shorter, and are no harm."""
REMEMBERED = 8
"""How many unrecovered incidents are remembered."""


class Level(NamedTuple):
    """The loss before an incident."""

    number: int
    start: int
    kind: str
    usual: float
    limit: float

    @classmethod
    def of(cls, incident: Incident) -> "Level":
        """The level before an incident."""
        return cls(incident.number, incident.start, incident.kind, incident.usual, incident.limit)

    def is_left_behind_by(self, loss: float) -> bool:
        """Whether a loss is so high that no healthy run would end with it.

        An incident in the first steps of a run has no usual loss to compare with; then only an infinite loss counts.
        """
        if math.isnan(self.limit):
            return math.isinf(loss)
        deviation = 2 * (self.limit - self.usual)
        return loss > self.usual + max(FAR * abs(self.usual), DEVIATIONS * deviation)

    def __str__(self) -> str:
        before = "" if math.isnan(self.usual) else f", a loss of {self.usual:.4g} before it"
        return f"incident {self.number} ({self.kind.replace('_', ' ')} at step {self.start}{before})"


class RunEnd:
    """Follows a run, with or without a playbook, and says how it stands at the end."""

    def __init__(self) -> None:
        self._incidents = incidents.begin()
        self._unrecovered: tuple[Level, ...] = ()
        self._excused = 0
        """The incident that was open when the loop announced a change: its level is a new one on purpose."""
        self._last: deque[float] = deque(maxlen=LAST)
        self._skipped = 0
        """Skipped steps in a row, up to the last."""
        self._left_at = 0
        """The furthest step that the run went back from."""
        self._is_signed = False
        """Whether the loss has been negative: where one of both signs stands says nothing about a run."""

    def add_row(self, row: Row, verdict: Verdict) -> None:
        """Follow one judged row."""
        if "announced" in row:
            self._unrecovered, self._excused = (), self._incidents.course.number
        self._incidents, news = incidents.advance(self._incidents, row, verdict)
        for item in news:
            if item.kind == "closed" and item.incident.recovery_loss is None and item.incident.number != self._excused:
                self._unrecovered = (*self._unrecovered, Level.of(item.incident))[-REMEMBERED:]
        loss = float(row["loss"])
        self._is_signed |= -math.inf < loss < 0
        self._last.append(loss if math.isfinite(loss) else math.inf)
        self._skipped = 0 if verdict.go else self._skipped + 1

    def went_back(self, number: int) -> None:
        """Forget the last steps: the run went back to a healthy state, when step ``number`` would have come next."""
        self._left_at = max(self._left_at, number)
        self._forget()

    def _forget(self) -> None:
        self._last.clear()
        self._skipped = 0

    def what_is_wrong(self, number: int) -> str:
        """Why the run has not ended well, in a sentence; empty where it has. Step ``number`` would come next."""
        if number < (1 - SHORT) * self._left_at:
            return f"it went back from step {self._left_at}, and ended at step {number} before it was there again"
        if not self._last:
            return ""
        loss, state = median(self._last), self._incidents
        if self._skipped >= FROZEN:
            return f"the last {self._skipped} steps were rejected, with a loss of {loss:.4g}: nothing was learned"
        if self._is_signed and loss < math.inf:
            return ""
        incident = None if state.course.number == self._excused else state.open
        levels = self._unrecovered if incident is None else (*self._unrecovered, Level.of(incident))
        for level in levels:
            if level.is_left_behind_by(loss):
                return f"{level} never came back: the loss is {loss:.4g} in the end"
        followed = state.rows - state.course.followed_from
        is_waited_for = state.course.is_back or incidents.is_decaying(state.course, followed)
        if incident is None or followed < incidents.LOOKS[0] or is_waited_for:
            return ""
        if not loss - incident.usual <= LEFT * (incident.peak_loss - incident.usual):
            return f"{levels[-1]} is open, and the loss does not come down: it is {loss:.4g} in the end"
        return ""

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON values."""
        left = {"incidents": self._incidents, "unrecovered": self._unrecovered, "excused": self._excused}
        return left | {"left_at": self._left_at, "is_signed": self._is_signed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self._incidents = judge.thaw(incidents.begin(), state["incidents"])
        self._unrecovered = tuple(Level(*level) for level in state["unrecovered"])
        self._excused, self._is_signed = state["excused"], state.get("is_signed", False)
        self._left_at = state.get("left_at", 0)
        self._forget()
