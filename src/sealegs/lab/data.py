"""Makes batches from token arrays: any batch of any epoch, by its number alone.

The order is arithmetic, not state. Sample ``k`` of a run belongs to one source, by a shuffled table of the weights, and
is the n-th draw from it. The n-th draw from a source of w windows is window ``shuffled(n mod w)`` of its epoch
``n div w``. So a stream resumes at any batch without reading what came before, a source of any size is shuffled
without a table in memory, and anyone who knows the settings can make the batch of step 312 again. Weights that change
during a run begin a new part, in which every source goes on with the draw after its last.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sealegs.batching.exclusions import LeftOut
from sealegs.batching.permutation import shuffled
from sealegs.batching.stratified import RareRows, rare_tokens, spread
from sealegs.batching.tokens import token_counts
from sealegs.errors import ConfigError, SourceError
from sealegs.stats.token_frequencies import token_statistics

Ints: TypeAlias = NDArray[np.int64]

IGNORED = -100
"""A target that does not count: padding. ``F.cross_entropy`` leaves it out by default."""

_CYCLE = 1024  # samples after which the weights are met exactly


@dataclass(frozen=True, slots=True)
class Source:
    """Documents of one origin, end to end."""

    name: str
    tokens: NDArray[Any]
    """Token ids, possibly a memory map."""
    starts: Ints
    """Where each document starts. A file of bare tokens is one document."""

    def split(self, held_out: float) -> tuple["Source", "Source"]:
        """The part to train on and the part to evaluate on: the last documents, or the last tokens of the only one."""
        documents = len(self.starts)
        kept = documents - min(max(1, round(documents * held_out)), documents - 1) if documents > 1 else 0
        cut = int(self.starts[kept]) if kept else round(len(self.tokens) * (1 - held_out))
        later = self.starts[self.starts >= cut] - cut
        return (
            Source(self.name, self.tokens[:cut], self.starts[self.starts < cut]),
            Source(self.name, self.tokens[cut:], later if len(later) else np.zeros(1, np.int64)),
        )

    def fingerprint(self) -> str:
        """A digest that shows whether the data have changed: size, document starts, first and last million tokens."""
        digest = hashlib.blake2b(f"{len(self.tokens)} {len(self.starts)}".encode(), digest_size=8)
        for part in (self.tokens[:1_000_000], self.tokens[-1_000_000:], self.starts):
            digest.update(part.astype(np.uint32).tobytes())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Span:
    """Where one row of a batch comes from: tokens ``start`` to ``end`` of a source."""

    source: Source
    start: int
    end: int

    @property
    def documents(self) -> range:
        """The documents that it touches, by their number in the source."""
        first, last = np.searchsorted(self.source.starts, (self.start, self.end - 1), side="right") - 1
        return range(int(first), int(last) + 1)


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step reads."""

    index: int
    tokens: Ints
    """(rows, context)"""
    targets: Ints
    """The token after each; ``IGNORED`` where there is none."""
    spans: tuple[Span, ...]
    """Each row's source and documents."""
    rare: NDArray[np.bool_] | None = None
    """Which token ids are rare in the training data, where that is known."""

    @property
    def target_count(self) -> int:
        """The number of targets that count: the denominator of the mean loss."""
        return int(np.count_nonzero(self.targets != IGNORED))

    @property
    def hash(self) -> str:
        """Equal for equal content, whatever the index."""
        return hashlib.blake2b(self.tokens.tobytes() + self.targets.tobytes(), digest_size=8).hexdigest()

    @property
    def sources(self) -> str:
        """Rows by source, as text: ``grammar=6 stdlib=2``."""
        return " ".join(
            f"{name}={rows}" for name, rows in sorted(Counter(span.source.name for span in self.spans).items())
        )

    @property
    def nbytes(self) -> int:
        """Bytes in memory, without the sources that it was cut from."""
        return self.tokens.nbytes + self.targets.nbytes

    def recorded(self) -> dict[str, Any]:
        """What an incident's capsule keeps of it, without references to anything outside."""
        return {
            "tokens": self.tokens.astype(np.int32),
            "targets": self.targets.astype(np.int32),
            "rows": [
                {
                    "source": span.source.name,
                    "start": span.start,
                    "documents": [span.documents.start, span.documents.stop],
                }
                for span in self.spans
            ],
        }

    def token_statistics(self) -> dict[str, float | str]:
        """What the record says of the target tokens. Their entropy is low for a repeated document."""
        return token_statistics(self.targets, self.rare)

    def micro_batches(self, count: int) -> list[tuple[Ints, Ints]]:
        """Tokens and targets in ``count`` equal parts."""
        return list(zip(np.split(self.tokens, count), np.split(self.targets, count), strict=True))


@dataclass(frozen=True, slots=True)
class _Part:
    """A stretch of a stream with constant weights."""

    first: int
    """Its first batch."""
    weights: dict[str, float]
    shares: list[int]
    """Samples per cycle by source."""
    drawn: list[int]
    """Draws from each source before it."""
    is_stratified: bool
    """Whether rare tokens are spread over its batches."""


@dataclass(frozen=True, slots=True)
class _Table:
    """The windows of a source that are read."""

    first: int
    """Windows that come first in an epoch; the others are deferred to its end."""
    numbers: Ints | None
    """Their numbers in the source; None if all are read."""

    @property
    def count(self) -> int:
        """Number of windows that are read."""
        return self.first if self.numbers is None else len(self.numbers)


class Stream:
    """Batches of weighted sources, shuffled, without end. ``batch`` is pure; ``next`` moves a position, a number.

    The weights can be changed during a run: a batch is a function of its number and of the weights in force there.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        weights: Mapping[str, float],
        *,
        rows: Literal["packed", "documents"],
        batch: int,
        context: int,
        vocabulary: int,
        seed: int,
        is_stratified: bool = False,
        left_out: Mapping[str, LeftOut] | None = None,
        rare: NDArray[np.bool_] | None = None,
    ) -> None:
        """``left_out`` are documents by source: those to drop, and those that come last in each epoch. ``rare`` says
        which tokens are, where they are counted already."""
        self._sources = sources
        self._packed = rows == "packed"
        self._batch = batch
        self._context = context
        self._vocabulary = vocabulary
        self._seed = seed
        self._tables = [self._table(source, (left_out or {}).get(source.name)) for source in sources]
        self._windows = [self._count_windows(i) for i in range(len(sources))]
        self._cycle: tuple[tuple[int, int], Ints, Ints] = ((-1, -1), np.empty(0, np.int64), np.empty(0, np.int64))
        self._weights = {source.name: weights[source.name] for source in sources}
        self._parts: list[_Part] = []
        self._rare = rare
        self._is_stratified = is_stratified
        self._begin_part(0, self._weights, is_stratified=is_stratified)
        self._next = 0

    def next(self) -> Batch:
        """The batch at the stream's position, which then moves on."""
        batch = self.batch(self._next)
        self._next += 1
        return batch

    def __iter__(self) -> Iterator[Batch]:
        """The batches from the stream's position on."""
        while True:
            yield self.next()

    def reweight(self, source: str, weight: float) -> None:
        """Give a source another weight from the next batch on; 0 removes it."""
        weights = self._parts[-1].weights
        if source not in weights:
            raise ConfigError(f"source={source!r}: not one of those that are mixed; give one of {sorted(weights)}")
        if not 0 <= weight < math.inf:
            raise ConfigError(f"weight={weight}: the new weight of {source!r}, 0 or above")
        changed = weights | {source: weight}
        if not any(changed.values()):
            raise ConfigError(f"source={source!r}: without it nothing is left to train on; give it a weight above 0")
        self._begin_part(self._next, changed, is_stratified=self._parts[-1].is_stratified)

    def stratify(self) -> None:
        """Spread rare tokens from the next batch on, so that no batch has one in two rows if that is possible.

        This holds within a cycle of 1024 rows. If the batch size does not divide 1024, a batch may span two cycles.
        """
        self._begin_part(self._next, self._parts[-1].weights, is_stratified=True)

    def state_dict(self) -> dict[str, Any]:
        """The position in the stream; and if weights were changed, the weights by the batch that they begin at."""
        if [(part.weights, part.is_stratified) for part in self._parts] == [(self._weights, self._is_stratified)]:
            return {"next_batch": self._next}
        weights = [[part.first, dict(part.weights), *[True] * part.is_stratified] for part in self._parts]
        return {"next_batch": self._next, "weights": weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position in the stream, with the weights of that time."""
        parts = state.get("weights", [[0, self._weights, *[True] * self._is_stratified]])
        for _, weights, *_ in parts:
            if weights.keys() != self._weights.keys():
                raise SourceError(
                    f"the place is in a stream of {sorted(weights)}, and this one mixes {sorted(self._weights)}; "
                    "bring those sources back"
                )
        self._next = int(state["next_batch"])
        for first, weights, *is_stratified in parts:
            self._begin_part(int(first), weights, is_stratified=bool(is_stratified))

    def _begin_part(self, first: int, weights: Mapping[str, float], *, is_stratified: bool) -> None:
        """Put other weights in force from a batch on."""
        while self._parts and self._parts[-1].first >= first:
            self._parts.pop()
        self._cycle = ((-1, -1), *self._cycle[1:])
        if self._parts and (self._parts[-1].weights, self._parts[-1].is_stratified) == (weights, is_stratified):
            return
        drawn = self._drawn_before(first)
        used = [source.name for source in self._sources if weights[source.name]]
        shares = dict(zip(used, apportion([weights[name] for name in used], _CYCLE), strict=True))
        of_each = [shares.get(source.name, 0) for source in self._sources]
        self._parts.append(_Part(first, dict(weights), of_each, drawn, is_stratified))

    def _drawn_before(self, batch: int) -> list[int]:
        """How many samples each source has given before a batch."""
        if not self._parts:
            return [0] * len(self._sources)
        number, part = self._part_of(batch - 1)
        cycles, slots = divmod((batch - part.first) * self._batch, _CYCLE)
        begun = np.bincount(self._plan(number, cycles)[0][:slots], minlength=len(self._sources))
        return [
            before + cycles * share + int(here)
            for before, share, here in zip(part.drawn, part.shares, begun, strict=True)
        ]

    def _part_of(self, batch: int) -> tuple[int, _Part]:
        number = max((i for i, part in enumerate(self._parts) if part.first <= batch), default=0)
        return number, self._parts[number]

    def batch(self, index: int) -> Batch:
        """The batch of a number, wherever the stream is."""
        tokens = np.zeros((self._batch, self._context), np.int64)
        targets = np.full((self._batch, self._context), IGNORED, np.int64)
        number, part = self._part_of(index)
        first = (index - part.first) * self._batch
        spans = tuple(self._span(*self._draw(number, first + row)) for row in range(self._batch))
        for row, span in enumerate(spans):
            piece = span.source.tokens[span.start : span.end]
            tokens[row, : len(piece) - 1] = piece[:-1]
            targets[row, : len(piece) - 1] = piece[1:]
        highest = max(tokens.max(), targets.max())
        if highest >= self._vocabulary:
            names = ", ".join(sorted({span.source.name for span in spans}))
            raise SourceError(too_high(names, int(highest), self._vocabulary))
        return Batch(index, tokens, targets, spans, self._rare)

    def _table(self, source: Source, left_out: LeftOut | None) -> _Table:
        """Windows by number, if not all are read: those that come first and those that come last."""
        if self._packed and left_out is None:
            return _Table((len(source.tokens) - 1) // self._context, None)
        if self._packed:
            windows = np.arange((len(source.tokens) - 1) // self._context)
            begins, ends = windows * self._context, (windows + 1) * self._context
            of = np.searchsorted(source.starts, np.stack([begins, ends]), side="right") - 1
        else:  # documents of one token have no target
            windows = np.flatnonzero(np.diff(source.starts, append=len(source.tokens)) > 1)
            of = np.stack([windows, windows])
        if left_out is None:
            return _Table(len(windows), windows)
        is_dropped, is_deferred = (_touches(of, each) for each in (left_out.dropped, left_out.deferred))
        first, last = windows[~is_dropped & ~is_deferred], windows[~is_dropped & is_deferred]
        return _Table(len(first), np.append(first, last))

    def _count_windows(self, number: int) -> int:
        source, windows = self._sources[number], self._tables[number].count
        if windows < 1:
            raise SourceError(
                f"{source.name}: a part of {len(source.tokens)} tokens in {len(source.starts)} documents, too few for "
                f"one row of model.context={self._context}; give more data, a smaller context or another data.held_out"
            )
        return windows

    def _span(self, source: Source, window: int) -> Span:
        """A row and the target after its last token."""
        if self._packed:
            return Span(source, window * self._context, (window + 1) * self._context + 1)
        start = int(source.starts[window])
        end = int(source.starts[window + 1]) if window + 1 < len(source.starts) else len(source.tokens)
        return Span(source, start, min(end, start + self._context + 1))

    def _draw(self, part: int, sample: int) -> tuple[Source, int]:
        cycle, slot = divmod(sample, _CYCLE)
        if self._cycle[0] != (part, cycle):
            self._cycle = ((part, cycle), *self._plan(part, cycle))
        _, sources, windows = self._cycle
        return self._sources[sources[slot]], self._window(int(sources[slot]), int(windows[slot]))

    def _plan(self, part: int, cycle: int) -> tuple[Ints, Ints]:
        """Source and window of every sample of a cycle, counted from the beginning of a part."""
        first, shares, drawn = self._parts[part].first, self._parts[part].shares, self._parts[part].drawn
        order = shuffled(np.arange(_CYCLE), _CYCLE, self._key(f"mixture from {first}" if first else "mixture", cycle))
        sources = np.repeat(np.arange(len(self._sources)), shares)[order]
        windows = np.empty(_CYCLE, np.int64)
        for i, source in enumerate(self._sources):
            name = PurePath(source.name).name  # not its folder: a run keeps its order wherever its data lie
            epochs, positions = np.divmod(drawn[i] + cycle * shares[i] + np.arange(shares[i]), self._windows[i])
            for epoch in np.unique(epochs):
                here = epochs == epoch
                positions[here] = self._shuffled(i, positions[here], self._key(name, int(epoch)))
            windows[sources == i] = positions
        if self._parts[part].is_stratified:
            samples = zip(sources.tolist(), windows.tolist(), strict=True)
            rare = RareRows.of([self._rare_in(source, window) for source, window in samples])
            order = spread(np.arange(_CYCLE), rare, self._batch, first=cycle * _CYCLE % self._batch)
            sources, windows = sources[order], windows[order]
        return sources, windows

    def _rare_in(self, source: int, window: int) -> Ints:
        """The rare tokens of a row."""
        if self._rare is None:
            counts = (token_counts(each.tokens, at_least=self._vocabulary) for each in self._sources)
            self._rare = rare_tokens(sum(counts))  # type: ignore[arg-type]
        span = self._span(self._sources[source], self._window(source, window))
        tokens: Ints = np.unique(span.source.tokens[span.start : span.end]).astype(np.int64)
        return tokens[self._rare[tokens]]

    def _window(self, source: int, window: int) -> int:
        numbers = self._tables[source].numbers
        return window if numbers is None else int(numbers[window])

    def _shuffled(self, source: int, positions: Ints, key: int) -> Ints:
        """The windows that come first, shuffled, then those that come last, shuffled."""
        first = self._tables[source].first
        is_last = positions >= first
        result = np.empty_like(positions)
        result[~is_last] = shuffled(positions[~is_last], first, key)
        result[is_last] = first + shuffled(positions[is_last] - first, self._windows[source] - first, key)
        return result

    def _key(self, purpose: str, number: int) -> int:
        text = f"{self._seed} {purpose} {number}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _touches(of: Ints, documents: Ints) -> NDArray[np.bool_]:
    """Which windows, by their first and last document, contain one of these."""
    first, after = np.searchsorted(documents, of[0]), np.searchsorted(documents, of[1], side="right")
    touched: NDArray[np.bool_] = after > first
    return touched


def too_high(name: str, token: int, vocabulary: int) -> str:
    """The error text about a token id beyond the vocabulary."""
    return (
        f"{name}: token id {token} is beyond model.vocabulary={vocabulary}; "
        f"set model.vocabulary to at least {token + 1}, or tokenise the data with the right tokenizer"
    )


def apportion(weights: Sequence[float], total: int) -> list[int]:
    """Integer shares of ``total``, as near to the weights as possible, each at least 1.

    >>> apportion([0.7, 0.3, 1e-9], 10)
    [6, 3, 1]
    """
    exact = [weight / sum(weights) * (total - len(weights)) for weight in weights]
    shares = [1 + math.floor(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: math.floor(exact[i]) - exact[i])
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    return shares
