"""``sealegs do``: sends a person's request to a run, and says what became of it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from sealegs.cli.output import show, tell
from sealegs.cli.run_names import folder_of
from sealegs.errors import SourceError
from sealegs.record import manifest as manifests
from sealegs.record import requests
from sealegs.record.requests import Request
from sealegs.record.run import open_run
from sealegs.recovery.actions import requested_action
from sealegs.report.commands.interventions import Intervention, interventions

DESCRIPTION = """\
Intervene in a run that is under way. It is carried out after the step in progress, and logged with your name, as
`sealegs interventions` shows it.

  rollback [STEPS]   to the newest healthy state, or one at least so many steps old
  lr FACTOR          learning rate times a factor, warmed up again
  skip BATCHES       leave out the next batches
  clip NORM          clip gradients to that norm from here on
  clip-qk LOGIT      rescale queries and keys of heads whose attention logits are larger
  swap SOURCE        take a source out of the data
  halt               stop the run, as the playbook would

examples:
  sealegs do night rollback 200
  sealegs do night lr 0.5
"""

POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line can say."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """A run folder, or its name in experiments/."""
    what: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="WHAT")]
    """One of the above."""
    wait: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 600.0
    """How long to wait for it to be carried out. After that the request is taken back."""


def main(arguments: Sequence[str]) -> int:
    """Send the request, wait, and print the answer."""
    options = tyro.cli(Options, args=list(arguments), prog="sealegs do", description=DESCRIPTION)
    folder = folder_of(options.run)
    request = asked(folder, options.what)
    try:
        done = answered(folder, request, options.wait)
    except BaseException:
        requests.remove(folder, request)
        raise
    show(str, done)
    return 0


def asked(folder: Path, words: tuple[str, ...]) -> Request:
    """Leave the request in the folder of a run that is under way."""
    manifests.load(folder)
    action = requested_action(words)
    if not requests.is_under_way(folder):
        raise SourceError(f"{folder}: no process is training this run, so nobody would do it; resume it first")
    request = requests.leave(folder, words)
    tell(f"asked for: {action}")
    return request


def answered(folder: Path, request: Request, patience_s: float) -> Intervention:
    """Wait for the run to write what it did."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        done = answer_to(folder, request)
        if done is not None:
            return done
        time.sleep(POLL_S)
    raise not_carried_out(folder, patience_s)


def answer_to(folder: Path, request: Request) -> Intervention | None:
    """What the run did about it; None while it has not yet."""
    is_under_way = requests.is_under_way(folder)  # before the events: what it does as it ends is in them then
    events = open_run(folder).events
    for event in events:
        if event.kind == "request-refused" and event.detail.get("request") == request.id:
            raise SourceError(f"{folder}: refused: {event.detail.get('reason', 'it does not say why')}")
    for intervention in interventions(events):
        if intervention.decided.detail.get("request") == request.id:
            return intervention
    if not is_under_way:
        raise SourceError(f"{folder}: the run ended before it was carried out; start it again to go on with it")
    return None


def not_carried_out(folder: Path, patience_s: float) -> SourceError:
    """Nobody has taken the request in time."""
    return SourceError(f"{folder}: it was not carried out within {patience_s:g} s; is the guard given a playbook?")
