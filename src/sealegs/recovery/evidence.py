"""Judged rows in, Troubles out: what a run shows that no single step does, and what it asks the playbook for."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import median
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sealegs.detectors.spike import MANY, YOUNG
from sealegs.judge import is_surprise, thaw
from sealegs.record.unlearned_sources import shares_of
from sealegs.recovery.excursions import Excursions
from sealegs.recovery.playbook import Playbook
from sealegs.recovery.recurrence import Trigger
from sealegs.vocabulary import Row, Severity, Verdict

OFTEN_WITHIN = 500
"""Steps of which a share may be not finite."""
WINDOW = 100
"""Steps that are looked at together."""
PROBE_AGAIN = 20
"""Skips among them that ask for a probe too, and after which one is made once more. So many healthy steps between two
bad ones, and they are two troubles."""
ASK_AGAIN = 5
"""Steps after which it is asked once more where bad data come from, if nobody could say."""
LEAP = math.log(1.25)
"""By how much the batches that come must have become dearer at once for that to be a change of the data ..."""
FORGOTTEN = 0.5
"""... and how much of it, at most, those from before have become dearer by: weights that learn other data forget what
they knew, but slowly; where they are at fault themselves, both are as dear."""
TAUGHT = 2
"""Updates with such batches before weights can have forgotten anything; until then they are not excused where the
gradients of batches from before have grown. In six runs at 49M parameters each: queries and keys x16, where all
updates were skipped and norms grew 40,000 times and more; half of the data in another language, where none were skipped
and norms grew up to 5.4 times. A small model at a high rate has forgotten half by the third."""
FIRST = 32
"""Losses that a run begins with ..."""
GROWN = math.log(1.05)
"""... and by how much, as a logarithm, it has gone up from there where a higher loss is no damage."""
LOST = 0.1
"""Part of what a run has learned, as the loss goes, that weights must have lost to be damaged: with one positive in a
thousand the loss of all others is twice what it was when the model has learned to tell them, and still next to
nothing."""
OTHERS = math.log(2.0)
"""By how much, as a logarithm, batches from before are dearer than the next one, by the same weights, where these have
forgotten them for other data: damaged weights are as bad for both. Where the next one is the dearer, a leap tells."""
DEAR_IN_A_ROW = 2
"""Batches dearer than all of half a window before them, and by a leap, that ask for a probe before a surprise does: a
run that has seen a change of its data before is not surprised by the next, and forgets within eight steps what could
have told. Of losses without order one step in 1,300 asks so."""
HEALING = 16
"""Steps within which weights that were condemned may lose half of what batches have become dearer by: those that do are
left alone, since to go back would cost more than to go on."""
BEING_TAUGHT = 2 * HEALING
"""Steps with other data in which weights that were sound may become worse for all: what comes later came by itself."""
LATELY = 8
"""Steps that say what batches cost."""
AT_ONCE = 0.5
"""How much of its height, as a logarithm, a stretch of dear batches must lose from eight batches to the next eight to
have passed: what has been learnt, all but a little, loses that little by chance."""
FEWEST_BATCHES = 8
"""Batches from which a source can be blamed, and twice as many before them, ..."""
SUREST = math.log(1000)
"""... where that is so many times, as a logarithm, as likely as that all batches have become dearer alike. Of 200 runs
with one source that is hard by nature 2.5 % blame one where all batches have (4 % where only 23 were seen before), and
up to 1 % where some or none have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Anomaly:
    """Something that skipping alone does not cure."""

    trigger: Trigger
    onset: int
    """The first step that showed it."""
    batch: int | None
    """The batch of that step."""
    text: str
    """The evidence, to be read."""
    source: str | None = None
    """The source of data that the evidence names."""
    lasted: int = 0
    """Steps that it lasted, where it is over by now."""


Floats: TypeAlias = NDArray[np.float64]
Batch: TypeAlias = tuple[float, Mapping[str, float]]
"""The loss of a batch, and what part of it each source is."""


class JudgedRow(NamedTuple):
    """A row that was judged."""

    row: Row
    is_bad: bool
    """Skipped, or surprising, or part of what was found late."""
    is_condemned: bool
    """Though everything in it is finite."""
    is_learned: bool
    """Its update was applied."""
    is_explained: bool
    """A probe had found that it is the data."""


class Doubt(NamedTuple):
    """A probe has condemned the weights. Those that have only learned other data, and those that heal by themselves,
    are left alone."""

    anomaly: Anomaly
    number: int
    """The first step that is done by the weights that were tried."""
    loss: float
    """Of batches from before, as a logarithm ..."""
    rise: float
    """... and by how much it has risen."""
    least: float
    """How much of that tells."""


class AnomalyEvidence:
    """Follows the rows of a run. Forgets everything after a treatment: what comes then is judged for itself."""

    def __init__(self, playbook: Playbook) -> None:
        self._playbook = playbook
        self._first: tuple[float, ...] = ()
        """The first losses of the run, as logarithms."""
        self._of_losses, self._of_norms = Excursions(), Excursions()
        """Of how they wander by themselves ..."""
        self._of_data = Excursions()
        """... and of how the loss does with the data that come."""
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self._nonfinite: deque[bool] = deque(maxlen=OFTEN_WITHIN)
        self._often = 0
        self._in_a_row = 0
        """Steps that were not finite."""
        self._recent: deque[JudgedRow] = deque(maxlen=WINDOW)
        self._condemned = 0
        """Steps in a row."""
        self._dear = 0
        """Batches in a row that were dearer than any before them ..."""
        self._dearest = math.inf
        """... which were no dearer than this, as a logarithm."""
        self._unprobed = 0
        """Condemned ones among the last steps, since the last probe."""
        self._since_probe = 0
        """Steps since that."""
        self._is_probed = False
        self._is_suspected = False
        """Whether batches from before were dearer already at the first surprise: then it is not what came after."""
        self._doubt: Doubt | None = None
        self.excuse = ""
        """Why the last doubt came to nothing, if that was with the last row."""
        self._calm = 0
        """Steps in a row that were not bad."""
        self._usual, self._leap = 0.0, 0.0
        """The loss of batches before trouble began, as a logarithm, and by how much it leapt there."""
        self.is_sound = False
        """Whether the last probe found that it is the data, and not the weights: going back would change nothing."""
        self._sound_until = math.inf
        """What batches may cost, as a logarithm, before that is asked once more."""
        self._unexplained: int | None = None
        """The step that bad data of no known origin began with."""
        self._sound_loss: float | None = None
        """What batches from before had when a stretch of other data had just begun; none is going on without one."""
        self._passed = 0
        """Steps of a stretch of other data that has passed, and of which it is asked now what it has left behind."""
        self._is_lasting = False
        """Whether there was an alarm since that of what lasts, and was not all kept from the weights, or batches have
        become dearer again."""

    @property
    def wants_probe(self) -> bool:
        """Whether it is time to ask: is it the data, or the weights?"""
        return self._doubt is None and self._has_cause and not self.has_grown

    @property
    def _has_cause(self) -> bool:
        if self._is_lasting or (self._unprobed >= PROBE_AGAIN and not self.is_sound):
            return True
        if not self._is_probed:
            # one that was followed by others before it was judged, as on a device, is asked about all the same
            has_surprised = any(seen.is_condemned for seen in islice(reversed(self._recent), LATELY))
            return has_surprised or DEAR_IN_A_ROW <= self._dear < LATELY
        return self._is_suspected and (self._condemned >= self._playbook.probe_after or self._is_overdue)

    @property
    def _is_overdue(self) -> bool:
        """Whether weights that were dear at the first surprise are to be asked again though nothing surprises any more:
        a young run takes what it cannot explain for its new level. One that knows its noise would be surprised; where
        it is not, weights may be cut on purpose."""
        is_young = bool(self._recent) and int(self._recent[-1].row["step"]) < YOUNG + LATELY
        return is_young and self._is_suspected and self._since_probe >= LATELY

    @property
    def has_grown(self) -> bool:
        """Whether the loss is higher than when the run began, in health: then (returns that grow, a critic that learns
        from its own estimates, a task that becomes harder) it is no measure of weights, and asks for nothing."""
        healthy = [loss for seen, loss in zip(self._recent, self._losses(WINDOW), strict=True) if not seen.is_bad]
        is_known = len(self._first) == FIRST and len(healthy) >= FIRST
        return is_known and median(healthy) - median(self._first) > GROWN

    @property
    def has_other_data(self) -> bool:
        """Whether a probe found, long ago, that it is the data: these are the data now."""
        return self.is_sound and self._since_probe > WINDOW

    @property
    def wander(self) -> tuple[float, float]:
        """How far the loss and the norm of gradients may rise and come back by themselves, as logarithms."""
        return self._of_losses.reach, self._of_norms.reach

    def has_risen(self, usual: float) -> bool:
        """Whether what batches cost lately is beyond what the loss has come back from by itself."""
        return not median(self._losses(LATELY)) - math.log(usual) <= self._of_losses.reach if usual > 0 else True

    def take(self, row: Row, verdict: Verdict) -> Anomaly | None:
        """One step that was judged."""
        is_nonfinite = any(f.detector == "nonfinite" and f.spoils_update for f in verdict.findings)
        self._count(row, verdict, is_nonfinite)
        if float(row.get("params_finite", 1.0)) == 0.0:
            return self._anomaly(Trigger.NONFINITE_WEIGHTS, "a weight is not finite", self._onset(0))
        if self._in_a_row >= self._playbook.nonfinite_in_a_row:
            return self._anomaly(
                Trigger.NONFINITE_OFTEN, f"{self._in_a_row} steps in a row were not finite", self._onset(0)
            )
        if is_nonfinite and self._often > self._playbook.nonfinite_share * OFTEN_WITHIN:
            text = f"{self._often} of the last {len(self._nonfinite)} steps were not finite"
            return self._anomaly(Trigger.NONFINITE_OFTEN, text, self._onset(WINDOW))
        if verdict.severity == Severity.HALT:
            return self._anomaly(Trigger.BUDGET_SPENT, str(verdict), self._onset(0))
        return self._resolved(row)

    @property
    def wants_suspect(self) -> bool:
        """Whether it is time to ask once more where bad data come from: many batches tell what few did not."""
        return self._unexplained is not None and self._since_probe % ASK_AGAIN == 0

    def suspect(self) -> str | None:
        """The source of the data that has the bad losses, if one surely has."""
        batches = [(float(seen.row["loss"]), shares_of(str(seen.row.get("sources", "")))) for seen in self._recent]
        return blamed(batches, self._onset_of_bad_data())

    def explained(self, source: str) -> Anomaly:
        """Bad data of no known origin come from there after all."""
        onset = self._onset_of_bad_data()
        count = len(self._recent) - onset
        text = f"in {count} steps the loss went with the share of {source}, far more than before: its data are bad"
        return self._anomaly(Trigger.BAD_DATA, text, onset, source=source)

    def is_of_the_data(self, rise: float, *, norm_has_grown: bool) -> bool:
        """Whether the batches that come became dearer by far more than those from before, whose loss has risen by so
        much, as a logarithm, and the norm of whose gradients may have grown; or did when they began."""
        if self._is_taught:
            return True
        onset, losses = self._onset(PROBE_AGAIN), self._losses(WINDOW)
        lately = max(len(losses) - LATELY, 0)
        if not self._recent[onset].is_bad:  # asked because batches have become dearer
            onset = len(losses) - self._dear if self._dear else lately
        before, since = losses[:onset][-WINDOW // 2 :], losses[onset:]
        if len(before) >= LATELY:  # else it began before what is remembered, and is as it was found then
            # an onset may be dated too early, so the dearest stretch since then
            stretches = [since[first : first + LATELY] for first in range(max(len(since) - LATELY + 1, 1))]
            usual = median(before)
            self._usual = min(self._usual, usual) if self.is_sound else usual  # batches were kept before the first leap
            self._leap = max(map(median, stretches)) - self._usual
        dear = self._usual + self._leap / 2
        since_then = islice(zip(self._recent, losses, strict=True), min(onset, lately), None)
        taught = sum(seen.is_learned and loss >= dear for seen, loss in since_then)
        can_have_forgotten = taught >= TAUGHT or not norm_has_grown
        return self._leap >= LEAP and rise <= FORGOTTEN * self._leap and can_have_forgotten

    def loss_is_back(self) -> None:
        """An incident is over: what was held against the weights is, too."""
        self._doubt = None

    def new_incident(self) -> None:
        """One was opened: what a probe found long before says nothing of it."""
        if self._since_probe > WINDOW:
            self.is_sound = False

    def state_dict(self) -> dict[str, Any]:
        """What a probe has found, as JSON values; the rest is forgotten where a run begins anew."""
        found = {"usual": self._usual, "leap": self._leap, "sound_until": self._sound_until, "is_sound": self.is_sound}
        return found | {"first": self._first, "wander": [self._of_losses, self._of_norms, self._of_data]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._usual, self._leap, self._sound_until = state["usual"], state["leap"], state["sound_until"]
        self.is_sound = state["is_sound"]
        if "first" in state:  # older states have none
            self._first = tuple(state["first"])
            self._of_losses, self._of_norms, self._of_data = (thaw(Excursions(), wander) for wander in state["wander"])

    def is_left_worse_off(self, loss: float, least: float) -> bool | None:
        """Whether batches from before, of that loss, are dearer by more than ``least``, as a logarithm, and more than
        slightly, than when a stretch of other data had just begun that has passed; None where none has."""
        if not self._passed or self._sound_loss is None:
            return None
        return not (loss <= self._sound_loss * math.exp(least) or self.is_slight(loss, self._sound_loss))

    def is_slight(self, loss: float, loss_then: float) -> bool:
        """Whether weights by which batches from before have that loss have lost next to nothing of what they knew."""
        if len(self._first) < FIRST:
            return False
        return loss - loss_then < LOST * (math.exp(median(self._first)) - loss_then)

    def probed(
        self, found: str, *, number: int, loss: float, rise: float, least: float, is_condemned: bool, source: str | None
    ) -> Anomaly | None:
        """What batches showed, before step ``number``, that were healthy before: good now, and it is the data; bad, and
        it is the weights, unless what comes next says otherwise.

        ``loss`` is theirs, ``rise`` what it has risen by, as a logarithm, and ``least`` what must be for it to tell.
        """
        bad, onset = sum(seen.is_bad for seen in self._recent), self._onset(PROBE_AGAIN)
        is_early = not (self._is_lasting or self._is_overdue or self._condemned >= self._playbook.probe_after)
        is_early |= not bad  # batches may be dear by chance, and weights are not damaged in a run without a surprise
        self._unprobed, self._since_probe, self._is_probed, self._is_lasting = 0, 0, True, False
        was_sound, self.is_sound, self._is_suspected, self._sound_until = self.is_sound, False, is_condemned, math.inf
        if not is_condemned:
            self._find_sound()
        found = f"{bad} of {len(self._recent)} steps were bad; {found}"
        lasted, self._passed = self._passed, 0
        is_begun = self.is_sound and not lasted
        # where it is asked late, a few updates with other data have been forgotten for already
        then = math.inf if was_sound else loss * math.exp(-rise)
        self._sound_loss = min(loss, then, self._sound_loss or math.inf) if is_begun else None
        if lasted and is_condemned:
            self.is_sound, self._is_suspected = True, False  # when it began
            text = f"{found}: other data have passed within {lasted} steps, and left the weights worse off"
            return self._anomaly(Trigger.SPOILT, text, len(self._recent) - LATELY - lasted, lasted=lasted)
        if is_condemned and is_early:  # one surprise is none: it is asked again where more follow
            return None
        if is_condemned:
            anomaly = self._anomaly(Trigger.DAMAGED, f"{found}: the weights are damaged", onset)
            if not 0 < loss < math.inf:
                return anomaly
            self._doubt = Doubt(anomaly, number, math.log(loss), rise, least)
            return None
        if source is None:  # bad data of no known origin, so far: skipping is all that can be done
            self._unexplained = int(self._recent[onset].row["step"])
            return None
        text = f"{found}: the data are bad, those of {source}"
        return self._anomaly(Trigger.BAD_DATA, text, onset, source=source)

    def _resolved(self, row: Row) -> Anomaly | None:
        """What the weights were condemned for, once a batch that they have not seen has said the same."""
        self.excuse = ""
        if self._doubt is None or int(row["step"]) < self._doubt.number:
            return None
        doubt, after = self._doubt, int(row["step"]) - self._doubt.number
        (cost,) = self._losses(1)
        lately = median(self._losses(LATELY))
        is_cheaper = cost <= doubt.loss - max(OTHERS, doubt.least)
        is_dearer = math.inf > cost >= doubt.loss + max(LEAP, doubt.least) and lately >= doubt.loss + LEAP
        if after == 0 and (is_cheaper or is_dearer):
            self.excuse = f"{doubt.anomaly.text}, or so it seemed: the next batch has a loss of {math.exp(cost):.4g}"
            self.excuse += " by the same weights, which learn other data and forget those from before"
            self._find_sound()
            self._sound_loss = math.exp(doubt.loss - doubt.rise) if is_dearer else None
        elif doubt.rise < LEAP or self._is_growing(doubt) or after + 1 >= HEALING:
            self._doubt, self._is_suspected = None, False
            return doubt.anomaly
        elif after + 1 >= LATELY and lately <= doubt.loss - doubt.rise / 2:
            self.excuse = f"{doubt.anomaly.text}, but heal: {after + 1} steps later half of it is over"
            self._unprobed = 0
        else:
            return None
        self._doubt = None
        return None

    def _is_growing(self, doubt: Doubt) -> bool:
        """Whether it becomes worse, or nothing is learned that could heal."""
        learned = sum(seen.is_learned for seen in islice(reversed(self._recent), LATELY))
        return learned < TAUGHT or not self._losses(1)[0] <= doubt.loss + max(LEAP, doubt.least)

    @property
    def _is_taught(self) -> bool:
        """Whether weights were sound a little ago, when other data began, and have been trained on these since: what
        batches from before cost now is what they were taught, and undone only if the data pass."""
        if self._sound_loss is None or not 0 < self._since_probe <= BEING_TAUGHT:
            return False
        return median(self._losses(self._since_probe)[:LATELY]) >= self._usual + max(self._leap / 2, LEAP)

    def _find_sound(self) -> None:
        self.is_sound, self._is_suspected = True, False
        self._sound_until = max(self._losses(LATELY)) + LEAP

    def _count(self, row: Row, verdict: Verdict, is_nonfinite: bool) -> None:
        if len(self._nonfinite) == OFTEN_WITHIN:
            self._often -= self._nonfinite[0]
        self._nonfinite.append(is_nonfinite)
        self._often += is_nonfinite
        is_bad = not verdict.go and verdict.skips_in_a_row > 0  # a scaler that looks for its scale skips by design
        is_bad |= any(map(is_surprise, verdict.findings))
        loss = _log(row["loss"])
        if len(self._first) < FIRST and loss < math.inf:
            self._first = (*self._first, loss)
        self._compare_with_all_before(loss)
        is_explained = self.is_sound and self._is_probed
        if len(self._recent) == WINDOW:
            self._follow_wander(self._recent[0])
        self._recent.append(JudgedRow(row, is_bad, is_bad and not is_nonfinite, verdict.go, is_explained))
        lasting = [f.lasts for f in verdict.findings if f.severity == Severity.ALARM and f.lasts > 1]
        late = range(-min(max(lasting, default=0), len(self._recent)), 0)
        is_new = sum(self._recent[place].is_bad for place in late) < min(len(late), MANY)
        self._is_lasting |= is_new and not is_explained
        for place in late:
            self._recent[place] = self._recent[place]._replace(is_bad=True)
        self._since_probe += 1
        if self.is_sound and self._since_probe >= WINDOW // 2:  # what was dear then may be long over
            self._sound_until = min(self._sound_until, median(self._losses(WINDOW // 2)) + LEAP)
        if self.is_sound and self._since_probe >= LATELY and self._has_become_dearer():
            self._is_lasting = True
        if self._since_probe > WINDOW // 2:
            self._unexplained = None
        self._calm = 0 if is_bad or self._dear else self._calm + 1
        if self._calm > PROBE_AGAIN:  # what comes now is another thing
            self._is_probed = self._is_suspected = False
        if self._since_probe > WINDOW:  # a stretch that begins now is compared with its own beginning
            self._sound_loss = None
        self._in_a_row = self._in_a_row + 1 if is_nonfinite else 0
        if self._sound_loss is not None and (lasted := self._length_of_what_passed()):
            self._passed, self._is_lasting = lasted, True
        if self._is_lasting and self.has_grown:  # it is not asked now, and what it was is no matter later
            self._is_lasting = False
        if not is_bad:
            self._condemned = 0
        elif not is_nonfinite:
            self._condemned += 1
            last = islice(reversed(self._recent), self._since_probe)
            self._unprobed = sum(seen.is_condemned for seen in last)

    def _compare_with_all_before(self, loss: float) -> None:
        """Count it, if it is dear: those that were before it in the row are not what it is compared with."""
        if not 0 < self._dear < LATELY:
            before = self._losses(WINDOW // 2)
            is_known = len(before) == WINDOW // 2
            self._dear, self._dearest = 0, max(*before, median(before) + LEAP) if is_known else math.inf
        self._dear = self._dear + 1 if math.inf > loss > self._dearest else 0

    def _follow_wander(self, seen: JudgedRow) -> None:
        """With a row of a window ago: of what was gone back from, none becomes so old."""
        self._of_data = self._of_data.after(_log(seen.row["loss"]))
        if seen.is_explained:
            self._of_losses, self._of_norms = self._of_losses.anew(), self._of_norms.anew()
            return
        self._of_losses = self._of_losses.after(_log(seen.row["loss"]))
        self._of_norms = self._of_norms.after(_log(seen.row.get("grad_norm", 0.0)))

    def _length_of_what_passed(self) -> int:
        """Steps of a stretch of dear batches that ended at once, a few steps ago, and was trained on; else 0.

        What is learnt becomes cheaper little by little; what was foreign is gone from one batch to the next.
        """
        losses = self._losses(WINDOW)
        end = len(losses) - LATELY
        # what is found late is dated early: the stretch begins with a step that was surprising itself
        places = range(self._onset(PROBE_AGAIN), max(end, 0))
        onset = next((place for place in places if self._recent[place].is_condemned), end)
        before, stretch, since = losses[:onset][-WINDOW // 2 :], losses[onset:end], losses[end:]
        if len(before) < LATELY or len(stretch) < self._playbook.probe_after:
            return 0
        usual = median(before)
        last = median(stretch[-LATELY:])
        # of a stretch that is dated too early most is as it was before
        height = max(median(stretch), last) - usual
        of_stretch = zip(islice(self._recent, onset, end), stretch, strict=True)
        learned = sum(seen.is_learned and loss >= usual + height / 2 for seen, loss in of_stretch)
        # domains that come in turns are the run's own, however unlike they are
        is_other = height >= max(LEAP, self._of_data.reach) and learned >= TAUGHT
        fall = LEAP if self._has_learned_nothing(stretch) else AT_ONCE * height
        return len(stretch) if is_other and median(since) <= last - fall and max(since) < last else 0

    def _has_learned_nothing(self, stretch: Sequence[float]) -> bool:
        """Whether it ends as dear as the run began, and no longer becomes cheaper: noise, which leaves nothing of what
        was known. What comes after it is learned anew, and so its end is not as sharp."""
        if len(self._first) < FIRST or len(stretch) < 2 * LATELY:
            return False
        earlier, last = median(stretch[-2 * LATELY : -LATELY]), median(stretch[-LATELY:])
        return abs(earlier - last) < GROWN and last > median(self._first) - GROWN

    def _has_become_dearer(self) -> bool:
        """Whether every batch has, after updates that were applied: where none was, the weights are still sound."""
        learned = sum(seen.is_learned for seen in islice(reversed(self._recent), LATELY))
        return learned >= TAUGHT and min(self._losses(LATELY)) > self._sound_until

    def _losses(self, count: int) -> list[float]:
        """Of the last rows, as logarithms."""
        rows = islice(self._recent, max(len(self._recent) - count, 0), None)
        return [_log(seen.row["loss"]) for seen in rows]

    def _onset(self, gap: int) -> int:
        """Which of the recent rows it began with, where so many good ones may lie between two bad ones."""
        onset, good = len(self._recent) - 1, 0
        for place in reversed(range(len(self._recent))):
            if self._recent[place].is_bad:
                onset, good = place, 0
            elif (good := good + 1) > gap:
                break
        return onset

    def _onset_of_bad_data(self) -> int:
        """The same, of those whose origin is asked for."""
        if self._unexplained is None:
            return self._onset(PROBE_AGAIN)
        return next(at for at, seen in enumerate(self._recent) if int(seen.row["step"]) >= self._unexplained)

    def _anomaly(self, trigger: Trigger, text: str, at: int, *, source: str | None = None, lasted: int = 0) -> Anomaly:
        onset = self._recent[at].row
        batch = onset.get("batch_index")
        return Anomaly(
            trigger=trigger,
            onset=int(onset["step"]),
            batch=None if batch is None else int(batch),
            text=text,
            source=source,
            lasted=lasted,
        )


def _log(value: Any) -> float:
    """Infinite where there is none."""
    return math.log(value) if 0 < float(value) < math.inf else math.inf


def blamed(batches: Sequence[Batch], onset: int) -> str | None:
    """The source by whose share of a batch the loss has risen since the onset, or since a later batch.

    Only if that is surely more likely than a rise of all batches alike; what each was expected to cost is known from
    those before: a source may be a hard one by nature.

    >>> before = [(3.0 + i % 7 / 7 + 0.1 * (i % 3), {"a": i % 7 / 7, "b": 1 - i % 7 / 7}) for i in range(40)]
    >>> blamed(before + before, 40), blamed(before + [(loss + 1.0, shares) for loss, shares in before], 40)
    (None, None)
    >>> blamed(before + [(loss + shares["b"], shares) for loss, shares in before], 40)
    'b'
    """
    names = sorted({name for _, shares in batches for name in shares})
    if len(names) < 2:
        return None
    likelihood, surest = max((_likelihood(name, batches, onset), name) for name in names)
    return surest if likelihood > SUREST else None


def _likelihood(name: str, batches: Sequence[Batch], onset: int) -> float:
    """That the loss has risen with the share of a source, over that of a rise of all batches alike: its logarithm.

    An onset may be dated too early, so each of the two may have begun with the batch that suits it best.
    """
    is_known = [math.isfinite(loss) for loss, _ in batches]
    first = max(sum(is_known[:onset]), 2 * FEWEST_BATCHES)
    shares = np.array([of.get(name, 0.0) for _, of in batches])[is_known]
    losses = np.array([loss for loss, _ in batches])[is_known]
    by_share, of_all = -math.inf, -math.inf
    for place in range(first, len(losses) - FEWEST_BATCHES + 1):
        rises = losses - _expected(shares, losses, place)
        before, since, held = _fit(rises[:place]), rises[place:], shares[place:]
        steepness = since @ held / (held @ held) if held.any() else 0.0
        if steepness > 0:
            by_share = max(by_share, before + _fit(since - steepness * held))
        of_all = max(of_all, before + _fit(since - since.mean()))
    return by_share - of_all if by_share > -math.inf else 0.0


def _expected(shares: Floats, losses: Floats, place: int) -> Floats:
    """What batches cost by the line through those before a place."""
    known, cost = shares[:place] - shares[:place].mean(), losses[:place].mean()
    slope = known @ losses[:place] / (known @ known) if known.any() else 0.0
    expected: Floats = cost + slope * (shares - shares[:place].mean())
    return expected


def _fit(residuals: Floats) -> float:
    """The logarithm of the likelihood of noise, whatever its size."""
    return -len(residuals) / 2 * math.log(float(residuals @ residuals) / len(residuals) + 1e-12)
