"""Detects ranks that no longer hold the same weights."""

import math
from dataclasses import dataclass

from sealegs.vocabulary import Finding, Row, Severity


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """Copies of the weights that differ between ranks: a flipped bit, a missed update, another order of arithmetic.

    From there on each rank trains another model on the mean of all gradients; it does not heal by itself.
    """

    name: str = "replicas"

    def init(self) -> tuple[()]:
        """The empty state."""
        return ()

    def look(self, state: tuple[()], now: Row) -> Finding | None:
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
            note=f"{who} holds other weights than {whose}; ranks that differ",
        )

    def learn(self, state: tuple[()], now: Row) -> tuple[()]:
        """The empty state."""
        return ()
