"""``sealegs diff``: shows where two runs differ."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from sealegs.cli.check import place_of
from sealegs.cli.output import show, show_json
from sealegs.diagnosis.diff import differ
from sealegs.readers.read import read
from sealegs.report.commands.diff import contract, page

DESCRIPTION = """\
The first difference between two runs: settings, versions, and for every signal that both have the first step at which
it differs at all, and from which on by more than noise. Reads everything that `sealegs check` reads.

exit code: 0 no difference, 1 some, 2 one of them cannot be read.

examples:
  sealegs diff good bad                     two runs of experiments/
  sealegs diff before.csv after.csv --json
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line can say."""

    a: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN_A")]
    """One run, or log."""
    b: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN_B")]
    """The other."""
    json: bool = False
    """Print one JSON object, and nothing else."""


def main(arguments: Sequence[str]) -> int:
    """Read both runs, and print their differences."""
    options = tyro.cli(Options, args=list(arguments), prog="sealegs diff", description=DESCRIPTION)
    names = options.a, options.b
    difference = differ(*(read(place_of(name)).run for name in names))
    show_json(contract(difference, names)) if options.json else show(page, difference, names)
    return int(difference.is_any)
