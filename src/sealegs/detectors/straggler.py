"""Detects a rank that takes longer than the others, for a while and not just once."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from sealegs.detectors.spike import usable
from sealegs.errors import ConfigError
from sealegs.vocabulary import Finding, Row, Severity

SURE = 6.0
"""Standard errors from which a slow rank is no noise: with thousands of ranks under one in 100,000 checks."""


class StragglerState(NamedTuple):
    """The detector's state: who was reported."""

    told: float = -1.0
    """The rank that is slow and was reported, or -1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank whose own work takes longer than that of its peers over the last 50 steps; all others wait for it."""

    slow: float = 0.1
    """How much longer, as a share, from which a rank is reported."""
    name: str = "straggler"

    def __post_init__(self) -> None:
        if not 0 < self.slow < 10:
            raise ConfigError(f"Straggler.slow={self.slow}: how much longer as a share, between 0 and 10")

    def init(self) -> StragglerState:
        """The state before the first step."""
        return StragglerState()

    def look(self, state: StragglerState, now: Row) -> Finding | None:
        """Judge a window of steps; a rank is reported once."""
        rank, by = self._slow_rank(now), now.get("slowest_by")
        if rank is None or by is None or rank == state.told:
            return None
        return Finding(
            detector=self.name,
            step=int(now["step"]),
            severity=Severity.WATCH,
            signal="slowest_by",
            value=float(by),
            limit=self.slow,
            spoils_update=False,
            note=f"rank {rank:.0f} takes {float(by):.0%} longer than the others, over 50 steps",
        )

    def learn(self, state: StragglerState, now: Row) -> StragglerState:
        """Learn who is slow now."""
        by = usable(now, "slowest_by") if "slowest_by" in now else None
        if by is None:
            return state
        if (rank := self._slow_rank(now)) is not None:
            return StragglerState(told=rank)
        # an episode ends halfway back, so that a rank right at the limit is not reported again and again
        return state if now.get("slowest_rank") == state.told and by > self.slow / 2 else StragglerState()

    def _slow_rank(self, now: Row) -> float | None:
        by, surprise = usable(now, "slowest_by"), usable(now, "slowest_surprise")
        rank = float(now.get("slowest_rank", math.nan))
        is_slow = by is not None and by >= self.slow and surprise is not None and surprise >= SURE
        return rank if is_slow and math.isfinite(rank) else None
