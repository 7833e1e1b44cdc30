"""Splits UTF-8 text into words, as numbers that can be compared: runs of letters and digits, and runs of marks."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sealegs.batching.stratified import Ints

_SPACE, _LETTERS, _MARKS, _CONTROL = range(4)
_GOLDEN, _PRIME = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)
_FIRST_BYTES = np.array([(1 << 8 * count) - 1 for count in range(9)], np.uint64)


def _class_of(byte: int) -> int:
    character = chr(byte)
    if byte >= 0x80 or character.isalnum() or character == "_":  # everything that is not ASCII counts as a letter
        return _LETTERS
    if character in " \t\n\r\f\v":
        return _SPACE
    return _CONTROL if byte < 32 or byte == 127 else _MARKS


_CLASSES = bytes(_class_of(byte) for byte in range(256))


@dataclass(frozen=True, slots=True)
class Words:
    """The words of some documents, end to end."""

    starts: Ints
    ends: Ints
    is_letters: NDArray[np.bool_]
    """Whether each word is letters and digits, or marks."""
    firsts: Ints
    """The first word of each document, and the end of the last document."""
    controls: Ints
    """Positions of control characters."""

    @property
    def lengths(self) -> Ints:
        """Bytes of each word."""
        return self.ends - self.starts

    def summed(self, values: Ints) -> Ints:
        """The sum of a value of each word, by document."""
        return np.diff(np.append(0, np.cumsum(values))[self.firsts])


def words(data: bytes, starts: Ints) -> Words:
    """Split documents into words; ``starts`` is where each document begins."""
    classes = np.frombuffer(data.translate(_CLASSES), np.uint8)
    is_edge = np.empty(len(data), np.bool_)
    is_edge[1:] = classes[1:] != classes[:-1]
    is_edge[:1] = True
    is_edge[starts[starts < len(data)]] = True
    edges = np.flatnonzero(is_edge)
    kinds = classes[edges]
    spoken = np.flatnonzero(kinds != _SPACE)
    begins = edges[spoken]
    ends = np.append(edges, len(data))[spoken + 1]
    firsts = np.append(np.searchsorted(begins, starts), len(begins))
    return Words(begins, ends, kinds[spoken] == _LETTERS, firsts, edges[kinds == _CONTROL])


def keys(data: bytes, found: Words) -> NDArray[np.uint64]:
    """A number for each word, equal for equal words. Words of up to 16 bytes that differ have different numbers.

    For a longer word, the first and the last eight bytes and the length decide.
    """
    padded = data + bytes(8)
    eight = np.ndarray((len(data) + 1,), "<u8", padded, strides=(1,))  # eight bytes from each position on
    lengths = found.lengths
    numbers: NDArray[np.uint64] = (eight[found.starts] & _FIRST_BYTES[np.minimum(lengths, 8)]) * _GOLDEN
    long = np.flatnonzero(lengths > 8)
    numbers[long] ^= eight[found.ends[long] - 8] * _PRIME ^ lengths[long].astype(np.uint64)
    return numbers
