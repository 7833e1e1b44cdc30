"""Ranges of whole numbers in, one sorted set of them out: is a number in it?"""

import bisect
from collections.abc import Iterable


class Ranges:
    """Whole numbers, as ranges ``[first, end)``: sorted, and none touching another.

    >>> ranges = Ranges([(5, 8), (0, 2)])
    >>> ranges.add(2, 3)
    >>> ranges.as_list(), 2 in ranges, 3 in ranges
    ([[0, 3], [5, 8]], True, False)
    """

    def __init__(self, ranges: Iterable[Iterable[int]] = ()) -> None:
        self._ranges: list[list[int]] = []
        for first, end in ranges:
            self.add(first, end)

    def add(self, first: int, end: int) -> None:
        """Take a range in."""
        touched = [each for each in self._ranges if each[0] <= end and first <= each[1]]
        if touched:
            first, end = min(first, touched[0][0]), max(end, touched[-1][1])
        self._ranges = sorted([*(each for each in self._ranges if each not in touched), [first, end]])

    def __contains__(self, number: int) -> bool:
        place = bisect.bisect_right(self._ranges, number, key=lambda each: each[0]) - 1
        return place >= 0 and number < self._ranges[place][1]

    def as_list(self) -> list[list[int]]:
        """The ranges, as JSON values."""
        return [list(each) for each in self._ranges]
