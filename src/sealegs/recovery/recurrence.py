"""What was done before, and trouble that comes now in, the treatments that were of the same trouble out. No torch here.

What is evidence that trouble is the same? That the run has not recovered since it was treated; that it comes at the
same place, be it a step or a batch; that it is alike and comes right after a recovery; that it is alike and has come
twice before. Two troubles within a thousand steps are none: a run of weeks has several, each with a cause of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Self

from sealegs.errors import SourceError
from sealegs.recovery.actions import Action, Rollback, actions_from, is_whole, plain_actions

PLACE = 20
"""Steps, or batches, from an onset that are the same place: an onset is dated no better than that."""
SOON = 100
"""Steps after a recovery in which trouble that is alike is the same; the judge counts an alarm to the incident before
it for as long."""
PATTERN = 2
"""Recoveries from troubles that were all alike after which the next of them is the same, long as it stayed away."""


class Trigger(StrEnum):
    """What asks for a decision."""

    NONFINITE_WEIGHTS = "nonfinite-weights"
    """A parameter is NaN or infinite: every later step would start from it."""
    NONFINITE_OFTEN = "nonfinite-often"
    """Losses or gradients are not finite several times in a row, or in too large a share of the steps."""
    DAMAGED = "damaged"
    """Steps are condemned one after the other, and so is a batch that was healthy before: it is the weights."""
    BAD_DATA = "bad-data"
    """Steps are condemned one after the other, but a batch that was healthy before still is: it is the data."""
    SPOILT = "spoilt"
    """Other data came, were trained on and are gone, and a batch that was healthy before is worse off for them."""
    NOT_RECOVERING = "not-recovering"
    """At a look the loss of an incident was neither back nor coming down."""
    BUDGET_SPENT = "budget-spent"
    """As many steps have been skipped as may be."""
    ASKED = "asked"
    """A person wants it: part of the history, but no rung's, and it spends no budget."""


class ComparableAnomaly(NamedTuple):
    """Trouble as far as it can be compared with other trouble."""

    trigger: Trigger
    onset: int
    batch: int | None = None
    """Of the onset."""
    kind: str = ""
    """Of the incident that is open: ``spike``, ``nonfinite`` and so on; empty where none is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PastIntervention:
    """What was done: an entry of a run's history."""

    incident: int
    """Number of the incident; 0 where none was open."""
    onset: int
    """The step that it began at."""
    step: int
    """The step at which this was decided."""
    trigger: Trigger
    rung: int | None
    """Number of the rung, from 1 as the table has it; None where there was none."""
    actions: tuple[Action, ...]
    batch: int | None = None
    """The batch that it began with."""
    kind: str = ""
    """Of the incident."""
    recovered: int | None = None
    """The step at which the run had recovered; None where it has not, or that is not known."""

    @property
    def case(self) -> ComparableAnomaly:
        """What it was done about."""
        return ComparableAnomaly(self.trigger, self.onset, self.batch, self.kind)

    @property
    def left_out(self) -> int:
        """Batches from that of the onset on which were not trained on again."""
        return next((action.skip for action in self.actions if isinstance(action, Rollback)), 0)

    def to_plain(self) -> dict[str, Any]:
        """As JSON values."""
        own = {name: getattr(self, name) for name in ("incident", "onset", "step", "rung", *_LATER)}
        return own | {"trigger": self.trigger.value, "actions": plain_actions(self.actions)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """From what ``to_plain`` gave, once it has been through a file."""
        try:
            own = {name: plain[name] for name in ("incident", "onset", "step", "rung")}
            later = {name: plain.get(name, default) for name, default in _LATER.items()}
            trigger, actions = Trigger(plain["trigger"]), plain["actions"]
            is_sound = all(is_whole(value, 0) or (name == "rung" and value is None) for name, value in own.items())
            is_sound &= all(is_whole(later[name], 0) or later[name] is None for name in ("batch", "recovered"))
            is_sound &= isinstance(actions, list) and isinstance(later["kind"], str)
        except (AttributeError, KeyError, TypeError, ValueError):
            is_sound = False
        if not is_sound:
            raise SourceError(
                f"treatment {plain!r}: it has no incident, onset, step, trigger, rung and actions to read"
            )
        return cls(**own, **later, trigger=trigger, actions=actions_from(actions))


_LATER: dict[str, Any] = {"batch": None, "kind": "", "recovered": None}
"""What books from before these were kept do not have: trouble is then the same for as long as ``again_within`` says."""


def same_trouble(
    case: ComparableAnomaly, history: Sequence[PastIntervention], *, again_within: int
) -> list[PastIntervention]:
    """The treatments of the trouble that begins now, or has come back: newest first.

    It is linked from treatment to treatment: the same as one that was the same as another is the same as that.

    >>> damaged = Trigger.DAMAGED
    >>> first = PastIntervention(incident=1, onset=300, step=306, trigger=damaged, rung=3, actions=(), recovered=352)
    >>> again = [ComparableAnomaly(damaged, onset) for onset in (310, 400, 700)]
    >>> [len(same_trouble(anomaly, [first], again_within=1000)) for anomaly in again]
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
    """Whether what was treated is the trouble that came after it."""
    after = case.onset - before.onset
    if after > again_within:
        return False
    if before.recovered is None or abs(after) <= PLACE:
        return True
    if before.batch is not None and case.batch is not None:
        end = before.batch + before.left_out + PLACE  # the stretch of bad data may be longer than what was left out
        if before.batch - PLACE <= case.batch <= end:
            return True
    is_alike = before.trigger == case.trigger or (before.kind == case.kind != "")
    return is_alike and case.onset - before.recovered <= SOON


def _pattern(case: ComparableAnomaly, history: Sequence[PastIntervention], again_within: int) -> list[PastIntervention]:
    """Treatments of troubles like this one, each within reach of the next; none where once before may be chance."""
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
