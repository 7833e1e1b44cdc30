"""The stability tax of a run: what it cost to keep it standing, part by part, in seconds and as a share of the whole.

Standard library only, because a guard writes it and everything that reports a run reads it.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from sealegs.record.typed import typed
from sealegs.vocabulary import Event

PARTS = {
    "signals": "signals",
    "verdicts": "gate and verdicts",
    "snapshots": "snapshots",
    "checkpoints": "checkpoints",
    "probes": "probes",
    "recomputed": "batches computed again",
    "recovery": "going back",
    "skipped": "skipped steps",
    "repeated": "steps done again",
    "downtime": "downtime",
}
"""What stability costs, by key and in words."""
_UNITS = (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class StabilityTax:
    """What a run has paid so far, over all of its processes."""

    whole_s: float
    """The time that the run has taken, what it was down included."""
    steps: int
    """Steps that were made, those that were skipped or done again included."""
    parts: Mapping[str, float]
    """Seconds by the keys of ``PARTS``, none of them twice: skipped and repeated steps count what a step takes without
    the rest."""
    price_per_hour: float | None = None

    @property
    def total_s(self) -> float:
        """All parts together."""
        return math.fsum(self.parts.values())

    @property
    def share(self) -> float:
        """Of the whole."""
        return self.share_of(self.total_s)

    def share_of(self, seconds: float) -> float:
        """So many seconds as a share of the whole."""
        return seconds / self.whole_s if self.whole_s > 0 else 0.0

    @property
    def money(self) -> float | None:
        """What it cost, where an hour has a price."""
        return None if not self.price_per_hour else self.total_s / 3600 * self.price_per_hour

    def to_plain(self) -> dict[str, Any]:
        """As JSON values, with the totals for whoever reads them without this class."""
        totals = {"total_s": round(self.total_s, 3), "share": round(self.share, 5)}
        money = {} if self.money is None else {"money": round(self.money, 2)}
        return {**asdict(self), **totals, **money}

    @classmethod
    def from_plain(cls, values: Any) -> Self:
        """What ``to_plain`` gave; a ``ValueError`` says what is wrong with anything else."""
        told = typed(cls, values, wrong_is_missing=True)
        parts = {name: told.parts.get(name) for name in PARTS}
        seconds = {name: float(s) for name, s in parts.items() if isinstance(s, int | float) and 0 <= s < math.inf}
        if not 0 <= told.whole_s < math.inf:
            raise ValueError(f"whole_s is {told.whole_s}")
        return cls(whole_s=told.whole_s, steps=told.steps, parts=seconds, price_per_hour=told.price_per_hour)

    def rows(self) -> list[tuple[str, str, str]]:
        """Each part that cost anything, in words, with its time and its share; the largest first."""
        parts = sorted(((s, PARTS[name]) for name, s in self.parts.items() if s > 0), reverse=True)
        return [(name, spell_seconds(seconds), f"{self.share_of(seconds):.2%}") for seconds, name in parts]

    def __str__(self) -> str:
        """``stability cost 6.1% (2.5 min of 41 min): checkpoints 1.8 min (4.4%), signals 42 s (1.7%)``"""
        money = "" if self.money is None else f", {self.money:.2f} of money"
        text = (
            f"stability cost {self.share:.1%} ({spell_seconds(self.total_s)} of {spell_seconds(self.whole_s)}{money})"
        )
        told = ", ".join(f"{name} {seconds} ({share})" for name, seconds, share in self.rows())
        return f"{text}: {told}" if told else text


def spell_seconds(seconds: float) -> str:
    """A duration in the unit that it is read in.

    >>> spell_seconds(0.0123), spell_seconds(42.0), spell_seconds(150), spell_seconds(9000)
    ('12 ms', '42 s', '2.5 min', '2.5 h')
    """
    unit, size = next(((unit, size) for unit, size in _UNITS if seconds >= size), ("ms", 0.001))
    return f"{seconds / size:.1f} {unit}" if seconds < 10 * size else f"{seconds / size:.0f} {unit}"


def tax_of(events: Iterable[Event]) -> StabilityTax | None:
    """The tax as the newest event with it says, which counts what came before; None where no guard has written one."""
    for event in reversed(tuple(events)):
        if "tax" in event.detail:
            try:
                return StabilityTax.from_plain(event.detail["tax"])
            except ValueError:  # of another version, or damaged
                continue
    return None
