"""Says what the tokens of a batch are like: how even their frequencies are, which come most, how many are rare."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST_FREQUENT = 16
"""Tokens of a batch that are written down with their counts."""
HIGHEST_ID = 1 << 24
"""Ids from here on are no token ids of a vocabulary, and would make a table that fills the memory."""


def entropy(counts: NDArray[Any]) -> float:
    """Entropy of a table of counts or weights, in nats.

    >>> round(entropy(np.array([1, 1, 0])), 4)
    0.6931
    """
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def token_statistics(ids: NDArray[Any], rare: NDArray[np.bool_] | None = None) -> dict[str, float | str]:
    """The signals of a batch's token ids; negative ones are no tokens. ``rare`` says which ids are, where it is known.

    >>> token_statistics(np.array([7, 7, -100, 2]), np.arange(8) == 2)["token_frequencies"]
    '7=2 2=1'
    """
    counted = ids[ids >= 0]
    if not counted.size or int(counted.max()) >= HIGHEST_ID:
        return {}
    counts = np.bincount(counted)
    most = np.argsort(-counts, kind="stable")[:MOST_FREQUENT]
    frequencies = " ".join(f"{token}={counts[token]}" for token in most.tolist() if counts[token])
    told: dict[str, float | str] = {"token_entropy": entropy(counts), "token_frequencies": frequencies}
    if rare is not None and len(rare) >= len(counts):
        told["rare_token_share"] = float(counts[rare[: len(counts)]].sum() / counts.sum())
    return told
