"""The protocol of all loaders, and the wrapper for loaders that report their own state.

``Loader`` is the protocol that ``data/position.py`` works with, and ``Epoch`` what it remembers of an epoch.
``StatefulLoader`` wraps torchdata's loader, the lab's stream, or the user's own.
"""

import copy
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, NotRequired, Protocol, TypeAlias, TypedDict

import torch
from torch.utils.data import DataLoader, IterableDataset

from sealegs.data.sampler_state import Origin, as_at, drawn_from, own_origins, read, samplers_of
from sealegs.data.shares import Cut, Share, SharedOrder, rows_of_all, shared_order
from sealegs.errors import ConfigError
from sealegs.state.serialization import live, plain


class Epoch(TypedDict):
    """What an epoch can be repeated from, as JSON values."""

    number: int
    first: int
    """The number of its first batch, over all epochs."""
    is_after_end: bool
    """Whether the epoch before it ran to its end; otherwise the loop left that one early."""
    start: NotRequired[dict[str, Any]]
    """What its order was drawn from; present once it has begun."""
    as_then: NotRequired[dict[str, Any]]
    """The start that it had before a rollback: begun again, it draws as a new epoch does, but has that order."""
    end: NotRequired[int]
    """The number after its last batch; present once that was seen, or is known."""
    cut: NotRequired[Cut]
    """Where its rest was divided anew, among other ranks or into other batches."""


Wanted: TypeAlias = Callable[[int], bool]
"""Whether a batch is to be handed out; called as late as possible, since the answer may change."""
Numbered: TypeAlias = Generator[tuple[int, Any], None, int]
"""Batches with their numbers; returns the number after the last."""

UNKNOWN: dict[str, Any] = {"kind": "any"}
"""The identity of a loader whose position is unknown."""

NOTHING: Any = object()
"""Stands for the end of the batches."""


@dataclass(slots=True)
class DataChanges:
    """What recovery has changed about the data of a run."""

    swaps: dict[str, float] = field(default_factory=dict)
    """Sources and their new weights."""
    is_stratified: bool = False

    def apply(self, given: Any) -> None:
        """Apply the changes to a loader that may not have them."""
        for source, weight in self.swaps.items():
            given.reweight(source, weight)
        if self.is_stratified:
            given.stratify()


class Loader(Protocol):
    """One kind of loader."""

    @property
    def identity(self) -> dict[str, Any]:
        """What two loaders must have in common to share positions."""

    @property
    def shared(self) -> SharedOrder | None:
        """The order of which it reads its rank's share, where it says so."""

    @property
    def origins(self) -> Sequence[Origin]:
        """What the order of an epoch is drawn from."""

    def state(self) -> Any:
        """Its state, for kinds whose position is more than a number; else None."""

    def walk(self, epoch: Epoch, at: int, wanted: Wanted, until: int | None, state: Any) -> Numbered:
        """The batches of an epoch from number ``at`` on, where the loader's state was ``state``.

        They end at number ``until``: the end of the epoch if it is known, or where the loop left it. A new epoch begins
        here, and ``epoch`` gets what it can be repeated from.
        """


def length_of(given: Any) -> int | None:
    """How many batches a loader has, where it says so."""
    if isinstance(getattr(given, "dataset", None), IterableDataset):
        return None  # to torch, asking for the length is a promise; it warns when that is broken
    try:
        return len(given)
    except (TypeError, NotImplementedError):
        return None


def without_trace(is_begun: bool) -> AbstractContextManager[None]:
    """Keep the run's random state when a loader that was begun before begins again: each start draws a seed for the
    workers."""
    return torch.random.fork_rng(devices=[]) if is_begun else nullcontext()


def differences(was: Any, now: Any, name: str = "its state") -> list[str]:
    """A few words for each value that differs between two states of a loader, as JSON values.

    >>> differences({"i": 200, "seed": 1}, {"i": 207, "seed": 1}), differences([1, 2], [1, 2])
    (['i was 200 and is 207'], [])
    """
    if isinstance(was, dict) and isinstance(now, dict) and was.keys() == now.keys():
        return [told for key in was for told in differences(was[key], now[key], str(key))]
    return [] if was == now else [f"{name} was {was!a:.60} and is {now!a:.60}"]


class StatefulLoader:
    """A loader that says where it is and goes there: torchdata's, the lab's stream, the user's own.

    A new epoch begins with ``iter``, after the end of the one before; so it does when that is gone through again.
    """

    def __init__(self, given: Any, *, must_tell: bool, changes: DataChanges) -> None:
        self._given = given
        self._must_tell = must_tell
        self._changes = changes
        self.origins = own_origins(given)
        self.shared = shared_order(given)
        self._is_loaded = False
        """Whether no batch has come since a state was loaded."""
        self._has_moved = False
        """Whether a batch has come or a state was loaded; otherwise the loader is where the user has brought it."""
        self.misplaced = ""
        """How the state that the loader tells of differs from the one that was loaded last."""
        self.cannot_tell = ""
        """Why nobody can say that."""
        self.identity = {"kind": "stateful", "length": length_of(given), "workers": getattr(given, "num_workers", None)}
        if self.shared is not None:
            self.identity["share"] = self.shared.share.to_plain()
        elif (rows := rows_of_all(given)) is not None:
            self.identity["global_batch"] = rows

    def state(self) -> Any:
        """Its state, as JSON values."""
        with without_trace(True):  # torchdata's loader may begin in order to tell
            return plain(self._given.state_dict(), f"loader={type(self._given).__name__}")

    def walk(self, epoch: Epoch, at: int, wanted: Wanted, until: int | None = None, state: Any = None) -> Numbered:
        """From a state, or from the start; batches that are not wanted are read, too, and left out."""
        if "cut" in epoch:
            assert self.shared is not None
            number = yield from walk_rest(
                plain_reader(self._given), self.shared, self.origins, epoch, at, wanted, until
            )
            self._has_moved = True
            return number
        if at == until:
            if state is not None:
                self._load(state)
                length: Any = self.identity["length"]
                if length is not None and at - epoch["first"] < length:  # left before its end: the next begins anew
                    with without_trace(True):
                        iter(self._given)
            return at
        number = at
        with ExitStack() as lent:
            batches, start = self._opened(epoch, state, lent)
            while number != until:
                is_wanted = wanted(number)
                batch = next(batches, NOTHING)
                self._is_loaded, self._has_moved = False, True
                lent.close()
                if "start" not in epoch:
                    epoch["start"] = start()
                if batch is NOTHING:
                    break
                number += 1
                if is_wanted:
                    yield number - 1, batch
        return number

    def _opened(self, epoch: Epoch, state: Any, lent: ExitStack) -> tuple[Iterator[Any], Callable[[], dict[str, Any]]]:
        """An iterator over an epoch from a state or from its start, and a function for what it began from.

        Call the function after the first batch, and close ``lent`` then.
        """
        is_new = "start" not in epoch
        if state is not None and is_new:
            self._load(state)
        if self._is_loaded:
            self.state()  # otherwise torchdata's loader uses it up at its start, and what it began from is lost
        lent.enter_context(as_at(epoch.get("start", epoch.pop("as_then", {})), self.origins))
        if state is not None and not is_new:
            self._load(state)
        elif self._has_moved:
            self._forget_last_epoch()
        before = read(self.origins)
        with without_trace(not is_new):
            batches = iter(self._given)
        told = {"state": self.state()} if is_new and self._must_tell else {}
        return batches, lambda: drawn_from(self.origins, before) | ({} if epoch["is_after_end"] else told)

    def _forget_last_epoch(self) -> None:
        """Reset torchdata's StatefulDistributedSampler, which reports the end of its last epoch until it begins the
        next.

        It even resumes there, if that state was loaded.
        """
        for sampler in samplers_of(self._given):
            if hasattr(sampler, "yielded") and hasattr(sampler, "next_yielded"):
                sampler.yielded, sampler.next_yielded = 0, None

    def _load(self, state: Any) -> None:
        self._given.load_state_dict(live(state))
        self._is_loaded = self._has_moved = True
        self._compare_with(state)
        self._changes.apply(self._given)

    def _compare_with(self, state: Any) -> None:
        self.misplaced = self.cannot_tell = ""
        if is_torchdata(self._given):
            self.cannot_tell = "torchdata's loader tells where it is only by beginning to read"
            return
        try:
            self.misplaced = "; ".join(differences(state, self.state())[:3])
        except ConfigError as error:
            self.cannot_tell = str(error)


def is_torchdata(given: Any) -> bool:
    """Whether it is a loader of torchdata, or made from one."""
    return any(each.__module__.startswith("torchdata.") for each in type(given).__mro__)


class Feed:
    """Stands in for a sampler, and gives the index lists that are to be read next."""

    order: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.order


def fed_copy(given: DataLoader[Any]) -> tuple[DataLoader[Any], Feed]:
    """A loader that shares everything with a user's but the order in which it reads."""
    feed, twin = Feed(), copy.copy(given)
    place = "sampler" if given.batch_sampler is None else "batch_sampler"
    vars(twin).update({place: feed, "_iterator": None})
    return twin, feed


def plain_reader(given: Any) -> tuple[DataLoader[Any], Feed]:
    """A plain DataLoader that reads as a stateful one does, in an order that it is given."""
    twin = DataLoader(
        given.dataset,
        batch_size=None if given.batch_sampler is None else 1,
        num_workers=given.num_workers,
        collate_fn=given.collate_fn,
        pin_memory=given.pin_memory,
        timeout=given.timeout,
        worker_init_fn=given.worker_init_fn,
        multiprocessing_context=given.multiprocessing_context,
        generator=given.generator,
        prefetch_factor=given.prefetch_factor,
    )
    return fed_copy(twin)


def walk_rest(
    reader: tuple[DataLoader[Any], Feed],
    shared: SharedOrder,
    origins: Sequence[Origin],
    epoch: Epoch,
    at: int,
    wanted: Wanted,
    until: int | None,
) -> Numbered:
    """The batches of an epoch whose rest was divided anew."""
    cut = epoch["cut"]
    end = cut["number"] + shared.share.rest_size(cut["done"])
    end = end if until is None else min(end, until)
    if at >= end:
        return at
    order = shared.order(epoch["start"], origins, Share(**cut["of"]))
    asked_for: deque[int] = deque()

    def feed() -> Generator[Any, None, None]:
        for number, indices in enumerate(shared.lists(order, cut["done"]), cut["number"]):
            if number == end:
                return
            if number >= at and wanted(number):
                asked_for.append(number)
                yield indices

    twin, lists = reader
    lists.order = ordered = feed()
    try:
        with without_trace(True):
            batches = iter(twin)
        for batch in batches:
            number = asked_for.popleft()
            if wanted(number):
                yield number, batch
    finally:
        ordered.close()
    return end
