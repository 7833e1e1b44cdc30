"""Detects a loader that gives one batch, or a few in turn, again and again: the loss falls meanwhile, so nothing else
tells."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from sealegs.errors import ConfigError
from sealegs.vocabulary import Finding, Row, Severity

BEFORE = 64
"""Batches before the repeated one that say how often one batch follows itself by chance."""
FEWEST = 3
"""Times in a row from which a batch can be repeated: the last of an epoch may be the first of the next."""
FROM_THE_START = 20
"""Times in a row after which it is said that a run has had one batch only."""
FEW = 4
"""The most batches that are looked for in turn: data of as few are repeated in every epoch."""


class RepeatedBatchState(NamedTuple):
    """The detector's state: the last batch and those before it."""

    last: str = ""
    """Digest of the last batch; empty before the first."""
    in_a_row: int = 0
    """How often it came in a row."""
    before: tuple[str, ...] = ()
    """Digests of the batches before it, one for each row of equal ones."""
    is_told: bool = False
    """Whether this row of equal ones was reported."""
    is_turn_told: bool = False
    """Whether it was reported that a few batches take turns, and no other has come since."""


class Turns(NamedTuple):
    """The last batches, as far as they are a few in turn, and those before them."""

    few: frozenset[str]
    again: int
    """How often one of them came again."""
    before: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedBatch:
    """The same batch, or the same few, more often in a row than data with as few batches would give it by chance."""

    chance: float = 1e-6
    """Chance of such a row in health. Data of ten batches in random order may repeat one a few times."""
    name: str = "repeated-batch"

    def __post_init__(self) -> None:
        if not 0 < self.chance < 1:
            raise ConfigError(f"RepeatedBatch.chance={self.chance}: a probability, between 0 and 1")

    def init(self) -> RepeatedBatchState:
        """The state before the first step."""
        return RepeatedBatchState()

    def look(self, state: RepeatedBatchState, now: Row) -> Finding | None:
        """Judge the batch of a step; a row of equal ones is reported once, and never skipped."""
        digest = str(now.get("batch_hash", ""))
        if digest and digest != state.last:
            return self._look_at_turns(state, now, digest)
        if not digest or state.is_told:
            return None
        count, limit = state.in_a_row + 1, self._limit(state)
        if count < limit:
            return None
        note = "times that the loader has given one batch in a row"
        if not state.before:  # one batch may be overfitted on purpose
            note, limit = "times that this batch was trained on, the only one since the start", math.inf
        return self._finding(now, count, limit, note)

    def _look_at_turns(self, state: RepeatedBatchState, now: Row, digest: str) -> Finding | None:
        turns = self._turns(state, digest)
        if turns is None or state.is_turn_told or turns.again < (limit := self._limit_of(turns)):
            return None
        note = f"times that the loader has given one of the same {len(turns.few)} batches again, and no other"
        return self._finding(now, turns.again, limit, note)

    def _turns(self, state: RepeatedBatchState, digest: str) -> Turns | None:
        """The few batches that a batch is one of; None where it is new, or where there were never more."""
        if digest not in state.before[-(FEW - 1) :]:  # most steps by far
            return None
        rows = (*state.before, state.last, digest)
        few: set[str] = set()
        first = len(rows)
        while first and (rows[first - 1] in few or len(few) < FEW):
            first -= 1
            few.add(rows[first])
        while rows[first] not in rows[first + 1 :]:  # the last of the data before it
            few.remove(rows[first])
            first += 1
        before = rows[:first]
        return Turns(frozenset(few), len(rows) - first - len(few), before) if len(set(before)) > FEW else None

    def _finding(self, now: Row, count: float, limit: float, note: str) -> Finding:
        return Finding(
            detector=self.name,
            step=int(now["step"]),
            severity=Severity.WATCH,
            signal="batch_hash",
            value=float(count),
            limit=limit,
            spoils_update=False,
            note=note,
        )

    def learn(self, state: RepeatedBatchState, now: Row) -> RepeatedBatchState:
        """Learn the batch of a step."""
        digest = str(now.get("batch_hash", ""))
        if not digest:
            return state
        if digest == state.last:
            is_told = state.is_told or state.in_a_row + 1 >= self._limit(state)
            return state._replace(in_a_row=state.in_a_row + 1, is_told=is_told)
        before = (*state.before, state.last)[-BEFORE:] if state.last else ()
        turns = self._turns(state, digest)
        is_turn_told = digest in state.before[-(FEW - 1) :] and (
            state.is_turn_told or (turns is not None and turns.again >= self._limit_of(turns))
        )
        return RepeatedBatchState(digest, 1, before, is_turn_told=is_turn_told)

    def _limit_of(self, turns: Turns) -> int:
        """How often a few batches come again at the most by chance, by as many of the commonest before them."""
        most = sum(count for _, count in Counter(turns.before).most_common(len(turns.few)))
        share = (most + 1) / (len(turns.before) + 2)
        return max(FEWEST, 1 + math.ceil(math.log(self.chance) / math.log(share)))

    def _limit(self, state: RepeatedBatchState) -> float:
        """How often in a row a batch comes at the most by chance, by the commonest of those before it."""
        if not state.before:
            return FROM_THE_START
        most = Counter(state.before).most_common(1)[0][1]
        share = (most + 1) / (len(state.before) + 2)
        return max(FEWEST, 1 + math.ceil(math.log(self.chance) / math.log(share)))
