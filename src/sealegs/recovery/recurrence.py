"""Decides which past interventions were for the anomaly that comes now. No torch here.

Anomalies are the same if the run has not recovered since the intervention; if they come at the same step or batch; if
they are alike and one comes right after the recovery from the other; or if they are alike and have come twice before.
Coming within a thousand steps of each other is no evidence: a run of weeks has several anomalies, each with its own
cause.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile
from typing import Any, NamedTuple, Self

from sealegs.errors import SourceError
from sealegs.record.reading import shown
from sealegs.recovery.actions import Action, Rollback, actions_from, is_whole, plain_actions

PLACE = 20
"""Steps, or batches, around an onset that are the same place; an onset is dated no better than that."""
SOON = 100
"""Steps after a recovery in which a like anomaly is the same one. The judge counts an alarm to the incident before it
for as long."""
PATTERN = 2
"""Recoveries from like anomalies after which the next one is the same, however long it stayed away."""


class Trigger(StrEnum):
    """The kinds of anomaly that ask the playbook for a decision."""

    NONFINITE_WEIGHTS = "nonfinite-weights"
    """A parameter is NaN or infinite: every later step would start from it."""
    NONFINITE_OFTEN = "nonfinite-often"
    """Loss or gradients are not finite several times in a row, or in too large a share of the steps."""
    DAMAGED = "damaged"
    """Steps are rejected one after the other, and batches that were healthy before are bad too: the weights are
    damaged."""
    BAD_DATA = "bad-data"
    """Steps are rejected one after the other, but batches that were healthy before still are: the data are bad."""
    SPOILT = "spoilt"
    """Other data came, were trained on and are gone, and batches that were healthy before are worse off for them."""
    NOT_RECOVERING = "not-recovering"
    """At a check, the loss of an incident was neither back nor coming down."""
    BUDGET_SPENT = "budget-spent"
    """The budget of skipped steps is used up."""
    REPLICAS_DIFFER = "replicas-differ"
    """Ranks that should hold the same weights do not. Only a playbook that says so does anything about it."""
    ASKED = "asked"
    """A person's request: part of the history, but for no rung, and it uses up no budget."""


class ComparableAnomaly(NamedTuple):
    """An anomaly, as far as it can be compared with others."""

    trigger: Trigger
    onset: int
    batch: int | None = None
    """The batch of the onset."""
    kind: str = ""
    """Kind of the open incident, such as ``spike`` or ``nonfinite``; empty where none is open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PastIntervention:
    """An intervention that was carried out: an entry of a run's history."""

    incident: int
    """Number of the incident; 0 where none was open."""
    onset: int
    """The onset of the anomaly."""
    step: int
    """The step at which it was decided."""
    trigger: Trigger
    rung: int | None
    """Number of the rung, from 1 as in the table; None where there was none."""
    actions: tuple[Action, ...]
    batch: int | None = None
    """The batch of the onset."""
    kind: str = ""
    """Kind of the incident."""
    recovered: int | None = None
    """The step at which the run had recovered; None where it has not, or it is not known."""
    went_to: int | None = None
    """The step of the state that was restored; None where there was none, or it is not known."""

    @property
    def case(self) -> ComparableAnomaly:
        """The anomaly that it was for."""
        return ComparableAnomaly(self.trigger, self.onset, self.batch, self.kind)

    @property
    def left_out(self) -> int:
        """Batches, from that of the onset on, that were left out."""
        return next((action.skip for action in self.actions if isinstance(action, Rollback)), 0)

    def went_back(self, onset: int) -> int:
        """Steps that it went back, for an anomaly that has come back at ``onset``: from its own onset, or from that one
        where both may be the same."""
        if self.went_to is None:
            return next((action.back for action in self.actions if isinstance(action, Rollback)), 0)
        is_same = abs(onset - self.onset) <= PLACE
        return max((min(onset, self.onset) if is_same else self.onset) - self.went_to, 0)

    def to_plain(self) -> dict[str, Any]:
        """The entry as JSON values."""
        own = {name: getattr(self, name) for name in ("incident", "onset", "step", "rung", *_LATER)}
        return own | {"trigger": self.trigger.value, "actions": plain_actions(self.actions)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """The entry that ``to_plain`` wrote, read back from a file."""
        try:
            own = {name: plain[name] for name in ("incident", "onset", "step", "rung")}
            later = {name: plain.get(name, default) for name, default in _LATER.items()}
            trigger, actions = Trigger(plain["trigger"]), plain["actions"]
            is_sound = all(is_whole(value, 0) or (name == "rung" and value is None) for name, value in own.items())
            is_sound &= all(
                is_whole(later[name], 0) or later[name] is None for name in ("batch", "recovered", "went_to")
            )
            is_sound &= isinstance(actions, list) and isinstance(later["kind"], str)
        except (AttributeError, KeyError, TypeError, ValueError):
            is_sound = False
        if not is_sound:
            raise SourceError(
                f"treatment {shown(plain, 200)}: it has no incident, onset, step, trigger, rung and actions to read"
            )
        return cls(**own, **later, trigger=trigger, actions=actions_from(actions))


_LATER: dict[str, Any] = {"batch": None, "kind": "", "recovered": None, "went_to": None}
"""Fields that older ledgers lack. Without them an anomaly is the same for as long as ``again_within`` says."""


def first_apart(one: Sequence[PastIntervention], other: Sequence[PastIntervention]) -> float:
    """The earliest step that only one of two replicas went back to: what either has kept of later ones may not be of
    the run as it went on. Infinite where both went back to the same."""
    moves = [
        tuple((past.step, past.went_to) for past in history if past.went_to is not None) for history in (one, other)
    ]
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*moves, strict=False)))
    return min((went_to for each in moves for _, went_to in each[common:]), default=math.inf)


def same_anomaly(
    case: ComparableAnomaly, history: Sequence[PastIntervention], *, again_within: int
) -> list[PastIntervention]:
    """The interventions for the anomaly that begins now or has come back, newest first.

    Sameness is transitive: an anomaly that is the same as a second, which is the same as a third, is the same as the
    third.

    >>> damaged = Trigger.DAMAGED
    >>> first = PastIntervention(incident=1, onset=300, step=306, trigger=damaged, rung=3, actions=(), recovered=352)
    >>> again = [ComparableAnomaly(damaged, onset) for onset in (310, 400, 700)]
    >>> [len(same_anomaly(anomaly, [first], again_within=1000)) for anomaly in again]
    [1, 1, 0]
    """
    same: list[PastIntervention] = []
    pattern = _pattern(case, history, again_within)
    for intervention in reversed(history):
        linked = [case, *(other.case for other in same)]
        if intervention in pattern or any(_is_same(intervention, later, again_within) for later in linked):
            same.append(intervention)
    return same


def _is_same(before: PastIntervention, case: ComparableAnomaly, again_within: int) -> bool:
    """Whether the anomaly of an intervention is the one that came after it."""
    after = case.onset - before.onset
    if after > again_within:
        return False
    if before.recovered is None or abs(after) <= PLACE:
        return True
    if before.batch is not None and case.batch is not None:
        end = before.batch + before.left_out + PLACE  # bad data may last longer than the batches left out
        if before.batch - PLACE <= case.batch <= end:
            return True
    is_alike = before.trigger == case.trigger or (before.kind == case.kind != "")
    return is_alike and case.onset - before.recovered <= SOON


def _pattern(case: ComparableAnomaly, history: Sequence[PastIntervention], again_within: int) -> list[PastIntervention]:
    """Interventions for a series of like anomalies, each within reach of the next; empty where it may still be
    chance."""
    found: list[PastIntervention] = []
    onset = case.onset
    for intervention in reversed(history):
        if (intervention.trigger, intervention.kind) != (case.trigger, case.kind):
            continue
        if onset - intervention.onset > again_within:
            break
        found.append(intervention)
        onset = intervention.onset
    recoveries = {intervention.recovered for intervention in found} - {None}
    return found if len(recoveries) >= PATTERN else []
