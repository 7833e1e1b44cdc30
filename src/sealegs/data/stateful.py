"""A loader that says where it is in, numbered batches out: torchdata's, the lab's stream, the user's own."""

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, NotRequired, Protocol, TypeAlias, TypedDict

import torch
from torch.utils.data import IterableDataset

from sealegs.data.sampler_state import as_at, drawn_from, own_origins, read, samplers_of
from sealegs.state.serialization import live, plain


class Epoch(TypedDict):
    """What an epoch is gone through again from, as JSON values."""

    number: int
    first: int
    """The number of its first batch, over all epochs."""
    is_after_end: bool
    """Whether the epoch before it had been gone through; else the loop had left that."""
    start: NotRequired[dict[str, Any]]
    """What its order was drawn from; since it was begun."""
    as_then: NotRequired[dict[str, Any]]
    """The start that it had on a line that was given up: begun anew, it draws as a new one does, and has that order."""
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

NOTHING: Any = object()
"""What comes after the last batch."""


@dataclass(slots=True)
class DataChanges:
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


def length_of(given: Any) -> int | None:
    """How many batches it has, where it says so."""
    if isinstance(getattr(given, "dataset", None), IterableDataset):
        return None  # torch takes having been asked for a promise, and warns when it is broken
    try:
        return len(given)
    except (TypeError, NotImplementedError):
        return None


def without_trace(is_begun: bool) -> AbstractContextManager[None]:
    """Whenever a loader begins it draws a seed for its workers: of the numbers of the run, only for a new epoch."""
    return torch.random.fork_rng(devices=[]) if is_begun else nullcontext()


class StatefulLoader:
    """A loader that says where it is and goes there: torchdata's, the lab's stream, the user's own.

    A new epoch begins with ``iter``, after the end of the one before; the same holds when that is gone through again.
    """

    def __init__(self, given: Any, *, must_tell: bool, defers: bool, changes: DataChanges) -> None:
        self._given = given
        self._must_tell = must_tell
        self._defers = defers
        self._changes = changes
        self._origins = own_origins(given)
        self._is_loaded = False
        """Whether no batch has come since a state was loaded."""
        self._has_moved = False
        """Whether a batch has come, or a state was loaded: else the loader is where the user has brought it."""
        self.identity = {"kind": "stateful", "length": length_of(given), "workers": getattr(given, "num_workers", None)}

    def state(self) -> Any:
        """Where it is, as JSON values."""
        with without_trace(True):  # torchdata's loader may begin, to find out
            return plain(self._given.state_dict(), f"loader={type(self._given).__name__}")

    def walk(self, epoch: Epoch, at: int, wanted: Wanted, until: int | None = None, state: Any = None) -> Numbered:
        """With a mark for each range that is left out, where it may be asked for again."""
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
                length: Any = self.identity["length"]
                if length is not None and at - epoch["first"] < length:  # left before its end: the next begins anew
                    with without_trace(True):
                        iter(self._given)
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
        """An iterator over an epoch from a state, or from the start; what it began from is known after a batch.

        ``lent`` is to be closed then.
        """
        is_new = "start" not in epoch
        if state is not None and is_new:
            self._load(state)
        if self._is_loaded:
            self.state()  # else torchdata's loader takes that up when it begins, and nobody knows what from
        lent.enter_context(as_at(epoch.get("start", epoch.pop("as_then", {})), self._origins))
        if state is not None and not is_new:
            self._load(state)
        elif self._has_moved:
            self._forget_last_epoch()
        before = read(self._origins)
        with without_trace(not is_new):
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
