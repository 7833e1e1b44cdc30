"""A byte-level BPE tokenizer that is trained on the documents.

Nothing is lost or normalised: tokens are runs of bytes, so encoded text decodes to the same characters.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sealegs.errors import ConfigError, MissingExtra, SourceError
from sealegs.record.files import whole_file, writing

END = "<|end|>"
"""The text of the end token. The same text in a document is encoded as its seven characters."""
END_ID = 0
SMALLEST_VOCABULARY = 257
"""A token for each byte, and the end token."""

# Training time is quadratic in the length of an unbroken run (0.1 s for 10,000 equal letters, 1.1 s for 30,000, no
# end in nine minutes for a million), so long documents are cut into pieces. A cut spoils one word in two thousand.
_TRAINING_PIECE = 10_000
# Characters that are encoded at a time: the library takes hundreds of bytes per token meanwhile.
_ENCODING_PIECE = 500_000
# Loses a character under every normalisation or prefix space that a foreign tokenizer may have.
_PROBE = f"\u00c9e\u0301 \ufb01 \u1e9e\r\n\t  don't{END}\x00\U0001f6a2 "


class Tokenizer:
    """A vocabulary of byte runs; token 0 ends each document. ``train`` and ``load`` make one."""

    def __init__(self, bpe: Any) -> None:
        self._bpe = bpe
        bpe.encode_special_tokens = True  # no text can forge an end token; the library does not save this setting
        byte_of = {character: byte for byte, character in enumerate(_byte_characters())}
        tokens = (bpe.id_to_token(token) for token in range(1, bpe.get_vocab_size()))
        self._bytes = [END.encode(), *(bytes(map(byte_of.__getitem__, token)) for token in tokens)]

    @property
    def size(self) -> int:
        """Number of tokens: fewer than requested if the documents had no more to give."""
        return len(self._bytes)

    def encode_documents(self, documents: Iterable[str]) -> tuple[NDArray[np.uint16 | np.uint32], NDArray[np.int64]]:
        """All documents end to end, an end token after each, and the position at which each of them starts."""
        dtype = np.uint16 if self.size <= 1 << 16 else np.uint32
        runs: list[NDArray[np.uint16 | np.uint32]] = [np.empty(0, dtype)]
        starts = [0]
        position = 0
        for batch in _batches(documents):
            ids: list[int] = []
            encodings = self._bpe.encode_batch_fast([text for text, _ in batch])
            for encoding, (_, is_end) in zip(encodings, batch, strict=True):
                ids += encoding.ids
                if is_end:
                    ids.append(END_ID)
                    starts.append(position + len(ids))
            position += len(ids)
            runs.append(np.array(ids, dtype))
        return np.concatenate(runs), np.array(starts[:-1], np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some tokens, with end tokens visible; a character with a missing part is U+FFFD."""
        return b"".join(map(self._bytes_of, ids)).decode(errors="replace")

    def to_json(self) -> str:
        """The tokenizer in the ``tokenizers`` library's own format."""
        return str(self._bpe.to_str())

    def save(self, path: Path) -> None:
        """Write it as a tokenizer.json, whole or not at all."""
        with writing(path), whole_file(path) as file:
            file.write(self.to_json().encode())

    def _bytes_of(self, token: int) -> bytes:
        # a model's vocabulary may be larger than the tokenizer's, so ids without a text exist
        return self._bytes[token] if 0 <= token < self.size else f"<|{token}|>".encode()


def train(documents: Iterable[str], vocabulary: int) -> Tokenizer:
    """Learn the ``vocabulary`` most useful byte runs; the same documents give the same tokenizer, byte for byte.

    That holds for any number of threads and any hash seed: the library breaks ties between equal counts by token id.
    """
    if vocabulary < SMALLEST_VOCABULARY:
        raise ConfigError(
            f"model.vocabulary={vocabulary}: text needs at least {SMALLEST_VOCABULARY}, "
            "a token for each byte and one that ends a document"
        )
    library = _library()
    bpe = library.Tokenizer(library.models.BPE())
    bpe.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=2,  # a single occurrence teaches nothing about another text
        special_tokens=[END],
        initial_alphabet=_byte_characters(),
        show_progress=False,
    )
    bpe.train_from_iterator((piece for text in documents for piece in _pieces(text, _TRAINING_PIECE)), trainer)
    return Tokenizer(bpe)


def load(path: Path, vocabulary: int | None = None) -> Tokenizer:
    """Read a saved tokenizer, which must fit into a model's ``vocabulary``."""
    library = _library()
    try:
        bpe = library.Tokenizer.from_str(path.read_bytes().decode())
        is_ours = _is_ours(bpe)
    except OSError as error:
        raise SourceError(f"{path}: cannot be read ({error.strerror}): give the path of a tokenizer.json") from error
    except BaseException as error:  # the library raises nothing narrower, and Rust's panic is not an Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise SourceError(f"{path}: damaged, or not a tokenizer.json ({error}): copy or train it anew") from error
    if not is_ours:
        raise SourceError(f"{path}: not a tokenizer that Sealegs trained (byte-level, {END} as token 0): train it anew")
    size = bpe.get_vocab_size()
    if vocabulary is not None and size > vocabulary:
        raise SourceError(
            f"{path}: has {size} tokens, more than model.vocabulary={vocabulary}: set that to at least {size}"
        )
    return Tokenizer(bpe)


def _is_ours(bpe: Any) -> bool:
    """Whether token 0 is the end token, every other id is a run of bytes, and encoding loses no text."""
    tokens = [bpe.id_to_token(token) for token in range(bpe.get_vocab_size())]
    if None in tokens or tokens[:1] != [END]:
        return False
    alphabet = set(_byte_characters())
    if not alphabet.issubset(tokens) or not alphabet.issuperset("".join(tokens[1:])):
        return False
    tokenizer = Tokenizer(bpe)
    tokens_of_probe, _ = tokenizer.encode_documents([_PROBE])
    return END_ID not in tokens_of_probe[:-1] and tokenizer.decode(tokens_of_probe[:-1]) == _PROBE


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise MissingExtra("text data", "tokenizers", "lab") from error
    return tokenizers


def _byte_characters() -> list[str]:
    """The character by which a byte-level vocabulary writes each byte: itself if printable, else one from 256 on."""
    shows = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in shows else next(others)) for byte in range(256)]


def _pieces(text: str, length: int) -> Iterator[str]:
    return (text[start : start + length] for start in range(0, max(len(text), 1), length))


def _batches(documents: Iterable[str]) -> Iterator[list[tuple[str, bool]]]:
    """The documents in lists of bounded length, long ones in pieces; with each piece, whether its document ends."""
    batch: list[tuple[str, bool]] = []
    characters = 0
    for text in documents:
        *beginning, end = _pieces(text, _ENCODING_PIECE)
        for piece in (*((part, False) for part in beginning), (end, True)):
            batch.append(piece)
            characters += len(piece[0]) + 1  # an empty document counts, too
            if characters > _ENCODING_PIECE:
                yield batch
                batch, characters = [], 0
    if batch:
        yield batch
