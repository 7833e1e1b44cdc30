"""What a batch number means, where the number of ranks has changed in the course of a run.

A run counts its batches on and on. From a cut on, a number stands for other samples than it did before: so ranges of
batches that are left out are carried over from the numbers of one course of cuts to those of another.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

ENDLESS = 10**15
"""Batches of an epoch that does not end."""


KEPT_PIECES = 200
"""Older ones are of numbers that no checkpoint goes back to any more."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Numbers from one cut to the next."""

    number: int
    """Its first one."""
    epoch: int
    sample: int
    """How many samples of that epoch come before it, of all ranks."""
    rows: int
    """Samples of a number, of all ranks."""
    left: int
    """Numbers in the rest of that epoch."""
    length: int
    """Numbers in a whole epoch."""


class Cuts:
    """All the pieces of a run's numbers up to now.

    >>> cuts = Cuts([Piece(0, 0, 0, 16, 10, 10)])
    >>> on_one = cuts.cut(Piece(4, 0, 64, 8, 12, 20))
    >>> cuts.place(12), on_one.place(12), on_one.place(16), on_one.number(0, 96), on_one.number(1, 16)
    ((1, 32), (0, 128), (1, 0), 8, 18)
    >>> on_one.carried(6, 8, to=cuts), cuts.carried(5, 6, to=on_one), cuts.carried(1, 3, to=on_one)
    ((5, 6), (6, 8), (1, 3))
    """

    def __init__(self, pieces: Iterable[Piece] = ()) -> None:
        self.pieces = tuple(pieces)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cuts) and self.pieces == other.pieces

    def __hash__(self) -> int:
        return hash(self.pieces)

    def cut(self, piece: Piece) -> "Cuts":
        """With another piece from its number on."""
        return Cuts([*(each for each in self.pieces if each.number < piece.number), piece][-KEPT_PIECES:])

    def place(self, number: int) -> tuple[int, int]:
        """The epoch that a number is in, and the samples of it before the number."""
        piece = next((each for each in reversed(self.pieces) if each.number <= number), self.pieces[0])
        after = number - piece.number
        if after < piece.left:
            return piece.epoch, piece.sample + after * piece.rows
        epochs, into = divmod(after - piece.left, max(piece.length, 1))
        return piece.epoch + 1 + epochs, into * piece.rows

    def number(self, epoch: int, sample: int, *, is_end: bool = False) -> int:
        """The number that a sample is in; as the end of a range, the one after what comes before the sample."""
        at = [each for each in self.pieces if (each.epoch, each.sample) <= (epoch, sample)]
        piece = at[-1] if at else self.pieces[0]
        whole = math.ceil if is_end else math.floor
        if epoch <= piece.epoch:
            return piece.number + min(whole((sample - piece.sample) / piece.rows), piece.left)
        into = min(whole(sample / piece.rows), piece.length)
        return piece.number + piece.left + (epoch - piece.epoch - 1) * piece.length + into

    def carried(self, first: int, end: int, *, to: "Cuts") -> tuple[int, int]:
        """A range of numbers in other cuts: those that have any of its samples."""
        if not self.pieces or not to.pieces or self == to:
            return first, end
        begin = to.number(*self.place(first))
        return begin, max(to.number(*self.place(end), is_end=True), begin + 1)

    def to_plain(self) -> list[dict[str, int]]:
        """As JSON values."""
        return [asdict(piece) for piece in self.pieces]

    @classmethod
    def from_plain(cls, plain: Sequence[Mapping[str, Any]]) -> Self:
        """From JSON values."""
        pieces = [Piece(**{name: int(piece[name]) for name in Piece.__slots__}) for piece in plain]
        if any(piece.rows < 1 for piece in pieces):
            raise ValueError("a batch of no samples")
        return cls(pieces)
