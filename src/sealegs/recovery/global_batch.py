"""Samples of a step, of all ranks, and the learning rate that goes with them where another number of ranks goes on."""

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

Rule: TypeAlias = Literal["keep", "linear", "sqrt"]
"""How the learning rate follows the global batch."""


class GlobalBatch:
    """The global batch of a run, from its first process on.

    >>> batch = GlobalBatch("sqrt")
    >>> batch.look(8, 2), batch.now, batch.factor
    ('', 16, 1.0)
    >>> later = GlobalBatch("sqrt")
    >>> later.load_state_dict(batch.state_dict())
    >>> later.accumulation(4), later.look(4, 1), later.factor
    (4, 'the global batch: 16 samples before, 4 now; the learning rate times 0.5', 0.5)
    """

    def __init__(self, rule: Rule = "keep") -> None:
        self.now: int | None = None
        """Samples of a step; None where no loader has said how many there are."""
        self._rule = rule
        self._first: int | None = None
        self._batches = 0
        """The most that a step of this process has had."""
        self._is_resumed = False

    def look(self, rows: int, batches: int) -> str:
        """A step has so many batches of so many samples of all ranks: what to announce, if that is a change."""
        self._batches = max(self._batches, batches)
        before, self.now = self.now, rows * self._batches
        if before == self.now or before is None or not self._is_resumed:
            if before is None or not self._is_resumed:
                self._first = self.now
            return ""
        text = f"the global batch: {before} samples before, {self.now} now"
        return text if self._rule == "keep" else f"{text}; the learning rate times {self.factor:g}"

    @property
    def factor(self) -> float:
        """On the learning rate, against that of the first global batch."""
        if self._rule == "keep" or self.now is None or not self._first:
            return 1.0
        return float((self.now / self._first) ** (1.0 if self._rule == "linear" else 0.5))

    def accumulation(self, rows: int, planned: int = 1) -> int:
        """Batches of a step that keep the global batch: as many as planned, where nothing is known of one before."""
        return planned if self.now is None or not self._is_resumed else max(1, round(self.now / rows))

    def state_dict(self) -> dict[str, int]:
        """As JSON values."""
        return {} if self.now is None or self._first is None else {"now": self.now, "first": self._first}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with that of the process before."""
        self._is_resumed = True
        self.now, self._first, self._batches = state.get("now"), state.get("first"), 0
