"""Judged rows in, Troubles out: follows a run from incident to incident, tells of them, and counts what they cost."""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from sealegs import incidents, judge
from sealegs.capsule.write import FlightRecorder
from sealegs.incidents import Incident, News
from sealegs.record.writer import RunWriter
from sealegs.recovery.evidence import Anomaly, AnomalyEvidence
from sealegs.recovery.playbook import Playbook
from sealegs.recovery.recurrence import Trigger
from sealegs.signals.collective import Collective
from sealegs.vocabulary import Row, Verdict
from sealegs.watch import Watch


@dataclass(frozen=True, slots=True)
class CostSoFar:
    """What trouble has cost."""

    steps: int = 0
    """Skipped, or done once more."""
    tokens: int = 0
    seconds: float = 0.0

    def __add__(self, other: "CostSoFar") -> "CostSoFar":
        return CostSoFar(self.steps + other.steps, self.tokens + other.tokens, self.seconds + other.seconds)

    def told(self, record: RunWriter | None) -> dict[str, Any]:
        """For an event of a run: in money too, where an hour of it has a price."""
        price = None if record is None else record.manifest.price_per_hour
        money = None if price is None else round(self.seconds / 3600 * price, 2)
        return {**asdict(self), "seconds": round(self.seconds, 1), "money": money}


class TrackedStep(NamedTuple):
    """What a row says of the run."""

    is_calm: bool
    """Healthy, and no incident is open."""
    is_doubtful: bool
    """An incident is open, or a row has shown trouble."""
    is_retried: bool
    """Good, of a run that went back and has not come to the onset of its incident again: that is open, and says nothing
    of what comes before it."""
    anomaly: Anomaly | None


class IncidentTracker:
    """What a run has been through, as far as its rows have been looked at."""

    def __init__(self, playbook: Playbook, watch: Watch, recorder: FlightRecorder, ranks: Collective) -> None:
        self.evidence = AnomalyEvidence(playbook)
        self.healthy = 0
        """Steps in a row ..."""
        self.good = 0
        """... whether or not an incident is still open."""
        self.is_retried = False
        """Whether the last row was of a run that went back, and good; see ``TrackedStep``."""
        self.is_back = True
        """Whether the loss came back in the incident that was closed last, if it was since the last treatment."""
        self.cost = CostSoFar()
        """Of the incident that is open, or of what may become one."""
        self._playbook = playbook
        self._watch = watch
        self._recorder = recorder
        self._ranks = ranks
        self._incidents = incidents.begin()
        self._judged: deque[tuple[Row, Verdict]] = deque()
        self._batch_of: deque[tuple[int, int]] = deque(maxlen=incidents.LATEST)
        """Steps, and the batches that they trained on: an incident may have begun before it was found."""
        self._first_batch: int | None = None
        """That of the incident which was opened last."""
        self._skipped = 0
        """Steps in a row, up to the last that was judged."""
        self._row_of_skips = 0
        """Steps that were skipped in a row which is over."""

    def hear(self, row: Row, verdict: Verdict) -> None:
        """A row was judged: it is looked at when the step is over."""
        self._judged.append((row, verdict))

    def heard(self) -> Iterator[tuple[Row, Verdict]]:
        """What was judged and not looked at yet."""
        while self._judged:
            yield self._judged.popleft()

    def follow(self, row: Row, verdict: Verdict, number: int) -> TrackedStep:
        """Look at a row, before step ``number``."""
        self._recorder.follow(row, verdict)
        if (batch := row.get("batch_index")) is not None:
            self._batch_of.append((int(row["step"]), int(batch)))
        self._incidents, news = incidents.follow(self._incidents, row, verdict, self._playbook.looks)
        anomaly = self.evidence.take(row, verdict)
        if self.evidence.excuse:
            self._watch.note("weights-excused", step=int(row["step"]), reason=self.evidence.excuse)
        if anomaly is None and self._incidents.is_open and self.evidence.wants_suspect:
            source = self.suspect()
            anomaly = None if source is None else self.evidence.explained(source)
        is_calm = verdict.go and not self._incidents.is_open
        is_doubtful = self._incidents.is_open or anomaly is not None
        if not verdict.go:
            self.cost += CostSoFar(steps=1)
        elif is_calm and not news:  # which may be that one has just been closed
            self.cost = CostSoFar()  # what was skipped alone is no incident's
        self.good = self.good + 1 if verdict.go and verdict.incident is None else 0
        if is_calm:
            self.healthy += 1
        elif is_doubtful:
            self.healthy = 0
        if not verdict.go:
            self._skipped += 1
        elif self._skipped:
            self._row_of_skips = self._skipped if self._skipped >= self._playbook.probe_after else 0
            self._skipped = 0
        for item in news:
            anomaly = self._told(item, int(row["step"]), number) or anomaly
        course = self._incidents.course
        is_before_onset = self._incidents.is_open and course.is_treated and int(row["step"]) < course.start
        self.is_retried = is_before_onset and verdict.go and verdict.incident is None and anomaly is None
        return TrackedStep(is_calm, is_doubtful, self.is_retried, anomaly)

    def suspect(self) -> str | None:
        """Each rank knows the sources of its own batches; all go by what rank 0 finds."""
        return self._ranks.gather(self.evidence.suspect())[0]

    @property
    def incident(self) -> Incident | None:
        """The one that is open."""
        return self._incidents.open

    @property
    def has_other_data(self) -> bool:
        """Whether the last row was good, of a run whose data were found to be others long ago: they are its data now,
        though its loss may never be what it was."""
        return self.good > 0 and self.evidence.has_other_data

    def end(self, number: int) -> None:
        """The run is halted before step ``number``, and its incident is over."""
        if (incident := incidents.ended(self._incidents)) is not None:
            self._tell_closed(incident, number)

    def close(self) -> None:
        """The run ends here: an incident that is open is written as it stands."""
        if (incident := incidents.ended(self._incidents)) is not None:
            self._recorder.follow_up(incident)

    def row_of_skips(self) -> int:
        """How many steps were skipped in a row that is over: said once."""
        count, self._row_of_skips = self._row_of_skips, 0
        return count

    def begin_anew(self) -> None:
        """Something was done about it: what comes then is judged for itself."""
        self.evidence.forget()
        self.is_back = True
        self._begin_counting()

    def resume_at(self) -> None:
        """The run goes on elsewhere, and nothing was done about it: what a probe has found still holds."""
        found = self.evidence.state_dict()
        self.evidence.forget()
        self.evidence.load_state_dict(found)
        self._begin_counting()

    def _begin_counting(self) -> None:
        self.healthy = self.good = self._skipped = self._row_of_skips = 0

    def went_back(self, cost: CostSoFar) -> None:
        """The run is back at a healthy state, and what it did since is to be done once more."""
        self.forget_judged()
        self._batch_of.clear()
        self.cost += cost

    def forget_judged(self) -> None:
        """What was not looked at yet is of another line."""
        self._judged.clear()

    def state_dict(self) -> dict[str, Any]:
        """What belongs to a step, as JSON values."""
        return {"incidents": self._incidents, "evidence": self.evidence.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._incidents = judge.thaw(incidents.begin(), state["incidents"])
        if (found := state.get("evidence")) is not None:  # older states have none
            self.evidence.load_state_dict(found)

    def _told(self, news: News, step: int, number: int) -> Anomaly | None:
        incident = news.incident
        if news.kind == "opened":
            self.evidence.new_incident()
            self._first_batch = next((batch for step, batch in self._batch_of if step >= incident.start), None)
            self._recorder.open(incident, number)
        elif news.kind == "closed":
            self._tell_closed(incident, step)
            self.cost = CostSoFar()
            self.is_back = incident.recovery_loss is not None
            if self.is_back:
                self.evidence.loss_is_back()
        elif not news.is_decaying and self._is_of_the_weights(incident):
            return Anomaly(
                trigger=Trigger.NOT_RECOVERING,
                onset=incident.start,
                batch=self._first_batch,
                text=f"{incident}; the loss is not coming down",
            )
        return None

    def _is_of_the_weights(self, incident: Incident) -> bool:
        """Whether a loss that does not come down may be theirs, so that going back can help."""
        is_excused = self.evidence.is_sound or self.evidence.has_grown
        return not is_excused and self.evidence.has_risen(incident.usual)

    def _tell_closed(self, incident: Incident, step: int) -> None:
        cost = self.cost.told(self._watch.record)
        self._watch.note("incident-closed", step=step, **asdict(incident), text=str(incident), cost=cost)
        self._recorder.follow_up(incident)
