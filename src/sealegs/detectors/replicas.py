"""Detects ranks that no longer hold the same weights."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from sealegs.vocabulary import Finding, Row, Severity


class Compared(NamedTuple):
    """What the comparisons have shown so far."""

    equal_at: int = -1
    """The last step at which all ranks held the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """Copies of the weights that differ between ranks: a flipped bit, a missed update, another order of arithmetic.

    From there on each rank trains another model on the mean of all gradients; it does not heal by itself. It may have
    begun at any step since they last were the same.
    """

    name: str = "replicas"

    def init(self) -> Compared:
        """Nothing was compared."""
        return Compared()

    def look(self, state: Compared, now: Row) -> Finding | None:
        """Judge a row in which the ranks have compared their weights."""
        differing = now.get("ranks_differ")
        if differing is None or float(differing) == 0.0:
            return None
        rank = float(now.get("differing_rank", math.nan))
        who = "rank 0" if rank == 0 else f"rank {rank:.0f}" if math.isfinite(rank) else "a rank"
        whose = "the others" if rank == 0 else "rank 0"
        return Finding(
            detector=self.name,
            step=int(now["step"]),
            severity=Severity.ALARM,
            signal="ranks_differ",
            value=float(differing),
            limit=1.0,
            spoils_update=False,
            lasts=max(int(now["step"]) - state.equal_at, 1) if state.equal_at >= 0 else 1,
            note=f"{who} holds other weights than {whose}; ranks that differ",
        )

    def learn(self, state: Compared, now: Row) -> Compared:
        """Remember when they were the same."""
        return Compared(int(now["step"])) if now.get("ranks_differ") == 0.0 else state
