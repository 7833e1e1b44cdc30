"""Faults in the data: makes some batches bad, in the same way each time they come.

    spoiler = Spoiler([parse("random-shard:batches=40@200")], vocabulary=512)
    loader = Spoilt(loader, spoiler)                        # replaces a loader that knows its position, or
    batch = spoiler.apply(batch, number)                    # in any loop; over a list, beforehand

``text.text_of`` says what a batch may be. The loader's own batches stay as they are: bad ones are copies.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from sealegs.data.loaders import AlteredLoader
from sealegs.errors import ConfigError
from sealegs.faults.contract import Fault
from sealegs.faults.data import (
    DataFault,
    DuplicateBatch,
    EncodingJunk,
    MaskedLabels,
    PermutedVocabulary,
    PoisonedSource,
    RandomShard,
    RareTokens,
    RepeatedNgram,
    ReplayedBatches,
    ShiftedLabels,
)
from sealegs.faults.rewording import one_cycle, permuted, raw_numbers, repeated, wrongly_decoded
from sealegs.faults.strikes import place, refuse_twice_or_nowhere
from sealegs.faults.text import BatchText, Ints, number_of, sources_of, text_of, with_changes

IGNORED = -100
"""The label that losses of torch leave out."""
RARE = 64
"""How many of the least frequent ids are rare."""
HANDED_OUT = "spoilt_next_batch"
"""The key of the next batch's number in a position."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoiltBatch:
    """What a fault did to one batch, each time it came."""

    number: int
    fault: DataFault
    deed: str

    def __str__(self) -> str:
        """``batch 203: random-shard:batches=40@200 put random tokens into 8 of 8 rows``"""
        return f"batch {self.number}: {self.fault} {self.deed}"


class Spoiler:
    """Makes batches bad. The effect depends on the fault and the batch's number, not on when the batch comes."""

    strikes: list[SpoiltBatch]
    """The strikes so far."""
    say: Callable[[str], None] | None
    """Called with a line for each strike; may be set later."""
    batch_of: Callable[[int], Any] | None
    """Gives the batch of any number, if batches have one: ``Spoilt`` sets it. Otherwise the spoiler keeps batches."""

    def __init__(
        self,
        faults: Iterable[Fault],
        *,
        vocabulary: int | None = None,
        rare: Iterable[int] | None = None,
        sources: Callable[[Any], Sequence[str] | None] = sources_of,
        rank: int | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """``vocabulary`` is the number of token ids, ``rare`` the ids that are rare in the data.

        Without them the spoiler learns them from the batches before the first that needs them: ids up to the highest
        seen, and the 64 least seen ones. A process that resumes from a checkpoint learns them anew from other batches:
        give both if that matters. ``sources`` gives the source of each row of a batch. Each strike is kept in
        ``strikes`` and passed to ``say`` as a line; for a poisoned source only the first.
        """
        here, ranks = place(rank)
        self.strikes = []
        self._faults: list[DataFault] = []
        self._sources = sources
        self.say = say
        self.batch_of = None
        self._vocabulary = vocabulary
        self._rare = None if rare is None else np.array(sorted(set(rare)), np.int64)
        self._seen = np.zeros(0, np.int64)
        """How often each id was seen."""
        self._struck: set[DataFault] = set()
        self._stuck: dict[DuplicateBatch, tuple[int, Any]] = {}
        self._kept: dict[int, Any] = {}
        """Batches to repeat later, by number; kept until the end, since a rollback may need them again."""
        self._is_known = False
        """Whether a batch has come, and fits the faults."""
        if vocabulary is not None and vocabulary < 1:
            raise ConfigError(f"vocabulary={vocabulary}: the number of token ids, at least 1")
        if self._rare is not None and not (len(self._rare) and self._rare[0] >= 0):
            raise ConfigError(f"rare={rare}: one token id or more, none of them negative")
        for fault in faults:
            if not isinstance(fault, DataFault):
                raise ConfigError(f"{fault}: strikes no data; give faults of model and optimizer to inject")
            refuse_twice_or_nowhere(fault, self._faults, ranks)
            if fault.rank in (None, here):
                self._faults.append(fault)

    def apply(self, batch: T, number: int) -> T:
        """The batch of a number, or a bad copy of it. With placebos only, it is the batch itself."""
        self._refuse_unless_fit(batch, number)
        self._keep(batch, number)
        due = [fault for fault in self._faults if fault.is_at(number)]
        if not due and self._is_learning():
            self._learn(text_of(batch))
        for fault in due:
            bad = self._spoil(fault, batch, number)
            batch = batch if fault.is_placebo else bad
        return batch

    def pending(self) -> tuple[DataFault, ...]:
        """Faults of this rank that have struck no batch: none of theirs came, or none had a row of the source."""
        return tuple(fault for fault in self._faults if fault not in self._struck)

    def _refuse_unless_fit(self, batch: Any, number: int) -> None:
        """Refuse a batch that cannot be struck at the first one, not only where the fault strikes."""
        if self._is_known or not self._faults:
            return
        text = text_of(batch)
        for fault in self._faults:
            if isinstance(fault, ShiftedLabels | MaskedLabels) and text.labels is None:
                raise ConfigError(f"{fault}: the batches have tokens and no labels; give labels as a part of their own")
            if isinstance(fault, PoisonedSource) and self._sources(batch) is None:
                raise ConfigError(f"{fault}: the batches do not say their rows' sources; give Spoiler sources=")
            length = text.tokens.shape[-1]
            if isinstance(fault, RepeatedNgram) and fault.length >= length:
                raise ConfigError(f"{fault}: length={fault.length}: the rows have {length} tokens; repeat fewer")
            if isinstance(fault, ReplayedBatches):
                is_late = fault.replayed.start < number < fault.step + fault.batches
                if is_late and not self._can_ask_for_any(batch):
                    raise never_seen(fault, fault.replayed.start)
        self._is_known = True

    def _spoil(self, fault: DataFault, batch: Any, number: int) -> Any:
        if isinstance(fault, DuplicateBatch):
            return self._stick(fault, batch, number)
        if isinstance(fault, ReplayedBatches):
            return self._replay(fault, batch, number)
        text = text_of(batch)
        if isinstance(fault, ShiftedLabels):
            assert text.labels is not None
            self._report(fault, number, "shifted the labels")
            return text.put(text.tokens, np.roll(text.labels, -1, axis=-1))
        if isinstance(fault, MaskedLabels):
            assert text.labels is not None
            self._report(fault, number, "masked every label")
            return text.put(text.tokens, np.full_like(text.labels, IGNORED))
        rows = np.ones(text.tokens.shape[:-1], np.bool_)
        if isinstance(fault, RepeatedNgram):
            self._report(fault, number, f"repeated a span of {fault.length} tokens in {rows.size} of {rows.size} rows")
            return rewritten(text, rows, repeated(text, fault, number))
        if isinstance(fault, PermutedVocabulary):
            ids = self._id_count(text)
            self._report(fault, number, f"permuted {ids} token ids in {rows.size} of {rows.size} rows")
            return permuted(text, one_cycle(ids, fault.seed, fault.name))
        if isinstance(fault, EncodingJunk):
            self._report(fault, number, f"put wrongly decoded text into {rows.size} of {rows.size} rows")
            return rewritten(text, rows, wrongly_decoded(text, fault, self._rare_ids(text)))
        assert isinstance(fault, RandomShard | RareTokens | PoisonedSource)
        if isinstance(fault, PoisonedSource):
            sources = self._sources(batch) or ()
            if len(sources) != rows.size:
                raise ConfigError(f"{fault}: batch {number} has {rows.size} rows, and names {len(sources)} sources")
            rows = np.array([source == fault.source for source in sources]).reshape(rows.shape)
            if not rows.any():
                return batch
        kind = "rare" if isinstance(fault, RareTokens) else "random"
        self._report(fault, number, f"put {kind} tokens into {rows.sum()} of {rows.size} rows")
        return rewritten(text, rows, self._drawn(fault, text, number))

    def _stick(self, fault: DuplicateBatch, batch: Any, number: int) -> Any:
        """The first batch of the fault again, with the number of the one that it replaces."""
        first, stuck = self._stuck.setdefault(fault, (number, copy_of(batch)))
        if number == first:
            return batch
        self._report(fault, number, f"gave batch {first} again")
        return in_place_of(number, stuck)

    def _replay(self, fault: ReplayedBatches, batch: Any, number: int) -> Any:
        """The batch that came ``back`` batches before again, with the number of the one that it replaces."""
        first = fault.original(number)
        if self._can_ask_for_any(batch):
            assert self.batch_of is not None
            old = self.batch_of(first)
        elif first in self._kept:
            old = self._kept[first]
        else:
            raise never_seen(fault, first)
        self._report(fault, number, f"gave batch {first} again")
        return in_place_of(number, old)

    def _keep(self, batch: Any, number: int) -> None:
        """Keep batches to repeat later, if the loader cannot give them a second time."""
        replays = (fault for fault in self._faults if isinstance(fault, ReplayedBatches))
        if any(number in fault.replayed for fault in replays) and not self._can_ask_for_any(batch):
            self._kept[number] = copy_of(batch)

    def _can_ask_for_any(self, batch: Any) -> bool:
        """Whether the loader gives batches by number; without numbers its ``batch`` may mean something else."""
        return self.batch_of is not None and number_of(batch) is not None

    def _drawn(self, fault: RandomShard | RareTokens | PoisonedSource, text: BatchText, number: int) -> Ints:
        """Tokens for every position of a batch, and for one more position at the end of each row."""
        shape = (*text.tokens.shape[:-1], text.tokens.shape[-1] + 1)
        raw = raw_numbers(math.prod(shape), fault.seed, fault.name, number).reshape(shape)
        if isinstance(fault, RareTokens):
            rare = self._rare_ids(text)
            return np.take(rare, raw % np.uint64(len(rare)))
        return (raw % np.uint64(self._id_count(text))).astype(np.int64)

    def _rare_ids(self, text: BatchText) -> Ints:
        if self._rare is None:
            ids = np.flatnonzero(self._counts(text))
            self._rare = ids[np.argsort(self._seen[ids], kind="stable")][:RARE]
        return self._rare

    def _id_count(self, text: BatchText) -> int:
        if self._vocabulary is None:
            self._vocabulary = len(self._counts(text))
        return self._vocabulary

    def _counts(self, text: BatchText) -> Ints:
        """How often each id was seen, or occurs in the batch to spoil if none was seen yet."""
        if not len(self._seen):
            self._learn(text)
        return self._seen

    def _learn(self, text: BatchText) -> None:
        counts = np.bincount(text.tokens[text.tokens >= 0], minlength=len(self._seen))
        counts[: len(self._seen)] += self._seen
        self._seen = counts

    def _is_learning(self) -> bool:
        """Whether a fault will need what only batches can tell."""
        return any(
            self._rare is None if isinstance(fault, RareTokens | EncodingJunk) else self._vocabulary is None
            for fault in self._faults
            if isinstance(fault, RandomShard | RareTokens | PoisonedSource | PermutedVocabulary | EncodingJunk)
        )

    def _report(self, fault: DataFault, number: int, deed: str) -> None:
        if fault.is_placebo:
            deed += ", as a placebo: the batch is as it came"
        strike = SpoiltBatch(number=number, fault=fault, deed=deed)
        self.strikes.append(strike)
        is_endless = isinstance(fault, PoisonedSource) and fault in self._struck
        self._struck.add(fault)
        if self.say is not None and not is_endless:
            self.say(str(strike))


def rewritten(text: BatchText, rows: NDArray[np.bool_], drawn: Ints) -> Any:
    """A copy of a batch with other tokens in some rows; positions without a target stay without one."""
    mask = rows[..., None]
    tokens = np.where(mask, drawn[..., :-1], text.tokens)
    labels = text.labels
    if labels is not None and labels.shape == tokens.shape:  # otherwise a label belongs to a whole row, and stays
        counts = labels >= 0
        is_same = np.array_equal(labels[counts], text.tokens[counts])  # then the model shifts the labels itself
        labels = np.where(mask & counts, drawn[..., :-1] if is_same else drawn[..., 1:], labels)
    return text.put(tokens, labels)


def copy_of(batch: Any) -> Any:
    """A batch with its own copy of tokens and labels: loops may write into a batch."""
    text = text_of(batch)
    return text.put(text.tokens, text.labels)


def in_place_of(number: int, batch: Any) -> Any:
    """A copy of a batch with the number of another, if batches have one."""
    again = copy_of(batch)
    return again if number_of(again) is None else with_changes(again, {"index": number})


def never_seen(fault: ReplayedBatches, number: int) -> ConfigError:
    """The error about a batch to repeat that has not come, such as after a resume."""
    cure = "start at that batch or before, or take a loader that gives any batch by its number"
    return ConfigError(f"{fault}: batch {number} is to come again, and has not come in this process; {cure}")


class Spoilt(AlteredLoader):
    """A loader with some bad batches. All else is the loader's own: position, length, weights of sources.

    A batch is known by its own number (``index``, as in the lab), otherwise by how many came before it, over all
    epochs. That count is part of ``state_dict`` if the loader has one; if the loader has none, neither has this.
    """

    def __init__(self, loader: Any, spoiler: Spoiler) -> None:
        self.loader = loader
        self.spoiler = spoiler
        spoiler.batch_of = getattr(loader, "batch", None)
        self._next: int | None = 0
        """The number of the next batch; None if only the loader knows."""

    def __iter__(self) -> Iterator[Any]:
        return map(self._spoilt, self.loader)  # starts at once: for some loaders that is the start of an epoch

    def __len__(self) -> int:
        return len(self.loader)

    def next(self) -> Any:
        """The next batch of a loader with a ``next`` method, such as the lab's stream."""
        return self._spoilt(self.loader.next())

    def batch(self, number: int) -> Any:
        """The batch of a number, from a loader that can give any, such as the lab's stream."""
        return self.spoiler.apply(self.loader.batch(number), number)

    def altered(self, batch: Any, number: int) -> Any:
        """What is given in place of a batch; the lab's batches know their numbers themselves."""
        own = number_of(batch)
        return self.spoiler.apply(batch, number if own is None else own)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # private names and the sequence protocol of the loader do not hold here
            raise AttributeError(name)
        found = getattr(self.loader, name)
        if name == "state_dict":
            return lambda: {**found(), HANDED_OUT: self._next}
        if name == "load_state_dict":
            return partial(self._go_to, found)
        return found

    def _go_to(self, load: Callable[[Mapping[str, Any]], None], state: Mapping[str, Any]) -> None:
        load({name: value for name, value in state.items() if name != HANDED_OUT})
        self._next = state.get(HANDED_OUT)

    def _spoilt(self, batch: Any) -> Any:
        number = number_of(batch)
        if number is None:
            number = self._next
        if number is None:
            raise ConfigError(
                "the loader's position was saved without Spoilt, which counts batches: start from its own"
            )
        self._next = number + 1
        return self.altered(batch, number)
