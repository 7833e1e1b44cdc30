"""Makes a function that encodes documents as token ids, from a tokenizer.json."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sealegs.batching.stratified import Ints
from sealegs.errors import MissingExtra, SourceError
from sealegs.scan.files import opened
from sealegs.scan.text import Encode


def tokenizer_of(path: str) -> Any:
    """Any tokenizer of the ``tokenizers`` library, read once per process."""
    return _read(path, Path.cwd())


@cache
def _read(path: str, _: Path) -> Any:
    """In another folder the same relative path is another file."""
    try:
        import tokenizers
    except ImportError as error:
        raise MissingExtra("--tokenizer", "tokenizers", "lab") from error
    try:
        with opened(path) as file:
            made = tokenizers.Tokenizer.from_str(file.read().decode())
    except OSError as error:
        raise SourceError(f"--tokenizer {path}: cannot be read ({error.strerror or error})") from error
    except BaseException as error:  # the library raises nothing narrower, and Rust's panic is not an Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise SourceError(f"--tokenizer {path}: not a tokenizer.json ({error})") from error
    made.no_truncation()
    made.no_padding()
    return made


def encoder(path: str) -> Encode:
    """The encoder of a tokenizer file; it adds no special tokens around a document."""
    tokenizer = tokenizer_of(path)

    def encode(documents: list[str]) -> tuple[NDArray[Any], Ints]:
        rows = [each.ids for each in tokenizer.encode_batch_fast(documents, add_special_tokens=False)]
        lengths = np.array([len(row) for row in rows], np.int64)
        ids = np.fromiter((token for row in rows for token in row), np.int64, int(lengths.sum()))
        return ids, np.cumsum(lengths) - lengths

    return encode
