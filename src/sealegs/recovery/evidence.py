"""Judged rows in, Troubles out: what a run shows that no single step does, and what it asks the playbook for."""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from statistics import median
from typing import NamedTuple

from sealegs.detectors.spike import MANY
from sealegs.recovery.playbook import Playbook, Trigger
from sealegs.vocabulary import Row, Severity, Verdict

OFTEN_WITHIN = 500
"""Steps of which a share may be not finite."""
WINDOW = 100
"""Steps that are looked at together."""
PROBE_AGAIN = 20
"""Skips among them that ask for a probe too, and after which one is made once more. So many healthy steps between two
bad ones, and they are two troubles."""
LEAP = math.log(1.25)
"""By how much the batches that come must have become dearer at once for that to be a change of the data ..."""
FORGOTTEN = 0.5
"""... and how much of it, at most, one from before has become dearer by: weights that learn other data forget what they
knew, but slowly; where they are at fault themselves, both are as dear."""
LATELY = 8
"""Steps that say what batches cost."""
FEWEST_BATCHES = 8
"""Batches from which a source can be blamed ..."""
SUREST = 4.0
"""... where its share and the loss go together by so many standard errors."""


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


class Seen(NamedTuple):
    """A row that was judged."""

    row: Row
    is_bad: bool
    """Skipped, or part of what was found late."""
    is_condemned: bool
    """Skipped, though everything in it is finite."""


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
        self._leap = 0.0
        """Of the loss of batches, as a logarithm, where trouble began."""
        self.is_sound = False
        """Whether the last probe found that it is the data, and not the weights: going back would change nothing."""
        self._is_lasting = False
        """Whether there was an alarm since that of what lasts, and was not all kept from the weights."""

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
            return self._trouble(Trigger.NONFINITE_WEIGHTS, "a weight is not finite", gap=0)
        if self._in_a_row >= self._playbook.nonfinite_in_a_row:
            return self._trouble(Trigger.NONFINITE_OFTEN, f"{self._in_a_row} steps in a row were not finite", gap=0)
        if is_nonfinite and self._often > self._playbook.nonfinite_share * OFTEN_WITHIN:
            text = f"{self._often} of the last {len(self._nonfinite)} steps were not finite"
            return self._trouble(Trigger.NONFINITE_OFTEN, text, gap=WINDOW)
        if verdict.severity == Severity.HALT:
            return self._trouble(Trigger.BUDGET_SPENT, str(verdict), gap=0)
        return None

    def suspect(self) -> str | None:
        """The source of the data that has the bad losses, if one surely has."""
        place = self._onset(PROBE_AGAIN)
        seen = islice(self._recent, place, None)
        return blamed((float(each.row["loss"]), shares_of(str(each.row.get("sources", "")))) for each in seen)

    def is_of_the_data(self, rise: float) -> bool:
        """Whether the batches that come became dearer by far more than one from before, whose loss has risen by so
        much, as a logarithm."""
        onset = self._onset(PROBE_AGAIN)
        losses = [
            math.log(loss) if 0 < (loss := float(seen.row["loss"])) < math.inf else math.inf for seen in self._recent
        ]
        before, since = losses[:onset][-WINDOW // 2 :], losses[onset:]
        if len(before) >= LATELY:  # else it began before what is remembered, and is as it was found then
            # an onset may be dated too early, so the dearest stretch since then
            stretches = [since[first : first + LATELY] for first in range(max(len(since) - LATELY + 1, 1))]
            self._leap = max(map(median, stretches)) - median(before)
        return self._leap >= LEAP and rise <= FORGOTTEN * self._leap

    def probed(self, found: str, *, is_condemned: bool, source: str | None) -> Trouble | None:
        """What a batch showed that was healthy before: bad now, and it is the weights; good, and it is the data."""
        self._unprobed, self._since_probe, self._is_probed, self._is_lasting = 0, 0, True, False
        self.is_sound = not is_condemned
        bad = sum(seen.is_bad for seen in self._recent)
        found = f"{bad} of {len(self._recent)} steps were bad; a batch from before has {found}"
        if is_condemned:
            return self._trouble(Trigger.DAMAGED, f"{found}: the weights are damaged", gap=PROBE_AGAIN)
        if source is None:
            return None  # bad data of no known origin: skipping is all that can be done
        text = f"{found}: the data are bad, those of {source}"
        return self._trouble(Trigger.BAD_DATA, text, gap=PROBE_AGAIN, source=source)

    def _count(self, row: Row, verdict: Verdict, is_nonfinite: bool) -> None:
        if len(self._nonfinite) == OFTEN_WITHIN:
            self._often -= self._nonfinite[0]
        self._nonfinite.append(is_nonfinite)
        self._often += is_nonfinite
        is_skipped = not verdict.go and verdict.skips_in_a_row > 0  # a scaler that looks for its scale skips by design
        self._recent.append(Seen(row, is_skipped, is_skipped and not is_nonfinite))
        lasting = [f.lasts for f in verdict.findings if f.severity == Severity.ALARM and f.lasts > 1]
        late = range(-min(max(lasting, default=0), len(self._recent)), 0)
        self._is_lasting |= bool(late) and sum(self._recent[place].is_bad for place in late) < MANY
        for place in late:
            self._recent[place] = self._recent[place]._replace(is_bad=True)
        self._since_probe += 1
        if self._since_probe > WINDOW:
            self._is_probed = False
        self._in_a_row = self._in_a_row + 1 if is_nonfinite else 0
        if not is_skipped:
            self._condemned = 0
        elif not is_nonfinite:
            self._condemned += 1
            last = islice(reversed(self._recent), self._since_probe)
            self._unprobed = sum(seen.is_condemned for seen in last)

    def _onset(self, gap: int) -> int:
        """Which of the recent rows it began with, where so many good ones may lie between two bad ones."""
        onset, good = len(self._recent) - 1, 0
        for place in reversed(range(len(self._recent))):
            if self._recent[place].is_bad:
                onset, good = place, 0
            elif (good := good + 1) > gap:
                break
        return onset

    def _trouble(self, trigger: Trigger, text: str, *, gap: int, source: str | None = None) -> Trouble:
        onset = self._recent[self._onset(gap)].row
        batch = onset.get("batch_index")
        return Trouble(
            trigger=trigger,
            onset=int(onset["step"]),
            batch=None if batch is None else int(batch),
            text=text,
            source=source,
        )


def shares_of(sources: str) -> dict[str, float]:
    """What part of a batch each source is.

    >>> shares_of("grammar=6 stdlib=2")
    {'grammar': 0.75, 'stdlib': 0.25}
    """
    rows = {name: float(count) for name, _, count in (part.rpartition("=") for part in sources.split()) if name}
    total = sum(rows.values())
    return {name: count / total for name, count in rows.items()} if total else {}


def blamed(batches: Iterable[tuple[float, Mapping[str, float]]]) -> str | None:
    """The source whose share of a batch and the batch's loss go together, if one surely does.

    >>> blamed([(3.0 + share + 0.01 * (i % 3), {"a": share, "b": 1 - share}) for i in range(12) for share in [i / 12]])
    'a'
    >>> blamed([(3.0 + 0.01 * (i % 3), {"a": i / 12, "b": 1 - i / 12}) for i in range(12)]) is None
    True
    """
    seen = [(loss, shares) for loss, shares in batches if math.isfinite(loss)]
    names = sorted({name for _, shares in seen for name in shares})
    if len(seen) < FEWEST_BATCHES or len(names) < 2:
        return None
    surest = max(names, key=lambda name: _standard_errors([(shares.get(name, 0.0), loss) for loss, shares in seen]))
    is_sure = _standard_errors([(shares.get(surest, 0.0), loss) for loss, shares in seen]) > SUREST
    return surest if is_sure else None


def _standard_errors(pairs: list[tuple[float, float]]) -> float:
    """By how many of its standard errors the slope of the second on the first is above zero."""
    n = len(pairs)
    mean_x, mean_y = sum(x for x, _ in pairs) / n, sum(y for _, y in pairs) / n
    xx = sum((x - mean_x) ** 2 for x, _ in pairs)
    yy = sum((y - mean_y) ** 2 for _, y in pairs)
    xy = sum((x - mean_x) * (y - mean_y) for x, y in pairs)
    if not xx or not yy:
        return 0.0
    unexplained = max(1.0 - xy * xy / (xx * yy), 1e-12)
    return xy / math.sqrt(xx * yy) * math.sqrt((n - 2) / unexplained)
