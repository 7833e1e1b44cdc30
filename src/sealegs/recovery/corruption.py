"""Says which rank has computed a micro-batch wrongly, from how far its answers are apart: a pure function.

Four answers are compared. ``own`` is that of the rank whose micro-batch it is, ``next`` that of its neighbour,
``third`` that of one more rank, and ``again`` what the owner gives when it computes once more. Where two devices agree,
the one that gives something else is wrong.
"""

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


class Wrong(NamedTuple):
    """Who has computed wrongly."""

    ranks: tuple[int, ...]
    """One rank; or the two of a pair, where nobody can say which."""
    is_lasting: bool = False
    """Whether it was wrong in its second try, too."""


@dataclass(frozen=True, slots=True)
class Bound:
    """How far two right answers may be apart."""

    is_exact: bool
    """Whether no bit may differ: the same hardware, in deterministic mode."""
    smallest: float = 0.0
    """The bound is never below it: the rounding of the type that is computed in."""
    measured: int = 0
    largest: float = 0.0
    """Of the distances that were measured."""

    @property
    def is_known(self) -> bool:
        """Whether answers can be judged."""
        return self.is_exact or self.measured >= MEASURED

    @property
    def limit(self) -> float:
        """Answers that are further apart are not the same."""
        return 0.0 if self.is_exact else BEYOND * max(self.largest, self.smallest)

    def differ(self, distance: float) -> bool:
        """Whether two answers are not the same; NaN is no answer."""
        return self.is_known and not distance <= self.limit

    def with_measured(self, distances: Sequence[float]) -> Self:
        """After one more check. Answers that have nothing in common say nothing of rounding."""
        near = [each for each in distances if each <= NEAR]
        return replace(self, measured=self.measured + len(near), largest=max((self.largest, *near)))

    def to_plain(self) -> dict[str, Any]:
        """What was measured, as JSON values."""
        return {"measured": self.measured, "largest": self.largest}

    def from_plain(self, state: Mapping[str, Any]) -> Self:
        """Go on with what another process has measured."""
        return replace(self, measured=int(state.get("measured", 0)), largest=float(state.get("largest", 0.0)))


def disputed(distances: Sequence[float], bound: Bound) -> tuple[int, ...]:
    """The ranks whose micro-batch the next rank has computed otherwise; ``distances`` are by the rank that it is of."""
    return tuple(owner for owner, distance in enumerate(distances) if bound.differ(distance))


def suspects(owners: Sequence[int], world: int) -> tuple[int, ...]:
    """The ranks of which each one alone could be at fault: those that are part of every disputed pair.

    >>> suspects([1], 4), suspects([1, 2], 4), suspects([0, 2], 4), suspects([0, 1], 2)
    ((1, 2), (2,), (), (0, 1))
    """
    pairs = [(owner, (owner + 1) % world) for owner in owners]
    return tuple(rank for rank in sorted({*chain.from_iterable(pairs)}) if all(rank in pair for pair in pairs))


def who_is_wrong(
    owners: Sequence[int], world: int, apart: Mapping[int, Mapping[tuple[Answer, Answer], float]], bound: Bound
) -> Wrong | None:
    """Who has computed wrongly: of ``apart``, how far the answers to each disputed micro-batch are apart.

    None where no single rank could be it: then it is the loop that does not repeat itself.
    """
    possible = suspects(owners, world)
    if not possible:
        return None
    found = [_wrong(owner, world, apart[owner], bound) for owner in owners]
    named = {one.ranks[0] for one in found if len(one.ranks) == 1}
    if len(named) > 1 or not named <= {*possible}:
        return None
    is_lasting = any(one.is_lasting for one in found)
    if named:
        return Wrong((*named,), is_lasting)
    return Wrong(possible, is_lasting)


def _wrong(owner: int, world: int, apart: Mapping[tuple[Answer, Answer], float], bound: Bound) -> Wrong:
    """Of one disputed pair. What two devices agree on is right."""
    ranks = ranks_of(owner, world)

    def agree(one: Answer, other: Answer) -> bool:
        distance = apart.get((one, other), apart.get((other, one)))
        return one == other or (distance is not None and not bound.differ(distance))

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
