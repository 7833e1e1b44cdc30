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

from sealegs.detectors.spike import MANY
from sealegs.judge import is_surprise
from sealegs.recovery.history import Trigger
from sealegs.recovery.playbook import Playbook
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
TAUGHT = 4
"""Updates with such batches before weights can have forgotten anything; until then they are not excused where the
gradients of batches from before have grown. In six runs at 49M parameters each: queries and keys x16, where all
updates were skipped and norms grew 40,000 times and more; half of the data in another language, where none were skipped
and norms grew up to 5.4 times."""
LATELY = 8
"""Steps that say what batches cost."""
AT_ONCE = 0.5
"""How much of its height, as a logarithm, a stretch of dear batches must lose within three steps to have passed: what
has been learnt, all but a little, loses that little by chance."""
FEWEST_BATCHES = 8
"""Batches from which a source can be blamed, and twice as many before them, ..."""
SUREST = math.log(1000)
"""... where that is so many times, as a logarithm, as likely as that all batches have become dearer alike. Of 200 runs
with one source that is hard by nature 2.5 % blame one where all batches have (4 % where only 23 were seen before), and
up to 1 % where some or none have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
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


class Seen(NamedTuple):
    """A row that was judged."""

    row: Row
    is_bad: bool
    """Skipped, or surprising, or part of what was found late."""
    is_condemned: bool
    """Though everything in it is finite."""
    is_learned: bool
    """Its update was applied."""


class Evidence:
    """Follows the rows of a run. Forgets everything after a treatment: what comes then is judged for itself."""

    def __init__(self, playbook: Playbook) -> None:
        self._playbook = playbook
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self._nonfinite: deque[bool] = deque(maxlen=OFTEN_WITHIN)
        self._often = 0
        self._in_a_row = 0
        """Steps that were not finite."""
        self._recent: deque[Seen] = deque(maxlen=WINDOW)
        self._condemned = 0
        """Steps in a row."""
        self._unprobed = 0
        """Condemned ones among the last steps, since the last probe."""
        self._since_probe = 0
        """Steps since that."""
        self._is_probed = False
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
        if self._is_lasting or self._unprobed >= PROBE_AGAIN:
            return True
        return not self._is_probed and self._condemned >= self._playbook.probe_after

    def take(self, row: Row, verdict: Verdict) -> Trouble | None:
        """One step that was judged."""
        is_nonfinite = any(f.detector == "nonfinite" and f.spoils_update for f in verdict.findings)
        self._count(row, verdict, is_nonfinite)
        if float(row.get("params_finite", 1.0)) == 0.0:
            return self._trouble(Trigger.NONFINITE_WEIGHTS, "a weight is not finite", self._onset(0))
        if self._in_a_row >= self._playbook.nonfinite_in_a_row:
            return self._trouble(
                Trigger.NONFINITE_OFTEN, f"{self._in_a_row} steps in a row were not finite", self._onset(0)
            )
        if is_nonfinite and self._often > self._playbook.nonfinite_share * OFTEN_WITHIN:
            text = f"{self._often} of the last {len(self._nonfinite)} steps were not finite"
            return self._trouble(Trigger.NONFINITE_OFTEN, text, self._onset(WINDOW))
        if verdict.severity == Severity.HALT:
            return self._trouble(Trigger.BUDGET_SPENT, str(verdict), self._onset(0))
        return None

    @property
    def wants_suspect(self) -> bool:
        """Whether it is time to ask once more where bad data come from: many batches tell what few did not."""
        return self._unexplained is not None and self._since_probe % ASK_AGAIN == 0

    def suspect(self) -> str | None:
        """The source of the data that has the bad losses, if one surely has."""
        batches = [(float(seen.row["loss"]), shares_of(str(seen.row.get("sources", "")))) for seen in self._recent]
        return blamed(batches, self._onset_of_bad_data())

    def explained(self, source: str) -> Trouble:
        """Bad data of no known origin come from there after all."""
        onset = self._onset_of_bad_data()
        count = len(self._recent) - onset
        text = f"in {count} steps the loss went with the share of {source}, far more than before: its data are bad"
        return self._trouble(Trigger.BAD_DATA, text, onset, source=source)

    def is_of_the_data(self, rise: float, *, norm_has_grown: bool) -> bool:
        """Whether the batches that come became dearer by far more than those from before, whose loss has risen by so
        much, as a logarithm, and the norm of whose gradients may have grown."""
        onset, losses = self._onset(PROBE_AGAIN), self._losses(WINDOW)
        lately = max(len(losses) - LATELY, 0)
        if not self._recent[onset].is_bad:  # asked because batches have become dearer
            onset = lately
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

    def new_incident(self) -> None:
        """One was opened: what a probe found long before says nothing of it."""
        if self._since_probe > WINDOW:
            self.is_sound = False

    def state_dict(self) -> dict[str, Any]:
        """What a probe has found, as JSON values; the rest is forgotten where a run begins anew."""
        found = {"usual": self._usual, "leap": self._leap, "sound_until": self._sound_until}
        return found | {"is_sound": self.is_sound}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._usual, self._leap, self._sound_until = state["usual"], state["leap"], state["sound_until"]
        self.is_sound = state["is_sound"]

    def is_left_worse_off(self, loss: float, least: float) -> bool | None:
        """Whether batches from before, of that loss, are dearer by more than ``least``, as a logarithm, than when a
        stretch of other data had just begun that has passed; None where none has."""
        if not self._passed or self._sound_loss is None:
            return None
        return not loss <= self._sound_loss * math.exp(least)

    def probed(self, found: str, *, loss: float, is_condemned: bool, source: str | None) -> Trouble | None:
        """What batches showed that were healthy before: bad now, and it is the weights; good, and it is the data.

        ``loss`` is theirs.
        """
        self._unprobed, self._since_probe, self._is_probed, self._is_lasting = 0, 0, True, False
        self.is_sound = not is_condemned
        self._sound_until = median(self._losses(LATELY)) + LEAP if self.is_sound else math.inf
        bad, onset = sum(seen.is_bad for seen in self._recent), self._onset(PROBE_AGAIN)
        found = f"{bad} of {len(self._recent)} steps were bad; {found}"
        lasted, self._passed = self._passed, 0
        is_begun = self.is_sound and not lasted
        self._sound_loss = min(loss, self._sound_loss or math.inf) if is_begun else None
        if lasted and is_condemned:
            text = f"{found}: other data have passed within {lasted} steps, and left the weights worse off"
            return self._trouble(Trigger.SPOILT, text, onset, lasted=lasted)
        if is_condemned:
            return self._trouble(Trigger.DAMAGED, f"{found}: the weights are damaged", onset)
        if source is None:  # bad data of no known origin, so far: skipping is all that can be done
            self._unexplained = int(self._recent[onset].row["step"])
            return None
        text = f"{found}: the data are bad, those of {source}"
        return self._trouble(Trigger.BAD_DATA, text, onset, source=source)

    def _count(self, row: Row, verdict: Verdict, is_nonfinite: bool) -> None:
        if len(self._nonfinite) == OFTEN_WITHIN:
            self._often -= self._nonfinite[0]
        self._nonfinite.append(is_nonfinite)
        self._often += is_nonfinite
        is_bad = not verdict.go and verdict.skips_in_a_row > 0  # a scaler that looks for its scale skips by design
        is_bad |= any(map(is_surprise, verdict.findings))
        self._recent.append(Seen(row, is_bad, is_bad and not is_nonfinite, verdict.go))
        lasting = [f.lasts for f in verdict.findings if f.severity == Severity.ALARM and f.lasts > 1]
        late = range(-min(max(lasting, default=0), len(self._recent)), 0)
        self._is_lasting |= bool(late) and sum(self._recent[place].is_bad for place in late) < MANY
        for place in late:
            self._recent[place] = self._recent[place]._replace(is_bad=True)
        self._since_probe += 1
        if self.is_sound and self._since_probe >= WINDOW // 2:  # what was dear then may be long over
            self._sound_until = min(self._sound_until, median(self._losses(WINDOW // 2)) + LEAP)
        if self.is_sound and self._since_probe >= LATELY and self._has_become_dearer():
            self._is_lasting = True
        if self._since_probe > WINDOW // 2:
            self._unexplained = None
        if self._since_probe > WINDOW:  # a stretch that begins now is compared with its own beginning
            self._is_probed, self._sound_loss = False, None
        self._in_a_row = self._in_a_row + 1 if is_nonfinite else 0
        if self._sound_loss is not None and (lasted := self._length_of_what_passed()):
            self._passed, self._is_lasting = lasted, True
        if not is_bad:
            self._condemned = 0
        elif not is_nonfinite:
            self._condemned += 1
            last = islice(reversed(self._recent), self._since_probe)
            self._unprobed = sum(seen.is_condemned for seen in last)

    def _length_of_what_passed(self) -> int:
        """Steps of a stretch of dear batches that ended at once, a few steps ago, and was trained on; else 0.

        What is learnt becomes cheaper little by little; what was foreign is gone from one batch to the next.
        """
        onset, losses = self._onset(PROBE_AGAIN), self._losses(WINDOW)
        end = len(losses) - LATELY
        before, stretch, since = losses[:onset][-WINDOW // 2 :], losses[onset:end], losses[end:]
        if len(before) < LATELY or len(stretch) < self._playbook.probe_after:
            return 0
        learned = sum(seen.is_learned for seen in islice(self._recent, onset, end))
        height, last = median(stretch) - median(before), median(stretch[-3:])
        is_other = height >= LEAP and learned >= TAUGHT
        return len(stretch) if is_other and median(since[:3]) <= last - AT_ONCE * height and max(since) < last else 0

    def _has_become_dearer(self) -> bool:
        """Whether every batch has, after updates that were applied: where none was, the weights are still sound."""
        learned = sum(seen.is_learned for seen in islice(reversed(self._recent), LATELY))
        return learned >= TAUGHT and min(self._losses(LATELY)) > self._sound_until

    def _losses(self, count: int) -> list[float]:
        """Of the last rows, as logarithms."""
        rows = islice(self._recent, max(len(self._recent) - count, 0), None)
        losses = (float(seen.row["loss"]) for seen in rows)
        return [math.log(loss) if 0 < loss < math.inf else math.inf for loss in losses]

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

    def _trouble(self, trigger: Trigger, text: str, at: int, *, source: str | None = None, lasted: int = 0) -> Trouble:
        onset = self._recent[at].row
        batch = onset.get("batch_index")
        return Trouble(
            trigger=trigger,
            onset=int(onset["step"]),
            batch=None if batch is None else int(batch),
            text=text,
            source=source,
            lasted=lasted,
        )


def shares_of(sources: str) -> dict[str, float]:
    """What part of a batch each source is.

    >>> shares_of("grammar=6 stdlib=2")
    {'grammar': 0.75, 'stdlib': 0.25}
    """
    rows = {name: float(count) for name, _, count in (part.rpartition("=") for part in sources.split()) if name}
    total = sum(rows.values())
    return {name: count / total for name, count in rows.items()} if total else {}


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
