"""What was decided in, ``recovery.json`` out, and back: what going back does not undo, and survives the process."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from sealegs.data.position import Batches
from sealegs.errors import SourceError
from sealegs.record.files import whole_file, writing
from sealegs.record.schema import RECOVERY, speakable
from sealegs.recovery.adjustments import Adjustments
from sealegs.recovery.playbook import Playbook
from sealegs.recovery.recurrence import PastIntervention
from sealegs.watch import Watch

HELD = 50
"""Healthy steps past an onset after which what was done has helped."""


class Entries(NamedTuple):
    """What the books say at a moment, of what a treatment changes in them."""

    adjustments: Adjustments
    history: tuple[PastIntervention, ...]
    interventions: int
    data: Mapping[str, Any]


class Ledger:
    """The treatments of a run, what came of them, and what stays changed."""

    def __init__(self, playbook: Playbook, batches: Batches, watch: Watch, folder: Path | None) -> None:
        """``folder`` is the run's, where this rank is the one that writes it."""
        self.adjustments = Adjustments()
        self.history: tuple[PastIntervention, ...] = ()
        """With rungs that were passed over."""
        self.interventions = 0
        """How many were noted in all."""
        self._untold: int | None = None
        """The onset of what was treated last, while it is not known what came of it."""
        self._playbook = playbook
        self._batches = batches
        self._watch = watch
        self._folder = folder

    def to_plain(self) -> dict[str, Any]:
        """The books, as JSON values."""
        return {
            "playbook": self._playbook.name,
            "history": [intervention.to_plain() for intervention in self.history],
            "interventions": self.interventions,
            "untold": self._untold,
            "margins": asdict(self.adjustments),
            "data": self._batches.bookkeeping(),
        }

    def take_over(self, plain: Mapping[str, Any]) -> None:
        """Go on with the books of the process before. Rungs of another playbook are none of this one's."""
        history = [PastIntervention.from_plain(entry) for entry in plain["history"]]
        is_same = plain["playbook"] == self._playbook.name
        self.history = tuple(history if is_same else (replace(intervention, rung=None) for intervention in history))
        self.interventions, self._untold = plain["interventions"], plain["untold"]
        self.adjustments = Adjustments(**plain["margins"])
        self._batches.take_over(plain["data"])

    def write(self) -> None:
        """To the run folder, where there is one."""
        if self._folder is None:
            return
        path = self._folder / RECOVERY
        with writing(path), whole_file(path) as file:
            file.write(json.dumps(speakable(self.to_plain()), indent=1).encode())

    def now(self) -> Entries:
        """To be put back, if what is tried does not come about."""
        return Entries(self.adjustments, self.history, self.interventions, self._batches.bookkeeping())

    def put_back(self, entries: Entries) -> None:
        """Undo an intervention that did not come about."""
        self.adjustments, self.history, self.interventions, data = entries
        self._untold = None
        self._batches.put_back(data)
        self.write()

    def enter(self, intervention: PastIntervention, *, is_last: bool) -> None:
        """Something is being done about trouble. What comes of it will be told, unless it is the last."""
        self.history = (*self.history, intervention)
        self.interventions += 1
        self._untold = None if is_last else intervention.onset

    def held(self, step: int, good: int) -> None:
        """So many steps in a row were good, up to this one, and no incident is open: the run has recovered."""
        if self._untold is not None and good >= HELD and step >= self._untold + HELD:
            self.history = tuple(
                intervention if intervention.recovered is not None else replace(intervention, recovered=step)
                for intervention in self.history
            )
            self._tell_outcome(step, "helped", f"{HELD} healthy steps have come of it")

    def lingers(self, step: int) -> None:
        """The incident was waited for long enough, and its loss is not back."""
        if self._untold is not None:
            self._tell_outcome(step, "did not help", "the loss has not come back")

    def came_back(self, number: int, onset: int) -> None:
        """There is trouble again, before step ``number``."""
        if self._untold is not None:
            self._tell_outcome(number, "came back", f"trouble again, since step {onset}")

    def _tell_outcome(self, step: int, result: str, text: str) -> None:
        assert self._untold is not None
        text = f"{result}: {text}, {step - self._untold} steps after the onset"
        self._watch.note("outcome", step=step, intervention=self.interventions, result=result, text=text)
        self._untold = None
        self.write()


def take_over_ledger(watch: Watch, batches: Batches, take_over: Callable[[Mapping[str, Any]], None] | None) -> None:
    """What was done to the run before, where its folder tells; ``take_over`` is the playbook's, where there is one.

    Without one, batches that were left out still are.
    """
    ledger = None if watch.folder is None else read_books(watch.folder)
    if ledger is not None and take_over is not None:
        take_over(ledger)
    elif ledger is not None:
        batches.take_over(ledger["data"])
        watch.note("margins-dropped", margins=ledger["margins"], reason="there is no playbook any more")


def read_books(folder: Path) -> dict[str, Any] | None:
    """The books of a run, where it has some."""
    path = folder / RECOVERY
    try:
        ledger: dict[str, Any] = json.loads(path.read_bytes())
        Adjustments(**ledger["margins"])
        is_sound = isinstance(ledger["history"], list) and isinstance(ledger["data"], dict)
        is_sound &= {"playbook", "interventions", "untold"} <= ledger.keys()
        reason = "" if is_sound else "it has no history, interventions and data"
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error)
    if reason:
        raise SourceError(f"{path}: cannot be read ({reason}); restore it from a copy, or remove it")
    return ledger
