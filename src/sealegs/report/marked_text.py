"""A sentence in, its spans out, and the same sentence as Markdown. Standard library only.

A sentence is text, and names of commands and settings in it stand between backticks. That is all the markup a sentence
can have, whoever wrote it: the rest is shown as it is. So whatever comes from a file may be put into one.
"""

import re
from bisect import bisect_right
from typing import NamedTuple

from sealegs.printable import visible

_MARKUP = re.compile(
    r"""
      [*\[\]<~`]                     # emphasis, links and images, elements, strokes, code
    | \\(?=[!-/:-@\[-`{-~]|$)        # a backslash that would escape the character after it, which may be ours
    | &(?=\#?\w+;)                   # the name of a character
    | (?<!\w)_+ | _+(?!\w)           # emphasis: underscores that are not within a word
    """,
    re.VERBOSE,
)
_BEGINNING = re.compile(r"(?P<number>\d{1,9})(?=[.)](?: |$))|(?=#{1,6}(?: |$)|>|[-+](?: |$)|-[- ]*$)")
"""What would begin a list, a heading, a quotation or a rule."""


class Span(NamedTuple):
    """A part of a sentence."""

    text: str
    is_code: bool = False


def spans(sentence: str) -> list[Span]:
    """The parts of a sentence on one line. A run of backticks ends at the next run of the same length, if there is one.

    >>> [span.text for span in spans("run `sealegs check a`, or ` nothing") if span.is_code]
    ['sealegs check a']
    """
    line = visible(" ".join(sentence.split()))
    runs = [match.span() for match in re.finditer("`+", line)]
    starts: dict[int, list[int]] = {}
    for first, end in runs:
        starts.setdefault(end - first, []).append(first)
    found: list[Span] = []
    done = 0
    for first, end in runs:
        alike = starts[end - first]
        following = bisect_right(alike, first)
        if first < done or following == len(alike):
            continue
        closing = alike[following]
        if code := line[end:closing].strip():
            found += [Span(line[done:first]), Span(code, is_code=True)]
            done = closing + end - first
    return [span for span in (*found, Span(line[done:])) if span.text]


def markdown_of(sentence: str) -> str:
    r"""A sentence within a block of Markdown.

    >>> print(markdown_of("log activation_norm/<layer>, *.weight; run `sealegs replay <RUN>`"))
    log activation_norm/\<layer>, \*.weight; run `sealegs replay <RUN>`
    """
    return "".join(code_of(span.text) if span.is_code else _MARKUP.sub(_escaped, span.text) for span in spans(sentence))


def block_of(sentence: str) -> str:
    r"""A sentence that is a block of its own, or an item of a list.

    >>> print(block_of("1. # > `-`"), block_of("- a"), block_of("-1 < 0"))
    1\. # > `-` \- a -1 \< 0
    """
    text = markdown_of(sentence)
    begins = _BEGINNING.match(text)
    return text if begins is None else f"{begins['number'] or ''}\\{text[begins.end() :]}"


def cell_of(sentence: str) -> str:
    """A sentence as a cell of a table."""
    return markdown_of(sentence).replace("|", "\\|")


def code_of(text: str) -> str:
    """A text that stays one span, whatever backticks it has: between more of them than it has in a row."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * (longest + 1)
    blank = " " if text[:1] in "` " or text[-1:] in "` " else ""
    return f"{fence}{blank}{text}{blank}{fence}"


def _escaped(match: re.Match[str]) -> str:
    return "".join(f"\\{character}" for character in match[0])
