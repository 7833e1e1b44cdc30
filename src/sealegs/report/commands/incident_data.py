"""What ``sealegs scan --incident`` says: the documents behind an incident, and how unusual they are for the corpus."""

from collections.abc import Iterator
from typing import Literal, TypeAlias

import msgspec

Measure: TypeAlias = Literal["surprise", "rare", "entropy"]
MEANING: dict[Measure, str] = {
    "surprise": "nats a token, by the frequencies of the corpus",
    "rare": "share of tokens that occur fewer than ten times",
    "entropy": "entropy of its own tokens, in nats",
}


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One measure, at the value from which on the rows of the incident are furthest from what the corpus gives."""

    measure: Measure
    value: float
    rows: int
    """Rows that have as much, of entropy as little."""
    expected: float
    """As many windows of the corpus, drawn at random, would have so many."""
    before: int
    """The same of the rows before the incident that were kept."""
    is_unusual: bool
    """Chance gives so many once in a thousand corpora at most, and the rows before did not have them."""
    alike: int
    """Windows of the corpus that have as much, if the rows are unusual."""
    documents: int
    """Documents that hold them."""
    examples: list[str]


class RowShown(msgspec.Struct, frozen=True, kw_only=True):
    """One row of a batch of the incident."""

    step: int
    batch: int | None
    row: int
    percentiles: dict[Measure, float]
    documents: list[str]
    """The longest part first; empty where it is not in this corpus."""


class SourceShare(msgspec.Struct, frozen=True, kw_only=True):
    """Of the rows that were found, and of the corpus."""

    name: str
    rows: float
    corpus: float


class TokenShare(msgspec.Struct, frozen=True, kw_only=True):
    """A token that the rows have far more often than the corpus."""

    id: int
    text: str
    count: int
    expected: float
    """Of as many tokens of the corpus."""


class IncidentData(msgspec.Struct, frozen=True, kw_only=True):
    """The data of an incident: ``data.json`` in its folder."""

    incident: str
    steps: list[int]
    """The first and the last whose batches were looked at: from the step before the onset on."""
    rows: int
    rows_before: int
    """Rows of batches before the incident, to compare with."""
    found: int
    """Rows that are in the corpus, at least in part."""
    measures: list[Measured]
    sources: list[SourceShare]
    tokens: list[TokenShare]
    worst: list[RowShown]
    listed: int
    """Documents that were put on the list of what to leave out."""
    conclusion: str


def page(data: IncidentData) -> Iterator[str]:
    """The lines about an incident, the conclusion first."""
    yield f"{data.incident}, the {data.rows} rows of steps {data.steps[0]} to {data.steps[1]}: {data.conclusion}"
    for each in data.measures:
        how = "or less" if each.measure == "entropy" else "or more"
        before = f", and {each.before} of the {data.rows_before} rows before" if data.rows_before else ""
        yield (
            f"  {MEANING[each.measure]}: {each.value:.3g} {how} in {each.rows} rows; chance gives {each.expected:.2g}"
            f"{before}{'' if each.is_unusual else ': not unusual'}"
        )
        if each.is_unusual:
            at = f": {', '.join(each.examples)}" if each.examples else ""
            yield f"    as unusual in the corpus: {each.alike:,} windows in {each.documents:,} documents{at}"
    if data.tokens:
        yield "  tokens that stand out: " + ", ".join(
            f"{each.text} {each.count} times (of the corpus {each.expected:.2g})" for each in data.tokens
        )
    if data.sources:
        yield "  sources: " + ", ".join(
            f"{each.name} {each.rows:.0%} of the rows ({each.corpus:.0%} of the corpus)" for each in data.sources
        )
    for row in data.worst:
        where = f"batch {row.batch}" if row.batch is not None else f"step {row.step}"
        told = ", ".join(f"{measure} {_percent(value)}" for measure, value in row.percentiles.items())
        yield f"  {where}, row {row.row} ({told}): {', '.join(row.documents) or 'not in this corpus'}"


def _percent(percent: float) -> str:
    """A percentile, with as many digits as its distance from the ends needs.

    >>> _percent(50.123), _percent(99.96), _percent(0.012), _percent(100.0)
    ('50.1', '99.96', '0.012', '100')
    """
    if percent in (0.0, 100.0) or 1 < percent < 99:
        return f"{percent:.3g}"
    return f"{percent:.2g}" if percent < 1 else f"{percent:.4g}"
