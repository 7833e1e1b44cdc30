"""``sealegs health``: says which checkpoint of a run is healthy, who was at fault, and whether to start it again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from sealegs.cli.output import say, show_json
from sealegs.cli.run_names import folder_of
from sealegs.record.health import clear, read_health
from sealegs.record.run import open_run
from sealegs.report.commands.health import contract

DESCRIPTION = """\
What to know before a run is started again: its newest healthy checkpoint, the rank at fault, and whether a restart
would only fail again. The run keeps the same in health.json in its folder, which a launcher can read without Sealegs.

examples:
  sealegs health night              of experiments/night
  sealegs health /runs/a7 --json    as one JSON object: that of health.json
  sealegs health night --clear      what happened until now does not count any more: it may be started again

exit code: 0 go on, or restart from the healthy checkpoint; 1 do not restart, or not on that host; 2 cannot be read.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line can say."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """A run folder, or its name in experiments/."""
    json: bool = False
    """Print one JSON object, and nothing else."""
    clear: bool = False
    """Let it be started again: a person has seen to what ended it."""


def main(arguments: Sequence[str]) -> int:
    """Print it."""
    options = tyro.cli(Options, args=list(arguments), prog="sealegs health", description=DESCRIPTION)
    folder = open_run(folder_of(options.run)).folder
    health = clear(folder) if options.clear else read_health(folder)
    if options.json:
        show_json(contract(health))
    else:
        for line in health.told:
            say(line)
    return int(health.advice in ("do not restart", "restart without this host"))
