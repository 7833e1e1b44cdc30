"""Follows a run from incident to incident: judged rows in, anomalies out.

It opens and closes incidents, tells the flight recorder and the event log about them, and counts their cost.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from sealegs import incidents, judge
from sealegs.capsule.write import FlightRecorder
from sealegs.incidents import Incident, News
from sealegs.record.writer import RunWriter
from sealegs.recovery.actions import Action
from sealegs.recovery.evidence import Anomaly, AnomalyEvidence
from sealegs.recovery.margin_evidence import Margin, MarginEvidence, Means
from sealegs.recovery.playbook import Playbook
from sealegs.recovery.recurrence import Trigger
from sealegs.signals.collective import Collective
from sealegs.vocabulary import Row, Verdict
from sealegs.watch import Watch


@dataclass(frozen=True, slots=True)
class CostSoFar:
    """What an incident has cost so far."""

    steps: int = 0
    """Steps that were skipped or have to be done again."""
    tokens: int = 0
    seconds: float = 0.0

    def __add__(self, other: "CostSoFar") -> "CostSoFar":
        return CostSoFar(self.steps + other.steps, self.tokens + other.tokens, self.seconds + other.seconds)

    def as_event(self, record: RunWriter | None) -> dict[str, Any]:
        """The cost for an event, with money where the run has a price per hour."""
        price = None if record is None else record.manifest.price_per_hour
        money = None if price is None else round(self.seconds / 3600 * price, 2)
        return {**asdict(self), "seconds": round(self.seconds, 1), "money": money}


class TrackedStep(NamedTuple):
    """What one row says about the run."""

    is_calm: bool
    """The step is healthy, and no incident is open."""
    is_doubtful: bool
    """An incident is open, or the row shows an anomaly."""
    is_retried: bool
    """The step is good, but lies between a restore point and the onset of the open incident: the open incident says
    nothing about it."""
    anomaly: Anomaly | None


class IncidentTracker:
    """The incidents of a run, as far as its rows have been looked at."""

    def __init__(self, playbook: Playbook, watch: Watch, recorder: FlightRecorder, ranks: Collective) -> None:
        self.evidence = AnomalyEvidence(playbook)
        self.margins = MarginEvidence()
        self.healthy = 0
        """Healthy steps in a row: applied, with no open incident."""
        self.good = 0
        """Good steps in a row, whether or not an incident is open."""
        self.is_retried = False
        """``TrackedStep.is_retried`` of the last row."""
        self.is_back = True
        """Whether the loss came back in the incident that closed last. True again after each intervention."""
        self.cost = CostSoFar()
        """Cost of the open incident, or of skips that may become one."""
        self._playbook = playbook
        self._watch = watch
        self._recorder = recorder
        self._ranks = ranks
        self._incidents = incidents.begin()
        self._queue: deque[tuple[Row, Verdict]] = deque()
        self._batch_of: deque[tuple[int, int]] = deque(maxlen=incidents.LATEST)
        """Recent steps with their batches, since an incident may have begun before it was found."""
        self._first_batch: int | None = None
        """The first batch of the incident that opened last."""
        self._skipped = 0
        """Skipped steps in a row, up to the last judged one."""
        self._row_of_skips = 0
        """Length of a row of skips that has just ended."""

    def queue_row(self, row: Row, verdict: Verdict) -> None:
        """Keep a judged row until the step is over."""
        self._queue.append((row, verdict))

    def waiting_rows(self) -> Iterator[tuple[Row, Verdict]]:
        """The judged rows that have not been looked at yet."""
        while self._queue:
            yield self._queue.popleft()

    def advance(self, row: Row, verdict: Verdict, number: int) -> TrackedStep:
        """Look at a row, before step ``number``."""
        self._recorder.record_row(row, verdict)
        if (batch := row.get("batch_index")) is not None:
            self._batch_of.append((int(row["step"]), int(batch)))
        self._incidents, news = incidents.advance(self._incidents, row, verdict, self._playbook.looks)
        anomaly = self.evidence.weigh(row, verdict)
        self.margins.observe(row, verdict)
        if self.evidence.excuse:
            self._watch.note("weights-excused", step=int(row["step"]), reason=self.evidence.excuse)
        if anomaly is None and self._incidents.is_open and self.evidence.wants_suspect:
            source = self.suspect()
            anomaly = None if source is None else self.evidence.explained(source)
        is_calm = verdict.go and not self._incidents.is_open
        is_doubtful = self._incidents.is_open or anomaly is not None
        if not verdict.go:
            self.cost += CostSoFar(steps=1)
        elif is_calm and not news:  # the news may be that one has just closed
            self.cost = CostSoFar()  # a lone skip belongs to no incident
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
            anomaly = self._act_on_news(item, int(row["step"]), number) or anomaly
        course = self._incidents.course
        is_before_onset = self._incidents.is_open and course.is_treated and int(row["step"]) < course.onset
        self.is_retried = is_before_onset and verdict.go and verdict.incident is None and anomaly is None
        return TrackedStep(is_calm, is_doubtful, self.is_retried, anomaly)

    def suspect(self) -> str | None:
        """The source that the evidence names. Each rank knows only its own batches, so all go by rank 0."""
        return self._ranks.gather(self.evidence.suspect())[0]

    def led_actions(self, actions: Iterable[Action], means: Means) -> tuple[tuple[Action, ...], tuple[Margin, ...]]:
        """Actions as the evidence about margins leads them, by rank 0 as well."""
        return self._ranks.gather(self.margins.led(actions, means))[0]

    @property
    def incident(self) -> Incident | None:
        """The open incident."""
        return self._incidents.open

    @property
    def has_other_data(self) -> bool:
        """Whether the last row was good in a run whose data changed long ago. The new data are its data now, though its
        loss may never be what it was."""
        return self.good > 0 and self.evidence.has_other_data

    def end(self, number: int) -> None:
        """Close the open incident: the run is halted before step ``number``."""
        if (incident := incidents.ended(self._incidents)) is not None:
            self._tell_closed(incident, number)

    def close(self) -> None:
        """Write the open incident as it stands: the run ends here."""
        if (incident := incidents.ended(self._incidents)) is not None:
            self._recorder.follow_up(incident)

    def row_of_skips(self) -> int:
        """How many steps in a row were skipped, once, after the row has ended."""
        count, self._row_of_skips = self._row_of_skips, 0
        return count

    def begin_anew(self) -> None:
        """Start over after an intervention: later rows are judged for themselves."""
        self.evidence.begin_anew()
        self.margins.forget()
        self.is_back = True
        self._begin_counting()

    def resume_at(self) -> None:
        """Start over after a move without an intervention: the last probe's finding still holds."""
        found = self.evidence.state_dict()
        self.evidence.forget()
        self.evidence.load_state_dict(found)
        self._begin_counting()

    def _begin_counting(self) -> None:
        self.healthy = self.good = self._skipped = self._row_of_skips = 0

    def went_back(self, cost: CostSoFar) -> None:
        """Note that the run is back at a healthy state, and that the steps since are to be done again."""
        self.forget_queued()
        self._batch_of.clear()
        self.cost += cost

    def forget_queued(self) -> None:
        """Drop the judged rows not yet looked at: they are from steps that the run has left."""
        self._queue.clear()

    def state_dict(self) -> dict[str, Any]:
        """The state that belongs to a step, as JSON values."""
        return {
            "incidents": self._incidents,
            "evidence": self.evidence.state_dict(),
            "healthy": self.healthy,
            "good": self.good,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self._incidents = judge.thaw(incidents.begin(), state["incidents"])
        if (found := state.get("evidence")) is not None:  # older states have none
            self.evidence.load_state_dict(found)
        self.healthy, self.good = state.get("healthy", 0), state.get("good", 0)

    def _act_on_news(self, news: News, step: int, number: int) -> Anomaly | None:
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
        elif news.is_decaying and not self._is_waiting_in_vain:
            course = self._incidents.course
            limit = "" if course.limit is None else f", is to come below {course.limit:.4g}"
            rows, mean = self._incidents.rows - course.onset_row + 1, course.mean
            text = f"step {step}  incident {incident.number} after {rows} steps: loss {mean:.4g}{limit}, is coming down"
            self._watch.note("incident-look", step=step, number=incident.number, text=f"{text}: waited")
        else:
            how = (
                "comes down too slowly: it is above that of the run's beginning"
                if news.is_decaying
                else "is not coming down"
            )
            text = f"{incident}; the loss {how}"
            if not (excuse := self._excuse(incident)):
                batch = self._first_batch
                return Anomaly(trigger=Trigger.NOT_RECOVERING, onset=incident.start, batch=batch, text=text)
            self._watch.note("weights-excused", step=step, reason=f"{text}, but {excuse}")
        return None

    @property
    def _is_waiting_in_vain(self) -> bool:
        """Whether this was the last look, and the loss is still above that of the run's beginning. To learn all of it
        again takes longer than to go back."""
        followed = self._incidents.rows - self._incidents.course.followed_from
        return followed >= self._playbook.looks[-1] and self.evidence.has_lost_everything

    def _excuse(self, incident: Incident) -> str:
        """Why the weights are not the reason that a loss does not come down; empty where they may be, so that a
        rollback can help."""
        if self.evidence.is_signed:
            return "it takes both signs, so it is no measure of the weights"
        if incident.kind == "collapse":
            return "it is about other signals than the loss, which are no reason to go back"
        if self.evidence.is_running_away(incident.start):
            return ""
        if self.evidence.was_changed_on_purpose(incident.start):
            return "a change was announced since it began, so that its level is another one on purpose"
        if self.evidence.is_sound:
            return "the last probe found that the data have changed, and not the weights"
        if self.evidence.had_grown(incident.usual):
            return "it was higher than at the start of the run before that, so it is no measure of the weights"
        if not self.evidence.has_risen(incident.usual):
            return "rises as large have come back by half or more by themselves in this run"
        return ""

    def _tell_closed(self, incident: Incident, step: int) -> None:
        cost = self.cost.as_event(self._watch.record)
        self._watch.note("incident-closed", step=step, **asdict(incident), text=str(incident), cost=cost)
        self._recorder.follow_up(incident)
