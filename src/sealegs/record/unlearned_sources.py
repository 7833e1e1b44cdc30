"""Steps and the sources of their data in, which source was hardly learned out: harm is not in skips, but in holes.

A hundred skips all over the data cost next to nothing; seven in a source of fifty batches cost a seventh of what there
is to learn from it. Standard library only, for a watch counts with it live.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

FEWEST = 3
"""Skips of a source below which nothing is said: by one the guard gets to know what is rare, and two may be chance."""
UNLIKELY = 1e-3
"""Chance, for all sources together, below which so many skips of one are no accident."""
FAR = 2.0
"""Times its share of the data that a source has of the skips: less is no hole, but what all of the data loses."""
MUCH = 0.1
"""Share of a source whose loss is worth a look: the weights of a mixture are chosen to about a tenth, and with a tenth
less of one it is another mixture than the one that was asked for."""


class Unlearned(NamedTuple):
    """A source of data that has far more than its share of the skips."""

    source: str
    skipped: int
    skips: int
    """In all."""
    data: float
    """What share of the data it is."""
    lost: float
    """What share of it was never learned."""

    @property
    def is_much(self) -> bool:
        """Whether it is worth a look."""
        return self.lost > MUCH

    def __str__(self) -> str:
        """``7 of 9 skipped steps were of wiki, 10.0% of the data: 14% of it was never learned``"""
        told = f"{self.skipped:,} of {self.skips:,} skipped steps were of {self.source}, {self.data:.1%} of the data"
        return f"{told}: {self.lost:.0%} of it was never learned"


@dataclass(slots=True)
class Division:
    """How steps, and those among them that were skipped, divide over the sources of data."""

    steps: float = 0.0
    skips: float = 0.0
    of: dict[str, tuple[float, float]] = field(default_factory=lambda: defaultdict(lambda: (0.0, 0.0)))
    """The same by source: a batch of two is of both, by their shares."""

    def add(self, sources: str, *, steps: int = 1, skips: int = 0) -> None:
        """So many steps whose batches have these sources, and how many of them were skipped."""
        shares = shares_of(sources)
        if shares:
            self.steps, self.skips = self.steps + steps, self.skips + skips
        for name, share in shares.items():
            so_far, skipped = self.of[name]
            self.of[name] = so_far + share * steps, skipped + share * skips

    def worst(self) -> Unlearned | None:
        """Of the sources that were skipped far more often than the rest, and than chance explains, what lost most."""
        return max(self._holes(), key=lambda hole: hole.lost, default=None)

    def _holes(self) -> Iterator[Unlearned]:
        for name, (steps, skipped) in self.of.items():
            data = steps / self.steps
            is_far = skipped >= FEWEST and skipped > FAR * data * self.skips
            if is_far and _chance(skipped / self.skips, self.skips, data) < UNLIKELY / len(self.of):
                yield Unlearned(name, round(skipped), round(self.skips), data, skipped / steps)


@lru_cache(maxsize=1024)
def shares_of(sources: str) -> Mapping[str, float]:
    """What part of a batch each source is; of what cannot be read, nothing.

    >>> shares_of("grammar=6 stdlib=2"), shares_of("grammar")
    ({'grammar': 0.75, 'stdlib': 0.25}, {})
    """
    pairs = (word.rpartition("=") for word in sources.split())
    rows = {name: float(count) for name, _, count in pairs if name and count.replace(".", "", 1).isdigit()}
    total = sum(rows.values())
    return {name: count / total for name, count in rows.items()} if total else {}


def _chance(share: float, skips: float, data: float) -> float:
    """That a source has so large a share of the skips by accident, where it is less of the data: at most, by Chernoff.

    >>> round(_chance(1.0, 3, 0.1), 9)
    0.001
    """
    others = (1 - share) * math.log((1 - share) / (1 - data)) if share < 1 else 0.0
    return math.exp(-skips * (share * math.log(share / data) + others))
