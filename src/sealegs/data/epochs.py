"""What all kinds of loaders speak of: an epoch that can be gone through again, and what was changed about the data."""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NotRequired, Protocol, TypeAlias, TypedDict

import torch
from torch.utils.data import IterableDataset


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
