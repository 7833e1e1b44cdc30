"""Rows and Verdicts in, Incidents out: when each began, how bad it was, how it went on.

    state, news = advance(state, row, verdict)

It is a fold like the judge's, and the same live and offline. An alarm opens an incident. It closes when the mean loss
of ten rows is back where the healthy steps before it were. At most one is open: what happens meanwhile belongs to it.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple

from sealegs.detectors.collapse import ADVICE
from sealegs.vocabulary import Finding, Row, Severity, Verdict

AVERAGED = 10
"""Rows whose mean loss is compared with the limit. One row proves nothing: 31 % of healthy ones are above it."""
USUAL = 100
"""Healthy steps before the onset that say what is usual: the limit is their mean plus half a standard deviation."""
FEWEST = 10
"""Healthy steps from which there is a limit. Without one, ``FAST`` calm rows close the incident."""
BEFORE = 50
"""Healthy steps before the onset whose mean is the loss before."""
FAST, SLOW = 50, 500
"""Rows after the onset within which a recovery is fast, or slow."""
LOOKS = (50, 200, 500)
"""Rows after which an open incident is checked again."""
GRACE = 10
"""Rows after the last check in which it stays open, so that a rollback because of that check finds it open."""
ENOUGH = 0.1
"""Share of what is left to the limit that a loss must fall by, from check to check, to be decaying."""
RECENT = 4
"""A loss that has surely not fallen at that pace in the last quarter of the rows before a check is flat, however far it
fell before: in twenty rows at least, and in ``REMEMBERED`` at most."""
SURE = 3.0
"""Standard errors by which a mean must have risen from one check to the next to climb."""
MOST_ALIKE = 0.9
"""The highest correlation of the noise of a row with that of the next that is reckoned with."""
REMEMBERED = 128
"""Losses of an open incident that are remembered."""
PROPORTION = "proportion"
KINDS = {
    "nonfinite": "nonfinite",
    "overflow": "overflow",
    "drift": "drift",
    "monotonic-rise": "drift",
    PROPORTION: "drift",
    "spike": "spike",
    **dict.fromkeys(ADVICE, "collapse"),
}
"""Kind of an incident, by the detector that found it; others are spikes."""
LATEST = 224
"""Rows after which a finding comes at the latest: the slow channel's rise through 14 blocks of 16. Such an early onset
must be no restore point, and must not count as usual."""
BLOCK = 32
"""Losses that are moved at once: copying all that are remembered at every step would cost three microseconds."""
SUSPECTS = 32
"""Suspicious rows that are remembered: the incident that an alarm opens may have been at its worst in one of them."""
MEMORY = USUAL + LATEST
MASK = (1 << LATEST) - 1
BEYOND = 1e150
"""Stands for a loss that is not finite, and for any larger one: states hold nothing that JSON cannot spell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """A stretch of a run in which something was wrong."""

    number: int
    """From 1, each once: the judge's number, unless that has gone back in a rollback."""
    start: int
    """The onset: the first of the skips that led to the alarm, or where the slow channel must have begun to see it,
    with the suspicious rows right before it."""
    kind: str
    """``nonfinite``, ``spike``, ``level_shift``, ``drift``, ``overflow`` or ``collapse``."""
    pre_loss: float
    """Mean of the 50 healthy steps before the onset; NaN if there are none."""
    usual: float
    """Mean of the 100 healthy steps before the onset; NaN if there are none."""
    limit: float
    """What the mean loss of ten rows must come back under; NaN if there were too few healthy steps to say."""
    peak: int
    """The step with the highest loss of the incident so far. Healthy steps of a later attempt are none of it, nor are
    the healthy steps of an incident that is about something not finite."""
    peak_loss: float
    """NaN where it was not finite."""
    grad_norm_peak: float
    """Infinite where it was not finite, NaN where none was logged."""
    end: int | None = None
    """The step at which it was closed."""
    trajectory: str | None = None
    """``fast``, ``slow``, ``lingering`` or ``divergent``; None while it is open, where there is no limit, or where the
    run went back to before it and the loss was back then."""
    recovery_loss: float | None = None
    """The mean loss of the ten rows that closed it; None if it did not recover."""

    def __str__(self) -> str:
        """``incident 2: spike at step 4821, loss 2.41 before, 6.93 at step 4822; fast: 2.43 at step 4833``"""
        text = f"incident {self.number}: {self.kind.replace('_', ' ')} at step {self.start}, "
        text += "loss " if math.isnan(self.pre_loss) else f"loss {self.pre_loss:.4g} before, "
        text += "not finite" if math.isnan(self.peak_loss) else f"{self.peak_loss:.4g}"
        text += f" at step {self.peak}"
        if self.end is None:
            return f"{text}; {self.trajectory or 'open'}"
        text += ", before the run went back; " if self.end < self.peak else "; "
        became = "did not recover" if self.recovery_loss is None else f"{self.recovery_loss:.4g}"
        return text + f"{self.trajectory or 'closed'}: {became} at step {self.end}"


class News(NamedTuple):
    """A change of an incident that a row brought."""

    kind: Literal["opened", "look", "closed"]
    """``opened`` comes again, with the same number, for an incident that closed too soon: the judge says that a new
    alarm belongs to it."""
    incident: Incident
    is_decaying: bool | None = None
    """At a check: whether the loss is coming down, so that waiting is worth it."""


class Memory(NamedTuple):
    """The losses of the last healthy steps."""

    older: tuple[float, ...] = ()
    newest: tuple[float, ...] = ()
    step: int = -1
    """The step of the last of them."""

    @property
    def losses(self) -> tuple[float, ...]:
        """All of them, in order."""
        return self.older + self.newest

    def after(self, step: int, loss: float) -> "Memory":
        """The memory with one more loss."""
        if len(self.newest) < BLOCK:
            return Memory(self.older, (*self.newest, loss), step)
        return Memory(self.losses[-MEMORY:], (loss,), step)

    def before(self, step: int, rows: int) -> "Memory":
        """The memory without the last ``rows``, which were at that step or later."""
        losses = self.losses
        return Memory(losses[: max(len(losses) - rows, 0)], (), min(self.step, step - 1))


class RowSummary(NamedTuple):
    """The part of a row that counts here."""

    step: int
    loss: float
    grad_norm: float
    """Negative where it was not logged."""


class Peak(NamedTuple):
    """The highest loss and gradient norm so far."""

    step: int = -1
    loss: float = -BEYOND
    grad_norm: float = -1.0

    def after(self, seen: RowSummary) -> "Peak":
        """The peak after one more row; of equal losses the first is the peak."""
        grad_norm = max(self.grad_norm, seen.grad_norm)
        is_higher = self.step < 0 or seen.loss > self.loss
        return Peak(seen.step, seen.loss, grad_norm) if is_higher else Peak(self.step, self.loss, grad_norm)


class SkipRow(NamedTuple):
    """The unbroken row of skips up to the last step, while no incident is open: one may have begun with them."""

    start: int = -1
    rows: int = 0
    peak: Peak = Peak()

    def after(self, seen: RowSummary) -> "SkipRow":
        """The row with one more skip."""
        return SkipRow(self.start if self.rows else seen.step, self.rows + 1, self.peak.after(seen))


class OpenIncident(NamedTuple):
    """The incident that is open, or was the last one."""

    number: int = 0
    kind: str = ""
    start: int = 0
    pre_loss: float | None = None
    usual: float | None = None
    limit: float | None = None
    peak: Peak = Peak()
    onset_row: int = 0
    """The row of its onset, in this attempt."""
    followed_from: int = 0
    """The row that checks are counted from: the alarm; in a later attempt, the onset."""
    is_treated: bool = False
    """Whether the run has gone back to its onset, or further, since."""
    recent: tuple[float, ...] = ()
    """The last losses, as many as are remembered."""
    calm: int = 0
    """Rows in a row, up to the last, that were neither skipped nor an alarm."""
    highest: float = -BEYOND
    """The highest mean loss in this attempt."""
    at_look: float | None = None
    """The mean loss at the last check; before the first one, that of the first ten rows."""
    is_climbing: bool = False
    """Whether it had risen at the last check."""
    opened_again: int = 0
    """The onset of its last stretch, where it was closed and opened again."""
    ranks_differ: bool = False
    """Whether the ranks held different weights when they were last compared: the loss says nothing of that."""

    @property
    def onset(self) -> int:
        """The step that its last stretch began with: a run that goes back further will meet it again."""
        return max(self.start, self.opened_again)

    @property
    def averaged(self) -> tuple[float, ...]:
        """The last losses, as many as are averaged."""
        return self.recent[-AVERAGED:]

    @property
    def mean(self) -> float:
        """Mean of the last losses."""
        return math.fsum(self.averaged) / max(len(self.averaged), 1)

    @property
    def is_back(self) -> bool:
        """Whether the loss is where it was, and updates are applied."""
        if self.limit is None:
            return self.calm >= FAST
        return self.calm >= AVERAGED and self.mean <= self.limit

    @property
    def incident(self) -> Incident:
        """The incident as it stands."""
        loss, norm = self.peak.loss, self.peak.grad_norm
        return Incident(
            number=self.number,
            start=self.start,
            kind=self.kind,
            pre_loss=math.nan if self.pre_loss is None else self.pre_loss,
            usual=math.nan if self.usual is None else self.usual,
            limit=math.nan if self.limit is None else self.limit,
            peak=self.peak.step,
            peak_loss=math.nan if loss >= BEYOND else loss,
            grad_norm_peak=math.nan if norm < 0 else math.inf if norm >= BEYOND else norm,
        )

    def includes(self, seen: RowSummary, is_healthy: bool) -> bool:
        """Whether a row is one of the incident itself, and not of what came after it."""
        if not is_healthy:
            return seen.step >= self.start
        return not self.is_treated and self.kind != "nonfinite"

    def followed_anew(self, row: int) -> "OpenIncident":
        """Start checks and means over with the next row, which has that number."""
        return self._replace(followed_from=row, recent=(), calm=0, highest=-BEYOND, at_look=None, is_climbing=False)

    def after(self, seen: RowSummary, is_healthy: bool) -> "OpenIncident":
        """The incident after one more row."""
        recent = (*self.recent, seen.loss)[-REMEMBERED:]
        peak = self.peak.after(seen) if self.includes(seen, is_healthy) else self.peak
        course = self._replace(recent=recent, calm=self.calm + 1 if is_healthy else 0, peak=peak)
        if len(recent) < AVERAGED:
            return course
        mean = course.mean
        return course._replace(highest=max(self.highest, mean), at_look=mean if self.at_look is None else self.at_look)


class IncidentState(NamedTuple):
    """Everything that the next news depends on: plain values, which ``judge.thaw`` brings back from JSON."""

    rows: int = 0
    """Rows with a loss so far. They are the clock: step numbers may go back, or go by tens."""
    step: int = -1
    """The step of the last of them."""
    memory: Memory = Memory()
    skips: SkipRow = SkipRow()
    is_open: bool = False
    course: OpenIncident = OpenIncident()
    suspicions: int = 0
    """Which of the last rows were suspicious, a bit each, the last one lowest."""
    suspects: tuple[tuple[int, float, float], ...] = ()
    """The last suspicious rows before an incident, a ``RowSummary`` each."""

    @property
    def open(self) -> Incident | None:
        """The open incident, as it stands."""
        return self.course.incident if self.is_open else None


NO_SKIPS = SkipRow()


def begin() -> IncidentState:
    """The state before the first step."""
    return IncidentState()


def advance(
    state: IncidentState, row: Row, verdict: Verdict, looks: Sequence[int] = LOOKS
) -> tuple[IncidentState, tuple[News, ...]]:
    """Follow one step; a row without a loss is ignored. ``looks`` are numbers of rows, rising from 10 on.

    A step that goes back is a new attempt: an open incident stays open, and its time starts when the run is at the
    onset again. It closes 50 rows after that, if the loss is back.
    """
    if "loss" not in row:
        return state, ()
    step, loss = int(row["step"]), float(row["loss"])
    if step < state.step:
        state = gone_back(state, step)
    is_alarm = verdict.incident is not None
    is_healthy = verdict.go and not is_alarm and -BEYOND < loss < BEYOND
    if is_healthy and not state.is_open:  # most steps by far
        suspicions = with_bit(state.suspicions, verdict) if state.suspicions or verdict.is_suspicious else 0
        suspects = suspects_with(state, row, verdict) if suspicions else ()
        memory = state.memory.after(step, loss)
        return IncidentState(state.rows + 1, step, memory, NO_SKIPS, False, state.course, suspicions, suspects), ()
    state = state._replace(suspicions=with_bit(state.suspicions, verdict))
    seen = RowSummary(step, loss_in(row), grad_norm_in(row))
    if (differing := row.get("ranks_differ")) is not None:
        state = state._replace(course=state.course._replace(ranks_differ=float(differing) > 0))
    if not state.is_open and not is_alarm:
        suspects = suspects_with(state, row, verdict)
        return state._replace(rows=state.rows + 1, step=step, skips=state.skips.after(seen), suspects=suspects), ()
    if not state.is_open:
        state = opened(state, seen, verdict)
        return state, (News("opened", state.course.incident),)
    if is_alarm and step < state.course.start:  # it came sooner in a later attempt: that is the onset now
        return begun(state, seen, verdict, state.course.number), ()
    if is_healthy and step < state.course.start:
        state = state._replace(memory=state.memory.after(step, loss))
    return gone_on(state, seen, is_healthy, looks)


def incidents_of(rows: Iterable[Row], verdicts: Iterable[Verdict]) -> list[Incident]:
    """The incidents of a recorded run, in order; needs a verdict for each row with a loss, as ``judge.replay``
    gives."""
    state = begin()
    found: dict[int, Incident] = {}
    for row, verdict in zip((row for row in rows if "loss" in row), verdicts, strict=True):
        state, news = advance(state, row, verdict)
        found |= {item.incident.number: item.incident for item in news}
    if (last := ended(state)) is not None:
        found[last.number] = last
    return list(found.values())


def ended(state: IncidentState) -> Incident | None:
    """The open incident of a run that ends here or is halted: divergent, if that is how it stands."""
    if not state.is_open:
        return None
    return replace(state.course.incident, trajectory="divergent" if diverges(state.course) else None)


def gone_back(state: IncidentState, step: int) -> IncidentState:
    """The state before a row of an earlier step, without what came after it."""
    course, late = state.course, state.memory.step - step + 1
    if state.is_open:
        course = course.followed_anew(state.rows + 1)._replace(is_treated=course.is_treated or step <= course.onset)
    memory = state.memory.before(step, late) if late > 0 else state.memory
    return state._replace(step=step - 1, memory=memory, skips=NO_SKIPS, course=course, suspicions=0, suspects=())


def opened(state: IncidentState, seen: RowSummary, verdict: Verdict) -> IncidentState:
    """Open an incident at an alarm: a new one, or the last one where the judge says that it is still that one."""
    row, last = state.rows + 1, state.course
    if verdict.opens_incident or not last.number:
        return begun(state, seen, verdict, max(last.number + 1, verdict.incident or 1))
    onset = step_before(state, seen, dated_back(state, verdict, 1))
    again = last._replace(opened_again=onset, peak=peak_since(state, onset, last.kind, last.peak))
    course = again.followed_anew(row).after(seen, is_healthy=False)
    return IncidentState(row, seen.step, state.memory, NO_SKIPS, True, course, state.suspicions)


def begun(state: IncidentState, seen: RowSummary, verdict: Verdict, number: int) -> IncidentState:
    """Begin an incident at its onset, with what was usual before it."""
    row, kind, memory = state.rows + 1, kind_of(verdict), state.memory
    skips = (NO_SKIPS if verdict.go else state.skips).after(seen)
    start, rows = skips.start, skips.rows
    late = dated_back(state, verdict, rows)
    if late > rows:
        start, rows = step_before(state, seen, late), late
        memory = memory.before(start, late - 1)
    losses = memory.losses[-USUAL:]
    usual = mean_of(losses)
    is_same = number == state.course.number
    course = OpenIncident(
        number=number,
        kind=kind,
        start=start,
        pre_loss=mean_of(losses[-BEFORE:]),
        usual=usual,
        limit=None if usual is None or len(losses) < FEWEST else usual + 0.5 * deviation_of(losses, usual),
        peak=state.course.peak if is_same else peak_since(state, start, kind, skips.peak),
        onset_row=row - rows + 1,
        followed_from=row,
        is_treated=is_same,
        ranks_differ=state.course.ranks_differ,
    )
    course = course.after(seen, is_healthy=False)
    return IncidentState(row, seen.step, memory, NO_SKIPS, True, course, state.suspicions)


def dated_back(state: IncidentState, verdict: Verdict, rows: int) -> int:
    """Rows, up to that of an alarm, that belong to its incident: so many at least, as many as its finding looks back
    on, and the suspicious ones before these."""
    alarms = (f for f in verdict.findings if f.severity >= Severity.ALARM)
    late = max(rows, *(f.lasts for f in dating(alarms)), 1)
    return min(late + lead(state.suspicions, late), LATEST, state.rows + 1)


def dating(alarms: Iterable[Finding]) -> list[Finding]:
    """Those of the alarms of a verdict that say when it began. A proportion compares with its last sample, and the
    fault came anywhere since: beside a spike of this very step it says nothing."""
    known = list(alarms)
    if not any(f.detector.startswith("spike/") and f.lasts == 1 for f in known):
        return known
    return [f for f in known if f.detector != PROPORTION]


def step_before(state: IncidentState, seen: RowSummary, late: int) -> int:
    """The step of the first of so many rows, of which ``seen`` is the last."""
    return seen.step - (late - 1) * max(seen.step - state.step, 1)


def peak_since(state: IncidentState, onset: int, kind: str, peak: Peak) -> Peak:
    """The peak with the suspicious rows from the onset to the alarm. None of an incident that is about something not
    finite: it is known what it began with."""
    if kind == "nonfinite":
        return peak
    earlier = Peak()
    for suspect in map(RowSummary._make, state.suspects):
        earlier = earlier.after(suspect) if suspect.step >= onset else earlier
    return earlier.after(RowSummary(*peak)) if earlier.step >= 0 else peak


def gone_on(
    state: IncidentState, seen: RowSummary, is_healthy: bool, looks: Sequence[int]
) -> tuple[IncidentState, tuple[News, ...]]:
    """Follow one more row of an open incident."""
    row, course = state.rows + 1, state.course
    if course.is_treated and seen.step <= course.onset:
        course = course.followed_anew(row)._replace(onset_row=row)
    course = course.after(seen, is_healthy)
    age, followed = row - course.onset_row, row - course.followed_from
    news: tuple[News, ...] = ()
    is_over = followed >= max((SLOW, *looks)) + GRACE
    is_done = is_over or (course.is_back and (age >= FAST or not course.is_treated))
    is_closed = is_done and not course.ranks_differ
    if is_closed:
        news = (News("closed", closed(course, seen.step, age)),)
    elif followed in looks and not course.is_back:
        news = (News("look", course.incident, is_decaying(course, followed, looks)),)
        course = course._replace(at_look=course.mean, is_climbing=climbs(course))
    return IncidentState(row, seen.step, state.memory, NO_SKIPS, not is_closed, course, state.suspicions), news


def closed(course: OpenIncident, step: int, age: int) -> Incident:
    """An incident that is back, or has run out of time."""
    if course.is_back:
        trajectory = "fast" if age <= FAST else "slow" if age <= SLOW else "lingering"
    else:
        trajectory = "divergent" if diverges(course) else "lingering"
    is_told = course.limit is not None or trajectory == "divergent"
    is_told &= not (course.is_treated and course.is_back)  # a way back ended it: how it would have gone on is unknown
    return replace(
        course.incident,
        end=step,
        trajectory=trajectory if is_told else None,
        recovery_loss=course.mean if course.is_back else None,
    )


def is_decaying(course: OpenIncident, followed: int, looks: Sequence[int] = LOOKS) -> bool:
    """Whether the mean loss has fallen enough since the last check, or before the first one since it was highest, and
    falls still. It is followed for that many rows."""
    if course.at_look is None or max(course.averaged) >= BEYOND:
        return False
    last = max((look for look in looks if look < followed), default=0)
    fallen = (course.at_look if last else course.highest) - course.mean
    left = 0.0 if course.limit is None else max(course.mean - course.limit, 0.0)
    rows = min(max(followed // RECENT, 2 * AVERAGED), REMEMBERED)
    pace = ENOUGH * left / max(followed - last, rows)
    return fallen > 0 and fallen >= ENOUGH * left and not is_flat(course.recent[-rows:], pace)


def is_flat(losses: Sequence[float], pace: float) -> bool:
    """Whether losses surely fall by less than ``pace`` a row: by the line through them and its standard error. Rows up
    to the last one that was not finite do not count, and fewer than twenty tell nothing.

    >>> falling = [5.0 - 0.01 * row for row in range(20)]
    >>> is_flat(falling, 0.009), is_flat(falling, 0.011), is_flat(falling[1:], 0.011)
    (False, True, False)
    """
    last = max((place for place, loss in enumerate(losses) if loss >= BEYOND), default=-1)
    losses = losses[last + 1 :]
    count = len(losses)
    if count < 2 * AVERAGED:
        return False
    level, middle = math.fsum(losses) / count, (count - 1) / 2
    spread = math.fsum((row - middle) ** 2 for row in range(count))
    slope = math.fsum((row - middle) * (loss - level) for row, loss in enumerate(losses)) / spread
    residuals = [loss - level - slope * (row - middle) for row, loss in enumerate(losses)]
    squares = math.fsum(residual * residual for residual in residuals)
    error = math.sqrt(squares / (count - 2) / spread)
    # noise that lasts from row to row looks like a slope
    alike = math.fsum(a * b for a, b in pairwise(residuals)) / squares if squares > 0 else 0.0
    alike = min(max(alike, 0.0), MOST_ALIKE)
    return -slope + error * math.sqrt((1 + alike) / (1 - alike)) < pace


def climbs(course: OpenIncident) -> bool:
    """Whether the mean loss has risen since the last check, by as much and by more than noise."""
    if course.at_look is None or course.limit is None or course.usual is None:
        return False
    deviation = 2 * (course.limit - course.usual)
    changes = [after - before for before, after in pairwise(course.recent)]
    noise = deviation_of(changes, 0.0) / math.sqrt(2) if changes else 0.0  # of a row; a slope is none
    doubt = SURE * noise * math.sqrt(2 / AVERAGED)
    return course.mean - course.at_look > max(deviation, doubt, ENOUGH * (course.at_look - course.limit))


def diverges(course: OpenIncident) -> bool:
    """Whether an incident that is not back is not finite, or climbs."""
    is_broken = course.kind == "nonfinite" and course.calm == 0
    is_broken |= max(course.averaged, default=0.0) >= BEYOND
    return is_broken or course.is_climbing or climbs(course)


def kind_of(verdict: Verdict) -> str:
    """The kind of an incident, after the gravest finding that has a name for it.

    >>> from sealegs.vocabulary import Finding
    >>> level = Finding(detector="drift/loss", step=7, severity=Severity.ALARM, signal="loss", value=3.1, limit=2.6,
    ...                 note="loss level shift")
    >>> kind_of(Verdict(step=7, findings=(level,)))
    'level_shift'
    """
    for finding in verdict.findings:
        if finding.severity < Severity.ALARM:
            break
        family = finding.detector.partition("/")[0]
        if family == "drift" and "level shift" in finding.note:
            return "level_shift"
        if family in KINDS:
            return KINDS[family]
    return "spike"


def with_bit(suspicions: int, verdict: Verdict) -> int:
    """The suspicions with those of one more row."""
    return (suspicions << 1 | verdict.is_suspicious) & MASK


def suspects_with(state: IncidentState, row: Row, verdict: Verdict) -> tuple[tuple[int, float, float], ...]:
    """The suspicious rows with one more row, if it is one."""
    if not verdict.is_suspicious:
        return state.suspects
    return (*state.suspects, (int(row["step"]), loss_in(row), grad_norm_in(row)))[-SUSPECTS:]


def lead(suspicions: int, late: int) -> int:
    """How many suspicious rows without a break lie before the last ``late`` rows: a gradient norm leads the loss by a
    few.

    >>> lead(0b0111_0001, 4), lead(0b0111_0001, 1)
    (3, 0)
    """
    before = suspicions >> late
    return (~before & before + 1).bit_length() - 1


def loss_in(row: Row) -> float:
    """The loss of a row; ``BEYOND`` for one that is not finite, or comes from weights that are not."""
    loss = float(row["loss"])
    if not math.isfinite(loss) or float(row.get("params_finite", 1.0)) != 1.0:  # NaN too
        return BEYOND
    return min(max(loss, -BEYOND), BEYOND)


def grad_norm_in(row: Row) -> float:
    """The gradient norm of a row, likewise; negative where it was not logged."""
    if "grad_norm" not in row:
        return -1.0
    norm = float(row["grad_norm"])
    return min(norm, BEYOND) if norm >= 0 else BEYOND  # NaN too


def mean_of(losses: Sequence[float]) -> float | None:
    """The mean; None of no losses."""
    return math.fsum(losses) / len(losses) if losses else None


def deviation_of(losses: Sequence[float], mean: float) -> float:
    """The standard deviation."""
    return math.sqrt(math.fsum((loss - mean) * (loss - mean) for loss in losses) / len(losses))
