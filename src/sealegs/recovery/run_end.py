"""Judged rows in, a sentence out where a run that ends now has not ended well: nothing is left to treat it then."""

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any, NamedTuple

from sealegs import incidents, judge
from sealegs.incidents import Incident
from sealegs.vocabulary import Row, Verdict

LAST = 10
"""Rows whose median loss a run ends with; what one batch costs says nothing."""
FROZEN = 10
"""Steps in a row that were condemned up to the end: so many are no hard batch any more."""
FAR, DEVIATIONS = 0.25, 3.0
"""By how much of what was usual, and of its deviations, a loss is far above it."""
LEFT = 0.1
"""Share of the rise of a loss that is no more than a rest of it."""
REMEMBERED = 8
"""Incidents that never recovered."""


class Level(NamedTuple):
    """What the loss was before an incident."""

    number: int
    start: int
    kind: str
    usual: float
    limit: float

    @classmethod
    def of(cls, incident: Incident) -> "Level":
        """That of one."""
        return cls(incident.number, incident.start, incident.kind, incident.usual, incident.limit)

    def is_far_below(self, loss: float) -> bool:
        """Whether a loss is so high that no healthy run would end with it.

        Of an incident in a run that was too young to have a usual loss, nobody can say.
        """
        if math.isnan(self.limit):
            return math.isinf(loss)
        deviation = 2 * (self.limit - self.usual)
        return loss > self.usual + max(FAR * abs(self.usual), DEVIATIONS * deviation)

    def __str__(self) -> str:
        before = "" if math.isnan(self.usual) else f", a loss of {self.usual:.4g} before it"
        return f"incident {self.number} ({self.kind.replace('_', ' ')} at step {self.start}{before})"


class RunEnd:
    """Follows a run, be there a playbook or none, and says how it stands."""

    def __init__(self) -> None:
        self._incidents = incidents.begin()
        self._unrecovered: tuple[Level, ...] = ()
        self._excused = 0
        """The incident that was open when the loop announced a change: its level is another one on purpose."""
        self._last: deque[float] = deque(maxlen=LAST)
        self._condemned = 0
        """Steps in a row, up to the last."""

    def judged(self, row: Row, verdict: Verdict) -> None:
        """A row was judged."""
        if "announced" in row:
            self._unrecovered, self._excused = (), self._incidents.course.number
        self._incidents, news = incidents.follow(self._incidents, row, verdict)
        for item in news:
            if item.kind == "closed" and item.incident.recovery_loss is None and item.incident.number != self._excused:
                self._unrecovered = (*self._unrecovered, Level.of(item.incident))[-REMEMBERED:]
        loss = float(row["loss"])
        self._last.append(loss if math.isfinite(loss) else math.inf)
        self._condemned = 0 if verdict.go else self._condemned + 1

    def went_back(self) -> None:
        """The run is at a healthy state: what its last steps showed is of weights that are gone."""
        self._last.clear()
        self._condemned = 0

    def what_is_wrong(self) -> str:
        """Why the run is not well, in a sentence; empty where it is."""
        if not self._last:
            return ""
        loss, state = median(self._last), self._incidents
        if self._condemned >= FROZEN:
            return f"the last {self._condemned} steps were condemned, with a loss of {loss:.4g}: nothing was learned"
        incident = None if state.course.number == self._excused else state.open
        levels = self._unrecovered if incident is None else (*self._unrecovered, Level.of(incident))
        for level in levels:
            if level.is_far_below(loss):
                return f"{level} never came back: the loss is {loss:.4g} in the end"
        looked = state.rows - state.course.followed_from >= incidents.LOOKS[0]
        is_waited_for = state.course.is_back or incidents.is_decaying(state.course, is_first=False)
        if incident is None or not looked or is_waited_for:
            return ""
        if not loss - incident.usual <= LEFT * (incident.peak_loss - incident.usual):
            return f"{levels[-1]} is open, and the loss does not come down: it is {loss:.4g} in the end"
        return ""

    def state_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"incidents": self._incidents, "unrecovered": self._unrecovered, "excused": self._excused}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._incidents = judge.thaw(incidents.begin(), state["incidents"])
        self._unrecovered = tuple(Level(*level) for level in state["unrecovered"])
        self._excused = state["excused"]
        self.went_back()
