"""What readers return: documents of a part in blocks of bounded size, and what could not be read."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sealegs.batching.stratified import Ints

BLOCK_BYTES = 1 << 19
"""Bytes of text in a block: few enough that the arrays about it stay in the processor's cache."""
PART_BYTES = 1 << 24
"""Bytes of a file that one process scans at a time."""
LARGEST_DOCUMENT = 1 << 26
"""Largest document in bytes; of a larger one, only the beginning is read."""
ROW = 1024
"""Tokens of a row where nothing says how many it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """How to read a corpus, and what is over-long."""

    field: str = "text"
    """The field or column that holds the text of a document, or its token ids."""
    source: str | None = None
    """The field that names the source of a document; without it, files and folders do."""
    tokenizer: str | None = None
    """A tokenizer.json: text is then counted in its tokens."""
    dtype: str = "uint16"
    """Type of raw token ids."""
    end: int | None = None
    """The token that ends each document."""
    row: int = ROW
    """Tokens per row, if token ids come without documents: each row counts as one."""
    longest: int = 32_768
    """Tokens from which on a document is over-long."""


Format: TypeAlias = Literal["paragraphs", "whole", "lines", "parquet", "arrow", "ids"]


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a corpus that is scanned at a time."""

    number: int
    file: str
    """The file in which its documents are numbered."""
    source: str
    format: Format
    start: int = 0
    """Position in the file: bytes, tokens, row groups or batches."""
    end: int = 0
    size: int = 0
    """Bytes, for the progress."""
    files: tuple[str, ...] = ()
    """The files, if each is a document."""
    path: str = ""
    """Its path, if it is not ``file``."""
    trouble: str | None = None
    """Why it cannot be read."""


@dataclass(frozen=True, slots=True)
class TextDocuments:
    """Text documents, end to end."""

    data: bytes
    """UTF-8, or meant to be."""
    starts: Ints
    numbers: Ints
    """Number of each document in its part."""
    source: str


@dataclass(frozen=True, slots=True)
class Ids:
    """Documents of token ids, end to end."""

    ids: NDArray[Any]
    starts: Ints
    numbers: Ints
    source: str
    offset: int
    """Tokens of the part before this block."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """What could not be read, and the number of the document or line in the part, if it is known."""

    number: int
    text: str


@dataclass(frozen=True, slots=True)
class End:
    """How many numbers a part has used."""

    numbers: int


Read: TypeAlias = Iterator[TextDocuments | Ids | Unreadable | End]


def joined(documents: Sequence[bytes], numbers: Sequence[int], source: str) -> TextDocuments:
    """The documents as a block."""
    lengths = np.array([len(document) for document in documents], np.int64)
    return TextDocuments(b"".join(documents), np.cumsum(lengths) - lengths, np.array(numbers, np.int64), source)
