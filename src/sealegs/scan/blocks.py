"""What readers hand on: documents of a part in blocks of bounded size, and what could not be read."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sealegs.batching.stratified import Ints

BLOCK_BYTES = 1 << 19
"""Of text that is looked at in one go: so that the arrays about it stay in the processor's cache."""
PART_BYTES = 1 << 24
"""Of a file that one process scans in one go."""
LARGEST_DOCUMENT = 1 << 26
"""Bytes of a document that are read; of a larger one, its beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """How a corpus is to be read, and what is too much."""

    field: str = "text"
    """The field or column that holds the text of a document, or its token ids."""
    source: str | None = None
    """The one that names the source of a document; else files and folders do."""
    tokenizer: str | None = None
    """A tokenizer.json: text is then counted in its tokens."""
    dtype: str = "uint16"
    """Of raw token ids."""
    end: int | None = None
    """The token that ends each document."""
    row: int = 1024
    """Tokens of a row, where token ids come without documents: each row counts as one."""
    longest: int = 100_000
    """Tokens from which on a document is over-long."""


Format: TypeAlias = Literal["paragraphs", "whole", "lines", "parquet", "arrow", "ids"]


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a corpus that is scanned in one go."""

    number: int
    file: str
    """What its documents are numbered in."""
    source: str
    format: Format
    start: int = 0
    """Bytes, tokens, row groups or batches of the file."""
    end: int = 0
    size: int = 0
    """In bytes, for the progress."""
    files: tuple[str, ...] = ()
    """Where each file is a document."""
    path: str = ""
    """Where it lies, if not at ``file``."""
    trouble: str | None = None
    """Why it cannot be read."""


@dataclass(frozen=True, slots=True)
class TextDocuments:
    """Documents of text, end to end."""

    data: bytes
    """UTF-8, or meant to be."""
    starts: Ints
    numbers: Ints
    """Of each document in its part."""
    source: str


@dataclass(frozen=True, slots=True)
class Ids:
    """Documents of token ids, end to end."""

    ids: NDArray[Any]
    starts: Ints
    numbers: Ints
    source: str
    offset: int
    """Tokens of the part before it."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """What could not be read, and the number of the document or line in the part, where that is known."""

    number: int
    text: str


@dataclass(frozen=True, slots=True)
class End:
    """How many numbers a part has given out."""

    numbers: int


Read: TypeAlias = Iterator[TextDocuments | Ids | Unreadable | End]


def joined(documents: Sequence[bytes], numbers: Sequence[int], source: str) -> TextDocuments:
    """Documents as a block."""
    lengths = np.array([len(document) for document in documents], np.int64)
    return TextDocuments(b"".join(documents), np.cumsum(lengths) - lengths, np.array(numbers, np.int64), source)
