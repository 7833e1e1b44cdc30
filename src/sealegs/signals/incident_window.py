"""Says which steps are sampled because something went wrong there, and keeps such samples few."""

from typing import Any

STEPS_AFTER = 10
"""Steps after a SKIP, an ALARM or a HALT that are sampled too."""
MOST_AT_ONCE = 50
"""Such samples one after the other at most."""


class IncidentWindow:
    """The steps around the last anomaly. In the long run its samples are no more than those at the usual interval:
    each must have been earned by as many other steps as there are between two of those."""

    def __init__(self, sample_every: int) -> None:
        self._cost = sample_every
        self._earned = MOST_AT_ONCE * sample_every
        self._first, self._last = 0, -1

    def open(self, step: int) -> None:
        """Something is wrong at this step."""
        if not self.covers(step):
            self._first = step
        self._last = step + STEPS_AFTER

    def covers(self, step: int) -> bool:
        """Whether a step is one of those around the last anomaly; also where the run went back and it comes again."""
        return self._first <= step <= self._last

    def is_sampled(self, step: int) -> bool:
        """Whether a step is to be sampled for that."""
        return self.covers(step) and self._cost > 0 and self._earned >= self._cost

    def took(self, *, sampled: bool) -> None:
        """A step is over, and was sampled for this or not."""
        earned = self._earned - self._cost if sampled else self._earned + 1
        self._earned = min(max(earned, 0), MOST_AT_ONCE * self._cost)

    def state_dict(self) -> dict[str, Any]:
        """What the next answers depend on, as JSON values."""
        return {"first": self._first, "last": self._last, "earned": self._earned}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self._first, self._last, self._earned = state["first"], state["last"], state["earned"]
