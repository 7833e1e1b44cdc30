"""Says which rank has computed a micro-batch wrongly, from how far its answers are apart: a pure function.

Four answers are compared. ``own`` is that of the rank whose micro-batch it is, ``next`` that of its neighbour,
``third`` that of one more rank, and ``again`` what the owner gives when it computes once more. Where two devices agree,
the one that gives something else is wrong.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from typing import Any, Literal, NamedTuple, Self, TypeAlias

from sealegs.signals.layout import NEAR

Answer: TypeAlias = Literal["own", "next", "third", "again"]
MEASURED = 32
"""Distances from which a bound is known."""
BEYOND = 16.0
"""By how many times an answer must be further off than any that was measured. Where tails fall with the third power,
that is one in 4,096 of those that would be the furthest: one in 130,000 of all, once 32 are measured."""
FEWEST_PAIRS = 4
"""Pairs of ranks of which the lower median is not that of a broken one, which is part of two."""


class Wrong(NamedTuple):
    """Who has computed wrongly."""

    ranks: tuple[int, ...]
    """One rank; or the two of a pair, where nobody can say which."""
    is_lasting: bool = False
    """Whether it was wrong in its second try, too."""


@dataclass(frozen=True, slots=True)
class Bound:
    """How far two right answers may be apart: by what is usual at a check, as a multiple."""

    is_exact: bool
    """Whether no bit may differ: the same hardware, in deterministic mode."""
    smallest: float = 1.0
    """The rounding of the type that is computed in: what is usual is never below it."""
    measured: int = 0
    largest: float = 1.0
    """The largest multiple that was measured."""

    @property
    def is_known(self) -> bool:
        """Whether answers can be judged."""
        return self.is_exact or self.measured >= MEASURED

    def usual(self, distances: Sequence[float]) -> float:
        """How far answers are apart at one check: the lower median of its pairs. Some batches round worse than others.

        Of too few pairs nobody can say: then it is the same at all checks.
        """
        if len(distances) < FEWEST_PAIRS:
            return self.smallest
        known = sorted(math.inf if math.isnan(each) else each for each in distances)
        return max(known[(len(known) - 1) // 2], self.smallest)

    def differ(self, distance: float, usual: float) -> bool:
        """Whether two answers are not the same; NaN is no answer."""
        limit = 0.0 if self.is_exact else BEYOND * self.largest * usual
        return self.is_known and not distance <= limit

    def with_measured(self, distances: Sequence[float]) -> Self:
        """After one more check. Answers that have nothing in common say nothing of rounding."""
        usual = self.usual(distances)
        near = [each / usual for each in distances if each <= NEAR]
        return replace(self, measured=self.measured + len(near), largest=max((self.largest, *near)))

    def to_plain(self, world: int) -> dict[str, Any]:
        """What was measured, as JSON values."""
        return {"measured": self.measured, "largest": self.largest, "by_peers": world >= FEWEST_PAIRS}

    def from_plain(self, state: Mapping[str, Any], world: int) -> Self:
        """Go on with what another process has measured, if multiples are of the same there."""
        if state.get("by_peers") is not (world >= FEWEST_PAIRS):
            return self
        return replace(self, measured=int(state["measured"]), largest=float(state["largest"]))


def disputed(distances: Sequence[float], bound: Bound) -> tuple[int, ...]:
    """The ranks whose micro-batch the next rank has computed otherwise; ``distances`` are by the rank that it is of."""
    usual = bound.usual(distances)
    return tuple(owner for owner, distance in enumerate(distances) if bound.differ(distance, usual))


def suspects(owners: Sequence[int], world: int) -> tuple[int, ...]:
    """The ranks of which each one alone could be at fault: those that are part of every disputed pair.

    >>> suspects([1], 4), suspects([1, 2], 4), suspects([0, 2], 4), suspects([0, 1], 2)
    ((1, 2), (2,), (), (0, 1))
    """
    pairs = [(owner, (owner + 1) % world) for owner in owners]
    return tuple(rank for rank in sorted({*chain.from_iterable(pairs)}) if all(rank in pair for pair in pairs))


def who_is_wrong(
    owners: Sequence[int],
    world: int,
    apart: Mapping[int, Mapping[tuple[Answer, Answer], float]],
    bound: Bound,
    usual: float = 1.0,
) -> Wrong | None:
    """Who has computed wrongly: of ``apart``, how far the answers to each disputed micro-batch are apart.

    None where no single rank could be it: then it is the loop that does not repeat itself.
    """
    possible = suspects(owners, world)
    if not possible:
        return None
    found = [_wrong(owner, world, apart[owner], bound, usual) for owner in owners]
    named = {one.ranks[0] for one in found if len(one.ranks) == 1}
    if len(named) > 1 or not named <= {*possible}:
        return None
    is_lasting = any(one.is_lasting for one in found)
    if named:
        return Wrong((*named,), is_lasting)
    return Wrong(possible, is_lasting)


def _wrong(owner: int, world: int, apart: Mapping[tuple[Answer, Answer], float], bound: Bound, usual: float) -> Wrong:
    """Of one disputed pair. What two devices agree on is right."""
    ranks = ranks_of(owner, world)

    def agree(one: Answer, other: Answer) -> bool:
        distance = apart.get((one, other), apart.get((other, one)))
        return one == other or (distance is not None and not bound.differ(distance, usual))

    for one, other in combinations(ranks, 2):
        if ranks[one] != ranks[other] and agree(one, other):
            odd = [ranks[answer] for answer in ranks if not agree(answer, one)]
            if len({*odd}) == 1:
                return Wrong((odd[0],), is_lasting=len(odd) > 1)
    return Wrong((owner, ranks["next"]), is_lasting=True)


def ranks_of(owner: int, world: int) -> dict[Answer, int]:
    """Whose each answer is. Of two ranks the neighbour is the third as well: it tries again."""
    third = 1 if world == 2 else 2
    return {"own": owner, "next": (owner + 1) % world, "third": (owner + third) % world, "again": owner}
