"""``sealegs symptom``: finds the page of a symptom by the words that people search for."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from sealegs.cli.output import say, show
from sealegs.errors import ConfigError

DESCRIPTION = """\
What a symptom usually is, how to tell in five minutes, and what to do first. The words are those of a question, or of a
line of the log; without any, all symptoms are listed. To judge a log itself: sealegs check LOG.

examples:
  sealegs symptom                                    all of them
  sealegs symptom grad_norm nan loss 0.0             the page that fits best, and the next ones
  sealegs symptom loss-jumps-after-resume            a page by its name
  sealegs symptom --write docs/symptoms              write all pages as Markdown
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line can say."""

    words: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="WORD")] = ()
    """What is seen, in your own words."""
    write: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Write all pages into a folder, as Markdown."""


def main(arguments: Sequence[str]) -> int:
    """Print the page, or the list of them."""
    options = tyro.cli(Options, args=list(arguments), prog="sealegs symptom", description=DESCRIPTION)
    from sealegs.diagnosis.symptoms import found, symptoms
    from sealegs.report import symptom_pages

    if options.write is not None:
        from sealegs.gallery.definitions import by_symptom

        say(f"wrote {symptom_pages.write(options.write, by_symptom())} pages to {options.write}")
        return 0
    if not options.words:
        for each in symptoms().values():
            say(f"{each.name:<46} {each.title}")
        return 0
    question = " ".join(options.words)
    fitting = [symptoms()[question]] if question in symptoms() else found(question)
    if not fitting:
        raise ConfigError(f"WORD={question!r}: no symptom has any of these words; `sealegs symptom` lists all")
    best, *others = fitting
    show(symptom_pages.page, best)
    if others:
        say("")
        say("Or is it one of these? `sealegs symptom NAME`")
        for each in others:
            say(f"  {each.name:<46} {each.title}")
    return 0
