"""Playbooks: a trigger and the run's history in, the next rung out. No torch here.

    decision = choose(playbook, trigger, onset, history)

A playbook is a ladder. A new anomaly begins at the first rung for its trigger. An anomaly that comes back takes a later
rung, and never the same one twice. When no rung is left, the run is halted with advice. ``recovery/playbook_runner.py``
carries the actions out.
"""

import math
import textwrap
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Self

from sealegs.errors import ConfigError
from sealegs.recovery.actions import (
    ACTIONS,
    Action,
    Continue,
    Halt,
    LowerLR,
    Rollback,
    SwapSource,
    Tighten,
    TightenByEvidence,
    is_number,
    is_whole,
    refuse_unless,
)
from sealegs.recovery.recurrence import ComparableAnomaly, PastIntervention, Trigger, same_anomaly

WIDTH, WHEN_WIDTH = 100, 34
"""Columns of the printed table, and of its second column."""


OPT_IN = frozenset({Trigger.REPLICAS_DIFFER})
"""Triggers that come only where a rung is for them."""
TRIGGERS = frozenset(Trigger) - {Trigger.ASKED} - OPT_IN
"""The other triggers that a rung can be for."""


HEALS = frozenset({Trigger.SPOILT})
"""Anomalies that heal by themselves, if slowly. One rollback per run undoes them, and they end no run. Where they come
again, that is what the data are like: leaving these out each time would mean never learning them."""

HALTING = frozenset({Trigger.NONFINITE_WEIGHTS, Trigger.BUDGET_SPENT})
"""Without a rung for these the run is halted, since it would train on garbage or on nothing. Without a rung for the
others it goes on."""

ADVICE = {
    Trigger.NONFINITE_WEIGHTS: "lower the peak learning rate, warm up longer, clip at 1.0 or below; in fp16, train in "
    "bf16",
    Trigger.NONFINITE_OFTEN: "look for the first layer that is not finite (sealegs locate); compute softmax and loss "
    "in fp32; in fp16, train in bf16",
    Trigger.DAMAGED: "if it came back at the same step, look for what writes into the weights there: code of the loop, "
    "or the machine; else lower the peak learning rate and warm up longer, and where it is not so yet use beta2 0.95, "
    "clip at 1.0 or below, and from 1B parameters up QK-norm or z-loss",
    Trigger.BAD_DATA: "look at the data of the skipped batches, and take their source out of the mixture",
    Trigger.SPOILT: "look at the data of these batches, and announce it if they are to be learned",
    Trigger.NOT_RECOVERING: "lower the peak learning rate; where it is not so yet, use beta2 0.95, and from 1B "
    "parameters up QK-norm or z-loss",
    Trigger.REPLICAS_DIFFER: "look at the machine of that rank, and for code that writes weights on one rank alone",
    Trigger.BUDGET_SPENT: "look at the data of the skipped batches; if they are sound, lower the peak learning rate",
}
"""By trigger, what may be wrong with the run's setup where interventions did not help."""
LOADED = "no update has been made: load or initialise other weights"
"""What is said instead where weights were not finite at the first step."""


@dataclass(frozen=True, slots=True)
class Rung:
    """One step of a playbook: its triggers and its actions. Sets and lists are accepted too."""

    on: Set[Trigger]
    """The rung is for any of these."""
    actions: tuple[Action, ...]
    """All are taken, in this order."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "on", _triggers(self.on))
        object.__setattr__(self, "actions", _actions(self.actions))

    @property
    def rolls_back(self) -> bool:
        """Whether it uses up one of the rollbacks."""
        return any(isinstance(action, Rollback) for action in self.actions)

    @property
    def halts(self) -> bool:
        """Whether it halts the run."""
        return any(isinstance(action, Halt) for action in self.actions)

    def __str__(self) -> str:
        return "; ".join(map(str, self.actions))


@dataclass(frozen=True, slots=True)
class Decision:
    """The next actions, and why."""

    rung: int | None
    """Number of the rung, from 1 as in the table; None where none is left, or none is for the trigger."""
    actions: tuple[Action, ...]
    reason: str

    @property
    def halts(self) -> bool:
        """Whether it halts the run."""
        return any(isinstance(action, Halt) for action in self.actions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Playbook:
    """Rungs for anomalies that come while nobody watches, and the numbers that bound them. Prints as a table.

    >>> mine = Playbook(
    ...     name="mine",
    ...     rungs=(
    ...         Rung(on={Trigger.DAMAGED}, actions=(Rollback(back=50, skip=20),)),
    ...         Rung(on={Trigger.DAMAGED}, actions=(Rollback(back=500, skip=20), LowerLR(0.5))),
    ...     ),
    ... )
    >>> print(mine)
    playbook mine
    rung  when                                what is done
       -  a step is rejected                  skip it
       1  damaged                             roll back to the newest healthy state at least 50 steps
                                              before the onset, skip 20 batches
       2  damaged                             roll back to the newest healthy state at least 500 steps
                                              before the onset, skip 20 batches; learning rate x 0.5,
                                              warmed up again over 50 steps
       -  bad-data, nonfinite-often,          go on, skipping what is rejected
          not-recovering, spoilt
       -  budget-spent, nonfinite-weights     halt
    What comes back before the run has recovered, or at the same place, or soon, is the same anomaly: it
    takes a later rung. With none left, or after 10 rollbacks in all, the run is halted.
    """

    name: str
    rungs: tuple[Rung, ...] = ()
    looks: tuple[int, ...] = (50, 200, 500)
    """Rows after the onset at which recovery checks whether the loss is coming down."""
    probe_after: int = 5
    """Surprising steps in a row after which the weights can count as damaged. The first probe comes at the first
    surprise, before later batches can have been learned."""
    again_within: int = 1000
    """Steps after an onset in which another anomaly can be the same one, come back; ``recovery/recurrence.py`` says
    what else has to speak for it. In a series, each may be this far from the one before."""
    nonfinite_in_a_row: int = 3
    """Non-finite steps in a row that count as often."""
    nonfinite_share: float = 0.01
    """Share of the last 500 steps that counts as often."""
    rollbacks: int = 10
    """Rollbacks that a run may make in all."""

    def __post_init__(self) -> None:
        refuse_unless(isinstance(self.name, str) and bool(self.name), "Playbook.name", self.name, "a word")
        for name in ("rungs", "looks"):
            value = getattr(self, name)
            refuse_unless(isinstance(value, list | tuple), f"Playbook.{name}", value, "a tuple")
            object.__setattr__(self, name, tuple(value))
        for rung in self.rungs:
            refuse_unless(isinstance(rung, Rung), "Playbook.rungs", rung, "Rung(on={Trigger...}, actions=(...,))")
        is_sound = bool(self.looks) and all(is_whole(look, 10) for look in self.looks)
        is_sound = is_sound and list(self.looks) == sorted(set(self.looks))
        refuse_unless(is_sound, "Playbook.looks", self.looks, "numbers of steps, rising, from 10 on")
        for name, lowest in (("probe_after", 1), ("again_within", 1), ("nonfinite_in_a_row", 1), ("rollbacks", 0)):
            value = getattr(self, name)
            refuse_unless(is_whole(value, lowest), f"Playbook.{name}", value, f"a whole number from {lowest}")
        is_sound = is_number(self.nonfinite_share) and 0 < self.nonfinite_share <= 1
        refuse_unless(is_sound, "Playbook.nonfinite_share", self.nonfinite_share, "a share, above 0 and up to 1")
        self._refuse_idle_rungs()

    @classmethod
    def observe(cls) -> Self:
        """Skips and halts only, without rungs; incidents leave capsules to be replayed.

        >>> print(Playbook.observe())
        playbook observe
        rung  when                                what is done
           -  a step is rejected                  skip it
           -  bad-data, damaged,                  go on, skipping what is rejected
              nonfinite-often, not-recovering,
              spoilt
           -  budget-spent, nonfinite-weights     halt
        """
        return cls(name="observe")

    @classmethod
    def standard(cls) -> Self:
        """Rolls back to just before the onset, then further, then with a lower learning rate; takes out bad data.

        >>> print(Playbook.standard())
        playbook standard
        rung  when                                what is done
           -  a step is rejected                  skip it
           -  the loss is coming down             wait, and look again after 50, 200 and 500 steps
           1  bad-data, budget-spent              take out the source that the evidence names
           2  bad-data                            go on, skipping what is rejected
           3  damaged, nonfinite-often,           roll back to the newest healthy state, skip 10 batches
              nonfinite-weights, not-recovering
           4  damaged, nonfinite-often,           roll back to the newest healthy state at least 100 steps
              nonfinite-weights, not-recovering   before the onset, skip 50 batches; tighten what the
                                                  evidence asks for
           5  damaged, nonfinite-often,           roll back to the newest healthy state at least 1000 steps
              nonfinite-weights, not-recovering   before the onset, skip 200 batches; learning rate x 0.5,
                                                  warmed up again over 50 steps; clip at 0.5; tighten what
                                                  the evidence asks for
           6  anything but spoilt                 halt
           7  spoilt                              roll back to the newest healthy state, skip 10 batches
        What comes back before the run has recovered, or at the same place, or soon, is the same anomaly: it
        takes a later rung. With none left, or after 10 rollbacks in all, the run is halted. What is spoilt
        heals by itself, too: it is undone once in a run, and halts none.
        """
        state = TRIGGERS - HEALS - {Trigger.BAD_DATA, Trigger.BUDGET_SPENT}
        return cls(
            name="standard",
            rungs=(
                Rung({Trigger.BAD_DATA, Trigger.BUDGET_SPENT}, (SwapSource(),)),
                Rung({Trigger.BAD_DATA}, (Continue(),)),
                Rung(state, (Rollback(back=0, skip=10),)),
                Rung(state, (Rollback(back=100, skip=50), TightenByEvidence())),
                Rung(state, (Rollback(back=1000, skip=200), LowerLR(0.5), Tighten(clip=0.5), TightenByEvidence())),
                Rung(TRIGGERS - HEALS, (Halt(),)),
                Rung(HEALS, (Rollback(back=0, skip=10),)),
            ),
        )

    @classmethod
    def palm(cls) -> Self:
        """What PaLM's authors did by hand: roll back about 100 steps and skip 200 to 500 batches.

        >>> print(Playbook.palm())
        playbook palm
        rung  when                                what is done
           -  a step is rejected                  skip it
           -  the loss is coming down             wait, and look again after 50, 200 and 500 steps
           1  damaged, nonfinite-often,           roll back to the newest healthy state at least 100 steps
              nonfinite-weights, not-recovering   before the onset, skip 200 batches
           2  damaged, nonfinite-often,           roll back to the newest healthy state at least 100 steps
              nonfinite-weights, not-recovering   before the onset, skip 500 batches
           3  budget-spent, damaged,              halt
              nonfinite-often,
              nonfinite-weights, not-recovering
           -  bad-data, spoilt                    go on, skipping what is rejected
        What comes back before the run has recovered, or at the same place, or soon, is the same anomaly: it
        takes a later rung. With none left, or after 10 rollbacks in all, the run is halted.
        """
        state = TRIGGERS - HEALS - {Trigger.BAD_DATA, Trigger.BUDGET_SPENT}
        return cls(
            name="palm",
            rungs=(
                Rung(state, (Rollback(back=100, skip=200),)),
                Rung(state, (Rollback(back=100, skip=500),)),
                Rung(state | {Trigger.BUDGET_SPENT}, (Halt(),)),
            ),
        )

    def __str__(self) -> str:
        """One row per rung; what happens without a rung has a dash."""
        rows = [("rung", "when", "what is done"), ("-", "a step is rejected", "skip it")]
        if self.has_rung_for(Trigger.NOT_RECOVERING):
            looks = " and ".join(map(str, self.looks)).replace(" and ", ", ", len(self.looks) - 2)
            rows.append(("-", "the loss is coming down", f"wait, and look again after {looks} steps"))
        rows += [(str(number), _when(rung.on), str(rung)) for number, rung in enumerate(self.rungs, 1)]
        others = frozenset(trigger for trigger in TRIGGERS if not self.has_rung_for(trigger))
        for triggers, action in ((others - HALTING, Continue()), (others & HALTING, Halt())):
            rows += [("-", _when(triggers), str(action))] if triggers else []
        lines = [f"playbook {self.name}", *(line for row in rows for line in _table_lines(*row))]
        if self.rungs:
            text = (
                f"What comes back before the run has recovered, or at the same place, or soon, is the same anomaly: it "
                f"takes a later rung. With none left, or after {self.rollbacks} rollbacks in all, the run is halted."
            )
            if any(map(self.has_rung_for, HEALS)):
                text += f" What is {', '.join(HEALS)} heals by itself, too: it is undone once in a run, and halts none."
            lines += textwrap.wrap(text, WIDTH)
        return "\n".join(lines)

    def has_rung_for(self, trigger: Trigger) -> bool:
        """Whether the playbook does anything about a trigger."""
        return any(trigger in rung.on for rung in self.rungs)

    def _refuse_idle_rungs(self) -> None:
        """Refuse rungs that are never reached, or that repeat what has just failed."""
        for number, rung in enumerate(self.rungs, 1):
            for earlier, other in enumerate(self.rungs[: number - 1], 1):
                shared = other.on & rung.on
                if shared and (other.halts or other.actions == rung.actions):
                    why = f"rung {earlier} halts" if other.halts else f"rung {earlier} has done the same"
                    raise ConfigError(f"Playbook.rungs: {why} on {_when(shared)} before rung {number}: leave one out")


def choose(
    playbook: Playbook,
    trigger: Trigger,
    onset: int,
    history: Sequence[PastIntervention],
    *,
    batch: int | None = None,
    kind: str = "",
) -> Decision:
    """The next rung for a trigger. The anomaly began at step ``onset`` with ``batch``; ``kind`` is the incident's.

    It is never a rung that this anomaly has used, nor one before it. When its rungs or the run's rollbacks are used up,
    the run is halted, unless the anomaly heals by itself. A rollback goes as far as its rung says, or as far as
    ``steps_back`` says for a short run and after rollbacks that have gone further.

    >>> print(choose(Playbook.standard(), Trigger.DAMAGED, 4821, ()).reason)
    damaged at step 4821: rung 3 is the first for it
    """
    what = f"{trigger} at step {onset}"
    rungs = {number: rung for number, rung in enumerate(playbook.rungs, 1) if trigger in rung.on}
    history = [intervention for intervention in history if intervention.trigger != Trigger.ASKED]
    if not rungs:
        reason = f"{what}: playbook {playbook.name} has no rung for it"
        return _end(trigger, onset, reason) if trigger in HALTING else Decision(None, (Continue(),), reason)
    if trigger in HEALS and any(intervention.trigger == trigger for intervention in history):
        return Decision(None, (Continue(),), f"{what}: it was undone once, and has come again: such are these data")
    anomaly = same_anomaly(ComparableAnomaly(trigger, onset, batch, kind), history, again_within=playbook.again_within)
    used = max((t.rung for t in anomaly if t.rung in rungs), default=0)
    number = next((number for number in rungs if number > used), None)
    if number is None:
        return _end(trigger, onset, f"{what}: rung {used} was the last for it, and has not cured it")
    rung = rungs[number]
    spent = sum(any(isinstance(action, Rollback) for action in intervention.actions) for intervention in history)
    if rung.rolls_back and spent >= playbook.rollbacks:
        return _end(
            trigger, onset, f"{what}: {spent} rollbacks have been made, and {playbook.rollbacks} are allowed in all"
        )
    after = f"comes after rung {used}" if used else "is the first for it"
    rollbacks = [at for at, each in rungs.items() if each.rolls_back]
    share = sum(at <= number for at in rollbacks) / max(len(rollbacks), 1)
    before = max((intervention.went_back(onset) for intervention in anomaly), default=0)
    actions = tuple(
        replace(action, back=steps_back(action.back, onset, share, before)) if isinstance(action, Rollback) else action
        for action in _advised(rung.actions, _advice(trigger, onset))
    )
    return Decision(number, actions, f"{what}: rung {number} {after}{_distance(rung, actions, onset)}")


def _distance(rung: Rung, actions: tuple[Action, ...], onset: int) -> str:
    """Why a rollback goes another distance than its rung says; empty where it does not."""
    for asked, action in zip(rung.actions, actions, strict=True):
        if isinstance(asked, Rollback) and isinstance(action, Rollback) and action.back != asked.back:
            why = "nearer states have not helped" if action.back > asked.back else f"the run had {onset} steps"
            return f", and goes back {action.back} steps instead of {asked.back}: {why}"
    return ""


def steps_back(asked: int, onset: int, share: float, before: int) -> int:
    """The least distance of a rollback from its onset, where its rung asks for ``asked`` steps.

    A run that is shorter than that goes back by a share of itself, that of the rung among the rollbacks: the last goes
    to the beginning. What came back after going ``before`` steps back is not tried from any nearer.

    >>> [steps_back(asked, 600, share, 0) for asked, share in ((0, 1 / 3), (100, 2 / 3), (1000, 1.0))]
    [0, 100, 600]
    >>> steps_back(1000, 600, 2 / 3, 0), steps_back(100, 600, 2 / 3, 170), steps_back(100, 150, 2 / 3, 170)
    (400, 170, 150)
    """
    scaled = asked if asked <= onset else math.ceil(onset * share)
    return min(max(scaled, before), onset)


def _table_lines(number: str, when: str, what: str) -> Iterable[str]:
    """A row of the table, in as many lines as it takes."""
    whens = textwrap.wrap(when, WHEN_WIDTH, break_on_hyphens=False)
    whats = textwrap.wrap(what, WIDTH - WHEN_WIDTH - 8, break_on_hyphens=False)
    for line in range(max(len(whens), len(whats))):
        cells = (number if line == 0 else "", whens[line : line + 1], whats[line : line + 1])
        yield f"{cells[0]:>4}  {''.join(cells[1]):<{WHEN_WIDTH}}  {''.join(cells[2])}".rstrip()


def _when(triggers: Set[Trigger]) -> str:
    return f"anything but {', '.join(HEALS)}" if triggers == TRIGGERS - HEALS else ", ".join(sorted(triggers))


def _end(trigger: Trigger, onset: int, reason: str) -> Decision:
    """The decision where no rung is left: a halt, unless the anomaly heals by itself."""
    return Decision(None, (Continue() if trigger in HEALS else Halt(_advice(trigger, onset)),), reason)


def _advice(trigger: Trigger, onset: int) -> str:
    return LOADED if trigger == Trigger.NONFINITE_WEIGHTS and onset == 0 else ADVICE[trigger]


def _advised(actions: tuple[Action, ...], advice: str) -> tuple[Action, ...]:
    """The actions, where a halt without advice gets this one."""
    return tuple(Halt(advice) if action == Halt() else action for action in actions)


def _triggers(given: Any) -> frozenset[Trigger]:
    triggers = tuple(given) if isinstance(given, Iterable) else ()
    is_sound = bool(triggers) and all(isinstance(trigger, str) and trigger in TRIGGERS | OPT_IN for trigger in triggers)
    refuse_unless(is_sound, "Rung.on", given, f"a set with one or more of {', '.join(sorted(TRIGGERS | OPT_IN))}")
    return frozenset(map(Trigger, triggers))


def _actions(given: Any) -> tuple[Action, ...]:
    refuse_unless(isinstance(given, list | tuple), "Rung.actions", given, "a tuple of actions: (Rollback(back=50),)")
    actions = tuple(given)
    is_sound = bool(actions) and all(isinstance(action, ACTIONS) for action in actions)
    names = ", ".join(kind.__name__ for kind in ACTIONS)
    refuse_unless(is_sound, "Rung.actions", given, f"one or more of {names}")
    kinds = [type(action) for action in actions]
    refuse_unless(len(set(kinds)) == len(kinds), "Rung.actions", given, "each kind of action at most once")
    for alone in (Continue, Halt):
        refuse_unless(alone not in kinds or len(kinds) == 1, "Rung.actions", given, f"{alone.__name__} stands alone")
    return actions
