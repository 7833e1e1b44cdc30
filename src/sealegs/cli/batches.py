"""``sealegs batches``: orders rows of token ids so that no batch has a rare token twice."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from sealegs.batching.batch_sampler import StratifiedBatchSampler
from sealegs.batching.stratified import Ints, RareRows, meetings, rare_tokens
from sealegs.batching.tokens import rows_of, token_counts
from sealegs.cli.output import show, show_json, tell
from sealegs.errors import ConfigError, SourceError
from sealegs.record.files import whole_file, writing
from sealegs.report.commands.batches import Batched, UnmetShown, page
from sealegs.report.commands.contracts import contract
from sealegs.scan.id_reader import document_starts, open_ids, row_width

DESCRIPTION = """\
Order the rows of tokenised data so that no batch has a rare token (fewer than 10 times in the data) in two of its rows,
as near as the data allows, and say what could not be parted. All else is as a shuffle leaves it.

TOKENS is a .npy of token ids, one after the other or with a line to a row, or a .bin. FILE gets the numbers of the
rows as .npy, a line to a batch, -1 where the last one has none. A DataLoader needs no file: give it
`batch_sampler=sealegs.StratifiedBatchSampler(sealegs.rare_rows(tokens), 32)`.

examples:
  sealegs batches tokens.npy --row 1024 --batch 32              how much there is to part
  sealegs batches tokens.npy --row 1024 --batch 32 -o order.npy and the order
  sealegs batches tokens.bin --dtype uint32 --documents         a document to a row, by tokens.starts.npy
"""
_WORST = 10
_NONE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line can say."""

    tokens: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="TOKENS")]
    """Token ids."""
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"], metavar="FILE")] = None
    """Where the order goes, as .npy."""
    row: Annotated[int | None, tyro.conf.arg(metavar="TOKENS")] = None
    """Tokens of a row; 1024 if the file is no table."""
    documents: bool = False
    """A row is a document, by NAME.starts.npy beside the tokens."""
    batch: Annotated[int, tyro.conf.arg(metavar="ROWS")] = 32
    """Rows of an optimizer step: of all ranks and all accumulated micro-batches."""
    seed: int = 0
    """Chooses the order."""
    epoch: int = 0
    """Each has another order."""
    dtype: str = "uint16"
    """Of the token ids in a .bin file."""
    json: bool = False
    """Print one JSON object, and nothing else."""


def main(arguments: Sequence[str]) -> int:
    """Order the rows, and print the report."""
    options = tyro.cli(Options, args=list(arguments), prog="sealegs batches", description=DESCRIPTION)
    if options.row is not None and options.row < 1:
        raise ConfigError(f"--row {options.row}: at least 1")
    if options.output is not None and options.output.suffix != ".npy":
        raise ConfigError(f"--output {options.output}: the order is a numpy array; name it something.npy")
    began = time.monotonic()

    def say(text: str) -> None:
        tell(f"{time.monotonic() - began:4.0f} s  {text}")

    tokens, width = open_ids(options.tokens, options.dtype)
    starts = _starts(options, len(tokens), width)
    say(f"counting {len(tokens):,} tokens")
    counts = token_counts(tokens)
    rare = rows_of(tokens, starts, counts)
    say(f"ordering {len(starts):,} rows")
    sampler = StratifiedBatchSampler(rare, options.batch, seed=options.seed)
    sampler.set_epoch(options.epoch)
    order = sampler.order()
    if options.output is not None:
        say(f"writing {options.output}")
        _write(options.output, order, options.batch)
    told = _told(options, rare, counts, sampler)
    show_json(contract(told)) if options.json else show(page, told)
    return 0


def _starts(options: Options, count: int, width: int | None) -> Ints:
    if options.documents:
        if (starts := document_starts(options.tokens)) is None:
            beside = options.tokens.with_suffix(".starts.npy")
            raise SourceError(f"--documents: {beside} is not there; save the starts of the documents in it")
        return np.asarray(starts, np.int64)
    return np.arange(0, count, row_width(options.tokens, width, options.row))


def _write(path: Path, order: Ints, batch: int) -> None:
    lines = -(-len(order) // batch)
    table = np.append(order, np.full(lines * batch - len(order), _NONE)).reshape(lines, batch)
    with writing(path), whole_file(path) as file:
        np.save(file, table)


def _told(options: Options, rare: RareRows, counts: Ints, sampler: StratifiedBatchSampler) -> Batched:
    unmet = sampler.unmet()
    worst = np.lexsort((unmet.batches, -unmet.rows))[:_WORST]
    return Batched(
        tokens=str(options.tokens),
        rows=rare.count,
        batches=len(sampler),
        batch=options.batch,
        seed=options.seed,
        epoch=options.epoch,
        rare=int(np.count_nonzero(rare_tokens(counts))),
        rare_rows=len(np.unique(rare.rows)),
        shuffled=meetings(sampler.shuffled(), rare, options.batch).too_many,
        unmet=unmet.too_many,
        worst=[
            UnmetShown(token=int(unmet.tokens[at]), batch=int(unmet.batches[at]), rows=int(unmet.rows[at]))
            for at in worst.tolist()
        ],
        in_one_row=len(rare.rows) - len(rare.once().rows),
        order=None if options.output is None else str(options.output),
    )
