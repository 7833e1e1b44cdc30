"""The report of ``sealegs scan``: what is in a corpus, as text or JSON with fixed keys."""

import textwrap
from collections.abc import Iterator
from typing import Literal, TypeAlias

import msgspec

from sealegs.report.commands.incident_data import IncidentData
from sealegs.report.commands.incident_data import page as incident_page

WIDTH = 110
Kind: TypeAlias = Literal[
    "empty",
    "duplicate",
    "near-duplicate",
    "shared",
    "repeats",
    "unbroken",
    "symbols",
    "not utf-8",
    "mojibake",
    "replaced",
    "control",
    "over-long",
    "crowded",
    "incident",
    "alike",
]
MEANING: dict[Kind, str] = {
    "empty": "no text",
    "duplicate": "the same text as an earlier document",
    "near-duplicate": "most of the text of another document, which is kept (MinHash)",
    "shared": "spans of 50 words or more that earlier documents have",
    "repeats": "a span of 1 to 13 tokens, 32 times on end or more",
    "unbroken": "1,000 characters or more without a space",
    "symbols": "less than a quarter letters and digits",
    "not utf-8": "bytes that are no UTF-8",
    "mojibake": "UTF-8 that was read as Latin-1 or Windows-1252",
    "replaced": "replacement characters (U+FFFD): text that is lost",
    "control": "control characters",
    "over-long": "more tokens than --longest",
    "crowded": "most occurrences of a rare token in one document: no order of rows parts them",
    "incident": "in a batch of the incident, whose rows are unusual",
    "alike": "as unusual as the rows of the incident",
}


class SourceShown(msgspec.Struct, frozen=True, kw_only=True):
    """Documents of one origin. ``median`` is to within a factor of two."""

    name: str
    documents: int
    bytes: int
    tokens: int
    median: int
    longest: int
    found: dict[str, int]
    """Number of findings by kind."""


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """A document, and what is wrong with it."""

    file: str
    document: int
    """Its number in the file, from 0; in JSON lines, the line."""
    what: str
    excerpt: str


class KindShown(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of finding."""

    kind: Kind
    meaning: str
    documents: int
    examples: list[Example]


class TokenShown(msgspec.Struct, frozen=True, kw_only=True):
    """One token, or character."""

    id: int
    text: str
    count: int
    where: list[str]
    """Some of the documents that hold it; for rare tokens only."""


class BatchShown(msgspec.Struct, frozen=True, kw_only=True):
    """A batch that holds many rare tokens."""

    batch: int
    rare: int
    """Occurrences of rare tokens in it."""
    met: int
    """Rare tokens that occur in two or more of its rows."""
    tokens: list[str]
    documents: list[str]


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """What lies ahead in this order of the data."""

    order: str
    batches: int
    rows: int
    """Rows per batch."""
    usual: float
    """Rare tokens per batch, on average."""
    crowded: int
    """Batches with more of them than chance gives in one of a hundred such runs."""
    meeting: int
    """Batches with a rare token in two or more rows."""
    worst: list[BatchShown]


class Scanned(msgspec.Struct, frozen=True, kw_only=True):
    """A corpus: ``sealegs scan --json``."""

    corpus: list[str]
    unit: Literal["tokens", "characters"]
    """The counted unit: tokens, or characters where text comes without a tokenizer."""
    length_unit: Literal["tokens", "words"]
    """The unit of document lengths."""
    documents: int
    bytes: int
    counted: int
    distinct: int
    sources: list[SourceShown]
    frequent: list[TokenShown]
    rare: int
    """How many different units are rare: fewer than ten in all."""
    rare_occurrences: int
    rare_examples: list[TokenShown]
    findings: list[KindShown]
    to_drop: int
    to_defer: int
    problems: int
    """Files and lines that could not be read, and were passed over."""
    problem_examples: list[str]
    forecast: Forecast | None
    incident: IncidentData | None = None
    """With ``--incident``: the documents behind it."""
    list: str | None
    """The file with the documents to drop and to defer."""


def page(scanned: Scanned) -> str:
    """The report as text."""
    of_incident = iter(()) if scanned.incident is None else _wrapped(incident_page(scanned.incident))
    parts = [
        of_incident,
        _sizes(scanned),
        _findings(scanned),
        _tokens(scanned),
        _ahead(scanned.forecast),
        _unread(scanned),
    ]
    return "\n\n".join("\n".join(lines) for lines in (list(part) for part in parts) if lines)


def _wrapped(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()))
        yield textwrap.fill(line, WIDTH, initial_indent="", subsequent_indent=indent + "  ", break_on_hyphens=False)


def _sizes(scanned: Scanned) -> Iterator[str]:
    yield f"{scanned.documents:,} documents, {scanned.bytes / 1e6:,.1f} MB, {scanned.counted:,} {scanned.unit}"
    unit = scanned.length_unit
    yield f"{'':2}{'documents':>12} {'MB':>10} {unit:>14} {'median':>9} {'longest':>11} {'findings':>9}  source"
    for each in scanned.sources:
        found = sum(each.found.values()) or ""
        yield (
            f"{'':2}{each.documents:>12,} {each.bytes / 1e6:>10,.1f} {each.tokens:>14,} {f'~{each.median:,}':>9} "
            f"{each.longest:>11,} {found:>9}  {each.name}"
        )


def _findings(scanned: Scanned) -> Iterator[str]:
    if not scanned.findings:
        yield "Nothing wrong was found in any document."
        return
    yield f"Documents to drop: {scanned.to_drop:,}, to defer: {scanned.to_defer:,}"
    for each in scanned.findings:
        yield f"  {each.kind}, {each.documents:,}: {each.meaning}"
        for example in each.examples:
            yield f"    {example.file}#{example.document}: {example.what}"
            if example.excerpt:
                yield f"      | {example.excerpt}"
    if scanned.list:
        yield f"The list is in {scanned.list}: sealegs train --data.leave-out {scanned.list}"


def _tokens(scanned: Scanned) -> Iterator[str]:
    unit = scanned.unit
    often = "  ".join(f"{each.text} {each.count / max(scanned.counted, 1):.1%}" for each in scanned.frequent)
    yield textwrap.fill(f"{scanned.distinct:,} different {unit}; the most frequent: {often}", WIDTH)
    if not scanned.rare:
        yield "None of them is rare (fewer than 10 times)."
        return
    yield f"{scanned.rare:,} of them are rare (fewer than 10 times), {scanned.rare_occurrences:,} occurrences in all"
    for each in scanned.rare_examples:
        yield f"  {each.text}  {each.count} time{'s' * (each.count != 1)}: {', '.join(each.where)}"
    if unit == "characters":
        text = (
            "Without a tokenizer, characters are counted. The model's own tokens: --tokenizer FILE, or scan token ids."
        )
        yield textwrap.fill(text, WIDTH)


def _ahead(forecast: Forecast | None) -> Iterator[str]:
    if forecast is None:
        return
    yield (
        f"Forecast, {forecast.order}: {forecast.batches:,} batches of {forecast.rows} rows, "
        f"{forecast.usual:.3g} rare tokens in each on average"
    )
    yield (
        f"  {forecast.meeting:,} have a rare token in two rows or more; "
        f"{forecast.crowded:,} have more rare tokens than chance gives"
    )
    for each in forecast.worst:
        yield f"  batch {each.batch}: {each.rare} rare, {each.met} in several rows: {', '.join(each.tokens)}"
        yield f"    from {', '.join(each.documents)}"
    if forecast.meeting:
        yield "  `sealegs batches` spreads them; in the lab, --data.stratified."


def _unread(scanned: Scanned) -> Iterator[str]:
    if scanned.problems:
        yield f"{scanned.problems:,} could not be read, and were passed over:"
        yield from (f"  {each}" for each in scanned.problem_examples)
        if scanned.problems > len(scanned.problem_examples):
            yield f"  and {scanned.problems - len(scanned.problem_examples):,} more"
