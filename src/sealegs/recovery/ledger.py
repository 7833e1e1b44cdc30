"""The ledger of a run, ``recovery.json``: interventions, batches left out, adjustments. Rollbacks and restarts keep
it."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from sealegs.data.cuts import Cuts
from sealegs.data.position import Batches
from sealegs.record.files import whole_file, writing
from sealegs.record.reading import read_object, reading
from sealegs.record.schema import RECOVERY, speakable
from sealegs.record.typed import fits, typed
from sealegs.recovery.adjustments import Adjustments
from sealegs.recovery.playbook import Playbook
from sealegs.recovery.recurrence import PastIntervention, Trigger
from sealegs.signals.collective import Collective
from sealegs.watch import Watch

HELD = 50
"""Healthy steps past the onset after which an intervention has helped."""
NOTHING_TO_HELP = "nothing to help"
"""Outcome of a request that a healthy run has gone on well after."""


@dataclass(frozen=True, slots=True)
class Pending:
    """An intervention whose outcome is not known yet."""

    intervention: int
    """Its number."""
    onset: int
    """The onset of its anomaly; the step of a person's request."""
    is_asked: bool = False
    """Whether a person asked for it."""
    in_incident: bool = True
    """Whether an incident was open."""
    made: int | None = None
    """The step at which it was made; None where the run went back and left the trouble behind, or it is not known."""

    @property
    def has_nothing_to_help(self) -> bool:
        """Whether a person asked for it while nothing was wrong."""
        return self.is_asked and not self.in_incident

    def has_passed(self, step: int) -> bool:
        """Whether a step is far enough behind the onset to tell."""
        return step >= self.onset + HELD

    def left_in_place(self, onset: int) -> bool:
        """Whether a trouble since ``onset`` was there when it was made, and has been there ever since."""
        return self.made is not None and onset < self.made

    def distance(self, step: int) -> str:
        """How far a step is from the onset, in words; after a rollback it may lie before it.

        >>> Pending(1, 300).distance(312), Pending(2, 300, is_asked=True).distance(115)
        ('12 steps after the onset', "185 steps before the request's step")
        """
        mark = "the request's step" if self.is_asked else "the onset"
        count, side = abs(step - self.onset), "after" if step >= self.onset else "before"
        return f"{count} {'step' if count == 1 else 'steps'} {side} {mark}"


class Entries(NamedTuple):
    """The entries that an intervention changes, as they are at one moment."""

    adjustments: Adjustments
    history: tuple[PastIntervention, ...]
    interventions: int
    pending: tuple[Pending, ...]
    data: Mapping[str, Any]


class Ledger:
    """The interventions of a run, their outcomes, and what stays changed."""

    def __init__(
        self, playbook: Playbook, batches: Batches, watch: Watch, folder: Path | None, ranks: Collective
    ) -> None:
        """``folder`` is the run's; None on ranks that do not write."""
        self.adjustments = Adjustments()
        self.history: tuple[PastIntervention, ...] = ()
        """All interventions, and the rungs that could not be carried out."""
        self.interventions = 0
        """How many interventions there were."""
        self._pending: tuple[Pending, ...] = ()
        """The interventions whose outcomes are not known yet, oldest first."""
        self._playbook = playbook
        self._batches = batches
        self._watch = watch
        self._folder = folder
        self._ranks = ranks

    def to_plain(self) -> dict[str, Any]:
        """The ledger as JSON values."""
        return {
            "playbook": self._playbook.name,
            "history": [intervention.to_plain() for intervention in self.history],
            "interventions": self.interventions,
            "untold": self._pending[-1].onset if self._pending else None,
            "pending": [asdict(pending) for pending in self._pending],
            "margins": asdict(self.adjustments),
            "data": self._batches.bookkeeping(),
        }

    def take_over(self, plain: Mapping[str, Any]) -> None:
        """Continue the ledger of the process before. Rung numbers of another playbook are dropped."""
        history = [PastIntervention.from_plain(entry) for entry in plain["history"]]
        is_same = plain["playbook"] == self._playbook.name
        self.history = tuple(history if is_same else (replace(intervention, rung=None) for intervention in history))
        self.interventions, self._pending = plain["interventions"], pending_in(plain)
        self.adjustments = Adjustments(**plain["margins"])
        self._batches.take_over(plain["data"])

    def write(self) -> None:
        """Write the ledger to the run folder, if there is one. No rank goes on before it is written: the first that
        leaves may have the launcher end the others."""
        self._ranks.agree(self._write)

    def _write(self) -> None:
        if self._folder is None:
            return
        path = self._folder / RECOVERY
        self._watch.refuse_lost_folder()
        with writing(path), whole_file(path) as file:
            file.write(json.dumps(speakable(self.to_plain()), indent=1).encode())

    def now(self) -> Entries:
        """The entries as they are now, for ``put_back``."""
        data = self._batches.bookkeeping()
        return Entries(self.adjustments, self.history, self.interventions, self._pending, data)

    def put_back(self, entries: Entries) -> None:
        """Undo the entries of an intervention that failed."""
        self.adjustments, self.history, self.interventions, self._pending, data = entries
        self._batches.put_back(data)
        self.write()

    def enter(self, intervention: PastIntervention, *, is_last: bool) -> None:
        """Enter an intervention. Its outcome will follow; that of the last one, a halt, does not wait for steps."""
        for pending in self._pending if is_last else ():
            self._note_outcome(pending, intervention.step, "unknown", "the run was halted before it showed")
        self.history = (*self.history, intervention)
        self.interventions += 1
        is_asked, in_incident = intervention.trigger == Trigger.ASKED, intervention.incident > 0
        entered = Pending(self.interventions, intervention.onset, is_asked, in_incident, intervention.step)
        self._pending = () if is_last else (*self._pending, entered)

    def halted(self, step: int, *, acted: bool) -> None:
        """Note what came of the last intervention, which was a halt."""
        result = "halted" if acted else "not halted"
        text = "halted: the run ended with it" if acted else "not halted: shadow mode, the run went on"
        self._watch.note("outcome", step=step, intervention=self.interventions, result=result, text=text)

    def went_to(self, step: int) -> None:
        """Enter which state the last intervention has restored."""
        self.history = (*self.history[:-1], replace(self.history[-1], went_to=step))
        self._pending = (*self._pending[:-1], *(replace(pending, made=None) for pending in self._pending[-1:]))

    def held(self, step: int, good: int) -> None:
        """Enter which interventions have helped, once ``good`` steps in a row were good and no incident is open."""
        helped = [pending for pending in self._pending if good >= HELD and pending.has_passed(step)]
        if not helped:
            return
        is_all = len(helped) == len(self._pending)
        self.history = tuple(
            replace(past, recovered=step) if past.recovered is None and (is_all or step >= past.onset + HELD) else past
            for past in self.history
        )
        for pending in helped:
            text = f"{HELD} healthy steps have come of it"
            if pending.has_nothing_to_help:
                self._note_outcome(pending, step, NOTHING_TO_HELP, f"nothing was wrong, and {text}")
            else:
                self._note_outcome(pending, step, "helped", text)

    def lingers(self, step: int) -> None:
        """Enter that the interventions did not help: their incident ran out of time, and the loss is not back."""
        for pending in self._pending:
            self._note_outcome(pending, step, "did not help", "the loss has not come back")

    def came_back(self, number: int, onset: int) -> None:
        """Enter that the anomaly came back before step ``number``, or never went. What a person asked for while nothing
        was wrong has nothing that could come back, but has not helped either."""
        for pending in self._pending:
            result, text = "came back", "trouble again"
            if pending.has_nothing_to_help:
                result, text = "did not help", "trouble"
            elif pending.left_in_place(onset):
                result, text = "did not help", "the same trouble as before"
            self._note_outcome(pending, number, result, f"{text}, since step {onset}")

    def _note_outcome(self, pending: Pending, step: int, result: str, text: str) -> None:
        text = f"{result}: {text}, {pending.distance(step)}"
        self._watch.note("outcome", step=step, intervention=pending.intervention, result=result, text=text)
        self._pending = tuple(other for other in self._pending if other is not pending)
        self.write()


def pending_in(ledger: Mapping[str, Any]) -> tuple[Pending, ...]:
    """The interventions of a written ledger whose outcomes are not known; older ones tell of the last alone."""
    if (pending := ledger.get("pending")) is not None:
        return tuple(typed(Pending, entry) for entry in pending)
    return () if ledger["untold"] is None else (Pending(ledger["interventions"], ledger["untold"]),)


def take_over_ledger(watch: Watch, batches: Batches, take_over: Callable[[Mapping[str, Any]], None] | None) -> None:
    """Continue the ledger in the run folder, if there is one; ``take_over`` is the playbook's, where there is a
    playbook.

    Without a playbook, batches that were left out stay left out.
    """
    ledger = None if watch.folder is None else read_ledger(watch.folder)
    if ledger is not None and take_over is not None:
        take_over(ledger)
    elif ledger is not None:
        batches.take_over(ledger["data"])
        watch.note("margins-dropped", margins=ledger["margins"], reason="there is no playbook any more")


def read_ledger(folder: Path) -> dict[str, Any] | None:
    """The ledger of a run, if it has one."""
    path = folder / RECOVERY
    try:
        with reading(path, cure="restore it from a copy, or remove it"):
            ledger = asdict(typed(_Written, read_object(path, folder)))
            ledger["margins"] = asdict(typed(Adjustments, ledger["margins"]))
            data = typed(_LeftOut, ledger["data"])
            if not all(_is_range(pair) for pair in data.skipped):
                raise ValueError("batches that are left out are no ranges")
            Cuts.from_plain(data.cuts)
            if not all(fits(weight, float) for weight in data.swaps.values()):
                raise ValueError("the weight of a source is no number")
            pending_in(ledger)
            for entry in ledger["history"]:
                PastIntervention.from_plain(entry)
    except FileNotFoundError:
        return None
    return ledger


@dataclass(frozen=True, slots=True)
class _Written:
    """The fields of the file."""

    playbook: str | None
    history: list[Any]
    interventions: int
    untold: int | None
    margins: Mapping[str, Any]
    data: Mapping[str, Any]
    pending: list[Any] | None = None


@dataclass(frozen=True, slots=True)
class _LeftOut:
    """The fields of its ``data``."""

    skipped: list[Any]
    swaps: Mapping[str, Any]
    stratified: bool
    cuts: list[Any] = field(default_factory=list)


def _is_range(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(fits(end, int) for end in pair) and pair[0] <= pair[1]
