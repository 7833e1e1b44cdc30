"""Goes through every kind of loader in numbered batches, and brings it back to where it was.

A *sequence* has its batches by index. A *DataLoader* over a map-style dataset has an order, the index lists of its
sampler: the same order is drawn again from the same random state, and earlier batches are left out without being read.
A *stateful* loader says where it is (``state_dict``) and goes there (``load_state_dict``). Any other iterable only has
a next batch. An *altered* loader gives another one's batches, changed, and goes where that one goes.
"""

import hashlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from sealegs.data.sampler_state import (
    Origin,
    as_at,
    drawn_from,
    global_origins,
    has_epoch,
    has_state,
    own_origins,
    read,
    sampler_states,
    samplers_of,
)
from sealegs.data.shares import SharedOrder, rows_of_all, shared_order
from sealegs.data.stateful import (
    NOTHING,
    UNKNOWN,
    DataChanges,
    Epoch,
    Loader,
    Numbered,
    StatefulLoader,
    Wanted,
    fed_copy,
    is_torchdata,
    length_of,
    walk_rest,
    without_trace,
)
from sealegs.errors import ConfigError


def loader_of(given: Iterable[Any], *, must_reposition: bool, changes: DataChanges) -> Loader:
    """Wrap a loader by its kind; one that must be repositioned and cannot be is refused.

    ``changes`` hold wherever it goes.
    """
    if isinstance(given, AlteredLoader) and not has_state(given):
        return _Altered(given, loader_of(given.loader, must_reposition=must_reposition, changes=changes))
    refusal = cannot_reposition(given)
    if refusal and must_reposition:
        raise ConfigError(refusal)
    if refusal:
        return _Blind(given)
    if has_state(given):
        return StatefulLoader(given, must_tell=must_reposition, changes=changes)
    if isinstance(given, DataLoader):
        return _Sampled(given, must_repeat=must_reposition)
    return _Indexed(given)


def cannot_reposition(given: Any) -> str | None:
    """Why a loader cannot be brought back to an earlier batch, in a sentence; None where it can."""
    if isinstance(given, AlteredLoader) and not has_state(given):
        return cannot_reposition(given.loader)
    name = f"loader={type(given).__name__}"
    if getattr(given, "num_workers", 0) and not getattr(given, "in_order", True):
        return f"{name}: in_order=False gives batches as they get ready, in no order that comes again; leave it out"
    samplers = [] if isinstance(getattr(given, "dataset", None), IterableDataset) else samplers_of(given)
    if has_state(given):
        forgotten = [sampler for sampler in samplers if is_torchdata(given) and _is_forgotten(sampler)]
        return (
            f"sampler={type(forgotten[0]).__name__}: {type(given).__name__} does not bring its order back; use "
            "shuffle=True instead, a sampler with state_dict and load_state_dict, or a plain DataLoader"
            if forgotten
            else None
        )
    if isinstance(given, DataLoader):
        if not samplers:
            return (
                f"{name} over the IterableDataset {type(given.dataset).__name__}: it cannot be brought back to an "
                "earlier batch; use torchdata's StatefulDataLoader"
            )
        spent = [type(sampler).__name__ for sampler in samplers if isinstance(sampler, Iterator)]
        return f"sampler={spent[0]}: can be gone through once; give what it is the iterator of" if spent else None
    if _is_sequence(given):
        return None
    return (
        f"{name}: it cannot be brought back to an earlier batch; give a DataLoader, a sequence, or a loader with "
        "state_dict and load_state_dict"
    )


class AlteredLoader(ABC):
    """Gives the batches of another loader, altered the same way each time they come: a fault that is practised."""

    loader: Any

    @abstractmethod
    def altered(self, batch: Any, number: int) -> Any:
        """What is given in place of a batch, which has this number unless it names one itself."""


def _is_sequence(given: Any) -> bool:
    return hasattr(given, "__len__") and hasattr(given, "__getitem__") and not isinstance(given, Mapping)


def _is_forgotten(sampler: Any) -> bool:
    """Whether torchdata does not know this sampler, and would count its way back in a newly drawn order."""
    is_repeated = type(sampler) in (BatchSampler, SequentialSampler) or isinstance(sampler, Sequence)
    is_own = type(sampler).__module__.startswith("torchdata.")
    return not (is_repeated or is_own or has_epoch(sampler) or has_state(sampler))


class _Indexed:
    """A sequence: a list of batches, a tensor, a dataset whose items are batches."""

    def __init__(self, given: Any) -> None:
        self._given = given
        self.identity: dict[str, Any] = {"kind": "sequence", "length": len(given)}
        if (rows := rows_of_all(given)) is not None:
            self.identity["global_batch"] = rows
        self.shared = None
        self.origins: list[Origin] = []

    def state(self) -> None:
        """None: a place is a number."""

    def walk(self, epoch: Epoch, at: int, wanted: Wanted, until: int | None = None, state: Any = None) -> Numbered:
        epoch["start"] = {}
        first = int(epoch["first"])
        if (cut := epoch.get("cut")) is not None:
            first = cut["number"] - cut["done"] // int(self.identity["global_batch"])
        end = max(first + len(self._given), at)
        if until is not None:
            end = min(end, until)
        for number in range(at, end):
            if wanted(number):
                yield number, self._given[number - first]
        return end


class _Sampled:
    """A DataLoader over a map-style dataset. Random numbers that its workers draw themselves are not drawn again."""

    def __init__(self, given: DataLoader[Any], *, must_repeat: bool) -> None:
        self.identity: dict[str, Any] = {"kind": "DataLoader", "length": length_of(given)}
        self.shared = shared_order(given)
        if self.shared is not None:
            self.identity["share"] = self.shared.share.to_plain()
        self._order = given.sampler if given.batch_sampler is None else given.batch_sampler
        self.origins = [*global_origins(), *own_origins(given)]
        self._states = sampler_states(given) if must_repeat else []
        self._must_prove = must_repeat and not all(
            type(sampler).__module__.startswith("torch.") for sampler in samplers_of(given)
        )
        self._copy, self._feed = fed_copy(given)

    def state(self) -> None:
        """None: a place is a number."""

    def walk(self, epoch: Epoch, at: int, wanted: Wanted, until: int | None = None, state: Any = None) -> Numbered:
        if "cut" in epoch:
            assert self.shared is not None
            reader = self._copy, self._feed
            return (yield from walk_rest(reader, self.shared, self.origins, epoch, at, wanted, until))
        asked_for: deque[int] = deque()
        end = int(epoch["first"])

        def feed() -> Generator[Any, None, None]:
            nonlocal end
            for indices in self._ordered(epoch):
                if end == until:
                    return
                number, end = end, end + 1
                if number >= at and wanted(number):
                    asked_for.append(number)
                    yield indices

        self._feed.order = order = feed()
        try:
            with without_trace("start" in epoch):
                batches = iter(self._copy)
            for batch in batches:
                number = asked_for.popleft()
                if wanted(number):  # still: workers read ahead
                    yield number, batch
        finally:
            order.close()  # persistent workers hold on to it
        return end

    def _ordered(self, epoch: Epoch) -> Iterator[Any]:
        """The index lists of an epoch; an epoch that was begun before has its former order."""
        if "start" in epoch:
            return self._drawn_again(epoch["start"])
        before = read([*self.origins, *self._states])
        lists = iter(self._order)
        first = next(lists, NOTHING)
        if "as_then" in epoch:
            epoch["start"] = epoch.pop("as_then")
            return self._drawn_again(epoch["start"])
        epoch["start"] = drawn_from([*self.origins, *self._states], before) | {"check": check_of(first)}
        if self._must_prove:
            self._must_prove = False
            lists = self._drawn_again(epoch["start"])
            before = read(global_origins())
            first_two = [*(next(lists, NOTHING) for _ in range(2))]
            if drawn_from(global_origins(), before):
                raise ConfigError(
                    f"sampler={type(self._order).__name__}: it draws every batch from a global generator, and would "
                    "not draw it again after a rollback; let it draw from a generator of its own"
                )
            first, lists = first_two[0], chain(first_two[1:], lists)
        return (indices for indices in chain([first], lists) if indices is not NOTHING)

    def _drawn_again(self, start: Mapping[str, Any]) -> Iterator[Any]:
        """Draw the order of a start again: from the same generators, or else with the samplers' states too.

        The states come second, since some samplers report the end of their last epoch until they have begun the next.
        """
        for origins in (self.origins, [*self.origins, *self._states]):
            with as_at(start, origins):
                lists = iter(self._order)
                first = next(lists, NOTHING)
            if check_of(first) == start["check"]:
                return chain(() if first is NOTHING else (first,), lists)
        raise ConfigError(
            f"sampler={type(self._order).__name__}: it does not give the order of an epoch a second time; "
            "let it have a generator, set_epoch, or state_dict and load_state_dict"
        )


def check_of(indices: Any) -> str:
    """A digest of the first index list, which tells one order from another."""
    return hashlib.blake2b(repr(indices if indices is not NOTHING else None).encode(), digest_size=8).hexdigest()


class _Altered:
    """A loader of any other kind, whose batches are altered as they are handed out."""

    def __init__(self, given: AlteredLoader, inner: Loader) -> None:
        self._given = given
        self._inner = inner

    @property
    def identity(self) -> dict[str, Any]:
        """The other loader's: they share positions."""
        return self._inner.identity

    @property
    def shared(self) -> SharedOrder | None:
        """The other loader's."""
        return self._inner.shared

    @property
    def origins(self) -> Sequence[Origin]:
        """The other loader's."""
        return self._inner.origins

    def state(self) -> Any:
        """The other loader's."""
        return self._inner.state()

    def walk(self, epoch: Epoch, at: int, wanted: Wanted, until: int | None = None, state: Any = None) -> Numbered:
        batches = self._inner.walk(epoch, at, wanted, until, state)
        try:
            while True:
                try:
                    number, batch = next(batches)
                except StopIteration as stop:
                    end: int = stop.value
                    return end
                yield number, self._given.altered(batch, number)
        finally:
            batches.close()


class _Blind:
    """Any iterable, taken as it comes."""

    def __init__(self, given: Iterable[Any]) -> None:
        self._given = given
        self.identity = UNKNOWN
        self.shared = None
        self.origins: list[Origin] = []

    def state(self) -> None:
        """None: its place is unknown."""

    def walk(self, epoch: Epoch, at: int, wanted: Wanted, until: int | None = None, state: Any = None) -> Numbered:
        epoch["start"] = {}
        number, batches = at, iter(self._given)
        while number != until and (batch := next(batches, NOTHING)) is not NOTHING:
            number += 1
            if wanted(number - 1):
                yield number - 1, batch
        return number
