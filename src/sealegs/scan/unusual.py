"""How unusual a row of tokens is for a corpus: three measures, and their histograms over all of its windows.

A *window* is as many tokens on end as a row has; documents follow one another in it, as they do in a packed row.
Histograms of two parts add up to that of both, so that percentiles cost no memory that grows with the corpus.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from sealegs.batching.stratified import Ints, rare_tokens
from sealegs.report.commands.incident_data import Measure

MEASURES: tuple[Measure, ...] = get_args(Measure)
_WIDTHS: dict[Measure, float] = {"surprise": 1 / 64, "rare": 1 / 1024, "entropy": 1 / 64}
"""Of the bins."""
_BINS = 2048
Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Frequencies:
    """What the tokens of a corpus weigh."""

    surprise: NDArray[np.float32]
    """Of each id: minus the logarithm of its share. One that never occurs has half an occurrence."""
    is_rare: NDArray[np.bool_]

    @classmethod
    def of(cls, counts: Ints, ids: int) -> "Frequencies":
        """From how often each id occurs; there are ``ids`` of them or more."""
        counts = np.pad(counts, (0, max(ids - len(counts), 0)))
        shares = np.maximum(counts, 0.5) / max(int(counts.sum()), 1)
        is_rare = rare_tokens(counts)
        is_rare |= counts == 0
        return cls(-np.log(shares).astype(np.float32), is_rare)

    def measured(self, rows: NDArray[Any]) -> dict[Measure, Floats]:
        """Each measure of each row."""
        known = np.minimum(rows, len(self.surprise) - 1)
        return {
            "surprise": self.surprise[known].mean(1, dtype=np.float64),
            "rare": self.is_rare[known].mean(1, dtype=np.float64),
            "entropy": _entropies(rows),
        }


def _entropies(rows: NDArray[Any]) -> Floats:
    """The entropy of the tokens of each row.

    >>> _entropies(np.array([[5, 5, 5, 5], [1, 2, 1, 2]])).round(3).tolist()
    [0.0, 0.693]
    """
    count, length = rows.shape
    in_order = np.sort(rows, axis=1)
    begins = np.ones((count, length), np.bool_)
    begins[:, 1:] = in_order[:, 1:] != in_order[:, :-1]
    firsts = np.flatnonzero(begins)
    times = np.diff(firsts, append=count * length)
    sums = np.bincount(firsts // length, times * np.log(times), minlength=count)
    entropies: Floats = np.abs(np.log(length) - sums / length)
    return entropies


def bins_of(measure: Measure, values: Floats) -> Ints:
    """The bin of each value."""
    return np.clip(values / _WIDTHS[measure], 0, _BINS - 1).astype(np.int64)


def histogram(measure: Measure, values: Floats) -> Ints:
    """How many of the values are in each bin."""
    return np.bincount(bins_of(measure, values), minlength=_BINS)


def percentile(measure: Measure, counted: Ints, value: float) -> float:
    """The share of the windows below a value, in percent; those in its own bin count by half.

    >>> percentile("rare", histogram("rare", np.array([0.0, 0.1, 0.2, 0.9])), 0.5)
    75.0
    """
    place = int(bins_of(measure, np.array([value]))[0])
    below = int(counted[:place].sum()) + int(counted[place]) / 2
    return 100.0 * below / max(int(counted.sum()), 1)


def is_beyond(measure: Measure, values: Floats, limit: float) -> NDArray[np.bool_]:
    """Whether values are as unusual as a limit or more: surprise and rare tokens by much, entropy by little."""
    return values <= limit if measure == "entropy" else values >= limit


def tail(measure: Measure, counted: Ints, value: float) -> float:
    """The share of the windows that are as unusual as a value, in percent."""
    below = percentile(measure, counted, value)
    return below if measure == "entropy" else 100.0 - below


def added(one: Mapping[Measure, Ints], two: Mapping[Measure, Ints]) -> dict[Measure, Ints]:
    """The histograms of both; of no windows at all there are none."""
    if not one or not two:
        return {**one, **two}
    return {measure: one[measure] + two[measure] for measure in one}
