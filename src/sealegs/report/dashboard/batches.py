"""Turns what the record says about the content of batches into numbers to draw."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from sealegs.record import unlearned_sources
from sealegs.report.dashboard.downsample import Floats, Steps

BIN = 0.5
"""Nats per bin of ``token_loss_histogram``. The last but one has all above, the last what is not finite."""
COLUMNS = 100
"""The most histograms side by side: of more, each column shows the highest share in a stretch of steps."""


class Cells(NamedTuple):
    """The bins of histograms that are not empty: columns of equal length."""

    left: Floats
    right: Floats
    """Steps. A box is as wide as the usual interval, or reaches to the next one."""
    bottom: Floats
    top: Floats
    """Nats."""
    share: Floats


def cells_of(steps: Steps, texts: Sequence[str]) -> Cells | None:
    """The content of each histogram, or of each stretch of several; None where there is none."""
    steps, counts = _counts(steps, texts)
    if not counts.any():
        return None
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    begins = np.arange(0, len(steps), -(-len(steps) // COLUMNS))
    highest = np.maximum.reduceat(shares, begins, axis=0)
    left = steps[begins].astype(np.float64)
    usual = float(np.median(np.diff(left))) if len(left) > 1 else 1.0
    right = np.append(np.minimum(left[1:], left[:-1] + usual), left[-1] + usual)
    column, place = np.nonzero(highest)
    bottom = place.astype(np.float64) * BIN
    return Cells(left[column], right[column], bottom, bottom + BIN, highest[column, place])


def quantiles_of(steps: Steps, texts: Sequence[str]) -> Iterator[tuple[str, Steps, Floats]]:
    """The loss that half of the tokens, and that 99% of them, are below; to half a nat."""
    steps, counts = _counts(steps, texts)
    below = np.cumsum(counts[:, :-1], axis=1)
    for label, share in (("median token", 0.5), ("99 % of tokens", 0.99)):
        values = (np.argmax(below >= share * below[:, -1:], axis=1) + 1) * BIN
        yield label, steps, np.where(below[:, -1] > 0, values, np.nan)


def shares_of(texts: Sequence[str], most: int) -> tuple[dict[str, Floats], int]:
    """The share of each source in every batch, of the ``most`` that have most of the data; and how many others are.

    >>> shares, others = shares_of(["a=6 b=2", "b=7 c=1"], 2)
    >>> {name: values.tolist() for name, values in shares.items()}, others
    ({'a': [0.75, 0.0], 'b': [0.25, 0.875]}, 1)
    """
    kinds: dict[str, int] = {}
    places = np.array([kinds.setdefault(text, len(kinds)) for text in texts], dtype=np.int64)
    parsed = [unlearned_sources.shares_of(text) for text in kinds]
    data: dict[str, float] = {}
    for each, times in zip(parsed, np.bincount(places).tolist(), strict=True):
        for name, share in each.items():
            data[name] = data.get(name, 0.0) + times * share
    largest = set(sorted(data, key=lambda name: -data[name])[:most])
    shares = {name: np.array([each.get(name, 0.0) for each in parsed])[places] for name in data if name in largest}
    return shares, len(data) - len(shares)


def _counts(steps: Steps, texts: Sequence[str]) -> tuple[Steps, Floats]:
    """Histograms as rows of an array; texts that are not histograms are left out."""
    rows = [text.split() for text in texts]
    bins = max((len(row) for row in rows), default=0)
    sound = [len(row) == bins > 1 and all(word.isascii() and word.isdigit() for word in row) for row in rows]
    kept = [row for row, is_sound in zip(rows, sound, strict=True) if is_sound]
    return steps[np.array(sound, dtype=np.bool_)], np.array(kept, dtype=np.float64).reshape(len(kept), max(bins, 1))
