"""A ``batch_sampler`` for any torch DataLoader, which spreads rows with rare tokens over batches.

It needs no torch: a DataLoader takes anything that gives lists of numbers and has a length.
"""

import hashlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from sealegs.batching.permutation import shuffled
from sealegs.batching.stratified import Ints, Meetings, RareRows, meetings, spread
from sealegs.errors import ConfigError

_SHUFFLED_AT_ONCE = 1 << 20  # the arithmetic takes ten times the memory of its result


class StratifiedBatchSampler:
    """Shuffled batches in which no optimizer step has a rare token in two rows, as near as the rows allow.

        loader = DataLoader(dataset, batch_sampler=sealegs.StratifiedBatchSampler(sealegs.rare_rows(tokens), 32))

    Every epoch has another order, drawn from ``seed`` and the number of the epoch alone: the same on every rank, and
    after a resume. The promise is about all rows of a step: of every rank and every accumulated micro-batch.
    """

    def __init__(
        self,
        rare: RareRows,
        batch_size: int,
        *,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        accumulation: int = 1,
        drop_last: bool = False,
    ) -> None:
        """``batch_size`` rows per batch and rank, ``accumulation`` batches per step. The remaining rows of an epoch are
        shared out evenly, and less than one per batch is left out; with ``drop_last`` all of them are."""
        for name, value in (("batch_size", batch_size), ("world_size", world_size), ("accumulation", accumulation)):
            if value < 1:
                raise ConfigError(f"{name}={value}: at least 1")
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank={rank}: from 0 to world_size - 1, which is {world_size - 1}")
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.epoch = 0
        self.rank = rank
        self.world_size = world_size
        self._rare = rare
        self.seed = seed
        self._parts = world_size * accumulation  # batches of a step, in the order of its micro-batches
        self._start = 0
        self._place = (0, 0)  # epoch and number of the next batch
        self._walk_of: Callable[[], object] = lambda: None
        self._drawn: tuple[int, Ints] | None = None
        if not len(self):
            raise ConfigError(f"batch_size={batch_size}: {rare.count} rows are too few for a step of {self.step_rows}")

    @property
    def step_rows(self) -> int:
        """Rows of an optimizer step, of all ranks together."""
        return self.batch_size * self._parts

    @property
    def rows(self) -> int:
        """Rows of an epoch, before any are left out."""
        return self._rare.count

    def order_in_steps(self, step_rows: int) -> Ints:
        """The rows of this epoch, as a sampler whose steps have so many rows orders them."""
        if step_rows == self.step_rows:
            return self.order()
        return spread(self.shuffled(), self._rare, step_rows, seed=self._key())

    def order(self) -> Ints:
        """The rows of this epoch for all ranks, ``step_rows`` to a step."""
        if self._drawn is None or self._drawn[0] != self.epoch:
            self._drawn = (self.epoch, spread(self.shuffled(), self._rare, self.step_rows, seed=self._key()))
        return self._drawn[1]

    def shuffled(self) -> Ints:
        """The shuffled rows, before rows moved apart."""
        order = np.empty(self._rare.count, np.int64)
        for first in range(0, len(order), _SHUFFLED_AT_ONCE):
            places = np.arange(first, min(first + _SHUFFLED_AT_ONCE, len(order)))
            order[places] = shuffled(places, len(order), self._key())
        return order

    def unmet(self) -> Meetings:
        """The steps of this epoch that still have a rare token in two or more rows."""
        return meetings(self.order(), self._rare, self.step_rows)

    def set_epoch(self, epoch: int) -> None:
        """Use the order of this epoch. Without a call, the next epoch follows when one has ended.

        An iteration that is under way stays in its epoch, and so does the position in ``state_dict`` until the next
        begins.
        """
        if epoch == self.epoch:
            return
        self.epoch, self._start = epoch, 0
        if self._walk_of() is None:
            self._place = (epoch, 0)

    def __len__(self) -> int:
        """Batches of an epoch, of one rank."""
        steps, left = divmod(self._rare.count, self.step_rows)
        more = left // self._parts > 0 and not self.drop_last
        return (steps + more) * (self._parts // self.world_size)

    def __iter__(self) -> Iterator[list[int]]:
        """The batches of this epoch for this rank: from the loaded position, or from the beginning."""
        start, self._start = self._start, 0
        self._place = (self.epoch, start)
        walk = self._walk(self.epoch, self.order(), start)
        self._walk_of = weakref.ref(walk)  # gone when its loop is left, as by a break
        return walk

    def state_dict(self) -> dict[str, int]:
        """The position: the epoch, and the rows of all ranks that it has given. A loader's workers read ahead of the
        training: torchdata's StatefulDataLoader and ``guard.batches`` know by how much."""
        epoch, number = self._place
        return {"epoch": epoch, "rows_done": number * self.batch_size * self.world_size, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position, also with another number of ranks, as long as a step has as many rows."""
        for name, value in self._identity().items():
            if state[name] != value:
                raise ConfigError(f"{name}={value}: the place is in an order with {name}={state[name]}; give that")
        self.epoch = int(state["epoch"])
        self._start = int(state["rows_done"]) // (self.batch_size * self.world_size)
        self._place = (self.epoch, self._start)

    def _identity(self) -> dict[str, int]:
        return {"rows": self._rare.count, "step_rows": self.step_rows, "seed": self.seed}

    def _walk(self, epoch: int, order: Ints, start: int) -> Iterator[list[int]]:
        for number in range(start, len(self)):
            self._place = (epoch, number + 1)
            yield self._batch(order, number)
        self.epoch += self.epoch == epoch
        self._place, self._walk_of = (self.epoch, 0), lambda: None

    def _batch(self, order: Ints, number: int) -> list[int]:
        step, micro = divmod(number, self._parts // self.world_size)
        rows = order[step * self.step_rows : (step + 1) * self.step_rows]
        share = len(rows) // self._parts
        part = micro * self.world_size + self.rank
        batch: list[int] = rows[part * share : (part + 1) * share].tolist()
        return batch

    def _key(self) -> int:
        text = f"{self.seed} {self.epoch}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
