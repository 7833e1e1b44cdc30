"""``sealegs diff``: shows where two runs differ."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from sealegs.cli.output import show, show_json
from sealegs.cli.run_names import place_of
from sealegs.diagnosis.diff import differ
from sealegs.diagnosis.diff_conclusions import conclude
from sealegs.readers.read import read
from sealegs.report.commands.diff import contract, page

DESCRIPTION = """\
What tells two runs apart: offsets that last although they are less than the noise of a step, noise that grew, a ratio
that is the accumulation or the number of ranks, a parting that begins at a resume, and the first suspect among settings
and versions with the test that settles it. Then for every signal that both have the first step at which it differs at
all, and from which on by more than noise. Reads everything that `sealegs check` reads.

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
    a, b = (read(place_of(name)).run for name in names)
    difference = differ(a, b)
    conclusions = conclude(a, b, difference, ("A", "B"))
    if options.json:
        show_json(contract(difference, names, conclusions))
    else:
        show(page, difference, names, conclusions)
    return int(difference.is_any)
