"""``sealegs notify``: sends a test message."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from sealegs.cli.output import say
from sealegs.sinks import delivery
from sealegs.sinks.delivery import Undelivered
from sealegs.sinks.messages import Message

DESCRIPTION = """\
Send one message to where a run would send its own, and say whether it arrived: better now than at 3 a.m.

examples:
  sealegs notify '$SLACK_WEBHOOK'                     the address in an environment variable: it is a secret
  sealegs notify https://example.org/hook             any webhook that takes {"text": ...}
  sealegs notify 'mail -s training me@example.org'    a command, which gets the text on its standard input
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line can say."""

    where: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="WHERE")]
    """The address of a webhook, a command, or '$NAME' of an environment variable with either."""


def main(arguments: Sequence[str]) -> int:
    """Parse, send, and say whether it arrived."""
    options = tyro.cli(Options, args=list(arguments), prog="sealegs notify", description=DESCRIPTION)
    way = delivery.opened(options.where)
    message = Message(
        kind="test",
        run="sealegs",
        step=0,
        title="a test",
        verdict="messages about a run will arrive here",
        first="nothing",
        page="`sealegs train --notify`, or Telemetry(notify=...)",
        key=(),
    )
    try:
        delivery.delivered(way, message, message.text, waits_s=())
    except Undelivered as failure:
        say(f"did not arrive at {way.shown}: {failure}")
        return 1
    say(f"delivered to {way.shown}")
    return 0
