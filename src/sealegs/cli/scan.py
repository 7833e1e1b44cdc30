"""``sealegs scan``: shows what is in a corpus, and lists documents that a trainer should leave out."""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import tyro

from sealegs.batching.exclusions import write_list
from sealegs.batching.stratified import Ints, RareRows
from sealegs.cli.output import show, show_json, tell, text_of
from sealegs.cli.scan_tasks import NOT_DONE, TaskOptions, counted_by_tasks, refuse, show_status
from sealegs.errors import ConfigError, SourceError
from sealegs.record.files import folder_aside, is_taken, whole_file, writing
from sealegs.record.schema import INCIDENT_DATA
from sealegs.report.commands.contracts import contract
from sealegs.report.commands.incident_data import Measure
from sealegs.report.commands.scan import BatchShown, Forecast, Scanned, page
from sealegs.scan.blocks import ROW, Part, Ways
from sealegs.scan.forecast import Ahead, ahead, pieces
from sealegs.scan.id_reader import open_ids, row_width
from sealegs.scan.incident import IncidentSearch, Suspects, TrainedRow
from sealegs.scan.plan import in_order, of_files, of_ids, planned
from sealegs.scan.scan import over_parts, scan
from sealegs.scan.search import Seen, merged, search_part
from sealegs.scan.summary import CorpusSummary

DESCRIPTION = """\
Look through a corpus before it is trained on: token frequencies and rare tokens, repeated spans, text that is broken,
empty, over-long or there twice, by source; with examples. In DIR: the page, the numbers, how often each token occurs,
and the list of documents to drop or to read last, which `sealegs train --data.leave-out` takes.

CORPUS is files or folders: .txt (blank lines part documents), .jsonl, .parquet, .arrow and datasets saved to disk,
token ids as .npy or .bin; any other file is text, one document. Also `stdlib`, and a settings file of `sealegs train`
(.toml): its tokens, and what lies ahead in the batches of that run.

Text is counted in characters, its documents in words; with --tokenizer both in tokens, twenty times slower.

A corpus that does not fit one machine: --on slurm or ray, with --tasks and --work; CORPUS may be an address (s3://).

exit code: 0 nothing to drop or to defer; 1 something; 2 it cannot be read; 3 the tasks are not done yet.

examples:
  sealegs scan corpus/                                  every file of a folder
  sealegs scan corpus.jsonl -o scanned --field content  the text is in another field
  sealegs scan tokens.bin --dtype uint32 --end 50256    token ids; documents end with a token
  sealegs scan tokens.npy --row 1024 --batch 32         and which batches will have many rare tokens
  sealegs scan mine.toml                                the same for a run of the lab, in its own order
  sealegs scan tokens.npy --incident night#2 -o aside   which documents were behind an incident
  sealegs scan s3://b/c --on slurm --tasks 200 --partition cpu --work /lustre/scan    in many tasks, on a cluster
"""
SUSPECT_STEPS = 8
"""Steps whose batches are looked at, at most: from the one before the onset to the peak."""
NO_TOKENS = "--incident {}: its batches are token ids, and this corpus is text; give the run's --tokenizer"
PAGE, NUMBERS, LIST, COUNTS = "scan.txt", "scan.json", "documents.jsonl", "token_counts.npy"
_EVERY_S = 2.0
_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(TaskOptions):
    """What the command line can say."""

    corpus: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="CORPUS [CORPUS ...]")] = ()
    """Files, folders, `stdlib` or a settings file."""
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"], metavar="DIR")] = None
    """A new folder for the page, the numbers and the list."""
    field: str = "text"
    """Of JSON lines and tables: what holds the text, or the token ids."""
    source: str | None = None
    """Of those: what names the source of a document; else files and folders do."""
    tokenizer: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """A tokenizer.json: counts its tokens in text, and puts token ids into words."""
    dtype: str = "uint16"
    """Of the token ids in a .bin file."""
    end: Annotated[int | None, tyro.conf.arg(metavar="ID")] = None
    """The token that ends each document; else NAME.starts.npy beside the ids says where they are."""
    row: Annotated[int | None, tyro.conf.arg(metavar="TOKENS")] = None
    """Tokens of a row, of batches and where nothing says where documents are; 1024 if the file is no table."""
    longest: Annotated[int, tyro.conf.arg(metavar="TOKENS")] = 32_768
    """Documents with more are over-long; words count where there is no tokenizer."""
    batch: Annotated[int | None, tyro.conf.arg(metavar="ROWS")] = None
    """Rows of a batch: says which batches will hold many rare tokens. For one file of token ids."""
    order: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """The rows in the order of training, as .npy; else they are read as they lie."""
    incident: Annotated[str | None, tyro.conf.arg(metavar="RUN[#N]")] = None
    """Of a run on this corpus: which documents were in its batches, how unusual they are, and what is like them."""
    jobs: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """Processes; 0: one for each core."""
    json: bool = False
    """Print one JSON object, and nothing else."""


def main(arguments: Sequence[str]) -> int:
    """Scan the corpus, and print the report."""
    options = tyro.cli(Options, args=list(arguments), prog="sealegs scan", description=DESCRIPTION)
    _refuse(options)
    if options.status:
        return show_status(str(options.work))
    is_run = options.corpus[0].endswith(".toml")
    parts, ways, look_ahead = (_of_run if is_run else _of_files)(options)
    batches = None if options.incident is None else _batches_of(options.incident, parts, ways)
    jobs = options.jobs or len(os.sched_getaffinity(0))
    if options.on is not None:
        by_tasks = counted_by_tasks(options, options.corpus, parts, ways, jobs)
        if by_tasks is None:
            return 0 if options.dry_run else NOT_DONE
        settled = CorpusSummary(
            by_tasks.counts, parts, ways, tables=by_tasks.work.tables, near=by_tasks.near, shared=by_tasks.shared
        )
    else:
        counts = scan(parts, ways, jobs=jobs, tell=_progress(parts))
        settled = CorpusSummary(counts, parts, ways)
    found = None
    if batches is not None:
        search = _searched(batches, settled, parts, ways, jobs)
        found = search.data()
        with writing(batches.folder / INCIDENT_DATA), whole_file(batches.folder / INCIDENT_DATA) as file:
            file.write(json.dumps(contract(found), indent=1).encode() + b"\n")
        settled = CorpusSummary(counts, parts, ways, also=list(search.findings()))
    scanned = msgspec.structs.replace(settled.scanned(options.corpus), forecast=look_ahead(settled), incident=found)
    if options.output is not None:
        scanned = msgspec.structs.replace(scanned, list=str(options.output / LIST))
        _write(options.output, settled, scanned)
    show_json(contract(scanned)) if options.json else show(page, scanned)
    return 1 if scanned.to_drop or scanned.to_defer else 0


def _refuse(options: Options) -> None:
    for name, least in (("row", 1), ("longest", 1), ("jobs", 0), ("batch", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise ConfigError(f"--{name} {value}: at least {least}")
    refuse(options, has_incident=options.incident is not None)
    if options.status:
        return
    if not options.corpus:
        raise ConfigError("which corpus? give files or folders")
    if len(options.corpus) > 1 and any(name.endswith(".toml") for name in options.corpus):
        raise ConfigError(f"{' '.join(options.corpus)}: a settings file is scanned by itself")
    if options.order is not None and options.batch is None:
        raise ConfigError("--order: give --batch, too: the rows of a batch")
    if options.output is not None and options.output.exists():
        raise ConfigError(f"--output {options.output}: is there already; name a new folder")


class _Batches(NamedTuple):
    """What was trained on about the onset of an incident."""

    folder: Path
    """Of the incident."""
    name: str
    rows: list[TrainedRow]
    before: list[TrainedRow]


def _batches_of(words: str, parts: Sequence[Part], ways: Ways) -> _Batches:
    """The rows of the batches about an onset, from the step before it: what it did shows one step later."""
    if ways.tokenizer is None and parts and all(part.format in ("paragraphs", "whole") for part in parts):
        raise ConfigError(NO_TOKENS.format(words))
    from sealegs.capsule.read import open_capsule
    from sealegs.cli.replay import incident_of
    from sealegs.faults.text import text_of as text_of_batch

    folder = incident_of(words)
    capsule = open_capsule(folder)
    first = capsule.incident.start - 1
    end = min(max(capsule.incident.peak, first + 1) + 1, first + SUSPECT_STEPS)
    rows: list[TrainedRow] = []
    before: list[TrainedRow] = []
    for each in capsule.batches:
        if each.batch is None or each.step >= end:
            continue
        try:
            tokens = text_of_batch(each.batch).tokens
        except ConfigError as error:
            raise SourceError(f"--incident {words}: {error}") from error
        place = before if each.step < first else rows
        table = tokens.reshape(-1, tokens.shape[-1])
        place.extend(TrainedRow(each.step, each.number, number, row) for number, row in enumerate(table))
    if not any(len(row.text) for row in rows):
        raise SourceError(f"--incident {words}: its capsule has no batch of the onset; sealegs replay says what it has")
    return _Batches(folder, words, rows, before)


def _searched(
    batches: _Batches, settled: CorpusSummary, parts: Sequence[Part], ways: Ways, jobs: int
) -> IncidentSearch:
    """Search the corpus for the rows, now that it is counted."""
    if settled.unit != "tokens":
        raise ConfigError(NO_TOKENS.format(batches.name))
    suspects = Suspects(batches.name, batches.rows, batches.before, settled.counts)

    def seen(limits: Mapping[Measure, float] | None = None) -> Seen:
        work = partial(search_part, ways=ways, wanted=suspects.wanted(limits))
        return merged(over_parts(parts, work, jobs=jobs, tell=_progress(parts)))

    search = IncidentSearch(suspects, seen(), settled)
    if search.limits:
        search.found_alike(seen(search.limits))
    return search


Planned = tuple[list[Part], Ways, Callable[[CorpusSummary], Forecast | None]]


def _of_files(options: Options) -> Planned:
    ways = Ways(
        field=options.field,
        source=options.source,
        tokenizer=options.tokenizer,
        dtype=options.dtype,
        end=options.end,
        row=options.row or ROW,
        longest=options.longest,
    )
    if list(options.corpus) == ["stdlib"]:
        from sealegs.lab.corpus import stdlib_documents, stdlib_folder

        parts = of_files("stdlib", [str(stdlib_folder() / name) for name, _ in stdlib_documents()])
    else:
        parts = planned(options.corpus, ways)
    parts = in_order(parts)
    if options.batch is None:
        return parts, ways, lambda settled: None
    if len({part.file for part in parts}) > 1 or parts[0].format != "ids":
        raise ConfigError(f"--batch {options.batch}: a forecast is for one file of token ids; scan that alone")
    path = Path(parts[0].path or parts[0].file)
    row = row_width(path, open_ids(path, options.dtype)[1], options.row)  # refused now, not after the scan
    return parts, ways, lambda settled: _forecast_of_rows(settled, parts, options, row)


def _of_run(options: Options) -> Planned:
    """The tokens of a lab run, under its names of the sources."""
    from sealegs.lab.config import starting_point
    from sealegs.lab.sources import open_sources

    settings = starting_point(config=Path(options.corpus[0]))
    open_sources(settings, tell)  # new ones lie elsewhere at first
    sources, tokenizer = open_sources(settings, lambda _: None)
    beside = [Path(source.tokens.filename) for source in sources]  # type: ignore[attr-defined]
    made_by = str(beside[0].with_name("tokenizer.json")) if tokenizer is not None else settings.data.tokenizer
    ways = Ways(tokenizer=options.tokenizer or made_by, row=settings.model.context, longest=options.longest)
    parts = in_order(
        part for source, path in zip(sources, beside, strict=True) for part in of_ids(source.name, path, ways)
    )
    return parts, ways, lambda settled: _forecast_of_run(settled, parts, settings)


def _progress(parts: Sequence[Part]) -> Callable[[int], None]:
    """A line on stderr now and then."""
    total, began = sum(part.size for part in parts), time.monotonic()
    done, told = 0, began

    def count(size: int) -> None:
        nonlocal done, told
        done += size
        now = time.monotonic()
        if now - told >= _EVERY_S:
            told = now
            tell(
                f"{done / max(total, 1):4.0%}  {done / 1e6:,.0f} of {total / 1e6:,.0f} MB  "
                f"{done / 1e6 / (now - began):.0f} MB/s"
            )

    return count


# The forecast


def _forecast_of_rows(settled: CorpusSummary, parts: Sequence[Part], options: Options, row: int) -> Forecast:
    assert options.batch is not None
    rows = -(-parts[-1].end // row)
    rare = _rare_of(settled, parts)[parts[0].file]
    order = range(rows) if options.order is None else _order(options.order, rows)
    found = RareRows(rows, rare[0] // row, rare[1])
    told = "in the order of the file" if options.order is None else f"in the order of {options.order}"
    return _shown(ahead(order, found, options.batch), told, options.batch, settled, lambda number: f"row {number}")


def _order(path: Path, rows: int) -> Ints:
    try:
        order = np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError) as error:
        raise SourceError(f"--order {path}: cannot be read ({error}); give row numbers as .npy") from error
    refused = SourceError(f"--order {path}: not numbers of rows, from 0 to {rows - 1}; is --row right?")
    if order.dtype.kind not in "iu" or order.ndim == 0 or np.isfortran(order):
        raise refused
    if order.ndim > 1:  # a line a batch, as `sealegs batches` writes it: end to end in the file
        order = np.memmap(path, order.dtype, "r", order.offset, (order.size,))
    for _, piece in pieces(order):
        if not -1 <= int(piece.min()) <= int(piece.max()) < rows:  # -1: the last batch has no more
            raise refused
    return order


def _forecast_of_run(settled: CorpusSummary, parts: Sequence[Part], settings: Any) -> Forecast:
    from sealegs.lab.sources import open_data

    stream = open_data(settings).training
    rare = _rare_of(settled, parts)
    batch = settings.data.batch
    rows: list[int] = []
    tokens: list[int] = []
    spans = [span for number in range(settings.steps) for span in stream.batch(number).spans]
    for name, (places, ids) in rare.items():
        here = [(row, span) for row, span in enumerate(spans) if span.source.name == name]
        first = np.searchsorted(places, [span.start for _, span in here])
        end = np.searchsorted(places, [span.end for _, span in here])
        for at in np.flatnonzero(end > first):
            tokens += ids[first[at] : end[at]].tolist()
            rows += [here[at][0]] * int(end[at] - first[at])
    found = RareRows(len(spans), np.array(rows, np.int64), np.array(tokens, np.int64))

    def document(row: int) -> str:
        return f"{spans[row].source.name}#{spans[row].documents.start}"

    told = f"the first {settings.steps} steps of the run"
    return _shown(ahead(range(len(spans)), found, batch), told, batch, settled, document)


def _rare_of(settled: CorpusSummary, parts: Sequence[Part]) -> dict[str, tuple[Ints, Ints]]:
    """The places of rare tokens in each file, sorted, and the tokens."""
    held = settled.counts.places
    first = np.array([part.start for part in parts], np.int64)
    places = first[held.documents >> 32] + held.offsets
    found = {}
    for file in dict.fromkeys(part.file for part in parts):
        of = np.array([part.file == file for part in parts])[held.documents >> 32]
        by_place = np.argsort(places[of], kind="stable")
        found[file] = (places[of][by_place], held.tokens[of][by_place])
    return found


def _shown(found: Ahead, order: str, rows: int, settled: CorpusSummary, name: Callable[[int], str]) -> Forecast:
    return Forecast(
        order=order,
        batches=found.batches,
        rows=rows,
        usual=found.usual,
        crowded=found.crowded,
        meeting=found.meeting,
        worst=[
            BatchShown(
                batch=each.batch,
                rare=len(each.tokens),
                met=each.met,
                tokens=[settled.text_of_token(token) for token in dict.fromkeys(each.tokens.tolist())][:_NAMED],
                documents=[name(row) for row in dict.fromkeys(each.rows.tolist())][:_NAMED],
            )
            for each in found.worst
        ],
    )


def _write(folder: Path, settled: CorpusSummary, scanned: Scanned) -> None:
    """Write all files, or none."""
    with writing(folder):
        try:
            with folder_aside(folder) as aside:
                (aside / PAGE).write_text(text_of(page, scanned) + "\n", "utf-8")
                (aside / NUMBERS).write_text(json.dumps(contract(scanned), indent=1) + "\n", "utf-8")
                with (aside / LIST).open("wb") as file:
                    write_list(file, settled.sizes(), settled.listed())
                np.save(aside / COUNTS, settled.counts.tokens)
        except OSError as error:
            if is_taken(error):
                raise ConfigError(f"--output {folder}: is there already; name a new folder") from error
            raise
