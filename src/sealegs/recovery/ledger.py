"""The ledger of a run, ``recovery.json``: interventions, batches left out, adjustments. Rollbacks and restarts keep
it."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from sealegs.data.position import Batches
from sealegs.record.files import whole_file, writing
from sealegs.record.reading import read_object, reading
from sealegs.record.schema import RECOVERY, speakable
from sealegs.record.typed import fits, typed
from sealegs.recovery.adjustments import Adjustments
from sealegs.recovery.playbook import Playbook
from sealegs.recovery.recurrence import PastIntervention
from sealegs.signals.collective import Collective
from sealegs.watch import Watch

HELD = 50
"""Healthy steps past the onset after which an intervention has helped."""


class Entries(NamedTuple):
    """The entries that an intervention changes, as they are at one moment."""

    adjustments: Adjustments
    history: tuple[PastIntervention, ...]
    interventions: int
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
        self._pending_onset: int | None = None
        """The onset of the last intervention, until its outcome is known."""
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
            "untold": self._pending_onset,
            "margins": asdict(self.adjustments),
            "data": self._batches.bookkeeping(),
        }

    def take_over(self, plain: Mapping[str, Any]) -> None:
        """Continue the ledger of the process before. Rung numbers of another playbook are dropped."""
        history = [PastIntervention.from_plain(entry) for entry in plain["history"]]
        is_same = plain["playbook"] == self._playbook.name
        self.history = tuple(history if is_same else (replace(intervention, rung=None) for intervention in history))
        self.interventions, self._pending_onset = plain["interventions"], plain["untold"]
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
        return Entries(self.adjustments, self.history, self.interventions, self._batches.bookkeeping())

    def put_back(self, entries: Entries) -> None:
        """Undo the entries of an intervention that failed."""
        self.adjustments, self.history, self.interventions, data = entries
        self._pending_onset = None
        self._batches.put_back(data)
        self.write()

    def enter(self, intervention: PastIntervention, *, is_last: bool) -> None:
        """Enter an intervention. Its outcome will follow, unless it is the last."""
        self.history = (*self.history, intervention)
        self.interventions += 1
        self._pending_onset = None if is_last else intervention.onset

    def held(self, step: int, good: int) -> None:
        """Enter that the last intervention helped, once ``good`` steps in a row were good and no incident is open."""
        if self._pending_onset is not None and good >= HELD and step >= self._pending_onset + HELD:
            self.history = tuple(
                intervention if intervention.recovered is not None else replace(intervention, recovered=step)
                for intervention in self.history
            )
            self._note_outcome(step, "helped", f"{HELD} healthy steps have come of it")

    def lingers(self, step: int) -> None:
        """Enter that the last intervention did not help: its incident ran out of time, and the loss is not back."""
        if self._pending_onset is not None:
            self._note_outcome(step, "did not help", "the loss has not come back")

    def came_back(self, number: int, onset: int) -> None:
        """Enter that the anomaly came back, before step ``number``."""
        if self._pending_onset is not None:
            self._note_outcome(number, "came back", f"trouble again, since step {onset}")

    def _note_outcome(self, step: int, result: str, text: str) -> None:
        assert self._pending_onset is not None
        text = f"{result}: {text}, {step - self._pending_onset} steps after the onset"
        self._watch.note("outcome", step=step, intervention=self.interventions, result=result, text=text)
        self._pending_onset = None
        self.write()


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
            if not all(fits(weight, float) for weight in data.swaps.values()):
                raise ValueError("the weight of a source is no number")
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


@dataclass(frozen=True, slots=True)
class _LeftOut:
    """The fields of its ``data``."""

    skipped: list[Any]
    swaps: Mapping[str, Any]
    stratified: bool


def _is_range(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(fits(end, int) for end in pair) and pair[0] <= pair[1]
