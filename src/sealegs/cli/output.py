"""The one door through which commands print: results to stdout, progress and errors to stderr.

A terminal obeys escape sequences, whoever wrote them, and what a command prints is full of names and texts from files.
So all of it goes through here, as one line whose characters can all be seen, as a page of values that were made so
first, or as JSON, which spells out by itself what is not plain ASCII. The linter refuses `print` elsewhere (T20).
"""

import json
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TextIO

from sealegs.printable import printable, visible, visible_lines
from sealegs.record.schema import speakable

Found = ParamSpec("Found")


def text_of(page: Callable[Found, str], *found: Found.args, **named: Found.kwargs) -> str:
    """The page of what was found: its own line ends count, those in the values are spelt out."""
    return visible_lines(page(*printable(found), **printable(named)))


def show(page: Callable[Found, str], *found: Found.args, **named: Found.kwargs) -> None:
    """Print the page of what was found."""
    _write(text_of(page, *found, **named), sys.stdout)


def show_json(value: Any) -> None:
    """Print one JSON object."""
    _write(json.dumps(speakable(value), indent=1, allow_nan=False), sys.stdout)


def say(line: str) -> None:
    """Print one line of a result."""
    _write(visible(line), sys.stdout)


def tell(line: str) -> None:
    """Print one line of progress, or an error, beside the results."""
    _write(visible(line), sys.stderr)


def _write(text: str, stream: TextIO) -> None:
    encoding = getattr(stream, "encoding", None) or "utf-8"  # one that lacks a letter is no reason to fail
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
    stream.flush()
