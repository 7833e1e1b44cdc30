"""Finds a data source that was hardly learned because its steps were skipped.

A hundred skips all over the data cost next to nothing. Seven skips in a source of fifty batches cost a seventh of what
there is to learn from it. Standard library only, because a watch uses it live.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

FEWEST = 3
"""Fewest skips of a source that are reported: the guard learns a rare source by one, and two may be chance."""
UNLIKELY = 1e-3
"""Chance, over all sources together, below which so many skips of one source are no accident."""
FAR = 2.0
"""How many times its share of the data a source must have of the skips: with less, all of the data loses alike."""
MUCH = 0.1
"""Share of a source whose loss is worth a look: mixture weights are chosen to about a tenth, so a tenth less of one
source is another mixture."""
MOST_SOURCES = 10_000
"""Sources that are followed. A loop that names every document would otherwise fill the memory; and of so many, none is
much of the data."""


class Unlearned(NamedTuple):
    """A data source that has far more than its share of the skips."""

    source: str
    skipped: int
    skips: int
    """Skips of all sources."""
    data: float
    """Its share of the data."""
    lost: float
    """The share of it that was never learned."""

    @property
    def is_much(self) -> bool:
        """Whether the loss is worth a look."""
        return self.lost > MUCH

    def __str__(self) -> str:
        """``7 of 9 skipped steps were of wiki, 10.0% of the data: 14% of it was never learned``"""
        told = f"{self.skipped:,} of {self.skips:,} skipped steps were of {self.source}, {self.data:.1%} of the data"
        return f"{told}: {self.lost:.0%} of it was never learned"


@dataclass(slots=True)
class Division:
    """How steps, and the skipped ones among them, divide over the data sources."""

    steps: float = 0.0
    skips: float = 0.0
    of: dict[str, tuple[float, float]] = field(default_factory=lambda: defaultdict(lambda: (0.0, 0.0)))
    """Steps and skips by source. A batch of two sources counts for both, by their shares."""

    def add(self, sources: str, *, steps: int = 1, skips: int = 0) -> None:
        """Add ``steps`` steps whose batches have these sources, of which ``skips`` were skipped."""
        shares = shares_of(sources)
        if shares:
            self.steps, self.skips = self.steps + steps, self.skips + skips
        for name, share in shares.items():
            if len(self.of) >= MOST_SOURCES and name not in self.of:
                continue
            so_far, skipped = self.of[name]
            self.of[name] = so_far + share * steps, skipped + share * skips

    def worst(self) -> Unlearned | None:
        """The source that lost most, among those skipped far more often than the rest and than chance explains."""
        return max(self._holes(), key=lambda hole: hole.lost, default=None)

    def _holes(self) -> Iterator[Unlearned]:
        for name, (steps, skipped) in self.of.items():
            data = steps / self.steps
            is_far = skipped >= FEWEST and skipped > FAR * data * self.skips
            if is_far and _chance(skipped / self.skips, self.skips, data) < UNLIKELY / len(self.of):
                yield Unlearned(name, round(skipped), round(self.skips), data, skipped / steps)


_COUNT = re.compile(r"\d+\.?\d*|\.\d+", re.ASCII)


@lru_cache(maxsize=1024)
def shares_of(sources: str) -> Mapping[str, float]:
    """The share of each source in a batch; empty if the text cannot be read.

    >>> shares_of("grammar=6 stdlib=2"), shares_of("grammar")
    ({'grammar': 0.75, 'stdlib': 0.25}, {})
    """
    pairs = (word.rpartition("=") for word in sources.split())
    rows = {name: float(count) for name, _, count in pairs if name and _COUNT.fullmatch(count)}
    total = sum(rows.values())
    return {name: count / total for name, count in rows.items()} if 0 < total < math.inf else {}


def _chance(share: float, skips: float, data: float) -> float:
    """An upper bound (Chernoff) on the chance that a source of share ``data`` has so large a share of the skips.

    >>> round(_chance(1.0, 3, 0.1), 9)
    0.001
    """
    others = (1 - share) * math.log((1 - share) / (1 - data)) if share < 1 else 0.0
    return math.exp(-skips * (share * math.log(share / data) + others))
