"""Summarises from its events what was done to a run: the steps that were skipped and why, and the interventions.

Standard library only, because a watch uses it live. Events of another version count as far as they can be read.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sealegs.record.unlearned_sources import Unlearned
from sealegs.vocabulary import Event, Severity

JUDGED = ("skip", "alarm", "halt")
"""Kinds of event that may stand for a skipped step."""
NOT_FINITE = ("nonfinite", "overflow")
"""Detectors of steps from which nothing could have been learned: their skips lose no data."""
MOST_CHANGES = 3
"""Interventions that are told one by one."""
COOL = 10
"""Steps after an alarm during which an incident still counts as open, where no event closes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skips:
    """Steps whose update was not applied."""

    count: int = 0
    reasons: Mapping[str, int] = field(default_factory=dict)
    """Skips by the detector that caused them, the most common first."""
    first: int | None = None
    last: int | None = None

    @property
    def finite(self) -> int:
        """Skips of steps whose numbers were finite, so that something could have been learned."""
        return self.count - sum(self.reasons.get(name, 0) for name in NOT_FINITE)

    def after(self, step: int, findings: Iterable[Mapping[str, Any]]) -> "Skips":
        """These skips and one more."""
        reasons = Counter(self.reasons)
        reasons[reason_of(findings)] += 1
        first, last = (step if known is None else known for known in (self.first, self.last))
        return replace(
            self,
            count=self.count + 1,
            reasons=dict(reasons.most_common()),
            first=min(first, step),
            last=max(last, step),
        )

    def told(self, steps: int) -> str:
        """``48 of 1,000 steps (spike/loss 40, spike/grad_norm 8), 4.8%, the first at step 120, the last at 990``"""
        why = ", ".join(f"{name} {count:,}" for name, count in self.reasons.items())
        several = f"the first at step {self.first}, the last at {self.last}"
        where = several if self.count > 1 else f"at step {self.first}"
        return f"{self.count:,} of {max(steps, self.count):,} steps ({why}), {spelt(self.share(steps))}, {where}"

    def share(self, steps: int) -> float:
        """The share of ``steps`` that was skipped."""
        return self.count / max(steps, self.count, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """Everything that was done to a run, by its events."""

    steps: int
    """Steps that were run, those before a rollback or a resume included."""
    skips: Skips = Skips()
    unlearned: Unlearned | None = None
    """A source of data that has far more than its share of the skips, where rows name sources."""
    not_acted: int = 0
    """Steps that were rejected but not skipped: in shadow mode, or by a watch."""
    interventions: int = 0
    actions: Mapping[str, int] = field(default_factory=dict)
    """Actions in the interventions, by kind: ``rollback``, ``lower-lr``, ..."""
    changes: Sequence[str] = ()
    """What each of the first interventions changed, and why: ``at step 251 source web has the weight 0 (...)``."""
    outcomes: Mapping[str, int] = field(default_factory=dict)
    """Outcomes of the interventions: ``helped``, ``came back``, ``halted``, ``not known yet``."""
    halted: Event | None = None
    """The event that halted the run, unless the run has gone on since."""
    open_since: Event | None = None
    """The alarm of an incident that was still open at the end of the record."""
    ended_badly: Event | None = None
    """The end of a run that the guard found not to be well."""
    is_one_of_several: bool = False
    """Whether its steps alternate with another guard's, as in a GAN."""

    @property
    def told_of_skips(self) -> str:
        """How many steps were skipped, why, where, and from which data."""
        return told_of(self.skips, self.steps, self.unlearned)


def done_to(events: Iterable[Event], *, steps: int, last: int) -> Done:
    """What was done to a run of ``steps`` steps, the last of which is step ``last``."""
    told = list(events)
    rejected = [event for event in told if is_rejected(event)]
    skips = Skips()
    for event in filter(_is_acted_on, rejected):
        skips = skips.after(event.step, findings_in(event))
    made = [event for event in told if event.kind == "intervention" and _is_acted_on(event)]
    ends = {event.detail.get("intervention"): event.detail.get("result") for event in told if event.kind == "outcome"}
    results = Counter(str(ends.get(event.detail.get("number")) or "not known yet") for event in made)
    return Done(
        steps=steps,
        skips=skips,
        not_acted=len(rejected) - skips.count,
        interventions=len(made),
        actions=dict(Counter(kind for event in made for kind in _actions(event)).most_common()),
        changes=[_change(event) for event in made[:MOST_CHANGES] if event.detail.get("changed")],
        outcomes=dict(results.most_common()),
        halted=_halted(told),
        open_since=_open(told, last),
        ended_badly=next((event for event in told[-1:] if event.detail.get("reason") == "ended-badly"), None),
        is_one_of_several=any(event.kind == "one-of-several" for event in told),
    )


def skipped_steps(events: Iterable[Event]) -> list[int]:
    """The steps whose update was not applied; a step appears as often as it was skipped."""
    return [event.step for event in events if is_rejected(event) and _is_acted_on(event)]


def told_of(skips: Skips, steps: int, unlearned: Unlearned | None) -> str:
    """A sentence about the skips of ``steps`` steps, and the source that has far more than its share of them."""
    return skips.told(steps) + (f"; {unlearned}" if unlearned is not None else "")


def reason_of(findings: Iterable[Mapping[str, Any]]) -> str:
    """The detector that caused a skip: the gravest whose finding spoils the update.

    What is not finite goes before all, since it says that nothing could have been learned. The budget is left out,
    because it only counts what others found.

    >>> budget = {"detector": "budget", "severity": "HALT", "spoils_update": True}
    >>> reason_of([budget, {"detector": "spike/loss", "severity": "GATE", "spoils_update": True}])
    'spike/loss'
    """
    names = [str(finding.get("detector", "unknown")) for finding in findings if _spoils(finding)]
    broken = [name for name in names if name in NOT_FINITE]
    return next((name for name in (*broken, *names) if name != "budget"), names[0] if names else "unknown")


def findings_in(event: Event) -> list[Mapping[str, Any]]:
    """The findings of an event, the gravest first; empty if it has none."""
    found = event.detail.get("findings")
    return [finding for finding in found if isinstance(finding, Mapping)] if isinstance(found, list | tuple) else []


def spelt(share: float) -> str:
    """A share in percent, small ones too.

    >>> spelt(0.048), spelt(0.0004)
    ('4.8%', '0.04%')
    """
    return f"{share:.1%}" if share >= 0.01 else f"{share:.2%}"


def is_rejected(event: Event) -> bool:
    """Whether an event rejected the update of its step, whatever was done about it."""
    return event.kind in JUDGED and any(map(_spoils, findings_in(event)))


def _is_acted_on(event: Event) -> bool:
    return bool(event.detail.get("acted"))


def _spoils(finding: Mapping[str, Any]) -> bool:
    """The same rule as ``Verdict.go``."""
    return bool(finding.get("spoils_update", True)) and finding.get("severity") != Severity.WATCH.name


def _change(event: Event) -> str:
    evidence = event.detail.get("evidence")
    because = f" ({evidence})" if isinstance(evidence, str) and evidence else ""
    return f"at step {event.step} {event.detail['changed']}{because}"


def _actions(event: Event) -> list[str]:
    actions = event.detail.get("actions")
    listed = actions if isinstance(actions, list | tuple) else ()
    return [str(action.get("action", "unknown")) for action in listed if isinstance(action, Mapping)]


def _halted(events: Iterable[Event]) -> Event | None:
    """The event that halted the run, if nothing came after it: no resume, and no intervention."""
    acts, halted = False, None
    for event in events:
        if event.kind in ("guard", "resume", "start"):
            acts, halted = bool(event.detail.get("act", acts)), None
        elif event.kind == "halt" and acts:
            halted = event
        elif event.kind == "intervention" and event.detail.get("acted"):
            halted = event if "halt" in _actions(event) else None
        elif event.kind == "end" and event.detail.get("reason") == "halted":
            halted = halted or event
    return halted


def _open(events: Iterable[Event], last: int) -> Event | None:
    """The alarm of the incident that is open in the end.

    With a playbook an event closes each incident. Without one, an incident is open while its alarm is recent.
    """
    follows, alarm, newest = False, None, 0
    for event in events:
        if event.kind in ("guard", "resume"):
            follows = event.detail.get("playbook") is not None if event.kind == "guard" else follows
            alarm = (
                alarm if alarm is not None and alarm.step < event.step else None
            )  # otherwise the run will meet it again
        elif event.kind == "alarm":
            alarm, newest = event, event.step
        elif event.kind in JUDGED and event.detail.get("incident") is not None:
            newest = event.step
        elif event.kind == "incident-closed":
            alarm = None
    is_fresh = 0 <= last - newest < COOL
    return alarm if follows or is_fresh else None
