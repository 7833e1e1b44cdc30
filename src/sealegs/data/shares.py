"""How the samples of an epoch are divided among ranks, and the rest of an epoch divided among other ranks.

The place in the data is a count of samples over the order of an epoch, all ranks together: what they have read up to
their batch number n is the beginning of that order, however many they are. So any number of ranks can take the rest.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from typing import Any, Literal, NamedTuple, Protocol, TypedDict, runtime_checkable

import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from sealegs.batching.batch_sampler import StratifiedBatchSampler
from sealegs.data.sampler_state import Origin, as_at


@runtime_checkable
class GlobalOrder(Protocol):
    """What a sampler of one's own says, so that its epochs can be divided among another number of ranks.

    Rank r reads ``global_order()[r::num_replicas]``, as under torch's ``DistributedSampler``.
    """

    num_replicas: int
    rank: int

    def global_order(self) -> Sequence[int]:
        """The samples of the present epoch, of all ranks, in their order."""


@dataclass(frozen=True, slots=True)
class Share:
    """How a loader divides the order of an epoch."""

    ranks: int
    rank: int
    rows: int
    """Samples of a batch of one rank."""
    samples: int
    """Samples in the order of an epoch, of all ranks."""
    layout: Literal["strided", "blocks"] = "strided"
    """Whether rank r reads every so manieth sample, or each batch is a block of the order."""
    step_rows: int = 0
    """Samples of an optimizer step of all ranks, where the order depends on it."""
    pads: bool = True
    """Whether samples are used twice so that all ranks have as many; else the last ones are left out."""
    drops: bool = False
    """Whether the last batch is left out where it is not full."""
    order: str = ""
    """What the order is drawn from besides the number of the epoch, where it is known."""

    @property
    def rows_of_all(self) -> int:
        """Samples of a batch of all ranks."""
        return self.rows * self.ranks

    def is_as(self, other: "Share") -> bool:
        """Whether a batch number means the same samples in both, of whichever rank."""
        same = ("ranks", "rows", "samples", "layout", "step_rows", "pads", "drops")
        return all(getattr(self, name) == getattr(other, name) for name in same)

    def done(self, batches: int) -> int:
        """How many samples all ranks have read after so many batches of an epoch.

        >>> Share(ranks=2, rank=0, rows=4, samples=21).done(2), Share(2, 0, 4, 21).done(3)
        (16, 21)
        """
        if self.layout == "strided":
            return min(batches * self.rows_of_all, self.samples)
        whole, left = divmod(self.samples, self.step_rows)
        beyond = batches - whole * (self.step_rows // self.rows_of_all)
        if beyond <= 0:
            return batches * self.rows_of_all
        of_each = left // (self.step_rows // self.rows)  # of the last step, which has fewer
        return whole * self.step_rows + beyond * of_each * self.ranks

    def first_batch(self, order: Sequence[int]) -> list[int] | None:
        """The first batch of its rank in a whole epoch; None where there is none."""
        if self.layout == "strided":
            of_rank = -(-len(order) // self.ranks) if self.pads else len(order) // self.ranks
            count = min(of_rank, self.rows)
            first = list(islice(cycle(order), self.rank, self.rank + count * self.ranks, self.ranks))
            return first if first and (count == self.rows or not self.drops) else None
        of_each = min(self.rows, self.samples // (self.step_rows // self.rows))
        return list(order[self.rank * of_each : (self.rank + 1) * of_each])

    def rest(self, order: Sequence[int], done: int) -> "Rest":
        """What comes after so many samples, for each rank as many; see ``rest_size`` for how much that is."""
        left = list(order[done:])
        uneven = len(left) % self.ranks
        twice = list(islice(cycle(order), self.ranks - uneven)) if uneven and self.pads else []
        dropped = [] if self.pads or not uneven else left[-uneven:]
        shared = [*left, *twice] if self.pads else left[: len(left) - uneven]
        partial = len(shared) // self.ranks % self.rows
        if self.drops and partial:
            cut = len(shared) - partial * self.ranks
            dropped, shared = [*shared[cut:], *dropped], shared[:cut]
            dropped, twice = [one for one in dropped if one not in twice], []
        mine = shared[self.rank :: self.ranks]
        lists = [mine[first : first + self.rows] for first in range(0, len(mine), self.rows)]
        return Rest(lists, twice, dropped)

    def rest_size(self, done: int) -> int:
        """Batches of a rank in the rest.

        >>> share = Share(ranks=2, rank=0, rows=4, samples=21)
        >>> share.rest_size(0), share.rest_size(16), len(share.rest(range(21), 16).lists)
        (3, 1, 1)
        """
        left = self.samples - done
        of_each = -(-left // self.ranks) if self.pads else left // self.ranks
        return of_each // self.rows if self.drops else -(-of_each // self.rows)

    def uneven(self, batches: int) -> tuple[int, int]:
        """How many samples are used twice in an epoch of so many batches, and how many are left out.

        >>> Share(ranks=2, rank=0, rows=4, samples=21).uneven(3), Share(2, 0, 4, 21, drops=True).uneven(2)
        ((1, 0), (0, 5))
        """
        if self.layout == "blocks":
            return 0, self.samples - self.done(batches)
        uneven = self.samples % self.ranks
        twice = self.ranks - uneven if uneven and self.pads else 0
        read = (self.samples + twice) // self.ranks
        if self.drops:
            read -= read % self.rows
        left_out = max(self.samples - read * self.ranks, 0)
        return (0 if left_out else twice), left_out

    def to_plain(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


class Rest(NamedTuple):
    """The rest of an epoch, as a rank reads it."""

    lists: list[list[int]]
    """Its batches, as indices."""
    twice: list[int]
    """Samples that come a second time in this epoch."""
    dropped: list[int]
    """Samples that do not come in this epoch."""


class Cut(TypedDict):
    """Where the rest of an epoch was divided anew."""

    number: int
    """The first batch after it."""
    done: int
    """Samples before it, of all ranks."""
    of: dict[str, Any]
    """How the epoch was divided when it began, and its first batch drawn."""


class SharedOrder:
    """The order of a loader's epochs, of all ranks, and the share of it that this rank reads."""

    def __init__(self, share: Share, draw: Callable[[int], Sequence[int]], *, is_batched: bool = True) -> None:
        """``draw`` gives the order of the present epoch, where a step has so many samples."""
        self.share = share
        self._draw = draw
        self._is_batched = is_batched

    def order(self, start: Mapping[str, Any], origins: Sequence[Origin], of: Share) -> Sequence[int]:
        """The order of the epoch that began so, when it was divided so."""
        with as_at(start, origins):
            return self._draw(of.step_rows)

    def lists(self, order: Sequence[int], done: int) -> Iterator[Any]:
        """What a sampler would give for the rest."""
        lists = self.share.rest(order, done).lists
        return iter(lists if self._is_batched else [one for each in lists for one in each])


def shared_order(given: Any) -> SharedOrder | None:
    """The order that a loader shares with those of other ranks; None where it does not say."""
    if not isinstance(given, DataLoader) or isinstance(given.dataset, IterableDataset):
        return None
    outer: Any = given.batch_sampler
    if isinstance(outer, StratifiedBatchSampler):
        return _stratified(outer)
    is_batched = outer is not None
    if is_batched and not (isinstance(outer, BatchSampler) and _is_library(outer)):
        return None
    sampler: Any = outer.sampler if is_batched else given.sampler
    draw: Callable[[int], Sequence[int]]
    drawn_from = ""
    if isinstance(sampler, DistributedSampler) and _is_library(sampler):
        draw = lambda _: _order_of_all(sampler)  # noqa: E731
        samples = len(sampler.dataset)  # type: ignore[arg-type]
        drawn_from = f"shuffled by seed {sampler.seed}" if sampler.shuffle else "as it is"
    elif isinstance(sampler, GlobalOrder):
        draw = lambda _: sampler.global_order()  # noqa: E731
        samples = len(sampler.global_order())
    else:
        return None
    share = Share(
        ranks=sampler.num_replicas,
        rank=sampler.rank,
        rows=outer.batch_size if is_batched else 1,
        samples=samples,
        pads=not getattr(sampler, "drop_last", False),
        drops=bool(outer.drop_last) if is_batched else False,
        order=drawn_from,
    )
    return SharedOrder(share, draw, is_batched=is_batched)


def _stratified(sampler: StratifiedBatchSampler) -> SharedOrder:
    share = Share(
        ranks=sampler.world_size,
        rank=sampler.rank,
        rows=sampler.batch_size,
        samples=sampler.rows,
        layout="blocks",
        step_rows=sampler.step_rows,
        pads=False,
        drops=sampler.drop_last,
        order=f"stratified by seed {sampler.seed}",
    )
    return SharedOrder(share, lambda step_rows: sampler.order_in_steps(step_rows).tolist())


def _order_of_all(sampler: DistributedSampler[Any]) -> list[int]:
    twin: DistributedSampler[Any] = DistributedSampler(
        sampler.dataset, num_replicas=1, rank=0, shuffle=sampler.shuffle, seed=sampler.seed, drop_last=False
    )
    twin.set_epoch(sampler.epoch)
    return list(twin)


def _is_library(thing: object) -> bool:
    """Whether it is torch's or torchdata's own: another one may divide its order in another way."""
    return type(thing).__module__.startswith(("torch.", "torchdata."))


def rows_of_all(given: Any) -> int | None:
    """Samples of a batch of all ranks, as a loader of one's own says it."""
    rows = getattr(given, "global_batch", None)
    return rows if isinstance(rows, int) and not isinstance(rows, bool) and rows > 0 else None


def world_size() -> int:
    """How many ranks there are."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
