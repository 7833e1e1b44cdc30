"""``sealegs audit``: shows what a checkpoint holds, and what a resume from it would lack."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from sealegs.cli.audit_comparison import compare
from sealegs.cli.output import show, show_json
from sealegs.errors import MissingExtra, SourceError
from sealegs.record.reading import is_number
from sealegs.record.schema import CHECKPOINTS, MANIFEST
from sealegs.report.commands.audit import Audited, Held, page
from sealegs.report.commands.contracts import contract

DESCRIPTION = """\
What a checkpoint holds of all that a run needs to go on: weights, parameter groups, learning rate, betas, moments,
step, schedule, loss scale, random state, place in the data, versions; and what a resume without the rest does. Files
are compared with their digests, numbers are looked at for NaN. Nothing in it is run.

CHECKPOINT is a folder in checkpoints/ of a run, or the run (its newest); a file of torch.save; or a checkpoint folder
of Hugging Face's Trainer. What came back at a resume, the guard writes into events.jsonl by itself (`resume-audit`).

exit code: 0 all there, 1 something is missing or wrong, 2 it cannot be read.

examples:
  sealegs audit night                                   the newest checkpoint of experiments/night
  sealegs audit experiments/night/checkpoints/200
  sealegs audit out/checkpoint-500                      Hugging Face
  sealegs audit ckpt.pt --json | jq '.holds[] | select(.problem)'
  sealegs audit before.pt after.pt                      which tensors differ, and by how much
  sealegs audit iter_100/mp_rank_00/model.pt iter_100/mp_rank_01/model.pt
                                                        the copies that ranks must share
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line can say."""

    checkpoint: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CHECKPOINT")]
    """The checkpoint, or a run."""
    other: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="OTHER")] = None
    """Another checkpoint, or the file of another rank: says which tensors differ, and by how much."""
    ranks: bool = False
    """They are two ranks of one checkpoint: only what each has a copy of must be equal."""
    json: bool = False
    """Print one JSON object, and nothing else."""


def main(arguments: Sequence[str]) -> int:
    """Read the checkpoint, and print the report."""
    options = tyro.cli(Options, args=list(arguments), prog="sealegs audit", description=DESCRIPTION)
    if options.other is not None:
        return compare(options.checkpoint, options.other, json=options.json, ranks=options.ranks)
    path = _place(options.checkpoint)
    try:
        from sealegs.state.checkpoint_audit import holdings, open_checkpoint
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtra("sealegs audit", "PyTorch", "torch") from None
    found = open_checkpoint(path)
    holds = [Held(name=each.name, what=each.what, problem=each.problem) for each in holdings(found)]
    complete = all(held.problem is None for held in holds)
    audited = Audited(source=str(path), kind=found.kind, holds=holds, complete=complete)
    show_json(contract(audited)) if options.json else show(page, audited)
    return int(not complete)


def _place(words: str) -> Path:
    """A path, or the newest checkpoint of a run, by its folder or its name."""
    path = Path(words)
    if not path.exists() and "/" not in words:
        path = Path("experiments") / words
    if not path.exists():
        raise SourceError(f"{words}: no such checkpoint or run; give its path, or the name of a run in experiments/")
    if not (path / MANIFEST).exists():
        return path
    steps = [entry for entry in (path / CHECKPOINTS).glob("*") if is_number(entry.name)]
    if not steps:
        raise SourceError(f"{words}: the run has no checkpoint yet; see cadence.checkpoint_steps, or checkpoint_every=")
    return max(steps, key=lambda entry: int(entry.name))
