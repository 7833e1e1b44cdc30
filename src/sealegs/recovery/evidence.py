"""Collects the evidence of many steps: judged rows and probe results in, anomalies for the playbook out.

An anomaly is something that no single step shows: weights that are damaged, data that are bad, steps that are often not
finite. Below, a rise of the loss is the difference of its logarithms.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from statistics import median, pstdev
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sealegs.detectors.proportion import Proportion
from sealegs.detectors.spike import MANY, WIDENED_STEPS, YOUNG
from sealegs.incidents import dating
from sealegs.judge import PROBE, is_surprise, is_wished, thaw
from sealegs.record.unlearned_sources import shares_of
from sealegs.recovery.excursions import Excursions
from sealegs.recovery.playbook import Playbook
from sealegs.recovery.recurrence import Trigger
from sealegs.vocabulary import Row, Severity, Verdict

OFTEN_WITHIN = 500
"""Steps over which the share of non-finite ones is counted."""
WINDOW = 100
"""Recent steps that are looked at together."""
PROBE_AGAIN = 20
"""Bad, finite steps since the last probe that ask for another one. Two bad steps with more healthy ones between them
belong to two anomalies."""
ASK_AGAIN = 5
"""How often, in steps, the source of bad data is looked for again while none is known."""
LEAP = math.log(1.25)
"""How far the loss of new batches must rise at once to be a change of the data."""
FORGOTTEN = 0.5
"""How much of that rise batches from before may share. Weights that learn other data forget what they knew, but slowly;
damaged weights are as bad for both."""
TAUGHT = 2
"""Updates on other data before weights can have forgotten anything. Until then a probe with grown gradients is not
excused. In six runs at 49M parameters each: queries and keys x16, where all updates were skipped and norms grew 40,000
times and more; half of the data in another language, where none were skipped and norms grew up to 5.4 times. A small
model at a high rate has forgotten half by the third."""
FIRST = 32
"""How many of a run's first losses are kept."""
GROWN = math.log(1.05)
"""From this rise above the first losses on, a higher loss is no sign of damage."""
LOST = 0.1
"""Share of the loss reduction since the start that damaged weights must have lost. With one positive in a thousand, the
loss of the others doubles when the model learns to tell the positives, and is still next to nothing."""
OTHERS = math.log(2.0)
"""How far batches from before must lie above the next batch, by the same weights, to have been forgotten for other
data. Damaged weights are as bad for both. Where the next batch is the higher one, ``LEAP`` decides."""
DEAR_IN_A_ROW = 2
"""High-loss batches in a row that ask for a probe before there is a surprise: each is above half a window of batches
before it, by a leap. A run that has seen its data change is not surprised by the next change, and within eight steps
forgets what could have told. Of losses in random order, one step in 1,300 asks so."""
HEALING = 16
"""Steps in which weights found damaged may lose half of the rise. Weights that do are left alone, since a rollback
would cost more."""
PROPORTION = Proportion().name
FAR_BEYOND = math.log(10)
"""Rise above the first losses that no change of the data explains where the weights have grown with it."""
BEING_TAUGHT = 2 * HEALING
"""Steps on other data in which sound weights may become worse for all batches; what comes later has another cause."""
LATELY = 8
"""Steps whose median is the current loss."""
AT_ONCE = 0.5
"""Share of its height that a high-loss stretch must lose from eight batches to the next eight to have passed. Data that
are all but learned lose their little rest by chance."""
APART = 2.0
"""Standard deviations of the last losses by which a few batches from before cost what new ones do not: three of the
standard error of such a difference."""
SUDDEN = 3.0
"""Standard deviations of a loss by which it falls at once where noise ends, which is looked for at every step; and by
which one batch differs from those before by more than chance."""
DIFFERENCE_OF_TWO = 0.954
"""Median distance of two numbers that are drawn from the same bell curve, in its standard deviations."""
FEWEST_BATCHES = 8
"""Batches from which a source can be blamed; twice as many are needed before them."""
SUREST = math.log(1000)
"""Logarithm of how much more likely one source must be than a rise of all batches alike. Of 200 runs with one source
that is hard by nature, 2.5 % blame one where all batches have risen (4 % where only 23 were seen before), and up to 1 %
where some or none have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Anomaly:
    """Something that skipping alone does not cure."""

    trigger: Trigger
    onset: int
    """The first step that showed it."""
    batch: int | None
    """The batch of the onset, from which batches are left out; where the evidence is scattered over many steps, the
    first batch of its last stretch."""
    text: str
    """The evidence, as a sentence for people."""
    source: str | None = None
    """The source of data that the evidence names."""
    lasted: int = 0
    """Steps that it lasted, where it is already over."""
    triggered_by: int | None = None
    """The batch that triggered it, where that one must be left out, too."""


Floats: TypeAlias = NDArray[np.float64]
Batch: TypeAlias = tuple[float, Mapping[str, float]]
"""The loss of a batch, and the share of each source in it."""


class JudgedRow(NamedTuple):
    """A row with what the judge said about it."""

    row: Row
    is_bad: bool
    """The step was skipped or surprising, or a finding of a later step covers it."""
    is_condemned: bool
    """The step is bad, though everything in it is finite."""
    is_learned: bool
    """Its update was applied."""
    is_suspicious: bool
    """Loss or gradient norm is one that few healthy steps have."""
    is_explained: bool
    """The last probe had found the weights sound, so the data explain it."""
    loss: float
    """The logarithm of its loss; infinite where there is none."""


class Doubt(NamedTuple):
    """A probe found the weights damaged. They are left alone if they have only learned other data, or if they heal by
    themselves."""

    anomaly: Anomaly
    number: int
    """The first step taken by the weights that were probed."""
    loss: float
    """Loss of the probe batches, as a logarithm."""
    rise: float
    """How far that loss has risen."""
    least: float
    """The smallest rise that counts."""


class AnomalyEvidence:
    """Follows the rows of a run. It forgets everything after an intervention: later rows are judged for themselves."""

    def __init__(self, playbook: Playbook) -> None:
        self._playbook = playbook
        self._first: tuple[float, ...] = ()
        """The first losses of the run, as logarithms."""
        self._of_losses, self._of_norms = Excursions(), Excursions()
        """How far loss and gradient norm rise and come back by themselves."""
        self._of_data = Excursions()
        """How far the loss rises and comes back with the data."""
        self._reach = 0.0
        """How far it might rise by itself when the last incident began."""
        self._announced: int | None = None
        """The step of the last announced change."""
        self._grown_at: int | None = None
        """The last step at which a group of weights was found to have changed its size out of proportion."""
        self.is_signed = False
        """Whether the loss has been negative. A loss of both signs may be a means to a gradient, and rise while the
        model becomes better: it is no measure of the weights, and asks for nothing."""
        self.forget()

    def forget(self) -> None:
        """Start over."""
        self._nonfinite: deque[bool] = deque(maxlen=OFTEN_WITHIN)
        self._nonfinite_count = 0
        self._nonfinite_in_a_row = 0
        """Non-finite steps in a row."""
        self._recent: deque[JudgedRow] = deque(maxlen=WINDOW)
        self._bad_in_a_row = 0
        """Bad steps in a row, not counting non-finite ones."""
        self._high_in_a_row = 0
        """High-loss batches in a row."""
        self._high_limit = math.inf
        """The loss that a high-loss batch is above, as a logarithm."""
        self._unprobed = 0
        """Bad, finite steps in the window since the last probe."""
        self._since_probe = 0
        """Steps since the last probe."""
        self._is_probed = False
        self._is_suspected = False
        """Whether the first probe after a surprise already found batches from before higher: then later updates are not
        the cause."""
        self._suspected_since: int | None = None
        """The step that the suspicion began with, where no step was a surprise."""
        self._doubt: Doubt | None = None
        self.excuse = ""
        """Why the last doubt came to nothing, if the last row settled it."""
        self._calm = 0
        """Steps in a row that were neither bad nor high in loss."""
        self._usual, self._leap = math.inf, 0.0
        """Loss before the anomaly began, as a logarithm, and how far it leapt there; infinite while it is not known."""
        self.is_sound = False
        """Whether the last probe found that the data have changed and the weights are sound: a rollback would change
        nothing."""
        self._sound_until = math.inf
        """The loss, as a logarithm, above which that finding is probed again."""
        self._unexplained: int | None = None
        """The onset of bad data whose source is not known."""
        self._sound_loss: float | None = None
        """Loss of the probe batches when a stretch of other data had just begun; None while there is no such
        stretch."""
        self._passed = 0
        """Length of a stretch of other data that has passed, while a probe is due on what it left behind."""
        self._is_lasting = False
        """Whether a probe is due because of a lasting alarm, of a loss that rose again, or of a stretch that has
        passed."""

    def begin_anew(self) -> None:
        """Start over after an intervention: a loss that it brings back has not come back by itself."""
        self.forget()
        self._of_losses, self._of_norms, self._of_data = (
            each.anew() for each in (self._of_losses, self._of_norms, self._of_data)
        )

    @property
    def wants_probe(self) -> bool:
        """Whether it is time for a probe: have the data changed, or the weights?"""
        return self._doubt is None and self._has_cause and not self.is_signed and not self.has_grown

    @property
    def _has_cause(self) -> bool:
        if self._is_lasting or (self._unprobed >= PROBE_AGAIN and not self.is_sound):
            return True
        if not self._is_probed:
            # on a device, more steps may have followed before this one was judged
            has_surprised = any(seen.is_condemned for seen in islice(reversed(self._recent), LATELY))
            return has_surprised or DEAR_IN_A_ROW <= self._high_in_a_row < LATELY
        return self._is_suspected and (self._bad_in_a_row >= self._playbook.probe_after or self._is_overdue)

    @property
    def _is_overdue(self) -> bool:
        """Whether a second probe is due though nothing surprises any more. An uncalibrated statistic takes a raised
        loss for its new level, and one that learns a new level is surprised by nothing. Any other would be surprised;
        where it is not, the user may have cut the weights on purpose."""
        is_young = bool(self._recent) and int(self._recent[-1].row["step"]) < YOUNG + LATELY
        is_unjudged = is_young or (self._suspected_since is not None and self._is_widened)
        return is_unjudged and self._is_suspected and self._since_probe >= LATELY

    @property
    def _is_widened(self) -> bool:
        """Whether the statistic does not judge because of an announced change."""
        if self._announced is None or not self._recent:
            return False
        return 0 <= int(self._recent[-1].row["step"]) - self._announced < WIDENED_STEPS + LATELY

    @property
    def doubted_since(self) -> int | None:
        """The onset of the damage, while the weights are in doubt."""
        return None if self._doubt is None else self._doubt.anomaly.onset

    @property
    def has_grown(self) -> bool:
        """Whether the healthy loss is higher than when the run began, as with growing returns, a critic that learns
        from its own estimates, or a task that becomes harder. Then the loss is no measure of the weights, and asks for
        nothing."""
        healthy = [loss for seen, loss in zip(self._recent, self._losses(WINDOW), strict=True) if not seen.is_bad]
        is_known = len(self._first) == FIRST and len(healthy) >= FIRST
        return is_known and median(healthy) - median(self._first) > GROWN

    @property
    def has_other_data(self) -> bool:
        """Whether a probe found changed data long ago: they are the run's data now."""
        return self.is_sound and self._since_probe > WINDOW

    @property
    def wander(self) -> tuple[float, float]:
        """How far loss and gradient norm may rise and come back by themselves, as logarithms."""
        return self._of_losses.reach, self._of_norms.reach

    def had_grown(self, usual: float) -> bool:
        """The same of what was ``usual`` before an incident: its own losses, once they are taken for a new level, say
        nothing about health."""
        return len(self._first) == FIRST and usual > 0 and math.log(usual) - median(self._first) > GROWN

    def has_risen(self, usual: float) -> bool:
        """Whether the current loss is further above ``usual`` than any rise that came back by itself before the
        incident: its own way down is not over."""
        return not median(self._losses(LATELY)) - math.log(usual) <= self._reach if usual > 0 else True

    def weigh(self, row: Row, verdict: Verdict) -> Anomaly | None:
        """Take in one judged step."""
        is_nonfinite = any(f.detector == "nonfinite" and f.spoils_update for f in verdict.findings)
        self._count(row, verdict, is_nonfinite)
        if float(row.get("params_finite", 1.0)) == 0.0:
            return self._anomaly(Trigger.NONFINITE_WEIGHTS, "a weight is not finite", self._onset(0))
        if self._nonfinite_in_a_row >= self._playbook.nonfinite_in_a_row:
            return self._often_nonfinite(f"{self._nonfinite_in_a_row} steps in a row were not finite", self._onset(0))
        if is_nonfinite and self._nonfinite_count > self._playbook.nonfinite_share * OFTEN_WITHIN:
            text = f"{self._nonfinite_count} of the last {len(self._nonfinite)} steps were not finite"
            return self._often_nonfinite(text, self._onset(WINDOW))
        if verdict.severity == Severity.HALT and not is_wished(verdict):
            return self._anomaly(Trigger.BUDGET_SPENT, str(verdict), self._onset(0))
        return self._resolved(row)

    @property
    def wants_suspect(self) -> bool:
        """Whether to look for the source of bad data again: many batches tell what few did not."""
        return self._unexplained is not None and self._since_probe % ASK_AGAIN == 0

    def suspect(self) -> str | None:
        """The data source that has the high losses, if one surely has."""
        batches = [(float(seen.row["loss"]), shares_of(str(seen.row.get("sources", "")))) for seen in self._recent]
        return blamed(batches, self._onset_of_bad_data())

    def explained(self, source: str) -> Anomaly:
        """The anomaly of bad data whose source has been found."""
        onset = self._onset_of_bad_data()
        count = len(self._recent) - onset
        text = f"in {count} steps the loss went with the share of {source}, far more than before: its data are bad"
        return self._anomaly(Trigger.BAD_DATA, text, onset, source=source)

    def is_of_the_data(self, rise: float, *, norm_has_grown: bool) -> bool:
        """Whether new batches rose far more than the probe batches, whose loss has risen by ``rise``: then the data
        have changed.

        ``norm_has_grown`` says that the gradients of the probe batches have grown.
        """
        if self._is_taught:
            return True
        onset, losses = self._onset(PROBE_AGAIN), self._losses(WINDOW)
        lately = max(len(losses) - LATELY, 0)
        if not self._recent[onset].is_bad:  # the probe was due to high losses, not to a surprise
            onset = len(losses) - self._high_in_a_row if self._high_in_a_row else lately
        before, since = losses[:onset][-WINDOW // 2 :], losses[onset:]
        if len(before) >= LATELY:  # otherwise it began before the window, and the earlier values stay
            # an onset may be dated too early, so take the highest stretch since
            stretches = [since[first : first + LATELY] for first in range(max(len(since) - LATELY + 1, 1))]
            usual = median(before)
            self._usual = min(self._usual, usual) if self.is_sound else usual  # probes are from before the first leap
            self._leap = max(map(median, stretches)) - self._usual
        high_loss = self._usual + self._leap / 2
        since_then = islice(zip(self._recent, losses, strict=True), min(onset, lately), None)
        taught = sum(seen.is_learned and loss >= high_loss for seen, loss in since_then)
        can_have_forgotten = taught >= TAUGHT or not norm_has_grown
        return self._leap >= LEAP and rise <= FORGOTTEN * self._leap and can_have_forgotten

    def is_running_away(self, since: int) -> bool:
        """Whether weights have grown out of proportion since a step, and the loss is far above that of untrained
        weights: whatever the data are, this is not learned."""
        if self._grown_at is None or self._grown_at < since or len(self._first) < FIRST:
            return False
        return median(self._losses(LATELY)) - median(self._first) > FAR_BEYOND

    def was_changed_on_purpose(self, since: int) -> bool:
        """Whether a change was announced since a step: the level of before is not what the loss has to come back to."""
        return self._announced is not None and self._announced >= since

    @property
    def has_lost_everything(self) -> bool:
        """Whether the loss is above that of the run's beginning: of what was learned nothing is left."""
        return len(self._first) == FIRST and median(self._losses(LATELY)) - median(self._first) > LEAP

    def loss_is_back(self) -> None:
        """Drop the doubt about the weights: the incident is over."""
        self._doubt = None

    def new_incident(self) -> None:
        """An incident was opened: forget a probe from long before it, and remember how far the loss went up until
        then."""
        self._reach = self._of_losses.reach
        if self._since_probe > WINDOW:
            self.is_sound = False

    def cannot_probe(self) -> None:
        """A probe is due, and there is no batch to try: the last finding does not hold for a loss that has risen beyond
        all that it was about."""
        if self.is_sound and self._has_risen_again():
            self.is_sound = False

    def state_dict(self) -> dict[str, Any]:
        """The findings of the last probe and the first losses, as JSON values; a resumed run starts the rest over."""
        found = {"usual": self._usual, "leap": self._leap, "sound_until": self._sound_until, "is_sound": self.is_sound}
        wander = [self._of_losses, self._of_norms, self._of_data]
        known = {"first": self._first, "wander": wander, "announced": self._announced, "grown_at": self._grown_at}
        return found | known | {"is_signed": self.is_signed, "reach": self._reach}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self._usual, self._leap, self._sound_until = state["usual"], state["leap"], state["sound_until"]
        self.is_sound = state["is_sound"]
        if "first" in state:  # older states have none
            self._first = tuple(state["first"])
            self._of_losses, self._of_norms, self._of_data = (thaw(Excursions(), wander) for wander in state["wander"])
        self._announced, self.is_signed = state.get("announced"), state.get("is_signed", False)
        self._grown_at = state.get("grown_at")
        self._reach = state.get("reach", self._of_losses.reach)

    def compare_with_what_passed(self, loss: float) -> None:
        """Whether a stretch of other data has passed after all: batches from before, whose loss is given, must cost
        what the newest do. Where they do not, a harder task is being learned, and has come to stay."""
        if not self._passed or not 0 < loss < math.inf:
            return
        lately = self._losses(2 * LATELY)
        apart = abs(median(lately[-LATELY:]) - math.log(loss))
        if apart > max(LEAP, APART * pstdev(lately)):
            self._passed = 0

    def is_left_worse_off(self, loss: float, least: float) -> bool | None:
        """Whether a stretch of other data has passed and left the weights worse off; None where none has passed.

        The loss of the probe batches must be higher than when the stretch began: by more than ``least``, as a
        logarithm, and by more than slightly.
        """
        if not self._passed or self._sound_loss is None:
            return None
        return not (loss <= self._sound_loss * math.exp(least) or self.is_slight(loss, self._sound_loss))

    def is_slight(self, loss: float, loss_then: float) -> bool:
        """Whether weights with that loss on the probe batches have lost next to nothing of what they had learned."""
        if len(self._first) < FIRST:
            return False
        return loss - loss_then < LOST * (math.exp(median(self._first)) - loss_then)

    def probed(
        self,
        found: str,
        *,
        number: int,
        loss: float,
        rise: float,
        least: float,
        is_condemned: bool,
        source: str | None,
        oldest: int = 0,
    ) -> Anomaly | None:
        """Take in the result of a probe, before step ``number``. Batches that are still good mean changed data; bad
        ones mean damaged weights, unless the next steps say otherwise.

        ``loss`` is that of the probe batches, ``rise`` its logarithmic rise, and ``least`` the smallest rise that
        counts. The ``oldest`` of these batches is that of this step.
        """
        bad, onset = sum(seen.is_bad for seen in self._recent), self._onset(PROBE_AGAIN)
        is_early = not (self._is_lasting or self._is_overdue or self._bad_in_a_row >= self._playbook.probe_after)
        if not bad and self._is_widened and oldest >= (self._announced or 0):  # all batches know the announced change
            onset = self._onset_of_suspicion(is_condemned)
        else:
            is_early |= not bad  # losses may be high by chance; without a surprise weights are not damaged
            self._suspected_since = None
        self._unprobed, self._since_probe, self._is_probed, self._is_lasting = 0, 0, True, False
        was_sound, self.is_sound, self._is_suspected, self._sound_until = self.is_sound, False, is_condemned, math.inf
        if not is_condemned:
            self._find_sound()
        found = f"{bad} of {len(self._recent)} steps were bad; {found}"
        lasted, self._passed = self._passed, 0
        is_begun = self.is_sound and not lasted
        # a late probe finds batches that a few updates on other data have already made worse
        then = math.inf if was_sound else loss * math.exp(-rise)
        self._sound_loss = min(loss, then, self._sound_loss or math.inf) if is_begun else None
        if lasted and is_condemned:
            self.is_sound, self._is_suspected = True, False  # the weights were sound when it began
            text = f"{found}: other data have passed within {lasted} steps, and left the weights worse off"
            return self._anomaly(Trigger.SPOILT, text, len(self._recent) - LATELY - lasted, lasted=lasted)
        if is_condemned and is_early:  # one surprise is not enough: probe again where more follow
            return None
        if is_condemned:
            anomaly = self._anomaly(Trigger.DAMAGED, f"{found}: the weights are damaged", onset)
            if not 0 < loss < math.inf:
                return anomaly
            self._doubt = Doubt(anomaly, number, math.log(loss), rise, least)
            return None
        if source is None:  # the source is not known yet: skipping is all that can be done
            self._unexplained = int(self._recent[onset].row["step"])
            return None
        text = f"{found}: the data are bad, those of {source}"
        return self._anomaly(Trigger.BAD_DATA, text, onset, source=source)

    def _resolved(self, row: Row) -> Anomaly | None:
        """Decide the doubt about the weights: give its anomaly once a new batch confirms it, or drop it."""
        self.excuse = ""
        if self._doubt is None or int(row["step"]) < self._doubt.number:
            return None
        doubt, after = self._doubt, int(row["step"]) - self._doubt.number
        (cost,) = self._losses(1)
        lately = median(self._losses(LATELY))
        by_chance = max(doubt.least, SUDDEN * self._spread_of_batches())
        is_lower = cost <= doubt.loss - max(OTHERS, by_chance)
        is_higher = math.inf > cost >= doubt.loss + max(LEAP, by_chance) and lately >= doubt.loss + LEAP
        if after == 0 and (is_lower or is_higher):
            self.excuse = f"{doubt.anomaly.text}, or so it seemed: the next batch has a loss of {math.exp(cost):.4g}"
            self.excuse += " by the same weights, which learn other data and forget those from before"
            self._find_sound()
            self._sound_loss = math.exp(doubt.loss - doubt.rise) if is_higher else None
        elif after == TAUGHT and self._are_forgotten(doubt):
            few = math.exp(median(self._losses(TAUGHT + 1)))
            self.excuse = (
                f"{doubt.anomaly.text}, or so it seemed: the next {TAUGHT + 1} batches have a loss of {few:.4g}"
            )
            self.excuse += " by nearly the same weights, which learn other data and forget those from before"
            self._find_sound()
            self._sound_loss = None
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

    def _spread_of_batches(self) -> float:
        """The standard deviation of one batch's loss from the next by weights that are nearly the same. Damaged weights
        cost one batch ten times what they cost another; that the weights heal meanwhile is no part of it."""
        losses = self._losses(LATELY)
        steps = [abs(after - before) for before, after in pairwise(losses) if math.isfinite(after - before)]
        return median(steps) / DIFFERENCE_OF_TWO if steps else 0.0

    def _are_forgotten(self, doubt: Doubt) -> bool:
        """Whether the batches since the probe cost far less than those from before, by the noise of the last ones.
        Where the damage is young the noise holds the leap to it, and nothing is excused."""
        apart = max(OTHERS, APART * pstdev(self._losses(2 * LATELY)))
        return median(self._losses(TAUGHT + 1)) <= doubt.loss - apart

    def _is_growing(self, doubt: Doubt) -> bool:
        """Whether the loss rises further, or no update is applied that could heal."""
        learned = sum(seen.is_learned for seen in islice(reversed(self._recent), LATELY))
        return learned < TAUGHT or not self._losses(1)[0] <= doubt.loss + max(LEAP, doubt.least)

    @property
    def _is_taught(self) -> bool:
        """Whether weights that were sound when other data began have been trained on these since. Then the probe shows
        what they were taught, and only the end of these data can undo it."""
        if self._sound_loss is None or not 0 < self._since_probe <= BEING_TAUGHT:
            return False
        return median(self._losses(self._since_probe)[:LATELY]) >= self._usual + max(self._leap / 2, LEAP)

    def _find_sound(self) -> None:
        self.is_sound, self._is_suspected = True, False
        self._sound_until = max(self._losses(LATELY)) + LEAP

    def _count(self, row: Row, verdict: Verdict, is_nonfinite: bool) -> None:
        if len(self._nonfinite) == OFTEN_WITHIN:
            self._nonfinite_count -= self._nonfinite[0]
        self._nonfinite.append(is_nonfinite)
        self._nonfinite_count += is_nonfinite
        is_bad = not verdict.go and verdict.skips_in_a_row > 0  # a loss scaler in search of its scale skips by design
        is_bad |= any(map(is_surprise, verdict.findings))
        loss = _log(row["loss"])
        self.is_signed |= -math.inf < float(row["loss"]) < 0
        if len(self._first) < FIRST and loss < math.inf:
            self._first = (*self._first, loss)
        self._compare_with_all_before(loss)
        if "announced" in row:
            self._announced = int(row["step"])
        if any(f.detector == PROPORTION and f.severity >= Severity.ALARM for f in verdict.findings):
            self._grown_at = int(row["step"])
        is_explained = self.is_sound and self._is_probed
        if len(self._recent) == WINDOW:
            self._follow_wander(self._recent[0])
        is_condemned, is_suspicious = is_bad and not is_nonfinite, verdict.is_suspicious
        self._recent.append(JudgedRow(row, is_bad, is_condemned, verdict.go, is_suspicious, is_explained, loss))
        alarms = [f for f in verdict.findings if f.severity == Severity.ALARM and f.detector != PROBE]
        lasting = [f.lasts for f in alarms if f.lasts > 1]
        late = range(-min(max(lasting, default=0), len(self._recent)), 0)
        is_new = sum(self._recent[place].is_bad for place in late) < min(len(late), MANY)
        self._is_lasting |= is_new and not is_explained
        for place in late[-max((f.lasts for f in dating(alarms)), default=1) :]:
            self._recent[place] = self._recent[place]._replace(is_bad=True)
        self._since_probe += 1
        if self.is_sound and self._since_probe >= WINDOW // 2:  # the high loss of that time may be long over
            self._sound_until = min(self._sound_until, median(self._losses(WINDOW // 2)) + LEAP)
        if self.is_sound and self._since_probe >= LATELY and self._has_risen_again():
            self._is_lasting = True
        if self._since_probe > WINDOW // 2:
            self._unexplained = None
        self._calm = 0 if is_bad or self._high_in_a_row else self._calm + 1
        if self._calm > PROBE_AGAIN or self._has_passed:  # the next one is another anomaly
            self._is_probed = self._is_suspected = False
        if self._since_probe > WINDOW:  # a new stretch is compared with its own beginning
            self._sound_loss = None
        self._nonfinite_in_a_row = self._nonfinite_in_a_row + 1 if is_nonfinite else 0
        if self._sound_loss is not None and (lasted := self._length_of_what_passed()):
            self._passed, self._is_lasting = lasted, True
        if self._is_lasting and self.has_grown:  # no probe now, and the reason does not matter later
            self._is_lasting = False
        if not is_bad:
            self._bad_in_a_row = 0
        elif not is_nonfinite:
            self._bad_in_a_row += 1
            last = islice(reversed(self._recent), self._since_probe)
            self._unprobed = sum(seen.is_condemned for seen in last)

    @staticmethod
    def _fall_after_noise(stretch: Sequence[float]) -> float:
        """How far the loss must fall from eight batches to the next where noise ends: beyond what it is falling by
        already, as on a harder task that is being learned, and beyond its own noise."""
        last = np.array(stretch[-2 * LATELY :])
        slope, level = np.polyfit(np.arange(len(last)), last, 1)
        spread = float(np.std(last - level - slope * np.arange(len(last))))
        return max(LEAP, SUDDEN * spread) - LATELY * min(float(slope), 0.0)

    def _compare_with_all_before(self, loss: float) -> None:
        """Count the batch if its loss is high; those already in the row are not part of the comparison."""
        if not 0 < self._high_in_a_row < LATELY:
            if self._recent and loss <= self._recent[-1].loss:  # one of those before: so for half of all steps
                self._high_in_a_row = 0
                return
            before = self._losses(WINDOW // 2)
            is_known = len(before) == WINDOW // 2
            self._high_in_a_row, self._high_limit = 0, max(*before, median(before) + LEAP) if is_known else math.inf
        self._high_in_a_row = self._high_in_a_row + 1 if math.inf > loss > self._high_limit else 0

    def _follow_wander(self, seen: JudgedRow) -> None:
        """Follow a row that leaves the window."""
        self._of_data = self._of_data.after(seen.loss)
        if seen.is_explained:
            self._of_losses, self._of_norms = self._of_losses.anew(), self._of_norms.anew()
            return
        self._of_losses = self._of_losses.after(seen.loss)
        self._of_norms = self._of_norms.after(_log(seen.row.get("grad_norm", 0.0)))

    def _length_of_what_passed(self) -> int:
        """Length of a high-loss stretch that was trained on and ended at once, a few steps ago; else 0.

        The loss on data that are learned falls little by little; foreign data are gone from one batch to the next.
        """
        losses = self._losses(WINDOW)
        end = len(losses) - LATELY
        # a late finding is dated early, so the stretch begins with a step that was itself surprising
        places = range(self._onset(PROBE_AGAIN), max(end, 0))
        onset = next((place for place in places if self._recent[place].is_condemned), end)
        before, stretch, since = losses[:onset][-WINDOW // 2 :], losses[onset:end], losses[end:]
        if len(before) < LATELY or len(stretch) < self._playbook.probe_after:
            return 0
        usual = median(before)
        last = median(stretch[-LATELY:])
        # most of a stretch that is dated too early is as it was before
        height = max(median(stretch), last) - usual
        of_stretch = zip(islice(self._recent, onset, end), stretch, strict=True)
        learned = sum(seen.is_learned and loss >= usual + height / 2 for seen, loss in of_stretch)
        # domains that take turns are the run's own, however unlike they are
        is_other = height >= max(LEAP, self._of_data.reach) and learned >= TAUGHT
        is_noise = self._has_learned_nothing(stretch)
        fall = self._fall_after_noise(stretch) if is_noise else AT_ONCE * height
        least = min(stretch[-LATELY:]) if is_noise else last
        return len(stretch) if is_other and median(since) <= last - fall and max(since) < least else 0

    def _has_learned_nothing(self, stretch: Sequence[float]) -> bool:
        """Whether the stretch ends as high as the run began and no longer falls: noise, which wipes out what was known.
        What follows is learned anew, so such a stretch has no sharp end."""
        if len(self._first) < FIRST or len(stretch) < 2 * LATELY:
            return False
        earlier, last = median(stretch[-2 * LATELY : -LATELY]), median(stretch[-LATELY:])
        return abs(earlier - last) < GROWN and last > median(self._first) - GROWN

    @property
    def _has_passed(self) -> bool:
        """Whether the data that weights were found sound on are gone: the loss is back where it was before them, and
        not on its way there, as with data that are being learned."""
        if not self.is_sound or self._calm < LATELY:
            return False
        return median(self._losses(LATELY)) < self._usual + LEAP / 2 < math.inf

    def _has_risen_again(self) -> bool:
        """Whether every recent loss is high again, after applied updates; without updates the weights are still
        sound."""
        learned = sum(seen.is_learned for seen in islice(reversed(self._recent), LATELY))
        return learned >= TAUGHT and min(self._losses(LATELY)) > self._sound_until

    def _losses(self, count: int) -> list[float]:
        """The last losses, as logarithms."""
        rows = islice(self._recent, max(len(self._recent) - count, 0), None)
        return [seen.loss for seen in rows]

    def _onset(self, gap: int) -> int:
        """Index of the recent row that the anomaly began with; up to ``gap`` good rows may lie between two bad ones."""
        onset, good = len(self._recent) - 1, 0
        for place in reversed(range(len(self._recent))):
            if self._recent[place].is_bad:
                onset, good = place, 0
            elif (good := good + 1) > gap:
                break
        return onset

    def _onset_of_suspicion(self, is_condemned: bool) -> int:
        """The same where nothing can be a surprise: the high-loss batch that asked for the first of the probes."""
        if not is_condemned:
            self._suspected_since = None
        elif self._suspected_since is None:
            self._suspected_since = int(self._recent[-max(self._high_in_a_row, 1)].row["step"])
        since = self._suspected_since
        places = (at for at, seen in enumerate(self._recent) if int(seen.row["step"]) == since)
        return next(places, len(self._recent) - 1)

    def _onset_of_bad_data(self) -> int:
        """The same for bad data whose source is not known."""
        if self._unexplained is None:
            return self._onset(PROBE_AGAIN)
        return next(at for at, seen in enumerate(self._recent) if int(seen.row["step"]) >= self._unexplained)

    def _often_nonfinite(self, text: str, onset: int) -> Anomaly:
        """The anomaly of non-finite steps. The run goes back to before the first, but each spoils its own step alone:
        left out are those of the last stretch, up to the one that triggered it."""
        anomaly = self._anomaly(Trigger.NONFINITE_OFTEN, text, onset)
        return replace(anomaly, batch=self._batch(self._onset(0)), triggered_by=self._batch(len(self._recent) - 1))

    def _batch(self, at: int) -> int | None:
        """The batch of a recent row, if it is known."""
        batch = self._recent[at].row.get("batch_index")
        return None if batch is None else int(batch)

    def _anomaly(self, trigger: Trigger, text: str, at: int, *, source: str | None = None, lasted: int = 0) -> Anomaly:
        while at > 0 and self._recent[at - 1].is_suspicious:  # the gradient norm leads the loss by a few steps
            at, lasted = at - 1, lasted + bool(lasted)
        return Anomaly(
            trigger=trigger,
            onset=int(self._recent[at].row["step"]),
            batch=self._batch(at),
            text=text,
            source=source,
            lasted=lasted,
        )


def _log(value: Any) -> float:
    """The logarithm; infinite where there is none."""
    return math.log(value) if 0 < float(value) < math.inf else math.inf


def blamed(batches: Sequence[Batch], onset: int) -> str | None:
    """The source whose share of a batch goes with the rise of the loss, since the onset or a later batch.

    It must be surely more likely than a rise of all batches alike. The batches before the onset say what each should
    cost, since a source may be hard by nature.

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
    """Log-likelihood ratio: the loss has risen with the share of a source, against a rise of all batches alike.

    An onset may be dated too early, so each of the two may begin at the batch that suits it best.
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
    """The loss expected of each batch, by the line through those before ``place``."""
    known, cost = shares[:place] - shares[:place].mean(), losses[:place].mean()
    slope = known @ losses[:place] / (known @ known) if known.any() else 0.0
    expected: Floats = cost + slope * (shares - shares[:place].mean())
    return expected


def _fit(residuals: Floats) -> float:
    """Log-likelihood of the residuals as normal noise of their own size."""
    return -len(residuals) / 2 * math.log(float(residuals @ residuals) / len(residuals) + 1e-12)
