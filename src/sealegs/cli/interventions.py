"""``sealegs interventions``: prints what was done to a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from sealegs.cli.output import say, show, show_json
from sealegs.cli.run_names import folder_of
from sealegs.record.interventions import skipped_steps
from sealegs.record.run import open_run
from sealegs.report.commands.interventions import contract, interventions, page, rescaled
from sealegs.report.event_text import OBSERVES, is_observing, remarkable
from sealegs.report.stability import told_of_tax

DESCRIPTION = """\
Print every intervention in a run: who or what decided, on which evidence, what was changed, and what came of it;
and the stability tax: what checks, snapshots, checkpoints, skipped and repeated steps have cost the run.

examples:
  sealegs interventions night              of experiments/night
  sealegs interventions /runs/a7 --json    as one JSON object
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line can say."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """A run folder, or its name in experiments/."""
    json: bool = False
    """Print one JSON object, and nothing else."""


def main(arguments: Sequence[str]) -> int:
    """Print the log."""
    options = tyro.cli(Options, args=list(arguments), prog="sealegs interventions", description=DESCRIPTION)
    run = open_run(folder_of(options.run))
    found = interventions(run.events)
    of_heads = rescaled(run.events)
    if options.json:
        show_json(contract(run))
        return 0
    if found:
        show(page, found)
    elif not of_heads:
        skips = len(skipped_steps(run.events))
        what = f"{skips:,} skipped {'step' if skips == 1 else 'steps'}, and nothing else" if skips else "nothing"
        playbooks = [event.detail.get("playbook") for event in run.events if event.kind == "guard"]
        why = f": {OBSERVES}" if is_observing(playbooks) else ""
        say(f"{run.folder}: {what} was done to this run{why}")
    for sentence in of_heads:
        say(sentence)
    for event in run.events:  # not to act is a decision, too
        if event.kind in ("incident-look", "weights-excused"):
            say(str(remarkable(event)))
    for sentence in told_of_tax(run):
        say(sentence)
    return 0
