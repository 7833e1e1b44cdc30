"""A loader in, numbered batches out: how each kind of loader is gone through, and brought back to where it was.

A *sequence* has its batches by index. A *DataLoader* over a map-style dataset has an order, the index lists of its
sampler: the same order is drawn again from what it was drawn from, and what was done is left out of it without being
read. A *stateful* loader says where it is (``state_dict``) and goes there (``load_state_dict``). Of any other iterable
nothing is known but its next batch.
"""

import copy
import hashlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NotRequired, Protocol, TypeAlias, TypedDict

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from sealegs.errors import ConfigError
from sealegs.recovery.origins import (
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
from sealegs.recovery.plain import live, plain


class Epoch(TypedDict):
    """What an epoch is gone through again from, as JSON values."""

    number: int
    first: int
    """The number of its first batch, over all epochs."""
    is_after_end: bool
    """Whether the epoch before it had been gone through; else the loop had left that."""
    start: NotRequired[dict[str, Any]]
    """What its order was drawn from; since it was begun."""
    end: NotRequired[int]
    """The number after its last batch; since that was seen."""
    dropped: NotRequired[list[list[int]]]
    """Ranges that were left out of it, and are to be handed out at its end."""
    marks: NotRequired[dict[str, Any]]
    """The state of a stateful loader before each of those, by its first number."""
    end_state: NotRequired[Any]
    """The state of such a loader at the end."""


Wanted: TypeAlias = Callable[[int], bool]
"""Whether the batch of a number is to be handed out; asked as late as can be, since it may change."""
Numbered: TypeAlias = Generator[tuple[int, Any], None, int]
"""Batches with their numbers; at the end, the number after the last."""

UNKNOWN: dict[str, Any] = {"kind": "any"}
"""The identity of a loader whose places nobody can tell."""

_NOTHING: Any = object()


@dataclass(slots=True)
class Changes:
    """What was changed about the data of a run."""

    swaps: dict[str, float] = field(default_factory=dict)
    """Sources and their new weights."""
    is_stratified: bool = False

    def apply(self, given: Any) -> None:
        """To a loader that may not know of it."""
        for source, weight in self.swaps.items():
            given.reweight(source, weight)
        if self.is_stratified:
            given.stratify()


class Loader(Protocol):
    """One kind of loader."""

    @property
    def identity(self) -> dict[str, Any]:
        """What a loader must have in common with another to be gone to a position of that."""

    def state(self) -> Any:
        """Where it is, for a kind whose places are more than numbers; else None."""

    def walk(self, epoch: Epoch, at: int, wanted: Wanted, until: int | None, state: Any) -> Numbered:
        """The batches of an epoch from number ``at`` on, where the loader's state was ``state``.

        They end at number ``until``: the end of the epoch if it is known, or where the loop over it was left. An epoch
        that has not been begun yet is begun, and what it can be repeated from is put into ``epoch``.
        """

    def again(self, epoch: Epoch, at: int, wanted: Wanted, state: Any) -> Numbered:
        """Batches that ``walk`` has left out (``epoch["dropped"]``), from number ``at`` on, after the end of an epoch.

        Leaves the loader where it was at that end.
        """


def loader_of(given: Iterable[Any], *, must_reposition: bool, defers: bool, changes: "Changes") -> Loader:
    """The kind that a loader is of; refused where it has to be brought back and cannot be.

    ``defers`` if it is asked for batches ``again``; ``changes`` hold wherever it goes.
    """
    refusal = cannot_reposition(given)
    if refusal and must_reposition:
        raise ConfigError(refusal)
    if refusal:
        return _Blind(given)
    if has_state(given):
        return _Stateful(given, must_tell=must_reposition, defers=defers, changes=changes)
    if isinstance(given, DataLoader):
        return _Sampled(given, must_repeat=must_reposition)
    return _Indexed(given)


def cannot_reposition(given: Any) -> str | None:
    """Why a loader cannot be brought back to an earlier batch, in a sentence; None where it can."""
    name = f"loader={type(given).__name__}"
    if getattr(given, "num_workers", 0) and not getattr(given, "in_order", True):
        return f"{name}: in_order=False gives batches as they get ready, in no order that comes again; leave it out"
    samplers = [] if isinstance(getattr(given, "dataset", None), IterableDataset) else samplers_of(given)
    if has_state(given):
        is_torchdata = any(each.__module__.startswith("torchdata.") for each in type(given).__mro__)
        forgotten = [sampler for sampler in samplers if is_torchdata and _is_forgotten(sampler)]
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


def _is_sequence(given: Any) -> bool:
    return hasattr(given, "__len__") and hasattr(given, "__getitem__") and not isinstance(given, Mapping)


def _is_forgotten(sampler: Any) -> bool:
    """Whether torchdata, which does not know this sampler, would count its way back in an order drawn anew."""
    is_repeated = type(sampler) in (BatchSampler, SequentialSampler) or isinstance(sampler, Sequence)
    is_own = type(sampler).__module__.startswith("torchdata.")
    return not (is_repeated or is_own or has_epoch(sampler) or has_state(sampler))


def _length(given: Any) -> int | None:
    if isinstance(getattr(given, "dataset", None), IterableDataset):
        return None  # torch takes having been asked for a promise, and warns when it is broken
    try:
        return len(given)
    except (TypeError, NotImplementedError):
        return None


class _Indexed:
    """A sequence: a list of batches, a tensor, a dataset whose items are batches."""

    def __init__(self, given: Any) -> None:
        self._given = given
        self.identity = {"kind": "sequence", "length": len(given)}

    def state(self) -> None:
        """A place is a number."""

    def walk(self, epoch: Epoch, at: int, wanted: Wanted, until: int | None = None, state: Any = None) -> Numbered:
        epoch["start"] = {}
        end = int(epoch["first"]) + len(self._given)
        if until is not None:
            end = min(end, until)
        for number in range(at, end):
            if wanted(number):
                yield number, self._given[number - epoch["first"]]
        return end

    def again(self, epoch: Epoch, at: int, wanted: Wanted, state: Any) -> Numbered:
        return (yield from self.walk(epoch, at, wanted))


class _Sampled:
    """A DataLoader over a map-style dataset. What its workers draw at random by themselves is not drawn again."""

    def __init__(self, given: DataLoader[Any], *, must_repeat: bool) -> None:
        self.identity = {"kind": "DataLoader", "length": _length(given)}
        self._order = given.sampler if given.batch_sampler is None else given.batch_sampler
        self._origins = [*global_origins(), *own_origins(given)]
        self._states = sampler_states(given) if must_repeat else []
        self._must_prove = must_repeat and not all(
            type(sampler).__module__.startswith("torch.") for sampler in samplers_of(given)
        )
        # a copy, which shares everything with the user's loader but the order in which it reads
        self._feed = _Feed()
        self._copy = copy.copy(given)
        place = "sampler" if given.batch_sampler is None else "batch_sampler"
        vars(self._copy).update({place: self._feed, "_iterator": None})

    def state(self) -> None:
        """A place is a number."""

    def walk(self, epoch: Epoch, at: int, wanted: Wanted, until: int | None = None, state: Any = None) -> Numbered:
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
            with _without_trace("start" in epoch):
                batches = iter(self._copy)
            for batch in batches:
                number = asked_for.popleft()
                if wanted(number):  # still: workers read ahead
                    yield number, batch
        finally:
            order.close()  # workers that stay hold on to it
        return end

    def again(self, epoch: Epoch, at: int, wanted: Wanted, state: Any) -> Numbered:
        return (yield from self.walk(epoch, at, wanted))

    def _ordered(self, epoch: Epoch) -> Iterator[Any]:
        """The index lists of an epoch; those of an epoch that was begun before, in the order of then."""
        if "start" in epoch:
            return self._drawn_again(epoch["start"])
        before = read([*self._origins, *self._states])
        lists = iter(self._order)
        first = next(lists, _NOTHING)
        epoch["start"] = drawn_from([*self._origins, *self._states], before) | {"check": _check(first)}
        if self._must_prove:
            self._must_prove = False
            lists = self._drawn_again(epoch["start"])
            before = read(global_origins())
            first_two = [*(next(lists, _NOTHING) for _ in range(2))]
            if drawn_from(global_origins(), before):
                raise ConfigError(
                    f"sampler={type(self._order).__name__}: it draws every batch from a global generator, and would "
                    "not draw it again after a rollback; let it draw from a generator of its own"
                )
            first, lists = first_two[0], chain(first_two[1:], lists)
        return (indices for indices in chain([first], lists) if indices is not _NOTHING)

    def _drawn_again(self, start: Mapping[str, Any]) -> Iterator[Any]:
        """The order that was drawn at a start: from the same generators, and by the sampler's state if it takes that.

        The state comes second, since some say where their last epoch ended until they have begun the next.
        """
        for origins in (self._origins, [*self._origins, *self._states]):
            with as_at(start, origins):
                lists = iter(self._order)
                first = next(lists, _NOTHING)
            if _check(first) == start["check"]:
                return chain(() if first is _NOTHING else (first,), lists)
        raise ConfigError(
            f"sampler={type(self._order).__name__}: it does not give the order of an epoch a second time; "
            "let it have a generator, set_epoch, or state_dict and load_state_dict"
        )


def _without_trace(is_begun: bool) -> AbstractContextManager[None]:
    """Whenever a loader begins it draws a seed for its workers: of the numbers of the run, only for a new epoch."""
    return torch.random.fork_rng(devices=[]) if is_begun else nullcontext()


class _Feed:
    """In the place of a sampler: hands on the index lists that are to be read next."""

    order: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.order


def _check(indices: Any) -> str:
    """Tells one order from another by its first list."""
    return hashlib.blake2b(repr(indices if indices is not _NOTHING else None).encode(), digest_size=8).hexdigest()


class _Stateful:
    """A loader that says where it is and goes there: torchdata's, the lab's stream, the user's own.

    A new epoch begins with ``iter``, after the end of the one before; the same holds when that is gone through again.
    """

    def __init__(self, given: Any, *, must_tell: bool, defers: bool, changes: "Changes") -> None:
        self._given = given
        self._must_tell = must_tell
        self._defers = defers
        self._changes = changes
        self._origins = own_origins(given)
        self._is_loaded = False
        """Whether no batch has come since a state was loaded."""
        self._has_moved = False
        """Whether a batch has come, or a state was loaded: else the loader is where the user has brought it."""
        self.identity = {"kind": "stateful", "length": _length(given), "workers": getattr(given, "num_workers", None)}

    def state(self) -> Any:
        with _without_trace(True):  # torchdata's loader may begin, to find out
            return plain(self._given.state_dict(), f"loader={type(self._given).__name__}")

    def walk(self, epoch: Epoch, at: int, wanted: Wanted, until: int | None = None, state: Any = None) -> Numbered:
        marks = epoch.setdefault("marks", {}) if self._defers else None
        return (yield from self._walk(epoch, at, wanted, until, state, marks))

    def again(self, epoch: Epoch, at: int, wanted: Wanted, state: Any) -> Numbered:
        """From the state before each of the ranges that were left out."""
        if "end_state" not in epoch:
            epoch["end_state"] = self.state()
        for first, end in epoch["dropped"]:
            if end > at:
                here = state if first < at else epoch["marks"][str(first)]
                yield from self._walk(epoch, max(first, at), wanted, end, here, None)
        self._load(epoch["end_state"])
        return int(epoch["end"])

    def _walk(
        self, epoch: Epoch, at: int, wanted: Wanted, until: int | None, state: Any, marks: dict[str, Any] | None
    ) -> Numbered:
        """``marks`` takes the state before each range that is left out, by its first number."""
        if at == until:
            if state is not None:
                self._load(state)
            return at
        number, is_leaving_out = at, False
        with ExitStack() as lent:
            batches, start = self._opened(epoch, state, lent)
            while number != until:
                is_wanted = wanted(number)
                if marks is not None and not is_wanted and not is_leaving_out:
                    is_known = number == at and state is not None and "start" in epoch
                    marks[str(number)] = state if is_known else self.state()
                is_leaving_out = not is_wanted
                batch = next(batches, _NOTHING)
                self._is_loaded, self._has_moved = False, True
                lent.close()
                if "start" not in epoch:
                    epoch["start"] = start()
                if batch is _NOTHING:
                    break
                number += 1
                if is_wanted:
                    yield number - 1, batch
        return number

    def _opened(self, epoch: Epoch, state: Any, lent: ExitStack) -> tuple[Iterator[Any], Callable[[], dict[str, Any]]]:
        """An iterator over an epoch from a state, or from the start; what it began from is known after a batch.

        ``lent`` is to be closed then.
        """
        is_new = "start" not in epoch
        if state is not None and is_new:
            self._load(state)
        if self._is_loaded:
            self.state()  # else torchdata's loader takes that up when it begins, and nobody knows what from
        lent.enter_context(as_at(epoch.get("start", {}), self._origins))
        if state is not None and not is_new:
            self._load(state)
        elif self._has_moved:
            self._forget_last_epoch()
        before = read(self._origins)
        with _without_trace(not is_new):
            batches = iter(self._given)
        told = {"state": self.state()} if is_new and self._must_tell else {}
        return batches, lambda: drawn_from(self._origins, before) | ({} if epoch["is_after_end"] else told)

    def _forget_last_epoch(self) -> None:
        """Until it has begun an epoch, torchdata's StatefulDistributedSampler tells where the last one ended.

        It even takes that up, if it was loaded.
        """
        for sampler in samplers_of(self._given):
            if hasattr(sampler, "yielded") and hasattr(sampler, "next_yielded"):
                sampler.yielded, sampler.next_yielded = 0, None

    def _load(self, state: Any) -> None:
        self._given.load_state_dict(live(state))
        self._is_loaded = self._has_moved = True
        self._changes.apply(self._given)


class _Blind:
    """Any iterable: it is gone through as it comes."""

    def __init__(self, given: Iterable[Any]) -> None:
        self._given = given
        self.identity = UNKNOWN

    def state(self) -> None:
        """Nobody knows."""

    def walk(self, epoch: Epoch, at: int, wanted: Wanted, until: int | None = None, state: Any = None) -> Numbered:
        epoch["start"] = {}
        number = at
        for batch in self._given:
            number += 1
            if wanted(number - 1):
                yield number - 1, batch
        return number

    def again(self, epoch: Epoch, at: int, wanted: Wanted, state: Any) -> Numbered:
        raise AssertionError("is refused where batches are deferred")
