"""Ties the batches of an incident to a corpus: the documents they come from, and how unusual they are for it."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sealegs.batching.stratified import Ints
from sealegs.report.commands.incident_data import (
    IncidentData,
    Measure,
    Measured,
    RowShown,
    SourceShare,
    TokenShare,
)
from sealegs.scan.counts import Counts, DocumentFinding, part_and_document, source_key
from sealegs.scan.origin import RUN, documents_of, runs
from sealegs.scan.search import Seen, Wanted
from sealegs.scan.summary import CorpusSummary
from sealegs.scan.unusual import MEASURES, Floats, Frequencies, is_beyond, percentile, tail

WORST = 5
"""Rows that are shown."""
EXAMPLES = 3
"""Documents that are named in a line."""
TOKENS = 6
"""Tokens that are shown."""
CHANCE = 1e-3
"""How often rows that are drawn at random are called unusual, by each measure."""
STANDS_OUT, LEAST_TIMES = 20.0, 4
"""How many times more often than in the corpus a token has to be in the rows, and how often at all."""


@dataclass(frozen=True, slots=True)
class TrainedRow:
    """A row of a batch that was trained on."""

    step: int
    batch: int | None
    """Its number in the data."""
    row: int
    tokens: Ints

    @property
    def text(self) -> Ints:
        """Its tokens without the padding, which is one token on end at the beginning or the end."""
        changes = np.flatnonzero(np.diff(self.tokens))
        if not len(changes):
            return self.tokens
        first = changes[0] if changes[0] > 0 else 0
        end = len(self.tokens) if changes[-1] == len(self.tokens) - 2 else changes[-1] + 2
        return self.tokens[first:end]


class Suspects:
    """The rows of an incident and those before it, and what to look for in a corpus because of them.

    A corpus is searched twice: for the windows of the rows' length and the documents of the rows; then, where the rows
    are unusual, for what is like them.
    """

    def __init__(self, incident: str, rows: Sequence[TrainedRow], before: Sequence[TrainedRow], counts: Counts) -> None:
        self.incident = incident
        self.rows = rows
        self.texts = [each.text for each in rows]
        self.length = max(int(np.median([len(text) for text in self.texts])), RUN)
        """Tokens of a window."""
        highest = max(int(text.max(initial=0)) for text in self.texts)
        self.frequencies = Frequencies.of(counts.tokens, highest + 1)
        self.values = self._measured(self.texts)
        self.values_before = self._measured([each.text for each in before])
        self.runs = np.unique(np.concatenate([runs(text) for text in self.texts]))

    def wanted(self, limits: Mapping[Measure, float] | None = None) -> Wanted:
        """What to look for: the rows, or windows beyond some limits."""
        searched = self.runs if limits is None else self.runs[:0]
        return Wanted(searched, self.length, self.frequencies, {} if limits is None else limits)

    def _measured(self, texts: Sequence[Ints]) -> dict[Measure, Floats]:
        """Each measure of each row, of as many tokens as a window has."""
        each = [self.frequencies.measured(text[None, : self.length]) for text in texts]
        return {measure: np.array([float(one[measure][0]) for one in each]) for measure in MEASURES}


@dataclass(frozen=True, slots=True)
class Extreme:
    """Where the rows of an incident are furthest from what chance gives, by one measure."""

    value: float
    rows: int
    expected: float
    before: int
    is_unusual: bool

    @classmethod
    def of(cls, measure: Measure, windows: Ints, suspects: Suspects) -> "Extreme":
        """Of all limits that a row sets, the one that chance explains least; that so many are tried is allowed for."""
        values = suspects.values[measure]
        before = suspects.values_before[measure]
        found = []
        for value in np.unique(values).tolist():
            rows = int(is_beyond(measure, values, value).sum())
            expected = len(values) * tail(measure, windows, value) / 100
            found.append((at_least(rows, expected), value, rows, expected))
        chance, value, rows, expected = min(found)
        had = int(is_beyond(measure, before, value).sum())
        is_as_before = had * len(values) * 2 > rows * len(before)
        return cls(value, rows, expected, had, chance * len(found) < CHANCE and not is_as_before)


def at_least(count: int, expected: float) -> float:
    """How likely chance gives so many or more (Poisson).

    >>> round(at_least(1, 0.01), 5), round(at_least(3, 3.0), 2), at_least(2, 0.0)
    (0.00995, 0.58, 0.0)
    """
    if count == 0 or expected >= count + 20 * math.sqrt(count + 1):
        return 1.0
    if not expected:
        return 0.0
    term = math.exp(count * math.log(expected) - expected - math.lgamma(count + 1))
    total, place = 0.0, count
    while term > total * 1e-12:
        total += term
        place += 1
        term *= expected / place
    return min(total, 1.0)


class IncidentSearch:
    """What a corpus has of an incident."""

    def __init__(self, suspects: Suspects, seen: Seen, summary: CorpusSummary) -> None:
        self._suspects = suspects
        self._seen = seen
        self._summary = summary
        self._alike: Mapping[Measure, Ints] = {}
        places = [np.searchsorted(suspects.runs, runs(text)).tolist() for text in suspects.texts]
        self._documents = [documents_of(row, seen.holders) for row in places]
        self._extremes = {measure: Extreme.of(measure, seen.windows[measure], suspects) for measure in seen.windows}

    @property
    def limits(self) -> dict[Measure, float]:
        """Where the rows are unusual: from where on other windows are as well."""
        return {measure: each.value for measure, each in self._extremes.items() if each.is_unusual}

    def found_alike(self, seen: Seen) -> None:
        """Take in the windows beyond the limits."""
        self._alike = seen.alike

    def data(self) -> IncidentData:
        """The report."""
        steps = [each.step for each in self._suspects.rows]
        return IncidentData(
            incident=self._suspects.incident,
            steps=[min(steps), max(steps)],
            rows=len(steps),
            rows_before=len(self._suspects.values_before["rare"]),
            found=sum(bool(each) for each in self._documents),
            measures=[self._measured(measure, each) for measure, each in self._extremes.items()],
            sources=list(self._sources()),
            tokens=list(self._tokens()),
            worst=self._worst(),
            listed=len({(each.part, each.document) for each in self.findings()}),
            conclusion=self._conclusion(),
        )

    def findings(self) -> Iterator[DocumentFinding]:
        """Documents to leave out: those of the rows that are unusual, and then what is like them."""
        named = set()
        for place, (row, documents) in enumerate(zip(self._suspects.rows, self._documents, strict=True)):
            beyond = [
                measure
                for measure, limit in self.limits.items()
                if is_beyond(measure, self._suspects.values[measure][place : place + 1], limit)[0]
            ]
            for key in documents if beyond else ():
                if key not in named:
                    named.add(key)
                    text = f"{self._suspects.incident}, in the batch of step {row.step}"
                    yield DocumentFinding(*part_and_document(key), "incident", "drop", text, "")
        for measure, keys in self._alike.items():
            for key in dict.fromkeys(keys.tolist()):
                if key not in named:
                    named.add(key)
                    text = (
                        f"{measure} as in the rows of {self._suspects.incident}, {self.limits[measure]:.3g} or beyond"
                    )
                    yield DocumentFinding(*part_and_document(key), "alike", "defer", text, "")

    def _measured(self, measure: Measure, extreme: Extreme) -> Measured:
        alike = self._alike.get(measure, np.empty(0, np.int64))
        documents = np.unique(alike)
        return Measured(
            measure=measure,
            value=extreme.value,
            rows=extreme.rows,
            expected=extreme.expected,
            before=extreme.before,
            is_unusual=extreme.is_unusual,
            alike=len(alike),
            documents=len(documents),
            examples=self._summary.names(documents[:EXAMPLES]),
        )

    def _sources(self) -> Iterator[SourceShare]:
        counts = self._summary.counts
        names = {source_key(name): name for name in counts.sources}
        order = np.argsort(counts.documents)
        firsts = np.array([documents[0] for documents in self._documents if documents], np.int64)
        at = order[np.searchsorted(counts.documents, firsts, sorter=order)] if len(firsts) else firsts
        held = Counter(names[key] for key in counts.origins[at].tolist())
        tokens = sum(each.tokens for each in counts.sources.values())
        for name, rows in held.most_common(EXAMPLES):
            yield SourceShare(
                name=name, rows=rows / len(self._documents), corpus=counts.sources[name].tokens / max(tokens, 1)
            )

    def _tokens(self) -> Iterator[TokenShare]:
        ids = np.concatenate(self._suspects.texts)
        expected = len(ids) * np.exp(-self._suspects.frequencies.surprise.astype(np.float64))
        times = np.bincount(ids, minlength=len(expected))
        ratio = np.where(times >= LEAST_TIMES, times / expected, 0.0)
        for token in np.argsort(-ratio, kind="stable")[:TOKENS].tolist():
            if ratio[token] >= STANDS_OUT:
                text = self._summary.text_of_token(token)
                yield TokenShare(id=token, text=text, count=int(times[token]), expected=float(expected[token]))

    def _worst(self) -> list[RowShown]:
        """The rows that the fewest windows come up to in one measure."""
        windows, shown = self._seen.windows, []
        for place, (row, documents) in enumerate(zip(self._suspects.rows, self._documents, strict=True)):
            values = {measure: float(self._suspects.values[measure][place]) for measure in windows}
            tails = [tail(measure, windows[measure], value) for measure, value in values.items()]
            told = RowShown(
                step=row.step,
                batch=row.batch,
                row=row.row,
                percentiles={
                    measure: percentile(measure, windows[measure], value) for measure, value in values.items()
                },
                documents=self._summary.names(np.array(documents[:EXAMPLES], np.int64)),
            )
            shown.append((min(tails, default=0.0), place, told))
        return [told for *_, told in sorted(shown, key=lambda each: each[:2])[:WORST]]

    def _conclusion(self) -> str:
        rows, found = len(self._documents), sum(bool(each) for each in self._documents)
        where = (
            "all of them are in this corpus"
            if found == rows
            else f"{found} of them are in this corpus"
            if found
            else "none of them is in this corpus: another corpus, another tokenizer, or altered on the way to the model"
        )
        if not self.limits:
            return f"{where}; nothing about their tokens is unusual for it"
        return f"{where}; unusual for it by {' and '.join(self.limits)}"
